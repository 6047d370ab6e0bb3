"""UpdateRecords: how each update ended and what it took, gathered on the loop for the front to tell."""

from __future__ import annotations

import time
from collections.abc import Callable

from rollout_engine.records import UpdateRecord
from weight_updater.errors import UpdateError, WeightsTorn
from weight_updater.open_update import OpenUpdate
from weight_updater.requests import BeginReply, BeginUpdate, StageSeconds, UpdateReply, UpdateState
from weight_updater.updater import WeightUpdater


class UpdateRecords:
    """Called by the loop only. An update is recorded once: as it commits, is rolled back, or ends otherwise.

    Args:
        updater: whose updates they are; its `on_ended` is taken.
        clock: seconds, for durations.
    """

    def __init__(self, updater: WeightUpdater, clock: Callable[[], float] = time.monotonic) -> None:
        self._updater = updater
        updater.on_ended = self._ended
        self._clock = clock
        self._opened = ("", 0.0, 0.0)  # id of the last update begun, when that was, seconds that it took
        self._ready: list[UpdateRecord] = []

    def now(self) -> float:
        return self._clock()

    def take(self) -> list[UpdateRecord]:
        """Everything recorded since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def opened(self, reply: BeginReply, began_at: float) -> None:
        """An update was agreed; a repeated call changes nothing."""
        if reply.update_id != self._opened[0]:
            self._opened = (reply.update_id, began_at, self._clock() - began_at)

    def refused_at_begin(self, request: BeginUpdate, error: UpdateError, began_at: float) -> None:
        """An update was refused before it was agreed."""
        took = self._clock() - began_at
        self._ready.append(
            UpdateRecord(
                update_id=request.update_id,
                path=str(request.path),
                staging=str(request.staging),
                end="refused",
                version=self._updater.version,
                previous_version=self._updater.version,
                commit_sequence=self._updater.commit_sequence,
                ended_at=time.time(),
                seconds={"whole": took, "begin": took},
                reason=str(error.reason),
                message=error.message,
                adapter=_adapter(request),
            )
        )

    def completed(self, reply: UpdateReply, commit_began_at: float) -> None:
        """An update committed, or was rolled back. reply: with what only the engine knows filled in."""
        committed = reply.state is UpdateState.COMMITTED
        seconds = _nonzero(reply.seconds) | {"commit": self._clock() - commit_began_at}
        if committed:
            seconds = self._since_begin(reply.update_id) | seconds
        self._ready.append(
            UpdateRecord(
                update_id=reply.update_id,
                path=str(reply.path),
                staging=str(reply.staging),
                end="committed" if committed else "rolled_back",
                version=reply.version,
                previous_version=reply.previous_version,
                commit_sequence=reply.commit_sequence,
                ended_at=time.time(),
                seconds=seconds,
                next_version=reply.version,
                adapter=reply.adapter,
                adapter_version=reply.adapter_version,
                num_tensors=reply.num_tensors,
                num_changed=reply.num_changed,
                num_bytes=reply.num_bytes,
                num_aborted=reply.num_aborted,
                num_recomputed=reply.num_recomputed,
                num_kept=reply.num_kept,
                graphs_recaptured=reply.graphs_recaptured,
            )
        )

    def _ended(self, update: OpenUpdate, error: UpdateError) -> None:
        """An update that was open was refused or torn, by whatever ended it."""
        spent = StageSeconds(transfer=update.transfer.seconds, verify=update.verify_s)
        self._ready.append(
            UpdateRecord(
                update_id=update.update_id,
                path=str(update.path),
                staging=str(update.staging),
                end="torn" if isinstance(error, WeightsTorn) else "refused",
                version=self._updater.version,
                previous_version=self._updater.version,
                commit_sequence=self._updater.commit_sequence,
                ended_at=time.time(),
                seconds=self._since_begin(update.update_id) | _nonzero(spent),
                reason=str(error.reason),
                message=error.message,
                next_version=update.next_version if update.adapter is None else 0,
                num_bytes=update.sink.received_bytes,
                adapter=_adapter(update.request),
            )
        )

    def _since_begin(self, update_id: str) -> dict[str, float]:
        known, began_at, took = self._opened
        # An update whose lease ran out inside its own begin was never told to be open.
        return {"whole": self._clock() - began_at, "begin": took} if known == update_id else {}


def _adapter(request: BeginUpdate) -> str:
    return "" if request.adapter is None else request.adapter.name


def _nonzero(seconds: StageSeconds) -> dict[str, float]:
    """The stages that happened."""
    names = StageSeconds.__dataclass_fields__
    return {name: value for name in names if (value := getattr(seconds, name))}
