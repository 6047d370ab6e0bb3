"""A push to a fleet in which one engine refuses while another is slow, or answers nothing at all."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest
from torch import nn

from rollout_engine.v1 import weights_pb2 as pb
from tests.unit.adapters.fake_engine import FakeEngine, serving
from tests.unit.adapters.interrupts import Interrupted, interrupted, interrupts
from trainers_adapters import push_ends, send_distributed
from trainers_adapters.bucket_push import BucketPush
from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import PushError
from trainers_adapters.push import push_weights
from trainers_adapters.send_distributed import BroadcastGroup
from trainers_adapters.send_ipc import IpcArena
from trainers_adapters.sources import ModuleSource

REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, "CHECKSUM_MISMATCH", "w differs")
SOON_S = 20
"""Whoever waits for an engine that answers nothing waits for a minute."""
STEPS = ["BeginUpdate", "UpdateWeightsFromTensor", "PrepareUpdate"]


@pytest.fixture
def module() -> nn.Module:
    return nn.Linear(4, 3)


@pytest.fixture
def engines(module: nn.Module) -> list[FakeEngine]:
    layout = pb.GetWeightLayoutResponse(
        placements=[
            pb.TensorPlacement(name=name, dtype=1, shape=list(p.shape))
            for name, p in module.named_parameters()
        ]
    )
    made = [FakeEngine(), FakeEngine()]
    for engine in made:
        engine.layout = layout
    return made


@pytest.fixture
def clients(engines: list[FakeEngine]) -> Iterator[list[WeightsClient]]:
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(engine)) for engine in engines]
        yield [stack.enter_context(WeightsClient(address)) for address in addresses]


Push = Callable[[], object]


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(params=["push_weights", "BucketPush"])
def push(request, module, clients) -> Iterator[Push]:
    """Pushes the module to all engines; what takes long enough may take a minute."""
    if request.param == "push_weights":
        yield lambda: push_weights(ModuleSource(module), clients, timeout_s=60)
        return
    buckets = BucketPush(clients, path="tensor", timeout_s=60)

    def offer() -> None:
        try:
            buckets.begin()
            for name, parameter in module.named_parameters():
                if buckets.add(name, parameter):
                    buckets.send()
            buckets.prepare()
        except BaseException:
            buckets.abort()
            raise
        buckets.commit()

    yield offer
    buckets.close()


@pytest.mark.parametrize("method", STEPS)
@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refusal_is_told_at_once_and_ends_the_update_on_a_slow_engine(
    method, refusing, push, engines, clients
):
    engines[refusing].refuse[method] = REFUSED
    engines[1 - refusing].slow.add(method)
    started = time.monotonic()
    with pytest.raises(PushError, match=f"{method} on {clients[refusing].address}: w differs") as refused:
        push()
    assert time.monotonic() - started < SOON_S
    assert refused.value.reason == "CHECKSUM_MISMATCH"
    assert refused.value.committed == ()
    assert all("AbortUpdate" in engine.events for engine in engines)
    assert not any("CommitUpdate" in engine.events for engine in engines)


def test_layouts_are_asked_for_at_once(engines, clients):
    engines[0].slow.add("GetWeightLayout")
    engines[1].refuse["GetWeightLayout"] = REFUSED
    started = time.monotonic()
    with closing(BucketPush(clients, path="tensor", timeout_s=60)) as push:
        with pytest.raises(PushError, match=f"GetWeightLayout on {clients[1].address}: w differs"):
            push.begin()
        assert time.monotonic() - started < 20, "the slow one answers after a minute"


@pytest.mark.parametrize("method", STEPS)
def test_a_refusal_is_told_although_another_engine_answers_nothing(
    method, push, engines, clients, monkeypatch
):
    monkeypatch.setattr(push_ends, "ABORT_TIMEOUT_S", 2.0)
    engines[0].refuse[method] = REFUSED
    engines[1].slow |= {method, "AbortUpdate"}
    started = time.monotonic()
    with pytest.raises(PushError, match=f"{method} on {clients[0].address}: w differs"):
        push()
    assert time.monotonic() - started < SOON_S
    until(lambda: "AbortUpdate" in engines[0].events)  # nobody waited longer than ABORT_TIMEOUT_S for it


@pytest.mark.parametrize("method", STEPS)
def test_an_interrupt_ends_the_update_everywhere(method, push, engines):
    engines[0].slow.add(method)
    started = time.monotonic()
    with interrupts() as interrupt, pytest.raises(Interrupted):
        interrupted(push, interrupt, lambda: method in engines[0].events)
    assert time.monotonic() - started < SOON_S
    assert all("AbortUpdate" in engine.events for engine in engines)
    # A call that was about to be made as the interrupt came may end on a thread of its own.
    until(lambda: not any(thread.name.startswith(("push", "ending")) for thread in threading.enumerate()))


def test_an_interrupted_commit_leaves_no_engine_with_an_open_update(module, engines, clients):
    engines[0].slow.add("CommitUpdate")
    with interrupts() as interrupt, pytest.raises(Interrupted):
        interrupted(
            lambda: push_weights(ModuleSource(module), clients, timeout_s=60),
            interrupt,
            lambda: "CommitUpdate" in engines[0].events,
        )
    assert [engine.open for engine in engines] == [None, None]


@pytest.mark.parametrize("make", [IpcArena, BroadcastGroup], ids=["ipc", "distributed"])
def test_an_engine_that_answers_nothing_hides_no_refusal_from_who_closes_the_sender(
    make, module, engines, clients, monkeypatch
):
    """What the sender gives back, it gives back in calls that such an engine does not answer either."""
    monkeypatch.setattr(push_ends, "ABORT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(send_distributed, "SenderGroup", FakeGroup)
    engines[0].refuse["PrepareUpdate"] = REFUSED
    engines[1].slow |= {"PrepareUpdate", "AbortUpdate", "Release", "DestroyWeightsUpdateGroup"}
    before = segments()
    started = time.monotonic()
    with pytest.raises(PushError, match="w differs"), make() as sender:
        push_weights(ModuleSource(module), clients, via=sender, timeout_s=60)
    assert time.monotonic() - started < SOON_S
    assert segments() == before


def segments() -> set[str]:
    """Shared memory that this process maps."""
    return set(re.findall(r"rollsync-\w+", Path("/proc/self/maps").read_text()))


def test_a_call_that_ends_late_does_not_end_the_push_after_it(module, engines, clients, monkeypatch):
    """An engine that answered nothing, and does again: what it was sent before is told apart."""
    monkeypatch.setattr(push_ends, "ABORT_TIMEOUT_S", 0.3)
    engine = engines[1]
    engine.slow |= {"UpdateWeightsFromTensor", "AbortUpdate"}
    push = BucketPush(clients[1:], path="tensor", timeout_s=60)
    name, parameter = next(iter(module.named_parameters()))
    push.begin()
    push.add(name, parameter)
    push.send()
    while "UpdateWeightsFromTensor" not in engine.events:
        time.sleep(0.01)
    push.abort()
    late = [thread for thread in threading.enumerate() if thread.name.startswith("buckets")]
    engine.slow.clear()
    push.begin()
    engine.let_go.set()  # and so the late call fails
    for thread in late:
        thread.join(10)
    assert engine.open is not None
    push.close()
    assert engine.open is None


class FakeGroup:
    """SenderGroup's face."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def broadcast(self, *args: object) -> None: ...

    def close(self) -> None: ...
