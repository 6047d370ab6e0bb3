"""A receiver's end of the engine: slots that are lent to calls, and calls that end whatever happens."""

from __future__ import annotations

import socket
import threading
import time

import msgspec
import pytest

from rollout_engine import messages as m
from rollout_engine.channel import Channel
from rollout_engine.errors import EngineError
from rollout_engine.server.receiver_link import EngineLink, SlotRing
from weight_updater.errors import UpdateRefused
from weight_updater.requests import FromTensor
from weight_updater.shm import SharedSegment


@pytest.fixture
def segment():
    with SharedSegment.create(2 * 64) as made:
        yield made


@pytest.fixture
def ring(segment):
    return SlotRing(m.UploadRing(segment.descriptor.name, 2, 64))


class Engine:
    """The other end of a link."""

    def __init__(self, segment: SharedSegment) -> None:
        ours, theirs = socket.socketpair()
        self.socket, self.channel = ours, Channel(ours)
        self.channel.send(m.UploadRing(segment.descriptor.name, 2, 64))
        self.link = EngineLink(Channel(theirs), first_call_id=7 << 32)
        self.link.start()
        self.commands = self.channel.commands()


@pytest.fixture
def engine(segment):
    made = Engine(segment)
    yield made
    made.channel.close()


def soon(holds) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_thread(function) -> list:
    """What a function gives or raises, once it has."""
    found: list = []

    def run() -> None:
        try:
            found.append(function())
        except EngineError as error:
            found.append(error.reason)

    threading.Thread(target=run, daemon=True).start()
    return found


def test_a_slot_is_lent_once_and_comes_back_to_who_waits(ring):
    assert [ring.acquire(1), ring.acquire(2)] == [0, 1]
    assert ring.filled(0)
    waiting = in_thread(lambda: ring.acquire(3))
    ring.release(0, 2)  # not this call's slot
    time.sleep(0.05)
    assert waiting == []
    ring.release_all(1)
    soon(lambda: waiting == [0])
    assert ring.filled(0)
    ring.release(0, 1)  # a late ChunkTaken of the slot's last owner
    waiting = in_thread(lambda: ring.acquire(4))
    time.sleep(0.05)
    assert waiting == []


def test_a_closed_ring_lets_nobody_wait(ring):
    for call in (1, 2):
        ring.acquire(call)
    waiting = in_thread(lambda: ring.acquire(3))
    ring.close()
    soon(lambda: waiting == ["ENGINE_DEAD"])


def test_a_slot_that_is_written_to_is_not_lent_when_its_call_ends(ring):
    """The engine may refuse an update while a chunk of it is on its way into the ring."""
    filling, sent = ring.acquire(1), ring.acquire(1)
    assert ring.filled(sent)
    ring.release_all(1)  # the reply came
    assert ring.acquire(2) == sent
    waiting = in_thread(lambda: ring.acquire(3))
    time.sleep(0.05)
    assert waiting == []
    assert not ring.filled(filling)  # is not to be sent, and is free
    soon(lambda: waiting == [filling])
    assert ring.filled(filling)


def test_bytes_go_into_their_slot(ring, segment):
    ring.write(1, b"--abcdefgh--", 2, 8)
    assert bytes(segment.buf[64:72]) == b"abcdefgh"
    assert bytes(segment.buf[:64]) == bytes(64)
    for start, nbytes in ((-1, 4), (0, 65), (60, 8), (8, -1)):
        with pytest.raises(ValueError, match="do not fit"):
            ring.write(0, bytes(64), start, nbytes)
    assert bytes(segment.buf[:64]) == bytes(64)


def test_a_call_is_answered_by_its_reply(engine):
    call_id, reply = engine.link.begin_update(FromTensor("u"), None)
    assert call_id == 7 << 32
    assert next(engine.commands) == m.Update(call_id=call_id, tensor=FromTensor("u"))
    slot = engine.link.ring.acquire(call_id)
    assert engine.link.ring.filled(slot)
    engine.link.send(m.Chunk(call_id, 0, 8, slot, 16))
    assert next(engine.commands) == m.Chunk(call_id, 0, 8, slot, 16)
    engine.channel.send(m.Reply(call_id, {"done": True}, None, 5, 1))
    assert reply.result(20).result == {"done": True}
    soon(lambda: len(engine.link.ring._free) == 2)


def test_a_refusal_comes_typed(engine):
    call_id, reply = engine.link.begin_update(FromTensor("u"), None)
    error = m.ErrorInfo("refused", "BAD_CHUNK", "overlaps")
    engine.channel.send(m.Reply(call_id, None, error, 5, 1))
    with pytest.raises(UpdateRefused, match="overlaps") as refused:
        reply.result(20)
    assert refused.value.reason == "BAD_CHUNK"


@pytest.mark.parametrize("unread", [False, True])
def test_an_engine_that_is_gone_ends_every_call(engine, unread):
    _, reply = engine.link.begin_update(FromTensor("u"), None)
    if not unread:  # what was sent and never read makes the other end of the socket fail, not just end
        next(engine.commands)
    engine.channel._stream.close()
    engine.socket.close()
    with pytest.raises(EngineError) as dead:
        reply.result(20)
    assert dead.value.reason == "ENGINE_DEAD"
    with pytest.raises(EngineError):
        engine.link.begin_update(FromTensor("u"), None)


def test_an_engine_that_gives_no_ring():
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(EngineError) as dead:
        EngineLink(Channel(theirs), first_call_id=0)
    assert dead.value.reason == "ENGINE_DEAD"


def test_messages_cross_as_they_are():
    ring = m.UploadRing("rollsync-x", 8, 4 << 20)
    assert m.event_decoder.decode(m.encoder.encode(ring)) == ring
    end = m.EndOfChunks(1, complete=False, reason="gone")
    assert m.command_decoder.decode(m.encoder.encode(end)) == end
    assert msgspec.msgpack.decode(m.encoder.encode(end))["reason"] == "gone"
