"""ForwardBatch: the tensors of one forward pass, made straight from a ScheduleBatch.

T = packed tokens, B = rows, S = sampled rows, V = vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rollout_engine.batch.adapters import AdapterRows, rows_of, token_slots
from rollout_engine.batch.packing import Packer
from rollout_engine.batch.random_draw import uniforms
from rollout_engine.batch.schedule import CaptureHiddenMode, ForwardMode, SampleRow, ScheduleBatch

TOP_K_OFF = 1 << 62
"""More than any vocabulary."""
GREEDY_TEMPERATURE = 1.0
"""The temperature that log-probabilities of a greedy row (temperature 0) are taken at."""


class Pools(Protocol):
    """What ForwardBatch needs of a runner."""

    packer: Packer
    req_to_token_pool: torch.Tensor  # [max_running_requests, context_length] int32
    page_table: np.ndarray  # [max_running_requests, pages of context_length] int32, on the host
    device_page_table: torch.Tensor  # the same on the device
    last_tokens: torch.Tensor  # [max_running_requests] int64, sampled last for each row of the pool
    token_to_kv_pool: Any  # runner.kv_pool.KVPool
    attn_backend: Any  # attention.base.AttentionBackend
    num_adapter_slots: int  # 0: no adapter can be held


@dataclass(slots=True)
class SamplingInfo:
    """Sampling parameters of the S sampled rows, as tensors, and what the sampler may skip.

    A copy for one forward pass: nothing that happens to the sequences afterwards changes it. A row with
    temperature 0 is greedy; its temperature here is 1 and its truncation off, since its log-probabilities
    are those of the whole distribution at temperature 1.
    """

    rows: list[SampleRow]
    packer: Packer
    temperatures: torch.Tensor  # [S] float32, never 0
    draws: torch.Tensor  # [S] float64 in [0, 1)
    greedy: torch.Tensor  # [S] bool
    raw: torch.Tensor  # [S] bool, True where raw log-probabilities are asked for
    top_k: torch.Tensor | None  # [S] int64, V or more where off; None where no row has it
    top_p: torch.Tensor | None  # [S] float64
    min_p: torch.Tensor | None  # [S] float32
    truncated: torch.Tensor | None  # int64, the rows that have top_k or top_p
    any_greedy: bool
    all_greedy: bool
    plain: bool  # all temperatures are 1
    untouched: bool  # no penalty, bias, forbidden id, truncation or top log-probabilities
    num_top_logprobs: int  # the most that a row asks for
    any_raw: bool

    @classmethod
    def from_rows(cls, rows: list[SampleRow], packer: Packer) -> SamplingInfo:
        """Bring what the rows ask for to the packer's device."""
        params = [row.params for row in rows]
        greedy = np.array([p.temperature == 0.0 for p in params], dtype=np.bool_)
        temperatures = np.array([p.temperature for p in params], dtype=np.float32)
        temperatures[greedy] = GREEDY_TEMPERATURE
        top_k = np.array([p.top_k if p.top_k > 0 else TOP_K_OFF for p in params], dtype=np.int64)
        top_k[greedy] = TOP_K_OFF
        top_p = np.where(greedy, 1.0, np.array([p.top_p for p in params], dtype=np.float64))
        min_p = np.where(greedy, np.float32(0), np.array([p.min_p for p in params], dtype=np.float32))
        raw = np.array([p.logprobs == "raw" for p in params], dtype=np.bool_)
        draws = uniforms(
            [row.seed for row in rows], [row.sample_index for row in rows], [row.position for row in rows]
        )
        has_k, has_p, has_min = bool((top_k < TOP_K_OFF).any()), bool((top_p < 1.0).any()), bool(min_p.any())
        on_device = packer.put([temperatures, draws, greedy, raw])
        off: list[torch.Tensor | None] = [None] * 4
        if has_k or has_p or has_min:
            truncated = np.flatnonzero((top_k < TOP_K_OFF) | (top_p < 1.0))
            found = packer.put([top_k, top_p, min_p, truncated])
            wanted = (has_k, has_p, has_min, has_k or has_p)
            off = [tensor if want else None for tensor, want in zip(found, wanted, strict=True)]
        changed = any(p.has_penalties or p.logit_bias for p in params) or any(r.forbidden_ids for r in rows)
        num_top = max((p.top_logprobs for p in params), default=0)
        return cls(
            rows=rows,
            packer=packer,
            temperatures=on_device[0],
            draws=on_device[1],
            greedy=on_device[2],
            raw=on_device[3],
            top_k=off[0],
            top_p=off[1],
            min_p=off[2],
            truncated=off[3],
            any_greedy=bool(greedy.any()),
            all_greedy=bool(greedy.all()),
            plain=bool((temperatures == 1.0).all()),
            untouched=not (changed or has_k or has_p or has_min or num_top),
            num_top_logprobs=num_top,
            any_raw=bool(raw.any()),
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
    req_pool_indices_cpu: list[int]  # [B]
    page_table: np.ndarray  # on the host, see Pools
    device_page_table: torch.Tensor
    logits_indices: torch.Tensor  # [S] int64, packed offset of each sampled row's last token
    sampled_pool_indices: torch.Tensor  # [S] int64, row of the pool of each sampled row
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    return_hidden_states_before_norm: bool = False
    attn_plan: Any = None  # what AttentionBackend.plan left for run
    q_out: torch.Tensor | None = None  # [T, N, H], where layers put their queries, if not in new memory
    adapters: AdapterRows | None = None  # None: no row has one

    @classmethod
    def init_new(
        cls, batch: ScheduleBatch, runner: Pools, inputs: torch.Tensor | None = None
    ) -> ForwardBatch:
        """Build the step's tensors on the runner's device and fill req_to_token_pool.

        Consumes and resets the batch's one-shot overrides. Synchronises nothing.

        Args:
            inputs: [3, T] int64 for input ids, positions and token slots (a fourth row takes adapters'
                slots), T at least the batch's tokens: they are written there, and what is left over is
                padding. None makes them as long as needed.
        """
        seq_lens = batch.seq_lens if batch.seq_lens_cpu_cache is None else batch.seq_lens_cpu_cache
        capture, before_norm = batch.capture_hidden_mode, batch.return_hidden_states_before_norm
        batch.seq_lens_cpu_cache = None
        batch.capture_hidden_mode = CaptureHiddenMode.NULL
        batch.return_hidden_states_before_norm = False

        write_slots(batch, runner)
        ends = np.cumsum(np.array(batch.extend_lens, dtype=np.int64))
        sampled_rows = np.array([sample.row for sample in batch.samples], dtype=np.int64)
        pool_indices = np.array(batch.req_pool_indices, dtype=np.int64)
        tokens = np.array([batch.input_ids, batch.positions, batch.out_cache_loc], dtype=np.int64)
        arrays = [
            pool_indices,
            np.array(seq_lens, dtype=np.int64),
            ends[sampled_rows] - 1,
            pool_indices[sampled_rows],
        ]
        if inputs is None:
            rows, lengths, last, sampled, ids, positions, slots = runner.packer.put([*arrays, *tokens])
        else:
            rows, lengths, last, sampled = runner.packer.put(arrays)
            tokens = np.concatenate((tokens, _slots_of(batch)[None]))[: len(inputs)]
            runner.packer.fill(inputs, _padded(tokens, inputs.shape[1], runner.token_to_kv_pool.padding_slot))
            ids, positions, slots = inputs[:3]
        _fill_unknown(batch, ids, pool_indices, ends, runner)
        return cls(
            forward_mode=batch.forward_mode,
            batch_size=batch.batch_size,
            input_ids=ids,
            positions=positions,
            req_pool_indices=rows,
            seq_lens=lengths,
            out_cache_loc=slots,
            token_to_kv_pool=runner.token_to_kv_pool,
            req_to_token_pool=runner.req_to_token_pool,
            attn_backend=runner.attn_backend,
            sampling_info=SamplingInfo.from_rows(batch.samples, runner.packer),
            seq_lens_cpu=list(seq_lens),
            extend_lens_cpu=list(batch.extend_lens),
            req_pool_indices_cpu=list(batch.req_pool_indices),
            page_table=runner.page_table,
            device_page_table=runner.device_page_table,
            logits_indices=last,
            sampled_pool_indices=sampled,
            capture_hidden_mode=capture,
            return_hidden_states_before_norm=before_norm,
            adapters=None if inputs is not None else _adapter_rows(batch, runner),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows, without padding behind them."""
        return sum(self.extend_lens_cpu)


def _slots_of(batch: ScheduleBatch) -> np.ndarray:
    """[T] int64: the slot of each token's adapter."""
    return token_slots(batch.adapters or [None] * batch.batch_size, batch.extend_lens)


def _adapter_rows(batch: ScheduleBatch, runner: Pools) -> AdapterRows | None:
    return rows_of(batch.adapters, batch.extend_lens, runner.packer, runner.num_adapter_slots)


def _padded(tokens: np.ndarray, size: int, padding_slot: int) -> np.ndarray:
    """[3 or 4, T] -> [.., size]: padding is token 0 at position 0, written to the padding slot, with no
    adapter.
    """
    padded = np.zeros((len(tokens), size), dtype=np.int64)
    padded[2] = padding_slot
    padded[:, : tokens.shape[1]] = tokens
    return padded


def _fill_unknown(
    batch: ScheduleBatch, ids: torch.Tensor, pool_indices: np.ndarray, ends: np.ndarray, runner: Pools
) -> None:
    """Replace ids that the host does not know yet by what the pass before sampled for the same row."""
    unknown = np.flatnonzero(np.array(batch.input_ids, dtype=np.int64) < 0)
    if not unknown.size:
        return
    rows = np.searchsorted(ends, unknown, side="right")
    places, pools = runner.packer.put([unknown, pool_indices[rows]])
    ids.index_copy_(0, places, runner.last_tokens.index_select(0, pools))


def write_slots(batch: ScheduleBatch, runner: Pools) -> None:
    """Apply `slot_writes` to the page tables, or to req_to_token_pool where the attention reads that."""
    if not batch.slot_writes:
        return
    page_size = runner.token_to_kv_pool.page_size
    by_token = runner.attn_backend.reads_token_pool
    target = runner.req_to_token_pool if by_token else runner.device_page_table
    columns = target.shape[1]
    places, values = [], []
    for row, first, slots in batch.slot_writes:
        found = np.array(slots if by_token else slots[::page_size], dtype=np.int32)
        start = row * columns + first
        if not by_token:
            found //= page_size
            start = row * columns + first // page_size
            runner.page_table[row, first // page_size : first // page_size + len(found)] = found
        places.append(np.arange(start, start + len(found), dtype=np.int64))
        values.append(found)
    at, written = runner.packer.put([np.concatenate(places), np.concatenate(values)])
    target.view(-1).index_copy_(0, at, written)
