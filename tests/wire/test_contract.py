"""The contract of an update, over real processes: four paths, three stagings, one set of promises."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engines import RunningEngine, serve
from tests.preloaded import interpreter
from tests.tiny import load_reference, make_tiny
from trainers_adapters.errors import PushError, RollsyncError
from trainers_adapters.push import push_weights
from trainers_adapters.send_disk import DiskDirectory
from trainers_adapters.send_distributed import BroadcastGroup
from trainers_adapters.send_ipc import IpcArena
from trainers_adapters.send_tensor import TensorSegment, TensorStream
from trainers_adapters.sending import Sender
from trainers_adapters.sources import ModuleSource
from weight_updater.checksum import checksum

PATHS = ["disk", "distributed", "tensor", "segment", "ipc"]
"""The four paths; `segment` is the tensor path through shared memory."""
STAGINGS = ["device", "host", "none"]
PROMPT = [5, 9, 77, 31, 8, 120, 64, 3] * 5
CONTEXT_LENGTH = 1280
NUM_TOKENS = 1000
"""Of a stream that is still under way when a push arrives, also on a busy machine."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(
        tmp_path_factory.mktemp("model") / "llama", "llama", tied=True, context_length=CONTEXT_LENGTH
    )


@pytest.fixture(scope="module")
def engine(model_dir, work_dir) -> Iterator[RunningEngine]:
    flags = ["--reserve-device-staging", "--weights-root", str(work_dir), "--num-pages", "512"]
    with serve(model_dir, *flags, forked=True) as running:
        yield running


@pytest.fixture(scope="module")
def senders(engine, work_dir) -> Iterator[dict[str, Sender]]:
    made: dict[str, Sender] = {
        "disk": DiskDirectory(work_dir / "disk"),
        "distributed": BroadcastGroup(bucket_bytes=8192, group_timeout_s=60.0),
        "tensor": TensorStream(chunk_bytes=4096),
        "segment": TensorSegment(),
        "ipc": IpcArena(),
    }
    yield made
    for sender in made.values():
        sender.close()


@pytest.fixture(scope="module")
def trainer(model_dir):
    return load_reference(model_dir)


def train(model, seed: int) -> None:
    """New weights, near enough to the old ones that the model still makes finite logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def reference_tokens(model, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of the trainer's own model."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def trainer_checksums(model) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in ModuleSource(model)}


def assert_serves(engine: RunningEngine, model, version: int) -> None:
    """The engine has exactly the trainer's weights, and samples with them."""
    live = engine.weights.checksums()
    assert live.by_name == trainer_checksums(model)
    assert live.weight_version == version
    completion = engine.greedy(PROMPT, ignore_eos=True)
    assert completion.token_ids == reference_tokens(model, PROMPT, 8)
    assert completion.weight_versions == [version] * 8


_seeds = iter(range(1, 10_000))


@pytest.mark.case("B001")
@pytest.mark.case("B053")
@pytest.mark.case("B071")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("path", PATHS)
def test_an_update_is_bit_exact_in_place_and_labelled(path, staging, engine, senders, trainer):
    before = engine.rollout.info()
    engine.greedy(PROMPT)
    assert engine.greedy(PROMPT).num_cached_tokens == 32, "two whole pages of 16, under one version"
    train(trainer, next(_seeds))
    report = push_weights(ModuleSource(trainer), engine.weights, via=senders[path], staging=staging)
    (reply,) = report.replies.values()
    after = engine.rollout.info()
    assert report.version == before.weight_version + 1
    assert reply.previous_version == before.weight_version
    assert after.state.commit_sequence == before.state.commit_sequence + 1
    assert after.weights_address == before.weights_address, "slots are written in place"
    assert reply.num_tensors == before.num_weight_tensors == reply.num_changed
    assert reply.num_bytes == before.weight_bytes
    assert reply.staging == staging
    assert reply.verified
    assert reply.live_checksum == engine.weights.checksums().folded
    assert reply.floor_seconds > 0
    assert reply.seconds.pause > 0
    assert reply.graphs_reason
    fresh = engine.greedy(PROMPT)
    assert fresh.num_cached_tokens == 0, "pages of the old weights never match again"
    assert_serves(engine, trainer, report.version)
    name, tensor = next(iter(ModuleSource(trainer)))
    weight = engine.weights.get_weights(name)[name]
    assert torch.equal(weight.tensor(), tensor)


