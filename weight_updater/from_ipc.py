"""Path `ipc`: memory of a trainer on the same host, lent for the length of the call.

A region is mapped once for each allocation id and kept until it is released; a new allocation has a new
id, so a kept mapping is never mistaken for another. Regions on a CPU are POSIX shared-memory segments, on
a GPU parts of CUDA allocations; an allocation is mapped once for all of its regions.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from weight_updater.arena import Arena
from weight_updater.cast import bytes_over
from weight_updater.checksum import checksum
from weight_updater.device_memory import MappedAllocation
from weight_updater.device_scan import side_stream
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.lent_tensors import LentTensors, take_lent
from weight_updater.plan import Plan
from weight_updater.requests import CudaIpcRegion, FromIpc, RegionPlacement, ShmSegment
from weight_updater.shm import SharedSegment
from weight_updater.sink import Sink

MAX_MAPPINGS = 1024
"""Loose mappings that are kept; beyond them the least recently used one goes."""

MAX_LENT = 8
"""Sets of regions and placements that are remembered by digest."""

Region = ShmSegment | CudaIpcRegion


class Mapping:
    """A mapped region of the trainer's memory.

    allocation_id: of its allocation. data: [size] uint8, the trainer's memory itself.
    """

    def __init__(self, allocation_id: str, data: torch.Tensor, owner: SharedSegment | None) -> None:
        self.allocation_id = allocation_id
        self.data = data
        self._owner = owner

    def owner_alive(self) -> bool:
        """Whether a trainer that holds the owner's lock lives; False if nobody ever took one."""
        return self._owner is not None and self._owner.owner_alive()


class _Shared:
    """A POSIX segment, mapped; one region."""

    def __init__(self, segment: ShmSegment) -> None:
        self.named = segment
        self._opened = SharedSegment.open(segment)
        self._mapping: Mapping | None = Mapping(
            segment.allocation_id, bytes_over(self._opened.buf), self._opened
        )

    def mapping(self, region: Region) -> Mapping:
        if region != self.named or self._mapping is None:
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"allocation {self.named.allocation_id} is mapped as segment {self.named.name} of "
                f"{self.named.size} bytes, not {_describe(region)}; give every allocation an id of its own",
            )
        self._opened.check_size()
        return self._mapping

    def is_linked(self) -> bool:
        return self._opened.is_linked()

    def close(self) -> None:
        self._mapping = None  # drops the tensor, so that it can be unmapped
        self._opened.close()


class _OnGpu:
    """A CUDA allocation, mapped; any number of regions in it."""

    def __init__(self, region: CudaIpcRegion, device: torch.device) -> None:
        self._named = (region.device_uuid, region.handle)
        self._allocation = MappedAllocation(region.handle, region.device_uuid, device)
        self._regions: dict[tuple[int, int], Mapping] = {}
        self._owner: SharedSegment | None = None
        try:
            self.mapping(region)
            self._probe(region, device)
        except Exception:
            self.close()
            raise

    def mapping(self, region: Region) -> Mapping:
        if not isinstance(region, CudaIpcRegion) or (region.device_uuid, region.handle) != self._named:
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"allocation {region.allocation_id} is mapped as another allocation on {self._named[0]}, "
                f"not {_describe(region)}; give every allocation an id of its own",
            )
        where = (region.offset, region.size)
        if where not in self._regions:
            self._allocation.check_holds(region.offset + region.size)
            if region.owner is not None and self._owner is None:
                self._owner = SharedSegment.open(region.owner)
            self._regions[where] = Mapping(region.allocation_id, self._allocation.region(*where), self._owner)
        return self._regions[where]

    def _probe(self, region: CudaIpcRegion, device: torch.device) -> None:
        """Read the region's first bytes, and compare them with what the trainer says they are."""
        sample = self.mapping(region).data[: region.probe_bytes or 8]
        with side_stream(device):
            found = checksum(sample.to(device))
        if region.probe_checksum is not None and found != region.probe_checksum:
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"the first {sample.numel()} bytes of {_describe(region)} have checksum {found:016x} here, "
                f"{region.probe_checksum:016x} in the trainer; wait for the writes to end before the call, "
                f"and give every allocation an id of its own",
            )

    def close(self) -> None:
        self._regions.clear()
        self._allocation.close()
        if self._owner is not None:
            self._owner.close()


