"""Engine: THE loop that owns the device, in a process of its own.

One turn: take commands, advance the flows of updates, launch a forward pass, take in what the one before it
gave. Nothing else touches the model, so no lock guards it and no forward pass can see two versions of the
weights: whoever wants to change them parks the gate and waits until no pass is in flight.

    host    launch n+1 | results of n .. | launch n+2 | results of n+1 ..
    device    pass n .............| pass n+1 .................| pass n+2 ..

Only what every command needs belongs here. Policy is in scheduler.py, requests in request_table.py, the
life of an update in update_flow.py, everything else in control.py; engine_main.py builds it all.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from rollout_engine import messages
from rollout_engine.batch.schedule import ScheduleBatch
from rollout_engine.channel import Channel
from rollout_engine.control import Control
from rollout_engine.errors import EngineError
from rollout_engine.flows import NUM_WORKERS, Flow, FlowRunner, Until
from rollout_engine.gate import Gate
from rollout_engine.receiver_links import ReceiverLinks
from rollout_engine.replies import error_info, to_builtins
from rollout_engine.request_table import RequestTable
from rollout_engine.runner.model_runner import ModelRunner
from rollout_engine.runner.pending import PendingStep
from rollout_engine.scheduler import Scheduler
from rollout_engine.sequence import Sequence
from rollout_engine.update_flow import UpdateFlow
from rollout_engine.update_records import UpdateRecords
from rollout_engine.uploads import Uploads
from weight_updater.requests import MAX_STREAMS
from weight_updater.updater import WeightUpdater

SNAPSHOT_SECONDS = 0.05
"""Shortest time between two snapshots that no reply asks for."""
HEARTBEAT_SECONDS = 0.5
"""Longest time between two snapshots."""
IDLE_TURN_SECONDS = 0.05
"""How long the loop sleeps when nothing can run; commands wake it."""


class Engine:
    """The loop and what it is composed of."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        scheduler: Scheduler,
        updater: WeightUpdater,
        channel: Channel,
        receivers: socket.socket | None = None,
        uploads: Uploads,
        info: Callable[[], messages.EngineInfo],
        min_version: int,
        max_waiting: int,
        copy_bytes_per_second: float,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._updater = updater
        self._channel = channel
        self._uploads = uploads
        self._info = info
        self._inbox: queue.SimpleQueue[messages.Command | None] = queue.SimpleQueue()
        self._answer_to: dict[int, Channel] = {}  # calls that did not come from the front
        self._links = None if receivers is None else ReceiverLinks(receivers, uploads, self._take_stream)
        # A stream keeps its worker from its first chunk to its last; other work must not wait for that.
        num_workers = NUM_WORKERS + MAX_STREAMS
        self._flows = FlowRunner(wake=lambda: self._inbox.put(None), num_workers=num_workers)
        self._gate = Gate()
        self._requests = RequestTable(scheduler, max_waiting, min_version)
        self._records = UpdateRecords(updater)
        self._updates = UpdateFlow(
            updater,
            scheduler,
            self._gate,
            uploads,
            self._finish,
            self._requests.end_too_old,
            copy_bytes_per_second,
            self._records,
            lambda: self._control.check_awake(),
        )
        self._control = Control(self._gate, scheduler, self._requests, runner, updater, uploads, min_version)
        self._in_flight: tuple[ScheduleBatch, PendingStep] | None = None
        self._worked = False  # the last turn launched or took in a pass: flows may wait for what it did
        self._stop_at = float("inf")
        self._num_steps = 0
        self._num_generated_tokens = 0
        self._books_checked = True
        self._told_at = 0.0
        self._told: messages.Snapshot | None = None
        self._calls = self._call_table()

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until the front goes away or asks to stop."""
        threading.Thread(target=self._read_commands, name="rollsync-channel", daemon=True).start()
        if self._links is not None:
            self._links.start()
        while not self._should_stop():
            self.turn()
        self._flows.close()
        self._updater.close()
        self._uploads.close()

    def turn(self) -> None:
        """LOOP. Take commands, advance flows, run a step, tell what is new."""
        self._take_commands()
        self._flows.turn()
        now = time.monotonic()
        self._updates.tick(now)
        self._requests.expire(now, self._updater.version)
        self._step()
        self._tell()

    def _should_stop(self) -> bool:
        if self._stop_at == float("inf"):
            return False
        return self._scheduler.is_idle or time.monotonic() >= self._stop_at

    def _step(self) -> None:
        """Launch a forward pass, if there is one to run, and take in the one before it."""
        launched = self._launch()
        self._worked = self._in_flight is not None or launched is not None
        if self._in_flight is not None:
            self._take_in(*self._in_flight)
        if launched is not None and not self._runner.overlap:
            self._take_in(*launched)
            launched = None
        self._in_flight = launched
        self._gate.in_flight = launched is not None

    def _launch(self) -> tuple[ScheduleBatch, PendingStep] | None:
        batch = None
        if self._gate.is_open and self._control.not_serving() is None:
            batch = self._scheduler.schedule(
                self._updater.version,
                self._updater.commit_sequence,
                only_started=self._gate.num_draining > 0,
                held_back=self._gate.draining_adapters,
            )
        if batch is None:
            if self._scheduler.is_idle and not self._books_checked:
                self._scheduler.check()
                self._books_checked = True
            return None
        self._books_checked = False
        self._num_steps += 1
        self._num_generated_tokens += len(batch.samples)
        return batch, self._runner.launch(batch)

    def _take_in(self, batch: ScheduleBatch, pending: PendingStep) -> None:
        for sequence in self._scheduler.process(batch, pending.result()):
            self._requests.tell(sequence, self._updater.version)

    def _tell(self) -> None:
        """Send the outputs of this turn, and a snapshot when it is time for one."""
        news: list[messages.Event] = []
        if outputs := self._requests.take_outputs():
            news.append(messages.Outputs(outputs))
        news += self._requests.take_refusals()
        news += self._ended()
        if time.monotonic() - self._told_at >= SNAPSHOT_SECONDS:
            news += self._new_state()
        if news:
            self._channel.send(*news)

    def _ended(self) -> list[messages.UpdateEnded]:
        """How updates ended, as far as nobody was told."""
        return [messages.UpdateEnded(record) for record in self._records.take()]

    def _new_state(self) -> list[messages.Snapshot]:
        """A snapshot that says something new, or that comes as a sign of life."""
        snapshot = self._control.snapshot(self._num_steps, self._num_generated_tokens)
        now = time.monotonic()
        if snapshot == self._told and now - self._told_at < HEARTBEAT_SECONDS:
            return []
        self._told, self._told_at = snapshot, now
        return [snapshot]

    # ------------------------------------------------------------ commands

    def _read_commands(self) -> None:
        """CHANNEL THREAD. File chunks where receivers find them; everything else goes to the loop."""
        for command in self._channel.commands():
            if isinstance(command, messages.Chunk | messages.EndOfChunks):
                self._uploads.file(command)
                continue
            if isinstance(command, messages.Update) and command.tensor and command.tensor.segment is None:
                self._uploads.open(command.call_id)
            self._inbox.put(command)
        self._inbox.put(messages.Shutdown())  # the front is gone

    def _take_stream(self, command: messages.Update, channel: Channel) -> None:
        """RECEIVER'S THREAD. An update by a stream that a receiver takes, and wants to be told the end of."""
        self._answer_to[command.call_id] = channel
        self._inbox.put(command)

    def _take_commands(self) -> None:
        """Handle what has come; sleep a little only if nothing can run."""
        can_run = self._gate.is_open and not self._scheduler.is_idle and self._control.not_serving() is None
        try:
            wait = not can_run and not self._worked
            command = self._inbox.get(block=wait, timeout=IDLE_TURN_SECONDS)
            while True:
                if command is not None:
                    self._handle(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, command: messages.Command) -> None:
        match command:
            case messages.SubmitRequest():
                self._submit(command)
            case messages.AbortRequests():
                self._requests.abort(command.request_ids, self._updater.version)
            case messages.FinishSequence():
                self._requests.finish_at_stop(command, self._updater.version)
            case messages.Shutdown():
                self._stop_at = min(self._stop_at, time.monotonic() + command.grace_s)
            case messages.Call():
                self._call(command)

    def _submit(self, command: messages.SubmitRequest) -> None:
        try:
            self._control.check_serving(command.min_version)
            self._requests.submit(command, self._updater.version)
        except EngineError as error:
            self._channel.send(messages.RequestRefused(command.request_id, error_info(error)))

    def _call(self, command: messages.Call) -> None:
        def done(result: Any, error: Exception | None) -> None:
            self._reply(command.call_id, result, error)

        try:
            result = self._calls[type(command)](command)
        except Exception as error:  # noqa: BLE001 - one command's fault must not end the loop
            self._uploads.drop(command.call_id)  # of a stream that no flow will take
            done(None, error)
            return
        if isinstance(result, Generator):
            self._flows.start(result, done)
        else:
            done(result, None)

    def _reply(self, call_id: int, result: Any, error: Exception | None) -> None:
        """Answer a call; snapshot and records go first, so that whoever has the reply sees its effect."""
        news: list[messages.Event] = [*self._new_state(), *self._ended()]
        self._uploads.drop(call_id)  # of a stream that was refused before it was looked at, too
        reply = messages.Reply(
            call_id,
            to_builtins(result),
            None if error is None else error_info(error),
            self._updater.version,
            self._updater.commit_sequence,
        )
        answer_to = self._answer_to.pop(call_id, self._channel)
        if answer_to is self._channel:
            self._channel.send(*news, reply)
            return
        if news:
            self._channel.send(*news)
        answer_to.send(reply)

    def _finish(self, sequence: Sequence, reason: str, error: str) -> None:
        self._requests.finish(sequence, reason, error, self._updater.version)

    def _awake(self, flow: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`flow`, refused while the weights' memory is released."""

        def guarded(command: messages.Call) -> Any:
            self._control.check_awake()
            return flow(command)

        return guarded

    def _release_memory(self, command: messages.ReleaseMemory) -> Flow:
        """Release memory, but not under a worker that still reads it for an update that has ended."""
        yield Until(lambda: self._updater.open is not None or not self._updates.is_at_work)
        return self._control.release_memory(command)

    def _call_table(self) -> dict[type[messages.Call], Callable[[Any], Any]]:
        """What answers each call: a result, or a flow that will have one."""
        updates, control, updater = self._updates, self._control, self._updater
        return {
            messages.Pause: control.pause,
            messages.Continue: control.resume,
            messages.FlushCache: control.flush_cache,
            messages.ReleaseMemory: self._release_memory,
            messages.ResumeMemory: control.resume_memory,
            messages.GetInfo: lambda _: self._info(),
            messages.Begin: self._awake(updates.begin),
            messages.Update: self._awake(updates.update),
            messages.Prepare: self._awake(updates.prepare),
            messages.Commit: self._awake(updates.commit),
            messages.AbortUpdate: updates.abort,
            messages.Rollback: self._awake(updates.rollback),
            messages.RemoveAdapter: control.remove_adapter,
            messages.RenewLease: lambda c: {"lease_s": updater.renew(c.update_id, c.lease_s)},
            messages.ReleaseIpc: lambda c: {"num_released": updater.release(c.allocation_ids)},
            messages.InitWeightsGroup: control.init_group,
            messages.DestroyWeightsGroup: control.destroy_group,
            messages.GetLayout: lambda _: self._runner.target.arena.layout,
            messages.GetChecksums: control.checksums,
            messages.ReadWeight: control.read_weight,
        }