@pytest.mark.case("B062")
@pytest.mark.case("B069")
@pytest.mark.parametrize("inflight", ["wait", "abort", "keep", "recompute"])
@pytest.mark.parametrize(
    ("path", "staging"), [(p, "host") for p in PATHS] + [("tensor", "none"), ("ipc", "none")]
)
def test_sequences_in_flight_follow_the_policy(path, staging, inflight, engine, senders, trainer):
    old_version = engine.rollout.info().weight_version
    num_tokens = 600 if inflight == "wait" else NUM_TOKENS  # of which a push waits for every one
    name = f"{path} {staging} {inflight}"
    train(trainer, next(_seeds))  # the engine learns of it by the push
    stream = engine.rollout.generate_stream(
        PROMPT, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, request_id=name
    )
    parts = [next(stream)]
    report = push_weights(
        ModuleSource(trainer), engine.weights, via=senders[path], staging=staging, inflight=inflight
    )
    if inflight in ("keep", "recompute"):
        while sum(part.weight_versions.count(report.version) for part in parts) < 8:
            parts.append(next(stream))
        engine.rollout.abort(name)
    parts += list(stream)
    (reply,) = report.replies.values()
    tokens = [token for part in parts for token in part.token_ids]
    versions = [version for part in parts for version in part.weight_versions]
    finish = parts[-1].finish_reason
    switch = versions.count(old_version)
    assert versions == [old_version] * switch + [report.version] * (len(tokens) - switch)
    counts = (reply.num_aborted, reply.num_kept, reply.num_recomputed)
    if inflight == "wait":
        assert (finish, switch, counts) == ("length", num_tokens, (0, 0, 0))
        assert reply.seconds.wait > 0
    elif inflight == "abort":
        assert (finish, counts) == ("abort", (1, 0, 0))
        assert switch == len(tokens) < num_tokens
    else:
        assert finish == "abort"
        assert counts == ((0, 1, 0) if inflight == "keep" else (0, 0, 1))
        assert 0 < switch <= len(tokens) - 8
    if inflight == "recompute":
        following = reference_tokens(trainer, PROMPT + tokens[:switch], 8)
        assert tokens[switch : switch + 8] == following
    assert_serves(engine, trainer, report.version)


BAD_MANIFESTS = {
    "missing": (lambda named: named[:-1], "MANIFEST_MISMATCH"),
    "extra": (lambda named: [*named, ("model.layers.9.extra.weight", torch.ones(2))], "MANIFEST_MISMATCH"),
    "shape": (
        lambda named: [(n, t[:-1] if i == 3 else t) for i, (n, t) in enumerate(named)],
        "MANIFEST_MISMATCH",
    ),
    "broadcastable": (
        lambda named: [(n, t[:1] if i == 3 else t) for i, (n, t) in enumerate(named)],
        "MANIFEST_MISMATCH",
    ),
    "twice": (lambda named: [*named, (f"module.{named[0][0]}", named[0][1])], "MANIFEST_MISMATCH"),
    "nan": (
        lambda named: [(n, t * float("nan") if i == 3 else t) for i, (n, t) in enumerate(named)],
        "NONFINITE",
    ),
}


class ListSource:
    """A source of exactly these tensors."""

    def __init__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self._named = named

    def __iter__(self):
        return iter(self._named)

    def manifest(self, *, checksums: bool = True):
        from weight_updater.arena import DTYPE_NAMES
        from weight_updater.requests import Manifest, TensorSpec

        return Manifest(
            tuple(TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape), checksum(t)) for n, t in self._named)
        )


@pytest.mark.case("B018")
@pytest.mark.case("B027")
@pytest.mark.case("B142")
@pytest.mark.parametrize("fault", BAD_MANIFESTS)
@pytest.mark.parametrize("path", PATHS)
def test_what_does_not_fit_is_refused_and_nothing_changes(path, fault, engine, senders, trainer):
    before = engine.weights.checksums()
    spoil, reason = BAD_MANIFESTS[fault]
    named = spoil([(name, tensor.clone()) for name, tensor in ModuleSource(trainer)])
    if path == "disk" and fault == "twice":
        pytest.skip("one file cannot hold a cleaned name twice: the writer refuses it")
    with pytest.raises(PushError) as refused:
        push_weights(ListSource(named), engine.weights, via=senders[path], staging="host")
    assert refused.value.reason == reason
    after = engine.weights.checksums()
    assert (after.by_name, after.weight_version) == (before.by_name, before.weight_version)
    assert engine.rollout.info().state.status == "serving"
    assert engine.rollout.info().state.open_update_id == ""


