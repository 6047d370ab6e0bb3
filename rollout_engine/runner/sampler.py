"""From logits to token ids and log-probabilities, for all sampled rows of a step at once.

In this order: penalties (repetition over prompt and output; presence and frequency over output), logit
bias, forbidden ids, temperature, then truncation: top_k, top_p over what top_k kept, min_p relative to the
most likely token. Ties are kept in the order of ids. `processed` log-probabilities are log_softmax over
what is kept after all of it; `raw` ones are log_softmax of the model's logits. A greedy row (temperature
0) takes the most likely token; its processed log-probabilities are at temperature 1, not truncated.

S = sampled rows, V = vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollout_engine.batch.forward import SamplingInfo
from rollout_engine.batch.packing import Packer
from rollout_engine.ops.fused import kernels_for
from rollout_engine.runner.truncation import truncate

BLOCK = 256
"""Vocabulary entries summed first when drawing: two short searches instead of one pass in float64."""

NO_TOKEN = -1
"""Token id of a row whose logits were not finite; its log-probability is NaN."""


@dataclass(slots=True)
class Sampled:
    """On the device; S rows. A row whose logits are not finite has token id NO_TOKEN and a NaN.

    packed: token ids (int64) and log-probabilities (float32) as views of one buffer, where they are.
    """

    token_ids: torch.Tensor  # [S] int64
    logprobs: torch.Tensor  # [S] float32
    top_ids: torch.Tensor | None = None  # [S, k] int64, most likely first
    top_logprobs: torch.Tensor | None = None  # [S, k] float32
    packed: torch.Tensor | None = None  # [12 * S] uint8

    def parts(self) -> dict[str, torch.Tensor | None]:
        """What has to reach the host, by name."""
        top = {"top_ids": self.top_ids, "top_logprobs": self.top_logprobs}
        if self.packed is not None:
            return {"packed": self.packed, **top}
        return {"token_ids": self.token_ids, "logprobs": self.logprobs, **top}


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    info: SamplingInfo,
    pool_indices: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
) -> Sampled:
    """Draw one token for each row. A row's result depends on its own logits and parameters alone.

    On a GPU nothing here waits for the device.

    Args:
        logits: [S, V], any float dtype, not changed.
        pool_indices, last_tokens: where each row's token is noted for the next pass, if it is: [S] int64,
            and a tensor of int64 that they index.
    """
    if info.untouched and last_tokens is not None and kernels_for(logits) is not None:
        from rollout_engine.ops.sampling_kernels import draw

        assert pool_indices is not None
        packed = draw(
            logits,
            info.temperatures,
            info.draws,
            info.greedy,
            info.raw,
            pool_indices,
            last_tokens,
            info.any_raw and not info.plain,
        )
        S = logits.shape[0]
        return Sampled(packed[: 8 * S].view(torch.int64), packed[8 * S :].view(torch.float32), packed=packed)
    sampled = _sample(logits, info)
    if last_tokens is not None and pool_indices is not None:
        last_tokens.index_copy_(0, pool_indices, sampled.token_ids.clamp_min(0))
    return sampled


def _sample(logits: torch.Tensor, info: SamplingInfo) -> Sampled:
    raw = logits.float()
    low, high = raw.amin(dim=-1), raw.amax(dim=-1)  # on a CPU ten times as fast as aminmax
    finite = torch.isfinite(low) & torch.isfinite(high)  # NaN propagates through both
    all_finite = _all_true(finite)
    if not all_finite:
        raw = torch.where(finite[:, None], raw, 0.0)
    processed = _processed_logits(raw, info)
    logprobs = torch.log_softmax(processed, dim=-1)
    # Bias and forbidden ids may leave no token: log_softmax of nothing but -inf is NaN.
    if processed is not raw:
        finite = finite & ~torch.isnan(logprobs[:, 0])
        all_finite = _all_true(finite)

    token_ids = _choose(processed, logprobs, info)
    reported = logprobs
    if info.any_raw and processed is not raw:
        reported = torch.where(info.raw[:, None], torch.log_softmax(raw, dim=-1), logprobs)
    chosen = reported.gather(1, token_ids[:, None])[:, 0]
    if not all_finite:
        token_ids = torch.where(finite, token_ids, NO_TOKEN)
        chosen = torch.where(finite, chosen, torch.nan)
    return Sampled(token_ids, chosen, *_top(reported, info.num_top_logprobs))


def _all_true(flags: torch.Tensor) -> bool:
    """Whether all are True, as far as that is worth knowing: False on a GPU, which must not be waited for."""
    return flags.device.type == "cpu" and bool(flags.all())


def _processed_logits(raw: torch.Tensor, info: SamplingInfo) -> torch.Tensor:
    """[S, V] float32, -inf where a token cannot be drawn; `raw` itself where nothing changes it."""
    logits = raw
    if any(row.params.has_penalties for row in info.rows):
        logits = _penalised(logits.clone(), info)
    if any(row.params.logit_bias or row.forbidden_ids for row in info.rows):
        logits = _biased(logits.clone() if logits is raw else logits, info)
    if not info.plain:
        logits = logits / info.temperatures[:, None]
    if info.top_k is not None or info.top_p is not None:
        logits = _truncated(logits, info)
    if info.min_p is not None:
        # p < min_p * max p, in logits; log(0) is -inf: off.
        floor = logits.amax(dim=-1, keepdim=True) + info.min_p[:, None].log()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _flat_ids(lists: list[list[int]], packer: Packer) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, id) pairs of lists of ids."""
    row_of = np.repeat(np.arange(len(lists)), [len(ids) for ids in lists])
    rows, ids = packer.put([row_of, np.array([i for ids in lists for i in ids], dtype=np.int64)])
    return rows, ids


