"""What an update will write: a manifest matched against the slots of the live model.

Nothing is touched here; whatever does not fit is refused before a byte moves, naming the first
offender with both sides and how many more there are.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
import torch

from weight_updater.arena import TORCH_DTYPES, WeightTarget
from weight_updater.checksum import mixed_lengths
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.names import clean_name, is_adapter_name
from weight_updater.requests import ITEMSIZE, Manifest, Placement, TensorSpec
from weight_updater.small import SmallTensors

NAMES_SHOWN = 10
"""How many offenders a refusal lists by name."""

MAX_TENSOR_BYTES = 1 << 62

MAX_PLANS = 4
"""Plans that a `Planner` keeps; the least recently used one goes first."""


class Plan:
    """Where each tensor of a manifest goes. Nothing in it changes, and all but `manifest` stays the same
    when only the checksums do (`with_checksums_of`).

    Attributes:
        slots: per tensor of the manifest, the slot that it is written to, or None if it is skipped.
        twins: tensor -> the tensor that writes the same slot (tied names); a twin is compared, not written.
        unmatched: names that are skipped (buffers, merged adapters, and under `partial` unknown ones).
        ranges: (offset, size) in bytes of what is written in the arena, few and merged.
        full: every slot of the model is written.
        needed: indexes of the tensors that must arrive: those written and their twins.
        applied: indexes of the tensors that are written, in the manifest's order.
        written: names of the slots that are written, one for each of `applied`, aliases resolved.
        casts: indexes of the tensors that arrive in another dtype than their slots'.
        sizes: bytes of each tensor as it arrives; total_bytes: their sum.
        mixed_lengths: [tensors] uint64, what makes checksums out of totals; see `checksum.mixed_lengths`.
        packed_offsets, packed_bytes: of the tensors packed in the manifest's order, 256-byte aligned;
            packed_end: the end of the last tensor, without what aligns a next one.
        small: of the tensors that are written as they come, those worth hashing together.
        size_of, slot_offset_of: [tensors] bytes of each, and the place of its slot (0 if it is skipped).
        by_name: the positions in `applied` and `written`, in the order of the names in `written`.
    """

    def __init__(
        self,
        manifest: Manifest,
        slots: Sequence[Placement | None],
        twins: dict[int, int],
        unmatched: tuple[str, ...],
        ranges: tuple[tuple[int, int], ...],
        full: bool,
    ) -> None:
        self.manifest = manifest
        self.slots = tuple(slots)
        self.twins = twins
        self.unmatched = unmatched
        self.ranges = ranges
        self.full = full
        self.needed = [i for i, slot in enumerate(slots) if slot is not None]
        self.applied = [i for i in self.needed if i not in twins]
        places = [self.slot(i) for i in self.applied]
        self.written = [place.alias_of or place.name for place in places]
        self.sizes = manifest.columns.sizes
        self.total_bytes = sum(self.sizes)
        self.mixed_lengths = mixed_lengths(self.sizes)
        self.packed_offsets, self.packed_bytes = manifest.packed_offsets()
        self.packed_end = self.packed_offsets[-1] + self.sizes[-1]
        self.casts = {i for i in self.needed if not self.same_dtype(i)}
        dtypes: list[torch.dtype | None] = [None] * len(slots)
        for i in self.applied:
            if i not in self.casts:
                dtypes[i] = TORCH_DTYPES[self.slot(i).dtype]
        self.small = SmallTensors(self.sizes, dtypes)
        self.size_of = np.array(self.sizes, dtype=np.int64)
        self.slot_offset_of = np.array([slot.offset if slot else 0 for slot in slots], dtype=np.int64)
        self.by_name = sorted(range(len(self.written)), key=self.written.__getitem__)

    def with_checksums_of(self, manifest: Manifest) -> Plan:
        """The plan of a manifest that differs in its checksums only.

        Raises:
            UpdateRefused: INVALID_UPDATE (not a 64-bit number), MANIFEST_MISMATCH (tied names differ).
        """
        _check_checksums(manifest)
        _check_twins(self.twins, manifest)
        plan = copy(self)
        plan.manifest = manifest
        return plan

    def slot(self, index: int) -> Placement:
        """The slot of a tensor that is not skipped."""
        place = self.slots[index]
        assert place is not None, f"tensor {index} is skipped"
        return place

    def same_dtype(self, index: int) -> bool:
        """True if the tensor's bytes are the slot's bytes: no cast."""
        return self.slot(index).dtype == self.manifest.columns.dtypes[index]


def slot_nbytes(place: Placement) -> int:
    """Size of a slot in bytes."""
    return math.prod(place.shape) * ITEMSIZE[place.dtype]


def check_manifest(manifest: Manifest) -> None:
    """Refuse a manifest that can be right for no model."""
    if not manifest.tensors:
        raise UpdateRefused(
            Reason.INVALID_UPDATE, "the manifest is empty; an update brings at least one tensor"
        )
    for tensor in manifest.tensors:
        if not tensor.name:
            raise UpdateRefused(Reason.INVALID_UPDATE, "a tensor of the manifest has no name")
        if tensor.dtype not in ITEMSIZE:
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"{tensor.name} has dtype {tensor.dtype!r}; an update brings one of {', '.join(ITEMSIZE)}",
            )
        if min(tensor.shape, default=0) < 0 or tensor.nbytes > MAX_TENSOR_BYTES:
            raise UpdateRefused(
                Reason.INVALID_UPDATE, f"{tensor.name} has an impossible shape {list(tensor.shape)}"
            )
    _check_checksums(manifest)


def _check_checksums(manifest: Manifest) -> None:
    given = [value for value in manifest.checksums if value is not None]
    if not given or (min(given) >= 0 and max(given) < 1 << 64):
        return
    for name, value in zip(manifest.columns.names, manifest.checksums, strict=True):
        if value is not None and not 0 <= value < 1 << 64:
            raise UpdateRefused(Reason.INVALID_UPDATE, f"the checksum of {name} is not a 64-bit number")


class Planner:
    """Plans the updates of one target. A manifest seen before is planned anew in its checksums only."""

    def __init__(self, target: WeightTarget) -> None:
        self._target = target
        self._known: OrderedDict[tuple[str, bool, bool], Plan] = OrderedDict()

    def plan(self, manifest: Manifest, digest: str, *, partial: bool, merged: bool) -> Plan:
        """As `plan_update`; `digest` is the manifest's."""
        key = (digest, partial, merged)
        known = self._known.get(key)
        if known is None:
            plan = plan_update(self._target, manifest, partial=partial, merged=merged)
        else:
            plan = known.with_checksums_of(manifest)
        self._known[key] = plan
        self._known.move_to_end(key)
        if len(self._known) > MAX_PLANS:
            self._known.popitem(last=False)
        return plan


