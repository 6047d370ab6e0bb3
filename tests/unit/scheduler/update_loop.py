"""The engine's loop as far as updates go, turned by hand; see the fixture `loop`."""

from __future__ import annotations

import time
from typing import Any

from rollout_engine import messages
from rollout_engine.flows import FlowRunner
from rollout_engine.gate import Gate
from rollout_engine.update_flow import UpdateFlow
from rollout_engine.update_records import UpdateRecords
from tests.unit.weight_updater.tiny_target import (
    EMBED,
    TinyTarget,
    make_updater,
    manifest_of,
    pack,
    weights,
)
from weight_updater.requests import BeginUpdate, FromTensor, Path, Staging, UpdateReply
from weight_updater.shm import SharedSegment


class NoSequences:
    """A scheduler and the uploads of an engine that generates nothing."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.live: list[Any] = []
        self.is_idle = True

    def started_with(self, adapter: str) -> list[Any]:
        return self.started

    def on_commit(self, commit_sequence: int) -> None:
        pass

    def is_open(self, call_id: int) -> bool:
        return False

    def drop(self, call_id: int) -> None:
        pass

    def interrupt(self, call_id: int) -> None:
        pass


class Loop:
    """The engine's loop, as far as updates go."""

    def __init__(self) -> None:
        self.target = TinyTarget()
        self.updater = make_updater(self.target)
        self.sequences: Any = NoSequences()
        self.updates = UpdateFlow(
            self.updater,
            self.sequences,
            Gate(),
            self.sequences,
            finish=lambda *_: None,
            end_too_old=lambda version: None,
            copy_bytes_per_second=1e9,
            records=UpdateRecords(self.updater),
        )
        self.flows = FlowRunner(wake=lambda: None)
        self.answers: dict[str, UpdateReply | Exception] = {}
        self.segment = SharedSegment.create(manifest_of(weights(1)).packed_offsets()[1])

    def start(self, name: str, flow: Any) -> None:
        def done(result: Any, error: Exception | None) -> None:
            self.answers[name] = result if error is None else error

        self.flows.start(flow, done)

    def update(self, name: str, seed: int, *, spoil: bool = False) -> None:
        """Start an update in one call."""
        tensors = weights(seed)
        manifest = manifest_of(tensors)
        if spoil:
            tensors[EMBED][0, 0] += 1
        pack(self.segment, tensors)
        begin = BeginUpdate(path=Path.TENSOR, update_id=name, manifest=manifest, staging=Staging.HOST)
        tensor = FromTensor("", self.segment.descriptor)
        command = messages.Update(call_id=1, tensor=tensor, begin=begin)
        self.start(name, self.updates.update(command))

    def turn_until(self, name: str) -> UpdateReply | Exception:
        deadline = time.monotonic() + 10
        while name not in self.answers:
            assert time.monotonic() < deadline, f"{name} is not answered"
            self.flows.turn()
            time.sleep(0.001)
        return self.answers[name]
