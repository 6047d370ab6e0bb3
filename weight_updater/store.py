"""Rank 0's TCPStore as every rank of a group uses it, and calls that may never return.

A store whose host is frozen or cut off answers nothing, and TCPStore waits for its answers without a limit:
an engine would wait with it. Here every call to a store of another process has one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import TCPStore

_LOOK_S = 0.1  # how soon who waits for an answer notices that another thread gave up on the store

Result = tuple[Any, BaseException | None]


class Aside:
    """Makes calls in a daemon thread of its own, one after another, so that none can hold up the caller.

    A call that exceeds its limit is left behind, and the thread with it: later calls raise at once.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Result]] | None]
        self._calls = queue.SimpleQueue()
        self._lost = threading.Event()
        # A daemon: what hangs in a library must not keep the process from ending.
        threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()

    def call(self, what: Callable[[], Any], limit_s: float) -> Any:
        """What `what` gives, if it does within `limit_s` seconds. ANY THREAD.

        Raises:
            RuntimeError: it timed out, now or for an earlier call; or what it raised.
        """
        deadline = time.monotonic() + limit_s
        results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        if not self._lost.is_set():
            self._calls.put((what, results))
        while not self._lost.is_set():
            try:
                result, error = results.get(timeout=max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    self._lost.set()
                continue
            try:
                if error is not None:
                    raise error
                return result
            finally:
                del error  # its frames lead here
        raise RuntimeError("it timed out")

    def close(self) -> None:
        """Let the thread end once it has returned from what it is in; harmless twice."""
        self._calls.put(None)

    def __del__(self) -> None:
        self.close()


def _serve(calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Result]] | None]) -> None:
    """Holds nothing of a call that has ended."""
    while (asked := calls.get()) is not None:
        what, results = asked
        try:
            results.put((what(), None))
        except BaseException as error:  # noqa: BLE001  the thread's boundary: the caller raises it
            results.put((None, error))
        del asked, what, results


def within(call: Callable[[], Any], limit_s: float, *, name: str) -> Any:
    """What one call gives, if it does within `limit_s` seconds; else it goes on alone in its thread `name`,
    and its result is dropped.

    Raises:
        RuntimeError: it timed out, or what it raised.
    """
    aside = Aside(name)
    try:
        return aside.call(call, limit_s)
    finally:
        aside.close()


class Store:
    """A TCPStore; what is asked of another process's is answered within `limit_s` or raises RuntimeError.

    Args:
        raw: the store itself; this is its only owner, since at rank 0 it holds a port as long as it lives.
        aside: makes the calls; None at rank 0, whose store is in this process.
        limit_s: seconds for each call that names no limit of its own.
    """

    def __init__(self, raw: TCPStore, aside: Aside | None, limit_s: float) -> None:
        self.raw: Any = raw  # torch's stubs leave out half of the methods
        self.limit_s = limit_s
        self._aside = aside

    def set(self, key: str, value: str, *, limit_s: float | None = None) -> None:
        self._call("set", key, value, limit_s=limit_s)

    def set_once(self, key: str, value: str, *, limit_s: float | None = None) -> None:
        """Set a key that is not there; one that is keeps its value."""
        self._call("compare_set", key, "", value, limit_s=limit_s)

    def read(self, key: str, *, limit_s: float | None = None) -> bytes | None:
        """What a key holds; None if it is not there, where TCPStore's `get` would wait for it."""
        absent = "absent"
        held: bytes = self._call("compare_set", key, absent, absent, limit_s=limit_s)
        return None if held == absent.encode() else held

    def check(self, keys: Sequence[str], *, limit_s: float | None = None) -> bool:
        """Whether all of them are there."""
        there: bool = self._call("check", list(keys), limit_s=limit_s)
        return there

    def add(self, key: str, amount: int) -> int:
        """The new value of a counter."""
        count: int = self._call("add", key, amount)
        return count

    def delete_key(self, key: str) -> None:
        self._call("delete_key", key)

    def _call(self, name: str, *args: Any, limit_s: float | None = None) -> Any:
        if self._aside is None:
            return getattr(self.raw, name)(*args)
        method = getattr(self.raw, name)
        return self._aside.call(lambda: method(*args), self.limit_s if limit_s is None else limit_s)
