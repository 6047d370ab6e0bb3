"""What `rollsync top` knows and how it looks; where it comes from is top.py's business."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    from trainers_adapters.results import EngineInfo, EngineState, UpdateSummary

SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 40
BAR_WIDTH = 40
UPDATES_SHOWN = 8
STATE_STYLES = {"serving": "bold green", "paused": "bold yellow", "not_serving": "bold red"}
END_STYLES = {"committed": "green", "rolled_back": "yellow", "refused": "yellow", "torn": "red"}


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, over one interval. prompt: tokens that were computed, not found in the cache."""

    generated: float = 0.0
    prompt: float = 0.0
    passes: float = 0.0


class History:
    """States as they come, and rates between them; `now` is time.monotonic() everywhere."""

    def __init__(self) -> None:
        self.rates: deque[Rates] = deque(maxlen=SPARKLINE_WIDTH)
        self._before: tuple[float, EngineState] | None = None
        self._update: tuple[str, float] = ("", 0.0)  # the open update and when it was first seen

    def tick(self, state: EngineState, now: float) -> None:
        """An interval is over, and this is the state."""
        if self._before is not None:
            then, old = self._before
            seconds = max(now - then, 1e-6)

            def rate(new_count: int, old_count: int) -> float:
                return max(0, new_count - old_count) / seconds  # a new engine counts from 0

            self.rates.append(
                Rates(
                    rate(state.num_generated_tokens, old.num_generated_tokens),
                    rate(_computed(state), _computed(old)),
                    rate(state.num_steps, old.num_steps),
                )
            )
        self._before = (now, state)
        if state.open_update_id != self._update[0]:
            self._update = (state.open_update_id, now)

    @property
    def last(self) -> Rates:
        return self.rates[-1] if self.rates else Rates()

    def update_seconds(self, now: float) -> float:
        """For how long the open update has been seen."""
        return now - self._update[1]


def _computed(state: EngineState) -> int:
    return state.num_prompt_tokens - state.num_cached_tokens


def sparkline(values: Sequence[float]) -> str:
    """One character a value, the largest the highest; zero is the lowest."""
    top = max(values, default=0.0)
    if top <= 0:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[min(7, round(value / top * 7))] for value in values)


def bar(parts: Sequence[tuple[int, str, str]], total: int, width: int = BAR_WIDTH) -> Text:
    """A bar of (amount, character, style) one after the other, the rest dots.

    Whatever is there at all shows as one character at least, if there is room.
    """
    from rich.text import Text

    text, left = Text(), width
    for amount, character, style in parts:
        cells = min(left, max(1, round(amount / total * width)) if amount > 0 and total > 0 else 0)
        text.append(character * cells, style)
        left -= cells
    return text.append("·" * left, "dim")


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything on the screen at one moment. trouble: why the state is old; empty while it is not."""

    address: str
    info: EngineInfo
    state: EngineState
    history: History
    now: float
    trouble: str = ""


def render(frame: Frame) -> Group:
    """The screen."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", min_width=9)
    grid.add_column(overflow="fold")
    for name, what in _rows(frame):
        grid.add_row(name, what)
    parts: list[Any] = [_title(frame), Text(), grid]
    if frame.info.recent_updates:
        parts += [Text(), _updates(frame.info.recent_updates)]
    return Group(*parts)


def _title(frame: Frame) -> Text:
    from rich.text import Text

    info = frame.info
    what = f"  {info.architecture}  {info.dtype} on {info.device}  {info.attention_backend} attention"
    return Text.assemble(("rollsync ", "bold"), frame.address, (what, "dim"))


def _rows(frame: Frame) -> list[tuple[str, RenderableType]]:
    state, history = frame.state, frame.history
    rows: list[tuple[str, RenderableType]] = [
        ("state", _state(frame)),
        ("version", f"{state.weight_version}  (commit sequence {state.commit_sequence})"),
        ("tokens/s", _tokens(state, history)),
        ("queue", f"{state.num_running} running, {state.num_waiting} waiting"),
        ("pages", _pages(state)),
        ("passes", _passes(frame)),
    ]
    if state.released_tags:
        rows.append(("released", ", ".join(state.released_tags)))
    rows.append(("update", _open_update(frame)))
    return rows


