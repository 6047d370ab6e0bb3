"""Several chunk streams that bring one update side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.unit.weight_updater.tiny_target import TinyTarget, begin, make_updater, weights, whole
from weight_updater.errors import Reason, UpdateError, UpdateRefused, WeightsTorn
from weight_updater.open_update import Transfer
from weight_updater.receive import Receive
from weight_updater.requests import MAX_STREAMS, FromTensor, ShmSegment, Staging, UpdateState
from weight_updater.updater import WeightUpdater

Chunks = Iterator[tuple[int | None, int, torch.Tensor]]


class Worker:
    """A stream in a thread of its own, as the engine runs it."""

    def __init__(self, updater: WeightUpdater, update_id: str, chunks: Chunks) -> None:
        self.receive: Receive = updater.receiver(FromTensor(update_id), chunks)
        self._updater = updater
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.receive.run()
        except UpdateError as error:
            self._error = error

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()

    def end(self):  # type: ignore[no-untyped-def]
        self.join()
        return self._updater.received(self.receive, self._error)


@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
def test_streams_side_by_side_bring_what_one_would(staging: Staging) -> None:
    target, new = TinyTarget(), weights(1)
    updater = make_updater(target)
    update_id = begin(updater, new, staging=staging)
    chunks, meet = list(whole(new)), threading.Barrier(2)

    def half(first: int) -> Chunks:
        meet.wait(10)  # both have begun
        yield from chunks[first::2]

    workers = [Worker(updater, update_id, half(first)) for first in (0, 1)]
    assert updater.open is not None
    assert updater.open.num_receiving == 2
    for worker in workers:
        worker.join()  # the state counts bytes, whichever stream brought them
    replies = [worker.end() for worker in workers]
    assert [reply.state for reply in replies] == [UpdateState.RECEIVED, UpdateState.RECEIVED]
    assert not updater.open.receiving
    updater.verify(update_id)
    reply = updater.commit(update_id)
    assert (reply.num_changed, reply.verified) == (6, True)
    assert all(torch.equal(target.values()[name], value) for name, value in new.items())


def test_the_state_is_received_only_when_all_bytes_are_here() -> None:
    updater, new = make_updater(TinyTarget()), weights(1)
    update_id = begin(updater, new)
    chunks, gate = list(whole(new)), threading.Event()

    def rest() -> Chunks:
        gate.wait(10)
        yield from chunks[2:]

    late, early = Worker(updater, update_id, rest()), Worker(updater, update_id, iter(chunks[:2]))
    assert early.end().state is UpdateState.RECEIVING
    with pytest.raises(UpdateRefused, match="still receiving"):
        updater.verify(update_id)
    gate.set()
    assert late.end().state is UpdateState.RECEIVED


@pytest.mark.parametrize(("staging", "end"), [(Staging.HOST, UpdateRefused), (Staging.NONE, WeightsTorn)])
def test_a_stream_that_breaks_ends_the_others(staging: Staging, end: type[UpdateError]) -> None:
    target, new = TinyTarget(), weights(1)
    updater = make_updater(target)
    update_id = begin(updater, new, staging=staging)
    chunks, gate = list(whole(new)), threading.Event()

    def breaks() -> Chunks:
        yield chunks[0]
        raise UpdateRefused(Reason.PEER_LOST, "gone")

    def waits() -> Chunks:
        yield chunks[1]
        gate.wait(10)
        yield from chunks[2:]

    other = Worker(updater, update_id, waits())
    with pytest.raises(end, match="gone"):
        Worker(updater, update_id, breaks()).end()
    assert updater.open is None
    values = target.values()
    gate.set()
    with pytest.raises(end, match="gone"):
        other.end()
    assert all(torch.equal(target.values()[name], value) for name, value in values.items())
    assert bool(updater.torn_reason) == (staging is Staging.NONE)


def test_what_the_slots_held_is_read_once_before_any_stream_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    updater, new = make_updater(TinyTarget()), weights(1)
    update_id = begin(updater, new, staging=Staging.NONE)
    before, seen = updater.checksums([]), []
    know = type(updater._live).know

    def slowly(live) -> None:  # type: ignore[no-untyped-def]
        time.sleep(0.1)
        know(live)
        seen.append(dict(live.known))

    monkeypatch.setattr(type(updater._live), "know", slowly)
    chunks = list(whole(new))
    workers = [Worker(updater, update_id, iter(chunks[first::3])) for first in range(3)]
    for worker in workers:
        worker.end()
    assert seen == [before]


def test_streams_go_side_by_side_with_streams_only() -> None:
    updater, new = make_updater(TinyTarget()), weights(1)
    update_id = begin(updater, new)
    gate = threading.Event()

    def waits() -> Chunks:
        gate.wait(10)
        return
        yield

    workers = [Worker(updater, update_id, waits()) for _ in range(MAX_STREAMS)]
    with pytest.raises(UpdateRefused, match=f"receiving {MAX_STREAMS} streams already") as refused:
        updater.receiver(FromTensor(update_id), waits())
    assert refused.value.reason is Reason.WRONG_STATE
    segment = FromTensor(update_id, ShmSegment("rollsync-" + "0" * 32, 4096, "a"))
    with pytest.raises(UpdateRefused, match="is receiving already"):
        updater.receiver(segment)
    gate.set()
    for worker in workers:
        worker.end()
    alone = updater.receiver(segment)
    with pytest.raises(UpdateRefused, match="is receiving already"):
        updater.receiver(FromTensor(update_id), waits())
    with pytest.raises(UpdateRefused) as missing:
        alone.run()
    assert missing.value.reason is Reason.MEMORY_UNAVAILABLE


def test_seconds_of_streams_side_by_side_count_once() -> None:
    transfer = Transfer()

    def work() -> None:
        with transfer.running():
            time.sleep(0.2)

    started = time.monotonic()
    for _ in range(2):
        threads = [threading.Thread(target=work) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 0.4 <= transfer.seconds <= time.monotonic() - started  # added up: 16 at least
