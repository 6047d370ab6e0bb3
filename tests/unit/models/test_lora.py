"""Adapters beside one matrix: by groups and by a mask, which must come to the same."""

from __future__ import annotations

import math

import pytest
import torch

from rollout_engine.batch.adapters import AdapterRows, rows_of
from rollout_engine.batch.packing import Packer
from rollout_engine.models.lora import LoraLinear
from weight_updater.adapters import HeldAdapter

CPU = torch.device("cpu")
SIZES = (12, 4, 8)
IN = 10
RANK = 4


@pytest.fixture
def layer() -> LoraLinear:
    """Slots 1 and 3 are filled, with ranks 4 and 2; slot 2 holds what nobody may read."""
    made = LoraLinear(["q", "k", "v"], SIZES, IN, num_slots=4, rank=RANK, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for number, part in enumerate(made.parts()):
        for slot, rank in ((1, 4), (3, 2)):
            part.a[slot, :rank].normal_(generator=generator)
            part.b[slot, :rank].normal_(generator=generator)
            part.scaling[slot] = part.scales[slot] = 0.5 + number + slot
        part.a[2].fill_(1e30)
        part.b[2].fill_(1e30)
        part.scaling[2] = part.scales[2] = 1.0
    return made


def adapter(slot: int, rank: int) -> HeldAdapter:
    return HeldAdapter("a", 1, 1, slot, rank, 0, 0, 0)


ROWS = [adapter(1, 4), None, adapter(3, 2), adapter(1, 4)]
LENGTHS = [3, 2, 1, 2]


def by_hand(layer: LoraLinear, x: torch.Tensor) -> torch.Tensor:
    wanted = torch.zeros(8, sum(SIZES))
    tokens = [row for row, length in zip(ROWS, LENGTHS, strict=True) for _ in range(length)]
    for at, row in enumerate(tokens):
        if row is not None:
            deltas = [
                part.scales[row.slot] * (part.b[row.slot].t() @ (part.a[row.slot] @ x[at]))
                for part in layer.parts()
            ]
            wanted[at] = torch.cat(deltas)
    return wanted


def test_groups_and_mask_add_what_each_tokens_own_adapter_makes_of_it(layer):
    x = torch.randn(8, IN, generator=torch.Generator().manual_seed(1))
    base = torch.randn(8, sum(SIZES), generator=torch.Generator().manual_seed(2))
    wanted = by_hand(layer, x)
    grouped = layer.add(base.clone(), x, AdapterRows.grouped(ROWS, LENGTHS))
    slots = torch.tensor([1, 1, 1, 0, 0, 3, 1, 1])
    masked = layer.add(base.clone(), x, AdapterRows.masked(slots, 4))
    for found in (grouped, masked):
        torch.testing.assert_close(found - base, wanted, atol=1e-4, rtol=1e-5)
        assert torch.equal(found[3:5], base[3:5]), "rows without an adapter keep every bit"


def test_one_adapter_for_all_tokens_needs_no_choice(layer):
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(1))
    rows = AdapterRows.grouped([adapter(3, 2)], [5])
    assert [group.tokens for group in rows.groups] == [None]
    chosen = AdapterRows.grouped([adapter(3, 2), None], [5, 1])
    alone = layer.add(torch.zeros(5, sum(SIZES)), x, rows)
    beside = layer.add(torch.zeros(6, sum(SIZES)), torch.cat((x, x[:1])), chosen)
    torch.testing.assert_close(beside[:5], alone)
    assert not beside[5].any()


def test_what_overflows_in_another_slot_reaches_nobody(layer):
    """A masked product computes all slots: infinities of others must not become NaN."""
    x = torch.full((1, IN), 1e10)
    out = layer.add(torch.zeros(1, sum(SIZES)), x, AdapterRows.masked(torch.tensor([3]), 4))
    assert math.isinf(float((x @ layer.parts()[0].a[2].t()).max()))
    assert torch.isfinite(out).all()


def test_a_pass_without_adapters_has_no_rows_for_them():
    packer = Packer(CPU)
    assert rows_of([], [1, 1], packer, 4) is None
    assert rows_of([None, None], [1, 1], packer, 4) is None
    assert rows_of([None, adapter(1, 4)], [1, 1], packer, 4) is not None
