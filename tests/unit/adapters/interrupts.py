"""An interrupt of the main thread that a test can wait for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would end the test run."""


@contextmanager
def interrupts() -> Iterator[Callable[[float], None]]:
    """Gives what interrupts the main thread that many seconds later, as Ctrl-C or a signal's handler does."""

    def raise_(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, raise_)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted(
    act: Callable[[], object], interrupt: Callable[[float], None], reached: Callable[[], bool]
) -> None:
    """Do it, and be interrupted a moment after another thread has got as far as `reached`."""

    def watch() -> None:
        deadline = time.monotonic() + 20
        while not reached() and time.monotonic() < deadline:
            time.sleep(0.005)
        interrupt(0.2)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        act()
    finally:
        watching.join(30)
