"""Fewer tests than a product: every pair of values comes, as most faults need no more than two to meet.

FULL_PRODUCTS=1 (as `make cases` sets it) runs the whole product; PAIRWISE_SEED=N draws another choice.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

SEED = int(os.environ.get("PAIRWISE_SEED", "1"))
FULL = os.environ.get("FULL_PRODUCTS", "") not in ("", "0")

Row = tuple[Any, ...]


def covering(seed: int, *columns: Sequence[Any]) -> list[Row]:
    """Rows of the product of `columns`, in the product's order, among which is every pair of values of two
    columns. The same seed gives the same rows.
    """
    rng = random.Random(seed)
    left = {pair for row in itertools.product(*map(_numbers, columns)) for pair in _pairs(row)}
    chosen: set[tuple[int, ...]] = set()
    while left:
        rows = list(itertools.product(*map(_numbers, columns)))
        rng.shuffle(rows)
        best = max(rows, key=lambda row: len(left & _pairs(row)))
        chosen.add(best)
        left -= _pairs(best)
    return [tuple(column[at] for column, at in zip(columns, row, strict=True)) for row in sorted(chosen)]


def parametrize(**columns: Iterable[Any]) -> pytest.MarkDecorator:
    """A mark as pytest.mark.parametrize, by the names of arguments and the values each may have."""
    values = [list(column) for column in columns.values()]
    rows = list(itertools.product(*values)) if FULL else covering(SEED, *values)
    return pytest.mark.parametrize(tuple(columns), rows)


def _numbers(column: Sequence[Any]) -> range:
    return range(len(column))


def _pairs(row: tuple[int, ...]) -> set[Row]:
    return set(itertools.combinations(enumerate(row), 2))
