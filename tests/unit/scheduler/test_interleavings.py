"""Commands at random moments of a loop whose workers run when they are told to.

Half a model never serves, tokens are labelled by what sampled them, and whatever happened, the engine can be
brought to serve again and nothing is left of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from rollout_engine import messages
from rollout_engine.batch.schedule import ScheduleBatch
from tests.unit.scheduler.hand_engine import HandEngine, Launched, OverlappingRunner
from tests.unit.weight_updater.tiny_target import SHAPES, TinyTarget, manifest_of, pack, weights
from weight_updater import staging
from weight_updater.requests import BeginUpdate, FromIpc, FromTensor, Inflight, Path, Staging
from weight_updater.shm import SharedSegment
from weight_updater.slot_scan import slot_checksums

NUM_ROUNDS = 30
NUM_COMMANDS = 60
LOADED = 4
"""The version that is there at the start."""


class LatePool:
    """Stands for the pool of workers: each function runs when somebody says so, whole."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((function, future))
        return future

    def run(self, at: int) -> None:
        function, future = self.waiting.pop(at)
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001 - the worker's boundary
            future.set_exception(error)

    def shutdown(self, **_: object) -> None:
        pass


class WatchfulRunner(OverlappingRunner):
    """Looks at the whole model before each pass."""

    def __init__(self, target: TinyTarget) -> None:
        super().__init__(target)
        self.hand: HandEngine | None = None
        self.contents = {LOADED: weights_of(0)}  # version -> all weights

    def launch(self, batch: ScheduleBatch) -> Launched:
        assert self.hand is not None
        updater = self.hand.updater
        assert updater.torn_reason == ""
        assert (batch.weight_version, batch.commit_sequence) == (updater.version, updater.commit_sequence)
        for name, value in self.contents[batch.weight_version].items():
            assert torch.equal(self.target.slot(name), value), f"{name} is not of {batch.weight_version}"
        return super().launch(batch)


KNOWN: dict[int, dict[str, torch.Tensor]] = {}


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return KNOWN.setdefault(seed, weights(seed))


