"""Runs decode attention in triton's interpreter, against plain torch; see test_interpreted_kernels.py."""

from __future__ import annotations

import torch

from rollout_engine.ops.decode_attention import attend

LENGTHS, PAGE, H = [50, 17], 16, 64


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: list[torch.Tensor]) -> torch.Tensor:
    """Row by row, in float32. slots: of each row's tokens."""
    rows = []
    for query, places in zip(q.float(), slots, strict=True):
        group = query.shape[0] // k.shape[1]
        keys, values = (pool[places].float().repeat_interleave(group, dim=1) for pool in (k, v))
        scores = torch.einsum("nh,tnh->nt", query, keys) / H**0.5
        rows.append(torch.einsum("nt,tnh->nh", scores.softmax(-1), values))
    return torch.stack(rows)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor([[3, 1, 5, 0], [2, 9, 4, 7]], dtype=torch.int32)
    pools, lens = torch.tensor([1, 0]), torch.tensor(LENGTHS)
    slots = [
        (table[pool].long()[:, None] * PAGE + torch.arange(PAGE)).view(-1)[:length]
        for pool, length in zip(pools.tolist(), LENGTHS, strict=True)
    ]
    for heads, kv_heads in ((4, 2), (16, 1), (24, 1), (40, 2), (71, 1)):
        q = torch.randn(2, heads, H, generator=generator).half()
        k, v = (torch.randn(10 * PAGE, kv_heads, H, generator=generator).half() for _ in range(2))
        for splits in (1, 4):
            out = torch.full_like(q, torch.nan)
            attend(q, k, v, table, pools, lens, PAGE, splits, out)
            error = (out.float() - expected(q, k, v, slots)).abs().max()
            assert error < 5e-3, f"{heads} heads over {kv_heads}, {splits} splits: off by {error}"


if __name__ == "__main__":
    main()
