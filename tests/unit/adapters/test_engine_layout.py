"""What engines take, as their layout says it."""

from __future__ import annotations

import math

import pytest

from trainers_adapters.engine_layout import in_shares
from weight_updater.requests import Placement

SHAPES = [(24,), (8,), (4, 8), (33,), (0,), (1,), (16,), (16,), (200,), (7,)]
"""Of float32: bytes are four times as many."""


@pytest.mark.parametrize(
    ("max_bytes", "expected"),
    [
        (128, ["ab", "c", "d", "efg", "h", "i", "j"]),  # d and i are larger
        (1, ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]),
        (1 << 20, ["abcdefghij"]),
    ],
)
def test_shares_name_no_more_bytes_than_they_may_or_one_slot(max_bytes, expected):
    names = "abcdefghij"
    offsets = [256 * number for number in range(len(names))]
    placements = [
        Placement(name, "float32", shape, offset)
        for name, shape, offset in zip(names, SHAPES, offsets, strict=True)
    ]
    tied = Placement("tied", "float32", SHAPES[0], 0, alias_of="a")
    shares = in_shares([*reversed(placements), tied], max_bytes)
    assert ["".join(share) for share in shares] == expected
    sizes = [sum(4 * math.prod(SHAPES[names.index(name)]) for name in share) for share in shares]
    assert all(size <= max_bytes or len(share) == 1 for size, share in zip(sizes, shares, strict=True))


def test_no_slots_no_shares():
    assert in_shares([], 128) == []
