"""Groups of rank 0 that failed and are still being let go of: the others read there why, and operations of
gloo end at their own timeouts. Until then they hold their port, which the next group may be told to use.
"""

from __future__ import annotations

import threading
import time
from typing import Any

_lock = threading.Lock()
_leaving: dict[int, list[threading.Thread]] = {}  # by port


def let_go_later(held: list[Any], linger_s: float, *, name: str, port: int) -> None:
    """Drop `held` in a thread called `name`, after `linger_s` seconds. port: what it holds; 0: none.

    No daemon: an interpreter that ends meanwhile would have C++ threads under way.
    """

    def run() -> None:
        try:
            time.sleep(linger_s)
            held.clear()  # a group's destructor waits for its operations, a store's frees the port
        finally:
            with _lock:
                threads = _leaving.get(port, [])
                if thread in threads:
                    threads.remove(thread)
                if not threads:
                    _leaving.pop(port, None)

    thread = threading.Thread(target=run, name=name)
    if port:
        with _lock:
            _leaving.setdefault(port, []).append(thread)
    thread.start()


def await_port(port: int, timeout_s: float) -> None:
    """Until nothing of this process that is being let go of holds `port`, at most `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    with _lock:
        threads = list(_leaving.get(port, []))
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
