"""What a sequence gives: tokens, and what sampled each of them. No torch."""

from __future__ import annotations

import msgspec

from rollout_engine.records import SequenceRecord


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens from `start` (index in the completion) on were sampled by these weights."""

    start: int
    weight_version: int
    commit_sequence: int
    adapter: str = ""  # over those weights
    adapter_version: int = 0

    @property
    def label(self) -> tuple[int, int, str, int]:
        """What sampled; spans that follow each other differ in it."""
        return self.weight_version, self.commit_sequence, self.adapter, self.adapter_version


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one completion since its previous output.

    finish_reason: "" (running), stop, length, abort, deadline or error.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: str = ""
    error: str = ""
    top_logprobs: list[list[tuple[int, float]]] = []
    prompt_logprobs: list[float] | None = None  # on the first output when asked for
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    hidden_states: list[bytes] = []
    weight_version: int = 0
    record: SequenceRecord | None = None  # on the last output
