"""Children of tests and benchmarks: they obey, they say why not, and nobody waits for a dead one."""

from __future__ import annotations

import pytest

from tests import children


def test_a_child_answers_in_order_and_says_what_failed() -> None:
    with children.start("tests.unit.benchmarks.obedient_child") as child:
        child.tell("add", a=1, b=2)
        child.tell("add", a=3, b=4)
        assert [child.answer(), child.answer()] == [3, 7]
        with pytest.raises(children.ChildError, match="fail: ValueError: not today"):
            child.ask("fail")
        assert child.ask("add", a=5, b=6) == 11
    assert child.process.returncode == 0


def test_a_dead_child_is_reported_with_its_last_words() -> None:
    with (
        children.start("tests.unit.benchmarks.obedient_child") as child,
        pytest.raises(children.ChildError, match=r"ended with 3[\s\S]*farewell"),
    ):
        child.ask("leave")
