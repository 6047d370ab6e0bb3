"""CUDA tensors lent to engines of this host by handle, without a copy.

Tensors are grouped by the allocation that they lie in; each allocation gets one handle, kept as long as it
lives, and an id that no other allocation has. Memory for which the driver gives no handle (torch's
expandable segments, pools) and strided tensors go through a buffer that can be shared.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from weight_updater.arena import TORCH_DTYPES
from weight_updater.checksum import checksums, mixed_lengths
from weight_updater.device_memory import (
    Allocation,
    DeviceBuffer,
    allocation_of,
    bytes_at,
    device_uuid,
    handle_of,
    identities_of,
)
from weight_updater.device_scan import Launch, Started, copy_many, is_fast
from weight_updater.manifest import Columns
from weight_updater.requests import CudaIpcRegion, FromIpc, Manifest, RegionPlacement, TensorSpec, align

PROBE_BYTES = 4096
"""How much of each allocation an engine compares when it maps it."""


@dataclass(frozen=True, slots=True)
class Lent:
    """What a push lends: regions and placements, and the digest that names them in later calls."""

    regions: tuple[CudaIpcRegion, ...]
    placements: tuple[RegionPlacement, ...]
    digest: str
    starts: tuple[tuple[int, int], ...]  # per region: GPU, address

    @property
    def allocation_ids(self) -> set[str]:
        return {region.allocation_id for region in self.regions}

    def probed(self) -> tuple[CudaIpcRegion, ...]:
        """The regions with checksums of their first bytes as they are now."""
        samples = [
            bytes_at(address, region.probe_bytes, index)
            for region, (index, address) in zip(self.regions, self.starts, strict=True)
        ]
        return tuple(
            replace(region, probe_checksum=value)
            for region, value in zip(self.regions, checksums(samples), strict=True)
        )


@dataclass(slots=True)
class _Known:
    """An allocation of this process that was lent, and its handle; None if there is none."""

    allocation: Allocation
    index: int
    handle: bytes | None


_Key = tuple[list[str], list[int], list[bool], list[torch.Size], list[torch.dtype]]
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


def _key(named: Sequence[tuple[str, torch.Tensor]]) -> _Key:
    """What is the same as long as tensors lie where they lay; an address is one GPU's alone."""
    tensors = [tensor for _, tensor in named]
    return (
        [name for name, _ in named],
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.is_contiguous, tensors)),
        list(map(_SHAPE, tensors)),
        list(map(_DTYPE, tensors)),
    )


