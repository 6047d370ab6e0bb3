"""What is live: the weight version, its proof, what came before it, and the one place that changes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weight_updater import replies
from weight_updater.arena import WeightTarget
from weight_updater.checksum import checksums as checksums_of
from weight_updater.checksum import fold
from weight_updater.commit import make_live
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.graphs import GraphHooks
from weight_updater.mappings import MappedRegion
from weight_updater.open_update import OpenUpdate
from weight_updater.requests import Path, Recapture, Staging, UpdateReply
from weight_updater.slot_scan import slot_checksums
from weight_updater.staging import Copy, CopyBorrowed, Exchange, InPlace, Rebind, StagingBuffers, Write

OWNER_CHECK_S = 0.2
"""How often the owner of an adopted arena is looked for."""


@dataclass(frozen=True, slots=True)
class Previous:
    """A version that waits in a staging buffer to be brought back.

    ranges: (offset, size) that were exchanged. checksums: slot -> checksum before, where known.
    """

    version: int
    staging: Staging
    ranges: tuple[tuple[int, int], ...]
    written: tuple[str, ...]
    checksums: dict[str, int]
    weights_path: str
    reply: UpdateReply


@dataclass(frozen=True, slots=True)
class _After:
    """What a commit leaves. known: as LiveWeights.known. live, received: the reply's checksums."""

    known: dict[str, int]
    live: int
    received: int


