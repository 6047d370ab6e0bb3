"""What lies in an engine's adapter slots: read there, by a signal handler, since no call answers with it."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.adapted import Lies
from weight_updater.adapter_bank import AdapterPart
from weight_updater.adapter_updates import AdapterUpdates
from weight_updater.adapters import BASE_SLOT
from weight_updater.checksum import checksum


@dataclass(frozen=True)
class Held:
    """An adapter as the engine's book and its slot have it."""

    version: int
    slot: int
    rank: int
    lies: Lies


def tell_on_signal(folder: Path) -> None:
    """ENGINE. From now on SIGUSR2 puts what the slots hold into a file of `folder`."""
    made: list[AdapterUpdates] = []
    init = AdapterUpdates.__init__

    def remember(self: AdapterUpdates, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    def tell(*_: object) -> None:
        written = folder / f"bank-{os.getpid()}.new"
        written.write_text(json.dumps(_slots(made[-1])))
        written.replace(written.with_suffix(""))

    AdapterUpdates.__init__ = remember  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR2, tell)


def _slots(updates: AdapterUpdates) -> dict[str, Any]:
    """Checksums of all rows of A and B, and the scaling as device and host have it."""
    bank, book = updates._bank, updates.book
    assert bank is not None, "the engine was started for no adapters"
    parts = list(bank.parts.values())
    zeros = [tensor[BASE_SLOT] for part in parts for tensor in (part.a, part.b, part.scaling)]
    return {
        "base": any(bool(tensor.any()) for tensor in zeros),
        "held": {
            held.name: {
                "version": held.version,
                "slot": held.slot,
                "rank": held.rank,
                "lies": {part.name: _lies(part, held.slot) for part in parts},
            }
            for held in book.held.values()
        },
    }


def _lies(part: AdapterPart, slot: int) -> list[float]:
    scalings = float(part.scaling[slot]), part.scales[slot]
    return [checksum(part.a[slot]), checksum(part.b[slot]), *(round(scaling, 5) for scaling in scalings)]


def look_into(pid: int, folder: Path) -> dict[str, Held]:
    """HARNESS. What an engine holds, by name, once its slots were found in order.

    Raises:
        AssertionError: two adapters share a slot, the base model's has something in it, or device and host
            do not have the same scaling.
    """
    path = folder / f"bank-{pid}"
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, "the engine does not say what its slots hold"
        time.sleep(0.002)
    told = json.loads(path.read_text())
    path.unlink()
    assert not told["base"], "something lies in the slot that stands for the base model"
    slots = [held["slot"] for held in told["held"].values()]
    assert len({BASE_SLOT, *slots}) == len(slots) + 1, f"adapters share a slot: {told['held']}"
    found = {}
    for name, held in told["held"].items():
        apart = [layer for layer, (_, _, device, host) in held["lies"].items() if device != host]
        assert not apart, f"{apart} of {name} have two scalings: {held}"
        lies = {layer: (a, b, scaling) for layer, (a, b, scaling, _) in held["lies"].items()}
        found[name] = Held(held["version"], held["slot"], held["rank"], lies)
    return found
