"""Chunk streams at receivers, from the side of a test: who takes them, and two that stop half-way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from tests import holdings
from tests.engines import RunningEngine
from tests.wire.trainer import begin, beside, chunks_of
from trainers_adapters import RollsyncError
from trainers_adapters.chunk_wire import Chunk
from trainers_adapters.clients import WeightsClient

SMALL = 1024
"""Bytes of a chunk, so that there are many."""


def children_of(engine: RunningEngine, module: str) -> list[int]:
    """Processes that the front has started to run a module."""
    return [pid for pid in holdings.children_of(engine.pid) if module in holdings.command_of(pid)]


def receiver_pids(engine: RunningEngine) -> list[int]:
    return children_of(engine, "server.receiver")


def begin_streams(engine: RunningEngine, source, num_streams: int = 2, **fields):
    begun = begin(engine, source, num_streams=num_streams, **fields)
    assert len(set(begun.stream_ports)) == num_streams
    return begun


@contextlib.contextmanager
def clients_at(engine: RunningEngine, ports: Sequence[int]) -> Iterator[list[WeightsClient]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(engine.weights.at_port(port)) for port in ports]


class Walled(WeightsClient):
    """A client that reaches the engine's own port only, as through a forwarded port."""

    def at_port(self, port: int) -> WeightsClient:
        return super().at_port(9)  # the discard service, which nobody runs


class Halves:
    """The chunks of a source at two receivers: half of each half, and the rest once `gate` is opened."""

    def __init__(self, engine: RunningEngine, source, **fields) -> None:
        self.gate = threading.Event()
        self.begun = begin_streams(engine, source, **fields)
        chunks = list(chunks_of(source, SMALL))
        self._stack = contextlib.ExitStack()
        receivers = self._stack.enter_context(clients_at(engine, self.begun.stream_ports))
        self.calls: list[Future] = [
            beside(
                receiver.update_from_tensor,
                self.begun.update_id,
                self._slowly(half),
                says_end=True,
                timeout_s=60,
            )
            for receiver, half in zip(receivers, (chunks[0::2], chunks[1::2]), strict=True)
        ]

    def _slowly(self, chunks: list[Chunk]) -> Iterator[Chunk]:
        yield from chunks[: len(chunks) // 2]
        self.gate.wait(60)
        yield from chunks[len(chunks) // 2 :]

    def __enter__(self) -> Halves:
        return self

    def __exit__(self, *exc: object) -> None:
        self.gate.set()
        self._stack.close()

    def reasons(self, seconds: float = 10.0) -> list[str]:
        """What both calls failed with."""
        errors = [call.exception(seconds) for call in self.calls]
        assert all(isinstance(error, RollsyncError) for error in errors), errors
        return [error.reason for error in errors]


def half_arrived(engine: RunningEngine, source) -> bool:
    state = engine.rollout.info().state
    return state.open_update_received_bytes > 0.4 * source.manifest(checksums=False).nbytes