def _state(frame: Frame) -> Text:
    from rich.text import Text

    if frame.trouble:
        return Text(f"unknown: {frame.trouble}", "bold red")
    state = frame.state
    text = Text(state.status.replace("_", " "), STATE_STYLES.get(state.status, "bold"))
    if state.status == "paused" and state.paused_by:
        text.append(f" by {state.paused_by}", "yellow")
    if state.not_serving_reason:
        text.append(f": {state.not_serving_reason}", "red")
    return text


def _tokens(state: EngineState, history: History) -> Text:
    from rich.text import Text

    rates = history.last
    text = Text(f"{rates.generated:,.0f}", "bold")
    text.append(f"  {sparkline([rate.generated for rate in history.rates])}", "green")
    text.append(f"  {state.num_generated_tokens:,} in all")
    text.append(f"; prompt {rates.prompt:,.0f}")
    if state.num_prompt_tokens:
        text.append(f", {state.num_cached_tokens / state.num_prompt_tokens:.0%} cached")
    return text


def _pages(state: EngineState) -> Text:
    total, free, cached = state.num_total_pages, state.num_free_pages, state.num_cached_pages
    used = total - free - cached
    text = bar([(used, "█", "magenta"), (cached, "▒", "blue")], total)
    return text.append(f"  {used} used, {cached} cached, {free} free of {total}")


def _passes(frame: Frame) -> str:
    counts = frame.info.forward_counts
    kinds = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items() if count)
    return f"{frame.history.last.passes:,.1f}/s; {kinds or 'none yet'}"


def _open_update(frame: Frame) -> Text:
    from rich.text import Text

    state = frame.state
    if not state.open_update_id:
        return Text("none open", "dim")
    received, total = state.open_update_received_bytes, state.open_update_total_bytes
    text = bar([(received, "█", "cyan")], total)
    text.append(f"  {state.open_update_state}  {received / 1e6:,.1f} of {total / 1e6:,.1f} MB")
    return text.append(f"  {frame.history.update_seconds(frame.now):.1f} s  {state.open_update_id}", "dim")


def _updates(updates: Sequence[UpdateSummary]) -> Table:
    """The last updates, the latest first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("last updates", "path", "staging", "end"):
        table.add_column(name, no_wrap=True)
    for name in ("version", "MB", "whole ms", "transfer", "pause", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why")  # the one that gives way where the terminal is narrow
    for update in list(reversed(updates))[:UPDATES_SHOWN]:
        seconds = update.seconds
        whole = seconds.get("whole", seconds.get("commit", 0.0))
        rate = update.num_bytes / whole / 1e9 if whole and update.end == "committed" else 0.0
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(update.ended_at)),
            update.path,
            update.staging,
            Text(update.end.replace("_", " "), END_STYLES.get(update.end, "")),
            str(update.weight_version),
            f"{update.num_bytes / 1e6:,.1f}",
            f"{whole * 1e3:,.1f}",
            f"{seconds['transfer'] * 1e3:,.1f}" if "transfer" in seconds else "",
            f"{seconds['pause'] * 1e3:,.1f}" if "pause" in seconds else "",
            f"{rate:.3g}" if rate else "",
            _why(update),
        )
    return table


def _why(update: UpdateSummary) -> Text:
    """On one line, cut where the room ends."""
    from rich.text import Text

    text = f"{update.reason}: {update.message}" if update.reason else ""
    return Text(text, "dim", no_wrap=True, overflow="ellipsis")


def as_plain(frame: Frame) -> dict[str, Any]:
    """The same for scripts."""
    from dataclasses import asdict

    rates = frame.history.last
    return {
        "address": frame.address,
        "instance_id": frame.info.instance_id,
        "tokens_per_second": round(rates.generated, 2),
        "prompt_tokens_per_second": round(rates.prompt, 2),
        "passes_per_second": round(rates.passes, 2),
        "state": asdict(frame.state) | {"adapters": [asdict(adapter) for adapter in frame.state.adapters]},
        "forward_counts": frame.info.forward_counts,
        "recent_updates": [asdict(update) for update in frame.info.recent_updates],
    }
