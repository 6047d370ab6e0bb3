"""Whole tensors that a trainer lends in GPU memory: copied, looked at, or both, all of them at once.

Where the sink borrows, a tensor's own bytes are its staging area: they are read once and compared before
anything is written. A trainer may say that it has just done this reading itself (`scanned`: hashed where
they lie, every value finite, after its last write); then they are read for the first time by the copy at
the commit, and what lies in the slots after it is compared: a difference found there tears the weights.

Mostly a push lends all tensors of its manifest, the same memory as in the step before; then what is worked
out for each tensor is worked out once (`LentTensors.made`), and a step costs a few operations on arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from weight_updater.arena import TORCH_DTYPES, Arena
from weight_updater.device_scan import Found, Launch, is_fast, side_stream
from weight_updater.moves import Moves, joined
from weight_updater.plan import Plan
from weight_updater.sink import Sink

T = TypeVar("T")

MAX_MADE = 16
"""Things that are kept: ways of copying into staging and into the live slots, and their like."""


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
        if (known := self._made.get(key)) is not None:
            value: T = known
            return value
        if len(self._made) >= MAX_MADE:
            self._made = {}
        self._made[key] = value = make()
        return value


@dataclass(frozen=True, slots=True)
class Groups:
    """Lent tensors by how they are taken.

    together: (tensor, its bytes) of those that one launch takes. indexes: theirs. others: the rest.
    """

    together: list[tuple[int, torch.Tensor]]
    indexes: list[int]
    others: list[tuple[int, torch.Tensor]]


def take_lent(sink: Sink, offered: LentTensors, device: torch.device, arena: Arena, *, scanned: bool) -> None:
    """Take whole tensors that lie in GPU memory.

    Args:
        offered: the tensors; reachable from `device`.
        arena: layout of the sink's destination.
        device: of the destination, or of the live weights.
        scanned: the trainer has hashed them and found no value that is not finite; only a borrowing sink
            relies on that, and only where the manifest has the checksums.

    Raises:
        UpdateRefused: BAD_CHUNK; or whatever ended the update in the meantime.
    """
    sink.offered.append(offered)
    groups = _groups(sink, offered, device)
    if groups.others:
        with side_stream(device):
            for index, data in groups.others:
                sink.write(index, 0, data)
            sink.flush()
    sink.claim_whole(groups.indexes)
    found: Found | None = None
    try:
        if sink.destination is None:
            sink.borrowed.update(groups.together)
        found = _promised(sink, groups.indexes) if scanned else None
        if found is None and _seeks(sink):
            found = _launch_for(sink, offered, groups, device).run()
        elif found is None and sink.destination is not None:
            with side_stream(device):
                _moves_for(sink.destination, offered, groups, device, arena).start()
    finally:
        sink.settle_whole(groups.indexes, found)


def takes_together(sink: Sink, offered: LentTensors, device: torch.device) -> bool:
    """Whether `take_lent` would take all tensors in one launch, if it read them."""
    return not _groups(sink, offered, device).others


def reads_lent(sink: Sink, offered: LentTensors, device: torch.device, *, scanned: bool) -> bool:
    """Whether `take_lent` would read a byte of tensors that it takes together."""
    promised = scanned and _is_promised(sink, _groups(sink, offered, device).indexes)
    return _launches(sink) and not promised


def _groups(sink: Sink, offered: LentTensors, device: torch.device) -> Groups:
    fast = is_fast(device) and (sink.destination is None or sink.destination.device == device)
    return offered.made(("groups", fast), lambda: _grouped(offered, fast=fast))


def _seeks(sink: Sink) -> bool:
    """Whether somebody will ask what the bytes hold."""
    return sink.finds_nonfinite or sink.hashes or bool(sink.plan.twins)


def _launches(sink: Sink) -> bool:
    """Whether tensors are copied, or looked at, as they are taken."""
    return sink.destination is not None or _seeks(sink)


def _grouped(offered: LentTensors, *, fast: bool) -> Groups:
    plan = offered.plan
    together: list[tuple[int, torch.Tensor]] = []
    others: list[tuple[int, torch.Tensor]] = []
    for index, data in offered.tensors:
        straight = plan.slots[index] is not None and plan.same_dtype(index) and index not in plan.twins
        whole = data.numel() == plan.sizes[index]
        (together if fast and straight and whole else others).append((index, data))
    return Groups(together, [index for index, _ in together], others)


def _is_promised(sink: Sink, indexes: list[int]) -> bool:
    """Whether the manifest promises checksums that are asked for, of tensors that the sink borrows."""
    if sink.destination is not None or not sink.hashes:
        return False
    checksums = sink.plan.manifest.checksums
    return None not in checksums or None not in [checksums[index] for index in indexes]


def _promised(sink: Sink, indexes: list[int]) -> Found | None:
    """What the manifest promises of tensors whose trainer has read them; None if it does not."""
    if not _is_promised(sink, indexes):
        return None
    checksums = sink.plan.manifest.checksums
    promised = np.array([checksums[index] for index in indexes], dtype=np.uint64)
    return Found(promised - sink.plan.mixed_lengths[indexes], np.zeros(len(indexes), dtype=np.bool_))


def _launch_for(sink: Sink, offered: LentTensors, groups: Groups, device: torch.device) -> Launch:
    """What looks at tensors of their slots' dtypes, or copies them into the destination as it does; kept."""
    plan, destination, find_nonfinite = sink.plan, sink.destination, sink.finds_nonfinite

    def launch() -> Launch:
        places = [plan.slot(index) for index in groups.indexes]
        dtypes = [TORCH_DTYPES[place.dtype] if find_nonfinite else None for place in places]
        if destination is None:
            return Launch(device, [data for _, data in groups.together], dtypes)
        pairs = [
            (destination[place.offset : place.offset + data.numel()], data)
            for place, (_, data) in zip(places, groups.together, strict=True)
        ]
        return Launch(device, pairs, dtypes)

    address = 0 if destination is None else destination.data_ptr()
    return offered.made(("launch", address, find_nonfinite), launch)


def _moves_for(
    destination: torch.Tensor, offered: LentTensors, groups: Groups, device: torch.device, arena: Arena
) -> Moves:
    """What copies tensors of their slots' dtypes into the destination, unseen; kept."""

    def moves() -> Moves:
        sources = {arena.canonical(offered.plan.slot(index).name): data for index, data in groups.together}
        return Moves(device, joined(arena, sources, destination))

    return offered.made(("moves", destination.data_ptr()), moves)
