"""`python -m tests.benchmarks.gpu [ROWS]`: the goals on a GPU, each beside its floor.

ROWS are names with commas or spaces between them; none means all, `list` prints them. Lines are merged into
tests/benchmarks/results/h200.json (h200x2.json: lines that need two GPUs), by what they measure. Exits
with 1 if a row failed, with 2 if a row is not known; a goal that is not met is a NO in the table.

`--tiny --device cpu` runs what a CPU can over a tiny model, to test the benchmark itself; nothing is kept
then unless --out names a file.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from tests.benchmarks.gpu.bench import Bench, NotHereError, bench
from tests.benchmarks.gpu.goals import BY_NAME, GOALS
from tests.benchmarks.gpu.results import RESULTS, Line, merge, show
from tests.benchmarks.gpu.rows import ROWS, STOP_THE_ENGINE, chosen

TWO_GPUS = ("distributed",)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("rows", nargs="*", help="names, with commas or spaces between them")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and smaller batches")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="merge all lines into this file instead")
    options = parser.parse_args(arguments)
    names = [name for part in options.rows for name in part.split(",") if name]
    if names == ["list"]:
        print("\n".join(f"{goal.name:22}{goal.what}: {goal.goal}" for goal in GOALS))
        return 0
    try:
        names = chosen(names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device; --tiny --device cpu tries the benchmark itself", file=sys.stderr)
        return 2
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines, segments, files go with us
    try:
        return run(names, device, tiny=options.tiny, out=options.out)
    finally:
        signal.signal(signal.SIGTERM, before)


def run(names: list[str], device: torch.device, *, tiny: bool, out: Path | None) -> int:
    """Run rows, keep each line as soon as it is there, print the table."""
    lines: dict[str, Line] = {}
    others: dict[str, str] = {}
    failures = 0
    started = time.monotonic()
    with bench(device, tiny=tiny) as made:
        for name in names:
            print(f"measuring {name} ({time.monotonic() - started:.0f} s since the start)", flush=True)
            before = failures
            try:
                lines[name] = _measure(made, name, compare="start" in names)
                _keep(name, lines[name], device, tiny, out)
            except NotHereError as error:
                others[BY_NAME[name].what] = str(error)
            except Exception as error:  # noqa: BLE001 - the other rows still run
                failures += 1
                traceback.print_exc()
                others[BY_NAME[name].what] = f"FAILED: {type(error).__name__}: {str(error)[:200]}"
            failures += _ended(made, name, failed=failures > before, last=name == names[-1])
    ordered = [lines[goal.name] for goal in GOALS if goal.name in lines]
    seconds = time.monotonic() - started
    show(f"{_device_name(device)}, torch {torch.__version__}, {seconds:.0f} s", ordered, others)
    return 1 if failures else 0


def _ended(made: Bench, name: str, *, failed: bool, last: bool) -> int:
    """Tidy up after a row, after the last one also the engine; gives the number of failures."""
    try:
        if failed and made.engines.running is not None:
            log = made.engine.log.read_text().splitlines()
            print("\n".join(["the engine's log ends with:", *log[-30:]]), file=sys.stderr, flush=True)
        made.tidy(failed=failed)
        if last:
            made.engines.stop()
    except Exception:  # noqa: BLE001 - what was measured is still shown
        print(f"after {name}:", file=sys.stderr)
        traceback.print_exc()
        return 1
    return 0


def _measure(made: Bench, name: str, *, compare: bool) -> Line:
    if compare and name in STOP_THE_ENGINE:
        made.note_greedy()
    measured = ROWS[name](made)
    floor = "" if measured.floor is None else f", floor {measured.floor:.4g}"
    met = "met" if measured.met else "NOT met"
    value = f"{measured.value:.4g} {measured.unit}"
    print(f"  {value}{floor}; {measured.goal}: {met}; {measured.note}", flush=True)
    return measured


def _keep(name: str, measured: Line, device: torch.device, tiny: bool, out: Path | None) -> None:
    if out is not None:
        merge(out, [measured])
    elif device.type == "cuda" and not tiny:
        kind = "h200" if "H200" in _device_name(device) else _device_name(device).replace(" ", "-").lower()
        merge(RESULTS / f"{kind}{'x2' if name in TWO_GPUS else ''}.json", [measured])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())
