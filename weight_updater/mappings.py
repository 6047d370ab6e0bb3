"""Memory of trainers on the same host, mapped here.

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

from weight_updater.cast import bytes_over
from weight_updater.checksum import checksum
from weight_updater.device_memory import MappedAllocation
from weight_updater.device_scan import side_stream
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.lent_tensors import LentTensors
from weight_updater.plan import Plan
from weight_updater.requests import CudaIpcRegion, FromIpc, ShmSegment
from weight_updater.shm import SharedSegment

MAX_MAPPINGS = 1024
"""Loose mappings that are kept; beyond them the least recently used one goes."""

MAX_LENT = 8
"""Sets of regions and placements that are remembered by digest."""

Region = ShmSegment | CudaIpcRegion


class MappedRegion:
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
        self._mapping: MappedRegion | None = MappedRegion(
            segment.allocation_id, bytes_over(self._opened.buf), self._opened
        )

    def mapping(self, region: Region) -> MappedRegion:
        if region != self.named or self._mapping is None:
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"allocation {self.named.allocation_id} is mapped as segment {self.named.name} of "
                f"{self.named.size} bytes, not {describe(region)}; give every allocation an id of its own",
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
        self._regions: dict[tuple[int, int], MappedRegion] = {}
        self._owner: SharedSegment | None = None
        try:
            self.mapping(region)
            self._probe(region, device)
        except Exception:
            self.close()
            raise

    def mapping(self, region: Region) -> MappedRegion:
        if not isinstance(region, CudaIpcRegion) or (region.device_uuid, region.handle) != self._named:
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"allocation {region.allocation_id} is mapped as another allocation on {self._named[0]}, "
                f"not {describe(region)}; give every allocation an id of its own",
            )
        where = (region.offset, region.size)
        if where not in self._regions:
            self._allocation.check_holds(region.offset + region.size)
            if region.owner is not None and self._owner is None:
                self._owner = SharedSegment.open(region.owner)
            self._regions[where] = MappedRegion(
                region.allocation_id, self._allocation.region(*where), self._owner
            )
        return self._regions[where]

    def _probe(self, region: CudaIpcRegion, device: torch.device) -> None:
        """Read the region's first bytes, and compare them with what the trainer says they are."""
        sample = self.mapping(region).data[: region.probe_bytes or 8]
        with side_stream(device):
            found = checksum(sample.to(device))
        if region.probe_checksum is not None and found != region.probe_checksum:
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"the first {sample.numel()} bytes of {describe(region)} have checksum {found:016x} here, "
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
        self._adopted = ""
        self.device = device
        self._mappings: OrderedDict[str, _Shared | _OnGpu] = OrderedDict()
        self._lent: OrderedDict[str, FromIpc] = OrderedDict()
        self._arranged: dict[tuple[str, bool], LentTensors] = {}  # by the digest of what was lent, and adopt
        self._in_use: Counter[str] = Counter()  # allocations that a worker reads
        self._lock = threading.RLock()  # the loop releases, a worker opens

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def open(self, region: Region) -> MappedRegion:
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
                        Reason.INVALID_UPDATE, f"{describe(region)} comes without an allocation id"
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

    def unpin(self, adopted: str = "") -> None:
        """Let all go but an adopted allocation. Copies that were arranged into other live weights are
        forgotten, else they would keep that memory.
        """
        if adopted != self._adopted:
            self._arranged = {key: lent for key, lent in self._arranged.items() if key[1]}
        self._adopted, self.pinned = adopted, {adopted} - {""}

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


def describe(region: Region) -> str:
    """What errors call it."""
    if isinstance(region, ShmSegment):
        return f"segment {region.name} of {region.size} bytes"
    return f"region [{region.offset}, {region.offset + region.size}) on {region.device_uuid}"
