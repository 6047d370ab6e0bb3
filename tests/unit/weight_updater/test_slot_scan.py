"""Hashing many small slots together gives what hashing each gives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.unit.weight_updater.tiny_target import TinyTarget, begin, make_updater, push, send, weights, whole
from weight_updater.arena import Arena, SlotSpec, StorageSpec, WeightTarget
from weight_updater.checksum import SMALL_BYTES, checksum, finish, has_nonfinite, is_small
from weight_updater.errors import UpdateRefused
from weight_updater.plan import slot_nbytes
from weight_updater.slot_scan import slot_checksums
from weight_updater.small import scan_rows


def experts(dtype: torch.dtype) -> WeightTarget:
    """Runs of equal slots, slots of odd sizes, a large one, and an empty one."""
    shapes = [(16, 8)] * 300 + [(3, 5), (8, 8), (8, 8), (0, 4), (8, 8), (100, 200), (4, 4), (16, 8)]
    slots = [SlotSpec(f"s{i}", shape) for i, shape in enumerate(shapes)]
    storages = [
        StorageSpec("a", dtype, (sum(r * c for r, c in shapes[:200]),), tuple(slots[:200])),
        StorageSpec("b", dtype, (sum(r * c for r, c in shapes[200:]),), tuple(slots[200:])),
    ]
    parameters = {s.key: torch.nn.Parameter(torch.empty(s.shape, dtype=dtype)) for s in storages}
    target = WeightTarget(Arena(storages), parameters, torch.device("cpu"))
    for slot in slots:
        target.slot(slot.name).copy_(torch.randn(slot.shape))
    return target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_slots_hash_alike_together_and_alone(dtype: torch.dtype) -> None:
    target = experts(dtype)
    target.slot("s7")[3, 3] = float("inf")
    target.slot("s250")[0, 0] = float("nan")
    names = target.arena.slot_names
    expected = {name: checksum(target.slot(name)) for name in names}
    assert slot_checksums(target, names) == expected
    assert list(slot_checksums(target, names)) == names
    some = names[5:300:7]
    assert slot_checksums(target, some) == {name: expected[name] for name in some}
    small = [name for name in names if is_small(slot_nbytes(target.arena.placements[name]))]
    sizes = target.arena.sizes
    nonfinite = []
    for nbytes in {sizes[name] for name in small}:
        members = [name for name in small if sizes[name] == nbytes]
        offsets = np.array([target.arena.placements[name].offset for name in members])
        totals, bad = scan_rows(target.buffer.numpy(), offsets, nbytes, dtype)
        assert [finish(total, nbytes) for total in totals.tolist()] == [expected[name] for name in members]
        assert bad.tolist() == [has_nonfinite(target.slot(name)) for name in members]
        nonfinite += itertools.compress(members, bad)
    assert sorted(nonfinite) == ["s250", "s7"]
    assert not is_small(target.arena.sizes["s305"])
    assert target.slot("s305").nbytes > SMALL_BYTES


def test_small_tensors_are_refused_by_name_like_others() -> None:
    target = TinyTarget()
    updater = make_updater(target)
    for name in weights(1):
        new = weights(1)
        new[name].view(-1)[2] = float("nan")
        with pytest.raises(UpdateRefused, match=f"{name} has NaN"):
            push(updater, new)
        new = weights(1)
        update_id = begin(updater, new)
        new[name].view(-1)[2] += 1
        send(updater, update_id, whole(new))
        with pytest.raises(UpdateRefused, match=f"{name} arrived with checksum"):
            updater.commit(update_id)
    assert updater.version == 4
