"""What lies between a decoder layer's matrix products: plain torch here, one Triton kernel each on a GPU.

Both round where transformers does: a norm rounds to the model's dtype before the product with its weight, a
rotation rounds both products, silu rounds before the product.

T = packed tokens, D = features, N = query heads, K = kv heads, H = head dim
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

MANY_ROWS = 256
"""Up to so many rows, matrix products add in another order than those of a large batch, and a norm's order
gains nothing; with more, norms add as torch does, so that prompts come out as transformers computes them.
"""

_kernels: Any = None
"""The module ops.kernels, once a CUDA tensor has come by; False where triton is missing."""


def kernels_for(x: torch.Tensor) -> Any:
    """The module of Triton kernels if `x` lies on a GPU and triton is installed, else None."""
    global _kernels
    if x.device.type != "cuda":
        return None
    if _kernels is None:
        try:
            from rollout_engine.ops import kernels
        except ImportError:
            _kernels = False
        else:
            _kernels = kernels
    return _kernels or None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, the mean in float32. [*, D] -> same shape and dtype."""
    if (kernels := kernels_for(x)) is not None:
        normed: torch.Tensor = kernels.rms_norm(x, weight, eps)
        return normed
    wide = x.float()
    # The steps of transformers, each rounded as there: a norm in one operation gives other last bits.
    scale = wide.pow(2).mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    result: torch.Tensor = (wide * scale).to(x.dtype).mul_(weight)
    return result


def add_rms_norm(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual sum and its norm, both [T, D]; `residual` may be overwritten."""
    if (kernels := kernels_for(delta)) is not None:
        return kernels.add_rms_norm(delta, residual, weight, eps), residual
    residual = residual + delta
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the features times the second. [T, 2 * D] -> [T, D]."""
    if (kernels := kernels_for(gate_up)) is not None:
        product: torch.Tensor = kernels.silu_mul(gate_up)
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias on a GPU. [T, in], [out, in], [out] -> [T, out], written to `out` where given."""
    if bias is None and x.shape[0] == 1 and (kernels := kernels_for(x)) is not None:
        # One row is bound by reading the weight; BLAS reads it at three quarters of the speed.
        product: torch.Tensor = kernels.matvec(x, weight, out)
        return product
    if out is None:
        return F.linear(x, weight, bias)
    torch.mm(x, weight.t(), out=out)
    return out if bias is None else out.add_(bias)
