"""FullReplies: an update's reply with what only the engine knows, and the same reply when asked again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from rollout_engine.gate import Gate, Settled
from rollout_engine.update_records import UpdateRecords
from weight_updater.requests import StageSeconds, UpdateReply, UpdateState
from weight_updater.updater import WeightUpdater

MAX_REMEMBERED = 64
"""Committed updates whose reply is kept for callers that ask again; at least as many as WeightUpdater's."""


class FullReplies:
    """Called by the loop only.

    Args:
        gate: of which the pause is known.
        copy_bytes_per_second: of one plain copy on this device, measured at start (the floor).
        records: is told of each reply.
    """

    def __init__(
        self, updater: WeightUpdater, gate: Gate, records: UpdateRecords, copy_bytes_per_second: float
    ) -> None:
        self._updater = updater
        self._gate = gate
        self._records = records
        self._copy_bytes_per_second = copy_bytes_per_second
        self._completed: OrderedDict[str, UpdateReply] = OrderedDict()

    def complete(self, reply: UpdateReply, settled: Settled, began_at: float) -> UpdateReply:
        """End the pause, and fill in what only the engine knows. began_at: of the commit, by the records."""
        pause = self._gate.unpark()
        seconds: StageSeconds = dataclasses.replace(reply.seconds, pause=pause, wait=settled.wait_seconds)
        busy = seconds.transfer + (pause if reply.state is UpdateState.COMMITTED else 0.0)
        complete = dataclasses.replace(
            reply,
            seconds=seconds,
            gb_per_s=reply.num_bytes / busy / 1e9 if busy > 0 else 0.0,
            floor_seconds=reply.num_bytes / self._copy_bytes_per_second,
            num_aborted=settled.num_aborted,
            num_recomputed=settled.num_recomputed,
            num_kept=settled.num_kept,
        )
        if reply.state is UpdateState.COMMITTED:
            self._completed[reply.update_id] = complete
        self._records.completed(complete, began_at)
        if len(self._completed) > MAX_REMEMBERED:
            self._completed.popitem(last=False)
        return complete

    def again(self, update_id: str) -> UpdateReply | None:
        """The reply of an update that has committed, as its caller got it (or should have)."""
        if self._updater.replay(update_id) is None:
            return None
        return self._completed[update_id]
