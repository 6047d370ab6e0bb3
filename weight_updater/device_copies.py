"""Copies to a device beside whatever else it does, and the page-locked slots that they start from.

A receiver has one stream of its own. Copies are queued on it, and a `Mark` tells when those before it have
ended: so a slot is filled again only after its bytes have left it, and an update is reported as received
only when all its bytes have arrived.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from weight_updater.pinned import pinned_zeros

SLOT_BYTES = 8 << 20
"""Bytes of one slot of the ring: of one read, and of one copy to the device."""

NUM_SLOTS = 48

SLOTS_PER_LANE = 2
"""One slot is filled while the other one's bytes travel."""


class Mark(Protocol):
    """A point in the order of copies."""

    def wait(self) -> None:
        """Until all copies before it have ended. Lets other Python threads run."""
        ...


class Copies(Protocol):
    """Copies to one device, carried out in order. Used by several threads at once."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between tensors of equal dtype and shape. The source's bytes must stay until a later
        mark was waited for."""
        ...

    def mark(self) -> Mark:
        """A point behind all copies that were queued before."""
        ...

    def finish(self) -> None:
        """Until all copies have ended."""
        ...

    def follow(self) -> None:
        """Let what is queued from here on come after what the calling thread has queued on the device."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """A block in which the calling thread's device work runs in the order of the copies."""
        ...


class CudaCopies:
    """Copies on a CUDA stream of their own, so that they run beside forward passes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            destination.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        # Blocking: a thread that waits sleeps, and leaves its core to the engine's loop.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return _Event(event)

    def finish(self) -> None:
        self.mark().wait()

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class Lane:
    """The slots of one thread, in turn.

    Args:
        slots: [slot bytes] uint8 each, page-locked.
    """

    def __init__(self, slots: list[torch.Tensor], copies: Copies) -> None:
        self._slots = [(slot, slot.numpy().data) for slot in slots]
        self._marks: list[Mark | None] = [None] * len(slots)
        self._copies = copies
        self._at = 0

    def next(self) -> tuple[torch.Tensor, memoryview]:
        """A slot (as a tensor, and as memory to read into) that no copy reads from any more."""
        self._at = (self._at + 1) % len(self._slots)
        mark = self._marks[self._at]
        if mark is not None:
            mark.wait()
            self._marks[self._at] = None
        return self._slots[self._at]

    def sent(self) -> None:
        """All copies out of the slot that `next` gave have been queued."""
        self._marks[self._at] = self._copies.mark()


class HostRing:
    """Page-locked slots between files and a device; taken once, shared by all updates of a process.

    Args:
        memory: uint8, a whole number of slots.
    """

    def __init__(self, memory: torch.Tensor, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._slots = list(memory.view(-1, slot_bytes))
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def lanes(self, copies: Copies, num_threads: int) -> Iterator[list[Lane]]:
        """WORKER. Up to `num_threads` lanes; fewer if there are not enough slots. One receiver at a time.

        All copies out of the slots must have ended when the block does.
        """
        num_lanes = max(1, min(num_threads, len(self._slots) // SLOTS_PER_LANE))
        with self._busy:
            yield [Lane(self._slots[lane::num_lanes][:SLOTS_PER_LANE], copies) for lane in range(num_lanes)]


_lock = threading.Lock()
_copies: dict[torch.device, CudaCopies] = {}
_rings: dict[torch.device, HostRing] = {}


def copies_to(device: torch.device) -> CudaCopies:
    """The stream of this process's receivers on a CUDA device. ANY THREAD."""
    with _lock:
        if device not in _copies:
            _copies[device] = CudaCopies(device)
        return _copies[device]


def ring_to(device: torch.device) -> HostRing:
    """The ring of this process for a CUDA device; made at its first use. ANY THREAD.

    Raises:
        MemoryError: the host has not enough.
    """
    with _lock:
        if device not in _rings:
            _rings[device] = HostRing(pinned_zeros(NUM_SLOTS * SLOT_BYTES, device), SLOT_BYTES)
        return _rings[device]
