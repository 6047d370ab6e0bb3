"""Rows of a benchmark: a table for people, and JSON for everything else."""

from __future__ import annotations

import datetime
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One measured line. ratio is value over floor (or over the peer); met says whether the goal holds."""

    what: str
    value: float
    unit: str
    floor: float
    floor_is: str
    ratio: float
    goal: str
    met: bool
    note: str = ""


def show(rows: list[Row]) -> None:
    table = Table(title=f"two cores, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for column in ("what", "value", "floor or peer", "ratio", "goal", "met", ""):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row.what,
            f"{row.value:.3g} {row.unit}",
            f"{row.floor:.3g} {row.unit} ({row.floor_is})",
            f"{row.ratio:.2f}",
            row.goal,
            "yes" if row.met else "NO",
            row.note,
        )
    Console(width=150).print(table)


def save(rows: list[Row], name: str) -> Path:
    """Merge rows into results/NAME.json by what they measure."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    known = {row["what"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_at_end": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
    }
    for row in rows:
        known[row.what] = asdict(row) | about
    path.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    return path
