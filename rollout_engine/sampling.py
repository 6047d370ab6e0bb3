"""How tokens are drawn: the parameters of one request, checked once at the edge. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rollout_engine.errors import EngineError, Reason

LogprobMode = Literal["processed", "raw"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request. Defaults sample from the whole distribution at temperature 1.

    max_tokens None means up to the context length. seed None is replaced by a fresh one at the edge,
    so that the engine always has one. A draw depends only on (seed, sample index, position).
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: LogprobMode = "processed"
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check(self, vocab_size: int) -> None:
        """Raise EngineError(INVALID_REQUEST) naming the first field that cannot be right."""
        for field, ok, allowed in (
            ("n", 1 <= self.n <= 1024, "in [1, 1024]"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, ">= 0"),
            ("min_tokens", self.min_tokens >= 0, ">= 0"),
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "finite and >= 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k >= -1, "-1 or 0 (off), or >= 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            (
                "repetition_penalty",
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
                "finite and > 0",
            ),
            ("presence_penalty", math.isfinite(self.presence_penalty), "finite"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "finite"),
            ("top_logprobs", 0 <= self.top_logprobs <= vocab_size, f"in [0, {vocab_size}]"),
            (
                "stop_token_ids",
                all(0 <= i < vocab_size for i in self.stop_token_ids),
                f"in [0, {vocab_size})",
            ),
            (
                "logit_bias",
                all(0 <= i < vocab_size and not math.isnan(b) and b != math.inf for i, b in self.logit_bias),
                f"token ids in [0, {vocab_size}) with a bias that is finite or -inf",
            ),
            ("stop", all(self.stop), "non-empty strings"),
        ):
            if not ok:
                raise EngineError(
                    Reason.INVALID_REQUEST,
                    f"sampling.{field} is {getattr(self, field)!r}; it must be {allowed}",
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise EngineError(
                Reason.INVALID_REQUEST,
                f"sampling.min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}; "
                f"lower the one or raise the other",
            )
