"""Copies to a device beside whatever else it does, and the page-locked slots that they start from.

A receiver has one stream of its own. Copies are queued on it, and a `Mark` tells when those before it have
ended: so a slot is filled again only after its bytes have left it, and an update is reported as received
only when all its bytes have arrived.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from weight_updater.device_memory import queue_copy
from weight_updater.pinned import pinned_zeros

SLOT_BYTES = 8 << 20
"""Bytes of one slot of the ring: of one read, and of one copy to the device."""

NUM_SLOTS = 20
"""As few as keep readers and copies busy: what still lies in a cache is copied fastest."""

T = TypeVar("T")


class Mark(Protocol):
    """A point in the order of copies."""

    def done(self) -> bool:
        """Whether all copies before it have ended."""
        ...

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
        # Thousands of these, each with the interpreter's lock that readers wait for: torch takes five times
        # as long to make a stream the current one, to copy, and to go back.
        if queue_copy(destination, source, self.stream):
            return
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

    def done(self) -> bool:
        done: bool = self._event.query()  # type: ignore[no-untyped-call]
        return done

    def wait(self) -> None:
        self._event.synchronize()


@dataclass(frozen=True, slots=True)
class RingSlot:
    """data: [slot bytes] uint8, page-locked. view: the same memory, to read into."""

    data: torch.Tensor
    view: memoryview


class Passage(Generic[T]):
    """Slots on their way round: readers fill them, one thread queues the copies out of them.

    Only that thread calls the device: many would wait for one another more than for it.
    """

    def __init__(self, slots: Sequence[RingSlot], copies: Copies) -> None:
        self._copies = copies
        self._free: queue.SimpleQueue[RingSlot | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[RingSlot, T] | None] = queue.SimpleQueue()
        self._leaving: deque[tuple[Mark, RingSlot]] = deque()  # in the order of the copies
        for slot in slots:
            self._free.put(slot)

    def take(self) -> RingSlot | None:
        """READER. A slot that no copy reads from any more; None after `stop`."""
        slot = self._free.get()
        if slot is None:
            self._free.put(None)  # for the next reader
        return slot

    def fill(self, slot: RingSlot, what: T) -> None:
        """READER. What lies in the slot may be copied."""
        self._filled.put((slot, what))

    def end(self) -> None:
        """READER. This one fills no more slots."""
        self._filled.put(None)

    def stop(self) -> None:
        """Readers get no more slots."""
        self._free.put(None)

    def arrivals(self, num_readers: int) -> Iterator[tuple[torch.Tensor, T]]:
        """COPIER. Filled slots, until all readers have ended.

        All copies out of a slot must have been queued when the next one is asked for.
        """
        while num_readers:
            while self._leaving and self._leaving[0][0].done():
                self._free.put(self._leaving.popleft()[1])
            if self._leaving and self._free.empty() and self._filled.empty():
                self._leaving[0][0].wait()  # every reader may be waiting for this one
                continue
            arrived = self._filled.get()
            if arrived is None:
                num_readers -= 1
                continue
            slot, what = arrived
            yield slot.data, what
            self._leaving.append((self._copies.mark(), slot))


class HostRing:
    """Page-locked slots between files and a device; taken once, shared by all updates of a process.

    Args:
        memory: uint8, a whole number of slots.
    """

    def __init__(self, memory: torch.Tensor, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._slots = [RingSlot(slot, slot.numpy().data) for slot in memory.view(-1, slot_bytes)]
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def passage(self, copies: Copies) -> Iterator[Passage[Any]]:
        """WORKER. One receiver at a time. All copies out of the slots must have ended when the block does."""
        with self._busy:
            yield Passage(self._slots, copies)


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
