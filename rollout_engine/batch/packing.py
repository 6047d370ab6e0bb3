"""Packer: brings the small host arrays of a step to the device, many in one copy.

A copy from ordinary host memory makes the host wait for everything the device still has to do. Arrays go
through pinned memory instead, so that a step can be made up while the one before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

ALIGNMENT = 16
WORD = 8
NUM_SLOTS = 24
"""Pinned buffers in turn: a step in flight may still read the ones it was made up in, and to wait for those
is to wait for that step. It takes up to twelve, where rows have penalties, biases and truncation.
"""
FIRST_SLOT_BYTES = 1 << 20


class Packer:
    """Called by the loop's thread, on the stream that uses the tensors.

    Args:
        device: where tensors go; on a CPU arrays are taken as they are.
        fetch: how [n] uint8 on the device gets the bytes of pinned memory, asynchronously on the current
            stream; n is a multiple of WORD. None: the device's copy engine, which may be busy with more.
    """

    def __init__(
        self, device: torch.device, fetch: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    ) -> None:
        self.device = device
        self._fetch = fetch or _copy
        self._slots: list[torch.Tensor | None] = [None] * NUM_SLOTS
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_SLOTS
        self._next = 0

    def put(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Tensors of the same dtypes and shapes on the device; asynchronous there."""
        arrays = [np.ascontiguousarray(array) for array in arrays]
        if self.device.type != "cuda":
            return [torch.from_numpy(array) for array in arrays]
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        pinned = self._slot(end)
        view = pinned.numpy()
        for start, array in zip(starts, arrays, strict=True):
            view[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        packed = torch.empty(end, dtype=torch.uint8, device=self.device)
        self._fetch(packed, pinned[:end])
        self._mark()
        return [
            packed[start : start + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def fill(self, target: torch.Tensor, array: np.ndarray) -> None:
        """Copy `array` into `target`, a contiguous tensor of the same number of bytes on the device.

        Other numbers than multiples of WORD go by the copy engine.
        """
        array = np.ascontiguousarray(array)
        if self.device.type != "cuda":
            target.copy_(torch.from_numpy(array))
            return
        pinned = self._slot(array.nbytes)
        pinned.numpy()[: array.nbytes] = array.reshape(-1).view(np.uint8)
        fetch = self._fetch if array.nbytes % WORD == 0 else _copy
        fetch(target.view(-1).view(torch.uint8), pinned[: array.nbytes])
        self._mark()

    def _slot(self, nbytes: int) -> torch.Tensor:
        """The next pinned buffer, once the device has read what was in it."""
        copied = self._copied[self._next]
        if copied is not None:
            copied.synchronize()
        slot = self._slots[self._next]
        if slot is None or slot.numel() < nbytes:
            slot = torch.empty(max(nbytes, FIRST_SLOT_BYTES), dtype=torch.uint8, pin_memory=True)
            self._slots[self._next] = slot
        return slot

    def _mark(self) -> None:
        event = self._copied[self._next]
        if event is None:
            event = self._copied[self._next] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._next = (self._next + 1) % NUM_SLOTS


def _copy(target: torch.Tensor, pinned: torch.Tensor) -> None:
    target.copy_(pinned, non_blocking=True)


_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return _DTYPES[dtype]
