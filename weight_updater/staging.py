"""Where bytes wait, and the ways in which they become live.

A `Write` puts new weights into place at the commit and, where it can, undoes that. Addresses of the live
weights stay what they are in all of them but `Rebind`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from weight_updater import virtual_memory
from weight_updater.arena import TORCH_DTYPES, WeightTarget, aligned_zeros
from weight_updater.cast import as_dtype, cast_into
from weight_updater.device_scan import warm
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.moves import Moves, joined
from weight_updater.pinned import pinned_zeros
from weight_updater.requests import Staging
from weight_updater.sink import Sink

SCRATCH_BYTES = 16 << 20
"""What an exchange of two buffers may take beside them."""

Ranges = Sequence[tuple[int, int]]


def copy_bytes(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another of the same dtype and shape, on any devices."""
    destination.copy_(source)


def synchronise(device: torch.device) -> None:
    """Wait until copies have finished on the device: enqueued is not done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StagingBuffers:
    """The buffers in which updates wait; each is allocated once and kept.

    Args:
        device_staging: reserve a second arena on the target's device, now.
    """

    def __init__(self, target: WeightTarget, *, device_staging: bool) -> None:
        self._target = target
        self._lock = threading.Lock()  # `host` may be asked for by any thread, ahead of an update
        self._device = target.arena.allocate(target.device) if device_staging else None
        warm(target.device)
        self._host: torch.Tensor | None = None
        self._scratch: torch.Tensor | None = None

    def choose(self, asked: Staging) -> Staging:
        """What `asked` comes to here.

        Raises:
            UpdateRefused (NO_STAGING): device staging was not reserved at start.
        """
        if asked is Staging.AUTO:
            return Staging.HOST if self._device is None else Staging.DEVICE
        if asked is Staging.DEVICE and self._device is None:
            raise UpdateRefused(
                Reason.NO_STAGING,
                "staging=device was asked for, but no second arena was reserved at start; "
                "start with device staging, or use staging=host",
            )
        return asked

    def get(self, staging: Staging) -> torch.Tensor:
        """The buffer of `staging` (device or host): uint8 in the arena's layout.

        Raises:
            UpdateRefused (NO_MEMORY): there is not enough host memory.
        """
        if staging is Staging.DEVICE:
            assert self._device is not None, "choose() refuses this"
            return self._device
        with self._lock:
            if self._host is None:
                self._host = self._new_host()
            return self._host

    def release(self) -> int:
        """Give the device buffer's memory back, its address kept; bytes freed. Its contents are gone."""
        return virtual_memory.release(self._device) if self._device is not None else 0

    def resume(self) -> int:
        """Take the device buffer's memory again; bytes taken.

        Raises:
            torch.OutOfMemoryError: the device has not enough now.
        """
        return virtual_memory.resume(self._device) if self._device is not None else 0

    def _new_host(self) -> torch.Tensor:
        nbytes = self._target.arena.nbytes
        if self._target.device.type != "cuda":
            return allocate(nbytes, torch.device("cpu"), "staging in host memory")
        try:
            return pinned_zeros(nbytes, self._target.device)
        except MemoryError as error:
            raise UpdateRefused(
                Reason.NO_MEMORY, f"no room for staging in host memory: {nbytes} bytes ({error})"
            ) from error

    def scratch(self) -> torch.Tensor:
        """A bounded uint8 buffer on the target's device, for exchanges."""
        if self._scratch is None:
            nbytes = min(SCRATCH_BYTES, self._target.arena.nbytes)
            self._scratch = allocate(nbytes, self._target.device, "the scratch of an exchange")
        return self._scratch


def allocate(
    nbytes: int, device: torch.device, purpose: str, take: Callable[[], torch.Tensor] | None = None
) -> torch.Tensor:
    """Zeroed bytes, or a refusal that says what they were for. take: how they are taken, if not by torch."""
    try:
        return aligned_zeros(nbytes, device) if take is None else take()
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        raise UpdateRefused(
            Reason.NO_MEMORY, f"no room for {purpose}: {nbytes} bytes on {device} ({error})"
        ) from error


class Write(Protocol):
    """How new weights come into place."""

    def run(self) -> None:
        """Write. A fault inside leaves it to `undo` to say what became of the old weights."""
        ...

    def undo(self) -> bool:
        """Bring the old weights back; False if that is not possible. May be called after a fault."""
        ...


