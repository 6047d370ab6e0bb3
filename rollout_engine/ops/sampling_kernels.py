"""Drawing one token for each row of logits in two passes, on a GPU: the common case of runner.sampler.

The first pass reduces blocks of the vocabulary, the second chooses a block by the blocks' masses and a token
inside it. A row's result depends on its own logits and draw alone: sums are taken in the same order whatever
else is in the batch. For rows with temperature only; everything else takes runner.sampler's general way.

S = rows, V = vocabulary, C = blocks of it
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
WARPS = 4
THREADS = 32 * WARPS
"""Of a program: a running sum over fewer values than threads has read memory that is not there."""

ANY_ALIGNMENT = [
    "pool_indices",
    "maxima",
    "masses",
    "raw_maxima",
    "raw_masses",
    "first_best",
    "bad",
    "token_ids",
    "logprobs",
]
"""Addresses whose alignment depends on the number of rows: one kernel for all, and one order of its sums."""


@triton.jit(do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _reduce_kernel(
    logits,
    stride,
    temperatures,
    maxima,
    masses,
    raw_maxima,
    raw_masses,
    first_best,
    bad,
    V,
    C,
    RAW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of one block of one row: its largest logit, where that is, and the sum of exp(logit - largest)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < V
    raw = tl.load(logits + row * stride + columns, mask=mask, other=float("-inf")).to(tl.float32)
    wrong = mask & ((raw != raw) | (tl.abs(raw) == float("inf")))
    values = raw / tl.load(temperatures + row)
    largest = tl.max(values, 0)
    at = row * C + block
    tl.store(maxima + at, largest)
    tl.store(masses + at, tl.sum(tl.where(mask, tl.exp(values - largest), 0.0), 0))
    if RAW:
        raw_largest = tl.max(raw, 0)
        tl.store(raw_maxima + at, raw_largest)
        tl.store(raw_masses + at, tl.sum(tl.where(mask, tl.exp(raw - raw_largest), 0.0), 0))
    tl.store(first_best + at, tl.min(tl.where(values == largest, columns, V), 0))
    tl.store(bad + at, tl.max(wrong.to(tl.int32), 0))


@triton.jit(do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _draw_kernel(
    logits,
    stride,
    temperatures,
    draws,
    greedy,
    raw_rows,
    pool_indices,
    maxima,
    masses,
    raw_maxima,
    raw_masses,
    first_best,
    bad,
    token_ids,
    logprobs,
    last_tokens,
    V,
    C,
    RAW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    blocks = tl.arange(0, BLOCKS)
    present = blocks < C
    at = row * C + blocks
    block_max = tl.load(maxima + at, mask=present, other=float("-inf"))
    largest = tl.max(block_max, 0)
    mass = tl.load(masses + at, mask=present, other=0.0) * tl.exp(block_max - largest)
    mass = tl.where(present, mass, 0.0).to(tl.float64)
    reached = tl.cumsum(mass, 0)
    total = tl.sum(mass, 0)
    goal = tl.load(draws + row) * total
    # The first block that goes beyond the goal; where rounding left none, the last one with any mass.
    chosen = tl.min(tl.where(reached > goal, blocks, BLOCKS), 0)
    last_block = tl.max(tl.where(mass > 0.0, blocks, 0), 0)
    chosen = tl.minimum(chosen, last_block)
    before = tl.sum(tl.where(blocks < chosen, mass, 0.0), 0)
    is_greedy = tl.load(greedy + row) != 0
    if is_greedy:
        # The first block that has the largest logit, and the first place of it there.
        chosen = tl.min(tl.where(block_max == largest, blocks, BLOCKS - 1), 0)
    columns = chosen * BLOCK + tl.arange(0, BLOCK)
    mask = columns < V
    raw = tl.load(logits + row * stride + columns, mask=mask, other=float("-inf")).to(tl.float32)
    values = raw / temperature
    weights = tl.where(mask, tl.exp(values - largest), 0.0).to(tl.float64)
    inside = before + tl.cumsum(weights, 0)
    positive = weights > 0.0
    token = tl.min(tl.where((inside > goal) & positive, columns, V), 0)
    last_positive = tl.max(tl.where(positive, columns, 0), 0)
    token = tl.minimum(token, last_positive)
    if is_greedy:
        token = tl.load(first_best + row * C + chosen)
    wrong = tl.max(tl.load(bad + at, mask=present, other=0), 0) != 0
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    chosen_raw = tl.load(logits + row * stride + token).to(tl.float32)
    logprob = (chosen_raw / temperature - largest) - tl.log(total.to(tl.float32))
    if RAW:  # noqa: SIM102 - RAW is known when the kernel is compiled
        if tl.load(raw_rows + row) != 0:
            block_raw = tl.load(raw_maxima + at, mask=present, other=float("-inf"))
            raw_largest = tl.max(block_raw, 0)
            part = tl.load(raw_masses + at, mask=present, other=0.0) * tl.exp(block_raw - raw_largest)
            raw_total = tl.sum(tl.where(present, part, 0.0), 0)
            logprob = (chosen_raw - raw_largest) - tl.log(raw_total)
    if wrong:
        tl.store(last_tokens + tl.load(pool_indices + row), 0)
        tl.store(token_ids + row, -1)
        tl.store(logprobs + row, float("nan"))
    else:
        tl.store(last_tokens + tl.load(pool_indices + row), token.to(tl.int64))
        tl.store(token_ids + row, token.to(tl.int64))
        tl.store(logprobs + row, logprob)


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    draws: torch.Tensor,
    greedy: torch.Tensor,
    raw_rows: torch.Tensor,
    pool_indices: torch.Tensor,
    last_tokens: torch.Tensor,
    any_raw: bool,
) -> torch.Tensor:
    """Draw a token for each row, and note it in `last_tokens` at the row's place in the pool.

    Args:
        logits: [S, V] of any float dtype, rows contiguous.
        temperatures, draws, greedy, raw_rows: [S]; see batch.forward.SamplingInfo.
        pool_indices: [S] int64. last_tokens: [pool rows] int64.

    Returns:
        uint8 [12 * S]: S int64 token ids (-1 where the logits are not finite), then S float32
        log-probabilities (NaN there). One buffer, so that one copy brings both to the host.
    """
    S, V = logits.shape
    C = triton.cdiv(V, BLOCK)
    device = logits.device
    floats = torch.empty((4, S, C), dtype=torch.float32, device=device)
    ints = torch.empty((2, S, C), dtype=torch.int32, device=device)
    out = torch.empty(12 * S, dtype=torch.uint8, device=device)
    token_ids, logprobs = out[: 8 * S].view(torch.int64), out[8 * S :].view(torch.float32)
    reduced = (*floats, *ints)
    _reduce_kernel[(S, C)](
        logits, logits.stride(0), temperatures, *reduced, V, C, RAW=any_raw, BLOCK=BLOCK, num_warps=WARPS
    )
    _draw_kernel[(S,)](
        logits,
        logits.stride(0),
        temperatures,
        draws,
        greedy,
        raw_rows,
        pool_indices,
        *reduced,
        token_ids,
        logprobs,
        last_tokens,
        V,
        C,
        RAW=any_raw,
        BLOCK=BLOCK,
        BLOCKS=max(THREADS, triton.next_power_of_2(C)),
        num_warps=WARPS,
    )
    return out
