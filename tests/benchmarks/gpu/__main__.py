"""`python -m tests.benchmarks.gpu [ROWS]`: the goals on a GPU, each beside its floor.

ROWS are names with commas or spaces between them; none means all, `list` prints them. Lines are merged into
tests/benchmarks/results/h200.json (h200x2.json: lines that need two GPUs), by what they measure. Exits
with 1 if a row failed, with 2 if a row is not known; a goal that is not met is a NO in the table. A row that
takes too long is stopped and counts as failed; what does not fit in 450 s is left to another call.

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

from tests.benchmarks.gpu.bench import Bench, NotHereError, bench, roomy
from tests.benchmarks.gpu.goals import BY_NAME, GOALS
from tests.benchmarks.gpu.results import RESULTS, Line, merge, show
from tests.benchmarks.gpu.rows import ROWS, SECONDS, STOP_THE_ENGINE, chosen
from tests.benchmarks.gpu.supervise import Report, supervise

TWO_GPUS = ("distributed",)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("rows", nargs="*", help="names, with commas or spaces between them")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and smaller batches")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="merge all lines into this file instead")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)  # a worker's; see supervise.py
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
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
        if options.report is None:
            return _supervised(names, options)
        report = Report(options.report)
        return run(names, device, tiny=options.tiny, out=options.out, report=report, folder=options.folder)
    finally:
        signal.signal(signal.SIGTERM, before)


def _supervised(names: list[str], options: argparse.Namespace) -> int:
    """Measure in other processes; print the table."""
    started = time.monotonic()
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--device", options.device]
    command += ["--tiny"] if options.tiny else []
    command += ["--out", str(options.out)] if options.out is not None else []
    outcome = supervise(names, command, lambda row: SECONDS.get(row, 120.0), directory=roomy(options.tiny))
    ordered = [outcome.lines[goal.name] for goal in GOALS if goal.name in outcome.lines]
    others = {BY_NAME[name].what: why for name, why in outcome.others.items()}
    show(f"{outcome.title}, {time.monotonic() - started:.0f} s", ordered, others)
    return 1 if outcome.num_failures else 0


def run(
    names: list[str],
    device: torch.device,
    *,
    tiny: bool,
    out: Path | None,
    report: Report | None = None,
    folder: Path | None = None,
) -> int:
    """Run rows, keep and tell each line as soon as it is there; 1 if one failed."""
    report = report or Report(None)
    report.about(f"{_device_name(device)}, torch {torch.__version__}")
    num_failures = 0
    started = time.monotonic()
    with bench(device, tiny=tiny, directory=folder) as made:
        for name in names:
            print(f"measuring {name} ({time.monotonic() - started:.0f} s since the start)", flush=True)
            report.began(name)
            failed = True
            try:
                measured = _measure(made, name, compare="start" in names)
                _keep(name, measured, device, tiny, out)
                report.measured(name, measured)
                failed = False
            except NotHereError as error:
                print(f"  {error}", flush=True)
                report.not_here(name, str(error))
                failed = False
            except Exception as error:  # noqa: BLE001 - the other rows still run
                traceback.print_exc()
                report.failed(name, f"{type(error).__name__}: {str(error)[:200]}")
            except SystemExit:  # it took too long
                _show_log(made)
                raise
            if failed:
                _show_log(made)
            num_failures += failed
            if why := _tidied(made, failed=failed, last=name == names[-1]):
                num_failures += 1
                report.failed(name, f"what came after it: {why}")
    return 1 if num_failures else 0


def _show_log(made: Bench) -> None:
    if made.engines.running is not None:
        log = made.engines.running.log.read_text().splitlines()
        print("\n".join(["the engine's log ends with:", *log[-30:]]), file=sys.stderr, flush=True)


def _tidied(made: Bench, *, failed: bool, last: bool) -> str:
    """Tidy up after a row, after the last one also the engine; says what went wrong."""
    try:
        made.tidy(failed=failed)
        if last:
            made.engines.stop()
    except Exception as error:  # noqa: BLE001 - what was measured is still kept
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


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
