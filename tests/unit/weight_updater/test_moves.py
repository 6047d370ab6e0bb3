"""Tensors that are copied into an arena: how many copies that takes, and that the rest stays as it was."""

from __future__ import annotations

import pytest
import torch

from tests.unit.weight_updater.fake_gpu import FakeGpu, fake_gpu
from tests.unit.weight_updater.test_from_cuda import receive
from tests.unit.weight_updater.tiny_target import (
    GATE,
    SHAPES,
    K,
    Q,
    TinyTarget,
    begin,
    make_updater,
    raw,
    weights,
)
from weight_updater.checksum import checksum
from weight_updater.moves import joined
from weight_updater.requests import FromIpc, Path, RegionPlacement, Staging


def memory_like(target: TinyTarget, seed: int) -> torch.Tensor:
    """An arena's bytes with other weights in them, and something in its padding."""
    arena = target.arena
    memory = torch.full((arena.nbytes,), 0xAB, dtype=torch.uint8)
    for name, value in weights(seed).items():
        arena.slot_view(memory, name).copy_(value)
    return memory


def slot_bytes(target: TinyTarget, memory: torch.Tensor, name: str) -> torch.Tensor:
    place = target.arena.placements[name]
    return memory[place.offset : place.offset + target.arena.sizes[name]]


def test_what_lies_as_in_the_arena_is_one_copy() -> None:
    target = TinyTarget()
    memory = memory_like(target, 1)
    pairs = joined(target.arena, {name: slot_bytes(target, memory, name) for name in SHAPES}, target.buffer)
    assert [(to.data_ptr(), of.data_ptr(), to.numel()) for to, of in pairs] == [
        (target.buffer.data_ptr(), memory.data_ptr(), pairs[0][0].numel())
    ]
    last = max(target.arena.placements[name].offset + target.arena.sizes[name] for name in SHAPES)
    assert pairs[0][0].numel() == pairs[0][1].numel() == last


def test_a_slot_that_is_left_out_is_not_copied_over() -> None:
    target = TinyTarget()
    before, memory = target.values(), memory_like(target, 1)
    sources = {name: slot_bytes(target, memory, name) for name in SHAPES if name != K}
    pairs = joined(target.arena, sources, target.buffer)
    assert len(pairs) == 2
    for to, of in pairs:
        to.copy_(of)
    for name, value in weights(1).items():
        assert torch.equal(target.slot(name), before[name] if name == K else value), name


def test_tensors_that_are_neighbours_on_one_side_alone_are_copied_apart() -> None:
    target = TinyTarget()
    values = weights(1)
    swapped = torch.cat([raw(values[K]), raw(values[Q])])
    size = raw(values[K]).numel()
    pairs = joined(target.arena, {Q: swapped[size:], K: swapped[:size]}, target.buffer)
    assert [to.numel() for to, _ in pairs] == [raw(values[Q]).numel(), size]
    for to, of in pairs:
        to.copy_(of)
    assert torch.equal(target.slot(Q), values[Q])
    assert torch.equal(target.slot(K), values[K])


def test_equal_offsets_in_two_allocations_are_not_neighbours() -> None:
    target = TinyTarget()
    one, other = memory_like(target, 1), memory_like(target, 2)
    sources = {name: slot_bytes(target, other if name == GATE else one, name) for name in SHAPES}
    for to, of in joined(target.arena, sources, target.buffer):
        to.copy_(of)
    for name in SHAPES:
        assert torch.equal(target.slot(name), weights(2 if name == GATE else 1)[name]), name


@pytest.mark.parametrize("looking", [False, True])
def test_memory_in_the_layout_of_the_arena_is_staged_by_plain_copies_unless_somebody_looks(
    looking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_gpu(monkeypatch) as gpu:
        target = TinyTarget()
        updater = make_updater(target, device_staging=True)
        request = _whole_arena(gpu, target)
        fields = {"skip_checksums": True, "allow_nonfinite": not looking, "staging": Staging.DEVICE}
        update_id = begin(updater, weights(1), path=Path.IPC, **fields)
        old = target.values()
        receive(updater, request, update_id)
        assert all(torch.equal(target.slot(name), old[name]) for name in SHAPES)
        reply = updater.commit(update_id)
        assert gpu.launches == (["copy and scan"] if looking else [])
    assert reply.num_bytes == sum(value.nbytes for value in weights(1).values())
    for name, value in weights(1).items():
        assert torch.equal(target.slot(name), value), name


def _whole_arena(gpu: FakeGpu, target: TinyTarget) -> FromIpc:
    """Weights of seed 1 lent in one allocation that is laid out as the arena."""
    handle = gpu.allocate(1, target.arena.nbytes)
    memory = gpu.memory[handle]
    memory.copy_(memory_like(target, 1))
    region = gpu.region(handle, 0, memory.numel(), probe_bytes=8, probe_checksum=checksum(memory[:8]))
    placements = [
        RegionPlacement(index, 0, target.arena.placements[name].offset) for index, name in enumerate(SHAPES)
    ]
    return FromIpc("", cuda_regions=(region,), placements=tuple(placements))
