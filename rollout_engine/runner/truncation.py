"""What top_k and top_p keep of a distribution, without sorting the vocabulary where a part of it decides.

S = rows, V = vocabulary, C = candidates
"""

from __future__ import annotations

import torch

NUM_CANDIDATES = 1024
"""Most likely tokens that are sorted first; the whole vocabulary is only where they do not decide."""


def truncate(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """`logits` with -inf for every token that top_k, or top_p over what top_k keeps, drops.

    Equal logits are kept in the order of ids. The result is that of a stable sort of the whole
    vocabulary, to the last bit. On a GPU it is sorted: what would save that has to be asked of the device.

    Args:
        logits: [S, V] float32, -inf where a token cannot be drawn; not changed.
        top_k: [S] int64, >= 1; V or more keeps all. None keeps all.
        top_p: [S] float64 in (0, 1]; 1 keeps all. None keeps all.
    """
    S, V = logits.shape
    top_k = torch.full((S,), V, device=logits.device) if top_k is None else top_k.clamp_max(V)
    top_p = torch.ones(S, dtype=torch.float64, device=logits.device) if top_p is None else top_p
    high = logits.amax(dim=-1, keepdim=True)
    # The mass that top_p is a share of; over ids, so that it is the same number for any candidates.
    total = torch.zeros_like(top_p)
    on_cpu = logits.device.type == "cpu"
    if not on_cpu or bool(((top_k == V) & (top_p < 1.0)).any()):  # else what top_k keeps is all that counts
        total = torch.exp(logits.double() - high).sum(dim=-1)
    out = torch.full_like(logits, -torch.inf)
    if not on_cpu:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return _keep(out, ids, values, _num_kept(values, high, total, top_k, top_p))
    rest = torch.arange(S, device=logits.device)
    if V > 2 * NUM_CANDIDATES:
        values, ids = logits.topk(NUM_CANDIDATES, dim=-1)
        edge = values[:, -1]
        ids = ids.sort(dim=-1).values  # by id, so that a stable sort by value leaves ties in that order
        values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
        num_kept = _num_kept(values, high, total, top_k, top_p)
        last = values.gather(1, num_kept[:, None] - 1)[:, 0]
        # Everything above the edge is a candidate; of what equals it, others may be left out.
        # And a top_k beyond the candidates makes a whole for top_p that only the full order knows.
        known = (top_k < NUM_CANDIDATES) | (top_k == V)
        decided = (last > edge) & (num_kept < NUM_CANDIDATES) & known
        out = _keep(out, ids.gather(1, order), values, torch.where(decided, num_kept, 0))
        rest = (~decided).nonzero()[:, 0]
    if rest.numel():
        values, ids = logits[rest].sort(dim=-1, descending=True, stable=True)
        num_kept = _num_kept(values, high[rest], total[rest], top_k[rest], top_p[rest])
        out[rest] = _keep(out[rest], ids, values, num_kept)
    return out


def _num_kept(
    values: torch.Tensor, high: torch.Tensor, total: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """How many of the sorted `values` [S, C] are kept, [S] int64 in [1, C]; C may mean more than C."""
    S, C = values.shape
    cumulative = torch.exp(values.double() - high).cumsum(dim=-1)
    # What top_k keeps is the whole that top_p is a share of.
    limited = top_k < C
    at = (top_k.clamp_max(C) - 1)[:, None]
    total = torch.where(limited, cumulative.gather(1, at)[:, 0], total)
    before = torch.cat((cumulative.new_zeros(S, 1), cumulative[:, :-1]), dim=-1)
    # Kept while the mass before is less than top_p: the smallest set that reaches it.
    by_mass = (before < (top_p * total)[:, None]).sum(dim=-1)
    by_mass = torch.where(top_p >= 1.0, C, by_mass)
    return torch.minimum(by_mass, top_k.clamp_max(C)).clamp_min(1)


def _keep(out: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
    """Put the first `num_kept` of the sorted `values` at their ids."""
    dropped = torch.arange(values.shape[1], device=values.device) >= num_kept[:, None]
    return out.scatter(1, ids, values.masked_fill(dropped, -torch.inf))
