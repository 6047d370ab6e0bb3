"""What judges updates under load: labels of tokens, and what processes hold."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.holdings import children_of, descendants_of, grown, held_by
from tests.load import check_labels

COMMITS = [(1, 1), (2, 2), (3, 3), (2, 4)]


def test_labels_in_the_order_of_the_commits() -> None:
    whole = (5, [(0, 1, 1), (2, 3, 3), (4, 2, 4)])
    assert check_labels([(0, []), (1, [(0, 2, 2)]), whole], COMMITS) == 3
    assert check_labels([], COMMITS) == 0


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        ((4, [(0, 2, 2), (2, 1, 1)]), "go back"),
        ((4, [(0, 2, 4), (2, 2, 2)]), "go back"),
        ((4, [(0, 1, 1), (2, 1, 1)]), "go back"),
        ((4, [(0, 2, 3)]), "nothing was committed as"),
        ((4, [(1, 1, 1)]), "start at"),
        ((4, []), "start at"),
        ((4, [(0, 1, 1), (4, 2, 2)]), "start at"),
        ((4, [(0, 1, 1), (0, 2, 2)]), "start at"),
        ((0, [(0, 1, 1)]), "start at"),
    ],
)
def test_labels_that_cannot_be(completion: tuple, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        check_labels([completion], COMMITS)


def test_what_has_grown_beyond_what_is_allowed() -> None:
    before = {"engine RSS": 100, "engine threads": 5, "front open files": 2}
    less = {"engine RSS": 110, "engine threads": 5, "front open files": 1}
    assert list(grown(before, less, {"RSS": 10})) == []
    more = {"engine RSS": 111, "engine threads": 6, "front open files": 2}
    assert list(grown(before, more, {"RSS": 10})) == ["engine RSS: 100 -> 111", "engine threads: 5 -> 6"]


def test_a_process_and_those_below_it() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        assert child.pid in children_of(os.getpid())
        while len(descendants_of(child.pid)) < 1:
            assert child.poll() is None
        (grandchild,) = descendants_of(child.pid)
        assert grandchild in descendants_of(os.getpid())
        assert held_by(grandchild)["threads"] == 1
    assert descendants_of(child.pid) == []


def test_files_and_segments_that_a_process_holds() -> None:
    """Of another one: threads of libraries open and close what they like in this one."""
    code = """if True:
        from weight_updater.shm import SharedSegment
        print(flush=True), input()
        segment, file = SharedSegment.create(64), open("/dev/null")
        print(flush=True), input()"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.readline()
        before = held_by(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        after = held_by(child.pid)
        child.communicate("\n")
    assert after["open files"] == before["open files"] + 3, "two are the segment's and its mapping's"
    assert after["mapped segments"] == before["mapped segments"] + 1
