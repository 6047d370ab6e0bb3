"""What a running engine refuses, what it keeps, and what it comes back from; over a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file

from rollout_engine.v1 import rollout_pb2 as pb
from tests.engines import RunningEngine, serve
from tests.tiny import load_reference, make_tiny
from trainers_adapters import (
    AdoptedArena,
    ModuleSource,
    PushError,
    RolloutClient,
    RollsyncError,
    push_weights,
)
from weight_updater.checksum import checksum
from weight_updater.requests import BeginUpdate
from weight_updater.requests import Path as Way

PROMPT = [5, 9, 77, 31, 8, 120, 64, 3] * 5
CONTEXT = 512


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pushes")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def engine(model_dir, work_dir) -> Iterator[RunningEngine]:
    flags = ["--weights-root", str(work_dir), "--num-pages", "64", "--lease-seconds", "20"]
    with serve(model_dir, *flags, token="a-long-secret") as running:
        yield running


@pytest.fixture
def trainer(model_dir):
    return load_reference(model_dir)


def train(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def push(model, engine: RunningEngine, **options):
    return push_weights(ModuleSource(model), engine.weights, **options)


def assert_live(engine: RunningEngine, model) -> None:
    assert engine.weights.checksums().by_name == {n: checksum(t) for n, t in ModuleSource(model)}


def reference_tokens(model, num_tokens: int) -> list[int]:
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


# ---------------------------------------------------------------- bad input

BAD_REQUESTS = {
    "empty prompt": ({"prompt": []}, "EMPTY_PROMPT"),
    "over the context": ({"prompt": [1] * (CONTEXT + 1)}, "PROMPT_TOO_LONG"),
    "at the context, and a token more": ({"prompt": [1] * CONTEXT, "max_tokens": 1}, "PROMPT_TOO_LONG"),
    "negative max_tokens": ({"prompt": [1], "max_tokens": -1}, "INVALID_REQUEST"),
    "token out of range": ({"prompt": [128]}, "TOKEN_OUT_OF_RANGE"),
    "top_p 0": ({"prompt": [1], "top_p": 0.0}, "INVALID_REQUEST"),
    "temperature NaN": ({"prompt": [1], "temperature": float("nan")}, "INVALID_REQUEST"),
    "text without a tokenizer": ({"prompt": "hello"}, "NO_TOKENIZER"),
    "a version to come": ({"prompt": [1], "min_version": 1 << 40}, "VERSION_TOO_OLD"),
}


@pytest.mark.case("B143")
@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_has_its_own_reason_and_the_next_is_answered(name, engine):
    arguments, reason = BAD_REQUESTS[name]
    with pytest.raises(RollsyncError) as refused:
        engine.rollout.generate(**({"max_tokens": 4} | arguments))
    assert refused.value.reason == reason
    assert len(engine.greedy(PROMPT, ignore_eos=True).token_ids) == 8


@pytest.mark.case("B144")
def test_no_token_at_all_and_a_prompt_that_fills_the_context(engine):
    assert engine.greedy([1] * CONTEXT, 0).finish_reason == "length"
    (last,) = engine.rollout.generate([1] * (CONTEXT - 1), max_tokens=1, temperature=0.0, ignore_eos=True)
    assert (len(last.token_ids), last.finish_reason) == (1, "length")


@pytest.mark.case("B051")
def test_a_wrong_token_and_a_message_above_the_limit(engine):
    with RolloutClient(engine.address, token="guessed") as stranger:
        with pytest.raises(RollsyncError) as refused:
            stranger.info()
        assert refused.value.reason == "UNAUTHENTICATED"
    channel = grpc.insecure_channel(engine.address, options=[("grpc.max_send_message_length", -1)])
    from rollout_engine.v1.rollout_pb2_grpc import RolloutStub

    request = pb.GenerateRequest(text="x" * (5 << 20))
    with channel, pytest.raises(grpc.RpcError) as large:
        list(RolloutStub(channel).Generate(request, metadata=[("authorization", "Bearer a-long-secret")]))
    assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(engine.greedy(PROMPT, ignore_eos=True).token_ids) == 8


def test_an_unknown_model_path_ends_the_command(tmp_path):
    command = [sys.executable, "-m", "rollout_engine.cli", "serve", "--model", str(tmp_path / "none")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert str(tmp_path / "none") in ended.stderr


# ---------------------------------------------------------------- files


@pytest.mark.case("B039")
@pytest.mark.parametrize("cut", [1, 1000])
def test_a_truncated_file_is_refused(cut, engine, trainer, work_dir):
    before = engine.weights.checksums()
    trainer.save_pretrained(work_dir / "cut")
    file = work_dir / "cut" / "model.safetensors"
    os.truncate(file, file.stat().st_size - cut)
    begin = BeginUpdate(path=Way.DISK, directory=str(work_dir / "cut"))
    with pytest.raises(RollsyncError) as refused:
        engine.weights.update_from_disk(begin, str(work_dir / "cut"))
    assert refused.value.reason == "FILE_CORRUPT"
    assert "model.safetensors" in refused.value.message
    assert engine.weights.checksums() == before


@pytest.mark.case("B040")
@pytest.mark.parametrize("with_checksums", [True, False])
def test_a_flipped_bit_shows_where_the_file_carries_checksums(with_checksums, engine, trainer, work_dir):
    from weight_updater.safetensors_io import save_weights

    before = engine.weights.checksums()
    directory = work_dir / f"flipped-{with_checksums}"
    save_weights(str(directory), ModuleSource(trainer), checksums=with_checksums)
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    begin = BeginUpdate(path=Way.DISK, directory=str(directory))
    if with_checksums:
        with pytest.raises(RollsyncError) as refused:
            engine.weights.update_from_disk(begin, str(directory))
        assert refused.value.reason == "CHECKSUM_MISMATCH"
        assert engine.weights.checksums() == before
    else:
        reply = engine.weights.update_from_disk(begin, str(directory))
        assert (reply.state, reply.verified) == ("committed", False)
        live = engine.weights.checksums().by_name
        assert sum(live[n] != checksum(t) for n, t in ModuleSource(trainer)) == 1
        assert push(trainer, engine).num_changed == 1


@pytest.mark.case("B048")
@pytest.mark.parametrize("where", ["/etc", "{root}/../..", "attacker/repo", "~"])
def test_directories_outside_the_roots_are_forbidden(where, engine, work_dir):
    directory = where.format(root=work_dir)
    with pytest.raises(RollsyncError) as refused:
        engine.weights.update_from_disk(BeginUpdate(path=Way.DISK, directory=directory), directory)
    assert (refused.value.code, refused.value.reason) == ("PERMISSION_DENIED", "PATH_FORBIDDEN")


# ---------------------------------------------------------------- rollback


@pytest.mark.parametrize("inflight", ["wait", "abort", "keep", "recompute"])
def test_a_kept_version_comes_back_in_one_exchange(inflight, engine, model_dir):
    old, new = load_reference(model_dir), load_reference(model_dir)
    train(new, 3)
    first = push(old, engine).version
    tokens = engine.greedy(PROMPT, ignore_eos=True).token_ids
    before = engine.rollout.info()
    kept = push(new, engine, keep_previous=True, inflight=inflight)
    assert engine.greedy(PROMPT, ignore_eos=True).weight_versions == [first + 1] * 8
    back = engine.weights.rollback(inflight=inflight)
    after = engine.rollout.info()
    assert (back.state, back.version, back.previous_version) == ("rolled_back", first, kept.version)
    assert after.state.commit_sequence == before.state.commit_sequence + 2
    assert after.weights_address == before.weights_address
    assert_live(engine, old)
    again = engine.greedy(PROMPT, ignore_eos=True)
    assert (again.token_ids, again.weight_versions) == (tokens, [first] * 8)
    assert again.num_cached_tokens == 0, "the commit sequence moved on, so old pages never match"
    with pytest.raises(RollsyncError) as nothing:
        engine.weights.rollback()
    assert nothing.value.reason == "NO_PREVIOUS"
    with pytest.raises(PushError) as stale:
        push(new, engine, version=first + 1)
    assert stale.value.reason == "STALE_VERSION"
    assert push(new, engine).version == first + 2


# ---------------------------------------------------------------- leases, repeats, pauses, sleep


@pytest.mark.case("B066")
def test_a_lease_that_runs_out_refuses_and_the_next_update_works(engine, trainer):
    version = engine.rollout.info().weight_version
    manifest = ModuleSource(trainer).manifest()
    begun = engine.weights.begin(BeginUpdate(path=Way.TENSOR, manifest=manifest, lease_s=0.3))
    deadline = time.monotonic() + 10
    while engine.rollout.info().state.open_update_id and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(RollsyncError) as ended:
        engine.weights.commit(begun.update_id)
    assert ended.value.reason == "UNKNOWN_UPDATE"
    assert "lease" in ended.value.message
    assert push(trainer, engine).version == version + 1


@pytest.mark.case("B124")
def test_a_repeated_commit_answers_the_same_and_counts_once(engine, trainer):
    source = ModuleSource(trainer)
    begin = BeginUpdate(path=Way.TENSOR, update_id="once-only", manifest=source.manifest())
    begun = engine.weights.begin(begin)
    assert engine.weights.begin(begin) == begun
    chunks = [
        (i, 0, t.contiguous().view(-1).view(torch.uint8).numpy().data) for i, (_, t) in enumerate(source)
    ]
    engine.weights.update_from_tensor(begun.update_id, chunks)
    first = engine.weights.commit(begun.update_id)
    assert engine.weights.commit(begun.update_id) == first
    assert engine.rollout.info().weight_version == first.version == begun.next_version


def test_pause_holds_requests_and_refuses_an_endless_wait(engine, trainer):
    assert engine.rollout.pause("keep") == 0
    assert engine.rollout.info().state.status == "paused"
    stream = engine.rollout.generate_stream(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True)
    with pytest.raises(PushError) as endless:
        push(trainer, engine, inflight="wait")
    assert endless.value.reason == "PAUSED_WAIT"
    train(trainer, 8)
    version = push(trainer, engine, inflight="keep").version
    engine.rollout.resume()
    assert [v for part in stream for v in part.weight_versions] == [version] * 4


@pytest.mark.case("B110")
@pytest.mark.case("B111")
def test_sleep_discards_and_only_a_full_update_wakes(engine, model_dir):
    for cycle in range(3):
        trainer = load_reference(model_dir)
        train(trainer, 20 + cycle)
        engine.rollout.release_memory()
        with pytest.raises(PushError) as asleep:
            push(trainer, engine)
        assert (asleep.value.code, asleep.value.reason) == ("FAILED_PRECONDITION", "ASLEEP")
        with pytest.raises(RollsyncError) as refused:
            engine.greedy(PROMPT)
        assert refused.value.reason == "ASLEEP"
        assert engine.rollout.resume_memory().needs_update is True
        with pytest.raises(RollsyncError) as empty:
            engine.greedy(PROMPT)
        assert empty.value.reason == "NOT_SERVING"
        push(trainer, engine)
        assert engine.greedy(PROMPT, ignore_eos=True).token_ids == reference_tokens(trainer, 8)


def test_partial_updates_change_what_they_name(engine, model_dir):
    trainer = load_reference(model_dir)
    push(trainer, engine)
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        dict(trainer.named_parameters())[name].mul_(1.5)

    class One:
        def __iter__(self):
            return ((n, t) for n, t in ModuleSource(trainer) if n == name)

        def manifest(self, *, checksums=True):
            full = ModuleSource(trainer).manifest(checksums=checksums)
            return type(full)(tuple(spec for spec in full.tensors if spec.name == name))

    with pytest.raises(PushError):
        push_weights(One(), engine.weights)
    report = push_weights(One(), engine.weights, partial=True)
    assert report.num_changed == 1
    assert_live(engine, trainer)


# ---------------------------------------------------------------- adopt


def test_adopt_shares_memory_and_gives_it_back(engine, trainer):
    home = engine.rollout.info().weights_address
    with AdoptedArena(engine.weights, trainer) as arena:
        with arena.update():
            train(trainer, 31)
        adopted = engine.rollout.info()
        assert adopted.weights_address != home
        assert arena.report.extra_bytes == 0
        for seed in (32, 33):
            with arena.update():
                assert engine.rollout.info().state.paused_by == "update"
                train(trainer, seed)
            assert_live(engine, trainer)
            assert engine.greedy(PROMPT, ignore_eos=True).token_ids == reference_tokens(trainer, 8)
        assert engine.rollout.info().weights_address == adopted.weights_address
        push(trainer, engine)
        assert engine.rollout.info().weights_address != adopted.weights_address
    assert_live(engine, trainer)


ADOPTER = """
import os, signal, sys
from pathlib import Path
from tests.tiny import load_reference
from trainers_adapters import AdoptedArena, WeightsClient
client = WeightsClient(sys.argv[1], token="a-long-secret")
arena = AdoptedArena(client, load_reference(Path(sys.argv[2])))
with arena.update():
    pass
