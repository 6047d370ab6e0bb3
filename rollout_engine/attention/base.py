"""AttentionBackend: plan on the host, run on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from rollout_engine.batch.forward import ForwardBatch


class AttentionBackend(ABC):
    """Attention over the paged KV pool, for every layer of a step.

    Once per step `plan(batch)`, then `run(...)` once per layer. A row's token at position p attends to
    positions [0, p] of its sequence. Position p of a row lies in the page of its first token slot at
    `p - p % page_size`, at offset `p % page_size`: pages are filled from their start.

    Padded tokens (graph capture at a larger shape) carry the pool's padding slot in `out_cache_loc` and
    rows of seq_len 1 that point at the padding page; what they compute is never read.
    """

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """HOST. Prepare `batch.attn_plan` for all layers; may allocate, copy and synchronise."""

    @abstractmethod
    def run(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """DEVICE. Write k and v to the pool at `batch.out_cache_loc`, then attend.

        q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim], all of the pool's dtype; any
        strides whose last is 1. Returns [T, num_heads, head_dim]. Must not synchronise.
        """
