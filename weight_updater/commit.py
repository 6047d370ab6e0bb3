"""The commit: write, finalise, compare what is live, recapture; and undo where a fault allows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from weight_updater.arena import WeightTarget
from weight_updater.errors import Reason, UpdateError, UpdateRefused, WeightsTorn
from weight_updater.graphs import GraphHooks
from weight_updater.requests import Recapture
from weight_updater.slot_scan import start_checksums
from weight_updater.staging import Write, synchronise

Checksums = Callable[[], dict[str, int]]
"""Waits for the checksums of slots, by name."""


@dataclass(slots=True)
class Done:
    """What a commit took and what became of the graphs."""

    write_s: float = 0.0
    finalise_s: float = 0.0
    compare_s: float = 0.0
    recapture_s: float = 0.0
    graphs_kept: int = 0
    graphs_recaptured: int = 0
    graphs_reason: str = ""

    @property
    def seconds(self) -> float:
        return self.write_s + self.finalise_s + self.compare_s + self.recapture_s


def make_live(
    target: WeightTarget,
    write: Write,
    expected: Mapping[str, int],
    before: Mapping[str, int],
    graphs: GraphHooks,
    recapture: Recapture,
    meanwhile: Callable[[], None] = lambda: None,
) -> Done:
    """Put new weights into place and prove that they lie there. No forward pass runs meanwhile.

    Args:
        expected: slot -> checksum that it must have afterwards; empty compares nothing.
        before: slot -> checksum of what is live now, to prove an undo; may be empty.
        meanwhile: what else is to be worked out before the reply; a GPU copies while it is.

    Raises:
        UpdateRefused: a fault that was undone; the old weights are live.
        WeightsTorn: a fault that could not be undone.
    """
    done = Done()
    try:
        synchronise(target.device)  # passes that were started under the old weights end under them
        moved, checksums = _write(target, write, graphs, expected, meanwhile, done)
        _compare(checksums, expected, done)
        _settle_graphs(graphs, moved, recapture, done)
    except Exception as error:
        reason = error.reason if isinstance(error, UpdateError) else Reason.WRITE_FAILED
        text = f"a fault while new weights were written: {error!s} ({type(error).__name__})"
        if _undone(target, write, before):
            _make_up_for(graphs, Done())
            raise UpdateRefused(reason, f"{text}; it was undone, the old weights are live") from error
        raise WeightsTorn(reason, f"{text}; send a full update to make the weights whole again") from error
    return done


def _write(
    target: WeightTarget,
    write: Write,
    graphs: GraphHooks,
    expected: Mapping[str, int],
    meanwhile: Callable[[], None],
    done: Done,
) -> tuple[list[str], Checksums]:
    """Write, and recompute derived state; a GPU has all that, and the reading of what then lies in the slots
    of `expected`, queued before the write has ended.

    Returns:
        The captured storage that moved, which is found out while a GPU copies; and what waits for the slots'
        checksums.
    """
    start = time.perf_counter()
    write.run()
    if target.device.type != "cuda":
        end = time.perf_counter()
        target.finalise()
        moved = graphs.moved()
        meanwhile()
        synchronise(target.device)
        done.write_s, done.finalise_s = end - start, time.perf_counter() - end
        return moved, start_checksums(target, list(expected))
    written = _queued(target)
    target.finalise()
    finalised = _queued(target)
    checksums = start_checksums(target, list(expected))
    moved = graphs.moved()
    meanwhile()
    written.synchronize()
    end = time.perf_counter()
    finalised.synchronize()
    done.write_s, done.finalise_s = end - start, time.perf_counter() - end
    return moved, checksums


def _queued(target: WeightTarget) -> torch.cuda.Event:
    """Behind what the current stream holds so far."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(target.device))
    return event


def _compare(checksums: Checksums, expected: Mapping[str, int], done: Done) -> None:
    """Compare what lies in the slots with `expected`."""
    start = time.perf_counter()
    live = checksums()
    wrong = [name for name, value in expected.items() if live[name] != value] if live != expected else []
    done.compare_s = time.perf_counter() - start
    if wrong:
        more = f" (and {len(wrong) - 1} more slots)" if len(wrong) > 1 else ""
        raise WeightsTorn(
            Reason.CHECKSUM_MISMATCH,
            f"{wrong[0]} holds bytes with checksum {live[wrong[0]]:016x} after the write, "
            f"{expected[wrong[0]]:016x} was to come{more}; the copy failed, or a trainer that lent its "
            f"memory wrote there during the call",
        )


def _settle_graphs(graphs: GraphHooks, moved: list[str], recapture: Recapture, done: Done) -> None:
    num_captured = graphs.num_captured()
    if not num_captured:
        done.graphs_reason = "no graphs are captured"
        if recapture is not Recapture.NEVER:
            _make_up_for(graphs, done)
        return
    if not moved and recapture is not Recapture.ALWAYS:
        done.graphs_kept, done.graphs_reason = num_captured, "no captured address moved"
        return
    start = time.perf_counter()
    done.graphs_recaptured = graphs.recapture()
    done.recapture_s = time.perf_counter() - start
    if moved:
        done.graphs_reason = f"{len(moved)} captured addresses moved (first: {moved[0]})"
    else:
        done.graphs_reason = "recapture=always"


def _make_up_for(graphs: GraphHooks, done: Done) -> None:
    """Capture graphs that an earlier recapture lost. Without them passes run all the same, only slower, so a
    fault here is none of the weights'; they stay owed.
    """
    start = time.perf_counter()
    try:
        done.graphs_recaptured = graphs.capture_owed()
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        done.graphs_reason = f"graphs were lost before, and are not captured now either: {error}"
        return
    if done.graphs_recaptured:
        done.graphs_reason = "they had been lost or put off"
        done.recapture_s = time.perf_counter() - start


def _undone(target: WeightTarget, write: Write, before: Mapping[str, int]) -> bool:
    """Whether the old weights, and all that is derived from them, are back."""
    try:
        synchronise(target.device)  # a trainer may free what it lent once it hears of the fault
        if not write.undo():
            return False
        target.finalise()
        synchronise(target.device)
        _compare(start_checksums(target, list(before)), before, Done())
    except Exception:  # noqa: BLE001  whatever it was, the weights are not known to be whole
        return False
    return True
