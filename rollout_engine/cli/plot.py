"""`rollsync plot`: a picture of what an engine did, from the log that `serve --metrics-log` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout_engine.cli.output import EXIT_FAILED, EXIT_USAGE, JsonOption, fail, print_json

SAMPLE_NUMBERS = (
    "time",
    "generated_tokens",
    "prompt_tokens",
    "cached_prompt_tokens",
    "running",
    "waiting",
    "pages",
    "free_pages",
    "cached_pages",
    "weight_version",
    "finished_sequences",
    "staleness_sum",
)
UPDATE_NUMBERS = ("time", "version")
"""What the picture reads of each."""


@dataclass(slots=True)
class Log:
    """A metrics log, oldest first. num_broken: lines that are none of ours, for example one cut off."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    num_broken: int = 0

    @property
    def seconds(self) -> float:
        return float(self.samples[-1]["time"] - self.samples[0]["time"]) if self.samples else 0.0


def plot(
    log: Annotated[Path, typer.Argument(help="File of `rollsync serve --metrics-log`.")],
    out: Annotated[Path | None, typer.Option("--out", help="PNG to write; LOG.png without it.")] = None,
    last: Annotated[float | None, typer.Option(min=0, help="Only the last so many seconds.")] = None,
    title: Annotated[str | None, typer.Option(help="Above the picture.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw tokens per second, weight versions, updates by path, queue and pages over time."""
    try:
        read = read_log(log)
    except OSError as error:
        text = f"cannot read {log}: {error.strerror}"
        fail(text, as_json=as_json, exit_code=EXIT_USAGE, reason="USAGE")
    if last is not None and read.samples:
        read = since(read, read.samples[-1]["time"] - last)
    if len(read.samples) < 2:
        text = f"{log} holds {len(read.samples)} samples; it takes two to draw a line. Is it a metrics log?"
        fail(text, as_json=as_json, exit_code=EXIT_FAILED, reason="NO_SAMPLES")
    target = out or log.with_name(f"{log.name}.png")
    try:
        from rollout_engine.cli.plot_figure import draw
    except ImportError:
        text = "plots need the package matplotlib; pip install 'rollsync[plot]'"
        fail(text, as_json=as_json, exit_code=EXIT_FAILED, reason="NO_MATPLOTLIB")
    try:
        draw(read, target, title)
    except OSError as error:
        text = f"cannot write {target}: {error.strerror}"
        fail(text, as_json=as_json, exit_code=EXIT_USAGE, reason="USAGE")
    if as_json:
        print_json({"out": str(target), **_counts(read)})
    else:
        skipped = f", {read.num_broken} broken lines left out" if read.num_broken else ""
        print(f"{target}: {len(read.samples)} samples, {len(read.updates)} updates{skipped}")


def _counts(read: Log) -> dict[str, Any]:
    return {
        "samples": len(read.samples),
        "updates": len(read.updates),
        "broken_lines": read.num_broken,
        "seconds": round(read.seconds, 3),
    }


def read_log(path: Path) -> Log:
    """The log and the part of it that was moved to PATH.1 before.

    Raises:
        OSError: the file cannot be read.
    """
    log = Log()
    before = Path(f"{path}.1")
    for line in [*(_lines(before) if before.exists() else ()), *_lines(path)]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if _is_whole(entry, "sample", SAMPLE_NUMBERS) and isinstance(entry.get("status"), str):
            log.samples.append(entry)
        elif _is_whole(entry, "update", UPDATE_NUMBERS) and _tells_its_end(entry):
            log.updates.append(entry)
        else:
            log.num_broken += 1
    log.samples.sort(key=lambda entry: float(entry["time"]))
    log.updates.sort(key=lambda entry: float(entry["time"]))
    return log


def _is_whole(entry: Any, event: str, numbers: Sequence[str]) -> bool:
    """Whether a line is of that kind and has all the numbers that the picture needs."""
    return (
        isinstance(entry, dict)
        and entry.get("event") == event
        and all(_is_number(entry.get(name)) for name in numbers)
    )


def _is_number(value: Any) -> bool:
    """One that a picture can show: none is larger than what the engine's counters hold."""
    return isinstance(value, int | float) and 0 <= value < 1 << 64


def _tells_its_end(entry: dict[str, Any]) -> bool:
    seconds = entry.get("seconds")
    words = (entry.get("end"), entry.get("path"))
    return (
        all(isinstance(word, str) for word in words)
        and isinstance(seconds, dict)
        and all(_is_number(value) for value in seconds.values())
    )


def _lines(path: Path) -> Iterator[str]:
    with path.open(errors="replace") as file:
        yield from file


def since(log: Log, start: float) -> Log:
    """What came at or after a time (Unix seconds)."""
    return Log(
        [entry for entry in log.samples if entry["time"] >= start],
        [entry for entry in log.updates if entry["time"] >= start],
        log.num_broken,
    )
