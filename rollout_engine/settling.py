"""Settler: brings the sequences in flight to where a commit may come."""

from __future__ import annotations

import time
from collections.abc import Callable

from rollout_engine.flows import Flow, Until
from rollout_engine.gate import Gate, Settled
from rollout_engine.scheduler import Scheduler
from rollout_engine.sequence import Sequence
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import Inflight


class Settler:
    """An update of the base weights concerns every sequence in flight, one of an adapter those that go
    through it; `adapter` is "" for the former.

    Args:
        finish: ends a live sequence with a finish reason and tells its caller.
    """

    def __init__(
        self, gate: Gate, scheduler: Scheduler, finish: Callable[[Sequence, str, str], None]
    ) -> None:
        self._gate = gate
        self._scheduler = scheduler
        self._finish = finish

    def settle(self, inflight: Inflight, adapter: str, has_ended: Callable[[], bool]) -> Flow:
        """Do with the sequences what `inflight` says, and count them.

        Args:
            has_ended: whether the update has ended meanwhile, which ends the wait; the caller looks.
        """
        settled, started = Settled(), self._scheduler.started_with(adapter)
        if inflight is Inflight.WAIT:
            began = time.monotonic()
            self._hold_back(adapter)
            try:
                yield Until(lambda: not self._scheduler.started_with(adapter) or has_ended())
            finally:
                self._let_in(adapter)
            settled.wait_seconds = time.monotonic() - began
        elif inflight is Inflight.ABORT:
            for sequence in started:
                self._finish(sequence, "abort", "")
                settled.num_aborted += 1
        elif inflight is Inflight.RECOMPUTE:
            settled.num_recomputed = len(started)
            self._scheduler.preempt_all(adapter)
        else:
            settled.num_kept = len(started)
        return settled

    def refuse_endless_wait(self, inflight: Inflight, adapter: str) -> None:
        """Raise UpdateRefused (PAUSED_WAIT) where sequences would be waited for that cannot finish."""
        started = self._scheduler.started_with(adapter)
        if inflight is Inflight.WAIT and self._gate.paused_by_user and started:
            raise UpdateRefused(
                Reason.PAUSED_WAIT,
                "inflight=wait would never end on a paused engine; continue generation, or use abort, keep "
                "or recompute",
            )

    def _hold_back(self, adapter: str) -> None:
        """Admit no sequence that has no token yet."""
        if adapter:
            self._gate.draining_adapters.append(adapter)
        else:
            self._gate.num_draining += 1

    def _let_in(self, adapter: str) -> None:
        if adapter:
            self._gate.draining_adapters.remove(adapter)
        else:
            self._gate.num_draining -= 1
