"""Choices of a product in which every pair of values meets."""

from __future__ import annotations

import itertools

from tests import pairwise
from tests.pairwise import covering


def test_every_pair_of_values_comes_and_rows_are_few():
    columns = ["abcde", [0, 1, 2], ["w", "x", "y", "z"], [True, False]]
    for seed in range(3):
        rows = covering(seed, *columns)
        assert rows == covering(seed, *columns)
        assert len(rows) == len(set(rows)) <= 24, "of 120"
        for (i, one), (j, two) in itertools.combinations(enumerate(columns), 2):
            assert {(row[i], row[j]) for row in rows} == set(itertools.product(one, two))
    assert covering(0, *columns) != covering(1, *columns)


def test_columns_of_equal_values_keep_their_places():
    assert sorted(covering(0, [1, 2], [1, 2])) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_a_mark_names_its_arguments_and_may_hold_the_whole_product(monkeypatch):
    columns = {"way": ["a", "b"], "staging": iter([1, 2]), "stage": [7, 8, 9]}
    assert len(pairwise.parametrize(**columns).args[1]) in (6, 7)
    monkeypatch.setattr(pairwise, "FULL", True)
    mark = pairwise.parametrize(way=["a", "b"], staging=[1, 2], stage=[7, 8, 9])
    assert mark.args == (("way", "staging", "stage"), list(itertools.product("ab", [1, 2], [7, 8, 9])))
