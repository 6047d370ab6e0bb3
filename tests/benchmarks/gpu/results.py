"""Measured lines: a table for people, and JSON that later runs merge into, by `what`."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.gpu.goals import Goal

RESULTS = Path(__file__).parent.parent / "results"


@dataclass(frozen=True)
class Line:
    """One measured line of the table. floor and ratio (value over floor) are None where there is none."""

    name: str
    what: str
    value: float
    unit: str
    floor: float | None
    floor_is: str
    ratio: float | None
    goal: str
    met: bool
    note: str = ""


def line(
    goal: Goal,
    value: float,
    floor: float | None,
    *,
    limit: float | None = None,
    also: bool = True,
    note: str = "",
) -> Line:
    """Judge a value.

    Args:
        limit: instead of the goal's.
        also: a second condition that the goal names.
    """
    if not math.isfinite(value):
        raise ValueError(f"{goal.name} measured {value}")
    bound = goal.limit if limit is None else limit
    met = also and (value <= bound if goal.at_most else value >= bound)
    ratio = value / floor if floor else None
    return Line(
        goal.name, goal.what, value, goal.unit, floor, goal.floor_is, ratio, goal.goal, bool(met), note
    )


def versions() -> dict[str, str]:
    """Of what a result depends on; "none" for what is not installed."""
    import torch

    found = {"torch": torch.__version__, "python": platform.python_version()}
    for name, package in (("flashinfer", "flashinfer-python"), ("transformers", "transformers")):
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    found["driver"] = _driver() if torch.cuda.is_available() else "none"
    return found


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def merge(path: Path, lines: Sequence[Line]) -> Path:
    """Replace the objects of `path` that measure the same, keep the others, add what is new."""
    known = {item["what"]: item for item in json.loads(path.read_text())} if path.exists() else {}
    about = {"versions": versions(), "date": datetime.date.today().isoformat()}
    for measured in lines:
        known[measured.what] = asdict(measured) | about
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    return path


def show(title: str, lines: Sequence[Line], others: dict[str, str]) -> None:
    """Print the table; `others` says for each line that has no value why."""
    table = Table(title=title)
    for column in ("what", "measured", "floor", "ratio", "goal", "met", ""):
        table.add_column(column)
    for row in lines:
        floor = "" if row.floor is None else f"{row.floor:.4g} {row.unit} ({row.floor_is})"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        value = f"{row.value:.4g} {row.unit}"
        table.add_row(row.what, value, floor, ratio, row.goal, "yes" if row.met else "NO", row.note)
    for what, why in others.items():
        table.add_row(what, "-", "", "", "", "-", why)
    Console(width=180).print(table)