class CudaLending:
    """Handles of a trainer's CUDA memory. Used by one thread at a time."""

    def __init__(self) -> None:
        self._process = secrets.token_hex(8)  # identities are unique in a process only
        self._known: dict[int, _Known] = {}  # by identity
        self._buffers: dict[int, DeviceBuffer] = {}  # by GPU
        self._retired: list[DeviceBuffer] = []
        self._key: _Key | None = None  # of what `_lent` describes
        self._columns: Columns | None = None  # of the manifest that it was compared with
        self._indexes: list[int] = []  # of the GPUs
        self._staged: list[tuple[int, torch.Tensor]] = []  # (tensor, its place in a buffer)
        self._lent: Lent | None = None
        self._kept: list[torch.Tensor] = []  # what was lent last, so that its memory is not another's
        self._scans: list[tuple[list[int], Launch, npt.NDArray[np.uint64]]] = []  # by GPU; see `scan`
        self._started: list[Started] = []  # of these, before somebody asked

    @property
    def allocation_ids(self) -> set[str]:
        """Of everything that engines may have mapped."""
        return self._lent.allocation_ids if self._lent is not None else set()

    def start_scan(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Let the GPUs hash tensors that lie where those of the push before lay, ahead of `lend`, which then
        compares everything else meanwhile. What they find is for `scan`, if `lend` lends the same memory.
        """
        self._started = []
        if not self._staged and _key(named) == self._key:  # what is staged has to be filled first
            self._started = [launch.start() for _, launch, _ in self._scans]

    def lend(self, named: Iterable[tuple[str, torch.Tensor]], manifest: Manifest) -> Lent:
        """What to lend of a source's tensors, which all lie on GPUs. Waits until they are written.

        Allocations that were lent before and are not any more are for the caller to release: compare
        `allocation_ids` before and after, then call `forget`.

        Raises:
            ValueError: the source does not yield what its manifest says.
            UpdateRefused: MEMORY_UNAVAILABLE, NO_MEMORY.
        """
        pairs = list(named)
        key = _key(pairs)
        moved = key != self._key
        if moved or manifest.columns is not self._columns:
            for spec, (name, tensor) in zip(manifest.tensors, pairs, strict=True):
                _check(spec, name, tensor)
        if moved or self._staged or not self._kept:  # strides of what is staged are not in the key
            self._kept = [tensor.detach() for _, tensor in pairs]
        tensors = self._kept
        if self._lent is None or moved or not self._still_there():
            # If it fails, nothing is as it was described.
            self._scans, self._started, self._key = [], [], None
            self._lent = self._arrange(tensors, manifest)
            self._indexes = sorted({tensor.get_device() for tensor in tensors})
        self._key, self._columns = key, manifest.columns
        self._fill(tensors)
        for index in self._indexes:
            torch.cuda.current_stream(index).synchronize()
        return self._lent

    def let_go(self) -> None:
        """Keep the last push's tensors no longer: a source that makes its own needs the room for new ones."""
        self._kept, self._started = [], []

    def scan(self) -> tuple[list[int], bool]:
        """The checksums of what is lent now, in order; and whether a value in it is not finite, or may be."""
        if not self._scans:
            staged = dict(self._staged)
            where = [staged.get(at, tensor) for at, tensor in enumerate(self._kept)]
            devices = dict.fromkeys([tensor.device for tensor in where])
            if not all(is_fast(device) for device in devices):
                return checksums(where), True
            self._scans = [_scan_on(device, where) for device in devices]
        started = self._started or [launch.start() for _, launch, _ in self._scans]
        self._started = []
        values, nonfinite = [0] * len(self._kept), False
        for (here, _, lengths), one in zip(self._scans, started, strict=True):
            found = one.result()
            for at, value in zip(here, (found.totals + lengths).tolist(), strict=True):
                values[at] = value
            nonfinite = nonfinite or bool(found.nonfinite.any())
        return values, nonfinite

    def _still_there(self) -> bool:
        """Whether every address still lies in the allocation that it lay in."""
        known = [(one.allocation.address, one.index) for one in self._known.values()]
        return identities_of(known) == list(self._known)

    def _arrange(self, tensors: Sequence[torch.Tensor], manifest: Manifest) -> Lent:
        """Find the allocations, take handles of new ones, and place every tensor."""
        found = [self._find(t) if t.is_contiguous() and t.numel() else None for t in tensors]
        places: list[tuple[int, int]] = []  # per tensor: identity, address
        self._staged = []
        for index in {tensor.get_device() for tensor in tensors}:
            waiting = [
                at
                for at, (tensor, one) in enumerate(zip(tensors, found, strict=True))
                if tensor.get_device() == index and (one is None or one.handle is None)
            ]
            self._stage_in_buffer(index, waiting, manifest, found)
        staged = dict(self._staged)
        for at, tensor in enumerate(tensors):
            one = found[at]
            assert one is not None, "every tensor lies in an allocation, or has a place in a buffer"
            places.append((one.allocation.identity, staged.get(at, tensor).data_ptr()))
        used = {identity for identity, _ in places}
        self._known = {identity: one for identity, one in self._known.items() if identity in used}
        return self._described(places, [spec.nbytes for spec in manifest.tensors])

    def _find(self, tensor: torch.Tensor) -> _Known:
        """The allocation of a tensor's memory, looked up once for each allocation."""
        address, index = tensor.data_ptr(), tensor.get_device()
        for one in self._known.values():
            inside = 0 <= address - one.allocation.address < one.allocation.nbytes
            if inside and identities_of([(address, index)]) == [one.allocation.identity]:
                return one
        allocation = allocation_of(address, index)
        made = _Known(allocation, index, handle_of(allocation, index))
        self._known[allocation.identity] = made
        return made

    def _stage_in_buffer(
        self, index: int, waiting: Sequence[int], manifest: Manifest, found: list[_Known | None]
    ) -> None:
        """Give tensors (by their place in the manifest) room in the buffer of GPU `index`."""
        sizes = [align(manifest.tensors[at].nbytes) for at in waiting]
        nbytes = sum(sizes) or align(1)
        buffer = self._buffers.get(index)
        if buffer is not None and (buffer.nbytes != nbytes or not waiting):
            self._retired.append(self._buffers.pop(index))  # engines may have it mapped still
            buffer = None
        if not waiting:
            return
        if buffer is None:
            buffer = self._buffers[index] = DeviceBuffer(nbytes, torch.device("cuda", index))
        assert buffer.data is not None
        known = self._find(buffer.data)
        end = 0
        for at, size in zip(waiting, sizes, strict=True):
            spec = manifest.tensors[at]
            view = buffer.data[end : end + spec.nbytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
            self._staged.append((at, view))
            found[at] = known
            end += size

    def _described(self, places: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Lent:
        """One region for each allocation, from its first tensor to the end of its last one."""
        first: dict[int, tuple[int, int]] = {}  # identity -> address and size of its first tensor
        ends: dict[int, int] = {}
        for (identity, address), size in zip(places, sizes, strict=True):
            first[identity] = min(first.get(identity, (address, size)), (address, size))
            ends[identity] = max(ends.get(identity, 0), address + size)
        handles = {identity: number for number, identity in enumerate(first)}
        regions = []
        for identity, (address, size) in first.items():
            one = self._known[identity]
            assert one.handle is not None, "memory without a handle was staged"
            regions.append(
                CudaIpcRegion(
                    allocation_id=f"{self._process}-{identity}",
                    device_uuid=device_uuid(one.index),
                    handle=one.handle,
                    offset=address - one.allocation.address,
                    size=ends[identity] - address,
                    probe_bytes=min(PROBE_BYTES, size),
                )
            )
        placements = tuple(
            RegionPlacement(at, handles[identity], address - first[identity][0])
            for at, (identity, address) in enumerate(places)
        )
        starts = tuple((self._known[identity].index, address) for identity, (address, _) in first.items())
        digest = FromIpc("", cuda_regions=tuple(regions), placements=placements).digest()
        return Lent(tuple(regions), placements, digest, starts)

    def _fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy what cannot be lent where it lies into its place."""
        flat: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for at, view in self._staged:
            tensor = tensors[at]
            if is_fast(view.device) and tensor.is_contiguous():
                pair = (view.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
                flat.setdefault(view.device, []).append(pair)
            else:
                view.copy_(tensor)
        for device, pairs in flat.items():
            copy_many(pairs, device)

    def forget(self, *, free: bool = True) -> None:
        """Let go of what is not lent any more.

        Args:
            free: every engine has acknowledged its release. Else it stays as long as this process, since
                freeing what an engine has mapped is undefined.
        """
        for buffer in self._retired if free else ():
            buffer.close()
        self._retired = []

    def close(self, *, free: bool = True) -> None:
        """Let go of everything; free: as in `forget`."""
        self._staged, self._kept, self._scans, self._lent, self._key = [], [], [], None, None
        self._columns, self._started = None, []
        self._retired += self._buffers.values()
        self._buffers = {}
        self._known = {}
        self.forget(free=free)


def _scan_on(
    device: torch.device, tensors: Sequence[torch.Tensor]
) -> tuple[list[int], Launch, npt.NDArray[np.uint64]]:
    """What hashes those of `tensors` that lie on `device`: (their places, the launch, mixed lengths).

    It keeps none of the tensors: a source that makes tensors as it goes makes them in the memory of those
    before, which is free by then, and at the same addresses.
    """
    here = [at for at, tensor in enumerate(tensors) if tensor.device == device]
    lent = [tensors[at] for at in here]
    data = [bytes_at(tensor.data_ptr(), tensor.nbytes, tensor.get_device()) for tensor in lent]
    launch = Launch(device, data, [tensor.dtype for tensor in lent])
    return here, launch, mixed_lengths([tensor.nbytes for tensor in lent])


def _check(spec: TensorSpec, name: str, tensor: torch.Tensor) -> None:
    if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, TORCH_DTYPES[spec.dtype]):
        raise ValueError(
            f"the source yields {name} {tensor.dtype} {tuple(tensor.shape)} where {spec.name} {spec.dtype} "
            f"{spec.shape} was due"
        )
