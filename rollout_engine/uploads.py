"""Uploads: bulk bytes between the two processes, through one ring of slots in shared memory.

The front writes a chunk into a slot and sends `Chunk`; the engine copies it out and answers `ChunkTaken`.
The channel's thread files chunks here as they arrive; a receiver's worker thread takes them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import torch

from rollout_engine.channel import Channel
from rollout_engine.messages import Chunk, ChunkTaken, EndOfChunks
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.pinned import register, unregister
from weight_updater.shm import SharedSegment

CPU = torch.device("cpu")


class Uploads:
    """The ring, and a queue of chunks for each call that is being fed.

    Args:
        slots: number of slots. slot_bytes: size of each.
        stall_seconds: a sender that is silent for so long ends its update.
        device: of the weights; a GPU copies straight from the ring, which is page-locked for it.
    """

    def __init__(
        self,
        channel: Channel,
        slots: int,
        slot_bytes: int,
        stall_seconds: float,
        device: torch.device = CPU,
    ) -> None:
        self._channel = channel
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stall_seconds = stall_seconds
        self._segment = SharedSegment.create(slots * slot_bytes)
        self._ring = torch.frombuffer(self._segment.buf, dtype=torch.uint8)
        self._device = device
        self._registered = device.type == "cuda" and register(self._ring, device)
        self._lock = threading.Lock()
        self._feeds: dict[int, queue.SimpleQueue[Chunk | EndOfChunks]] = {}

    @property
    def name(self) -> str:
        return self._segment.descriptor.name

    def slot(self, index: int, nbytes: int) -> torch.Tensor:
        """The first `nbytes` bytes of a slot, uint8; borrows the ring."""
        start = index * self.slot_bytes
        return self._ring[start : start + nbytes]

    def open(self, call_id: int) -> None:
        """CHANNEL THREAD. Chunks for this call will follow."""
        with self._lock:
            self._feeds[call_id] = queue.SimpleQueue()

    def is_open(self, call_id: int) -> bool:
        """Whether this call brings chunks."""
        with self._lock:
            return call_id in self._feeds

    def file(self, message: Chunk | EndOfChunks) -> None:
        """CHANNEL THREAD. Queue a chunk, or give its slot back at once if nobody takes it any more."""
        with self._lock:
            feed = self._feeds.get(message.call_id)
            if feed is not None:
                feed.put(message)
                return
        if isinstance(message, Chunk):
            self._channel.send(ChunkTaken(message.call_id, message.slot))

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
                message = feed.get(timeout=self._stall_seconds)
            except queue.Empty:
                raise UpdateRefused(
                    Reason.TIMEOUT, f"no chunk came for {self._stall_seconds:g} s; is the sender alive?"
                ) from None
            if isinstance(message, EndOfChunks):
                if message.complete:
                    return
                raise UpdateRefused(Reason.PEER_LOST, "the sender's stream broke before its end")
            try:
                yield message.tensor, message.offset, self.slot(message.slot, message.nbytes)
            finally:
                self._channel.send(ChunkTaken(call_id, message.slot))

    def interrupt(self, call_id: int) -> None:
        """Make the receiver of this call end as if its stream had broken."""
        self.file(EndOfChunks(call_id, complete=False))

    def drop(self, call_id: int) -> None:
        """No more chunks are taken for this call; slots of queued ones go back to the front."""
        with self._lock:
            feed = self._feeds.pop(call_id, None)
        while feed is not None and not feed.empty():
            message = feed.get()
            if isinstance(message, Chunk):
                self._channel.send(ChunkTaken(message.call_id, message.slot))

    def close(self) -> None:
        """Give the ring's memory back to the system."""
        if self._registered:
            unregister(self._ring, self._device)
        del self._ring
        self._segment.close()
        self._segment.unlink()
