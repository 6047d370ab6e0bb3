"""A trainer whose process or host is frozen answers nothing and closes nothing: an engine that waits for it
ends at its deadline, at the latest.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.unit.weight_updater.nccl_wire import LOOPBACK, World, free_port
from tests.unit.weight_updater.tiny_target import manifest_of, weights
from weight_updater.buckets import plan_buckets
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.meeting import Member, connect
from weight_updater.requests import InitGroup
from weight_updater.store import Aside, within

RANK_0 = """
import sys, time, torch
from weight_updater.meeting import Member, connect, listen
from weight_updater.nccl import NcclGroup

member = Member("g", "127.0.0.1", int(sys.argv[1]), 0, 2, 30.0, "nccl")
listener = listen(member.address, member.port)
if sys.argv[2] == "listens":
    store = connect(member, listener)
else:
    group = NcclGroup(member, torch.device("cpu"), listener, build=lambda *args: object())
print("ready", flush=True)
time.sleep(60)
"""


class Trainer:
    """Rank 0 in a process of its own."""

    def __init__(self, port: int, does: str) -> None:
        command = [sys.executable, "-c", RANK_0, str(port), does]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = port

    def freeze(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def joins() -> Iterator[Trainer]:
    trainer = Trainer(free_port(), "joins")
    yield trainer
    trainer.end()


def join(world: World, trainer: Trainer):
    """The engine's side of a group whose rank 0 is frozen from now on."""
    assert world.registry.init(InitGroup("g", LOOPBACK, trainer.port, 1, 2, "nccl", 30.0)) == "nccl"
    trainer.freeze()
    return world.registry._groups["g"][0]._group


def test_agreeing_with_a_frozen_rank_0_ends_at_its_deadline(world, joins):
    group = join(world, joins)
    started = time.monotonic()
    with pytest.raises(UpdateRefused, match="agreeing on the buckets") as refused:
        group.agree(plan_buckets(manifest_of(weights(1)), 256), 1.0)
    assert refused.value.reason is Reason.TIMEOUT
    assert 0.9 < time.monotonic() - started < 6.0


def test_a_broadcast_of_a_frozen_rank_0_ends_at_its_deadline(world, joins):
    group = join(world, joins)
    world.wire.stuck_from = 0
    work = group.broadcast(weights(1)["model.norm.weight"], 1.0)
    started = time.monotonic()
    with pytest.raises(UpdateRefused, match="broadcasting bucket 3") as refused:
        group.wait(work, 3, 1.0)
    assert refused.value.reason is Reason.TIMEOUT
    assert 0.9 < time.monotonic() - started < 6.0
    assert world.wire.num_aborts == 1


def test_a_group_of_a_frozen_rank_0_can_be_destroyed_while_somebody_waits_for_it(world, joins):
    group = join(world, joins)
    agreeing = world.pool.submit(group.agree, plan_buckets(manifest_of(weights(1)), 256), 30.0)
    time.sleep(0.5)
    started = time.monotonic()
    assert world.registry.destroy("g")
    with pytest.raises(UpdateRefused, match="the group was destroyed"):
        agreeing.result()
    assert time.monotonic() - started < 8.0
    assert world.registry.names == []


def test_a_group_of_a_frozen_rank_0_is_taken_for_dead(world, joins):
    join(world, joins)
    started = time.monotonic()
    port = free_port()
    relaunched = Trainer(port, "joins")
    try:
        assert world.registry.init(InitGroup("g", LOOPBACK, port, 1, 2, "nccl", 30.0)) == "nccl"
        assert time.monotonic() - started < 25.0
    finally:
        relaunched.end()


def test_a_rendezvous_at_a_frozen_rank_0_ends_at_its_deadline(world):
    trainer = Trainer(free_port(), "listens")
    try:
        trainer.freeze()
        started = time.monotonic()
        with pytest.raises(UpdateRefused, match="the rendezvous failed") as refused:
            world.registry.init(InitGroup("g", LOOPBACK, trainer.port, 1, 2, "nccl", 1.0))
        assert refused.value.reason is Reason.TIMEOUT
        assert time.monotonic() - started < 8.0
        assert world.registry.names == []
    finally:
        trainer.end()


def test_a_store_that_does_not_answer_raises_and_is_not_asked_again():
    trainer = Trainer(free_port(), "listens")
    try:
        assert trainer.process.stdout is not None
        assert trainer.process.stdout.readline() == "ready\n"
        store = connect(Member("g", LOOPBACK, trainer.port, 1, 2, 30.0), None)
        store.set("a", "1")
        store.set_once("a", "2")
        store.set_once("b", "3")
        assert (store.read("a"), store.read("b"), store.read("c")) == (b"1", b"3", None)
        assert store.check(["a", "b"])
        assert not store.check(["a", "c"])
        assert [store.add("n", 2), store.add("n", -1)] == [2, 1]
        store.delete_key("a")
        assert store.read("a") is None
        trainer.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="timed out"):
            store.check(["b"], limit_s=0.5)
        assert 0.5 <= time.monotonic() - started < 3.0
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="timed out"):
            store.read("b")
        assert time.monotonic() - started < 3.0, "its own limit is 30 s"
    finally:
        trainer.end()


def test_calls_made_aside_give_what_they_give_and_their_thread_ends_with_them():
    def threads() -> int:
        return sum(thread.name == "aside-test" for thread in threading.enumerate())

    aside = Aside("aside-test")
    assert aside.call(lambda: 3, 5.0) == 3
    with pytest.raises(ZeroDivisionError):
        aside.call(lambda: 1 // 0, 5.0)
    assert within(lambda: 4, 5.0, name="aside-test") == 4
    held = threading.Event()
    with pytest.raises(RuntimeError, match="timed out"):
        within(lambda: held.wait(20.0), 0.1, name="aside-test")
    assert threads() >= 2
    held.set()
    del aside
    deadline = time.monotonic() + 10.0
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == 0
