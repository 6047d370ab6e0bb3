"""LoRA adapters beside the matrices of a model: y = W x + scaling * B (A x), another A and B for each token.

T = packed tokens, S = slots, P = linears in one matrix (q, k and v), R = largest rank
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rollout_engine.batch.adapters import AdapterRows
from rollout_engine.models.layers import FusedLinear, Head, Linear
from weight_updater.adapter_bank import AdapterBank, AdapterPart


class LoraLinear:
    """The adapters of one matrix of the model, in all their slots.

    Args:
        names: of the Hugging Face linears whose rows the matrix holds. sizes: their output features.
        num_slots: slot 0, that of rows without an adapter, stays zero.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        in_features: int,
        *,
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._names = names
        self._ends = torch.tensor(sizes).cumsum(0).tolist()
        self._sizes = sizes
        # Zeros that are written, so that the memory is taken before the KV pool is sized.
        self._a = torch.empty((num_slots, len(sizes), rank, in_features), dtype=dtype, device=device).zero_()
        self._b = [torch.empty((num_slots, rank, n), dtype=dtype, device=device).zero_() for n in sizes]
        # Not in the model's dtype: a scaling that is rounded to bfloat16 is wrong by up to 0.4 %.
        self._scaling = torch.zeros((num_slots, len(sizes)), dtype=torch.float32, device=device)
        self._scales = [[0.0] * num_slots for _ in sizes]

    def parts(self) -> list[AdapterPart]:
        """What a bank writes to, for each of the linears."""
        return [
            AdapterPart(name, self._a[:, part], self._b[part], self._scaling[:, part], self._scales[part])
            for part, name in enumerate(self._names)
        ]

    def add(self, out: torch.Tensor, x: torch.Tensor, rows: AdapterRows) -> torch.Tensor:
        """Add what the adapters of `rows` make of x [T, in] to out [T, sum of sizes], in place; gives `out`.

        Rows without an adapter keep every bit.
        """
        if rows.mask is None:
            self._add_grouped(out, x, rows)
        else:
            self._add_masked(out, x, rows.mask)
        return out

    def _add_grouped(self, out: torch.Tensor, x: torch.Tensor, rows: AdapterRows) -> None:
        """In the order of PEFT: A, B, scaling, sum."""
        for group in rows.groups:
            taken = x if group.tokens is None else x.index_select(0, group.tokens)
            for part, (end, size) in enumerate(zip(self._ends, self._sizes, strict=True)):
                scale = self._scales[part][group.slot]
                if not scale:
                    continue  # a layer that the adapter leaves out
                inner = F.linear(taken, self._a[group.slot, part, : group.rank])
                delta = torch.mm(inner, self._b[part][group.slot, : group.rank]).mul_(scale)
                target = out[:, end - size : end]
                if group.tokens is None:
                    target.add_(delta)
                else:
                    target.index_add_(0, group.tokens, delta)

    def _add_masked(self, out: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> None:
        """A of all slots in one product; what is of another slot than the token's is dropped before B's."""
        num_slots, num_parts, rank, _ = self._a.shape
        inner = torch.mm(x, self._a.view(-1, x.shape[1]).t()).view(-1, num_slots, num_parts * rank)
        inner = inner.masked_fill(~mask, 0).view(-1, num_slots, num_parts, rank)
        inner = (inner * self._scaling.unsqueeze(-1)).to(x.dtype)
        for part, (end, size) in enumerate(zip(self._ends, self._sizes, strict=True)):
            chosen = inner[:, :, part].reshape(-1, num_slots * rank)
            out[:, end - size : end].add_(torch.mm(chosen, self._b[part].view(-1, size)))


def attach_adapters(
    model: nn.Module, max_adapters: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> AdapterBank:
    """Give every linear of the model's layers room for adapters, and the bank that writes to them.

    The head has none: what PEFT trains there is tied to the embedding in many models, and is pushed merged.
    """
    parts: list[AdapterPart] = []
    for path, module in model.named_modules():
        if not isinstance(module, FusedLinear | Linear) or isinstance(module, Head):
            continue
        parent = path.rpartition(".")[0]
        own = (path.removeprefix(f"{parent}."), module.weight.shape[0])
        linears = module.parts if isinstance(module, FusedLinear) else (own,)
        module.adapters = LoraLinear(
            [f"{parent}.{name}" for name, _ in linears],
            [size for _, size in linears],
            module.weight.shape[1],
            num_slots=max_adapters + 2,
            rank=max_rank,
            dtype=dtype,
            device=device,
        )
        parts += module.adapters.parts()
    return AdapterBank(parts, max_adapters, max_rank)
