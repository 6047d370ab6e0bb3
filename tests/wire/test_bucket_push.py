"""Tensors of a generator, pushed bucket by bucket: what came is live and proved, or nothing is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.engines import RunningEngine, serve
from tests.tiny import load_reference
from trainers_adapters import buckets
from trainers_adapters.bucket_push import BucketPush
from trainers_adapters.buckets import Bucket, SharedMemory
from trainers_adapters.errors import PushError
from weight_updater.checksum import checksum, fold_by_name
from weight_updater.errors import Reason, UpdateRefused

BUCKET_BYTES = 40 << 10
"""Less than a tenth of the model, more than its largest tensor."""

Weights = dict[str, torch.Tensor]
NEXT = itertools.count(1)


@pytest.fixture(scope="module")
def engines(tiny_tied_dir) -> Iterator[list[RunningEngine]]:
    """Two of the same model, with a tied head."""
    flags = ["--num-pages", "64"]
    with serve(tiny_tied_dir, *flags, forked=True) as one, serve(tiny_tied_dir, *flags, forked=True) as two:
        yield [one, two]


@pytest.fixture
def push(request, engines) -> Iterator[BucketPush]:
    path = getattr(request, "param", "ipc")
    made = BucketPush([e.weights for e in engines], path=path, bucket_bytes=BUCKET_BYTES)
    yield made
    made.close()


@pytest.fixture
def weights(tiny_tied_dir) -> Weights:
    """New ones on each call, as state_dict gives them: the tied head too."""
    state = load_reference(tiny_tied_dir).state_dict()
    head, more = "lm_head.weight", 0.125 * next(NEXT)
    changed = {name: tensor + more for name, tensor in state.items() if name != head}
    return changed | {head: changed["model.embed_tokens.weight"]}


def offered(push: BucketPush, weights: Weights) -> None:
    """What a trainer does: one buffer, written anew for every tensor."""
    push.begin()
    buffer = torch.empty(max(tensor.numel() for tensor in weights.values()))
    for name, tensor in weights.items():
        lent = buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        if push.add(f"module.{name}", lent):
            push.send()
        buffer.zero_()
    push.prepare()


def live(engine: RunningEngine) -> dict[str, int]:
    return engine.weights.checksums().by_name


def sums(weights: Weights) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in weights.items() if name != "lm_head.weight"}


@pytest.mark.parametrize("push", ["ipc", "tensor"], indirect=True)
def test_what_came_is_live_everywhere_push_after_push(engines, push, weights, monkeypatch):
    given = []
    monkeypatch.setattr(push, "_give", lambda bucket, give=push._give: (given.append(bucket), give(bucket)))
    before = engines[0].weights.checksums().weight_version
    for number in (1, 2):
        weights = {name: tensor + number for name, tensor in weights.items()}
        offered(push, weights)
        assert all(live(engine) != sums(weights) for engine in engines)
        report = push.commit()
        assert report.version == before + number
        assert [live(engine) for engine in engines] == [sums(weights)] * 2
        assert {reply.live_checksum for reply in report.replies.values()} == {fold_by_name(sums(weights))}
    assert len(given) > 2 * 4
    assert len({id(bucket) for bucket in given}) == 2


def test_values_are_cast_to_the_slots_dtype(engines, push, weights):
    offered(push, {name: tensor.to(torch.bfloat16).double() for name, tensor in weights.items()})
    push.commit()
    rounded = {name: tensor.to(torch.bfloat16).float() for name, tensor in weights.items()}
    assert live(engines[0]) == sums(rounded)


def without(weights: Weights, name: str) -> Weights:
    return {key: tensor for key, tensor in weights.items() if key != name}


NORM, HEAD = "model.norm.weight", "lm_head.weight"
BAD = {
    "missing": (lambda w: without(w, NORM), "1 of the engine's 26 tensors did not come: model.norm.weight"),
    "unknown": (lambda w: w | {"model.nrm.weight": w[NORM]}, "the engine has no tensor model.nrm.weight"),
    "adapter": (lambda w: w | {"q.lora_A.weight": w[NORM]}, "lora_A.weight; merge adapters before"),
    "shape": (lambda w: w | {NORM: w[NORM][:3]}, r"has shape \(3,\), but the engine's has \(64,\)"),
    "tied": (lambda w: w | {HEAD: w[HEAD] + 1}, "ties lm_head.weight to model.embed_tokens.weight, but"),
    "nonfinite": (lambda w: w | {NORM: w[NORM] / 0}, "NONFINITE: .*model.norm.weight"),
}


@pytest.mark.parametrize("how", BAD)
def test_what_does_not_fit_is_refused_and_the_old_weights_live_on(engines, push, weights, how):
    spoil, said = BAD[how]
    before = [engine.weights.checksums() for engine in engines]
    with pytest.raises(PushError, match=said) as refused:
        offered(push, spoil(weights))
    push.abort()
    assert "nothing was committed" in str(refused.value)
    assert [engine.weights.checksums() for engine in engines] == before
    assert not any(engine.rollout.info().state.open_update_id for engine in engines)
    offered(push, weights)
    assert push.commit().version == before[0].weight_version + 1


def test_no_room_for_the_second_bucket_is_refused_and_the_next_push_has_two(
    engines, push, weights, monkeypatch
):
    made: list[SharedMemory] = []

    def make(size: int) -> SharedMemory:
        if len(made) == 1:
            raise UpdateRefused(Reason.NO_MEMORY, "shared memory is full")
        made.append(SharedMemory(size))
        return made[-1]

    monkeypatch.setattr(buckets, "SharedMemory", make)
    with pytest.raises(PushError, match=r"NO_MEMORY: .*full.*nothing was committed"):
        offered(push, weights)
    push.abort()
    assert made[0].data.numel() == 0, "the first one is given back"
    monkeypatch.undo()
    offered(push, weights)
    push.commit()
    assert live(engines[0]) == live(engines[1]) == sums(weights)


def test_a_tensor_that_comes_twice_is_refused(push, weights):
    push.begin()
    push.add(NORM, weights[NORM])
    with pytest.raises(PushError, match=r"model\.norm\.weight came twice"):
        push.add(NORM, weights[NORM])
    push.abort()


@pytest.mark.parametrize("push", ["ipc", "tensor"], indirect=True)
def test_bytes_that_change_on_the_way_are_refused(engines, push, weights, monkeypatch):
    before = [engine.weights.checksums() for engine in engines]
    seal = Bucket.sealed

    def then_a_bit_flips(bucket: Bucket) -> list[int]:
        values = seal(bucket)
        bucket.placed[0].view.view(-1).view(torch.uint8)[0] ^= 1
        return values

    monkeypatch.setattr(Bucket, "sealed", then_a_bit_flips)
    with pytest.raises(PushError, match=r"CHECKSUM_MISMATCH: .*what was sent .*nothing was committed"):
        offered(push, weights)
    push.abort()
    assert [engine.weights.checksums() for engine in engines] == before


def test_one_engine_that_cannot_keeps_all_from_it(engines, push, weights):
    before = live(engines[0])
    engines[1].rollout.release_memory(["weights"])
    with pytest.raises(PushError, match=f"BeginUpdate on {engines[1].address}: .*released"):
        offered(push, weights)
    push.abort()
    assert live(engines[0]) == before
    engines[1].rollout.resume_memory()
    offered(push, weights)
    push.commit()
    assert live(engines[0]) == live(engines[1]) == sums(weights)