def plan_update(target: WeightTarget, manifest: Manifest, *, partial: bool, merged: bool) -> Plan:
    """Match `manifest` against the slots of `target`.

    Args:
        partial: slots may be left out, and unknown names are skipped.
        merged: adapters are merged into the base tensors; their own tensors are skipped.

    Raises:
        UpdateRefused: INVALID_UPDATE or MANIFEST_MISMATCH.
    """
    check_manifest(manifest)
    arena = target.arena
    names = _clean_names(manifest, merged)
    slots: list[Placement | None] = []
    unknown: list[str] = []
    unmatched: list[str] = []
    for tensor, name in zip(manifest.tensors, names, strict=True):
        place = arena.placements.get(name) if name is not None else None
        slots.append(place)
        if place is None:
            unmatched.append(tensor.name)
            if name is not None and not target.is_buffer(name):
                unknown.append(tensor.name)
    own_names = arena.slot_names
    if not any(slots):
        raise UpdateRefused(
            Reason.MANIFEST_MISMATCH,
            f"none of the manifest's {len(slots)} tensors matches a slot: it brings {_some(unmatched)}; "
            f"the model has {_some(own_names)}",
        )
    if unknown and not partial:
        raise UpdateRefused(
            Reason.MANIFEST_MISMATCH,
            f"the manifest has {len(unknown)} tensors that the model lacks: {_some(unknown)}; the model has "
            f"{_some(own_names, 2)}; export Hugging Face names, or say partial=true to skip them",
        )
    _check_shapes(manifest.tensors, slots)
    twins = _find_twins(target, slots)
    _check_twins(twins, manifest)
    written = {arena.canonical(place.name) for place in slots if place is not None}
    missing = [name for name in own_names if name not in written]
    if missing and not partial:
        raise UpdateRefused(
            Reason.MANIFEST_MISMATCH,
            f"the manifest lacks {len(missing)} of the model's {len(own_names)} tensors: {_some(missing)}; "
            f"send them too, or say partial=true to leave them as they are",
        )
    ranges = merged_ranges(target, written) if missing else ((0, arena.nbytes),)
    return Plan(manifest, slots, twins, tuple(unmatched), ranges, full=not missing)


