"""EagerRunner: a forward pass call by call, and what is read from its hidden states.

T = packed tokens, S = sampled rows, D = hidden size, V = vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rollout_engine.batch.forward import GREEDY_TEMPERATURE, ForwardBatch
from rollout_engine.batch.schedule import CaptureHiddenMode, PromptLogprobRow, ScheduleBatch, StepResult
from rollout_engine.models.layers import Rope
from rollout_engine.runner.sampler import Sampled, sample


class EagerRunner:
    """Runs any ForwardBatch without a graph.

    Args:
        model: see models/llama.py for the calls it takes.
        max_prompt_logits_rows: rows of logits that prompt log-probabilities hold at once.
    """

    def __init__(self, model: Any, max_prompt_logits_rows: int) -> None:
        self.model = model
        self.max_prompt_logits_rows = max_prompt_logits_rows

    def run(self, batch: ScheduleBatch, forward: ForwardBatch) -> StepResult:
        """Plan, all layers, sampling."""
        forward.attn_backend.plan(forward)
        hidden, rope = self.model.embed(forward.input_ids, forward.positions)
        hidden = self.model.run_layers(hidden, rope, forward, 0, self.model.config.num_layers)
        return self.finish(batch, forward, hidden)

    def finish(self, batch: ScheduleBatch, forward: ForwardBatch, unnormed: torch.Tensor) -> StepResult:
        """From the last layer's output [T, D] to what the step gives back, on the host."""
        result = StepResult()
        every_token = batch.prompt_logprobs or forward.capture_hidden_mode is CaptureHiddenMode.FULL
        sampled_unnormed = unnormed.index_select(0, forward.logits_indices)
        if every_token:
            hidden = self.model.norm(unnormed)
            last = hidden.index_select(0, forward.logits_indices)
        else:
            hidden = last = self.model.norm(sampled_unnormed)
        if forward.capture_hidden_mode is not CaptureHiddenMode.NULL:
            full = forward.capture_hidden_mode is CaptureHiddenMode.FULL
            if forward.return_hidden_states_before_norm:
                captured = unnormed if full else sampled_unnormed
            else:
                captured = hidden if full else last
            result.hidden_states = [row.tobytes() for row in captured.float().cpu().numpy()]
        if batch.prompt_logprobs:
            result.prompt_logprobs = self._prompt_logprobs(batch, forward, hidden)
        if batch.samples:
            _fill_sampled(result, batch, sample(self.model.compute_logits(last), forward.sampling_info))
        return result

    def _prompt_logprobs(
        self, batch: ScheduleBatch, forward: ForwardBatch, hidden: torch.Tensor
    ) -> list[list[float]]:
        """Log-probability of each target; `processed` ones are at the request's temperature alone."""
        starts = [0]
        for length in forward.extend_lens_cpu:
            starts.append(starts[-1] + length)
        wanted = [
            (starts[row.row] + offset, target, _prompt_temperature(row))
            for row in batch.prompt_logprobs
            for offset, target in zip(range(row.start, row.stop), row.targets, strict=True)
        ]
        values: list[float] = []
        for first in range(0, len(wanted), self.max_prompt_logits_rows):
            block = wanted[first : first + self.max_prompt_logits_rows]
            at = torch.tensor([i for i, _, _ in block], device=hidden.device)
            targets = torch.tensor([[target] for _, target, _ in block], device=hidden.device)
            temperatures = torch.tensor([[t] for _, _, t in block], dtype=torch.float32, device=hidden.device)
            logits = self.model.compute_logits(hidden.index_select(0, at)).float().div_(temperatures)
            scores = logits.gather(1, targets) - torch.logsumexp(logits, dim=-1, keepdim=True)
            values.extend(scores[:, 0].tolist())
        lists, done = [], 0
        for row in batch.prompt_logprobs:
            lists.append(values[done : done + len(row.targets)])
            done += len(row.targets)
        return lists


def _prompt_temperature(row: PromptLogprobRow) -> float:
    if row.params.logprobs == "raw" or row.params.temperature == 0.0:
        return GREEDY_TEMPERATURE
    return row.params.temperature


def _fill_sampled(result: StepResult, batch: ScheduleBatch, sampled: Sampled) -> None:
    """Bring what was sampled to the host."""
    result.token_ids = sampled.token_ids.tolist()
    result.logprobs = sampled.logprobs.tolist()
    result.finite = sampled.finite.tolist()
    result.top_logprobs = [[] for _ in batch.samples]
    if sampled.top_ids is None or sampled.top_logprobs is None:
        return
    rows = zip(sampled.top_ids.tolist(), sampled.top_logprobs.tolist(), strict=True)
    for i, (ids, values) in enumerate(rows):
        k = batch.samples[i].params.top_logprobs
        if result.finite[i]:
            result.top_logprobs[i] = list(zip(ids[:k], values[:k], strict=True))


@dataclass(slots=True)
class SplitPrefill:
    """A prefill that is run a few layers at a time, so that decode steps fit in between.

    Until it is done, no other step may write the KV slots of its rows; steps of other rows may run.
    """

    runner: EagerRunner
    batch: ScheduleBatch
    forward: ForwardBatch
    next_layer: int = 0
    _hidden: torch.Tensor | None = None  # [T, D]
    _rope: Rope | None = None

    @property
    def done(self) -> bool:
        return bool(self.next_layer == self.runner.model.config.num_layers)

    @torch.inference_mode()
    def advance(self, num_layers: int) -> bool:
        """Run up to `num_layers` more layers. True when all have run."""
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}; advance by at least one layer")
        model = self.runner.model
        # The attention backend's scratch is shared with steps that ran in between: plan anew.
        self.forward.attn_backend.plan(self.forward)
        if self._hidden is None or self._rope is None:
            self._hidden, self._rope = model.embed(self.forward.input_ids, self.forward.positions)
        stop = min(self.next_layer + num_layers, model.config.num_layers)
        self._hidden = model.run_layers(self._hidden, self._rope, self.forward, self.next_layer, stop)
        self.next_layer = stop
        return self.done

    @torch.inference_mode()
    def finish(self) -> StepResult:
        """Sample. Raises RuntimeError before all layers have run."""
        if not self.done or self._hidden is None:
            raise RuntimeError(
                f"split prefill stands at layer {self.next_layer} of {self.runner.model.config.num_layers}: "
                "advance() to the end before finish()"
            )
        return self.runner.finish(self.batch, self.forward, self._hidden)
