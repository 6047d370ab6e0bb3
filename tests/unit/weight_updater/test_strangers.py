"""Who comes to a group's store uninvited, and what is left at its port."""

from __future__ import annotations

import time

import pytest
import torch

from tests.unit.weight_updater.gloo_ends import (
    LOOPBACK,
    FakeSink,
    assert_arrived,
    free_port,
    join,
    manifest_of,
    receive,
    refused,
    send,
    transfer,
)
from weight_updater.errors import Reason
from weight_updater.gloo import GlooGroup
from weight_updater.groups import SenderGroup
from weight_updater.meeting import Member, connect
from weight_updater.requests import InitGroup


def test_who_comes_to_a_group_that_has_met_is_refused_and_harms_nobody(registry, pool) -> None:
    """An engine told a rank that is taken left word in the store: the next broadcast ended for all."""
    with join(registry, pool) as sender:
        for name, rank, world_size in (("g", 1, 2), ("x", 1, 2), ("g", 0, 2), ("g", 2, 3)):
            stranger = Member(name, LOOPBACK, sender.port, rank, world_size, 5.0)
            text = refused(lambda who=stranger: GlooGroup(who), Reason.INVALID_UPDATE)
            assert "is taken already" in text or "world_size is 3" in text
        tensors = {"a": torch.ones(1000)}
        slow = FakeSink(manifest_of(tensors), lambda: time.sleep(0.6))  # ranks look every 0.25 s
        sending = send(pool, sender, tensors)
        receive(registry, slow)
        sending.result()
        assert_arrived(slow, tensors.values())
        request = InitGroup("g", LOOPBACK, sender.port, 1, 2, timeout_s=2.0)
        refused(lambda: registry.init(request), Reason.GROUP_EXISTS)  # its trainer is not taken for dead


@pytest.mark.parametrize("hello", ["not json", "[1]", '{"group": "g", "same": 3}', "[" * 100_000])
def test_a_hello_that_is_none_refuses_the_group(pool, hello: str) -> None:
    port = free_port()
    made = pool.submit(SenderGroup, "g", LOOPBACK, port, 2, 20.0)
    stranger = connect(Member("g", LOOPBACK, port, 1, 2, 20.0), None)
    stranger.set("rollsync/hello/1", hello)
    assert "group is 'g' at rank 0, not set at rank 1" in refused(made.result, Reason.INVALID_UPDATE)


def test_a_group_that_failed_leaves_its_port_to_the_next(registry, pool) -> None:
    """Also while somebody holds the error: its frames kept the store, which listens there."""
    port = free_port()

    def make() -> SenderGroup:
        joined = pool.submit(registry.init, InitGroup("g", LOOPBACK, port, 1, 2, timeout_s=20.0))
        sender = SenderGroup("g", LOOPBACK, port, 2, 20.0)
        joined.result()
        return sender

    manifest = manifest_of({"a": torch.ones(1000), "b": torch.ones(1000)})
    sender = make()
    sending = pool.submit(sender.broadcast, manifest, [torch.ones(1000)], 1024)
    refused(lambda: receive(registry, FakeSink(manifest), bucket_bytes=1024), Reason.PEER_LOST)
    error = sending.exception()
    start = time.monotonic()
    with make() as again:
        assert time.monotonic() - start < 10
        transfer(registry, pool, again, 1)
    assert "b is missing" in str(error)
