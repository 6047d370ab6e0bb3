"""Rings of several processes, and what becomes of their calls when one of them dies."""

from __future__ import annotations

import os
import socket

import pytest

from rollout_engine import messages as m
from rollout_engine.channel import Channel
from rollout_engine.uploads import Uploads
from weight_updater.errors import Reason, UpdateRefused


class Other:
    """A process that fills a ring: the far end of a channel."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.channel = Channel(theirs)
        self._events = Channel(self.socket).events()

    def next_event(self) -> m.Event:
        return next(self._events)


@pytest.fixture
def front() -> Other:
    return Other()


@pytest.fixture
def receiver() -> Other:
    return Other()


@pytest.fixture
def uploads(front):
    made = Uploads(front.channel, slots=2, slot_bytes=64, stall_seconds=0.3)
    yield made
    made.close()


def exists(ring) -> bool:
    return os.path.exists(f"/dev/shm/{ring.name}")


def fill(ring, slot: int, data: bytes) -> None:
    ring.slot(slot, len(data)).numpy()[:] = list(data)


def test_calls_take_chunks_from_the_ring_of_who_feeds_them(uploads, front, receiver):
    ring = uploads.add_ring(receiver.channel)
    uploads.open(1)
    uploads.open(1 << 32, ring)
    fill(uploads.front_ring, 0, b"front")
    fill(ring, 0, b"other")
    for call_id, expected, source in ((1, b"front", front), (1 << 32, b"other", receiver)):
        uploads.file(m.Chunk(call_id, None, 256, 0, 5))
        uploads.file(m.EndOfChunks(call_id, complete=True))
        taken = [(index, at, bytes(data.numpy())) for index, at, data in uploads.chunks(call_id)]
        assert taken == [(None, 256, expected)]
        assert source.next_event() == m.ChunkTaken(call_id, 0)
        uploads.drop(call_id)


def test_a_chunk_for_nobody_gives_its_slot_back_to_who_sent_it(uploads, receiver):
    ring = uploads.add_ring(receiver.channel)
    uploads.file(m.Chunk(5, 0, 0, 1, 8), ring)
    assert receiver.next_event() == m.ChunkTaken(5, 1)


def test_a_ring_that_is_lost_breaks_its_own_calls_and_goes_with_the_last(uploads, receiver):
    ring, other = uploads.add_ring(receiver.channel), uploads.add_ring(Other().channel)
    for call_id, used in ((10, ring), (11, ring), (20, other)):
        uploads.open(call_id, used)
    fill(ring, 1, b"12345678")
    uploads.file(m.Chunk(10, 0, 0, 1, 8))  # came before the end, and still counts
    uploads.lose(ring, "it died")
    chunks = uploads.chunks(10)
    assert bytes(next(chunks)[2].numpy()) == b"12345678"
    for broken in (chunks, uploads.chunks(11)):
        with pytest.raises(UpdateRefused, match="it died") as refused:
            next(broken)
        assert refused.value.reason is Reason.PEER_LOST
    uploads.drop(10)
    assert exists(ring)
    uploads.drop(11)
    assert not exists(ring)
    with pytest.raises(UpdateRefused, match="no chunk came"):
        next(uploads.chunks(20))


def test_a_call_that_ended_well_is_not_broken_by_a_later_death(uploads, receiver):
    ring = uploads.add_ring(receiver.channel)
    uploads.open(10, ring)
    fill(ring, 0, b"12345678")
    uploads.file(m.Chunk(10, 3, 0, 0, 8))
    uploads.file(m.EndOfChunks(10, complete=True))
    uploads.lose(ring, "it died")
    assert [(index, bytes(data.numpy())) for index, _, data in uploads.chunks(10)] == [(3, b"12345678")]
    uploads.drop(10)
    assert not exists(ring)


def test_an_unused_ring_goes_at_once(uploads, receiver):
    ring = uploads.add_ring(receiver.channel)
    assert exists(ring)
    uploads.lose(ring, "it died")
    assert not exists(ring)


def test_a_channel_whose_other_end_died_with_something_unread_just_ends():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    channel.send(m.ChunkTaken(1, 0))  # never read: closing the socket now resets it
    theirs.close()
    assert list(channel.frames()) == []
