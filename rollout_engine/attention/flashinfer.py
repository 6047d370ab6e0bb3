"""Paged attention with FlashInfer, for GPUs.

Its wrappers are planned on the host, once a pass: a plan cuts the rows' KV into pieces that fill the device,
and is copied to a workspace that the kernels of all layers read. Prefill, mixed and uncaptured decode passes
share one wrapper; each captured batch size has one of its own, whose buffers the graph remembers.

T = packed tokens, B = rows, N = query heads, K = kv heads, H = head dim
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import flashinfer
import numpy as np
import torch

from rollout_engine.attention.base import AttentionBackend, AttentionShape
from rollout_engine.batch.forward import ForwardBatch

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 256 << 20
"""Partial results of rows whose KV was cut into pieces; FlashInfer refuses a plan that needs more."""


class FlashInferBackend(AttentionBackend):
    """Prefill and decode over the pool's pages; bfloat16 or float16."""

    attends_to_pool = True
    captures = True
    reads_token_pool = False

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend="fa2")
        self._planned: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._indices: torch.Tensor | None = None  # shared by the planners of all batch sizes

    def warm_up(self) -> None:
        """Compile the kernels of this model's shapes, or load them from FlashInfer's cache."""
        started = time.monotonic()
        logger.info("loading FlashInfer's attention kernels (compiled at first use: about a minute)")
        one = torch.ones(1, dtype=torch.int32)
        self._plan(self._wrapper, torch.tensor([0, 1], dtype=torch.int32), [1], np.zeros(1, np.int32), one)
        logger.info("attention kernels are ready after %.1f s", time.monotonic() - started)

    def plan(self, batch: ForwardBatch) -> None:
        """Cut the rows' work into pieces, for all layers."""
        queries = np.zeros(batch.batch_size + 1, dtype=np.int32)
        np.cumsum(batch.extend_lens_cpu, out=queries[1:])
        counts, indices, last = pages_of_rows(
            batch.req_pool_indices_cpu, batch.seq_lens_cpu, batch.page_table, self.shape.page_size
        )
        self._plan(self._wrapper, torch.from_numpy(queries), counts, indices, torch.from_numpy(last))
        batch.attn_plan = self._wrapper

    def _plan(
        self,
        wrapper: Any,
        queries: torch.Tensor,
        counts: Sequence[int] | np.ndarray,
        indices: np.ndarray,
        last: torch.Tensor,
    ) -> None:
        shape = self.shape
        self.wait_until_planned()
        wrapper.plan(
            queries,
            torch.from_numpy(starts_of(counts)),
            torch.from_numpy(indices),
            last,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        self.mark_planned()

    def wait_until_planned(self) -> None:
        """Wait until the device has read the previous plan out of the wrappers' pinned memory.

        That copy is the first thing of the pass it belongs to, so with one pass in flight it has happened.
        """
        self._planned.synchronize()

    def mark_planned(self) -> None:
        self._planned.record()

    def run(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        batch.token_to_kv_pool.write(layer_id, batch.out_cache_loc, k, v)
        return self.attend(layer_id, q.contiguous(), batch)

    def attend(self, layer_id: int, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out: torch.Tensor = batch.attn_plan.run(q, batch.token_to_kv_pool.paged[layer_id])
        return out

    def decode_graph_planner(self, batch_size: int, padding_page: int) -> DecodePlanner:
        if self._indices is None:
            self._indices = torch.zeros(self.shape.max_pages, dtype=torch.int32, device=self.shape.device)
        return DecodePlanner(self, batch_size, padding_page, self._indices)


class DecodePlanner:
    """A wrapper whose buffers stay where they are, for a captured pass of `batch_size` rows.

    Args:
        padding_page: what rows beyond the real ones read: one token of it.
        indices: [pages] int32, page ids of all rows; may be shared with planners of other sizes.
    """

    def __init__(
        self, backend: FlashInferBackend, batch_size: int, padding_page: int, indices: torch.Tensor
    ) -> None:
        device = backend.shape.device
        self._backend = backend
        self._batch_size, self._padding_page = batch_size, padding_page
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            backend.workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(batch_size + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=torch.ones(batch_size, dtype=torch.int32, device=device),
        )

    def plan(self, pool_indices: list[int], seq_lens: list[int], page_table: np.ndarray) -> Any:
        """See attention.base.DecodeGraphPlanner."""
        shape = self._backend.shape
        counts, indices, last = pages_of_rows(pool_indices, seq_lens, page_table, shape.page_size)
        if padding := self._batch_size - len(seq_lens):
            counts = np.concatenate((counts, np.ones(padding, dtype=np.int32)))
            indices = np.concatenate((indices, np.full(padding, self._padding_page, dtype=np.int32)))
            last = np.concatenate((last, np.ones(padding, dtype=np.int32)))
        self._backend.wait_until_planned()
        self._wrapper.plan(
            torch.from_numpy(starts_of(counts)),
            torch.from_numpy(indices),
            torch.from_numpy(last),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        self._backend.mark_planned()
        return self._wrapper


def pages_of_rows(
    pool_indices: list[int], seq_lens: list[int], page_table: np.ndarray, page_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What FlashInfer asks about the rows' pages.

    Args:
        page_table: [pool rows, pages] int32; row i of the pass is its row pool_indices[i].

    Returns:
        Pages of each row [B], their ids row by row, tokens on each row's last page [B]; int32 each.
    """
    lengths = np.array(seq_lens, dtype=np.int32)
    counts = -(-lengths // page_size)
    if not seq_lens:
        return counts, counts, counts
    last = lengths - (counts - 1) * page_size
    table = page_table[np.array(pool_indices, dtype=np.int64), : int(counts.max())]
    indices = table[np.arange(table.shape[1], dtype=np.int32) < counts[:, None]]
    return counts, indices, last


def starts_of(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """[B] -> [B + 1] int32: where each row's entries start in a packed list, and its length."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