class Mappings:
    """Regions by allocation id, each allocation mapped once, and what was lent by digest.

    Args:
        device: of the live weights.

    Attributes:
        pinned: allocations that stay, whatever happens (of the open update, or adopted).
    """

    def __init__(self, device: torch.device) -> None:
        self.pinned: set[str] = set()
        self.device = device
        self._mappings: OrderedDict[str, _Shared | _OnGpu] = OrderedDict()
        self._lent: OrderedDict[str, FromIpc] = OrderedDict()
        self._arranged: dict[tuple[str, bool], LentTensors] = {}  # by the digest of what was lent, and adopt
        self._in_use: Counter[str] = Counter()  # allocations that a worker reads
        self._lock = threading.RLock()  # the loop releases, a worker opens

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def open(self, region: Region) -> Mapping:
        """Map a region, or find it mapped.

        Raises:
            UpdateRefused (MEMORY_UNAVAILABLE): it cannot be mapped, or its allocation id is known as that
                of another allocation.
        """
        with self._lock:
            known = self._mappings.get(region.allocation_id)
            if known is None:
                if not region.allocation_id:
                    raise UpdateRefused(
                        Reason.INVALID_UPDATE, f"{_describe(region)} comes without an allocation id"
                    )
                known = _Shared(region) if isinstance(region, ShmSegment) else _OnGpu(region, self.device)
                self._mappings[region.allocation_id] = known
                loose = [key for key in self._mappings if not self._is_held(key)]
                for allocation_id in loose[:-MAX_MAPPINGS]:
                    self._close(allocation_id)
            self._mappings.move_to_end(region.allocation_id)
            return known.mapping(region)

    def recall(self, request: FromIpc) -> FromIpc:
        """The request with the regions and placements that it names by digest; others are remembered.

        What comes back for memory on GPUs names its digest.

        Raises:
            UpdateRefused (MANIFEST_UNKNOWN): nothing that was lent has that digest.
        """
        if not request.lent and not request.cuda_regions:
            return request
        digest = request.lent or request.digest()
        with self._lock:
            if not request.lent:
                self._lent[digest] = replace(request, checksums=())
                while len(self._lent) > MAX_LENT:
                    self._forget(next(iter(self._lent)))
            if digest not in self._lent:
                raise UpdateRefused(
                    Reason.MANIFEST_UNKNOWN,
                    f"no regions with digest {digest} are known here; send them in full once",
                )
            self._lent.move_to_end(digest)
            known = self._lent[digest]
        return replace(known, update_id=request.update_id, lent=digest, scanned=request.scanned)

    def arranged(self, digest: str, plan: Plan, *, adopt: bool) -> LentTensors | None:
        """The tensors of a remembered request for the same plan, if `keep` got them since it was mapped."""
        with self._lock:
            known = self._arranged.get((digest, adopt))
        return known if known is not None and known.plan.slots is plan.slots else None

    def keep(self, digest: str, lent: LentTensors, *, adopt: bool) -> None:
        """Keep a remembered request's tensors, until it is forgotten or a region of it is unmapped."""
        with self._lock:
            if digest in self._lent:
                self._arranged[digest, adopt] = lent

    def _forget(self, digest: str) -> None:
        del self._lent[digest]
        for adopt in (False, True):
            self._arranged.pop((digest, adopt), None)

    @contextmanager
    def using(self, regions: Sequence[Region]) -> Iterator[None]:
        """Unmap none of the regions before the block ends."""
        held = [region.allocation_id for region in regions]
        with self._lock:
            self._in_use.update(held)
        try:
            yield
        finally:
            with self._lock:
                self._in_use.subtract(held)
                self._in_use += Counter()  # drops what has come down to zero

    def release(self, allocation_ids: Sequence[str]) -> int:
        """Unmap; unknown ids are ignored. Returns how many were unmapped.

        Raises:
            UpdateRefused (WRONG_STATE): one of them is in use; then none is unmapped.
        """
        with self._lock:
            for allocation_id in allocation_ids:
                if self._is_held(allocation_id):
                    raise UpdateRefused(
                        Reason.WRONG_STATE,
                        f"allocation {allocation_id} is in use, by an open update or as the adopted arena; "
                        f"end the update, or commit one without adopt, and release it then",
                    )
            known = [allocation_id for allocation_id in allocation_ids if allocation_id in self._mappings]
            for allocation_id in known:
                self._close(allocation_id)
            return len(known)

    def drop_unlinked(self) -> None:
        """Unmap segments that their trainer removed, or that were removed after it; not those in use."""
        with self._lock:
            for key, known in list(self._mappings.items()):
                if isinstance(known, _Shared) and not self._is_held(key) and not known.is_linked():
                    self._close(key)

    def close(self) -> None:
        """Unmap everything."""
        with self._lock:
            for allocation_id in list(self._mappings):
                self._close(allocation_id)

    def _is_held(self, allocation_id: str) -> bool:
        return allocation_id in self.pinned or self._in_use[allocation_id] > 0

    def _close(self, allocation_id: str) -> None:
        self._mappings.pop(allocation_id).close()
        for digest, lent in list(self._lent.items()):
            if any(region.allocation_id == allocation_id for region in lent.all_regions):
                self._forget(digest)


def _describe(region: Region) -> str:
    if isinstance(region, ShmSegment):
        return f"segment {region.name} of {region.size} bytes"
    return f"region [{region.offset}, {region.offset + region.size}) on {region.device_uuid}"


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
            sink.write_whole([place.tensor for place in here], [place.offset for place in here], region)
        sink.flush()


def _receive_packed(region: ShmSegment, sink: Sink, mappings: Mappings) -> None:
    """All tensors that are needed lie in one region, packed in the manifest's order."""
    plan = sink.plan
    positions = [plan.packed_offsets[index] for index in plan.needed]
    for index, position in zip(plan.needed, positions, strict=True) if region.size < plan.packed_end else ():
        if region.size < position + plan.sizes[index]:
            raise _too_small(plan, RegionPlacement(index, 0, position), region)
    with mappings.using([region]), side_stream(mappings.device):
        sink.write_whole(plan.needed, positions, mappings.open(region).data)
        sink.flush()


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
        take_lent(sink, lent, mappings.device, scanned=request.scanned)


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


def _too_small(plan: Plan, place: RegionPlacement, region: Region) -> UpdateRefused:
    return UpdateRefused(
        Reason.MEMORY_UNAVAILABLE,
        f"{plan.manifest.tensor(place.tensor).name} needs bytes [{place.offset}, "
        f"{place.offset + plan.sizes[place.tensor]}) of region {place.handle} "
        f"({_describe(region)}), which has {region.size}",
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
