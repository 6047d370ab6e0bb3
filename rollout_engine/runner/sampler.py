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

import torch

from rollout_engine.batch.forward import SamplingInfo
from rollout_engine.batch.schedule import SampleRow
from rollout_engine.runner.random_draw import uniform
from rollout_engine.runner.truncation import truncate

BLOCK = 256
"""Vocabulary entries summed first when drawing: two short searches instead of one pass in float64."""

NO_TOKEN = -1
"""Token id of a row whose logits were not finite; its log-probability is NaN."""


@dataclass(slots=True)
class Sampled:
    """On the device; S rows. `finite` False: token id NO_TOKEN, log-probability NaN."""

    token_ids: torch.Tensor  # [S] int64
    logprobs: torch.Tensor  # [S] float32
    finite: torch.Tensor  # [S] bool
    top_ids: torch.Tensor | None  # [S, k] int64, most likely first
    top_logprobs: torch.Tensor | None  # [S, k] float32


@torch.inference_mode()
def sample(logits: torch.Tensor, info: SamplingInfo) -> Sampled:
    """Draw one token for each row. A row's result depends on its own logits and parameters alone.

    logits: [S, V], any float dtype, not changed.
    """
    raw = logits.float()
    low, high = torch.aminmax(raw, dim=-1)
    finite = torch.isfinite(low) & torch.isfinite(high)  # NaN propagates through aminmax
    all_finite = bool(finite.all())  # SYNC: one bool, so that the common case copies nothing
    if not all_finite:
        raw = torch.where(finite[:, None], raw, 0.0)
    processed = _processed_logits(raw, info)
    logprobs = torch.log_softmax(processed, dim=-1)
    # Bias and forbidden ids may leave no token: log_softmax of nothing but -inf is NaN.
    if processed is not raw:
        finite = finite & ~torch.isnan(logprobs[:, 0])
        all_finite = bool(finite.all())  # SYNC

    token_ids = _choose(processed, logprobs, info)
    reported = logprobs
    if info.any_raw and processed is not raw:
        raw_rows = torch.tensor([row.params.logprobs == "raw" for row in info.rows], device=raw.device)
        reported = torch.where(raw_rows[:, None], torch.log_softmax(raw, dim=-1), logprobs)
    chosen = reported.gather(1, token_ids[:, None])[:, 0]
    if not all_finite:
        token_ids = torch.where(finite, token_ids, NO_TOKEN)
        chosen = torch.where(finite, chosen, torch.nan)
    top_ids, top_logprobs = _top(reported, info.num_top_logprobs)
    return Sampled(token_ids, chosen, finite, top_ids, top_logprobs)


def _processed_logits(raw: torch.Tensor, info: SamplingInfo) -> torch.Tensor:
    """[S, V] float32, -inf where a token cannot be drawn; `raw` itself where nothing changes it."""
    logits = raw
    if any(row.params.has_penalties for row in info.rows):
        logits = _penalised(logits.clone(), info.rows)
    if any(row.params.logit_bias or row.forbidden_ids for row in info.rows):
        logits = _biased(logits.clone() if logits is raw else logits, info.rows)
    if not info.plain:
        logits = logits / info.temperatures[:, None]
    if info.top_k is not None or info.top_p is not None:
        logits = _truncated(logits, info)
    if info.min_p is not None:
        # p < min_p * max p, in logits; log(0) is -inf: off.
        floor = logits.amax(dim=-1, keepdim=True) + info.min_p[:, None].log()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _flat_ids(lists: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, id) pairs of lists of ids."""
    rows = torch.tensor([len(ids) for ids in lists], device=device)
    row_of = torch.repeat_interleave(torch.arange(len(lists), device=device), rows)
    return row_of, torch.tensor([i for ids in lists for i in ids], dtype=torch.int64, device=device)


def _penalised(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Apply repetition, presence and frequency penalties in place, to rows that have them only."""
    chosen = [i for i, row in enumerate(rows) if row.params.has_penalties]
    device, V = logits.device, logits.shape[1]
    params = [rows[i].params for i in chosen]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    at = torch.tensor(chosen, device=device)
    part = logits.index_select(0, at)
    counts = torch.zeros(len(chosen), V, dtype=torch.float32, device=device)
    out_rows, out_ids = _flat_ids([rows[i].output_ids for i in chosen], device)
    counts.index_put_((out_rows, out_ids), torch.ones((), device=device), accumulate=True)
    seen = counts > 0
    seen[_flat_ids([rows[i].prompt_ids for i in chosen], device)] = True
    repetition = column([p.repetition_penalty for p in params])
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(seen, repeated, part)
    part -= counts * column([p.frequency_penalty for p in params])
    part -= (counts > 0) * column([p.presence_penalty for p in params])
    logits.index_copy_(0, at, part)
    return logits


def _biased(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Add logit biases (repeated ids add up) and mask forbidden ids, in place."""
    row_of, ids = _flat_ids([[i for i, _ in row.params.logit_bias] for row in rows], logits.device)
    bias = [b for row in rows for _, b in row.params.logit_bias]
    if bias:
        values = torch.tensor(bias, dtype=torch.float32, device=logits.device)
        logits.index_put_((row_of, ids), values, accumulate=True)
    logits[_flat_ids([list(row.forbidden_ids) for row in rows], logits.device)] = -torch.inf
    return logits


def _truncated(logits: torch.Tensor, info: SamplingInfo) -> torch.Tensor:
    """Mask what top_k and top_p drop, in the rows that ask for one of them."""
    V = logits.shape[1]
    wanted = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    if info.top_k is not None:
        wanted |= info.top_k < V
    if info.top_p is not None:
        wanted |= info.top_p < 1.0
    at = wanted.nonzero()[:, 0]
    top_k = None if info.top_k is None else info.top_k[at]
    top_p = None if info.top_p is None else info.top_p[at]
    return logits.index_copy(0, at, truncate(logits.index_select(0, at), top_k, top_p))


def _choose(processed: torch.Tensor, logprobs: torch.Tensor, info: SamplingInfo) -> torch.Tensor:
    """Token ids [S] int64: the first most likely one of greedy rows, a draw for the others."""
    if info.all_greedy:
        return processed.argmax(dim=-1)
    draws = torch.tensor(
        [uniform(row.seed, row.sample_index, row.position) for row in info.rows],
        dtype=torch.float64,
        device=logprobs.device,
    )
    drawn = inverse_cdf(logprobs.exp(), draws)
    if info.greedy is None:
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
    if bool((logprobs >= values[:, -1:]).sum(dim=-1).max() > k):  # SYNC: a tie at the edge needs a full sort
        values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        return ids[:, :k], values[:, :k]
    order = ids.argsort(dim=-1)  # by id first, then a stable sort by value
    ids, values = ids.gather(1, order), values.gather(1, order)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), values
