"""AttentionBackend: plan on the host, run on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from rollout_engine.batch.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend must know before the first pass."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device


class AttentionBackend(ABC):
    """Attention over the paged KV pool, for every layer of a step.

    attends_to_pool: `attend` exists: it needs this step's keys and values in the pool only, so that one
        kernel may compute and write them.
    captures: a decode pass may be captured: its plan depends on the batch size alone, and `attend` reads
        lengths and pages on the device.
    reads_token_pool: it looks pages up in req_to_token_pool on the device, which must then be kept filled.
        One that does not reads ForwardBatch.device_page_table.

    Once per step `plan(batch)`, then `run(...)` once per layer. A row's token at position p attends to
    positions [0, p] of its sequence. Position p of a row lies in the page of its first token slot at
    `p - p % page_size`, at offset `p % page_size`: pages are filled from their start.

    Padded tokens (graph capture at a larger shape) carry the pool's padding slot in `out_cache_loc`. In a
    decode pass they are rows of seq_len 1 that look at one token of some page; in any other they follow the
    batch.num_tokens tokens of the rows, and nothing is planned for them. What they compute is never read.
    """

    attends_to_pool = False
    captures = False
    reads_token_pool = True

    def warm_up(self) -> None:  # noqa: B027 - most have nothing to do
        """Load or compile what the first pass would; may take a minute the first time."""

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """HOST. Prepare `batch.attn_plan` for all layers; may allocate, copy and synchronise."""

    @abstractmethod
    def run(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """DEVICE. Write k and v to the pool at `batch.out_cache_loc`, then attend.

        q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim], all of the pool's dtype; any
        strides whose last is 1. Returns [T, num_heads, head_dim], `out` if given. Must not synchronise.
        """

    def attend(
        self, layer_id: int, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """DEVICE. Attend over what lies in the pool; this step's keys and values are there already.

        q: [T, num_heads, head_dim], contiguous. Returns the same shape, `out` if given. Must not
        synchronise.
        """
        raise NotImplementedError(f"{type(self).__name__} needs this step's keys and values; call run()")
