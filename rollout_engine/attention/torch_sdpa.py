"""Paged attention with torch's scaled_dot_product_attention: for CPUs, and the oracle of GPU kernels.

Rows that bring one token are batched: their pages are gathered into a padded [b, L] block and the query
heads of a group become the query length, so K and V are never repeated. Rows are sorted by length and
cut into groups, so that a short row is not padded to the longest one. Rows that bring more tokens go one
by one.

T = packed tokens, b = rows of a group, N = query heads, K = kv heads, G = N / K, H = head dim,
L = padded KV length, P = pages of it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rollout_engine.attention.base import AttentionBackend, AttentionShape
from rollout_engine.batch.forward import ForwardBatch

GROUP_COST_TOKENS = 96
"""KV tokens whose gather takes about as long as the fixed cost of one more group."""


@dataclass(slots=True)
class DecodeGroup:
    """Rows of similar length that bring one token each."""

    tokens: torch.Tensor | slice  # packed offsets of the rows' tokens, [b]
    pages: torch.Tensor  # [b * P] int64
    tails: torch.Tensor  # gathered token slots that are no tokens of their row but might be NaN, int64
    mask_b11L: torch.Tensor | None  # additive, in the pool's dtype; None where all rows have L tokens
    num_rows: int
    length: int  # L

    def covers(self, num_tokens: int) -> bool:
        """Whether its tokens are the first `num_tokens` packed ones, in their order."""
        return isinstance(self.tokens, slice) and self.tokens == slice(0, num_tokens)


@dataclass(slots=True)
class ExtendRow:
    """A row that brings `stop - start` tokens, the last of its `length`."""

    start: int
    stop: int
    pages: torch.Tensor | None  # [P] int64; None where nothing was cached before
    mask_TL: torch.Tensor | None  # bool, True where a token may look; None: plain causal
    length: int


@dataclass(slots=True)
class Plan:
    groups: list[DecodeGroup]
    rows: list[ExtendRow]
    scratch: tuple[torch.Tensor, torch.Tensor]  # gathered K and V, flat, at least the largest need


class TorchBackend(AttentionBackend):
    """Exact and simple; gathers K and V of a step layer by layer into a scratch that is kept."""

    def __init__(self, shape: AttentionShape) -> None:
        del shape  # taken from each batch's pool
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None

    def plan(self, batch: ForwardBatch) -> None:
        """Sort rows into groups and build page tables and masks."""
        page_size = batch.token_to_kv_pool.page_size
        singles: list[tuple[int, int, int]] = []  # (length, row, packed offset)
        multis: list[tuple[int, int, int]] = []  # (row, packed start, tokens)
        start = 0
        for row, (length, tokens) in enumerate(zip(batch.seq_lens_cpu, batch.extend_lens_cpu, strict=True)):
            if tokens == 1:
                singles.append((length, row, start))
            else:
                multis.append((row, start, tokens))
            start += tokens
        singles.sort()
        groups = [self._group(batch, members, page_size) for members in split_by_length(singles)]
        rows = [self._extend_row(batch, *multi, page_size) for multi in multis]
        most = max(
            (
                *(group.pages.numel() for group in groups),
                *(0 if r.pages is None else r.pages.numel() for r in rows),
            ),
            default=0,
        )
        batch.attn_plan = Plan(groups, rows, self._scratch_for(batch, most * page_size))

    def _scratch_for(self, batch: ForwardBatch, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Kept between steps: fresh memory would be faulted in again in every layer."""
        pool = batch.token_to_kv_pool
        width = pool.num_kv_heads * pool.head_dim
        if self._scratch is None or self._scratch[0].numel() < tokens * width:
            size = tokens * width * 5 // 4  # sequences grow: do not allocate at every step
            self._scratch = (pool.k[0].new_empty(size), pool.k[0].new_empty(size))
        return self._scratch

    def _group(self, batch: ForwardBatch, members: list[tuple[int, int, int]], page_size: int) -> DecodeGroup:
        longest = members[-1][0]
        device = batch.seq_lens.device
        num_pages = -(-longest // page_size)
        rows = torch.tensor([row for _, row, _ in members], device=device)
        table = _pages_of(batch, batch.req_pool_indices.index_select(0, rows), num_pages, page_size)
        lengths = torch.tensor([length for length, _, _ in members], device=device).unsqueeze_(1)
        # Pages past a row's end point at whatever the table last held: read the row's first page instead,
        # and zero what is no token of the row. Masked scores hide values, but not a NaN left by another row.
        columns = torch.arange(num_pages * page_size, device=device)
        table = torch.where(columns[::page_size] < lengths, table, table[:, :1])
        tails = []
        for i, (length, _, _) in enumerate(members):
            # A first page that is not full would bring its own tail along wherever it is read.
            end = length + -length % page_size if length >= page_size else num_pages * page_size
            first = i * num_pages * page_size
            tails.append(np.arange(first + length, first + end))
        mask = None
        if members[0][0] != num_pages * page_size or longest != num_pages * page_size:
            mask = torch.zeros(columns.shape[0], dtype=batch.token_to_kv_pool.dtype, device=device)
            mask = mask.expand(len(members), -1).masked_fill(columns >= lengths, float("-inf"))[:, None, None]
        offsets = [offset for _, _, offset in members]
        tokens: torch.Tensor | slice = torch.tensor(offsets, device=device)
        if offsets == list(range(offsets[0], offsets[0] + len(offsets))):
            tokens = slice(offsets[0], offsets[0] + len(offsets))
        return DecodeGroup(
            tokens=tokens,
            pages=table.view(-1),
            tails=torch.from_numpy(np.concatenate(tails)).to(device),
            mask_b11L=mask,
            num_rows=len(members),
            length=num_pages * page_size,
        )

    def _extend_row(
        self, batch: ForwardBatch, row: int, start: int, tokens: int, page_size: int
    ) -> ExtendRow:
        length = batch.seq_lens_cpu[row]
        if length == tokens:
            return ExtendRow(start, start + tokens, None, None, length)
        device = batch.seq_lens.device
        pages = _pages_of(batch, batch.req_pool_indices[row : row + 1], -(-length // page_size), page_size)
        queries = torch.arange(length - tokens, length, device=device).unsqueeze_(1)
        mask = torch.arange(length, device=device) <= queries
        return ExtendRow(start, start + tokens, pages.view(-1), mask, length)

    def run(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pool, plan = batch.token_to_kv_pool, batch.attn_plan
        pool.write(layer_id, batch.out_cache_loc, k, v)
        if out is None and len(plan.groups) == 1 and plan.groups[0].covers(q.shape[0]):
            return _attend_group(q, plan.groups[0], layer_id, plan, pool)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in plan.groups:
            out[group.tokens] = _attend_group(q[group.tokens], group, layer_id, plan, pool)
        for row in plan.rows:
            tokens = slice(row.start, row.stop)
            out[tokens] = _attend_row(q[tokens], k[tokens], v[tokens], row, layer_id, plan, pool)
        return out


def split_by_length(rows: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Cut rows, sorted by length, into groups; least total of padded tokens plus a cost per group."""
    best = [0.0] + [float("inf")] * len(rows)  # best[j]: cost of the first j rows
    cut = [0] * (len(rows) + 1)
    for j in range(1, len(rows) + 1):
        for i in range(j):
            cost = best[i] + (j - i) * rows[j - 1][0] + GROUP_COST_TOKENS
            if cost < best[j]:
                best[j], cut[j] = cost, i
    groups, j = [], len(rows)
    while j:
        groups.append(rows[cut[j] : j])
        j = cut[j]
    return groups


def _pages_of(batch: ForwardBatch, pool_rows: torch.Tensor, num_pages: int, page_size: int) -> torch.Tensor:
    """Page ids of the first `num_pages` pages of rows of req_to_token_pool, [b, P] int64."""
    table = batch.req_to_token_pool[:, ::page_size][:, :num_pages].index_select(0, pool_rows)
    return table.long().div_(page_size, rounding_mode="floor")


def _gather(pages: torch.Tensor, layer_id: int, plan: Plan, pool: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `pages`, each [num_pages, page_size * K * H], in the plan's scratch."""
    gathered = []
    for source, scratch in zip((pool.k_pages[layer_id], pool.v_pages[layer_id]), plan.scratch, strict=True):
        out = scratch[: pages.numel() * source.shape[1]].view(pages.numel(), source.shape[1])
        gathered.append(torch.index_select(source, 0, pages, out=out))
    return gathered[0], gathered[1]


def _attend_group(
    q_bNH: torch.Tensor, group: DecodeGroup, layer_id: int, plan: Plan, pool: Any
) -> torch.Tensor:
    """[b, N, H] -> [b, N, H]."""
    b, N, H = q_bNH.shape
    K = pool.num_kv_heads
    gathered = _gather(group.pages, layer_id, plan, pool)
    if group.tails.numel():
        for tokens in gathered:
            tokens.view(b * group.length, K * H).index_fill_(0, group.tails, 0.0)
    k_bKLH, v_bKLH = (tokens.view(b, group.length, K, H).transpose(1, 2) for tokens in gathered)
    q_bKGH = q_bNH.reshape(b, K, N // K, H)
    out = F.scaled_dot_product_attention(q_bKGH, k_bKLH, v_bKLH, attn_mask=group.mask_b11L)
    return out.reshape(b, N, H)


def _attend_row(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    row: ExtendRow,
    layer_id: int,
    plan: Plan,
    pool: Any,
) -> torch.Tensor:
    """[T, N, H] -> [T, N, H]. k, v are this step's own; rows with cached tokens read the pool instead."""
    if row.pages is not None:
        k, v = _gather(row.pages, layer_id, plan, pool)
        k_TKH = k.view(-1, pool.num_kv_heads, pool.head_dim)[: row.length]
        v_TKH = v.view(-1, pool.num_kv_heads, pool.head_dim)[: row.length]
    out_NTH = F.scaled_dot_product_attention(
        q_TNH.transpose(0, 1)[None],
        k_TKH.transpose(0, 1)[None],
        v_TKH.transpose(0, 1)[None],
        attn_mask=row.mask_TL,
        is_causal=row.mask_TL is None,
        enable_gqa=True,
    )[0]
    return out_NTH.transpose(0, 1)
