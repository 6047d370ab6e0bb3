"""A receiver's end of the engine: calls that bring chunks, and the ring that the chunks go through.

The same as engine_client.py and ring.py for the front, with threads in place of an event loop.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from concurrent.futures import Future

from rollout_engine import messages as m
from rollout_engine.channel import Channel
from rollout_engine.errors import EngineError, Reason
from rollout_engine.logs import get_log
from rollout_engine.server.status import error_from
from weight_updater.requests import BeginUpdate, FromTensor, ShmSegment
from weight_updater.shm import SharedSegment

log = get_log(__name__)

ENGINE_GONE = "the engine process closed its connection"


class SlotRing:
    """Slots of an upload ring, lent one at a time to calls; safe to use by many threads.

    From `acquire` to `filled` a slot is its caller's alone: a call that ends meanwhile, because the engine
    refused it, gives back no slot that a thread still writes to, or the next call's bytes would be spoiled.
    """

    def __init__(self, ring: m.UploadRing) -> None:
        self.slot_bytes = ring.ring_slot_bytes
        size = ring.ring_slots * ring.ring_slot_bytes
        self._segment = SharedSegment.open(ShmSegment(name=ring.ring_name, size=size, allocation_id=""))
        # Both ends have it mapped now; without a name it cannot outlive them, however they end.
        self._segment.unlink()
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._segment.buf))
        self._free = deque(range(ring.ring_slots))
        self._owner: dict[int, int] = {}  # slot -> call id
        self._filling: dict[int, bool] = {}  # slot -> whether its call has ended meanwhile
        self._changed = threading.Condition()
        self._closed = False

    def acquire(self, call_id: int) -> int:
        """Wait for a free slot and lend it to a call.

        Raises:
            EngineError (ENGINE_DEAD): the ring was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise EngineError(Reason.ENGINE_DEAD, ENGINE_GONE)
            slot = self._free.popleft()
            self._owner[slot] = call_id
            self._filling[slot] = False
            return slot

    def filled(self, slot: int) -> bool:
        """Nothing is written to the slot any more. False: its call has ended, and the slot is free again."""
        with self._changed:
            if not self._filling.pop(slot):
                return True
            self.release(slot, self._owner[slot])
            return False

    def release(self, slot: int, call_id: int) -> None:
        """Take a slot back; ignored unless it is this call's."""
        with self._changed:
            if self._owner.get(slot) == call_id:
                del self._owner[slot]
                self._free.append(slot)
                self._changed.notify()

    def release_all(self, call_id: int) -> None:
        """Take back every slot that an ended call still had; those that are being filled, by `filled`."""
        with self._changed:
            for slot in [slot for slot, owner in self._owner.items() if owner == call_id]:
                if slot in self._filling:
                    self._filling[slot] = True
                else:
                    self.release(slot, call_id)

    def write(self, slot: int, source: bytes, start: int, nbytes: int) -> None:
        """Copy bytes [start, start + nbytes) of `source` into a slot, which must be lent to the caller.

        Other threads go on meanwhile: an assignment to the segment's memory would hold them up.
        """
        if not 0 <= start <= start + nbytes <= len(source) or nbytes > self.slot_bytes:
            raise ValueError(f"bytes [{start}, {start + nbytes}) of {len(source)} do not fit a slot")
        first = ctypes.cast(ctypes.c_char_p(source), ctypes.c_void_p).value
        assert first is not None
        ctypes.memmove(self._address + slot * self.slot_bytes, first + start, nbytes)

    def close(self) -> None:
        """Let nobody wait any more. The memory goes with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class EngineLink:
    """One engine process, over a socket.

    Args:
        channel: its first event is the ring.
        first_call_id: ids from here on are this process's alone.

    Raises:
        EngineError (ENGINE_DEAD): the engine closed the socket before it gave a ring.
    """

    def __init__(self, channel: Channel, first_call_id: int) -> None:
        self._channel = channel
        self._events = channel.events()
        ring = next(self._events, None)
        if not isinstance(ring, m.UploadRing):
            raise EngineError(Reason.ENGINE_DEAD, ENGINE_GONE)
        self.ring = SlotRing(ring)
        self._call_ids = itertools.count(first_call_id)
        self._lock = threading.Lock()
        self._calls: dict[int, Future[m.Reply]] = {}
        self._is_dead = False

    def start(self) -> None:
        """Take the engine's events on a thread."""
        threading.Thread(target=self._take_events, name="engine-events", daemon=True).start()

    def begin_update(self, tensor: FromTensor, begin: BeginUpdate | None) -> tuple[int, Future[m.Reply]]:
        """Send an Update; gives its call id and the future of its Reply, which fails with the domain error
        that the engine answered, or ENGINE_DEAD.
        """
        future: Future[m.Reply] = Future()
        with self._lock:
            if self._is_dead:
                raise EngineError(Reason.ENGINE_DEAD, ENGINE_GONE)
            call_id = next(self._call_ids)
            self._calls[call_id] = future
        self.send(m.Update(call_id=call_id, tensor=tensor, begin=begin))
        return call_id, future

    def send(self, command: m.Command) -> None:
        """Send a command that is not answered by a Reply."""
        self._channel.send(command)

    def _take_events(self) -> None:
        for event in self._events:
            match event:
                case m.ChunkTaken():
                    self.ring.release(event.slot, event.call_id)
                case m.Reply():
                    self._on_reply(event)
        with self._lock:
            self._is_dead = True
            calls, self._calls = self._calls, {}
        self.ring.close()
        for future in calls.values():
            future.set_exception(EngineError(Reason.ENGINE_DEAD, ENGINE_GONE))

    def _on_reply(self, reply: m.Reply) -> None:
        with self._lock:
            future = self._calls.pop(reply.call_id, None)
        if future is None:
            log.error("reply_to_nobody", call_id=reply.call_id)
        elif reply.error is not None:
            future.set_exception(error_from(reply.error))
        else:
            future.set_result(reply)
        self.ring.release_all(reply.call_id)
