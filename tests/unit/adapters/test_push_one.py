"""Pushes to one engine alone whose trainer hashes on a GPU, which a stand-in lends: the order of the calls,
and what becomes of those that fail. On a real GPU: tests/gpu; with a real engine: tests/wire/test_early.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import grpc
import pytest
import torch
from torch import nn

from tests.unit.adapters.fake_engine import FakeEngine, serving
from tests.unit.adapters.interrupts import Interrupted, interrupted, interrupts
from trainers_adapters import cuda_lending, push, push_ends, push_one, send_ipc, sending
from trainers_adapters.clients import WeightsClient
from trainers_adapters.cuda_lending import Lent
from trainers_adapters.errors import PushError
from trainers_adapters.push import push_weights
from trainers_adapters.send_ipc import IpcArena
from trainers_adapters.sources import ModuleSource
from weight_updater.checksum import checksum
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import CudaIpcRegion, Manifest, RegionPlacement

REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, "CHECKSUM_MISMATCH", "w differs")
GONE = (grpc.StatusCode.UNAVAILABLE, "", "connection refused")


class Lending:
    """Lends one allocation that nobody can open.

    while_scanning: runs before a scan has ended. begun: how many updates had begun as a scan was started.
    """

    while_scanning: Callable[[], None] = staticmethod(lambda: None)
    count_begun: Callable[[], int]
    begun: list[int]

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self.allocation_ids: set[str] = set()

    def start_scan(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        assert [name for name, _ in named] == ["weight", "bias"]
        Lending.begun.append(Lending.count_begun())

    def lend(self, named: Sequence[tuple[str, torch.Tensor]], manifest: Manifest) -> Lent:
        self._kept = [tensor for _, tensor in named]
        self.allocation_ids = {"a"}
        region = CudaIpcRegion("a", "GPU-0", bytes(64), 0, manifest.nbytes)
        placements = tuple(RegionPlacement(at, 0, 0) for at in range(len(manifest)))
        return Lent((region,), placements, "d" * 32, ())

    def scan(self) -> tuple[list[int], bool]:
        Lending.while_scanning()
        return [checksum(tensor) for tensor in self._kept], False

    def let_go(self) -> None:
        self._kept = []

    def forget(self, *, free: bool) -> None:
        pass

    def close(self, *, free: bool) -> None:
        pass


@pytest.fixture(autouse=True)
def _on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "resident_bytes", lambda source: None)
    monkeypatch.setattr(send_ipc, "_all_on_gpus", list)
    monkeypatch.setattr(cuda_lending, "CudaLending", Lending)
    monkeypatch.setattr(Lent, "probed", lambda self: self.regions)
    monkeypatch.setattr(Lending, "while_scanning", lambda: None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    made = FakeEngine()
    monkeypatch.setattr(Lending, "count_begun", lambda: made.events.count("BeginUpdate"), raising=False)
    monkeypatch.setattr(Lending, "begun", [], raising=False)
    return made


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[WeightsClient]:
    with serving(engine) as address, WeightsClient(address) as made:
        yield made


@pytest.fixture
def arena(client: WeightsClient) -> Iterator[IpcArena]:
    with IpcArena() as made:
        yield made


@pytest.fixture
def source() -> ModuleSource:
    return ModuleSource(nn.Linear(3, 2))


def checksums_of(source: ModuleSource) -> list[int]:
    return [checksum(tensor) for _, tensor in source]


def test_the_update_begins_while_the_gpu_hashes(engine, client, arena, source, monkeypatch):
    begun: list[int] = []

    def until_begun() -> None:
        deadline = time.monotonic() + 10
        while engine.events.count("BeginUpdate") <= len(begun):
            assert time.monotonic() < deadline, "BeginUpdate waits for the checksums"
            time.sleep(0.001)
        begun.append(len(begun))

    monkeypatch.setattr(Lending, "while_scanning", until_begun)
    for step in (1, 2):
        with torch.no_grad():
            for _, tensor in source:
                tensor.add_(1)
        report = push_weights(source, client, via=arena)
        assert report.version == engine.version == step
        assert list(report.replies) == [client.address]
        sent = engine.ipc[-1]
        assert (sent.update_id, sent.HasField("begin")) == (engine.begun[-1].update_id, False)
        assert (list(sent.checksums), sent.commit, sent.scanned) == (checksums_of(source), True, True)
        assert (bool(sent.handles), sent.lent) == ((step == 1), "" if step == 1 else "d" * 32)
        assert not engine.begun[-1].checksums
        assert not any(spec.HasField("checksum") for spec in engine.begun[-1].manifest.tensors)
    assert engine.events == ["BeginUpdate", "UpdateWeightsFromIpc"] * 2
    assert Lending.begun == [1], "the GPU, which takes longest, is told first; once it is known what of"
    assert [begin.WhichOneof("source_manifest") for begin in engine.begun] == ["manifest", "manifest_digest"]


def test_an_engine_that_was_started_anew_gets_everything_in_full(engine, client, arena, source):
    push_weights(source, client, via=arena)
    engine.manifests.clear()
    engine.knows_lent = False
    engine.events.clear()
    assert push_weights(source, client, via=arena).version == 2
    assert engine.events == ["BeginUpdate"] * 2 + ["UpdateWeightsFromIpc"] * 2
    assert engine.begun[-1].HasField("manifest")
    assert engine.ipc[-1].handles
    assert list(engine.ipc[-1].checksums) == checksums_of(source)


def test_an_update_that_may_not_begin_is_named_by_that(engine, client, arena, source):
    engine.refuse["BeginUpdate"] = (grpc.StatusCode.FAILED_PRECONDITION, "STALE_VERSION", "9 is live")
    with pytest.raises(PushError, match=r"BeginUpdate on .*9 is live.*nothing was committed") as refused:
        push_weights(source, client, 4, via=arena)
    assert (refused.value.reason, engine.version, engine.open) == ("STALE_VERSION", 0, None)
    assert "UpdateWeightsFromIpc" not in engine.events


@pytest.mark.parametrize("error", [UpdateRefused(Reason.NO_MEMORY, "full"), ValueError("not what was due")])
def test_what_fails_while_the_trainer_stages_ends_what_has_begun(
    error, engine, client, arena, source, monkeypatch
):
    def fail() -> None:
        raise error

    engine.delay_s = 0.1  # the begin is still under way then
    monkeypatch.setattr(Lending, "while_scanning", fail)
    with pytest.raises(PushError if isinstance(error, UpdateRefused) else ValueError, match=str(error)):
        push_weights(source, client, via=arena)
    assert engine.events == ["BeginUpdate", "AbortUpdate"]
    assert engine.open is None
    monkeypatch.setattr(Lending, "while_scanning", lambda: None)
    assert push_weights(source, client, via=arena).version == 1


def test_an_engine_that_answers_nothing_does_not_hide_what_failed_while_the_trainer_staged(
    engine, client, arena, source, monkeypatch
):
    def fail() -> None:
        raise ValueError("not what was due")

    monkeypatch.setattr(push_ends, "ABORT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(Lending, "while_scanning", fail)
    engine.slow |= {"BeginUpdate", "AbortUpdate"}
    start = time.monotonic()
    with pytest.raises(ValueError, match="not what was due"):
        push_weights(source, client, via=arena, timeout_s=60)
    assert time.monotonic() - start < 15, "by themselves they would end after a minute"


def test_an_interrupt_leaves_nothing_open(engine, client, arena, source):
    engine.slow.add("UpdateWeightsFromIpc")
    with interrupts() as interrupt, pytest.raises(Interrupted):
        interrupted(
            lambda: push_weights(source, client, via=arena),
            interrupt,
            lambda: "UpdateWeightsFromIpc" in engine.events,
        )
    assert engine.events == ["BeginUpdate", "UpdateWeightsFromIpc", "AbortUpdate"]
    assert engine.open is None


def test_a_refused_call_leaves_nothing_open(engine, client, arena, source):
    engine.refuse["UpdateWeightsFromIpc"] = REFUSED
    with pytest.raises(PushError, match=r"UpdateWeightsFromIpc on .*w differs") as refused:
        push_weights(source, client, via=arena)
    assert (refused.value.reason, refused.value.laggards) == ("CHECKSUM_MISMATCH", ())
    assert engine.events == ["BeginUpdate", "UpdateWeightsFromIpc", "AbortUpdate"]
    assert engine.open is None


@pytest.mark.case("B124")
@pytest.mark.parametrize("committed", [False, True])
def test_a_call_whose_answer_was_lost_is_made_again(committed, engine, client, arena, source):
    engine.loses_reply = committed
    if not committed:
        engine.once["UpdateWeightsFromIpc"] = GONE
    assert push_weights(source, client, via=arena).version == engine.version == 1
    again = engine.ipc[-1]
    assert again.begin.update_id == engine.begun[0].update_id
    assert list(again.begin.checksums) == checksums_of(source), "whole: another process may listen there"
    assert engine.sequence == 1
    assert engine.open is None


def test_a_begin_that_nobody_answered_is_made_up_for(engine, client, arena, source):
    engine.refuse["BeginUpdate"] = GONE
    assert push_weights(source, client, via=arena).version == 1
    assert engine.events[-2:] == ["AbortUpdate", "UpdateWeightsFromIpc"]
    assert engine.ipc[-1].HasField("begin")


def test_an_engine_that_answers_no_more_is_named(engine, client, arena, source, monkeypatch):
    monkeypatch.setattr(push_one, "COMMIT_RETRY_S", 0.3)
    engine.refuse["UpdateWeightsFromIpc"] = GONE
    with pytest.raises(PushError, match="not surely") as gone:
        push_weights(source, client, 6, via=arena)
    assert (gone.value.reason, gone.value.version) == ("UNREACHABLE", 6)
    assert gone.value.laggards == (client.address,)
    assert engine.events[-1] == "AbortUpdate"


@pytest.mark.parametrize("slow", ["BeginUpdate", "UpdateWeightsFromIpc"])
def test_the_time_of_the_push_bounds_every_call(slow, engine, client, arena, source, monkeypatch):
    """The slow one is made when a second is left, and those before it when there is time."""
    enter, answer, now = engine._enter, threading.Event(), time.monotonic
    passed = 60.0 if slow == "BeginUpdate" else 0.0

    def dawdle(name: str, context: grpc.ServicerContext) -> None:
        nonlocal passed
        enter(name, context)
        passed = 60.0
        if name == slow:
            answer.wait(60)

    monkeypatch.setattr(engine, "_enter", dawdle)
    monkeypatch.setattr(sending, "time", SimpleNamespace(monotonic=lambda: now() + passed))
    start = now()
    with pytest.raises(PushError) as late:
        push_weights(source, client, via=arena, timeout_s=61.0)
    assert now() - start < 20, "by itself it would end after a minute"
    answer.set()
    assert late.value.reason == "DEADLINE"
    assert late.value.laggards == (() if slow == "BeginUpdate" else (client.address,))
    assert "AbortUpdate" in engine.events


def test_without_checksums_one_call_is_enough(engine, client, arena, source):
    for version in (1, 2):
        assert push_weights(source, client, via=arena, verify=False).version == version
    assert engine.events == ["UpdateWeightsFromIpc"] * 2
    assert Lending.begun == [], "nothing is hashed"
    assert engine.begun[0].skip_checksums


def test_several_engines_begin_with_the_checksums(engine, client, arena, source):
    other = FakeEngine()
    with serving(other) as address, WeightsClient(address) as second:
        push_weights(source, [client, second], 3, via=arena)
        assert arena.allocation_ids
        for one in (engine, other):
            assert one.events == ["BeginUpdate", "UpdateWeightsFromIpc", "PrepareUpdate", "CommitUpdate"]
            assert [spec.checksum for spec in one.begun[0].manifest.tensors] == checksums_of(source)
            assert (len(one.ipc[0].checksums), one.ipc[0].commit) == (0, False)
        arena.close()
