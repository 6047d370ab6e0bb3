"""Path `ipc`: memory of a trainer on the same host, lent for the length of the call.

A region is mapped once for each allocation id and kept until it is released; a new allocation has a new
id, so a kept mapping is never mistaken for another. Regions on a CPU are POSIX shared-memory segments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weight_updater.arena import Arena
from weight_updater.cast import bytes_over
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.plan import Plan
from weight_updater.requests import FromIpc, RegionPlacement, ShmSegment
from weight_updater.shm import SharedSegment
from weight_updater.sink import Sink

MAX_MAPPINGS = 256
"""Mappings that are kept; beyond them the least recently used one goes."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapped region. data: [size] uint8, the trainer's memory itself."""

    segment: SharedSegment
    data: torch.Tensor

    @property
    def allocation_id(self) -> str:
        return self.segment.descriptor.allocation_id


class Mappings:
    """Regions by allocation id. `pinned` ones (of the open update, or adopted) stay, whatever happens."""

    def __init__(self) -> None:
        self.pinned: set[str] = set()
        self._mappings: OrderedDict[str, Mapping] = OrderedDict()

    def open(self, segment: ShmSegment) -> Mapping:
        """Map a segment, or find it mapped.

        Raises:
            UpdateRefused (MEMORY_UNAVAILABLE): it cannot be mapped, or its allocation id is known as that
                of another segment.
        """
        known = self._mappings.get(segment.allocation_id)
        if known is not None:
            if known.segment.descriptor != segment:
                raise UpdateRefused(
                    Reason.MEMORY_UNAVAILABLE,
                    f"allocation {segment.allocation_id} is mapped as segment "
                    f"{known.segment.descriptor.name} of {known.segment.descriptor.size} bytes, "
                    f"not {segment.name} of {segment.size}; give every allocation an id of its own",
                )
            self._mappings.move_to_end(segment.allocation_id)
            return known
        if not segment.allocation_id:
            raise UpdateRefused(
                Reason.INVALID_UPDATE, f"segment {segment.name} comes without an allocation id"
            )
        opened = SharedSegment.open(segment)
        mapping = Mapping(opened, bytes_over(opened.buf))
        self._mappings[segment.allocation_id] = mapping
        for allocation_id in [key for key in self._mappings if key not in self.pinned][:-MAX_MAPPINGS]:
            self._close(allocation_id)
        return mapping

    def release(self, allocation_ids: Sequence[str]) -> int:
        """Unmap; unknown ids are ignored. Returns how many were unmapped.

        Raises:
            UpdateRefused (WRONG_STATE): one of them is in use; then none is unmapped.
        """
        for allocation_id in allocation_ids:
            if allocation_id in self.pinned:
                raise UpdateRefused(
                    Reason.WRONG_STATE,
                    f"allocation {allocation_id} is in use, by an open update or as the adopted arena; "
                    f"end the update, or commit one without adopt, and release it then",
                )
        known = [allocation_id for allocation_id in allocation_ids if allocation_id in self._mappings]
        for allocation_id in known:
            self._close(allocation_id)
        return len(known)

    def close(self) -> None:
        """Unmap everything."""
        for allocation_id in list(self._mappings):
            self._close(allocation_id)

    def _close(self, allocation_id: str) -> None:
        segment = self._mappings.pop(allocation_id).segment  # drops the tensor, so that it can be unmapped
        segment.close()


def receive(request: FromIpc, sink: Sink, mappings: Mappings, arena: Arena, *, adopt: bool = False) -> None:
    """Write the tensors that lie in a trainer's memory into `sink`.

    Args:
        request: the regions, and where the tensors lie in them. Without placements there is one region
            in which they lie packed in the manifest's order (`adopt`: in the arena's layout).
        adopt: the region is to become the live arena: its layout must be that of `arena`.

    Raises:
        UpdateRefused: MEMORY_UNAVAILABLE, INVALID_UPDATE, BAD_CHUNK.
    """
    if request.cuda_regions:
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"{len(request.cuda_regions)} regions are CUDA memory, but this engine's weights are not on a "
            f"CUDA device; lend POSIX shared memory, or use another path",
        )
    placements = _placements(request, sink.plan, arena, adopt=adopt)
    regions = [mappings.open(region).data for region in request.regions]
    for handle, region in enumerate(regions):
        here = [place for place in placements if place.handle == handle]
        sink.write_whole([place.tensor for place in here], [place.offset for place in here], region)


def _placements(request: FromIpc, plan: Plan, arena: Arena, *, adopt: bool) -> list[RegionPlacement]:
    """Where each tensor that is needed lies; checked against the regions' number and sizes."""
    tensors = plan.manifest.tensors
    if not request.placements:
        if len(request.regions) != 1:
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"{len(request.regions)} regions come without placements; say where each tensor lies, or "
                f"lend one region with all tensors packed in order",
            )
        offsets = [place.offset if place else 0 for place in plan.slots] if adopt else None
        offsets = offsets or plan.packed_offsets
        placements = [RegionPlacement(index, 0, offsets[index]) for index in plan.needed]
    else:
        placements = list(request.placements)
    for place in placements:
        if not 0 <= place.tensor < len(tensors) or not 0 <= place.handle < len(request.regions):
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"a placement names tensor {place.tensor} in region {place.handle}; there are {len(tensors)} "
                f"tensors and {len(request.regions)} regions (counted from 0)",
            )
        size, end = request.regions[place.handle].size, place.offset + plan.sizes[place.tensor]
        if place.offset < 0 or end > size:
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"{tensors[place.tensor].name} needs bytes [{place.offset}, {end}) of region "
                f"{place.handle} ({request.regions[place.handle].name}), which has {size}",
            )
    placements = [place for place in placements if plan.slots[place.tensor] is not None]
    if adopt:
        _check_arena(request, plan, arena, placements)
    return placements


def _check_arena(request: FromIpc, plan: Plan, arena: Arena, placements: Sequence[RegionPlacement]) -> None:
    """Refuse to adopt anything but one region in the layout of `arena`."""
    if len(request.regions) != 1:
        raise UpdateRefused(
            Reason.INVALID_UPDATE,
            f"adopt takes one arena, not {len(request.regions)} regions; allocate {arena.nbytes} bytes in "
            f"the layout that the engine gives, and make the parameters views of them",
        )
    if request.regions[0].size < arena.nbytes:
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"the arena to adopt has {request.regions[0].size} bytes, the model's layout needs "
            f"{arena.nbytes}",
        )
    for place in placements:
        slot = plan.slot(place.tensor)
        if place.offset != slot.offset:
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"adopt needs the engine's layout: {slot.name} lies at byte {place.offset}, "
                f"the layout has it at {slot.offset}; separate tensors cannot be adopted",
            )
