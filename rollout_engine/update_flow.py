"""The life of a weight update on the engine's loop: begin, receive, verify, settle, commit.

    Begin     resolve the manifest (off loop), refuse or open
    Update    receive (off loop) into staging while generation goes on; staging none parks the device first
    Prepare   verify (off loop): all that can still refuse
    Commit    verify if not done, settle the sequences in flight, then one uninterrupted turn of the loop:
              write, finalise, compare, version := next

Nothing here writes to the model: `WeightUpdater` does, and only from the loop (or, with staging none, from
the one receiver that the slots are lent to while the loop is parked).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from rollout_engine import messages
from rollout_engine.flows import Flow, OffLoop, Until
from rollout_engine.full_replies import FullReplies
from rollout_engine.gate import Gate, Settled
from rollout_engine.scheduler import Scheduler
from rollout_engine.sequence import Sequence
from rollout_engine.settling import Settler
from rollout_engine.update_records import UpdateRecords
from rollout_engine.uploads import Uploads
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.open_update import OpenUpdate
from weight_updater.receive import Pace, Receive
from weight_updater.requests import (
    BeginReply,
    BeginUpdate,
    FromDistributed,
    Inflight,
    UpdateReply,
)
from weight_updater.updater import WeightUpdater

MAY_COME_AGAIN = (Reason.WRONG_STATE, Reason.MANIFEST_UNKNOWN)
"""Why a call that commits what another call began may be refused without ending the update."""


@dataclasses.dataclass(slots=True, eq=False)
class _Beginning:
    """A begin whose manifest is being read, so that nothing is open yet. aborted: nothing shall be."""

    update_id: str
    aborted: bool = False


class UpdateFlow:
    """Flows for the commands of an update; a FlowRunner advances them on the loop.

    Args:
        finish: ends a live sequence with a finish reason and tells its caller.
        end_too_old: ends the live requests that the weights which are live now may not answer: their
            min_version is above the version given, or their adapter was pushed over others.
        copy_bytes_per_second: of one plain copy on this device, measured at start (the floor).
        records: is told of each update that opens, and how it ends.
        check_awake: raises EngineError while the weights' memory is released.
    """

    def __init__(
        self,
        updater: WeightUpdater,
        scheduler: Scheduler,
        gate: Gate,
        uploads: Uploads,
        finish: Callable[[Sequence, str, str], None],
        end_too_old: Callable[[int], None],
        copy_bytes_per_second: float,
        records: UpdateRecords,
        check_awake: Callable[[], None] = lambda: None,
    ) -> None:
        self._updater = updater
        self._scheduler = scheduler
        self._gate = gate
        self._uploads = uploads
        self._finish = finish
        self._settler = Settler(gate, scheduler, finish)
        self._end_too_old = end_too_old
        self._replies = FullReplies(updater, gate, records, copy_bytes_per_second)
        self._records = records
        self._check_awake = check_awake
        self._num_receiving = 0
        self._feeds: dict[int, OpenUpdate] = {}  # calls that bring an update's bytes -> the update
        self._clearing = False  # one of them brings the sequences in flight out of the way
        self._receiving_group = ""
        self._num_working = 0  # flows at work on the open update; its lease waits for them
        self._beginnings: list[_Beginning] = []  # begins under way
        self._settled = Settled()

    @property
    def is_at_work(self) -> bool:
        """Whether a worker may be at the weights, or at staging memory; also for an update that has ended."""
        return bool(self._num_working or self._num_receiving)

    def begin(self, command: messages.Begin) -> Flow:
        """Open an update; the reply means that nothing about it can be known to fail yet."""
        return (yield from self._begin(command.request))

    def update(self, command: messages.Update) -> Flow:
        """Receive bytes; with `begin`, the whole life of an update in one call."""
        request = command.disk or command.distributed or command.tensor or command.ipc
        if request is None:
            raise UpdateRefused(Reason.INVALID_UPDATE, "the call names no path")
        try:
            if command.begin is None and not command.commit:
                return (yield from self._receive(command.call_id, request))
            if command.begin is None:
                yield Until(lambda: not self._num_working)  # as in `_commit`
                return (yield from self._rest(command.call_id, request, MAY_COME_AGAIN))
            if command.begin.update_id and (done := self._replies.again(command.begin.update_id)):
                return done
            begun: BeginReply = yield from self._begin(command.begin)
            request = dataclasses.replace(request, update_id=begun.update_id)
            return (yield from self._rest(command.call_id, request))
        finally:
            self._uploads.drop(command.call_id)

    def _rest(self, call_id: int, request: messages.FromAny, forgiven: Collection[Reason] = ()) -> Flow:
        """All of an update's life after its begin; what fails ends it, but for the `forgiven` reasons."""
        update = self._open(request.update_id)
        try:
            yield from self._receive(call_id, request, alone=True)
            return (yield from self._commit(request.update_id, update))
        except UpdateError as error:
            if error.reason not in forgiven:
                self._end_failed(update, error)
            raise

    def prepare(self, command: messages.Prepare) -> Flow:
        """Do everything that can refuse, and vote."""
        yield from self._verify(command.update_id)
        return self._updater.prepared(command.update_id, command.deadline_s)

    def commit(self, command: messages.Commit) -> Flow:
        """Make the update live."""
        return (yield from self._commit(command.update_id))

    def abort(self, command: messages.AbortUpdate) -> Flow:
        """End an update; a receiver that is still at work has stopped when this replies. One that is still
        about to begin is refused by its begin.
        """
        found, torn = self._updater.abort(command.update_id)  # from here on the receiver writes nothing
        about_to_begin = [one for one in self._beginnings if one.update_id == command.update_id]
        for one in about_to_begin:
            one.aborted = True
        if found and self._num_receiving:
            self._interrupt_ended()
            if group := self._receiving_group:  # a collective ends only with its group
                yield OffLoop(lambda: self._updater.groups.destroy(group))
            yield Until(lambda: self._num_receiving == 0)
        self._release_device()
        return {"found": found or bool(about_to_begin), "torn": torn}

    def rollback(self, command: messages.Rollback) -> Flow:
        """Bring the previous version back."""
        self._updater.check_rollback()  # before a sequence is disturbed
        self._settler.refuse_endless_wait(command.inflight, "")
        began_at, meant = self._records.now(), self._updater.commit_sequence
        settled = yield from self._settler.settle(command.inflight, "", lambda: False)
        yield Until(lambda: not self._gate.rolling_back)
        self._updater.check_rollback(meant)  # an update may have begun meanwhile, or committed
        self._gate.rolling_back = True  # and none may begin until this has ended
        try:
            yield Until(lambda: not self._num_working)  # a worker may still read what is live
            yield from self._gate.park()
            reply = self._updater.rollback()
        except UpdateError:
            self._gate.unpark()
            raise
        finally:
            self._gate.rolling_back = False
        self._scheduler.on_commit(self._updater.commit_sequence)
        self._end_too_old(self._updater.version)  # before a forward pass can run them
        return self._replies.complete(reply, settled, began_at)

    def tick(self, now: float) -> None:
        """Once in each turn: leases, and what an update's end leaves behind."""
        if self._updater.open is not None and (self._num_receiving or self._num_working):
            self._updater.renew(self._updater.open.update_id, 0.0)  # this engine is the one at work
        self._updater.tick(now)
        self._interrupt_ended()
        if self._updater.open is None and not self._num_working:
            self._release_device()
        if self._updater.torn_reason:
            for sequence in self._scheduler.live:
                self._finish(sequence, "error", f"the weights are torn: {self._updater.torn_reason}")

    # ------------------------------------------------------------ steps

    def _begin(self, request: BeginUpdate) -> Flow:
        began_at = self._records.now()
        beginning = _Beginning(request.update_id)
        self._beginnings.append(beginning)
        try:
            if request.adapter is not None:
                asked = request
                request = yield OffLoop(lambda: self._updater.adapters.complete(asked))
            if request.is_known_by_name:
                manifest = self._updater.resolve(request)
            else:
                manifest = yield OffLoop(lambda: self._updater.resolve(request))
            yield Until(lambda: not self._gate.rolling_back)
            if beginning.aborted:
                raise UpdateRefused(Reason.UNKNOWN_UPDATE, f"update {request.update_id} was aborted")
            self._check_awake()  # memory may have been released meanwhile
            paused = self._gate.paused_by_user
            reply: BeginReply = self._updater.begin(request, manifest, paused=paused)
        except UpdateError as error:
            self._records.refused_at_begin(request, error, began_at)
            raise
        finally:
            self._beginnings.remove(beginning)
        self._records.opened(reply, began_at)
        opened = self._updater.open
        if opened is not None and opened.adapter is not None:
            yield from self._check_base(opened)
        if not self._gate.parked_by_update:  # else a repeated call: what was settled stays counted
            self._settled = Settled()
        if opened is not None and opened.adopt:
            yield from self._let_trainer_write(opened)
        return reply

    def _let_trainer_write(self, update: OpenUpdate) -> Flow:
        """Bring generation to a stand before the reply to begin, from which on the trainer may write."""
        self._num_working += 1
        try:
            if not self._gate.parked_by_update:
                update.held_back = True
                self._settled = yield from self._settle(update.request.inflight, update)
                self._updater.check_open(update)
            yield from self._gate.park()
            self._updater.check_open(update)
        finally:
            self._num_working -= 1
        update.held_back = False

    def _check_base(self, update: OpenUpdate) -> Flow:
        """Refuse an adapter that was trained on other base weights; hashing those may take a while."""
        self._num_working += 1
        try:
            yield OffLoop(lambda: self._updater.adapters.check_base(update))
        except UpdateError as error:
            self._end_failed(update, error)
            raise
        finally:
            self._num_working -= 1
        self._updater.check_open(update)  # somebody may have aborted it meanwhile

    def _receive(self, call_id: int, request: messages.FromAny, *, alone: bool = False) -> Flow:
        """Bring bytes in. alone: nothing else will come for the update; the worker that has brought them in
        verifies them too, and nothing is told.
        """
        if request.update_id and (done := self._replies.again(request.update_id)):
            return done
        opened = self._updater.open
        if opened is not None and opened.writes_live and not self._gate.parked_by_update:
            self._settler.refuse_endless_wait(opened.request.inflight, "")
        chunks = self._uploads.chunks(call_id) if self._uploads.is_open(call_id) else None
        receive = self._updater.receiver(request, chunks)
        update = receive.update
        self._num_receiving += 1
        self._feeds[call_id] = update
        self._receiving_group = request.group_name if isinstance(request, FromDistributed) else ""
        error: Exception | None = None
        try:
            if receive.writes_live:
                error = yield from self._clear_the_way(receive)
            if error is None and self._updater.open is update:
                if alone and receive.pace <= (Pace.BRIEF if self._scheduler.is_idle else Pace.INSTANT):
                    self._updater.run_all(receive)
                else:
                    self._num_working += alone  # no commit of another update while this one is verified
                    try:
                        yield OffLoop((lambda: self._updater.run_all(receive)) if alone else receive.run)
                    finally:
                        self._num_working -= alone
        except Exception as caught:  # noqa: BLE001 - the updater decides what the fault means
            error = caught
        finally:
            self._num_receiving -= 1
            self._feeds.pop(call_id, None)
        try:
            if alone:
                return self._updater.arrived(receive, error)
            return self._updater.received(receive, error)  # raises what ended the update, if it has
        except UpdateError:
            self._interrupt_ended()
            self._release_device()
            raise
        finally:
            del error  # it refers to this frame, and to the worker's, with the memory that was read there

    def _clear_the_way(self, receive: Receive) -> Flow:
        """Park the device for bytes that go straight to live slots. Of streams side by side the first does it
        and the others wait. Returns what a look at the bytes found wrong, before a sequence is disturbed.
        """
        yield Until(lambda: not self._clearing)
        update = receive.update
        if self._gate.parked_by_update or self._updater.open is not update:
            return None
        self._clearing = True
        try:
            yield OffLoop(receive.look)
            if self._updater.open is update:
                self._settled = yield from self._settle(update.request.inflight, update)
            if self._updater.open is update:
                yield from self._gate.park()
        except UpdateError as fault:
            return fault
        finally:
            self._clearing = False
        return None

    def _verify(self, update_id: str) -> Flow:
        yield Until(lambda: not self._num_working)
        if self._updater.verified(update_id):
            return
        update = self._updater.open
        self._num_working += 1
        try:
            yield OffLoop(lambda: self._updater.verify(update_id))
        except UpdateError as error:
            if error.reason not in (Reason.INCOMPLETE, Reason.WRONG_STATE):  # then the sender may go on
                self._end_failed(update, error)
            raise
        finally:
            self._num_working -= 1

    def _commit(self, update_id: str, update: OpenUpdate | None = None) -> Flow:
        """update: the one that is meant, where another may have begun under its id since."""
        yield Until(lambda: not self._num_working)  # a repeated call gets the reply of the first
        if (done := self._replies.again(update_id)) is not None:
            return done
        began_at = self._records.now()
        if update is not None:
            self._updater.check_open(update)
        yield from self._verify(update_id)
        self._updater.verified(update_id)  # raises what ended it
        opened = self._open(update_id)
        assert opened is not None
        adapter = "" if opened.adapter is None else opened.adapter.name
        settled = self._settled
        parked_before = self._gate.parked_by_update
        reply: UpdateReply | None = None
        self._num_working += 1
        try:
            if not parked_before:
                self._settler.refuse_endless_wait(opened.request.inflight, adapter)
                settled = yield from self._settle(opened.request.inflight, opened, adapter)
                self._updater.check_open(opened)
                yield from self._gate.park()
                self._updater.check_open(opened)
            reply = self._updater.commit(update_id)
        finally:
            self._num_working -= 1
            if reply is None:
                if not parked_before and self._updater.open is opened:
                    self._gate.unpark()
                self._release_device()
        self._scheduler.on_commit(self._updater.commit_sequence)
        self._end_too_old(self._updater.version)  # sequences of adapters that other weights are under now
        return self._replies.complete(reply, settled, began_at)

    def _settle(self, inflight: Inflight, update: OpenUpdate, adapter: str = "") -> Flow:
        """Bring the sequences in flight that an update concerns to where its commit may come."""
        return (yield from self._settler.settle(inflight, adapter, lambda: self._updater.open is not update))

    # ------------------------------------------------------------ ends

    def _interrupt_ended(self) -> None:
        """End the streams of updates that have ended: their senders may have nothing to send for long."""
        for call_id, update in list(self._feeds.items()):
            if self._updater.open is not update:
                del self._feeds[call_id]
                self._uploads.interrupt(call_id)

    def _end_failed(self, update: OpenUpdate | None, error: UpdateError) -> None:
        """End an update that a step failed, unless that step has ended it already."""
        if update is not None and self._updater.open is update:
            self._updater.refuse(update.update_id, error)
        self._release_device()

    def _release_device(self) -> None:
        """Forward passes may start again (if the weights are whole) once no update holds the device."""
        if self._updater.open is None and not self._gate.rolling_back:
            self._gate.unpark()

    def _open(self, update_id: str) -> OpenUpdate | None:
        """The update that is open, if it is called so."""
        opened = self._updater.open
        return opened if opened is not None and opened.update_id == update_id else None
