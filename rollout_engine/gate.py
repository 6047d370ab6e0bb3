"""What may run on the device, and what became of the sequences in flight when an update wanted it."""

from __future__ import annotations

import dataclasses
import time

from rollout_engine.flows import Flow, Until


@dataclasses.dataclass(slots=True)
class Gate:
    """What may run. The loop asks it before each forward pass; flows and pauses set it."""

    paused_by_user: bool = False
    parked_by_update: bool = False  # no forward pass may start
    in_flight: bool = False  # a forward pass was launched and its results are not taken in yet
    num_draining: int = 0  # somebody waits until sequences in flight have finished
    draining_adapters: list[str] = dataclasses.field(default_factory=list)  # .. those of these adapters
    rolling_back: bool = False  # a rollback has parked: no update may begin
    parked_at: float = 0.0

    @property
    def is_open(self) -> bool:
        return not (self.paused_by_user or self.parked_by_update)

    @property
    def paused_by(self) -> str:
        return "update" if self.parked_by_update else "user" if self.paused_by_user else ""

    def park(self) -> Flow:
        """Let no forward pass start, and wait until none is in flight: then the device is the update's."""
        if not self.parked_by_update:
            self.parked_by_update, self.parked_at = True, time.monotonic()
        yield Until(lambda: not self.in_flight)

    def unpark(self) -> float:
        """Let forward passes start again; returns for how many seconds none could."""
        if not self.parked_by_update:
            return 0.0
        self.parked_by_update = False
        return time.monotonic() - self.parked_at


@dataclasses.dataclass(slots=True)
class Settled:
    """What became of the sequences in flight at a commit."""

    num_aborted: int = 0
    num_recomputed: int = 0
    num_kept: int = 0
    wait_seconds: float = 0.0
