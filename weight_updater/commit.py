"""The commit: write, finalise, compare what is live, recapture; and undo where a fault allows it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weight_updater.arena import WeightTarget
from weight_updater.errors import Reason, UpdateError, UpdateRefused, WeightsTorn
from weight_updater.graphs import GraphHooks
from weight_updater.requests import Recapture
from weight_updater.slot_scan import slot_checksums
from weight_updater.staging import Write, synchronise


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
) -> Done:
    """Put new weights into place and prove that they lie there. No forward pass runs meanwhile.

    Args:
        expected: slot -> checksum that it must have afterwards; empty compares nothing.
        before: slot -> checksum of what is live now, to prove an undo; may be empty.

    Raises:
        UpdateRefused: a fault that was undone; the old weights are live.
        WeightsTorn: a fault that could not be undone.
    """
    done = Done()
    try:
        synchronise(target.device)  # passes that were started under the old weights end under them
        moved = _write(target, write, graphs, done)
        _compare(target, expected, done)
        _settle_graphs(graphs, moved, recapture, done)
    except Exception as error:
        reason = error.reason if isinstance(error, UpdateError) else Reason.WRITE_FAILED
        text = f"a fault while new weights were written: {error!s} ({type(error).__name__})"
        if _undone(target, write, before):
            raise UpdateRefused(reason, f"{text}; it was undone, the old weights are live") from error
        raise WeightsTorn(reason, f"{text}; send a full update to make the weights whole again") from error
    return done


def _write(target: WeightTarget, write: Write, graphs: GraphHooks, done: Done) -> list[str]:
    """Write, and recompute derived state; a GPU has that queued before the write has ended. Returns the
    captured storage that moved, which is known once everything is queued: a GPU copies meanwhile.
    """
    start = time.perf_counter()
    write.run()
    if target.device.type == "cuda":
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record(torch.cuda.current_stream(target.device))
        target.finalise()
        moved = graphs.moved()
        written.synchronize()
        end = time.perf_counter()
    else:
        end = time.perf_counter()
        target.finalise()
        moved = graphs.moved()
    done.write_s = end - start
    synchronise(target.device)
    done.finalise_s = time.perf_counter() - end
    return moved


def _compare(target: WeightTarget, expected: Mapping[str, int], done: Done) -> None:
    """Compare what lies in the slots with `expected`."""
    start = time.perf_counter()
    live = slot_checksums(target, list(expected))
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


def _undone(target: WeightTarget, write: Write, before: Mapping[str, int]) -> bool:
    """Whether the old weights, and all that is derived from them, are back."""
    try:
        synchronise(target.device)  # a trainer may free what it lent once it hears of the fault
        if not write.undo():
            return False
        target.finalise()
        synchronise(target.device)
        _compare(target, before, Done())
    except Exception:  # noqa: BLE001  whatever it was, the weights are not known to be whole
        return False
    return True