class LiveWeights:
    """The weights that answer now. LOOP, but for `know`.

    Attributes:
        version, commit_sequence, torn_reason, weights_path: as on WeightUpdater.
        highest: the largest version that ever committed.
        adopted: the trainer's memory that the slots point to, if they do.
        previous: what `rollback` would bring back.
    """

    def __init__(
        self, target: WeightTarget, buffers: StagingBuffers, graphs: GraphHooks, initial_version: int
    ) -> None:
        self.version = initial_version
        self.highest = initial_version
        self.commit_sequence = 0
        self.torn_reason = ""
        self.weights_path = ""
        self.adopted: MappedRegion | None = None
        self.previous: Previous | None = None
        self.known: dict[str, int] = {}  # slot -> checksum of what is live, as far as it is known
        self._summed: tuple[dict[str, int] | None, int] = None, 0  # see `_folded`
        self._owner_checked = 0.0
        self._target = target
        self._buffers = buffers
        self._graphs = graphs

    @property
    def is_known(self) -> bool:
        """Whether `know` has nothing to hash."""
        return bool(self.torn_reason) or len(self.known) == len(self._target.arena.slot_names)

    def know(self) -> None:
        """ANY THREAD. Complete `known`, while nothing writes to the slots."""
        if self.is_known:
            return
        missing = [name for name in self._target.arena.slot_names if name not in self.known]
        found = slot_checksums(self._target, missing)
        if not self.torn_reason:
            # What others found meanwhile stays: a worker that was overtaken knows less than its successor.
            self.known = found | self.known

    def commit(self, update: OpenUpdate) -> UpdateReply:
        """Make a verified update live.

        Raises:
            UpdateRefused: a fault that was undone. WeightsTorn: one that was not.
        """
        written = tuple(update.plan.written)
        full = update.plan.full  # then all that is known is about to be replaced
        before = self.known if full else {name: self.known[name] for name in written if name in self.known}
        try:
            write = self._write(update)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise UpdateRefused(Reason.NO_MEMORY, f"no room to prepare the write: {error}") from error
        recapture = update.request.recapture
        # What was received into the arena that is live already was hashed where it lies.
        expected = {} if update.in_adopted else update.expected
        after: _After | None = None

        def meanwhile() -> None:
            nonlocal after
            after = self._after(update)

        done = make_live(self._target, write, expected, before, self._graphs, recapture, meanwhile)
        assert after is not None, "what went well has come that far"
        was_whole, previous_version, previous_path = not self.torn_reason, self.version, self.weights_path
        self.known = after.known
        if full:
            self.torn_reason = ""
        self.adopted = update.adoption
        if update.path is Path.DISK:
            self.weights_path = update.directory
        self._publish(update.next_version)
        reply = replies.committed(
            update,
            done,
            version=self.version,
            previous_version=previous_version,
            commit_sequence=self.commit_sequence,
            received=after.received,
            live=after.live,
        )
        self.previous = None
        if update.request.keep_previous and was_whole:  # half a model is not worth going back to
            self.previous = Previous(
                previous_version, update.staging, update.plan.ranges, written, before, previous_path, reply
            )
        return reply

    def _after(self, update: OpenUpdate) -> _After:
        """What the commit of `update` leaves."""
        full, expected = update.plan.full, update.expected
        known = dict(expected) if full else self._replaced(update.plan.written, expected)
        return _After(known, self._folded(known), replies.received_checksum(update))

    def _replaced(self, written: Sequence[str], checksums: dict[str, int]) -> dict[str, int]:
        """`known` once the slots `written` hold something else, whose checksums may not be known."""
        gone = set(written)
        return {name: value for name, value in self.known.items() if name not in gone} | checksums

    def check_rollback(self, meant: int | None = None) -> Previous:
        """What `rollback` would bring back. meant: the commit sequence that it is to leave, where one is.

        Raises:
            UpdateRefused: NO_PREVIOUS, WRONG_STATE (torn, or another commit is live).
        """
        if self.torn_reason:
            raise UpdateRefused(
                Reason.WRONG_STATE,
                f"the weights are torn ({self.torn_reason}); only a full update makes them whole",
            )
        if meant not in (None, self.commit_sequence):
            raise UpdateRefused(
                Reason.WRONG_STATE,
                f"version {self.version} became live while the rollback waited; to undo it, too, ask again",
            )
        if self.previous is None:
            raise UpdateRefused(
                Reason.NO_PREVIOUS,
                "no previous version is kept: the last commit came without keep_previous, was rolled back "
                "already, or a newer update has used its staging buffer",
            )
        return self.previous

    def rollback(self) -> UpdateReply:
        """Bring the previous version back in one exchange.

        Raises:
            UpdateRefused: what `check_rollback` raises, or a fault that was undone. WeightsTorn.
        """
        previous = self.check_rollback()
        write = Exchange(
            self._target.buffer,
            self._buffers.get(previous.staging),
            previous.ranges,
            self._buffers.scratch(),
        )
        before = {name: self.known[name] for name in previous.written if name in self.known}
        done = make_live(self._target, write, previous.checksums, before, self._graphs, Recapture.AUTO)
        rolled_back_from = self.version
        self.known = self._replaced(previous.written, previous.checksums)
        self.previous = None
        self.weights_path = previous.weights_path
        self._publish(previous.version)
        return replies.rolled_back(
            previous.reply,
            done,
            version=self.version,
            previous_version=rolled_back_from,
            commit_sequence=self.commit_sequence,
            live=self.checksum() if previous.checksums else 0,
        )

    def has_lost_owner(self, now: float) -> bool:
        """Whether the trainer that owns an adopted arena died; asked now and then (now: time.monotonic)."""
        if self.adopted is None or self.torn_reason or now - self._owner_checked < OWNER_CHECK_S:
            return False
        self._owner_checked = now
        return not self.adopted.owner_alive()

    def tear(self, reason: str) -> None:
        """Nothing may be generated until a full update commits."""
        self.torn_reason = reason
        self.previous = None
        self.known = {}

    def checksums(self, names: Sequence[str]) -> dict[str, int]:
        """Name -> checksum of the bytes that lie there now, read anew; no names: every slot.

        Raises:
            UpdateRefused (INVALID_UPDATE): a name that is no slot.
        """
        arena = self._target.arena
        for name in names:
            if name not in arena.placements:
                raise UpdateRefused(Reason.INVALID_UPDATE, f"the model has no tensor {name!r}")
        if not names:
            return slot_checksums(self._target, arena.slot_names)
        return dict(zip(names, checksums_of([self._target.slot(name) for name in names]), strict=True))

    def _publish(self, version: int) -> None:
        """The one place in which the weight version changes."""
        self.version = version
        self.highest = max(self.highest, version)
        self.commit_sequence += 1

    def checksum(self) -> int:
        """One checksum over all slots, in the order of their names; 0 if one of them is not known."""
        return self._folded(self.known)

    def _folded(self, known: dict[str, int]) -> int:
        """Remembered for the last one asked for; `known` is replaced, not changed."""
        if self._summed[0] is not known:
            names = self._target.arena.names_in_order
            whole = len(known) == len(names)
            self._summed = known, fold([known[name] for name in names]) if whole else 0
        return self._summed[1]

    def _write(self, update: OpenUpdate) -> Write:
        """How the update's bytes come into place."""
        live, ranges = self._target.buffer, update.plan.ranges
        if update.adoption is not None:
            if update.adoption is self.adopted:
                return InPlace()
            arena = update.adoption.data[: self._target.arena.nbytes]
            return Rebind(self._target, arena, InPlace())
        destination = live if update.home is None else update.home
        write: Write = InPlace()
        if update.staging is not Staging.NONE:
            staged = self._buffers.get(update.staging)
            if update.request.keep_previous:
                return Exchange(live, staged, ranges, self._buffers.scratch())
            write = Copy(destination, staged, ranges)
        elif update.path is Path.IPC:
            write = CopyBorrowed(self._target, destination, update.sink)
        return write if update.home is None else Rebind(self._target, update.home, write)
