"""The front's books: what the engine tells, counted into metrics. Runs on the front's event loop.

What a snapshot holds is not counted as it comes but read when somebody asks, so a step of the engine costs
nothing here; a sequence costs a few microseconds at its end, a request one at its start.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rollout_engine import __version__
from rollout_engine import messages as m
from rollout_engine.records import UpdateRecord
from rollout_engine.server import metrics as names
from rollout_engine.server.metrics import Metrics, Values

MAX_RECENT = 16
"""Updates whose records are kept for GetEngineInfo."""
STATES = ("serving", "paused", "not_serving")


class Tally:
    """Counts. `on_update` is called with each update's record, beside the counting."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.metrics = Metrics()
        self.recent_updates: deque[UpdateRecord] = deque(maxlen=MAX_RECENT)
        self.on_update: Callable[[UpdateRecord], None] = lambda record: None
        self._clock = clock
        self._newest_version = 0

    # -------------------------------------------------------- requests

    def submitted(self) -> float:
        """A request went to the engine; returns the time that `finished` wants."""
        self.metrics.add(names.REQUESTS)
        return self._clock()

    def finished(self, output: m.SequenceOutput, submitted_at: float) -> None:
        """The last output of a sequence came."""
        metrics, record = self.metrics, output.record
        metrics.add(names.SEQUENCES, 1, output.finish_reason)
        if record is None or not record.versions:
            return
        metrics.observe(names.FIRST_TOKEN, max(0.0, record.first_token_at - submitted_at))
        live = output.weight_version
        metrics.observe(names.SEQUENCE_STALENESS, max(0, live - record.versions[0][0]))
        num_tokens = 0
        for version, count in record.versions:
            num_tokens += count
            metrics.observe(names.TOKEN_STALENESS, max(0, live - version), weight=count)
        if output.finish_reason not in ("stop", "length"):
            return  # cut off from outside: how long it took says nothing
        now = self._clock()
        metrics.observe(names.SEQUENCE_SECONDS, now - submitted_at)
        metrics.observe(names.SEQUENCE_TOKENS, num_tokens)
        if num_tokens > 1:
            metrics.observe(names.PER_TOKEN, max(0.0, now - record.first_token_at) / (num_tokens - 1))

    def errored(self, kind: str, reason: str) -> None:
        """A call, or an item of a batch, was answered with an error."""
        self.metrics.add(names.ERRORS, 1, kind, reason)

    def streams_open(self, kind: str, num: int) -> None:
        """So many streams of this kind are open now."""
        self.metrics.set(names.STREAMS, num, kind)

    # -------------------------------------------------------- updates

    def update_ended(self, record: UpdateRecord) -> None:
        metrics = self.metrics
        metrics.add(names.UPDATES, 1, record.path, record.staging, record.end, record.reason)
        self._newest_version = max(self._newest_version, record.next_version)
        if record.end == "committed":
            metrics.add(names.UPDATE_BYTES, record.num_bytes, record.path)
            for stage, seconds in record.seconds.items():
                metrics.observe(names.STAGE_SECONDS, seconds, (record.path, record.staging, stage))
        for settled in ("aborted", "recomputed", "kept"):
            if count := getattr(record, f"num_{settled}"):
                metrics.add(names.SETTLED, count, settled)
        metrics.add(names.RECAPTURES, record.graphs_recaptured)
        self.recent_updates.append(record)
        self.on_update(record)

    # -------------------------------------------------------- the engine process

    def engine_ready(self, info: m.EngineInfo) -> None:
        """An engine process has loaded and serves."""
        labels = (
            __version__,
            info.instance_id,
            info.architecture,
            info.dtype,
            info.device,
            info.attention_backend,
        )
        self.metrics.set_all(names.ENGINE_INFO, {labels: 1.0})
        self.metrics.set(names.ENGINE_UP, 1)
        self.metrics.set(names.ENGINE_STARTED, time.time())
        self.metrics.add(names.ENGINE_STARTS)

    def engine_gone(self, *, asked: bool) -> None:
        """The engine process is gone; asked: it was told to go."""
        self.metrics.set(names.ENGINE_UP, 0)
        if not asked:
            self.metrics.add(names.ENGINE_DEATHS)

    # -------------------------------------------------------- reading

    def values(self, snapshot: m.Snapshot | None) -> Values:
        """All metrics as they are now. snapshot: the engine's last; None before the first."""
        if snapshot is not None:
            self._read(snapshot)
        return self.metrics.copy()

    def _read(self, snapshot: m.Snapshot) -> None:
        work = snapshot.work
        numbers = {
            names.GENERATED_TOKENS: snapshot.num_generated_tokens,
            names.PROMPT_TOKENS: work.num_prompt_tokens,
            names.CACHED_TOKENS: work.num_cached_tokens,
            names.PREFIX_LOOKUPS: work.num_admitted,
            names.PREFIX_HITS: work.num_prefix_hits,
            names.PREEMPTIONS: work.num_preemptions,
            names.RUNNING: snapshot.num_running,
            names.WAITING: snapshot.num_waiting,
            names.PAGES: snapshot.num_total_pages,
            names.FREE_PAGES: snapshot.num_free_pages,
            names.CACHED_PAGES: snapshot.num_cached_pages,
            names.WEIGHT_VERSION: snapshot.weight_version,
            names.COMMIT_SEQUENCE: snapshot.commit_sequence,
            names.OPEN_UPDATE: bool(snapshot.open_update_id),
            names.OPEN_BYTES: snapshot.total_bytes,
            names.OPEN_RECEIVED: snapshot.received_bytes,
        }
        for metric, value in numbers.items():
            self.metrics.set(metric, value)
        newest = max(self._newest_version, snapshot.weight_version, snapshot.open_update_version)
        self._newest_version = newest
        self.metrics.set(names.VERSIONS_BEHIND, newest - snapshot.weight_version)
        held = snapshot.adapters
        self.metrics.set_all(names.ADAPTER_VERSION, {(one.name,): float(one.version) for one in held})
        self.metrics.set_all(names.ADAPTER_STALE, {(one.name,): float(one.stale) for one in held})
        self.metrics.set_all(names.PASSES, {(runner,): count for runner, count in work.passes.items()})
        self.metrics.set_all(names.STATE, {(state,): float(state == snapshot.status) for state in STATES})
