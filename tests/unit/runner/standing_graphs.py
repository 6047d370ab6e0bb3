"""Graphs without a GPU: what was captured is called again; and the kernels' dataflow in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollout_engine.attention.torch_sdpa import TorchBackend
from rollout_engine.batch.forward import ForwardBatch
from rollout_engine.models.layers import rotate
from rollout_engine.ops import fused
from rollout_engine.runner import decode_graph
from rollout_engine.runner.decode_graph import DecodeCudaGraphRunner
from rollout_engine.runner.model_runner import ModelRunner
from rollout_engine.runner.prefill_graph import PrefillCudaGraphRunner
from weight_updater.adapters import HeldAdapter


class RecalledGraph:
    """Stands for a CUDA graph: `replay` calls the work again, which gives nothing back.

    What a real graph computes reaches the next one through memory that was there at the capture, and so must
    this one's: its only ways out are the tensors that the work writes to.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self._work()


class Recorder:
    """Captures RecalledGraphs, and keeps them in the order of their capture."""

    def __init__(self) -> None:
        self.graphs: list[RecalledGraph] = []
        self.pools: list[Any] = []

    def __call__(self, work: Callable[[], object], pool: Any) -> RecalledGraph:
        self.graphs.append(RecalledGraph(work))
        self.pools.append(pool)
        return self.graphs[-1]


def capture_prefill(runner: ModelRunner, sizes: list[int]) -> Recorder:
    """Give `runner` prefill graphs of these numbers of tokens."""
    recorder = Recorder()
    prefill = PrefillCudaGraphRunner(runner, sizes, runner._captured_storages(), recorder)
    with torch.inference_mode():
        prefill.capture("pool")
    runner.prefill_graph = prefill
    return recorder


def capture_decode(runner: ModelRunner, sizes: list[int], monkeypatch: Any) -> Recorder:
    """Give `runner` decode graphs of these numbers of rows, and every model the kernels' dataflow."""
    recorder = Recorder()
    use_kernels(runner, monkeypatch)
    monkeypatch.setattr(decode_graph, "kernels_for", lambda _: Kernels)
    runner.attn_backend = DevicePagesBackend(None)
    decode = DecodeCudaGraphRunner(runner, sizes, runner._captured_storages(), recorder)
    with torch.inference_mode():
        decode.capture("pool")
    runner.decode_graph = decode
    return recorder


class Kernels:
    """Where the GPU's kernels read and write: the residual in place, keys and values into the pool."""

    rms_norm = staticmethod(lambda x, weight, eps: _plain(fused.rms_norm, x, weight, eps))
    silu_mul = staticmethod(lambda gate_up: _plain(fused.silu_mul, gate_up))

    @staticmethod
    def matvec(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(x, weight.t(), out=out)

    @staticmethod
    def resolve_tokens(
        ids: torch.Tensor, pool_indices: torch.Tensor, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(ids < 0, last_tokens[pool_indices], ids)

    @staticmethod
    def add_rms_norm(
        delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual.add_(delta)
        return _plain(fused.rms_norm, residual, weight, eps)

    @staticmethod
    def norm_rope_write(qkv, norms, rope, slots, k_pool, v_pool, q_out=None):
        kv_heads, head_dim = k_pool.shape[1:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        if norms is not None:
            q_weight, k_weight, eps = norms
            q, k = _plain(fused.rms_norm, q, q_weight, eps), _plain(fused.rms_norm, k, k_weight, eps)
        k_pool.index_copy_(0, slots, rotate(k, rope))
        v_pool.index_copy_(0, slots, v)
        turned = rotate(q, rope)
        return turned if q_out is None else q_out.copy_(turned)


def _plain(function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """`function` of ops.fused as it is without kernels."""
    patched, fused.kernels_for = fused.kernels_for, lambda _: None
    try:
        return function(*arguments)
    finally:
        fused.kernels_for = patched


class PoolBackend(TorchBackend):
    """Attends to what lies in the pool, as FlashInfer does."""

    attends_to_pool = True

    def attend(
        self, layer_id: int, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        pool, slots = batch.token_to_kv_pool, batch.out_cache_loc
        k, v = pool.k[layer_id].index_select(0, slots), pool.v[layer_id].index_select(0, slots)
        return self.run(layer_id, q, k, v, batch, out)


class DevicePagesBackend(PoolBackend):
    """Plans from the lengths and rows on the device, whenever it is called, as a captured pass must."""

    captures = True

    def attend(
        self, layer_id: int, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch.seq_lens_cpu = batch.seq_lens.tolist()
        self.plan(batch)
        return super().attend(layer_id, q, batch, out)


def use_kernels(runner: ModelRunner, monkeypatch: Any) -> None:
    """Let `runner`, and every other model from now on, go the way that passes go on a GPU."""
    runner.attn_backend = PoolBackend(None)
    monkeypatch.setattr(fused, "kernels_for", lambda _: Kernels)


def fill_adapter(runner: ModelRunner, slot: int, rank: int, seed: int) -> HeldAdapter:
    """Draw an adapter into a slot of the bank."""
    assert runner.adapters is not None
    generator = torch.Generator().manual_seed(seed)
    for part in runner.adapters.parts.values():
        part.a[slot, :rank].normal_(0.0, 0.2, generator=generator)
        part.b[slot, :rank].normal_(0.0, 0.2, generator=generator)
        part.scaling[slot] = part.scales[slot] = 1.5
    return HeldAdapter(f"a{slot}", 1, slot, slot, rank, 0, 0, 0)
