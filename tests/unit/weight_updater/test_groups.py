"""Process groups: rendezvous, names, ends, and that nothing is left of them."""

from __future__ import annotations

import gc
import socket
import time

import pytest

from tests.unit.weight_updater.gloo_ends import (
    LOOPBACK,
    FakeSink,
    GroupRegistryScope,
    assert_arrived,
    eventually,
    free_port,
    join,
    manifest_of,
    receive,
    refused,
    resources,
    send,
    transfer,
    weights,
)
from weight_updater.errors import Reason
from weight_updater.groups import SenderGroup
from weight_updater.meeting import listen
from weight_updater.requests import InitGroup


@pytest.mark.case("B076")
def test_groups_that_come_and_go_leave_nothing(registry, pool) -> None:
    before = None
    for fails in (False, True, False):
        with join(registry, pool) as sender:
            transfer(registry, pool, sender, 1)
            if fails:
                refused(
                    lambda: receive(registry, FakeSink(manifest_of(weights())), timeout_s=0.2), Reason.TIMEOUT
                )
        assert registry.destroy("g") is not fails
        before = before or resources()
    assert eventually(lambda: resources() == before), (resources(), before)


def test_a_group_whose_trainer_died_is_forgotten(registry, pool) -> None:
    before = None
    for _ in range(2):
        with join(registry, pool) as sender:
            transfer(registry, pool, sender, 1)
            time.sleep(1.5)
            registry.drop_ended()
            assert registry.names == ["g"], "an idle trainer is not a dead one"

        def forgotten() -> bool:
            registry.drop_ended()
            return not registry.names

        assert eventually(forgotten)
        before = before or resources()
    assert eventually(lambda: resources() == before), (resources(), before)


@pytest.mark.case("B077")
def test_names_exist_once_and_destroying_is_idempotent(registry, pool) -> None:
    assert not registry.destroy("g")
    with join(registry, pool):
        request = InitGroup("g", LOOPBACK, free_port(), 1, 2, timeout_s=2.0)
        refused(lambda: registry.init(request), Reason.GROUP_EXISTS)
        assert registry.names == ["g"]
        assert registry.destroy("g")
        assert not registry.destroy("g")
    with join(registry, pool) as sender:
        transfer(registry, pool, sender, 1)
        assert registry.destroy("g")


@pytest.mark.case("B079")
@pytest.mark.case("B082")
@pytest.mark.case("B083")
def test_a_rendezvous_without_a_trainer_ends_at_its_timeout(registry) -> None:
    before = resources()
    port = free_port()
    start = time.monotonic()
    message = refused(
        lambda: registry.init(InitGroup("grp", LOOPBACK, port, 3, 5, timeout_s=1.0)),
        Reason.TIMEOUT,
        Reason.PEER_LOST,
    )
    assert time.monotonic() - start < 20  # a process starts first
    assert "group 'grp', rank 3 of world size 5, rank 0 at 127.0.0.1:" in message
    assert str(port) in message
    assert registry.names == []
    assert resources() == before


@pytest.mark.case("B079")
def test_a_sender_alone_ends_at_its_timeout_and_frees_its_port() -> None:
    port = free_port()
    start = time.monotonic()
    message = refused(lambda: SenderGroup("g", LOOPBACK, port, 3, 0.5), Reason.TIMEOUT)
    assert time.monotonic() - start < 10
    assert "rank 1 did not come within 0.5 s" in message
    gc.collect()
    with listen(LOOPBACK, port):
        pass


@pytest.mark.case("B079")
@pytest.mark.case("B089")
def test_members_that_disagree_hear_of_it_at_once(registry, pool) -> None:
    port = free_port()
    joined = pool.submit(registry.init, InitGroup("a", LOOPBACK, port, 1, 2, timeout_s=60.0))
    start = time.monotonic()
    message = refused(lambda: SenderGroup("b", LOOPBACK, port, 2, 60.0), Reason.INVALID_UPDATE)
    assert "group is" in message
    assert "'b' at rank 0" in message
    assert "'a' at rank 1" in message
    refused(joined.result, Reason.INVALID_UPDATE, Reason.PEER_LOST)
    port = free_port()
    joins = [
        pool.submit(registry.init, InitGroup(name, LOOPBACK, port, 1, 3, timeout_s=60.0))
        for name in ("c", "d")
    ]
    refused(lambda: SenderGroup("c", LOOPBACK, port, 3, 60.0), Reason.INVALID_UPDATE)
    for joining in joins:
        refused(joining.result, Reason.INVALID_UPDATE, Reason.PEER_LOST)
    assert time.monotonic() - start < 50


@pytest.mark.case("B080")
@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_other_spellings_of_addresses(registry, pool, address: str) -> None:
    with join(registry, pool, address=address) as sender:
        transfer(registry, pool, sender, 1)


def test_several_engines_receive_alike(pool) -> None:
    with GroupRegistryScope() as first, GroupRegistryScope() as second:
        port = free_port()
        joins = [
            pool.submit(registry.init, InitGroup("g", LOOPBACK, port, rank, 3, timeout_s=20.0))
            for rank, registry in ((1, first), (2, second))
        ]
        with SenderGroup("g", LOOPBACK, port, 3, 20.0) as sender:
            for joining in joins:
                joining.result()
            sinks = [FakeSink(manifest_of(weights())) for _ in range(2)]
            receives = [
                pool.submit(receive, registry, sink, bucket_bytes=1024)
                for registry, sink in zip((first, second), sinks, strict=True)
            ]
            send(pool, sender, weights(7), 1024).result()
            for receiving, sink in zip(receives, sinks, strict=True):
                receiving.result()
                assert_arrived(sink, weights(7).values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_name": ""},
        {"master_address": ""},
        {"master_port": 0},
        {"master_port": 65536},
        {"world_size": 1},
        {"rank": 0},
        {"rank": 2},
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"backend": "mpi"},
    ],
)
def test_impossible_groups_are_refused(registry, wrong: dict) -> None:
    fields = {"group_name": "g", "master_address": LOOPBACK, "master_port": 1, "rank": 1, "world_size": 2}
    message = refused(lambda: registry.init(InitGroup(**(fields | wrong))), Reason.INVALID_UPDATE)
    assert next(iter(wrong)) in message


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refused(lambda: SenderGroup("g", LOOPBACK, port, 2, 1.0), Reason.INVALID_UPDATE)