print("adopted", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_death_of_an_adopted_trainer_is_not_serving(engine, model_dir, trainer):
    died = subprocess.run(
        [sys.executable, "-c", ADOPTER, engine.address, str(model_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (died.returncode, died.stdout) == (-signal.SIGKILL, "adopted\n"), died.stderr
    deadline = time.monotonic() + 2
    while engine.rollout.info().state.status == "serving" and time.monotonic() < deadline:
        time.sleep(0.02)
    state = engine.rollout.info().state
    assert state.status == "not_serving"
    assert "gone" in state.not_serving_reason
    push(trainer, engine)
    assert engine.greedy(PROMPT, ignore_eos=True).token_ids == reference_tokens(trainer, 8)


def test_the_reference_file_is_what_was_loaded(model_dir, trainer):
    """The helper of these tests compares with the very file that the engine serves."""
    saved = load_file(model_dir / "model.safetensors")
    assert all(torch.equal(saved[n], t) for n, t in ModuleSource(trainer))


# ---------------------------------------------------------------- the end


def test_a_killed_engine_process_is_reported(model_dir):
    with serve(model_dir, "--num-pages", "32") as running:
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(running.pid)], capture_output=True, text=True, check=True
        )
        (child,) = [int(pid) for pid in children.stdout.split()]
        os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while running.rollout.info().state.status != "not_serving" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "SIGKILL" in running.rollout.info().state.not_serving_reason
        with pytest.raises(RollsyncError) as dead:
            running.greedy(PROMPT)
        assert dead.value.reason == "ENGINE_DEAD"
