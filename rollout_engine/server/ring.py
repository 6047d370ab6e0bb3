"""The upload ring: slots of shared memory through which bulk bytes cross to the engine process and back."""

from __future__ import annotations

import asyncio
from collections import deque

from rollout_engine.messages import Ready
from weight_updater.requests import ShmSegment
from weight_updater.shm import SharedSegment

READER = -1
"""Owner of slots that are lent for reading; call ids are positive."""


class Ring:
    """Slots lent one at a time; who waits for one is held back, which holds the client's stream back.

    A slot belongs to a call from `acquire` until `release`: the engine took it (ChunkTaken), or the call
    ended (its Reply), after which the engine reads no slot of it.
    """

    def __init__(self, ready: Ready) -> None:
        self.slot_bytes = ready.ring_slot_bytes
        size = ready.ring_slots * ready.ring_slot_bytes
        self._segment = SharedSegment.open(ShmSegment(name=ready.ring_name, size=size, allocation_id=""))
        # Both ends have it mapped now; without a name it cannot outlive them, however they end.
        self._segment.unlink()
        self._free = deque(range(ready.ring_slots))
        self._owner: dict[int, int] = {}  # slot -> call id
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    async def acquire(self, call_id: int) -> int:
        """Wait for a free slot, in order of arrival, and lend it to a call."""
        while not self._free:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # the wake-up was ours and is passed on
                raise
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        slot = self._free.popleft()
        self._owner[slot] = call_id
        return slot

    def release(self, slot: int, call_id: int) -> None:
        """Take a slot back; ignored unless it is this call's."""
        if self._owner.get(slot) == call_id:
            del self._owner[slot]
            self._free.append(slot)
            self._wake()

    def release_all(self, call_id: int) -> None:
        """Take back every slot that an ended call still had."""
        for slot in [slot for slot, owner in self._owner.items() if owner == call_id]:
            self.release(slot, call_id)

    def _wake(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def write(self, slot: int, data: bytes | memoryview) -> None:
        """Copy `data` into a slot. The slot must be lent to the caller."""
        start = slot * self.slot_bytes
        self._segment.buf[start : start + len(data)] = data

    def read(self, slot: int, nbytes: int) -> bytes:
        """Copy `nbytes` out of a slot."""
        start = slot * self.slot_bytes
        return bytes(self._segment.buf[start : start + nbytes])

    def close(self) -> None:
        """Unmap the segment."""
        self._segment.close()
