"""Paged attention on GPUs. A pass has up to three parts, each with the kernel that suits it:

    prompts of which nothing was cached    torch's FlashAttention over this pass's keys and values
    prompts behind cached tokens           FlashInfer over the pool's pages
    rows of one token                      a kernel of our own over the pool's pages

The first is what transformers runs, so that log-probabilities differ as little as they can. FlashInfer's
wrapper is planned on the host, once a pass: a plan cuts the rows' KV into pieces that fill the device, and is
copied to a workspace that the kernels of all layers read. Rows of one token need no plan: their kernel reads
lengths and page tables on the device, so nothing has to be replanned when a captured pass is replayed.

T = packed tokens, B = rows, N = query heads, K = kv heads, H = head dim
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import flashinfer
import numpy as np
import torch

from rollout_engine.attention.base import AttentionBackend, AttentionShape
from rollout_engine.batch.forward import ForwardBatch
from rollout_engine.logs import get_log
from rollout_engine.ops.decode_attention import attend, splits_for

log = get_log(__name__)

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
        self._num_processors = torch.cuda.get_device_properties(shape.device).multi_processor_count
        self._has_flash = torch.cuda.get_device_capability(shape.device) >= (8, 0)  # torch's
        self._planned: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrays: list[torch.Tensor] = []  # of the last plan, on the host

    def warm_up(self) -> None:
        """Compile the kernels of this model's shapes, or load them from FlashInfer's cache."""
        started = time.monotonic()
        one = np.ones(1, dtype=np.int32)
        note = "compiled at first use: about a minute"
        with log.repeating("attention_loading", backend="flashinfer", note=note):
            self._plan(starts_of(one), one, np.zeros(1, dtype=np.int32), one)
        log.info("attention_ready", backend="flashinfer", seconds=round(time.monotonic() - started, 1))

    def plan(self, batch: ForwardBatch) -> None:
        """Choose kernels, and cut the rows' work into pieces for all layers."""
        num_rows = batch.batch_size
        if batch.forward_mode.is_decode():
            batch.attn_plan = PassPlan(None, self._decode(batch, 0, 0))
            return
        lengths = batch.extend_lens_cpu
        num_prompts = num_rows
        while num_prompts and lengths[num_prompts - 1] == 1:  # prompts come first in a mixed pass
            num_prompts -= 1
        num_tokens = sum(lengths[:num_prompts])
        prompts = self._prompts(batch, num_prompts, num_tokens) if num_prompts else None
        decode = self._decode(batch, num_prompts, num_tokens) if num_prompts < num_rows else None
        batch.attn_plan = PassPlan(prompts, decode)

    def _decode(self, batch: ForwardBatch, first_row: int, first_token: int) -> DecodePlan:
        """Rows of one token, from `first_row` on."""
        num_rows = batch.batch_size - first_row
        splits = splits_for(num_rows, self.shape.num_kv_heads, self._num_processors)
        return DecodePlan(
            slice(first_row, batch.batch_size), slice(first_token, first_token + num_rows), splits
        )

    def _prompts(self, batch: ForwardBatch, num_rows: int, num_tokens: int) -> FreshPlan | PagedPlan:
        """The first rows: several tokens each."""
        lengths, tokens = batch.extend_lens_cpu[:num_rows], slice(num_tokens)
        starts = starts_of(np.array(lengths, dtype=np.int32))
        if self._has_flash and lengths == batch.seq_lens_cpu[:num_rows]:
            (on_device,) = batch.sampling_info.packer.put([starts])
            return FreshPlan(tokens, on_device, max(lengths))
        counts, indices, last = pages_of_rows(
            batch.req_pool_indices_cpu[:num_rows],
            batch.seq_lens_cpu[:num_rows],
            batch.page_table,
            self.shape.page_size,
        )
        self._plan(starts, counts, indices, last)
        return PagedPlan(tokens, self._wrapper)

    def _plan(self, queries: np.ndarray, counts: np.ndarray, indices: np.ndarray, last: np.ndarray) -> None:
        shape = self.shape
        # The device must have read the plan before out of the wrapper's pinned memory. That copy is the
        # first thing of the pass it belongs to, so with one pass in flight it has happened.
        self._planned.synchronize()
        # It copies these without waiting: they stay until the device has them, which _planned tells.
        self._arrays = [torch.from_numpy(array) for array in (queries, starts_of(counts), indices, last)]
        self._wrapper.plan(
            *self._arrays,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        self._planned.record()

    def run(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch.token_to_kv_pool.write(layer_id, batch.out_cache_loc, k, v)
        return self.attend(layer_id, q.contiguous(), batch, out)

    def attend(
        self, layer_id: int, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        pool, plan = batch.token_to_kv_pool, batch.attn_plan
        k, v = pool.k[layer_id], pool.v[layer_id]
        if out is None:
            out = torch.empty_like(q)
        if (prompts := plan.prompts) is not None:
            mine = prompts.tokens
            if isinstance(prompts, PagedPlan):
                prompts.wrapper.run(q[mine], pool.paged[layer_id], out=out[mine])
            else:
                slots = batch.out_cache_loc[mine]
                out[mine] = prompts.attend(q[mine], k.index_select(0, slots), v.index_select(0, slots))
        if (decode := plan.decode) is not None:
            attend(
                q[decode.tokens],
                k,
                v,
                batch.device_page_table,
                batch.req_pool_indices[decode.rows],
                batch.seq_lens[decode.rows],
                pool.page_size,
                decode.splits,
                out[decode.tokens],
            )
        return out


@dataclass(frozen=True, slots=True)
class FreshPlan:
    """Prompts that bring all of their tokens. starts: [rows + 1] int32, on the device."""

    tokens: slice
    starts: torch.Tensor
    longest: int

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[T, N, H], [T, K, H], [T, K, H] -> [T, N, H]."""
        starts, longest = self.starts, self.longest
        out: torch.Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False
        )[0]
        return out


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Prompts of which a part lies in the pool already."""

    tokens: slice
    wrapper: flashinfer.BatchPrefillWithPagedKVCacheWrapper


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Rows of one token. splits: pieces that each row's KV is cut into; see ops.decode_attention."""

    rows: slice
    tokens: slice
    splits: int


@dataclass(frozen=True, slots=True)
class PassPlan:
    """Parts of a pass, prompts first. Behind them there may be padding, which nobody attends for."""

    prompts: FreshPlan | PagedPlan | None
    decode: DecodePlan | None


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
    last = lengths - (counts - 1) * page_size
    table = page_table[np.array(pool_indices, dtype=np.int64), : int(counts.max())]
    indices = table[np.arange(table.shape[1], dtype=np.int32) < counts[:, None]]
    return counts, indices, last


def starts_of(counts: np.ndarray) -> np.ndarray:
    """[B] -> [B + 1] int32: where each row's entries start in a packed list, and its length."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
