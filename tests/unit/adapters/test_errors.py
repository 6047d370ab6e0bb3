"""Errors of the trainer's side, where a trainer has several processes."""

from __future__ import annotations

import copy

import pytest

from trainers_adapters.errors import PushError, RollsyncError

PUSHED = {"version": 7, "committed": ("a:1",), "laggards": ("b:1", "c:1")}


@pytest.mark.parametrize(
    "error",
    [
        RollsyncError("FAILED_PRECONDITION", "STALE_VERSION", "version 3 was committed before"),
        PushError("UNAVAILABLE", "UNREACHABLE", "no engine answers at b:1", **PUSHED),
    ],
)
def test_an_error_that_is_made_anew_elsewhere_says_the_same(error):
    again = copy.copy(error)  # by __reduce__, as what carries errors between processes does
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
