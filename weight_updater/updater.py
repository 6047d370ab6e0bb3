"""WeightUpdater: the life of an update, from begin to one of its three ends.

It belongs to the engine's loop. Methods marked LOOP are called by the loop's thread only; WORKER ones by
one worker thread while the loop goes on; between them at most one update is open. It knows nothing of
requests in flight: the loop decides when no forward pass runs and then calls `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weight_updater import replies
from weight_updater.adapter_bank import AdapterBank
from weight_updater.adapter_updates import AdapterUpdates
from weight_updater.arena import WeightTarget
from weight_updater.errors import Reason, UpdateError, UpdateRefused, WeightsTorn
from weight_updater.from_tensor import Chunks
from weight_updater.graphs import GraphHooks, NoGraphs
from weight_updater.groups import GroupRegistry
from weight_updater.history import History
from weight_updater.live import LiveWeights
from weight_updater.manifests import Manifests
from weight_updater.mappings import Mappings
from weight_updater.open_update import OpenUpdate, Request, check_received, expect
from weight_updater.opening import Opener
from weight_updater.preloaded import PreloadedWeights
from weight_updater.receive import Pace, Receive, Receivers, after, skip
from weight_updater.requests import (
    BeginReply,
    BeginUpdate,
    FromIpc,
    Manifest,
    Staging,
    UpdateReply,
    UpdateState,
)
from weight_updater.staging import StagingBuffers


class WeightUpdater:
    """Swaps the weights of one live model.

    Args:
        target: the live weights.
        lease_s: seconds without a call after which an open update ends, unless it asks for others.
        roots: directories that the disk path may read.
        device_staging: reserve a second arena on the device, now.
        initial_version: weight version of what is live now.
        graphs: whoever captured CUDA graphs over the weights.
        preloaded: a trainer's arena that `target` lives on from the start.
        adapters: memory of adapters beside the base weights; None: none can be held.

    Attributes:
        open: the update that is open, if one is.
        buffers: where updates wait; its memory can be released with that of the weights.
        adapters: what is about adapters alone.
    """

    def __init__(
        self,
        target: WeightTarget,
        *,
        lease_s: float,
        roots: Sequence[str],
        device_staging: bool,
        initial_version: int = 0,
        graphs: GraphHooks | None = None,
        preloaded: PreloadedWeights | None = None,
        adapters: AdapterBank | None = None,
    ) -> None:
        self.open: OpenUpdate | None = None
        self._target = target
        hooks: GraphHooks = graphs or NoGraphs()
        self._manifests = Manifests(roots)
        self.buffers = StagingBuffers(target, device_staging=device_staging)
        mappings = Mappings(target.device) if preloaded is None else preloaded.mappings
        self._receivers = Receivers(target, self._manifests, mappings)
        self._live = LiveWeights(target, self.buffers, hooks, initial_version)
        self._live.adopted = None if preloaded is None else preloaded.mapping
        self._opener = Opener(target, self._live, self.buffers, self._manifests, hooks, lease_s)
        self.adapters = AdapterUpdates(adapters, self._live, self.buffers, self._manifests, lease_s)
        self._history = History()
        self.on_ended: Callable[[OpenUpdate, UpdateError], None] = lambda *_: None  # LOOP; without a commit

    @property
    def version(self) -> int:
        """The weight version that is live."""
        return self._live.version

    @property
    def commit_sequence(self) -> int:
        """How many commits and rollbacks there were."""
        return self._live.commit_sequence

    @property
    def torn_reason(self) -> str:
        """Why nothing may be generated; "" while the weights are whole."""
        return self._live.torn_reason

    @property
    def owns_memory(self) -> bool:
        """Whether the live weights are the engine's own memory, not an adopted arena."""
        return self._live.adopted is None

    @property
    def weights_path(self) -> str:
        """Directory of the last committed disk update; "" before the first."""
        return self._live.weights_path

    @property
    def groups(self) -> GroupRegistry:
        """Process groups of the distributed path; `init` and `destroy` are for the WORKER."""
        return self._receivers.groups

    # Begin

    def resolve(self, request: BeginUpdate) -> Manifest:
        """ANY THREAD. What the update will bring: reads headers (disk), or knows the digest.

        Raises:
            UpdateRefused: MANIFEST_UNKNOWN, INVALID_UPDATE, PATH_FORBIDDEN, FILE_NOT_FOUND, FILE_CORRUPT,
                MANIFEST_MISMATCH, NO_MEMORY.
        """
        manifest = self._manifests.resolve(request)
        waits = not request.adopt and request.adapter is None
        if waits and self.buffers.choose(request.staging) is Staging.HOST:
            self.buffers.get(Staging.HOST)  # slow the first time, if it is pinned: not on the loop
        return manifest

    def begin(self, request: BeginUpdate, manifest: Manifest, *, paused: bool) -> BeginReply:
        """LOOP. Agree on an update, or refuse it; the open one's own id and request give its reply again.

        Raises:
            UpdateRefused: everything that can be known before a byte moves.
        """
        update = self.open
        if update is not None:
            if request.update_id == update.update_id and request == update.request:
                update.touch()
                return update.reply
            raise update.in_the_way()
        if self._history.committed(request.update_id) is not None:
            raise self._history.not_open(request.update_id)
        opener = self._opener if request.adapter is None else self.adapters
        self.open = opener.open(request, manifest, paused=paused)
        self._history.begins_again(self.open.update_id)
        return self.open.reply

    # Bytes arrive

    def receiver(self, request: Request, chunks: Chunks | None = None) -> Receive:
        """LOOP. What brings the bytes in; `run` it on the worker, then hand it to `received`.

        Raises:
            UpdateRefused: UNKNOWN_UPDATE, WRONG_STATE, INVALID_UPDATE, MANIFEST_UNKNOWN, MANIFEST_MISMATCH.
        """
        update = self._require(request.update_id)
        update.check_admits(request)
        update.touch()
        if update.state is UpdateState.RECEIVED and request in update.finished:
            return Receive(update, request, lambda: skip(chunks))  # a repeated call, its bytes are here
        work = self._receivers.work(update, request, chunks)
        if isinstance(request, FromIpc) and request.checksums:
            update.take_checksums(request.checksums)
        previous = self._live.previous
        if previous is not None and previous.staging is update.staging and update.adapter is None:
            self._live.previous = None  # its bytes are about to be overwritten
        if update.writes_live and not update.in_adopted and not update.request.skip_checksums:
            work = after(update, self._live.know, work)  # while the slots still hold the old weights
        update.num_receiving += 1
        if update.state is UpdateState.BEGUN:
            update.state = UpdateState.RECEIVING
        knows = update.request.skip_checksums or self._live.is_known  # `run_all` verifies, too
        pace = self._receivers.pace(update, request) if knows else Pace.LONG
        look = self._receivers.look(update, request)
        return Receive(update, request, work, look, counted=True, pace=pace)

    def received(self, receive: Receive, error: Exception | None) -> UpdateReply:
        """LOOP. The worker is done with `receive`.

        Raises:
            UpdateError: what ended the update; `error`, or what came before it.
        """
        self.arrived(receive, error)
        return replies.report(receive.update, self.version, self.commit_sequence)

    def arrived(self, receive: Receive, error: Exception | None) -> None:
        """LOOP. `received` without a report, for an update that commits in the same call."""
        update = receive.update
        update.num_receiving -= receive.counted
        self.check_open(update)
        if error is not None:
            raise self._end(error)
        if not update.sink.num_waiting()[0]:
            update.state = UpdateState.RECEIVED
        if receive.request not in update.finished:
            update.finished.append(receive.request)

    def check_open(self, update: OpenUpdate) -> None:
        """LOOP. Raise what ended `update`, if anything has; another may have begun under its id since."""
        if update is not self.open:
            raise self._history.end_of(update.update_id)
        update.touch()

    # Nothing has been written; everything that can refuse

    def verify(self, update_id: str) -> None:
        """WORKER. Completeness, checksums, tied names, non-finite values. Raises UpdateError: hand it to
        `refuse`, or (INCOMPLETE) let the sender go on.
        """
        update = self._require(update_id)
        if update.verified:
            return
        if update.receiving:
            raise UpdateRefused(Reason.WRONG_STATE, f"update {update_id} is still receiving")
        self._verify(update)

    def run_all(self, receive: Receive) -> None:
        """WORKER; LOOP at some paces. `receive.run`, and `verify` if no other works; raises for `arrived`."""
        receive.run()
        if receive.update.num_receiving == receive.counted:
            self._verify(receive.update)

    def _verify(self, update: OpenUpdate) -> None:
        with self._receivers.reading(update), update.verification():
            self._require(update.update_id)  # else what it was lent may be unmapped already
            check_received(update)
            if update.adapter is not None:
                self.adapters.expect(update)
                return
            if not update.request.skip_checksums and not update.writes_live:
                self._live.know()
            expect(update, self._target, self._live.known)

    def verified(self, update_id: str) -> bool:
        """LOOP. Whether `verify` found nothing that refuses the update."""
        update = self._require(update_id)
        update.touch()
        return update.verified

    def prepared(self, update_id: str, deadline_s: float) -> UpdateReply:
        """LOOP. Vote yes, after `verify`; nothing refuses the update from here on but its lease.

        Args:
            deadline_s: seconds from now, the coordinator's deadline and now the lease; 0 keeps the lease.
        """
        update = self._require(update_id)
        if not update.verified:
            raise UpdateRefused(Reason.WRONG_STATE, f"update {update_id} has not been verified")
        update.state = UpdateState.PREPARED
        update.lease_s = deadline_s or update.lease_s
        update.touch()
        return replies.report(update, self.version, self.commit_sequence)

    # The end

    def commit(self, update_id: str) -> UpdateReply:
        """LOOP, while no forward pass runs. Make the update live.

        Raises:
            UpdateRefused: nothing was written, or it was undone; the old version serves on.
            WeightsTorn: nothing may be generated until a full update commits.
        """
        update = self._require(update_id)
        try:
            self.verify(update_id)
        except UpdateError as error:
            if error.reason in (Reason.INCOMPLETE, Reason.WRONG_STATE):
                raise  # the sender may go on
            raise self._end(error) from error
        try:
            if update.adoption is not None and not update.adoption.owner_alive():
                raise UpdateRefused(Reason.PEER_LOST, "the trainer that owns the arena to adopt is gone")
            reply = (self._live if update.adapter is None else self.adapters).commit(update)
        except UpdateError as error:
            raise self._end(error) from error
        self.open = None
        self.adapters.base_changed()
        self._unpin()
        self._history.add_committed(update_id, reply)
        return reply

    def refuse(self, update_id: str, error: UpdateError) -> None:
        """LOOP. End an open update because of `error`: refused, or torn if something was written."""
        self._require(update_id)
        self._end(error)

    def abort(self, update_id: str) -> tuple[bool, bool]:
        """LOOP. End an open update. Returns (it was found, the weights are torn by that)."""
        if self.open is None or self.open.update_id != update_id:
            return False, False
        ended = self._end(UpdateRefused(Reason.UNKNOWN_UPDATE, f"update {update_id} was aborted"))
        return True, isinstance(ended, WeightsTorn)

    def check_rollback(self, meant: int | None = None) -> None:
        """LOOP. Raise UpdateRefused (UPDATE_IN_PROGRESS, NO_PREVIOUS, WRONG_STATE) if `rollback` would, or
        would leave another commit than the one `meant` (a commit sequence)."""
        if self.open is not None:
            raise self.open.in_the_way()
        self._live.check_rollback(meant)

    def rollback(self) -> UpdateReply:
        """LOOP, while no forward pass runs. Bring back the version that `keep_previous` kept.

        Raises:
            UpdateRefused: what `check_rollback` raises. WeightsTorn: a fault.
        """
        self.check_rollback()
        try:
            reply = self._live.rollback()
        except WeightsTorn as error:
            self._live.tear(error.message)
            raise
        self.adapters.base_changed()
        return reply

    def tick(self, now: float) -> None:
        """LOOP. End an update whose lease ran out; notice the death of an adopted arena's owner.

        Args:
            now: time.monotonic().
        """
        if self._live.has_lost_owner(now):
            reason = "the trainer that owns the adopted arena is gone"
            if self.open is not None and self.open.needs_live:
                self._end(UpdateRefused(Reason.PEER_LOST, reason))
            self._live.tear(reason)
        self._receivers.tick(now)
        update = self.open
        if update is None or update.receiving or update.verifying or now < update.deadline:
            return
        text = f"the lease of update {update.update_id} ran out: no call came for {update.lease_s:g} s"
        self._end(UpdateRefused(Reason.TIMEOUT, text))

    def renew(self, update_id: str, lease_s: float) -> float:
        """LOOP. Push the lease out; returns seconds from now. lease_s 0: the update's own."""
        update = self._require(update_id)
        if lease_s < 0:
            raise UpdateRefused(Reason.INVALID_UPDATE, f"lease_s is {lease_s}; a lease cannot be negative")
        update.touch(lease_s)
        return lease_s or update.lease_s

    # Beside updates

    def replay(self, update_id: str) -> UpdateReply | None:
        """LOOP. The reply of an update that has committed, for a caller that did not get it."""
        return self._history.committed(update_id)

    def release(self, allocation_ids: Sequence[str]) -> int:
        """LOOP. Unmap a trainer's memory; returns how many mappings went, unknown ids are ignored. Raises
        UpdateRefused (WRONG_STATE): one is in use by the open update, or adopted.
        """
        return self._receivers.release(allocation_ids)

    def checksums(self, names: Sequence[str]) -> dict[str, int]:
        """LOOP. Name -> checksum of what lies in the slot now; no names: all slots, without aliases."""
        return self._live.checksums(names)

    def discard(self) -> None:
        """LOOP. The weights' memory was released: only a full update makes the engine answer again."""
        if self.open is not None:
            self._end(UpdateRefused(Reason.ASLEEP, "the weights' memory was released meanwhile"))
        self._live.tear("weights were released")

    def close(self) -> None:
        """LOOP. End what is open and give back mappings and groups."""
        if self.open is not None:
            self._end(UpdateRefused(Reason.UNKNOWN_UPDATE, "the engine shuts down"))
        self._receivers.close()

    # Inside

    def _require(self, update_id: str) -> OpenUpdate:
        if self.open is not None and self.open.update_id == update_id:
            return self.open
        raise self._history.not_open(update_id)

    def _end(self, error: Exception) -> UpdateError:
        """Close the open update as refused, or as torn if something was written; returns which."""
        update = self.open
        assert update is not None, "only an open update can end"
        reason = error.reason if isinstance(error, UpdateError) else Reason.INTERNAL
        text = error.message if isinstance(error, UpdateError) else f"{error} ({type(error).__name__})"
        ended: UpdateError = UpdateRefused(reason, text)
        # Late writers of a receive that still runs are turned away, and the running ones waited for.
        update.sink.end(ended)
        if isinstance(error, WeightsTorn) or update.written:
            ended = WeightsTorn(reason, text)
            self._live.tear(f"update {update.update_id}: {text}")
        self.open = None
        self._unpin()
        self._history.add_ended(update.update_id, ended)
        self.on_ended(update, ended)
        return ended

    def _unpin(self) -> None:
        """Trainers' memory that no open update and no slot uses may be unmapped again."""
        adopted = self._live.adopted
        self._receivers.mappings.unpin("" if adopted is None else adopted.allocation_id)
