"""Slots of the upload ring are lent once, in order, and come back whatever happens."""

from __future__ import annotations

import asyncio
import os

import pytest

from rollout_engine.messages import Ready
from rollout_engine.server.ring import READER, Ring
from rollout_engine.server.uploads import pieces
from weight_updater.shm import SharedSegment


@pytest.fixture
def ring():
    with SharedSegment.create(2 * 64) as segment:
        made = Ring(Ready(info=None, ring_name=segment.descriptor.name, ring_slots=2, ring_slot_bytes=64))
        assert not os.path.exists(f"/dev/shm/{segment.descriptor.name}")  # nothing can leak
        yield made
        made.close()


def test_a_slot_is_lent_once_and_waiters_are_served_in_order(ring):
    async def scenario():
        assert [await ring.acquire(1), await ring.acquire(2)] == [0, 1]
        third, fourth = (asyncio.create_task(ring.acquire(call)) for call in (3, 4))
        await asyncio.sleep(0)
        ring.release(0, 2)  # not this call's slot
        assert ring.num_free == 0
        ring.release(0, 1)
        assert await third == 0
        ring.release_all(2)
        assert await fourth == 1
        ring.release(0, 1)  # a late ChunkTaken of the slot's last owner
        assert ring.num_free == 0

    asyncio.run(scenario())


def test_a_waiter_that_goes_away_passes_its_turn_on(ring):
    async def scenario():
        for _ in range(2):
            await ring.acquire(1)
        first, second = (asyncio.create_task(ring.acquire(call)) for call in (2, 3))
        await asyncio.sleep(0)
        ring.release(0, 1)
        first.cancel()  # in the same turn in which it was woken
        assert await asyncio.wait_for(second, 1) == 0

    asyncio.run(scenario())


def test_bytes_go_into_their_slot(ring):
    ring.write(1, b"abc")
    assert ring.read(1, 3) == b"abc"
    assert ring.read(0, 3) == bytes(3)
    assert READER < 0


@pytest.mark.parametrize(
    ("size", "limit", "cuts"),
    [(0, 64, []), (64, 64, [(0, 64)]), (65, 64, [(0, 64), (64, 1)]), (40, 20, [(0, 16), (16, 16), (32, 8)])],
)
def test_chunks_larger_than_a_slot_are_cut_at_multiples_of_8(size, limit, cuts):
    assert list(pieces(size, limit)) == cuts
