"""Flows: commands that take longer than one turn of the engine's loop, written as straight-line generators.

A flow runs on the loop and yields when it has to wait:

    result = yield OffLoop(function)     function runs on a worker thread; its result, or its exception,
                                         comes back here, on the loop
    yield Until(predicate)               goes on at the first turn at which the predicate holds

So everything that touches the model or the books is on one thread, and an update reads top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OffLoop:
    """Run `function` on a worker thread."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Until:
    """Wait until `predicate` holds; it is asked once in each turn of the loop."""

    predicate: Callable[[], bool]


Flow = Generator[OffLoop | Until, Any, Any]
Done = Callable[[Any, Exception | None], None]


NUM_WORKERS = 8
"""Functions that may run off the loop at once."""


class FlowRunner:
    """Advances flows; all methods are called by the loop's thread.

    Args:
        wake: called from a worker thread when its function has ended, so that a sleeping loop turns.
    """

    def __init__(self, wake: Callable[[], None], num_workers: int = NUM_WORKERS) -> None:
        self._wake = wake
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="rollsync-worker")
        self._waiting: list[tuple[Flow, Until | Future[Any], Done]] = []

    def start(self, flow: Flow, done: Done) -> None:
        """Run `flow` to its first wait; `done(result, error)` is called when it ends."""
        self._advance(flow, done, None, None)

    def turn(self) -> None:
        """Advance every flow whose wait is over."""
        waiting, self._waiting = self._waiting, []
        for flow, wait, done in waiting:
            if isinstance(wait, Until):
                if wait.predicate():
                    self._advance(flow, done, None, None)
                else:
                    self._waiting.append((flow, wait, done))
            elif wait.done():
                error = wait.exception()
                self._advance(flow, done, None if error else wait.result(), error)
            else:
                self._waiting.append((flow, wait, done))

    def close(self) -> None:
        """Let go of the workers; running functions are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _advance(self, flow: Flow, done: Done, value: Any, error: BaseException | None) -> None:
        try:
            while True:
                step = flow.throw(error) if error is not None else flow.send(value)
                value = error = None
                if isinstance(step, OffLoop):
                    future = self._pool.submit(step.function)
                    self._waiting.append((flow, future, done))
                    future.add_done_callback(lambda _: self._wake())
                    return
                if not step.predicate():
                    self._waiting.append((flow, step, done))
                    return
        except StopIteration as stop:
            done(stop.value, None)
        except Exception as error_of_flow:  # noqa: BLE001 - one command's fault must not end the loop
            done(None, error_of_flow)
