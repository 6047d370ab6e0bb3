"""PendingStep: a forward pass that was launched, and what it will give back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rollout_engine.batch.schedule import ScheduleBatch, StepResult
from rollout_engine.runner.sampler import NO_TOKEN, Sampled


@dataclass(slots=True)
class PendingStep:
    """The results of a pass on their way to the host.

    The copies were enqueued when this was made, behind the pass itself; `result` waits for them and for
    nothing that was launched later.

    Args:
        sampled: of the rows of batch.samples, on the device; None where nothing is sampled.
        prompt_scores: log-probabilities of all prompt targets of the step, [targets] float32, or None.
        hidden: captured hidden states, [rows, D], or None.
    """

    batch: ScheduleBatch
    sampled: Sampled | None = None
    prompt_scores: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    _fetched: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _ready: torch.cuda.Event | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        wanted = {"scores": self.prompt_scores}
        wanted["hidden"] = None if self.hidden is None else self.hidden.float()
        if self.sampled is not None:
            wanted |= self.sampled.parts()
        for name, tensor in wanted.items():
            if tensor is not None:
                self._fetched[name] = tensor.to("cpu", non_blocking=True)
        if any(tensor is not None and tensor.device.type == "cuda" for tensor in wanted.values()):
            self.mark()

    def mark(self) -> None:
        """Let `result` wait for all that the current stream holds, also where nothing is given back."""
        if self._ready is None:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record()

    def result(self) -> StepResult:
        """Wait for the pass, and return what it gave."""
        if self._ready is not None:
            self._ready.synchronize()
        result = StepResult()
        if self.hidden is not None:
            result.hidden_states = [row.tobytes() for row in self._fetched["hidden"].numpy()]
        if self.prompt_scores is not None:
            values, done = self._fetched["scores"].tolist(), 0
            for row in self.batch.prompt_logprobs:
                result.prompt_logprobs.append(values[done : done + len(row.targets)])
                done += len(row.targets)
        if self.sampled is not None:
            self._fill_sampled(result)
        return result

    def _fill_sampled(self, result: StepResult) -> None:
        fetched = self._fetched
        if "packed" in fetched:
            packed, split = fetched["packed"], 8 * len(self.batch.samples)
            ids, logprobs = packed[:split].view(torch.int64), packed[split:].view(torch.float32)
        else:
            ids, logprobs = fetched["token_ids"], fetched["logprobs"]
        result.token_ids = ids.tolist()
        result.logprobs = logprobs.tolist()
        result.finite = [token_id != NO_TOKEN for token_id in result.token_ids]
        result.top_logprobs = [[] for _ in self.batch.samples]
        if "top_ids" not in fetched:
            return
        rows = zip(fetched["top_ids"].tolist(), fetched["top_logprobs"].tolist(), strict=True)
        for i, (top_ids, values) in enumerate(rows):
            k = self.batch.samples[i].params.top_logprobs
            if result.finite[i]:
                result.top_logprobs[i] = list(zip(top_ids[:k], values[:k], strict=True))
