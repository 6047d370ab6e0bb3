"""The picture of `rollsync plot`: panels over one time axis. Needs matplotlib."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

if TYPE_CHECKING:
    from rollout_engine.cli.plot import Log

MAX_POINTS = 600
"""Points of a line; more samples than these are taken together."""
PATH_COLORS = {"disk": "#0072B2", "distributed": "#E69F00", "tensor": "#009E73", "ipc": "#CC79A7"}
BLUE, SKY, ORANGE, PURPLE, BLACK, GREY, RED = (
    "#0072B2",
    "#56B4E9",
    "#D55E00",
    "#8E6BBF",
    "#222222",
    "#777777",
    "#D00000",
)

Sample = dict[str, Any]


class Timeline:
    """Samples and updates of a log, and where each stands on the common axis."""

    def __init__(self, log: Log) -> None:
        self.samples = thinned(log.samples, MAX_POINTS)
        self.updates = log.updates
        self.start = float(self.samples[0]["time"])
        self._scale, self.unit = time_unit(float(self.samples[-1]["time"]) - self.start)

    def at(self, entry: Sample) -> float:
        return (float(entry["time"]) - self.start) / self._scale

    @property
    def times(self) -> list[float]:
        return [self.at(sample) for sample in self.samples]

    def values(self, key: str) -> list[float]:
        return [sample[key] for sample in self.samples]


def draw(log: Log, target: Path, title: str | None = None) -> None:
    """Write a PNG of a log of two samples or more.

    Raises:
        OSError: the file cannot be written.
    """
    figure_of(log, title).savefig(target, dpi=130, format="png")


def figure_of(log: Log, title: str | None = None) -> Figure:
    """The picture, not yet written."""
    line = Timeline(log)
    figure = Figure(figsize=(12, 10.5), layout="constrained")
    axes = figure.subplots(5, 1, sharex=True, height_ratios=(3, 2.4, 3, 1.8, 1.8))
    for axis, panel in zip(axes, (_tokens, _versions, _updates, _queue, _pages), strict=True):
        panel(axis, line)
        _shade_outages(axis, line)
        axis.grid(alpha=0.25)
        axis.margins(x=0.01)
        axis.spines[["top", "right"]].set_visible(False)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.start))
    axes[-1].set_xlabel(f"{line.unit} since {when}")
    # A dollar sign is one, and starts no formula.
    figure.suptitle(title or summary(log), fontsize=12, fontweight="bold", parse_math=False)
    figure.align_ylabels(axes)
    return figure


# ---------------------------------------------------------------- numbers


def thinned(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most so many samples, the last one among them. Counts only grow, so rates between them are right."""
    stride = -(-len(samples) // most)
    return list(samples[::-1][::stride][::-1])


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds of a unit that suits a span, and its name."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * size:
            return size, name
    return 1.0, "seconds"


def growth(samples: Sequence[Sample], count: Callable[[Sample], float]) -> list[float]:
    """By how much a count grew from each sample to the next; one that shrank is a new engine's, from 0."""
    values = [count(sample) for sample in samples]
    return [new - old if new >= old else new for old, new in itertools.pairwise(values)]


def rates(samples: Sequence[Sample], count: Callable[[Sample], float]) -> list[float]:
    """The same per second."""
    seconds = [float(new["time"]) - float(old["time"]) for old, new in itertools.pairwise(samples)]
    return [grown / max(s, 1e-6) for grown, s in zip(growth(samples, count), seconds, strict=True)]


def summary(log: Log) -> str:
    """What happened, in one line."""
    tokens = sum(growth(log.samples, lambda sample: sample["generated_tokens"]))
    ends = Counter(update["end"].replace("_", " ") for update in log.updates)
    said = ", ".join(f"{count} {end}" for end, count in ends.items()) or "none"
    return f"rollsync: {tokens:,.0f} tokens in {log.seconds:,.0f} s; updates: {said}"


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


# ---------------------------------------------------------------- panels


def _tokens(axis: Any, line: Timeline) -> None:
    times = line.times[1:]
    generated = rates(line.samples, lambda sample: sample["generated_tokens"])
    prompt = rates(line.samples, lambda sample: sample["prompt_tokens"] - sample["cached_prompt_tokens"])
    axis.fill_between(times, generated, step="pre", color=BLUE, alpha=0.18, linewidth=0)
    drawn = axis.step(times, generated, where="pre", color=BLUE, linewidth=1.2, label="generated")
    axis.set_ylabel("tokens/s")
    axis.set_ylim(bottom=0)
    if any(prompt):
        beside = _second_axis(axis, "prompt tokens/s", GREY)
        drawn += beside.step(
            times, prompt, where="pre", color=GREY, linewidth=0.8, label="prompt, not cached"
        )
        beside.set_ylim(0, 2.5 * max(prompt))  # below the other line, which matters more
    _legend(axis, drawn)


def _versions(axis: Any, line: Timeline) -> None:
    """The live version as steps; what failed, as a mark at the version that stayed; staleness beside it."""
    times = line.times
    versions = line.values("weight_version")
    drawn = axis.step(times, versions, where="post", color=BLACK, linewidth=1.3, label="live")
    for end, marker in (("refused", "x"), ("torn", "X"), ("rolled_back", "v")):
        points = [(line.at(update), update["version"]) for update in line.updates if update["end"] == end]
        if points:
            xs, ys = zip(*points, strict=True)
            drawn += axis.plot(xs, ys, marker, color=RED, label=f"update {end.replace('_', ' ')}", zorder=5)
    axis.set_ylabel("weight version")
    axis.yaxis.get_major_locator().set_params(integer=True)
    finished = growth(line.samples, lambda sample: sample["finished_sequences"])
    total = growth(line.samples, lambda sample: sample["staleness_sum"])
    stale = [(at, s / n) for at, s, n in zip(times[1:], total, finished, strict=True) if n]
    if stale:
        beside = _second_axis(axis, "staleness, versions", PURPLE)
        xs, ys = zip(*stale, strict=True)
        drawn += beside.plot(
            xs, ys, ".", color=PURPLE, markersize=5, alpha=0.7, label="mean staleness\nof finished sequences"
        )
        beside.set_ylim(-0.1, max(1.0, *ys) * 1.15)
        beside.yaxis.get_major_locator().set_params(integer=True)
    _legend(axis, drawn)


def _updates(axis: Any, line: Timeline) -> None:
    """How long committed updates took (full) and paused generation (hollow), by path."""
    axis.set_ylabel("update, seconds")
    committed = [update for update in line.updates if update["end"] == "committed"]
    if not committed:
        axis.text(0.5, 0.5, "no update committed", transform=axis.transAxes, ha="center", color=GREY)
        axis.set_yticks([])
        return
    handles: list[Any] = []
    for path in sorted({update["path"] for update in committed}):
        color = PATH_COLORS.get(path, GREY)
        of_path = [update for update in committed if update["path"] == path]
        medians = {}
        for stage, fill in (("whole", color), ("pause", "white")):
            points = [(line.at(u), u["seconds"][stage]) for u in of_path if u["seconds"].get(stage)]
            if points:
                xs, ys = zip(*points, strict=True)
                axis.plot(xs, ys, "o", color=color, markerfacecolor=fill, markersize=5, zorder=4)
                medians[stage] = duration(median(ys))
        said = "\n".join(f"  {stage} {value}" for stage, value in medians.items())
        handles.append(Line2D([], [], marker="o", linestyle="", color=color, label=f"{path}, median\n{said}"))
    handles.append(
        Line2D(
            [], [], marker="o", linestyle="", color=GREY, markerfacecolor="white", label="hollow: the pause"
        )
    )
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.margins(y=0.15)
    _legend(axis, handles)


def _queue(axis: Any, line: Timeline) -> None:
    drawn = []
    for key, color in (("running", BLUE), ("waiting", ORANGE)):
        drawn += axis.step(line.times, line.values(key), where="post", color=color, linewidth=1.1, label=key)
    axis.set_ylabel("sequences")
    axis.set_ylim(bottom=0)
    _legend(axis, drawn)


def _pages(axis: Any, line: Timeline) -> None:
    used = [s["pages"] - s["free_pages"] - s["cached_pages"] for s in line.samples]
    drawn = axis.stackplot(
        line.times,
        used,
        line.values("cached_pages"),
        step="post",
        colors=(PURPLE, SKY),
        labels=("used", "cached"),
        linewidth=0,
        alpha=0.75,
    )
    total = max(line.values("pages"))
    axis.axhline(total, color=GREY, linewidth=0.8, linestyle="--")
    axis.set_ylabel(f"pages of {total:,}")
    axis.set_ylim(0, total * 1.08)
    _legend(axis, drawn)


def _shade_outages(axis: Any, line: Timeline) -> None:
    """Red where the engine served nothing, grey where somebody had paused it."""
    for sample, after in itertools.pairwise(line.samples):
        paused = sample["status"] == "paused" and sample.get("paused_by") == "user"
        if sample["status"] == "not_serving" or paused:
            color, alpha = (GREY, 0.2) if paused else (RED, 0.15)
            axis.axvspan(line.at(sample), line.at(after), color=color, alpha=alpha, linewidth=0, zorder=0)


def _second_axis(axis: Any, label: str, color: str) -> Any:
    beside = axis.twinx()
    beside.set_ylabel(label, color=color, fontsize=9)
    beside.tick_params(axis="y", labelcolor=color, labelsize=8)
    beside.spines[["top", "left"]].set_visible(False)
    return beside


def _legend(axis: Any, handles: Sequence[Any]) -> None:
    """Beside the panel, never over its lines."""
    axis.legend(handles=handles, loc="center left", bbox_to_anchor=(1.075, 0.5), frameon=False, fontsize=8.5)
