"""ForwardBatch: the tensors of one forward pass, made straight from a ScheduleBatch.

T = packed tokens, B = rows, S = sampled rows, V = vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rollout_engine.batch.schedule import CaptureHiddenMode, ForwardMode, SampleRow, ScheduleBatch

GREEDY_TEMPERATURE = 1.0
"""The temperature that log-probabilities of a greedy row (temperature 0) are taken at."""


class Pools(Protocol):
    """What ForwardBatch needs of a runner."""

    device: torch.device
    req_to_token_pool: torch.Tensor  # [max_running_requests, context_length] int32
    token_to_kv_pool: Any  # runner.kv_pool.KVPool
    attn_backend: Any  # attention.base.AttentionBackend


@dataclass(slots=True)
class SamplingInfo:
    """Sampling parameters of the S sampled rows, as tensors, and what the sampler may skip.

    A row with temperature 0 is greedy; its temperature here is 1 and its truncation off, since its
    log-probabilities are those of the whole distribution at temperature 1.
    """

    rows: list[SampleRow]
    temperatures: torch.Tensor  # [S] float32, never 0
    greedy: torch.Tensor | None  # [S] bool; None where no row is
    top_k: torch.Tensor | None  # [S] int64, V or more where off; None where no row has it
    top_p: torch.Tensor | None  # [S] float64
    min_p: torch.Tensor | None  # [S] float32
    all_greedy: bool
    plain: bool  # all temperatures are 1
    num_top_logprobs: int  # the most that a row asks for
    any_raw: bool
    any_processed: bool

    @classmethod
    def from_rows(cls, rows: list[SampleRow], device: torch.device) -> SamplingInfo:
        params = [row.params for row in rows]
        greedy = [p.temperature == 0.0 for p in params]
        off = 1 << 62
        temperatures = [
            GREEDY_TEMPERATURE if g else p.temperature for p, g in zip(params, greedy, strict=True)
        ]
        top_k = [off if g or p.top_k <= 0 else p.top_k for p, g in zip(params, greedy, strict=True)]
        top_p = [1.0 if g else p.top_p for p, g in zip(params, greedy, strict=True)]
        min_p = [0.0 if g else p.min_p for p, g in zip(params, greedy, strict=True)]

        def tensor(values: list[Any], dtype: torch.dtype, wanted: bool) -> torch.Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device) if wanted else None

        return cls(
            rows=rows,
            temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
            greedy=tensor(greedy, torch.bool, any(greedy)),
            top_k=tensor(top_k, torch.int64, min(top_k, default=off) < off),
            top_p=tensor(top_p, torch.float64, min(top_p, default=1.0) < 1.0),
            min_p=tensor(min_p, torch.float32, max(min_p, default=0.0) > 0.0),
            all_greedy=all(greedy),
            plain=all(t == 1.0 for t in temperatures),
            num_top_logprobs=max((p.top_logprobs for p in params), default=0),
            any_raw=any(p.logprobs == "raw" for p in params),
            any_processed=any(p.logprobs == "processed" for p in params),
        )


@dataclass(slots=True)
class ForwardBatch:
    """The tensors of one step; owns them. Lists are the host's copies, for planning without a sync."""

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    req_pool_indices: torch.Tensor  # [B] int64
    seq_lens: torch.Tensor  # [B] int64, KV length after this step
    out_cache_loc: torch.Tensor  # [T] int64; the pool's padding slot for padded tokens
    token_to_kv_pool: Any
    req_to_token_pool: torch.Tensor
    attn_backend: Any
    sampling_info: SamplingInfo
    seq_lens_cpu: list[int]  # [B]
    extend_lens_cpu: list[int]  # [B]
    logits_indices: torch.Tensor  # [S] int64, packed offset of each sampled row's last token
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    return_hidden_states_before_norm: bool = False
    attn_plan: Any = None  # what AttentionBackend.plan left for run

    @classmethod
    def init_new(cls, batch: ScheduleBatch, runner: Pools) -> ForwardBatch:
        """Build the step's tensors on the runner's device and fill req_to_token_pool.

        Consumes and resets the batch's one-shot overrides. Synchronises nothing.
        """
        device = runner.device

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.from_numpy(np.array(values, dtype=np.int64)).to(device, non_blocking=True)

        seq_lens = batch.seq_lens if batch.seq_lens_cpu_cache is None else batch.seq_lens_cpu_cache
        capture, before_norm = batch.capture_hidden_mode, batch.return_hidden_states_before_norm
        batch.seq_lens_cpu_cache = None
        batch.capture_hidden_mode = CaptureHiddenMode.NULL
        batch.return_hidden_states_before_norm = False

        _write_slots(batch, runner.req_to_token_pool)
        ends = np.cumsum(np.array(batch.extend_lens, dtype=np.int64))
        sampled = ends[np.array([sample.row for sample in batch.samples], dtype=np.int64)] - 1
        return cls(
            forward_mode=batch.forward_mode,
            batch_size=batch.batch_size,
            input_ids=tensor(batch.input_ids),
            positions=tensor(batch.positions),
            req_pool_indices=tensor(batch.req_pool_indices),
            seq_lens=tensor(seq_lens),
            out_cache_loc=tensor(batch.out_cache_loc),
            token_to_kv_pool=runner.token_to_kv_pool,
            req_to_token_pool=runner.req_to_token_pool,
            attn_backend=runner.attn_backend,
            sampling_info=SamplingInfo.from_rows(batch.samples, device),
            seq_lens_cpu=list(seq_lens),
            extend_lens_cpu=list(batch.extend_lens),
            logits_indices=torch.from_numpy(sampled).to(device, non_blocking=True),
            capture_hidden_mode=capture,
            return_hidden_states_before_norm=before_norm,
        )

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


def _write_slots(batch: ScheduleBatch, req_to_token_pool: torch.Tensor) -> None:
    """Apply `slot_writes` in one scatter: flat index = pool row * columns + position."""
    if not batch.slot_writes:
        return
    columns = req_to_token_pool.shape[1]
    places = [
        np.arange(row * columns + first, row * columns + first + len(slots), dtype=np.int64)
        for row, first, slots in batch.slot_writes
    ]
    values = np.concatenate([np.array(slots, dtype=np.int32) for _, _, slots in batch.slot_writes])
    device = req_to_token_pool.device
    req_to_token_pool.view(-1).index_copy_(
        0, torch.from_numpy(np.concatenate(places)).to(device), torch.from_numpy(values).to(device)
    )
