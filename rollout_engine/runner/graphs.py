"""What the runners of captured passes share, and all of them together as the updater sees them.

A graph remembers addresses: of the weights, of the KV pool, of the buffers that feed it. Each runner keeps
the identities of what it captured, so that whoever moves something can be told, and graphs are captured again
exactly then. All graphs take their memory from one pool: they are replayed one after the other, and what has
to outlive a graph lies outside.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch

from rollout_engine.batch.schedule import ScheduleBatch
from rollout_engine.logs import get_log
from rollout_engine.runner.pending import PendingStep

log = get_log(__name__)
C = TypeVar("C")

Identity = tuple[int, torch.Size, torch.dtype]
"""Address, shape and dtype of captured storage."""


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], object], Any], Graph]
"""(work, memory pool) -> a graph that does the work when it is replayed; it is not done now."""


def capture_graph(work: Callable[[], object], pool: Any) -> Graph:
    """Capture what `work` enqueues on the current stream, which must not be the default one.

    Other threads may use the device meanwhile, but neither allocate nor register memory on it.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        work()
    except BaseException:
        with suppress(RuntimeError):  # that the capture is spoiled, which would hide by what
            _end_capture(graph, pool)
        raise
    _end_capture(graph, pool)
    return graph


def _end_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture, for torch's allocator too: of a spoiled one torch (2.11 at least) tells it nothing, and
    from then on `empty_cache` is an error, with which the next capture begins.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        index = torch.cuda.current_device()
        with suppress(RuntimeError):  # that it knows already
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        raise


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Collect garbage before the block and none within: what is freed may wait for the device, and to wait
    for a stream that captures spoils the capture.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def smallest_fit(sizes: Sequence[int], needed: int) -> int | None:
    """The smallest of ascending sizes that is at least `needed`; None where there is none."""
    at = bisect_left(sizes, needed)
    return sizes[at] if at < len(sizes) else None


class CapturedStorages:
    """Storage whose addresses graphs remember, and what it was when they were captured.

    Args:
        storages: by name; the objects stay the same for good, what lies behind them may move.
    """

    def __init__(self, storages: dict[str, torch.Tensor]) -> None:
        self._storages = storages
        self._identities: dict[str, Identity] = {}

    def note(self) -> None:
        """Everything was captured as it is now."""
        self._identities = {name: _identity(tensor) for name, tensor in self._storages.items()}

    def forget(self) -> None:
        """Nothing is captured."""
        self._identities.clear()

    def moved(self) -> list[str]:
        """Names of storage whose address, shape or dtype is no longer what was captured."""
        return [
            name for name, identity in self._identities.items() if _identity(self._storages[name]) != identity
        ]


def _identity(tensor: torch.Tensor) -> Identity:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def capture_sizes(
    name: str, sizes: Sequence[int], capture: Callable[[int], C], storages: CapturedStorages
) -> dict[int, C]:
    """Capture every size, largest first, so that the smaller ones fit into its memory.

    Args:
        name: of the runner, for the log. capture: one size.
        storages: of which everything is captured then.
    """
    started = time.monotonic()
    captured = {size: capture(size) for size in reversed(sizes)}
    storages.note()
    seconds = round(time.monotonic() - started, 2)
    log.info("graphs_captured", runner=name, sizes=list(sizes), seconds=seconds)
    return captured


class GraphRunner(Protocol):
    """Replays captured forward passes of one kind."""

    def can_run_graph(self, batch: ScheduleBatch) -> bool:
        """Whether a captured pass gives everything that `batch` asks for."""
        ...

    def run(self, batch: ScheduleBatch) -> PendingStep:
        """Replay the pass of the smallest size that fits, and sample."""
        ...

    def capture(self, pool: Any) -> None:
        """Capture every size into a memory pool, on the current stream."""
        ...

    def release(self) -> None:
        """Free every graph; passes run uncaptured until `capture`."""
        ...

    def num_captured(self) -> int:
        """How many passes are captured."""
        ...

    def moved(self) -> list[str]:
        """Captured storage that moved since."""
        ...


class Graphs:
    """The graphs of all runners; weight_updater's GraphHooks.

    Args:
        runners: in the order in which they are captured.
        stream: the one that they replay on.
        has_memory: whether all memory is there that captured passes touch, of which some may be released.

    Attributes:
        is_owed: they were to be captured while memory was released, or a capture failed; that is for whoever
            resumes the memory, or writes weights next, to make up for.
    """

    def __init__(
        self,
        runners: Sequence[GraphRunner],
        stream: torch.cuda.Stream,
        has_memory: Callable[[], bool] = lambda: True,
    ) -> None:
        self._runners = runners
        self._stream = stream
        self._has_memory = has_memory
        self.is_owed = False

    def capture(self) -> None:
        """Capture everything anew. The device must be idle. Old graphs are freed first, all of them.

        Where that fails, none is left, and they are owed.
        """
        self._free()
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()  # gives the memory of the old graphs back
        pool = torch.cuda.graph_pool_handle()
        try:
            with nothing_collected(), torch.inference_mode(), torch.cuda.stream(self._stream):
                for runner in self._runners:
                    runner.capture(pool)
        except BaseException as error:
            self._free()  # some of the sizes of a runner are worse than none
            self.is_owed = True
            log.warning("graphs_lost", error=f"{error} ({type(error).__name__})", until="the next commit")
            raise
        self._stream.synchronize()
        self.is_owed = False

    def capture_owed(self) -> int:
        """Capture what was put off or lost, if anything was and its memory is there; how many passes."""
        if not (self.is_owed and self._has_memory()):
            return 0
        self.capture()
        return self.num_captured()

    def release(self) -> None:
        """Free every graph."""
        self.is_owed = False
        self._free()

    def _free(self) -> None:
        for runner in self._runners:
            runner.release()

    def num_captured(self) -> int:
        """How many passes are captured."""
        return sum(runner.num_captured() for runner in self._runners)

    def moved(self) -> list[str]:
        """Captured storage that moved since, each name once."""
        return list(dict.fromkeys(name for runner in self._runners for name in runner.moved()))

    def check_recapture(self) -> None:
        """Nothing can be missing: old graphs give back the memory that new ones take."""

    def recapture(self) -> int:
        """Capture every pass again; returns how many. The device must be idle.

        Each is run before it is captured: where memory is released, none is, and the old ones go.
        """
        if not self._has_memory():
            self.release()
            self.is_owed = True
            return 0
        self.capture()
        return self.num_captured()
