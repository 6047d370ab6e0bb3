"""One shared-memory segment that holds a manifest's tensors, packed in order; kept between pushes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from trainers_adapters.sending import Outgoing
from weight_updater.arena import TORCH_DTYPES
from weight_updater.checksum import checksums as checksums_of
from weight_updater.packing import PackedBytes
from weight_updater.requests import Manifest, ShmSegment
from weight_updater.shm import SharedSegment
from weight_updater.small import Bytes

BYTES_PER_THREAD = 64 << 20
"""A fill takes a thread for each so many bytes."""
LARGE_BYTES = 64 << 10
"""Tensors from this size on torch would copy with several threads."""


class PackedSegment:
    """Allocated at the first fill and again only when a manifest of another size comes."""

    def __init__(self) -> None:
        self._segment: SharedSegment | None = None
        self._views: list[torch.Tensor] = []
        self._digest = ""

    @property
    def descriptor(self) -> ShmSegment:
        if self._segment is None:
            raise ValueError("the segment holds nothing yet; fill it first")
        return self._segment.descriptor

    @property
    def holds_memory(self) -> bool:
        return self._segment is not None

    def fits(self, outgoing: Outgoing) -> bool:
        """Whether a fill with this manifest would use the memory that is there."""
        return self._segment is not None and (
            self._digest == outgoing.digest or self._segment.descriptor.size == _size(outgoing.manifest)
        )

    def fill(self, outgoing: Outgoing) -> ShmSegment:
        """Copy the source's tensors in.

        Raises:
            ValueError: the source does not yield what its manifest says.
        """
        if not self.fits(outgoing):
            self.close()
            self._segment = SharedSegment.create(_size(outgoing.manifest))
        assert self._segment is not None
        manifest, packed = outgoing.manifest, outgoing.resident
        if self._digest != outgoing.digest:
            self._views, self._digest = [], outgoing.digest
        if packed is not None and packed.columns == manifest.columns:
            _read_into(
                np.frombuffer(self._segment.buf, dtype=np.uint8, count=manifest.packed_offsets()[1]), packed
            )
            return self.descriptor
        self._views = self._views or self._views_of(manifest)
        for due, view, (name, tensor) in zip(
            manifest.columns.names, self._views, outgoing.source, strict=True
        ):
            if name != due or tensor.shape != view.shape:
                raise ValueError(f"the source yields {name} {tuple(tensor.shape)} where {due} was due")
            _copy(view, tensor)
        return self.descriptor

    def checksums(self) -> list[int]:
        """Of the tensors as they lie in the segment, in order."""
        return checksums_of(self._views)

    def _views_of(self, manifest: Manifest) -> list[torch.Tensor]:
        assert self._segment is not None
        data = torch.frombuffer(self._segment.buf, dtype=torch.uint8)
        offsets, _ = manifest.packed_offsets()
        return [
            data[offset : offset + spec.nbytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
            for spec, offset in zip(manifest.tensors, offsets, strict=True)
        ]

    def close(self) -> None:
        self._views, self._digest = [], ""
        if self._segment is not None:
            self._segment.close()
            self._segment.unlink()
            self._segment = None


def _read_into(into: Bytes, packed: PackedBytes) -> None:
    """By as many threads as torch uses, where there are bytes enough: one alone does not fill the memory's
    channels.
    """
    num_threads = max(1, min(torch.get_num_threads(), into.size // BYTES_PER_THREAD))
    if num_threads == 1:
        packed.read_into(into)
        return
    step = -(-into.size // num_threads)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="fill-segment") as pool:
        shares = [
            pool.submit(packed.read_into, into[start : start + step], start)
            for start in range(0, into.size, step)
        ]
    for share in shares:
        share.result()


def _copy(into: torch.Tensor, tensor: torch.Tensor) -> None:
    """Large ones by one thread, at memory speed: torch's threads would wait for each other at every tensor,
    for a time slice each where an engine or a trainer keeps the cores busy.
    """
    tensor = tensor.detach()
    plain = tensor.is_cpu and tensor.dtype == into.dtype and tensor.is_contiguous()
    if plain and tensor.nbytes >= LARGE_BYTES:
        into.view(-1).view(torch.uint8).numpy()[:] = tensor.view(-1).view(torch.uint8).numpy()
    else:
        into.copy_(tensor)


def _size(manifest: Manifest) -> int:
    return max(1, manifest.packed_offsets()[1])
