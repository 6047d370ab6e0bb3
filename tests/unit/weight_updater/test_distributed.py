"""Path "distributed": what arrives, and what a disagreement or a death does to both ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.unit.weight_updater.gloo_ends import (
    LOOPBACK,
    FakeSink,
    assert_arrived,
    eventually,
    free_port,
    group_children,
    join,
    manifest_of,
    mapped_segments,
    receive,
    refused,
    send,
    transfer,
    weights,
)
from weight_updater import from_distributed
from weight_updater.buckets import plan_buckets
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.gloo import GlooGroup
from weight_updater.meeting import Member, listen
from weight_updater.requests import FromDistributed, InitGroup, Manifest, TensorSpec


@pytest.mark.case("B031")
@pytest.mark.case("B092")
def test_logical_values_arrive_in_any_bucket_size(registry, pool) -> None:
    with join(registry, pool) as sender:
        for seed, bucket_bytes in enumerate([0, 256, 1024, 5000, 1024]):
            transfer(registry, pool, sender, seed, bucket_bytes)
        assert all(line.endswith(" (deleted)") for line in mapped_segments())


def test_only_what_is_needed_reaches_the_sink(registry, pool) -> None:
    with join(registry, pool) as sender:
        tensors = weights()
        manifest = manifest_of(tensors)
        sending = send(pool, sender, tensors)
        sink = FakeSink(manifest)
        from_distributed.receive(FromDistributed("u", "g"), manifest, sink, registry, needed=[1, 3])
        sending.result()
        assert sink.num_bytes == tensors["b"].nbytes + tensors["strided"].nbytes


def test_the_first_bucket_is_filled_while_the_engine_is_waited_for_and_no_other(registry, pool) -> None:
    new = {name: torch.full((64,), float(at)) for at, name in enumerate("abc")}
    taken: list[str] = []

    def tensors():
        for name, value in new.items():
            taken.append(name)
            yield value

    with join(registry, pool) as sender:
        sending = pool.submit(sender.broadcast, manifest_of(new), tensors(), 256)
        assert eventually(lambda: taken == ["a"])
        time.sleep(0.1)
        assert taken == ["a"]
        sink = FakeSink(manifest_of(new))
        receive(registry, sink, bucket_bytes=256)
        sending.result()
        assert taken == ["a", "b", "c"]
        assert_arrived(sink, new.values())


@pytest.mark.case("B025")
@pytest.mark.case("B092")
@pytest.mark.case("B093")
def test_a_disagreement_is_refused_on_both_sides_and_harms_nothing(registry, pool) -> None:
    a, b = torch.ones(2), torch.full((2,), 2.0)
    with join(registry, pool) as sender:
        for theirs, ours, bucket_bytes, texts in [
            ({"a": a, "b": b}, {"b": b, "a": a}, 512, ["digest"]),
            ({"a": a}, {"a": a.to(torch.bfloat16)}, 512, ["digest"]),
            ({"a": torch.ones(2, 3)}, {"a": torch.ones(3, 2)}, 512, ["digest"]),
            ({"a": a, "b": b}, {"a": a}, 512, ["num_tensors 2", "num_tensors 1"]),
            ({"a": a}, {"a": a}, 1024, ["bucket_bytes 512", "bucket_bytes 1024"]),
        ]:
            sending = send(pool, sender, theirs, 512)
            sink = FakeSink(manifest_of(ours))
            start = time.monotonic()
            call = lambda sink=sink, size=bucket_bytes: receive(registry, sink, bucket_bytes=size)  # noqa: E731
            here = refused(call, Reason.MANIFEST_MISMATCH)
            there = refused(sending.result, Reason.MANIFEST_MISMATCH)
            assert time.monotonic() - start < 10
            assert all(text in here and text in there for text in texts), here
            assert sink.num_bytes == 0
        transfer(registry, pool, sender, 3)


@pytest.mark.case("B025")
@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([torch.ones(2)], "b is missing"),
        ([torch.ones(2), torch.ones(3), torch.ones(1)], "more tensors came"),
        ([torch.ones(2), torch.ones(4)], r"the manifest says b, float32 \[3\]"),
        ([torch.ones(2), torch.ones(3).double()], "float64"),
    ],
)
def test_a_sender_whose_tensors_are_not_its_manifest_tells_both_sides(registry, pool, tensors, text) -> None:
    manifest = manifest_of({"a": torch.ones(2), "b": torch.ones(3)})
    with join(registry, pool) as sender:
        sending = pool.submit(sender.broadcast, manifest, tensors)
        start = time.monotonic()
        message = refused(lambda: receive(registry, FakeSink(manifest)), Reason.PEER_LOST)
        with pytest.raises(UpdateRefused, match=text):
            sending.result()
        assert time.monotonic() - start < 10
        assert "rank 0: " in message
        assert registry.names == []
        refused(lambda: sender.broadcast(manifest, []), Reason.GROUP_UNKNOWN)


@pytest.mark.case("B025")
def test_a_sender_that_sends_too_much_kills_the_child_and_no_more(registry, pool) -> None:
    """This sender keeps to the protocol until its broadcast, which is longer than it said."""
    manifest = manifest_of({"a": torch.ones(64)})
    with listen(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
        joined = pool.submit(registry.init, InitGroup("g", LOOPBACK, port, 1, 2, timeout_s=20.0))
        group = GlooGroup(Member("g", LOOPBACK, port, 0, 2, 20.0), listener)
        joined.result()
        receiving = pool.submit(receive, registry, FakeSink(manifest))
        group.agree(plan_buckets(manifest), 5.0)
        work = group.broadcast(torch.ones(4096, dtype=torch.uint8), 2.0)
        message = refused(receiving.result, Reason.PEER_LOST, Reason.TIMEOUT)
        assert "'g', rank 1 of world size 2" in message
        refused(lambda: (group.wait(work, 0, 2.0), group.finish(2.0)), Reason.PEER_LOST, Reason.TIMEOUT)
        group.close()
    with join(registry, pool) as sender:
        transfer(registry, pool, sender, 1)


@pytest.mark.case("B087")
def test_an_error_while_bytes_are_put_away_reaches_the_sender(registry, pool) -> None:
    tensors = {"a": torch.ones(1000), "b": torch.ones(1000)}

    def fail() -> None:
        if sink.num_bytes:
            raise UpdateRefused(Reason.TIMEOUT, "the lease ran out at bucket 1")

    sink = FakeSink(manifest_of(tensors), fail)
    with join(registry, pool) as sender:
        sending = send(pool, sender, tensors, 1024)
        start = time.monotonic()
        refused(lambda: receive(registry, sink, bucket_bytes=1024), Reason.TIMEOUT)
        assert "rank 1: the lease ran out at bucket 1" in refused(sending.result, Reason.PEER_LOST)
        assert time.monotonic() - start < 10
    with join(registry, pool) as sender:
        transfer(registry, pool, sender, 1)


@pytest.mark.case("B084")
def test_the_death_of_the_receiving_process_reaches_both_sides(registry, pool) -> None:
    tensors = {"a": torch.ones(5000)}

    def kill_child() -> None:
        for child in group_children():
            os.kill(child, signal.SIGKILL)

    with join(registry, pool) as sender:
        sending = send(pool, sender, tensors, 1024)
        sink = FakeSink(manifest_of(tensors), kill_child)
        start = time.monotonic()
        message = refused(lambda: receive(registry, sink, bucket_bytes=1024), Reason.PEER_LOST)
        refused(sending.result, Reason.PEER_LOST)
        assert time.monotonic() - start < 10
        assert "exit status -9" in message


def test_closing_the_sender_from_another_thread_ends_both_sides(registry, pool) -> None:
    tensors = {"a": torch.ones(5000)}
    arrives, hold = threading.Event(), threading.Event()

    def put_away() -> None:
        arrives.set()
        hold.wait(1.0)

    sender = join(registry, pool)
    sending = send(pool, sender, tensors, 1024)
    receiving = pool.submit(receive, registry, FakeSink(manifest_of(tensors), put_away), bucket_bytes=1024)
    assert arrives.wait(20)
    start = time.monotonic()
    sender.close()
    refused(sending.result, Reason.PEER_LOST)
    assert time.monotonic() - start < 10
    hold.set()
    assert "the sender closed the group" in refused(receiving.result, Reason.PEER_LOST)
    sender.close()


@pytest.mark.case("B084")
def test_engines_that_receive_from_a_sender_that_never_sends(registry, pool) -> None:
    with join(registry, pool):
        start = time.monotonic()
        refused(lambda: receive(registry, FakeSink(manifest_of(weights())), timeout_s=1.0), Reason.TIMEOUT)
        assert time.monotonic() - start < 10
        assert "init it first" in refused(
            lambda: receive(registry, FakeSink(manifest_of(weights()))), Reason.GROUP_UNKNOWN
        )


SENDER = """
import sys, time, torch
from weight_updater.groups import SenderGroup
from weight_updater.requests import Manifest, TensorSpec

