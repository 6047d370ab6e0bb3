"""Whole tensors that a trainer lends in GPU memory: hashed, or copied and hashed, in one launch for all.

Where the sink borrows, a tensor's own bytes are its staging area: they are read once and compared before
anything is written. A trainer may say that it has just done this reading itself (`scanned`: hashed where
they lie, every value finite, after its last write); then they are read for the first time by the copy at
the commit, which hashes in the same pass, and a difference found there tears the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from weight_updater.arena import TORCH_DTYPES
from weight_updater.checksum import Scan, unfinish
from weight_updater.device_scan import copy_many, is_fast, scan_many
from weight_updater.plan import Plan
from weight_updater.sink import Sink

T = TypeVar("T")

MAX_MADE = 4
"""Ways of copying that are kept: into staging and into the live slots, and their like."""


class LentTensors:
    """Whole tensors of a manifest in a trainer's memory, and how they are copied; the same in every step.

    Args:
        plan: of the updates that they are for.
        tensors: (tensor of the manifest, its bytes as [n] uint8).
    """

    def __init__(self, plan: Plan, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.plan = plan
        self.tensors = tensors
        self._made: dict[object, Any] = {}

    def made(self, key: object, make: Callable[[], T]) -> T:
        """What `make` gives, which depends on `key` alone (an address, say); made once."""
        if key not in self._made:
            if len(self._made) >= MAX_MADE:
                self._made.clear()
            self._made[key] = make()
        value: T = self._made[key]
        return value


def take_lent(sink: Sink, offered: LentTensors, device: torch.device, *, scanned: bool) -> None:
    """Take whole tensors that lie in GPU memory.

    Args:
        offered: the tensors; reachable from `device`.
        device: of the destination, or of the live weights.
        scanned: the trainer has hashed them and found no value that is not finite; only a borrowing sink
            relies on that.

    Raises:
        UpdateRefused: BAD_CHUNK; or whatever ended the update in the meantime.
    """
    plan, lent = sink.plan, offered.tensors
    sink.offered.append(offered)
    fast = is_fast(device) and (sink.destination is None or sink.destination.device == device)
    together: list[tuple[int, torch.Tensor]] = []
    for index, data in lent:
        has_slot = plan.slots[index] is not None
        if fast and has_slot and plan.same_dtype(index) and index not in plan.twins:
            together.append((index, data))
        else:
            sink.write(index, 0, data)
    sink.flush()
    if sink.destination is None and scanned:
        promised = {
            index
            for index, _ in together
            if sink.is_hashed(index) and plan.manifest.tensors[index].checksum is not None
        }
        _trust(sink, [pair for pair in together if pair[0] in promised])
        together = [pair for pair in together if pair[0] not in promised]
    sink.claim_whole(together)
    found: list[Scan] = []
    try:
        found = _read(sink, offered, together, device)
    finally:
        sink.settle_whole([index for index, _ in together], found)


def _trust(sink: Sink, lent: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Borrow tensors whose bytes are what the manifest promises, as the trainer says."""
    sink.claim_whole(lent)
    sink.borrowed.update(lent)
    sink.promised.update(index for index, _ in lent)
    found = []
    for index, data in lent:
        checksum = sink.plan.manifest.tensors[index].checksum
        assert checksum is not None, "only a promise can be trusted"
        found.append(Scan(unfinish(checksum, data.numel()), nonfinite=False))
    sink.settle_whole([index for index, _ in lent], found)


def _read(
    sink: Sink, offered: LentTensors, lent: Sequence[tuple[int, torch.Tensor]], device: torch.device
) -> list[Scan]:
    """Borrow or store tensors of their slots' dtypes; what was found in each, if anything was sought."""
    places = [sink.plan.slot(index) for index, _ in lent]
    find_nonfinite = sink.finds_nonfinite
    sought = find_nonfinite or any(sink.is_hashed(index) for index, _ in lent)
    dtypes = [TORCH_DTYPES[place.dtype] if find_nonfinite else None for place in places]
    if sink.destination is None:
        sink.borrowed.update(lent)
        return scan_many([data for _, data in lent], device, dtypes) if sought else []
    destination = sink.destination

    def into_place() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (destination[place.offset : place.offset + data.numel()], data)
            for place, (_, data) in zip(places, lent, strict=True)
        ]

    pairs = offered.made(destination.data_ptr(), into_place)
    return copy_many(pairs, device, dtypes if sought else None)
