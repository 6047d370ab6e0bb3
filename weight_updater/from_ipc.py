"""Path `ipc`: memory of a trainer on the same host, lent for the length of the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weight_updater.arena import Arena
from weight_updater.by_cores import write_by_cores
from weight_updater.device_scan import side_stream
from weight_updater.device_sink import DeviceSink
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.lent_tensors import LentTensors, take_lent
from weight_updater.mappings import Mappings, Region, describe
from weight_updater.plan import Plan
from weight_updater.requests import FromIpc, RegionPlacement, ShmSegment
from weight_updater.sink import Sink


def receive(request: FromIpc, sink: Sink, mappings: Mappings, arena: Arena, *, adopt: bool = False) -> None:
    """Write the tensors that lie in a trainer's memory into `sink`.

    Args:
        request: the regions, and where the tensors lie in them. Without placements there is one region
            in which they lie packed in the manifest's order (`adopt`: in the arena's layout).
        adopt: the region is to become the live arena: its layout must be that of `arena`.

    Raises:
        UpdateRefused: MEMORY_UNAVAILABLE, INVALID_UPDATE, BAD_CHUNK.
    """
    if request.cuda_regions and not mappings.on_gpu:
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"{len(request.cuda_regions)} regions are CUDA memory, but this engine's weights are not on a "
            f"CUDA device; lend POSIX shared memory, or use another path",
        )
    if adopt and len(request.all_regions) == 1:
        _check_home(request.all_regions[0], mappings)
    if request.cuda_regions:
        _receive_from_gpu(request, sink, mappings, arena, adopt=adopt)
        return
    if not adopt and not request.placements and len(request.regions) == 1:
        _receive_packed(request.regions[0], sink, mappings)
        return
    placements = _placements(request, sink.plan, arena, adopt=adopt)
    with mappings.using(request.regions), side_stream(mappings.device):
        regions = [mappings.open(region).data for region in request.regions]
        for handle, region in enumerate(regions):
            here = [place for place in placements if place.handle == handle]
            _write(sink, [place.tensor for place in here], [place.offset for place in here], region)
        sink.flush()


def _receive_packed(region: ShmSegment, sink: Sink, mappings: Mappings) -> None:
    """All tensors that are needed lie in one region, packed in the manifest's order."""
    plan = sink.plan
    positions = [plan.packed_offsets[index] for index in plan.needed]
    for index, position in zip(plan.needed, positions, strict=True) if region.size < plan.packed_end else ():
        if region.size < position + plan.sizes[index]:
            raise _too_small(plan, RegionPlacement(index, 0, position), region)
    with mappings.using([region]), side_stream(mappings.device):
        _write(sink, plan.needed, positions, mappings.open(region).data)
        sink.flush()


def _write(sink: Sink, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor) -> None:
    """Whole tensors in shared memory: a device's sink queues copies, a CPU's makes them by its cores."""
    if isinstance(sink, DeviceSink):
        sink.write_whole(indexes, positions, data)
    else:
        write_by_cores(sink, indexes, positions, data)


def _receive_from_gpu(request: FromIpc, sink: Sink, mappings: Mappings, arena: Arena, *, adopt: bool) -> None:
    with mappings.using(request.cuda_regions):
        lent = mappings.arranged(request.lent, sink.plan, adopt=adopt)
        if lent is None:
            placements = _placements(request, sink.plan, arena, adopt=adopt)
            regions = [mappings.open(region).data for region in request.cuda_regions]
            sizes = sink.plan.sizes
            tensors = [
                (place.tensor, regions[place.handle].narrow(0, place.offset, sizes[place.tensor]))
                for place in placements
            ]
            lent = LentTensors(sink.plan, tensors)
            mappings.keep(request.lent, lent, adopt=adopt)
        take_lent(sink, lent, mappings.device, arena, scanned=request.scanned)


def _placements(request: FromIpc, plan: Plan, arena: Arena, *, adopt: bool) -> list[RegionPlacement]:
    """Where each tensor that is needed lies; checked against the regions' number and sizes."""
    if not request.placements:
        if len(request.all_regions) != 1:
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"{len(request.all_regions)} regions come without placements; say where each tensor lies, or "
                f"lend one region with all tensors packed in order",
            )
        offsets = [place.offset if place else 0 for place in plan.slots] if adopt else plan.packed_offsets
        placements = [RegionPlacement(index, 0, offsets[index]) for index in plan.needed]
    else:
        placements = list(request.placements)
    for place in placements:
        if not 0 <= place.tensor < len(plan.slots) or not 0 <= place.handle < len(request.all_regions):
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"a placement names tensor {place.tensor} in region {place.handle}; there are "
                f"{len(plan.slots)} tensors and {len(request.all_regions)} regions (counted from 0)",
            )
        region = request.all_regions[place.handle]
        if place.offset < 0 or place.offset + plan.sizes[place.tensor] > region.size:
            raise _too_small(plan, place, region)
    placements = [place for place in placements if plan.slots[place.tensor] is not None]
    if adopt:
        _check_arena(request, plan, arena, placements)
    return placements


def _check_home(region: Region, mappings: Mappings) -> None:
    """Refuse to adopt memory that the engine's own device would have to reach for at every pass."""
    with mappings.using([region]):
        where, own = mappings.open(region).data.device, mappings.device
    if where.type != own.type or own.index not in (None, where.index):
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"the arena to adopt ({describe(region)}) lies on {where}, this engine runs on {own}; make it on "
            f"the engine's device, or push without adopting",
        )


def _too_small(plan: Plan, place: RegionPlacement, region: Region) -> UpdateRefused:
    return UpdateRefused(
        Reason.MEMORY_UNAVAILABLE,
        f"{plan.manifest.tensor(place.tensor).name} needs bytes [{place.offset}, "
        f"{place.offset + plan.sizes[place.tensor]}) of region {place.handle} "
        f"({describe(region)}), which has {region.size}",
    )


def _check_arena(request: FromIpc, plan: Plan, arena: Arena, placements: Sequence[RegionPlacement]) -> None:
    """Refuse to adopt anything but one region in the layout of `arena`."""
    if len(request.all_regions) != 1:
        raise UpdateRefused(
            Reason.INVALID_UPDATE,
            f"adopt takes one arena, not {len(request.all_regions)} regions; allocate {arena.nbytes} bytes "
            f"in the layout that the engine gives, and make the parameters views of them",
        )
    if request.all_regions[0].size < arena.nbytes:
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"the arena to adopt has {request.all_regions[0].size} bytes, the model's layout needs "
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