class Storm:
    """One round: an engine, and commands drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hand = HandEngine(runner=WatchfulRunner, num_slots=8 * NUM_COMMANDS)
        runner = self.hand.runner
        assert isinstance(runner, WatchfulRunner)
        runner.hand, self.contents = self.hand, runner.contents
        self.partial: set[int] = set()  # versions that bring some tensors only
        self.publish = self.hand.updater._live._publish
        self.hand.updater._live._publish = self.published  # type: ignore[method-assign]
        self.pool = LatePool()
        self.hand.engine._flows._pool.shutdown()
        self.hand.engine._flows._pool = self.pool  # type: ignore[assignment]
        self.segments: list[SharedSegment] = []
        self.version = LOADED
        self.calls: list[int] = []
        self.requests: list[str] = []
        self.sequence = 0
        self.next_slot = 0
        self.faults = 0  # the next copies; the last of them fails

    def copy_bytes(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """A copy at a commit; one of those to come may fail, before or after it has written something."""
        self.faults -= 1
        if self.faults == 0:
            if self.random.random() < 0.5:
                destination[: destination.numel() // 2].copy_(source[: destination.numel() // 2])
            raise RuntimeError("a copy failed")
        destination.copy_(source)

    def close(self) -> None:
        self.hand.close()
        for segment in self.segments:
            segment.close()
            segment.unlink()

    def published(self, version: int) -> None:
        """A version becomes live: what does it consist of?"""
        if version not in self.contents:
            before = self.contents[self.hand.updater.version] if version in self.partial else {}
            self.contents[version] = before | self.brought(version)
        self.publish(version)

    def brought(self, version: int) -> dict[str, torch.Tensor]:
        """The tensors that an update to `version` brings."""
        names = list(SHAPES)[version % 3 :: 3] if version in self.partial else SHAPES
        return {name: weights_of(version)[name] for name in names}

    def turn(self) -> None:
        self.hand.engine._inbox.put(None)  # a loop that is idle sleeps otherwise
        self.hand.engine.turn()
        assert self.hand.updater.commit_sequence >= self.sequence
        self.sequence = self.hand.updater.commit_sequence
        if not self.hand.updater.torn_reason and not self.hand.engine._gate.parked_by_update:
            known = self.hand.updater._live.known
            assert known == slot_checksums(self.hand.target, list(known)), "what is proven of the slots"

    def segment(self, version: int, *, spoil: bool) -> SharedSegment:
        tensors = self.brought(version)
        made = SharedSegment.create(manifest_of(tensors).packed_offsets()[1])
        pack(made, tensors)
        if spoil:
            made.buf[3] ^= 255
        self.segments.append(made)
        return made

    def push(self) -> None:
        """The whole life of an update in one call, or its first steps."""
        chosen = self.random.choice
        if chosen((True, True, False)) or self.version == LOADED:
            self.version += 1
            if chosen((True, False, False)):
                self.partial.add(self.version)
        version, path = self.version, chosen((Path.TENSOR, Path.IPC))
        staging = chosen((Staging.DEVICE, Staging.DEVICE, Staging.HOST, Staging.NONE))
        keep = chosen((True, False)) and staging is not Staging.NONE
        update_id = chosen(("a", "b", ""))
        if not update_id and path is Path.TENSOR and chosen((True, False)):
            self.stream(version, chosen((True, True, False)))
            return
        begin = BeginUpdate(
            path,
            update_id=update_id,
            version=version,
            manifest=manifest_of(self.brought(version)),
            partial=version in self.partial,
            staging=staging,
            inflight=chosen(list(Inflight)),
            keep_previous=keep,
            # Under a name another update may be open, which these bytes are not for.
            skip_checksums=not update_id and chosen((False, True)),
        )
        spoil = not begin.skip_checksums and chosen((False, False, False, True))
        bytes_of = self.segment(version, spoil=spoil).descriptor
        if begin.update_id and chosen((True, False)):
            self.calls.append(self.hand.call(messages.Begin, begin))
            self.pause()
            update = {"tensor": FromTensor(begin.update_id, bytes_of)}
            if path is Path.IPC:
                update = {"ipc": FromIpc(begin.update_id, (bytes_of,))}
            self.calls.append(self.hand.call(messages.Update, commit=chosen((True, False)), **update))
            return
        update = {"tensor": FromTensor("", bytes_of)}
        if path is Path.IPC:
            update = {"ipc": FromIpc("", (bytes_of,))}
        self.calls.append(self.hand.call(messages.Update, begin=begin, **update))

    def stream(self, version: int, complete: bool) -> None:
        """An update in one call whose bytes come as chunks, perhaps not all of them."""
        uploads = self.hand.engine._uploads
        tensors = self.brought(version)
        begin = BeginUpdate(
            Path.TENSOR,
            version=version,
            manifest=manifest_of(tensors),
            partial=version in self.partial,
            staging=self.random.choice((Staging.DEVICE, Staging.NONE)),
            inflight=self.random.choice(list(Inflight)),
        )
        call = self.hand.call(messages.Update, tensor=FromTensor(""), begin=begin)
        self.calls.append(call)
        uploads.open(call)
        for index, value in enumerate(tensors.values()):
            slot = uploads.front_ring.slot(self.next_slot, value.nbytes)
            slot.copy_(value.reshape(-1).view(torch.uint8))
            uploads.file(messages.Chunk(call, index, 0, self.next_slot, value.nbytes))
            self.next_slot += 1
            if not complete and index == 0:
                break
        uploads.file(messages.EndOfChunks(call, complete=complete))

    def submit(self) -> None:
        name = f"r{len(self.requests)}"
        self.requests.append(name)
        low = self.random.choice((0, 0, max(0, self.hand.updater.version)))
        self.hand.submit(name, max_tokens=self.random.randint(1, 12), min_version=low)

    def command(self) -> None:
        chosen = self.random.choice
        what = chosen(("submit", "submit", "push", "push", "push", "step", "step", "rollback"))
        if self.random.random() < 0.3:
            what = chosen(("pause", "sleep", "end", "fault", "late"))
        call = lambda *a: self.calls.append(self.hand.call(*a))  # noqa: E731
        if what == "submit":
            self.submit()
        elif what == "push":
            self.push()
        elif what == "step":
            kind = chosen((messages.Commit, messages.Prepare, messages.AbortUpdate))
            fields = (chosen(("a", "b")), 5.0) if kind is messages.Prepare else (chosen(("a", "b")),)
            call(kind, *fields)
        elif what == "rollback":
            call(messages.Rollback, chosen(list(Inflight)))
        elif what == "pause":
            kind = chosen((messages.Pause, messages.Continue, messages.Continue, messages.FlushCache))
            call(kind, *((chosen(("wait", "abort", "keep", "retract")),) if kind is messages.Pause else ()))
        elif what == "sleep":
            tags = chosen((["weights"], ["kv_cache"], ["graphs"], []))
            call(chosen((messages.ReleaseMemory, messages.ResumeMemory)), tags)
        elif what == "fault":
            self.faults = self.random.randint(1, 4)
        elif what == "late":
            self.hand.engine._updates.tick(time.monotonic() + 1000)
        elif self.requests:
            self.hand.put(messages.AbortRequests([chosen(self.requests)]))

    def pause(self) -> None:
        """Between two commands: nothing, some turns, or some work."""
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 5))):
            if self.pool.waiting and self.random.random() < 0.5:
                self.pool.run(self.random.randrange(len(self.pool.waiting)))
            else:
                self.turn()

    def settle(self) -> None:
        """Undo what keeps an engine from serving, and push weights that are right."""
        hand, self.faults = self.hand, 0
        hand.call(messages.Continue)
        hand.call(messages.ResumeMemory, [])
        for _ in range(400):
            while self.pool.waiting:
                self.pool.run(0)
            self.turn()
            if hand.updater.open is not None:
                hand.call(messages.AbortUpdate, hand.updater.open.update_id)
            if all(call in hand.news.replies for call in self.calls) and hand.scheduler.is_idle:
                break
        unanswered = [call for call in self.calls if call not in hand.news.replies]
        assert not unanswered, f"{len(unanswered)} calls are not answered"
        self.version = max(self.version, hand.updater._live.highest) + 1
        manifest = manifest_of(weights_of(self.version))
        whole = FromTensor("", self.segment(self.version, spoil=False).descriptor)
        begin = BeginUpdate(Path.TENSOR, version=self.version, manifest=manifest)
        last = hand.call(messages.Update, tensor=whole, begin=begin)
        hand.submit("last", max_tokens=3, min_version=0)
        for _ in range(60):
            while self.pool.waiting:
                self.pool.run(0)
            self.turn()
        assert last in hand.news.replies
        assert hand.news.replies[last].error is None, hand.news.replies[last].error

    def check(self) -> None:
        """Nothing is left of anything."""
        hand = self.hand
        engine, gate = hand.engine, hand.engine._gate
        assert (hand.updater.version, hand.updater.torn_reason, hand.updater.open) == (self.version, "", None)
        assert (gate.is_open, gate.num_draining, gate.rolling_back) == (True, 0, False)
        updates = engine._updates
        assert (updates._num_working, updates._num_receiving, updates._feeds) == (0, 0, {})
        assert not updates._clearing
        assert engine._flows._waiting == []
        assert hand.updater._receivers.mappings.pinned == set()
        assert sorted(hand.news.taken) == list(range(self.next_slot)), "each slot comes back once"
        assert hand.scheduler.is_idle
        hand.scheduler.check()
        assert engine._requests._live == {}
        ended = {o.request_id for o in hand.news.outputs if o.finish_reason}
        ended |= {refused.request_id for refused in hand.news.refused}
        assert ended >= set(self.requests), "each request ends"


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
def test_whatever_comes_in_whatever_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storm = Storm(seed)
    monkeypatch.setattr(staging, "copy_bytes", storm.copy_bytes)
    try:
        for _ in range(NUM_COMMANDS):
            storm.command()
            storm.pause()
        storm.settle()
        storm.check()
    finally:
        storm.close()
