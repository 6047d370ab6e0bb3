"""Every goal's row, and the order in which rows run: as few engines as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.benchmarks.gpu import rows_generate, rows_ipc, rows_load, rows_paths
from tests.benchmarks.gpu.bench import Bench
from tests.benchmarks.gpu.goals import GOALS
from tests.benchmarks.gpu.results import Line

ROWS: dict[str, Callable[[Bench], Line]] = {
    # over one engine with random weights
    "decode_1": rows_generate.decode_1,
    "decode_32": rows_generate.decode_32,
    "decode_256": rows_generate.decode_256,
    "ipc_none": rows_ipc.ipc_none,
    "ipc_device": rows_ipc.ipc_device,
    "ipc_checksums": rows_ipc.ipc_checksums,
    "graphs": rows_paths.graphs,
    "distributed": rows_paths.distributed,
    "tensor_shm": rows_paths.tensor_shm,
    "tensor_stream": rows_paths.tensor_stream,
    "disk": rows_paths.disk,
    "pause": rows_ipc.pause,
    "decode_during_update": rows_generate.decode_during_update,
    "ipc_adopt": rows_ipc.ipc_adopt,  # stops it: its weights are the trainer's memory
    # over one with few layers
    "updates_under_load": rows_load.updates_under_load,
    # without one
    "grpc_share": rows_generate.grpc_share,
    # over one with the trainer's weights, from disk
    "start": rows_generate.start,
    "logprobs": rows_generate.logprobs,
}
"""In the order in which they run."""

SECONDS = {
    "tensor_stream": 150.0,
    "disk": 150.0,
    "pause": 150.0,
    "decode_during_update": 150.0,
    "updates_under_load": 200.0,
    "start": 150.0,
}
"""How long a row may take if not two minutes, what it makes for those after it included."""

STOP_THE_ENGINE = ("ipc_adopt", "updates_under_load", "grpc_share", "start")


def chosen(names: Sequence[str]) -> list[str]:
    """The rows to run, in their order; all of them if none is named.

    Raises:
        ValueError: a row that does not exist, or a goal that has no row.
    """
    if missing := [goal.name for goal in GOALS if goal.name not in ROWS]:
        raise ValueError(f"no row measures {missing[0]!r}")
    if unknown := [name for name in names if name not in ROWS]:
        raise ValueError(f"there is no row {unknown[0]!r}; choose from {', '.join(ROWS)}")
    return [name for name in ROWS if not names or name in names]
