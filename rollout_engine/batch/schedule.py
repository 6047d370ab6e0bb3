"""ScheduleBatch: what the scheduler decided for one forward pass, in plain Python lists. No torch.

Rows are sequences. A row's tokens of this step are contiguous in the packed lists (`input_ids`,
`positions`, `out_cache_loc`), rows in order. KV valid for row i after the step: `[0, seq_lens[i])`;
tokens computed in the step: `[seq_lens[i] - extend_lens[i], seq_lens[i])`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from rollout_engine.sampling import SamplingParams
from weight_updater.adapters import HeldAdapter


class ForwardMode(Enum):
    """What kind of forward pass a batch is."""

    EXTEND = auto()  # prefill: one or more tokens for each row
    DECODE = auto()  # exactly one token for each row, all of them sampled
    MIXED = auto()  # prefill chunks and decode rows in one pass
    IDLE = auto()  # no row; keeps collectives of other ranks in step
    SPLIT_PREFILL = auto()  # prefill a few layers at a time

    def is_extend(self) -> bool:
        """True where a row may bring more than one token."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_split_prefill(self) -> bool:
        return self is ForwardMode.SPLIT_PREFILL

    def is_cuda_graph(self) -> bool:
        """True for the modes that a decode graph can replay."""
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)


class CaptureHiddenMode(Enum):
    """Which hidden states a forward pass returns."""

    NULL = auto()
    LAST = auto()  # of each sampled position
    FULL = auto()  # of every token of the step


@dataclass(slots=True)
class SampleRow:
    """How to sample the next token of one row.

    row: index of the row. position: index in the whole sequence (prompt + output) of the token to be
    drawn; with seed and sample_index it fixes the draw. prompt_ids and output_ids are the sequence's own
    lists (for penalties), read only. allowed: when given, EOS and stop ids are masked (min_tokens).
    """

    row: int
    params: SamplingParams
    seed: int
    sample_index: int
    position: int
    prompt_ids: list[int]
    output_ids: list[int]
    forbidden_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class PromptLogprobRow:
    """Log-probabilities wanted for prompt tokens whose predecessors are in this step.

    For packed token offsets [start, stop) of the row's tokens of this step (relative to the row), the
    logits at offset j score token `targets[j - start]`.
    """

    row: int
    start: int
    stop: int
    targets: list[int]
    params: SamplingParams


@dataclass(slots=True)
class ScheduleBatch:
    """One forward pass. Slots: an undeclared attribute is an error."""

    forward_mode: ForwardMode
    sequence_ids: list[int] = field(default_factory=list)  # [B] the scheduler's own ids
    req_pool_indices: list[int] = field(default_factory=list)  # [B] rows of req_to_token_pool
    seq_lens: list[int] = field(default_factory=list)  # [B] KV length after this step
    extend_lens: list[int] = field(default_factory=list)  # [B] tokens of this step
    input_ids: list[int] = field(default_factory=list)  # [T] packed
    positions: list[int] = field(default_factory=list)  # [T]
    out_cache_loc: list[int] = field(default_factory=list)  # [T] KV token slots (page * page_size + offset)
    # Rows of req_to_token_pool to fill before the pass: (pool index, first position, token slots).
    slot_writes: list[tuple[int, int, list[int]]] = field(default_factory=list)
    samples: list[SampleRow] = field(default_factory=list)  # rows whose last position is sampled
    prompt_logprobs: list[PromptLogprobRow] = field(default_factory=list)
    adapters: list[HeldAdapter | None] = field(default_factory=list)  # [B], or empty: no row has one
    weight_version: int = 0  # stamped at launch
    commit_sequence: int = 0  # stamped at launch

    # One-shot overrides: consumed and reset by ForwardBatch.init_new.
    seq_lens_cpu_cache: list[int] | None = None
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    return_hidden_states_before_norm: bool = False

    def adapter(self, row: int) -> HeldAdapter | None:
        """What the row goes through; None: the base weights alone."""
        return self.adapters[row] if self.adapters else None

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(slots=True)
class StepResult:
    """What a forward pass gave back, on the host. Lists follow `ScheduleBatch.samples` (S rows)."""

    token_ids: list[int] = field(default_factory=list)  # [S]
    logprobs: list[float] = field(default_factory=list)  # [S]
    finite: list[bool] = field(default_factory=list)  # [S] False: the row's logits were not finite
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # [S][k], most likely first
    prompt_logprobs: list[list[float]] = field(default_factory=list)  # like ScheduleBatch.prompt_logprobs
    # LAST: one float32 row of bytes per sample; FULL: one per token of the step; else empty.
    hidden_states: list[bytes] = field(default_factory=list)
