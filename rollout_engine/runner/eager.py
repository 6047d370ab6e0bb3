"""EagerRunner: a forward pass call by call, and what is read from its hidden states.

T = packed tokens, S = sampled rows, D = hidden size, V = vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollout_engine.batch.forward import GREEDY_TEMPERATURE, ForwardBatch
from rollout_engine.batch.schedule import CaptureHiddenMode, PromptLogprobRow, ScheduleBatch
from rollout_engine.models.layers import Rope
from rollout_engine.runner.pending import PendingStep
from rollout_engine.runner.sampler import sample


class EagerRunner:
    """Runs any ForwardBatch without a graph.

    Args:
        model: see models/llama.py for the calls it takes.
        last_tokens: [pool rows] int64, where sampled tokens are noted for the next pass.
        max_prompt_logits_rows: rows of logits that prompt log-probabilities hold at once.
    """

    def __init__(self, model: Any, last_tokens: torch.Tensor, max_prompt_logits_rows: int) -> None:
        self.model = model
        self.last_tokens = last_tokens
        self.max_prompt_logits_rows = max_prompt_logits_rows

    def run(self, batch: ScheduleBatch, forward: ForwardBatch) -> PendingStep:
        """Plan, all layers, sampling."""
        forward.attn_backend.plan(forward)
        hidden, rope = self.model.embed(forward.input_ids, forward.positions)
        hidden = self.model.run_layers(hidden, rope, forward, 0, self.model.config.num_layers)
        return self.finish(batch, forward, hidden)

    def finish(self, batch: ScheduleBatch, forward: ForwardBatch, unnormed: torch.Tensor) -> PendingStep:
        """From the last layer's output [T, D] (or more: padding) to what the step gives back."""
        unnormed = unnormed[: forward.num_tokens]
        every_token = batch.prompt_logprobs or forward.capture_hidden_mode is CaptureHiddenMode.FULL
        sampled_unnormed = unnormed.index_select(0, forward.logits_indices)
        if every_token:
            hidden = self.model.norm(unnormed)
            last = hidden.index_select(0, forward.logits_indices)
        else:
            hidden = last = self.model.norm(sampled_unnormed)
        captured = scores = sampled = None
        if forward.capture_hidden_mode is not CaptureHiddenMode.NULL:
            full = forward.capture_hidden_mode is CaptureHiddenMode.FULL
            if forward.return_hidden_states_before_norm:
                captured = unnormed if full else sampled_unnormed
            else:
                captured = hidden if full else last
        if batch.prompt_logprobs:
            scores = self._prompt_scores(batch, forward, hidden)
        if batch.samples:
            logits = self.model.compute_logits(last)
            sampled = sample(logits, forward.sampling_info, forward.sampled_pool_indices, self.last_tokens)
        return PendingStep(batch, sampled, scores, captured)

    def _prompt_scores(
        self, batch: ScheduleBatch, forward: ForwardBatch, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Log-probability of each target, rows in order, [targets] float32.

        `processed` ones are at the request's temperature alone.
        """
        starts = [0]
        for length in forward.extend_lens_cpu:
            starts.append(starts[-1] + length)
        places = [starts[row.row] + i for row in batch.prompt_logprobs for i in range(row.start, row.stop)]
        targets = [target for row in batch.prompt_logprobs for target in row.targets]
        temperatures = [_prompt_temperature(row) for row in batch.prompt_logprobs for _ in row.targets]
        at, wanted, divisors = forward.sampling_info.packer.put(
            [
                np.array(places, dtype=np.int64),
                np.array(targets, dtype=np.int64),
                np.array(temperatures, dtype=np.float32),
            ]
        )
        scores = []
        for first in range(0, len(places), self.max_prompt_logits_rows):
            block = slice(first, first + self.max_prompt_logits_rows)
            logits = self.model.compute_logits(hidden.index_select(0, at[block])).float()
            logits = logits.div_(divisors[block, None])
            found = logits.gather(1, wanted[block, None]) - torch.logsumexp(logits, dim=-1, keepdim=True)
            scores.append(found[:, 0])
        return torch.cat(scores)


def _prompt_temperature(row: PromptLogprobRow) -> float:
    if row.params.logprobs == "raw" or row.params.temperature == 0.0:
        return GREEDY_TEMPERATURE
    return row.params.temperature


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
    def finish(self) -> PendingStep:
        """Sample. Raises RuntimeError before all layers have run."""
        if not self.done or self._hidden is None:
            raise RuntimeError(
                f"split prefill stands at layer {self.next_layer} of {self.runner.model.config.num_layers}: "
                "advance() to the end before finish()"
            )
        return self.runner.finish(self.batch, self.forward, self._hidden)
