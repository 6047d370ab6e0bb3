"""Triton kernels of ops.fused and of attention's inputs. Imported on a GPU only.

T = packed tokens, D = features, N = query heads, K = kv heads, H = head dim
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rollout_engine.ops.fused import MANY_ROWS

ELEMENTWISE_BLOCK = 1024
ORDERED_STEP = 128
"""Values that a warp of torch's reduction takes at a time."""
MAX_ORDERED = 8192
"""Values that torch adds up with several warps, in yet another order."""
MAX_HEADS = 8
"""Of one program in _norm_rope_write_kernel, a power of two."""


@triton.jit
def _lanes(values, ROWS: tl.constexpr, LANES: tl.constexpr):
    """[ROWS, 4 * LANES] -> [ROWS, LANES]: what each thread of torch's reduction adds of its own."""
    even, odd = tl.split(tl.reshape(values, [ROWS, LANES, 2, 2]))
    value_0, value_2 = tl.split(even)
    value_1, value_3 = tl.split(odd)
    return ((value_0 + value_1) + value_2) + value_3


@triton.jit
def _across_lanes(sums, ROWS: tl.constexpr, LANES: tl.constexpr):
    """[ROWS, LANES] -> [ROWS]: each thread adds the one half of the remaining threads away, and again."""
    for step in tl.static_range(6):
        if LANES >> step > 1:
            halves = tl.reshape(sums, [ROWS, 2, LANES >> (step + 1)])
            low, high = tl.split(tl.permute(halves, (0, 2, 1)))
            sums = low + high
    return tl.reshape(sums, [ROWS])


