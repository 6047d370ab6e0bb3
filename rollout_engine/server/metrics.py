"""Every metric there is: name, kind, labels, help; and the values, plain numbers without locks.

The front's event loop is the only one that writes values and the only one that copies them; whoever shows
them elsewhere (metrics_http.py, metrics_log.py) works on a copy. docs/metrics.md has this table for people,
and a test holds the two together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Seconds: of one token up to a long prompt."""
SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Seconds: of whole sequences."""
STAGE = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.3, 2.6, 5, 10, 30, 60, 300)
"""Seconds: of an update's stages, from one copy on a GPU to a slow disk."""
VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric. labels: names of its labels; buckets: upper bounds of a histogram's, without +Inf."""

    kind: Kind
    name: str
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()


ALL: list[Metric] = []


def _define(kind: Kind, name: str, text: str, labels: Labels = (), buckets: tuple[float, ...] = ()) -> Metric:
    metric = Metric(kind, f"rollsync_{name}", text, labels, buckets)
    ALL.append(metric)
    return metric


# Tokens and requests
PROMPT_TOKENS = _define("counter", "prompt_tokens_total", "Prompt tokens of admitted sequences.")
CACHED_TOKENS = _define(
    "counter", "cached_prompt_tokens_total", "Prompt tokens of admitted sequences found in the prefix cache."
)
GENERATED_TOKENS = _define("counter", "generated_tokens_total", "Tokens sampled.")
REQUESTS = _define("counter", "requests_total", "Requests given to the engine.")
ERRORS = _define(
    "counter", "errors_total", "Calls (or items of a batch) answered with an error.", ("kind", "reason")
)
STREAMS = _define("gauge", "open_streams", "Calls that stay open, by the kind that limits count.", ("kind",))
SEQUENCES = _define("counter", "sequences_finished_total", "Sequences that ended.", ("finish_reason",))
FIRST_TOKEN = _define(
    "histogram",
    "time_to_first_token_seconds",
    "From a request's arrival to a sequence's first token.",
    buckets=FAST,
)
PER_TOKEN = _define(
    "histogram",
    "time_per_output_token_seconds",
    "Mean time between the tokens of a sequence, once for each sequence of two or more.",
    buckets=FAST,
)
SEQUENCE_SECONDS = _define(
    "histogram", "sequence_duration_seconds", "From a request's arrival to a sequence's end.", buckets=SLOW
)
SEQUENCE_TOKENS = _define(
    "histogram", "sequence_generated_tokens", "Tokens sampled for a sequence.", buckets=TOKENS
)

# Queue, pages, prefix cache, passes
RUNNING = _define("gauge", "running_sequences", "Sequences that hold pages.")
WAITING = _define("gauge", "waiting_sequences", "Sequences that hold none yet.")
PREEMPTIONS = _define("counter", "preemptions_total", "Sequences whose pages were taken away for a while.")
PAGES = _define("gauge", "pages", "Pages of the KV pool.")
FREE_PAGES = _define("gauge", "free_pages", "Pages that can be taken at once.")
CACHED_PAGES = _define("gauge", "cached_pages", "Pages that the prefix cache alone holds.")
PREFIX_LOOKUPS = _define(
    "counter", "prefix_cache_lookups_total", "Sequences admitted, each looked up in the prefix cache once."
)
PREFIX_HITS = _define(
    "counter", "prefix_cache_hits_total", "Admitted sequences of whose prompt a page or more was found."
)
PASSES = _define(
    "counter", "forward_passes_total", "Forward passes by the runner that did them.", ("runner",)
)

