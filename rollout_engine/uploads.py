"""Uploads: bulk bytes from other processes, through rings of slots in shared memory.

Whoever took a client's chunk (the front, or a receiver) writes it into a slot of its ring and sends `Chunk`;
the engine copies it out and answers `ChunkTaken`. The thread of each channel files chunks here as they
arrive; a worker thread for each stream takes them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from rollout_engine.channel import Channel
from rollout_engine.messages import Chunk, ChunkTaken, EndOfChunks
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.pinned import register, unregister
from weight_updater.shm import SharedSegment

CPU = torch.device("cpu")


class UploadRing:
    """Slots of shared memory that one other process fills.

    Args:
        channel: to that process.
        slots: number of slots. slot_bytes: size of each.
        device: of the weights; a GPU copies straight from the ring, which is page-locked for it.

    Raises:
        UpdateRefused (NO_MEMORY): shared memory is full.
    """

    def __init__(self, channel: Channel, slots: int, slot_bytes: int, device: torch.device) -> None:
        self.channel = channel
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.is_lost = False  # nobody fills it any more
        self._segment = SharedSegment.create(slots * slot_bytes)
        self._bytes = torch.frombuffer(self._segment.buf, dtype=torch.uint8)
        self._device = device
        self._registered = device.type == "cuda" and register(self._bytes, device)

    @property
    def name(self) -> str:
        return self._segment.descriptor.name

    def slot(self, index: int, nbytes: int) -> torch.Tensor:
        """The first `nbytes` bytes of a slot, uint8; borrows the ring."""
        start = index * self.slot_bytes
        return self._bytes[start : start + nbytes]

    def close(self) -> None:
        """Give the memory back to the system."""
        if self._registered:
            unregister(self._bytes, self._device)
        del self._bytes
        self._segment.close()
        self._segment.unlink()


@dataclass(slots=True)
class _Feed:
    """The chunks of one call that wait to be taken."""

    ring: UploadRing
    queue: queue.SimpleQueue[Chunk | EndOfChunks] = field(default_factory=queue.SimpleQueue)


class Uploads:
    """The rings, and a queue of chunks for each call that is being fed.

    Args:
        channel: to the front, whose ring also takes what is read back.
        slots, slot_bytes, device: of every ring, see UploadRing.
        stall_seconds: a sender that is silent for so long ends its update.
    """

    def __init__(
        self,
        channel: Channel,
        slots: int,
        slot_bytes: int,
        stall_seconds: float,
        device: torch.device = CPU,
    ) -> None:
        self._device = device
        self._stall_seconds = stall_seconds
        self.front_ring = UploadRing(channel, slots, slot_bytes, device)
        self._rings = [self.front_ring]
        self._lock = threading.Lock()
        self._feeds: dict[int, _Feed] = {}

    def add_ring(self, channel: Channel) -> UploadRing:
        """RECEIVER'S THREAD. A ring for another process. Raises what UploadRing does."""
        ring = UploadRing(channel, self.front_ring.slots, self.front_ring.slot_bytes, self._device)
        with self._lock:
            self._rings.append(ring)
        return ring

    def lose(self, ring: UploadRing, reason: str) -> None:
        """RECEIVER'S THREAD. The process that filled a ring is gone: so is what it had not sent."""
        with self._lock:
            ring.is_lost = True
            fed = [call_id for call_id, feed in self._feeds.items() if feed.ring is ring]
            for call_id in fed:
                self._feeds[call_id].queue.put(EndOfChunks(call_id, complete=False, reason=reason))
            self._close_if_unused(ring)

    def open(self, call_id: int, ring: UploadRing | None = None) -> None:
        """CHANNEL THREAD. Chunks for this call will follow, by way of `ring` (None: the front's)."""
        with self._lock:
            self._feeds[call_id] = _Feed(ring or self.front_ring)

    def is_open(self, call_id: int) -> bool:
        """Whether this call brings chunks."""
        with self._lock:
            return call_id in self._feeds

    def file(self, message: Chunk | EndOfChunks, ring: UploadRing | None = None) -> None:
        """CHANNEL THREAD. Queue a chunk, or give its slot back at once if nobody takes it any more."""
        with self._lock:
            feed = self._feeds.get(message.call_id)
            if feed is not None:
                feed.queue.put(message)
                return
        if isinstance(message, Chunk):
            (ring or self.front_ring).channel.send(ChunkTaken(message.call_id, message.slot))

    def chunks(self, call_id: int) -> Iterator[tuple[int | None, int, torch.Tensor]]:
        """WORKER. Yield (tensor index, byte offset, bytes) until the client's stream ends. No index: the
        offset counts in all tensors packed.

        The bytes are a view of the ring, valid until the next one is asked for.

        Raises:
            UpdateRefused: PEER_LOST when the stream broke, TIMEOUT when it stalled.
        """
        feed = self._feeds[call_id]
        while True:
            try:
                message = feed.queue.get(timeout=self._stall_seconds)
            except queue.Empty:
                raise UpdateRefused(
                    Reason.TIMEOUT, f"no chunk came for {self._stall_seconds:g} s; is the sender alive?"
                ) from None
            if isinstance(message, EndOfChunks):
                if message.complete:
                    return
                reason = message.reason or "the sender's stream broke before its end"
                raise UpdateRefused(Reason.PEER_LOST, reason)
            try:
                yield message.tensor, message.offset, feed.ring.slot(message.slot, message.nbytes)
            finally:
                feed.ring.channel.send(ChunkTaken(call_id, message.slot))

    def interrupt(self, call_id: int) -> None:
        """Make the receiver of this call end as if its stream had broken."""
        self.file(EndOfChunks(call_id, complete=False))

    def drop(self, call_id: int) -> None:
        """No more chunks are taken for this call; slots of queued ones go back to who filled them."""
        with self._lock:
            feed = self._feeds.pop(call_id, None)
            if feed is None:
                return
            self._close_if_unused(feed.ring)
        while not feed.queue.empty():
            message = feed.queue.get()
            if isinstance(message, Chunk):
                feed.ring.channel.send(ChunkTaken(message.call_id, message.slot))

    def _close_if_unused(self, ring: UploadRing) -> None:
        """Close a lost ring with the last call that takes chunks from it; `_lock` is held."""
        in_use = any(feed.ring is ring for feed in self._feeds.values())
        if ring.is_lost and not in_use and ring in self._rings:
            self._rings.remove(ring)
            ring.close()

    def close(self) -> None:
        """Give the rings' memory back to the system."""
        with self._lock:
            rings, self._rings = self._rings, []
        for ring in rings:
            ring.close()