def _penalised(logits: torch.Tensor, info: SamplingInfo) -> torch.Tensor:
    """Apply repetition, presence and frequency penalties in place, to rows that have them only."""
    chosen = [row for row in info.rows if row.params.has_penalties]
    places = np.array([i for i, row in enumerate(info.rows) if row.params.has_penalties], dtype=np.int64)
    factors = np.array(
        [
            [row.params.repetition_penalty, row.params.frequency_penalty, row.params.presence_penalty]
            for row in chosen
        ],
        dtype=np.float32,
    )
    at, columns = info.packer.put([places, factors])
    repetition, frequency, presence = columns[:, 0:1], columns[:, 1:2], columns[:, 2:3]
    part = logits.index_select(0, at)
    counts = torch.zeros(len(chosen), logits.shape[1], dtype=torch.float32, device=logits.device)
    output_ids = _flat_ids([row.output_ids for row in chosen], info.packer)
    counts.index_put_(output_ids, counts.new_ones(()), accumulate=True)
    seen = counts > 0
    seen.index_put_(_flat_ids([row.prompt_ids for row in chosen], info.packer), seen.new_ones(()))
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(seen, repeated, part)
    part -= counts * frequency
    part -= (counts > 0) * presence
    logits.index_copy_(0, at, part)
    return logits


def _biased(logits: torch.Tensor, info: SamplingInfo) -> torch.Tensor:
    """Add logit biases (repeated ids add up) and mask forbidden ids, in place."""
    biases = [b for row in info.rows for _, b in row.params.logit_bias]
    if biases:
        places = _flat_ids([[i for i, _ in row.params.logit_bias] for row in info.rows], info.packer)
        (values,) = info.packer.put([np.array(biases, dtype=np.float32)])
        logits.index_put_(places, values, accumulate=True)
    forbidden = _flat_ids([list(row.forbidden_ids) for row in info.rows], info.packer)
    logits.index_put_(forbidden, logits.new_full((), -torch.inf))
    return logits


def _truncated(logits: torch.Tensor, info: SamplingInfo) -> torch.Tensor:
    """Mask what top_k and top_p drop, in the rows that ask for one of them."""
    at = info.truncated
    assert at is not None, "some row has top_k or top_p"
    top_k = None if info.top_k is None else info.top_k.index_select(0, at)
    top_p = None if info.top_p is None else info.top_p.index_select(0, at)
    return logits.index_copy(0, at, truncate(logits.index_select(0, at), top_k, top_p))


def _choose(processed: torch.Tensor, logprobs: torch.Tensor, info: SamplingInfo) -> torch.Tensor:
    """Token ids [S] int64: the first most likely one of greedy rows, a draw for the others."""
    if info.all_greedy:
        return processed.argmax(dim=-1)
    drawn = inverse_cdf(logprobs.exp(), info.draws)
    if not info.any_greedy:
        return drawn
    return torch.where(info.greedy, processed.argmax(dim=-1), drawn)


def inverse_cdf(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative probability exceeds `draws` times the total, sums in float64.

    probs: [S, V] float32, not necessarily of sum 1. draws: [S] float64 in [0, 1). An index of probability
    0 is never returned (a row of zeros or NaN gives some index in range). Returns [S] int64.
    """
    S, V = probs.shape
    if V % BLOCK:
        probs = torch.nn.functional.pad(probs, (0, BLOCK - V % BLOCK))
    blocks = probs.view(S, -1, BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [S, V / BLOCK]
    goal = draws[:, None] * sums[:, -1:]
    block = _first_above(sums, goal)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_min(0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(S, 1, BLOCK))[:, 0].double()
    cumulative = before + inside.cumsum(dim=-1)
    offset = _first_above(cumulative, goal)
    # Rounding may put the goal past the end of the block, or on an entry of probability 0 at its end.
    positive = torch.arange(BLOCK, device=probs.device).masked_fill(inside <= 0, -1)
    last = positive.amax(dim=-1, keepdim=True).clamp_min(0)
    offset = torch.minimum(offset, last)
    return (block * BLOCK + offset)[:, 0].clamp(0, V - 1)


def _first_above(cumulative: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """First column with cumulative > goal, [S, 1] int64; the last column where there is none."""
    found = torch.searchsorted(cumulative, goal, right=True)
    return found.clamp_max(cumulative.shape[1] - 1)


def _top(logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Ids and values of the k most likely tokens, ties by id, each [S, k]."""
    if not k:
        return None, None
    values, ids = logprobs.topk(k, dim=-1)
    # A tie at the edge needs a full sort; a GPU is not asked whether there is one.
    if logprobs.device.type != "cpu" or bool((logprobs >= values[:, -1:]).sum(dim=-1).max() > k):
        values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        return ids[:, :k], values[:, :k]
    order = ids.argsort(dim=-1)  # by id first, then a stable sort by value
    ids, values = ids.gather(1, order), values.gather(1, order)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), values