def test_versions_only_grow_and_one_update_is_open_at_a_time(engine, trainer):
    from weight_updater.requests import BeginUpdate
    from weight_updater.requests import Path as Way

    live = engine.rollout.info().weight_version
    source = ModuleSource(trainer)
    with pytest.raises(PushError) as stale:
        push_weights(source, engine.weights, live)
    assert stale.value.reason == "STALE_VERSION"
    first = engine.weights.begin(BeginUpdate(path=Way.TENSOR, manifest=source.manifest()))
    with pytest.raises(PushError) as busy:
        push_weights(source, engine.weights)
    assert busy.value.reason == "UPDATE_IN_PROGRESS"
    assert engine.weights.abort(first.update_id) is True
    assert engine.weights.abort(first.update_id) is False
    assert push_weights(source, engine.weights, live + 7).version == live + 7
    assert engine.rollout.info().weight_version == live + 7


@pytest.mark.case("B063")
@pytest.mark.case("B084")
@pytest.mark.parametrize("staging", ["host", "none"])
@pytest.mark.parametrize("path", ["disk", "distributed", "tensor", "ipc"])
def test_a_sender_killed_half_way(path, staging, engine, senders, trainer, model_dir, work_dir):
    """Staged: the old weights serve on. Not staged: nothing is served until the next full update."""
    before = engine.weights.checksums()
    old_version = before.weight_version
    killed = subprocess.run(
        [
            interpreter(),
            "-m",
            "tests.wire.half_sender",
            engine.address,
            str(model_dir),
            path,
            staging,
            str(work_dir / "killed"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    assert killed.stdout.strip(), "the update was begun before the sender died"
    state = _wait_until_closed(engine)
    # A disk update is read whole before the sender dies, an ipc one without staging writes at commit only.
    if staging == "none" and path in ("disk", "distributed", "tensor"):
        assert state.status == "not_serving"
        with pytest.raises(RollsyncError) as refused:
            engine.greedy(PROMPT)
        assert refused.value.reason == "NOT_SERVING"
    else:
        assert state.status == "serving"
        assert engine.weights.checksums().by_name == before.by_name
        assert engine.greedy(PROMPT, ignore_eos=True).weight_versions == [old_version] * 8
    train(trainer, next(_seeds))
    report = push_weights(ModuleSource(trainer), engine.weights, via=senders[path], staging=staging)
    assert report.version == old_version + 1
    assert_serves(engine, trainer, report.version)


def _wait_until_closed(engine: RunningEngine):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = engine.rollout.info().state
        if not state.open_update_id:
            return state
        time.sleep(0.05)
    raise AssertionError("the update of a dead sender is still open")


def test_generation_goes_on_while_bytes_arrive(engine, trainer):
    """With staging, a slow sender costs the sequences in flight nothing."""
    source = ModuleSource(trainer)
    from weight_updater.requests import BeginUpdate
    from weight_updater.requests import Path as Way

    begun = engine.weights.begin(BeginUpdate(path=Way.TENSOR, manifest=source.manifest()))
    generated = threading.Event()

    def slowly():
        for index, (_, tensor) in enumerate(source):
            if index == 1:
                assert generated.wait(30), "generation stood still while bytes were arriving"
            yield index, 0, tensor.contiguous().view(-1).view(torch.uint8).numpy().data

    result = []
    receiver = threading.Thread(
        target=lambda: result.append(engine.weights.update_from_tensor(begun.update_id, slowly()))
    )
    receiver.start()
    assert engine.greedy(PROMPT, 32, ignore_eos=True).weight_versions == [begun.version] * 32
    generated.set()
    receiver.join(30)
    assert result[0].state == "received"
    assert engine.weights.commit(begun.update_id).version == begun.next_version


def test_the_reference_model_is_the_file_that_is_served(model_dir):
    """What these tests compare with is no model of its own."""
    saved = load_file(model_dir / "model.safetensors")
    reference = dict(ModuleSource(load_reference(model_dir)))
    assert all(torch.equal(saved[name], tensor) for name, tensor in reference.items())
    assert len(reference) > 10
