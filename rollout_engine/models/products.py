"""Products of activations with weights: which operation takes them.

On a GPU that is cuBLAS or a kernel of ops/kernels.py. On a CPU, in float32, it depends on the rows, since a
BLAS copies the whole weight into another order before it multiplies: a prompt makes up for that, a decode
step of more than a few rows does not. Speeds are those of SmolLM2-135M's matrices on two cores with AVX-512.

T = rows of activations
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from rollout_engine.ops import fused

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x, weight, bias) -> x @ weight.T + bias."""

MAX_FEW_ROWS = 8
"""Rows of a decode step up to which transformers' own call is the fastest, up to three by half."""
MAX_FEW_HEAD_ROWS = 3
"""The same of the head, whose matrix is wider."""
MAX_HEAD_ROWS = 64
"""Rows up to which the head gains by taking its weight on the left, the transposition of logits included."""


def find_onednn(operations: Any) -> Product | None:
    """oneDNN's product of float32 matrices on a CPU; None where this torch has none that works.

    It is a private operation of torch: one that is missing, takes other arguments or computes something
    else is not used.

    Args:
        operations: torch.ops.mkldnn, or what stands in for it.
    """
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    bias = torch.arange(4.0)
    try:
        operation = operations._linear_pointwise.default

        def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out: torch.Tensor = operation(x, weight, bias, "none", [], "")
            return out

        if not torch.equal(product(x, weight, bias), F.linear(x, weight, bias)):  # small integers: exact
            return None
        by_columns = weight.t().contiguous().t()  # what one product of a decode step leaves to the next
        if not torch.equal(product(x, by_columns, None), F.linear(x, weight)):
            return None
        return product if torch.equal(product(x, weight, None), F.linear(x, weight)) else None
    except (AttributeError, RuntimeError, TypeError):
        return None


ONEDNN: Product | None = find_onednn(torch.ops.mkldnn)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, decode: bool = False
) -> torch.Tensor:
    """x @ weight.T + bias. [T, in], [out, in], [out] -> [T, out].

    On a CPU a prompt's products are those of transformers, by the same call: the rounding of any other order
    grows through the layers to more than 1e-4 in the logits.

    Args:
        decode: each row is the one new token of a sequence. Transformers, too, sums those in an order that
            depends on how many they are; oneDNN's order is the same for any number above MAX_FEW_ROWS, and
            it is faster. The result may then be a transposed matrix in memory.
    """
    if x.device.type == "cuda":
        return fused.linear(x, weight, bias)
    if x.device.type != "cpu" or x.dtype is not torch.float32:
        return F.linear(x, weight, bias)
    if decode and x.shape[0] > MAX_FEW_ROWS and ONEDNN is not None:
        return _weight_first(x, weight, bias)
    return F.linear(x, weight, bias)


def head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` where no layer follows that would make the rounding larger: the same, as fast as it goes."""
    if x.device.type != "cpu" or x.dtype is not torch.float32 or ONEDNN is None:
        return linear(x, weight, bias)
    if x.shape[0] <= MAX_FEW_HEAD_ROWS:
        return F.linear(x, weight, bias)
    if x.shape[0] <= MAX_HEAD_ROWS:
        return _weight_first(x, weight, bias).contiguous()
    return ONEDNN(x, weight, bias)


def _weight_first(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """By oneDNN, the weight on the left: it is read once, where it lies, and each value meets a whole vector
    of rows. Any other way it is copied first. [T, out], its columns with nothing between their values but
    what pads them.
    """
    assert ONEDNN is not None
    rows = x.shape[0]
    if missing := _padded(rows) - rows:
        x = F.pad(x, (0, 0, 0, missing))
    out = ONEDNN(weight, x, None).t()[:rows]
    return out if bias is None else out.add_(bias)


def _padded(rows: int) -> int:
    """Rows that oneDNN is given. It compiles a product of half a megabyte for each number, and keeps it."""
    step = 8 if rows <= 32 else 16
    return -(-rows // step) * step