port = int(sys.argv[1])
manifest = Manifest(tuple(TensorSpec(f"t{i}", "float32", (256,)) for i in range(3)))

def tensors():
    # The third tensor is asked for when the second is on its way, so the first has gone.
    yield torch.zeros(256)
    yield torch.ones(256)
    print("stopped", flush=True)
    time.sleep(60)

with SenderGroup("g", "127.0.0.1", port, 2, 20.0) as group:
    print("joined", flush=True)
    group.broadcast(manifest, tensors(), 1024)
"""


@pytest.mark.case("B076")
@pytest.mark.case("B084")
@pytest.mark.parametrize("idle", [True, False])
def test_a_killed_sender_can_be_relaunched(registry, pool, idle: bool) -> None:
    manifest = Manifest(tuple(TensorSpec(f"t{i}", "float32", (256,)) for i in range(3)))
    port = free_port()
    joined = pool.submit(registry.init, InitGroup("g", LOOPBACK, port, 1, 2, timeout_s=20.0))
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert sender.stdout is not None
        assert sender.stdout.readline() == "joined\n"
        joined.result()
        if idle:
            sender.kill()
            sender.wait()  # and the next init replaces the group, whose trainer is dead
        else:
            sink = FakeSink(manifest)
            receiving = pool.submit(receive, registry, sink, bucket_bytes=1024)
            assert sender.stdout.readline() == "stopped\n"
            assert eventually(lambda: sink.num_bytes > 0)
            sender.kill()
            start = time.monotonic()
            refused(receiving.result, Reason.PEER_LOST)
            assert time.monotonic() - start < 10
            assert registry.names == []
    finally:
        sender.kill()
        sender.communicate()
    with join(registry, pool) as relaunched:
        transfer(registry, pool, relaunched, 1)
