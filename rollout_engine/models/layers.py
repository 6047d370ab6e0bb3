"""Building blocks of decoder models. Parameters hold no gradients; their storage belongs to an arena.

T = packed tokens, N = query heads, K = kv heads, H = head dim, D = hidden size
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from rollout_engine.attention.base import AttentionBackend
from rollout_engine.batch.adapters import AdapterRows
from rollout_engine.batch.forward import ForwardBatch
from rollout_engine.models import products
from rollout_engine.models.config import ModelConfig, RopeConfig
from rollout_engine.ops import fused

Rope = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of a step's positions, each [T, 1, H], in the model's dtype."""

Heads = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Queries [T, N, H]; keys and values [T, K, H], or None where they lie in the KV pool already."""


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, the mean in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape and dtype."""
        return fused.rms_norm(x, self.weight, self.eps)

    def add(self, delta: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of residual + delta, and that sum; [T, size] each. `residual` may be overwritten."""
        return fused.add_rms_norm(delta, residual, self.weight, self.eps)


class Adapters(Protocol):
    """LoRA adapters beside one matrix; see models/lora.py."""

    def add(self, out: torch.Tensor, x: torch.Tensor, rows: AdapterRows) -> torch.Tensor:
        """Add what they make of x [T, in_features] to out [T, out_features], in place; gives `out`."""
        ...


class FusedLinear(nn.Module):
    """One matrix whose consecutive rows are several Hugging Face linears: one matrix product for all.

    Args:
        parts: (name of the linear beside this module, its output features), in row order.
    """

    def __init__(self, in_features: int, parts: tuple[tuple[str, int], ...], *, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        rows = sum(size for _, size in parts)
        self.weight = parameter(rows, in_features)
        self.bias = parameter(rows) if bias else None
        self.adapters: Adapters | None = None

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, in_features] -> [T, sum of the parts], through the batch's adapters."""
        return _linear(self, x, batch)


class Linear(nn.Module):
    """x @ weight.T + bias."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self.adapters: Adapters | None = None

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, in_features] -> [T, out_features], through the batch's adapters."""
        return _linear(self, x, batch)


def _linear(module: FusedLinear | Linear, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """The product of a layer's matrix, and what its adapters add. Contiguous by rows or by columns."""
    out = products.linear(x, module.weight, module.bias, decode=batch.forward_mode.is_decode())
    if batch.adapters is None or module.adapters is None:
        return out
    return module.adapters.add(out, x, batch.adapters)


class Head(nn.Module):
    """The last matrix: no layer follows that would make its rounding larger. It has no adapters."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, in_features] -> [R, out_features], written to `out` where given (GPU only)."""
        if out is not None:
            return fused.linear(x, self.weight, self.bias, out)
        return products.head(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of `weight` by token id."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, D]."""
        return F.embedding(input_ids, self.weight)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angles per position, [H / 2] float32, in the arithmetic of transformers."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, frequencies)
    return frequencies


def _llama3_frequencies(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend smoothly between the two."""
    wavelengths = 2 * math.pi / frequencies
    low_wavelength = rope.original_context / rope.low_freq_factor
    high_wavelength = rope.original_context / rope.high_freq_factor
    scaled = torch.where(wavelengths > low_wavelength, frequencies / rope.factor, frequencies)
    smooth = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = ~(wavelengths < high_wavelength) & ~(wavelengths > low_wavelength)
    return torch.where(between, blended, scaled)


class RotaryEmbedding(nn.Module):
    """cos and sin of every position. Derived state: never in a checkpoint, recomputed by `fill`."""

    cos: torch.Tensor  # [context_length, H] in the model's dtype
    sin: torch.Tensor  # [context_length, H]; the first half negated, see `rotate`

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        shape = (config.context_length, config.head_dim)
        self.register_buffer("cos", torch.empty(shape, dtype=config.dtype), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=config.dtype), persistent=False)
        self._angles: torch.Tensor | None = None  # [context_length, H / 2] float32

    def fill(self) -> None:
        """Compute the tables again, in place: captured addresses stay right. Waits for no device, but for
        the first time.
        """
        if self._angles is None:
            frequencies = inverse_frequencies(self.config.rope, self.config.head_dim).to(self.cos.device)
            positions = torch.arange(self.config.context_length, device=self.cos.device).float()
            self._angles = torch.outer(positions, frequencies)
        cos, sin = self._angles.cos(), self._angles.sin()
        self.cos.copy_(torch.cat((cos, cos), dim=-1))
        self.sin.copy_(torch.cat((-sin, sin), dim=-1))

    def forward(self, positions: torch.Tensor) -> Rope:
        """[T] int64 -> cos, sin, each [T, 1, H] in the model's dtype."""
        return self.cos.index_select(0, positions)[:, None], self.sin.index_select(0, positions)[:, None]


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + H/2]); [T, *, H] -> the same shape.

    x * cos + swap_halves(x) * sin, the sign being in sin.
    """
    cos, sin = rope
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    # Two products and a sum, each rounded, as in transformers; addcmul would round once less.
    return (x * cos).add_(swapped.mul_(sin))


class Attention(nn.Module):
    """Grouped-query attention over the paged KV pool: `heads`, `attend`, `project`.

    Attention itself depends on the lengths of rows, what comes before and after it does not.

    Args:
        layer_id: index of the layer's K and V in the pool.
        qk_norm: normalise each query and key head before the rotation (Qwen3).
    """

    def __init__(
        self, config: ModelConfig, layer_id: int, *, qkv_bias: bool, o_bias: bool, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None

    def heads(self, x_TD: torch.Tensor, rope: Rope, batch: ForwardBatch) -> Heads:
        """What attention takes, normalised and rotated; where one kernel does it all, K and V are written."""
        qkv = self.qkv_proj(x_TD, batch)
        kernels = fused.kernels_for(qkv) if batch.attn_backend.attends_to_pool else None
        if kernels is not None:
            pool = batch.token_to_kv_pool
            k_pool, v_pool = pool.k[self.layer_id], pool.v[self.layer_id]
            slots = batch.out_cache_loc
            q_TNH = kernels.norm_rope_write(qkv, self._norms(), rope, slots, k_pool, v_pool, batch.q_out)
            return q_TNH, None, None
        qkv = qkv.contiguous().view(x_TD.shape[0], -1, self.head_dim)
        qk, v_TKH = qkv[:, : -self.num_kv_heads], qkv[:, -self.num_kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        qk = rotate(qk, rope)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], v_TKH

    def attend(self, heads: Heads, batch: ForwardBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, N, H] of attention, in `out` if given; K and V lie in the pool afterwards."""
        q_TNH, k_TKH, v_TKH = heads
        backend: AttentionBackend = batch.attn_backend
        if k_TKH is None or v_TKH is None:
            return backend.attend(self.layer_id, q_TNH, batch, out)
        return backend.run(self.layer_id, q_TNH, k_TKH, v_TKH, batch, out)

    def project(self, attended_TNH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, N, H] -> [T, D]."""
        out: torch.Tensor = self.o_proj(attended_TNH.reshape(attended_TNH.shape[0], -1), batch)
        return out

    def _norms(self) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        parts = (("gate_proj", size), ("up_proj", size))
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        out: torch.Tensor = self.down_proj(fused.silu_mul(self.gate_up_proj(x_TD, batch)), batch)
        return out
