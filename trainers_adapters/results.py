"""What the Rollout service answers, as plain Python. No torch, no protobuf."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from typing import Any

from trainers_adapters.errors import RollsyncError


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens from `start` up to the next span's start were sampled by these weights."""

    start: int
    weight_version: int
    commit_sequence: int
    adapter: str = ""  # that sampled over those weights; "": none
    adapter_version: int = 0

    @property
    def label(self) -> tuple[int, int, str, int]:
        """What sampled; spans that follow each other differ in it."""
        return self.weight_version, self.commit_sequence, self.adapter, self.adapter_version


def spans_of_tokens(spans: tuple[VersionSpan, ...], num_tokens: int) -> list[VersionSpan]:
    """The span of each of the `num_tokens` tokens from the first span's start on."""
    if not spans:
        return []
    ends = [*(span.start for span in spans[1:]), spans[0].start + num_tokens]
    return [span for span, end in zip(spans, ends, strict=True) for _ in range(span.start, end)]


def versions_of_tokens(spans: tuple[VersionSpan, ...], num_tokens: int) -> list[int]:
    """The weight version of each of the `num_tokens` tokens from the first span's start on."""
    return [span.weight_version for span in spans_of_tokens(spans, num_tokens)]


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion, or (from generate_stream) the part of it since the previous message.

    logprobs: of token_ids[i] given all before it, in `logprob_mode`. text is empty unless asked for.
    finish_reason: stop, length, abort, deadline, error, or "" while more will follow.
    hidden_states: float32 rows, one per token, when asked for.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    text: str = ""
    error: str = ""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    logprob_mode: str = "processed"
    weight_version: int = 0
    hidden_states: list[list[float]] = field(default_factory=list)

    @property
    def weight_versions(self) -> list[int]:
        """For each of token_ids, the weight version that sampled it."""
        return versions_of_tokens(self.spans, len(self.token_ids))

    @property
    def adapter_versions(self) -> list[int]:
        """For each of token_ids, the version of the adapter that sampled it; 0 where none did."""
        return [span.adapter_version for span in spans_of_tokens(self.spans, len(self.token_ids))]


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One finished completion of a batch, or why one of its requests was refused."""

    request_index: int
    completion: Completion | None = None
    error: RollsyncError | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of the tokens of one sequence, from its second token on."""

    logprobs: list[float]
    spans: tuple[VersionSpan, ...]

    @property
    def weight_versions(self) -> list[int]:
        return versions_of_tokens(self.spans, len(self.logprobs))


@dataclass(frozen=True, slots=True)
class Aborted:
    """What Abort found."""

    aborted: list[str]
    unknown: list[str]


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter that an engine holds.

    stale: other base weights are live than those it was pushed over, so no request may use it until it is
        pushed again. num_sequences: that use it now, running or waiting.
    """

    name: str
    version: int
    rank: int
    base_weight_version: int
    stale: bool
    num_sequences: int


@dataclass(frozen=True, slots=True)
class RemovedAdapter:
    """version: that was held. num_aborted: sequences that ended."""

    version: int
    num_aborted: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """A snapshot. status: unknown, serving, not_serving or paused."""

    status: str
    not_serving_reason: str
    weight_version: int
    commit_sequence: int
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_cached_pages: int
    num_total_pages: int
    open_update_id: str
    open_update_state: str
    open_update_received_bytes: int
    open_update_total_bytes: int
    num_steps: int
    num_generated_tokens: int
    paused_by: str
    released_tags: list[str]
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    adapters: list[AdapterState] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UpdateSummary:
    """How an update ended. end: committed, rolled_back, refused or torn; ended_at: Unix time.

    seconds: by stage (whole, begin, transfer, verify, wait, pause, commit, write, finalise, recapture).
    """

    update_id: str
    path: str
    staging: str
    end: str
    reason: str
    message: str
    weight_version: int
    num_bytes: int
    seconds: dict[str, float]
    ended_at: float
    adapter: str = ""
    adapter_version: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is: its model, its configuration, its memory in bytes."""

    instance_id: str
    rollsync_version: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    eos_token_ids: list[int]
    num_weight_tensors: int
    weight_bytes: int
    page_size: int
    attention_backend: str
    model_path: str
    weights_path: str
    weight_version: int
    max_running_requests: int
    weights_address: int
    kv_capacity: dict[str, int]
    forward_counts: dict[str, int]
    state: EngineState
    recent_updates: tuple[UpdateSummary, ...] = ()
    max_adapters: int = 0
    max_adapter_rank: int = 0
    adapter_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """needs_update: the weights' memory is back, but a full update must commit before it serves."""

    resumed_bytes: int
    needs_update: bool


@dataclass(frozen=True, slots=True)
class Checksums:
    """Checksums of what lies in the slots now; `folded` is one over all of them."""

    by_name: dict[str, int]
    folded: int
    weight_version: int
    commit_sequence: int


@dataclass(frozen=True, slots=True)
class LiveWeight:
    """The bytes of one live tensor, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray
    weight_version: int

    def tensor(self) -> Any:
        """A torch.Tensor over `data` (borrowed, not copied). Imports torch."""
        import torch

        return torch.frombuffer(self.data, dtype=getattr(torch, self.dtype)).view(self.shape)


def float32_rows(data: bytes, num_rows: int) -> list[list[float]]:
    """Rows of a little-endian float32 matrix."""
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    width = len(values) // num_rows if num_rows else 0
    return [values[row * width : (row + 1) * width].tolist() for row in range(num_rows)]
