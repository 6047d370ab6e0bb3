"""What the updater asks of whoever captured CUDA graphs: they remember addresses, an update may move them."""

from __future__ import annotations

from typing import Protocol


class GraphHooks(Protocol):
    """Captured graphs as the updater sees them. Called by the engine's loop only."""

    def num_captured(self) -> int:
        """How many graphs there are."""
        ...

    def moved(self) -> list[str]:
        """Captured storage whose identity (address, shape, dtype) is no longer what was captured."""
        ...

    def check_recapture(self) -> None:
        """Raise UpdateRefused (NO_MEMORY) if graphs could not be captured again now. Called at begin."""
        ...

    def recapture(self) -> int:
        """Capture every graph again; returns how many."""
        ...

    def capture_owed(self) -> int:
        """Capture what an earlier recapture lost or put off; returns how many, 0: nothing is owed."""
        ...


class NoGraphs:
    """Nothing is captured: a CPU, or graphs are off."""

    def num_captured(self) -> int:
        return 0

    def moved(self) -> list[str]:
        return []

    def check_recapture(self) -> None:
        return None

    def recapture(self) -> int:
        return 0

    def capture_owed(self) -> int:
        return 0
