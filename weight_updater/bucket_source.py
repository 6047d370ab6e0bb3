"""The buckets of rank 0 of a group, and where it takes their bytes from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from weight_updater.arena import TORCH_DTYPES
from weight_updater.buckets import BucketPlan
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.packing import PackedBytes


class BytesFrom(Protocol):
    """Gives the bytes of one update's buckets, in order."""

    def fill(self, bucket: int, data: torch.Tensor) -> None:
        """Put the logical row-major bytes of a bucket into `data` ([n] uint8).

        Raises:
            UpdateRefused (MANIFEST_MISMATCH): they are not what the manifest says.
        """
        ...

    def finish(self) -> None:
        """After the last bucket: check what is left. Raises what `fill` does."""
        ...


class FromMemory:
    """The bytes of tensors that lie in this process's memory, for buckets on the CPU."""

    def __init__(self, plan: BucketPlan, packed: PackedBytes) -> None:
        if packed.columns != plan.manifest.columns:
            raise UpdateRefused(Reason.MANIFEST_MISMATCH, "the bytes to send are not what the manifest says")
        self._plan = plan
        self._packed = packed

    def fill(self, bucket: int, data: torch.Tensor) -> None:
        """Put the bytes of a bucket into `data` ([n] uint8)."""
        self._packed.read_into(data.numpy(), bucket * self._plan.bucket_bytes)

    def finish(self) -> None:
        """Nothing is left."""


class FromTensors:
    """Takes tensors from an iterator as their bytes are asked for, checking each against the manifest.

    Args:
        on_cpu: the buckets that are filled lie there.
    """

    def __init__(self, plan: BucketPlan, tensors: Iterable[torch.Tensor], *, on_cpu: bool) -> None:
        self._plan = plan
        self._manifest = plan.manifest
        self._tensors = iter(tensors)
        self._on_cpu = on_cpu
        self._taken = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._array: npt.NDArray[np.uint8] = self._bytes.numpy()  # the same, if `on_cpu`

    def fill(self, bucket: int, data: torch.Tensor) -> None:
        """Put the logical row-major bytes of a bucket's pieces into `data`; tensors come in order."""
        into = data.numpy() if self._on_cpu else None  # a slice of it costs a fifth of a tensor's
        for tensor, start, size, position in self._plan.pieces(bucket):
            while self._taken <= tensor:
                self._take()
            if into is not None:
                into[position : position + size] = self._array[start : start + size]
            else:
                data[position : position + size].copy_(self._bytes[start : start + size])

    def finish(self) -> None:
        """Check what is left: empty tensors, and that no more come than the manifest has."""
        while self._taken < len(self._manifest):
            self._take()
        if next(self._tensors, None) is not None:
            raise UpdateRefused(
                Reason.MANIFEST_MISMATCH,
                f"more tensors came than the manifest's {len(self._manifest)}",
            )

    def _take(self) -> None:
        spec = self._manifest.tensor(self._taken)
        tensor = next(self._tensors, None)
        if tensor is None:
            raise UpdateRefused(
                Reason.MANIFEST_MISMATCH,
                f"{self._taken} tensors came, the manifest has {len(self._manifest)}; {spec.name} is missing",
            )
        if tensor.dtype != TORCH_DTYPES[spec.dtype] or tensor.shape != spec.shape:
            raise UpdateRefused(
                Reason.MANIFEST_MISMATCH,
                f"tensor {self._taken} is {tensor.dtype} {list(tensor.shape)}, the manifest says "
                f"{spec.name}, {spec.dtype} {list(spec.shape)}",
            )
        tensor = tensor.detach().cpu() if self._on_cpu else tensor.detach()
        self._bytes = tensor.contiguous().view(-1).view(torch.uint8)
        if self._on_cpu:
            self._array = self._bytes.numpy()
        self._taken += 1


class Buckets:
    """The buckets of one update, in two halves of one buffer that take turns. The first is filled from the
    start: by the time that all ranks agree on the sizes it can go.
    """

    def __init__(
        self, plan: BucketPlan, tensors: Iterable[torch.Tensor] | PackedBytes, device: torch.device
    ) -> None:
        self._plan = plan
        half = min(plan.bucket_bytes, plan.total_bytes)
        self._halves = torch.zeros(2, half, dtype=torch.uint8, device=device)
        self._source: BytesFrom = (
            FromMemory(plan, tensors)
            if isinstance(tensors, PackedBytes)
            else FromTensors(plan, tensors, on_cpu=self._halves.is_cpu)
        )
        self._num_filled = 0
        if len(plan):
            self.filled(0)

    def __len__(self) -> int:
        return len(self._plan)

    def filled(self, bucket: int) -> torch.Tensor:
        """The bytes of a bucket ([n] uint8), which comes next or came last; what was in its half is gone."""
        data = self._halves[bucket % 2][: self._plan.size(bucket)]
        if bucket == self._num_filled:
            self._source.fill(bucket, data)
            self._num_filled += 1
        return data

    def finish(self) -> None:
        """After the last bucket: that no more was to come. Raises UpdateRefused (MANIFEST_MISMATCH)."""
        self._source.finish()