def _clean_names(manifest: Manifest, merged: bool) -> list[str | None]:
    """Per tensor its name without wrapper segments, or None for an adapter's tensor."""
    adapters = [tensor.name for tensor in manifest.tensors if is_adapter_name(tensor.name)]
    if adapters and not merged:
        raise UpdateRefused(
            Reason.MANIFEST_MISMATCH,
            f"the manifest has {len(adapters)} adapter tensors: {_some(adapters)}; merge them into the base "
            f"tensors and say merged=true to skip them",
        )
    skipped = set(adapters)
    names: list[str | None] = []
    first: dict[str, str] = {}
    for tensor in manifest.tensors:
        name = tensor.name if tensor.name in skipped else clean_name(tensor.name)
        if name in first:
            raise UpdateRefused(
                Reason.MANIFEST_MISMATCH,
                f"the manifest names {name} twice: as {first[name]!r} and as {tensor.name!r}",
            )
        first[name] = tensor.name
        names.append(None if tensor.name in skipped else name)
    return names


def _check_shapes(tensors: Sequence[TensorSpec], slots: Sequence[Placement | None]) -> None:
    wrong = [
        (tensor, place)
        for tensor, place in zip(tensors, slots, strict=True)
        if place is not None and tensor.shape != place.shape
    ]
    if wrong:
        tensor, place = wrong[0]
        more = f" (and {len(wrong) - 1} more tensors of another shape)" if len(wrong) > 1 else ""
        shard = _is_shard(tensor.shape, place.shape)
        hint = "; if that is one rank's shard, gather the whole tensor before it is sent" if shard else ""
        raise UpdateRefused(
            Reason.MANIFEST_MISMATCH,
            f"{tensor.name} has shape {list(tensor.shape)}, the model's {place.name} has "
            f"{list(place.shape)}{more}{hint}",
        )


def _is_shard(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether several equal ones make up the whole along one dimension."""
    if len(shape) != len(whole):
        return False
    other = [(part, size) for part, size in zip(shape, whole, strict=True) if part != size]
    return len(other) == 1 and 0 < other[0][0] < other[0][1] and other[0][1] % other[0][0] == 0


def _find_twins(target: WeightTarget, slots: Sequence[Placement | None]) -> dict[int, int]:
    """Tensors whose slot another one writes. The slot's own name writes; if absent, its first alias."""
    canonical = target.arena.canonical
    writers: dict[str, int] = {}
    for index, place in enumerate(slots):
        if place is None:
            continue
        if place.alias_of:
            writers.setdefault(canonical(place.name), index)
        else:
            writers[place.name] = index
    return {
        index: writers[canonical(place.name)]
        for index, place in enumerate(slots)
        if place is not None and writers[canonical(place.name)] != index
    }


def _check_twins(twins: dict[int, int], manifest: Manifest) -> None:
    """Refuse tied names whose checksums say that they bring different values."""
    for twin, writer in twins.items():
        a, b = manifest.tensor(twin), manifest.tensor(writer)
        if a.dtype == b.dtype and None not in (a.checksum, b.checksum) and a.checksum != b.checksum:
            raise UpdateRefused(Reason.MANIFEST_MISMATCH, conflict(a, b, a.checksum or 0, b.checksum or 0))


def conflict(a: TensorSpec, b: TensorSpec, a_checksum: int, b_checksum: int) -> str:
    """The text of a refusal of tied names that bring different values."""
    return (
        f"{a.name} and {b.name} are tied in this model but bring different values "
        f"(checksums {a_checksum:016x} and {b_checksum:016x}); send equal bytes, or only {b.name}"
    )


def merged_ranges(target: WeightTarget, names: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """(offset, size) in bytes of the slots `names`; neighbours in the arena's order are merged.

    What lies between neighbours is padding, so it may be copied along.
    """
    placements, wanted = target.arena.placements, set(names)
    ranges: list[tuple[int, int]] = []
    previous_wanted = False
    for name in target.arena.slot_names:
        if name in wanted:
            place = placements[name]
            end = place.offset + slot_nbytes(place)
            start = ranges.pop()[0] if previous_wanted else place.offset
            ranges.append((start, end - start))
        previous_wanted = name in wanted
    return tuple(ranges)


def _some(names: Sequence[str], limit: int = NAMES_SHOWN) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