class InPlace:
    """The bytes are in the live slots already (staging none, or an arena adopted earlier)."""

    def run(self) -> None:
        return None

    def undo(self) -> bool:
        return False


class Copy:
    """Copy `ranges` of a staging buffer over the live one."""

    def __init__(self, live: torch.Tensor, staged: torch.Tensor, ranges: Ranges) -> None:
        self._live, self._staged, self._ranges = live, staged, ranges

    def run(self) -> None:
        for start, size in self._ranges:
            copy_bytes(self._live[start : start + size], self._staged[start : start + size])

    def undo(self) -> bool:
        return False


class Exchange:
    """Swap `ranges` of two buffers through a bounded scratch; both keep their addresses.

    A piece takes three copies: scratch <- live, live <- staged, staged <- scratch. `_step` counts those
    that were started in the piece at hand, so that `undo` knows which bytes lie where.
    """

    def __init__(
        self, live: torch.Tensor, staged: torch.Tensor, ranges: Ranges, scratch: torch.Tensor
    ) -> None:
        self._scratch = scratch
        step = scratch.numel()
        self._pieces = [
            (live[at : min(at + step, start + size)], staged[at : min(at + step, start + size)])
            for start, size in ranges
            for at in range(start, start + size, step)
        ]
        self._num_done = 0
        self._step = 0

    def run(self) -> None:
        for live, staged in self._pieces[self._num_done :]:
            self._swap(live, staged)
            self._num_done += 1

    def undo(self) -> bool:
        if self._step:
            live, staged = self._pieces[self._num_done]
            old = self._scratch[: live.numel()]
            if self._step == 3:  # the new bytes are whole in `live` only
                copy_bytes(staged, live)
            if self._step >= 2:
                copy_bytes(live, old)
            self._step = 0
        while self._num_done:
            self._swap(*self._pieces[self._num_done - 1])
            self._num_done -= 1
        return True

    def _swap(self, live: torch.Tensor, staged: torch.Tensor) -> None:
        old = self._scratch[: live.numel()]
        self._step = 1
        copy_bytes(old, live)
        self._step = 2
        copy_bytes(live, staged)
        self._step = 3
        copy_bytes(staged, old)
        self._step = 0


class CopyBorrowed:
    """Copy what a sink borrowed straight from the trainer's memory into `live`, casting where needed.

    On a GPU `run` returns before it has happened; what the current stream gets next comes behind it.
    """

    def __init__(self, target: WeightTarget, live: torch.Tensor, sink: Sink) -> None:
        def moves() -> Moves:
            return Moves(target.device, joined(target.arena, _straight(target, sink), live))

        if len(sink.offered) == 1:  # the same tensors as in the step before, mostly
            self._moves = sink.offered[0].made(("commit", live.data_ptr()), moves)
        else:
            self._moves = moves()
        dtypes = sink.plan.manifest.columns.dtypes
        self._casts = [
            (
                target.arena.slot_view(live, sink.plan.slot(index).name).view(-1),
                as_dtype(sink.borrowed[index], TORCH_DTYPES[dtypes[index]]),
            )
            for index in sorted(sink.plan.casts.intersection(sink.borrowed).difference(sink.plan.twins))
        ]

    def run(self) -> None:
        self._moves.start()
        for destination, source in self._casts:
            cast_into(destination, source)

    def undo(self) -> bool:
        return False


def _straight(target: WeightTarget, sink: Sink) -> dict[str, torch.Tensor]:
    """Slot -> the borrowed bytes that it takes as they are."""
    return {
        target.arena.canonical(sink.plan.slot(index).name): sink.borrowed[index]
        for index in sink.plan.applied
        if index in sink.borrowed and sink.plan.same_dtype(index)
    }


class Rebind:
    """Point the slots at another buffer, after `first` has filled it. Addresses change."""

    def __init__(self, target: WeightTarget, buffer: torch.Tensor, first: Write) -> None:
        self._target, self._buffer, self._first = target, buffer, first
        self._old = target.buffer

    def run(self) -> None:
        self._first.run()
        self._target.bind(self._buffer)

    def undo(self) -> bool:
        self._target.bind(self._old)
        return True