@triton.jit
def _ordered_rms_norm_kernel(
    x, residual, weight, out, eps, D: tl.constexpr, ADD: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr
):
    """_rms_norm_kernel with squares added in torch's order: STEP // 4 threads take four values at a time."""
    row = tl.program_id(0).to(tl.int64) * D
    squares = tl.zeros((1, STEP), tl.float32)
    for first in tl.static_range(0, D, STEP):
        columns = row + first + tl.arange(0, STEP)[None, :]
        values = tl.load(x + columns)
        if ADD:
            values = (values.to(tl.float32) + tl.load(residual + columns).to(tl.float32)).to(values.dtype)
        wide = values.to(tl.float32)
        squares += wide * wide
    total = _across_lanes(_lanes(squares, 1, STEP // 4), 1, STEP // 4)
    scale = tl.rsqrt(total * (1.0 / D) + eps)
    tl.debug_barrier()  # other threads have read what is overwritten next
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    values = tl.load(x + row + columns, mask=mask, other=0.0)
    if ADD:
        before = tl.load(residual + row + columns, mask=mask, other=0.0)
        values = (values.to(tl.float32) + before.to(tl.float32)).to(values.dtype)
        tl.store(residual + row + columns, values, mask=mask)
    normed = (values.to(tl.float32) * scale).to(values.dtype).to(tl.float32)
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (normed * factor).to(values.dtype), mask=mask)


@triton.jit
def _rms_norm_kernel(x, residual, weight, out, D, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One row for each program. ADD: residual += x first, and the norm is of the sum."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    values = tl.load(x + row * D + columns, mask=mask, other=0.0)
    if ADD:
        before = tl.load(residual + row * D + columns, mask=mask, other=0.0)
        values = (values.to(tl.float32) + before.to(tl.float32)).to(values.dtype)
        tl.store(residual + row * D + columns, values, mask=mask)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = (wide * scale).to(values.dtype).to(tl.float32)
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * D + columns, (normed * factor).to(values.dtype), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ops.fused. x: [*, D], made contiguous."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch_norm(x, x, weight, out, eps, add=False)
    return out


def add_rms_norm(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds delta to residual in place and returns the norm of the sum; [T, D] each, contiguous."""
    out = torch.empty_like(residual)
    _launch_norm(delta, residual, weight, out, eps, add=True)
    return out


def _launch_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, *, add: bool
) -> None:
    D = x.shape[-1]
    rows = x.numel() // D
    block = triton.next_power_of_2(D)
    if rows > MANY_ROWS and D % ORDERED_STEP == 0 and D < MAX_ORDERED:
        _ordered_rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            eps,
            D,
            ADD=add,
            STEP=ORDERED_STEP,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
        )
    elif rows:
        _rms_norm_kernel[(rows,)](
            x, residual, weight, out, D, eps, ADD=add, BLOCK=block, num_warps=_warps(block)
        )


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


@triton.jit
def _silu_mul_kernel(gate_up, out, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < D
    gate = tl.load(gate_up + row * 2 * D + columns, mask=mask, other=0.0)
    up = tl.load(gate_up + row * 2 * D + D + columns, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = active.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * D + columns, product.to(gate.dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ops.fused. gate_up: [T, 2 * D] contiguous."""
    rows, D = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, D), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(D, ELEMENTWISE_BLOCK))
        _silu_mul_kernel[grid](gate_up, out, D, BLOCK=ELEMENTWISE_BLOCK, num_warps=4)
    return out


@triton.jit
def _matvec_kernel(x, weight, out, features, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = sum over d of weight[n, d] * x[d], for ROWS rows of the weight in each program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows[:, None] < features
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < D
        factors = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
        at = rows[:, None].to(tl.int64) * D + columns[None, :]
        values = tl.load(weight + at, mask=row_mask & mask[None, :], other=0.0).to(tl.float32)
        sums += values * factors[None, :]
    tl.store(out + rows, tl.sum(sums, 1).to(out.dtype.element_ty), mask=rows < features)


def matvec(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T for one row. [1, D], [features, D] -> [1, features], sums in float32."""
    features, D = weight.shape
    if out is None:
        out = torch.empty((1, features), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(features, 2),)
    _matvec_kernel[grid](x.contiguous(), weight, out, features, D, ROWS=2, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """float32 -> dtype -> float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _sum_of_head(first, second, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Halves of heads, [HEADS, HALF] each -> their sums [HEADS], added as torch adds rows of 2 * HALF: a
    thread takes values one by one where a row has fewer than 128, else four at a time.
    """
    if HALF < 64:
        sums = _across_lanes(first + second, HEADS, HALF)
    elif HALF == 64:
        lanes = _lanes(first, HEADS, HALF // 4) + _lanes(second, HEADS, HALF // 4)
        sums = _across_lanes(lanes, HEADS, HALF // 4)
    else:
        sums = _across_lanes(_lanes(first + second, HEADS, HALF // 4), HEADS, HALF // 4)
    return sums


@triton.jit
def _norm_rope_write_kernel(
    qkv,
    q_out,
    k_pool,
    v_pool,
    slots,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    N,
    K,
    NORM: tl.constexpr,
    ORDERED: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """HEADS heads of one token for each program: all of queries, all of keys or all of values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS
    H: tl.constexpr = 2 * HALF
    half = tl.arange(0, HALF)
    at = tl.arange(0, HEADS)[:, None] * H + half[None, :]
    source = qkv + (token * (N + 2 * K) + head) * H
    first = tl.load(source + at)
    second = tl.load(source + HALF + at)
    dtype: tl.constexpr = qkv.dtype.element_ty
    slot = tl.load(slots + token)
    if head >= N + K:
        target = v_pool + (slot * K + (head - N - K)) * H
        tl.store(target + at, first)
        tl.store(target + HALF + at, second)
    else:
        wide_first = first.to(tl.float32)
        wide_second = second.to(tl.float32)
        if NORM:
            if ORDERED:
                squares = _sum_of_head(wide_first * wide_first, wide_second * wide_second, HEADS, HALF)
            else:
                squares = tl.sum(wide_first * wide_first, 1) + tl.sum(wide_second * wide_second, 1)
            scale = tl.rsqrt(squares * (1.0 / H) + eps)[:, None]
            weight = q_weight
            if head >= N:
                weight = k_weight
            factor = tl.load(weight + half).to(tl.float32)[None, :]
            wide_first = _rounded(_rounded(wide_first * scale, dtype) * factor, dtype)
            factor = tl.load(weight + HALF + half).to(tl.float32)[None, :]
            wide_second = _rounded(_rounded(wide_second * scale, dtype) * factor, dtype)
        angles = token * H + half
        cos_first = tl.load(cos + angles).to(tl.float32)[None, :]
        sin_first = tl.load(sin + angles).to(tl.float32)[None, :]
        cos_second = tl.load(cos + angles + HALF).to(tl.float32)[None, :]
        sin_second = tl.load(sin + angles + HALF).to(tl.float32)[None, :]
        turned_first = _rounded(wide_first * cos_first, dtype) + _rounded(wide_second * sin_first, dtype)
        turned_second = _rounded(wide_second * cos_second, dtype) + _rounded(wide_first * sin_second, dtype)
        target = q_out + (token * N + head) * H
        if head >= N:
            target = k_pool + (slot * K + (head - N)) * H
        tl.store(target + at, turned_first.to(dtype))
        tl.store(target + HALF + at, turned_second.to(dtype))


def norm_rope_write(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    rope: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, write keys and values to the pool.

    Args:
        qkv: [T, (N + 2K) * H] contiguous.
        norms: weights [H] of query and key norms and their eps, where the model has them.
        rope: cos and sin [T, 1, H], the first half of sin negated.
        slots: [T] int64 token slots.
        k_pool, v_pool: [token slots, K, H] of one layer.
        q_out: where the queries go; None makes room for them.

    Returns:
        Queries, [T, N, H].
    """
    T = qkv.shape[0]
    K, H = k_pool.shape[1], k_pool.shape[2]
    N = qkv.shape[1] // H - 2 * K
    if q_out is None:
        q_out = torch.empty((T, N, H), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norms if norms is not None else (qkv, qkv, 0.0)
    cos, sin = rope
    heads = math.gcd(math.gcd(N, K), MAX_HEADS)
    _norm_rope_write_kernel[(T, (N + 2 * K) // heads)](
        qkv,
        q_out,
        k_pool,
        v_pool,
        slots,
        cos,
        sin,
        q_weight,
        k_weight,
        eps,
        N,
        K,
        NORM=norms is not None,
        ORDERED=T > MANY_ROWS,
        HALF=H // 2,
        HEADS=heads,
        num_warps=max(1, heads * H // 512),
        enable_fp_fusion=T <= MANY_ROWS,
    )
    return q_out


@triton.jit
def _resolve_kernel(ids, pool_indices, last_tokens, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    given = tl.load(ids + at, mask=mask, other=0)
    pools = tl.load(pool_indices + at, mask=mask, other=0)
    last = tl.load(last_tokens + pools, mask=mask & (given < 0), other=0)
    tl.store(out + at, tl.where(given < 0, last, given), mask=mask)


def resolve_tokens(ids: torch.Tensor, pool_indices: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """Token ids, those below 0 replaced by what was sampled last for their row of the pool.

    ids, pool_indices: [T] int64. last_tokens: [pool rows] int64. Returns [T] int64.
    """
    out = torch.empty_like(ids)
    _resolve_kernel[(triton.cdiv(ids.numel(), 1024),)](
        ids, pool_indices, last_tokens, out, ids.numel(), BLOCK=1024
    )
    return out