# Weights and updates
WEIGHT_VERSION = _define("gauge", "weight_version", "Weight version that is live.")
ADAPTER_VERSION = _define("gauge", "adapter_version", "Version of each adapter that is held.", ("adapter",))
ADAPTER_STALE = _define(
    "gauge", "adapter_stale", "1 for an adapter that was pushed over other base weights.", ("adapter",)
)
COMMIT_SEQUENCE = _define("gauge", "commit_sequence", "Commits and rollbacks since the engine's start.")
VERSIONS_BEHIND = _define(
    "gauge",
    "weight_versions_behind",
    "Newest weight version that an update was opened for, less the live one.",
)
SEQUENCE_STALENESS = _define(
    "histogram",
    "sequence_staleness_versions",
    "Weight version live at a sequence's end, less that of its first token.",
    buckets=VERSIONS,
)
TOKEN_STALENESS = _define(
    "histogram",
    "token_staleness_versions",
    "Weight version live at a sequence's end, less that of each of its tokens; counts tokens.",
    buckets=VERSIONS,
)
UPDATES = _define(
    "counter",
    "updates_total",
    "Updates that ended: committed, rolled_back, refused or torn.",
    ("path", "staging", "end", "reason"),
)
STAGE_SECONDS = _define(
    "histogram",
    "update_stage_seconds",
    "Seconds of each stage of committed updates.",
    ("path", "staging", "stage"),
    STAGE,
)
UPDATE_BYTES = _define("counter", "update_bytes_total", "Bytes that committed updates brought.", ("path",))
SETTLED = _define(
    "counter",
    "update_sequences_total",
    "Sequences in flight at commits, by what became of them.",
    ("settled",),
)
RECAPTURES = _define("counter", "update_graphs_recaptured_total", "Graphs captured again by updates.")
OPEN_UPDATE = _define("gauge", "open_update", "1 while an update is open.")
OPEN_BYTES = _define("gauge", "open_update_bytes", "Bytes that the open update will bring; 0 without one.")
OPEN_RECEIVED = _define("gauge", "open_update_received_bytes", "Bytes of the open update that have arrived.")

# The engine process
STATE = _define(
    "gauge", "engine_state", "1 for the state that the engine is in, 0 for the others.", ("state",)
)
ENGINE_UP = _define("gauge", "engine_up", "1 while the engine process lives and has loaded.")
ENGINE_STARTS = _define("counter", "engine_starts_total", "Engine processes that came to serve.")
ENGINE_DEATHS = _define(
    "counter", "engine_deaths_total", "Engine processes that died without being asked to."
)
ENGINE_STARTED = _define("gauge", "engine_start_time_seconds", "Unix time at which the engine came to serve.")
ENGINE_INFO = _define(
    "gauge",
    "engine_info",
    "1; what the engine is stands in the labels.",
    ("version", "instance_id", "architecture", "dtype", "device", "attention_backend"),
)


@dataclass(slots=True)
class Distribution:
    """A histogram's values. counts: per bucket, the last one above all bounds; not cumulative."""

    counts: list[float]
    total: float = 0.0

    @property
    def num_observed(self) -> float:
        return sum(self.counts)


@dataclass(slots=True)
class Values:
    """Values of all metrics at one moment, by metric and label values."""

    numbers: dict[Metric, dict[Labels, float]] = field(default_factory=dict)
    distributions: dict[Metric, dict[Labels, Distribution]] = field(default_factory=dict)

    def number(self, metric: Metric, *labels: str) -> float:
        """A counter's or gauge's value; 0 if it has none yet."""
        return self.numbers.get(metric, {}).get(labels, 0.0)

    def distribution(self, metric: Metric, *labels: str) -> Distribution:
        """A histogram's values; empty if nothing was observed yet."""
        found = self.distributions.get(metric, {}).get(labels)
        return found or Distribution([0.0] * (len(metric.buckets) + 1))


class Metrics:
    """The values. One thread writes and copies.

    A metric without labels is there from the start, at 0; one with labels appears with its first value.
    """

    def __init__(self) -> None:
        self._values = Values()
        for metric in ALL:
            if metric.kind == "histogram":
                empty = Distribution([0.0] * (len(metric.buckets) + 1))
                self._values.distributions[metric] = {} if metric.labels else {(): empty}
            else:
                self._values.numbers[metric] = {} if metric.labels else {(): 0.0}

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        """Let a counter grow."""
        series = self._values.numbers[metric]
        series[labels] = series.get(labels, 0.0) + amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Give a gauge, or a counter that the engine keeps, its value."""
        self._values.numbers[metric][labels] = value

    def set_all(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """Give a metric these series and no others."""
        self._values.numbers[metric] = dict(values)

    def observe(self, metric: Metric, value: float, labels: Sequence[str] = (), weight: float = 1.0) -> None:
        """Put a value into a histogram; `weight` times."""
        series = self._values.distributions[metric]
        key = tuple(labels)
        distribution = series.get(key)
        if distribution is None:
            distribution = series[key] = Distribution([0.0] * (len(metric.buckets) + 1))
        distribution.counts[bisect_left(metric.buckets, value)] += weight
        distribution.total += value * weight

    def copy(self) -> Values:
        """The values as they are now."""
        return Values(
            {metric: dict(series) for metric, series in self._values.numbers.items()},
            {
                metric: {labels: Distribution(list(d.counts), d.total) for labels, d in series.items()}
                for metric, series in self._values.distributions.items()
            },
        )
