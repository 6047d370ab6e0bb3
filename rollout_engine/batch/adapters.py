"""AdapterRows: which tokens of a forward pass go through which adapter.

T = packed tokens, S = slots of the adapter bank; slot 0 stands for the base model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout_engine.batch.packing import Packer
from weight_updater.adapters import BASE_SLOT, HeldAdapter


@dataclass(frozen=True, slots=True)
class Group:
    """Tokens of one adapter. tokens: [n] int64, their packed offsets; None: all tokens of the pass."""

    slot: int
    rank: int
    tokens: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Either by groups, a few products for each adapter (a CPU), or by a mask, the same two products whatever
    the batch holds (a GPU, where they may be captured).

    groups: of the tokens that go through an adapter. mask: [T, S, 1] bool, True at each token's own slot.
    """

    groups: tuple[Group, ...] = ()
    mask: torch.Tensor | None = None

    @classmethod
    def grouped(cls, adapters: Sequence[HeldAdapter | None], extend_lens: Sequence[int]) -> AdapterRows:
        """Of rows that bring so many tokens each."""
        slots = token_slots(adapters, extend_lens)
        ranks = {adapter.slot: adapter.rank for adapter in adapters if adapter is not None}
        groups = []
        for slot, rank in ranks.items():
            tokens = np.flatnonzero(slots == slot)
            whole = len(tokens) == len(slots)
            groups.append(Group(slot, rank, None if whole else torch.from_numpy(tokens)))
        return cls(tuple(groups))

    @classmethod
    def masked(cls, slots: torch.Tensor, num_slots: int) -> AdapterRows:
        """Of tokens whose slots are [T] int64; waits for no device."""
        every = torch.arange(num_slots, device=slots.device)
        return cls(mask=(slots[:, None] == every).unsqueeze(-1))


def token_slots(adapters: Sequence[HeldAdapter | None], extend_lens: Sequence[int]) -> np.ndarray:
    """[T] int64: the slot of each token's adapter."""
    rows = [BASE_SLOT if adapter is None else adapter.slot for adapter in adapters]
    return np.repeat(np.array(rows, dtype=np.int64), np.array(extend_lens, dtype=np.int64))


def rows_of(
    adapters: Sequence[HeldAdapter | None], extend_lens: Sequence[int], packer: Packer, num_slots: int
) -> AdapterRows | None:
    """What a pass that is not captured needs; None where no row has an adapter."""
    if not any(adapters):
        return None
    if packer.device.type == "cpu":
        return AdapterRows.grouped(adapters, extend_lens)
    (slots,) = packer.put([token_slots(adapters, extend_lens)])
    return AdapterRows.masked(slots, num_slots)
