"""`rollsync top`: what a running engine does, live, in a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from rollout_engine.cli.output import (
    DEFAULT_ADDRESS,
    EXIT_FAILED,
    AddressOption,
    CaOption,
    CertOption,
    JsonOption,
    KeyOption,
    TokenOption,
    print_json,
    reported,
    rollout_client,
)
from rollout_engine.cli.top_view import Frame, History, as_plain, render

if TYPE_CHECKING:
    from rich.console import Console

    from trainers_adapters.clients import RolloutClient
    from trainers_adapters.results import EngineInfo, EngineState

INFO_EVERY_S = 5.0
"""How often the engine's description is asked for when nothing says that it has changed."""
RETRY_S = 0.5
CALL_TIMEOUT_S = 2.0


def top(
    once: Annotated[bool, typer.Option("--once", help="One picture, then end.")] = False,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds that rates are taken over.")] = 1.0,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    tls_ca: CaOption = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a running engine; q or Ctrl-C quits. Where stdout is no terminal, one picture (--once).

    Exit code 1 with --once or --json if it does not serve, 3 if nothing answers.
    """
    from rich.console import Console

    with reported(as_json), rollout_client(address, token, tls_ca, tls_cert, tls_key) as client:
        console = Console()
        view = View(client, client.info(timeout_s=CALL_TIMEOUT_S))
        if once or as_json or not console.is_terminal:
            view.tick(time.monotonic())
            time.sleep(interval)
            frame = view.tick(time.monotonic())
            print_json(as_plain(frame)) if as_json else console.print(render(frame))
            if frame.state.status == "not_serving":
                raise typer.Exit(EXIT_FAILED)
            return
        with Keyboard() as keys:
            run(view, console, keys, interval)


class Keys(Protocol):
    """Where key strokes come from."""

    def read(self, timeout_s: float) -> str:
        """The key that was pressed within that time; empty if none was."""
        ...


class Keyboard:
    """stdin, one key at a time; nothing ever comes where it is no terminal."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Keyboard:
        if self._fd >= 0:
            import termios
            import tty

            before = termios.tcgetattr(self._fd)
            self._stack.callback(termios.tcsetattr, self._fd, termios.TCSADRAIN, before)
            tty.setcbreak(self._fd)  # Ctrl-C stays a signal
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def read(self, timeout_s: float) -> str:
        if self._fd < 0:
            time.sleep(timeout_s)
            return ""
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        return os.read(self._fd, 1).decode(errors="replace") if ready else ""


class View:
    """The engine as last heard of. A thread follows WatchEngine, again and again if it breaks off."""

    def __init__(self, client: RolloutClient, info: EngineInfo) -> None:
        self._client = client
        self._info = info
        self._state = info.state
        self._history = History()
        self._asked_at = time.monotonic()
        self._known = _marks(info.state)
        self._trouble = ""
        threading.Thread(target=self._follow, name="rollsync-top", daemon=True).start()

    def _follow(self) -> None:
        """WATCHER THREAD."""
        from trainers_adapters.errors import RollsyncError

        while True:
            try:
                for state in self._client.watch():
                    self._state, self._trouble = state, ""
                self._trouble = "the engine ends the stream: it stops"
            except RollsyncError as error:
                if error.reason == "CLOSED":
                    return
                self._trouble = error.message
            time.sleep(RETRY_S)

    def tick(self, now: float) -> Frame:
        """An interval is over."""
        self._history.tick(self._state, now)
        return self.frame(now)

    def frame(self, now: float) -> Frame:
        """The picture now; asks for the description when something happened that it may tell more of."""
        marks = _marks(self._state)
        if (marks != self._known or now - self._asked_at > INFO_EVERY_S) and not self._trouble:
            self._ask(now)
            self._known = marks
        return Frame(self._client.address, self._info, self._state, self._history, now, self._trouble)

    def _ask(self, now: float) -> None:
        from trainers_adapters.errors import RollsyncError

        self._asked_at = now
        try:
            self._info = self._client.info(timeout_s=CALL_TIMEOUT_S)
        except RollsyncError as error:
            self._trouble = error.message


def _marks(state: EngineState) -> tuple[object, ...]:
    """Whatever changes with an update's end."""
    return state.commit_sequence, state.open_update_id, state.status


def run(view: View, console: Console, keys: Keys, interval: float) -> None:
    """Show pictures until q is pressed or Ctrl-C comes."""
    from rich.live import Live

    refresh = min(interval, 0.25)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _terminated_as_interrupted(),
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        due = 0.0
        while True:
            now = time.monotonic()
            if now >= due:
                frame, due = view.tick(now), now + interval
            else:
                frame = view.frame(now)
            live.update(render(frame), refresh=True)
            if keys.read(refresh) in ("q", "Q"):
                return


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the view as Ctrl-C does, so that the terminal is left as it was found."""
    import signal

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
