"""Paged attention of one token for each row, on a GPU: one program for each kv head and piece of a row.

Each program attends for all query heads of its kv head to a piece of the row's KV, and keeps a running
softmax. Rows are cut into `splits` pieces where the batch alone does not fill the device; a second kernel
merges them. The cut depends on the row's length and on `splits` only, so a row's result does not depend on
the rows beside it.

B = rows, N = query heads, K = kv heads, H = head dim, P = pages of the longest row
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

QUERY_ROWS = 16
"""Rows of a tensor-core product, at least; the query heads of a kv head fill the first of them."""
BLOCK = 32
"""Tokens of KV that a program looks at at once."""
MAX_SPLITS_LOG2 = 5
MANY_PROGRAMS = 512
LOG2_E = math.log2(math.e)


@triton.jit(do_not_specialize_on_alignment=["pool_indices", "seq_lens"])
def _attend_kernel(
    q,
    k_pool,
    v_pool,
    page_table,
    pool_indices,
    seq_lens,
    out,
    partial,
    stats,
    scale,
    N,
    K,
    P,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    # Programs that run at once read neighbouring heads of the same tokens: whole rows of the memory's banks.
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(seq_lens + row).to(tl.int32)
    pages = page_table + tl.load(pool_indices + row) * P
    piece = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    start = split * piece
    stop = tl.minimum(start + piece, length)

    heads = tl.arange(0, ROWS)
    real = heads < GROUP
    dims = tl.arange(0, H)
    head_rows = row * N + kv_head * GROUP + heads
    queries = tl.load(q + head_rows[:, None] * H + dims[None, :], mask=real[:, None], other=0.0)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, H), tl.float32)
    for first in range(start, stop, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        live = tokens < stop
        page = tl.load(pages + tokens // PAGE, mask=live, other=0).to(tl.int64)
        places = ((page * PAGE + tokens % PAGE) * K + kv_head) * H
        keys = tl.load(k_pool + places[:, None] + dims[None, :], mask=live[:, None], other=0.0)
        values = tl.load(v_pool + places[:, None] + dims[None, :], mask=live[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - now)
        weights = tl.exp2(scores - now[:, None])
        mass = mass * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        largest = now
    if SPLITS == 1:
        result = (sums / mass[:, None]).to(out.dtype.element_ty)
        tl.store(out + head_rows[:, None] * H + dims[None, :], result, mask=real[:, None])
    else:
        at = head_rows * SPLITS + split
        tl.store(partial + at[:, None] * H + dims[None, :], sums, mask=real[:, None])
        tl.store(stats + at * 2, largest, mask=real)
        tl.store(stats + at * 2 + 1, mass, mask=real)


@triton.jit
def _merge_kernel(partial, stats, out, H: tl.constexpr, SPLITS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, H)
    at = head * SPLITS + splits
    largest = tl.load(stats + at * 2)
    mass = tl.load(stats + at * 2 + 1)
    factor = tl.exp2(largest - tl.max(largest, 0))
    total = tl.sum(mass * factor, 0)
    sums = tl.load(partial + at[:, None] * H + dims[None, :])
    merged = tl.sum(sums * factor[:, None], 0) / total
    tl.store(out + head * H + dims, merged.to(out.dtype.element_ty))


def splits_for(batch_size: int, num_kv_heads: int, num_processors: int) -> int:
    """Pieces of a row, a power of two, so that the programs of a pass about fill the device once."""
    wanted = 1.5 * num_processors / (batch_size * num_kv_heads)
    return 1 << max(0, min(MAX_SPLITS_LOG2, math.floor(math.log2(wanted))))


def attend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    splits: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last token of each row.

    Args:
        q: [B, N, H] contiguous, bfloat16 or float16.
        k_pool, v_pool: [token slots, K, H] of one layer.
        page_table: [pool rows, P] int32; row i of the batch is its row pool_indices[i].
        pool_indices: [B] int64.
        seq_lens: [B] int64, at least 1; keys [0, seq_lens[i]) of row i are attended to.
        splits: pieces that each row is cut into, a power of two.
        out: where the result goes; None makes room for it.

    Returns:
        [B, N, H] in q's dtype.
    """
    B, N, H = q.shape
    K = k_pool.shape[1]
    if out is None:
        out = torch.empty_like(q)
    partial = stats = out
    # Many programs hide each other's waits; few ones must have more loads on their way.
    num_warps, num_stages = (1, 3) if B * K >= MANY_PROGRAMS else (2, 5)
    rows = max(QUERY_ROWS, triton.next_power_of_2(N // K))
    if splits > 1:
        partial = torch.empty((B * N, splits, H), dtype=torch.float32, device=q.device)
        stats = torch.empty((B * N, splits, 2), dtype=torch.float32, device=q.device)
    _attend_kernel[(K, B, splits)](
        q,
        k_pool,
        v_pool,
        page_table,
        pool_indices,
        seq_lens,
        out,
        partial,
        stats,
        LOG2_E / math.sqrt(H),
        N,
        K,
        page_table.shape[1],
        GROUP=N // K,
        H=H,
        PAGE=page_size,
        BLOCK=BLOCK,
        SPLITS=splits,
        ROWS=rows,
        num_warps=num_warps * rows // QUERY_ROWS,
        num_stages=num_stages,
    )
    if splits > 1:
        _merge_kernel[(B * N,)](partial, stats, out, H=H, SPLITS=splits, num_warps=4)
    return out
