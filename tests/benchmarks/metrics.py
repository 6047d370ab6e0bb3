"""`python -m tests.benchmarks.metrics`: what counting costs, beside a decode step of the tests' tiny model.

Prints microseconds, medians of seven. The front's costs come once for each sequence, snapshot or scrape; the
engine's once for each sequence that a forward pass tells something of.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollout_engine import messages as m
from rollout_engine.config import ServeConfig
from rollout_engine.records import SequenceRecord, WorkCounts
from rollout_engine.sampling import SamplingParams
from rollout_engine.sequence import Sequence
from rollout_engine.server.metrics_http import MetricsServer
from rollout_engine.server.tally import Tally
from tests.local_engine import LocalEngine
from tests.tiny import make_tiny

BATCH = 64
REPEATS = 7


def microseconds(function: Callable[[], object], calls: int) -> float:
    """Of one call."""

    def once() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls * 1e6

    return statistics.median(once() for _ in range(REPEATS))


def decode_step(model: Path) -> float:
    """Of one forward pass over BATCH rows, scheduling and reading its result included."""
    engine = LocalEngine(model, num_pages=2048, num_threads=1)
    seconds = []
    for repeat in range(REPEATS):
        engine.restart()
        for i in range(BATCH):
            params = SamplingParams(max_tokens=64, ignore_eos=True, seed=i)
            engine.submit([3 + i % 100, 5, 7, 11 + repeat], params)
        start = time.perf_counter()
        num_steps = engine.run()
        seconds.append((time.perf_counter() - start) / num_steps)
    return statistics.median(seconds) * 1e6


def first_token_checks() -> float:
    """What RequestTable.tell adds to a pass over BATCH rows."""
    rows = [
        Sequence(i, "r", 0, [1], SamplingParams(), 0, 64, output_ids=[1, 2], first_token_at=1.0)
        for i in range(BATCH)
    ]

    def check() -> None:
        for sequence in rows:
            if not sequence.first_token_at and sequence.output_ids:
                sequence.first_token_at = time.monotonic()

    return microseconds(check, 2000)


def main() -> None:
    tally = Tally()
    record = SequenceRecord(time.monotonic(), [(3, 100), (4, 28)])
    output = m.SequenceOutput("r", 0, [1], [-1.0], [], "length", record=record, weight_version=4)
    work = WorkCounts(1, 2, 3, 4, 5, {"eager": 1, "decode_graph": 2})
    snapshot = m.Snapshot("serving", "", 4, 4, 8, 0, 90, 5, 100, "", "", 1, 2, work=work)
    with tempfile.TemporaryDirectory() as folder:
        step = decode_step(make_tiny(Path(folder) / "model"))
    costs = {
        ("engine", f"step of {BATCH} rows", "first tokens noticed"): first_token_checks(),
        ("front", "request", "counted"): microseconds(tally.submitted, 50000),
        ("front", "sequence", "counted at its end"): microseconds(lambda: tally.finished(output, 0.0), 20000),
        ("front", "scrape, sample", "values copied"): microseconds(lambda: tally.values(snapshot), 2000),
        ("front, own thread", "scrape", "page made"): microseconds(page_maker(tally, snapshot), 50),
    }
    table = Table(title=f"A decode step of {BATCH} rows of the tiny model takes {step:,.0f} us.")
    for name in ("where", "for each", "what"):
        table.add_column(name)
    table.add_column("us", justify="right")
    for names, cost in costs.items():
        table.add_row(*names, f"{cost:,.2f}")
    Console().print(table)


def page_maker(tally: Tally, snapshot: m.Snapshot) -> Callable[[], object]:
    """Makes one page, as the metrics port does, without the network."""
    config = ServeConfig(model=Path("/"), metrics_port=0)
    server = MetricsServer(config)
    application = server._make_application(lambda: tally.values(snapshot), lambda: 0)
    server.close()
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "QUERY_STRING": ""}
    return lambda: list(application(environ, lambda status, headers: None))


if __name__ == "__main__":
    main()
