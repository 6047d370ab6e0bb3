"""Rounds of faults on real processes: pairwise over stage, path and staging, with a seed that is printed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.__main__ import add_counts, player_on, read_counts
from tests.faults.nursery import nursery
from tests.faults.play import Player
from tests.faults.rounds import KINDS, PATHS, STAGES, STAGINGS, STRIKES, Round, all_kinds, pairwise, parse
from tests.faults.stand import until
from tests.faults.strikes import Outcome
from tests.faults.verdict import allowed
from tests.holdings import born

SEED = int(os.environ.get("FAULTS_SEED") or random.SystemRandom().randrange(1_000_000))
"""FAULTS_SEED=N runs the same rounds again."""

FOUND = [
    "base / segment / device / prepared / kill front / 484875",  # the engine lived on without its front
    "base / ipc / host / prepared / kill trainer / 95460",  # the dead trainer's memory stayed mapped
    "base / distributed / host / begun / kill trainer / 640349",  # its group's child lived on
    "base / tensor / none / transfer / kill receivers / 750237",  # the engine kept their sockets
    "base / segment / device / transfer / abort update / 790987",  # the trainer's segment stayed mapped
    "adapter / segment / own / sent / kill owner / 4711",  # it committed beside weights that were lost
]
"""Rounds that once showed a fault of the product."""


@pytest.fixture(scope="module")
def player(parent, faults_model, faults_dir) -> Iterator[Player]:
    with player_on(parent, faults_model, faults_dir) as made:
        yield made


@pytest.mark.timeout(600)
def test_every_fault_leaves_a_whole_version_or_says_so(player, say):
    rounds = [parse(text) for text in FOUND] + pairwise(SEED, at_least=50)
    for number, round_ in enumerate(rounds):
        try:
            player.play(round_)
        except BaseException:
            say(f"round {number} of FAULTS_SEED={SEED} failed; it alone is repeated by {round_.line}")
            raise
    say(f"{len(rounds)} rounds of faults held (FAULTS_SEED={SEED})")


def test_the_rounds_of_a_run_cover_all_pairs():
    for seed in range(3):
        rounds = pairwise(seed, at_least=40)
        assert len(rounds) >= 40
        kinds = all_kinds()
        index = {"kind": 0, "path": 1, "staging": 2, "stage": 3}
        for one, two in itertools.combinations(index, 2):
            possible = {(kind[index[one]], kind[index[two]]) for kind in kinds}
            assert {(getattr(r, one), getattr(r, two)) for r in rounds} == possible
        for kind in KINDS:
            assert len({r.strike for r in rounds if r.kind == kind}) >= 7
    for column, values in enumerate((KINDS, PATHS, STAGINGS, STAGES, STRIKES)):
        assert {kind[column] for kind in kinds} == set(values)


def test_what_a_nursery_forked_ends_when_it_is_killed():
    code = """
import os, time
from tests.faults.nursery import die_with_parent
pid = os.fork()
if pid == 0:
    os.setsid()
    die_with_parent()
    print(os.getpid(), flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    assert born(child)
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not born(child), "the child ends with its parent")


def test_a_nursery_outlives_a_child_and_its_stub_that_end_while_it_is_busy(tmp_path):
    """Then it hears of both at once, and of the child first."""
    with nursery(tmp_path) as busy:
        command = [str(busy.stub), "-m", "tests.unit.benchmarks.obedient_child"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as stub:
            until(lambda: "module" in busy.children(), "the child is forked", 60.0)
            (child,) = busy.children()["module"]
            busy.pause(True)
            os.kill(child, signal.SIGKILL)
            until(lambda: not born(child), "it has ended")
            stub.kill()
            stub.wait()
            busy.pause(False)
        until(lambda: busy.children() == {}, "the nursery goes on")


def test_counts_of_many_processes_at_once_add_up_and_are_never_half_a_file(tmp_path):
    path, rounds = tmp_path / "counts.json", [round_.key for round_ in pairwise(1, at_least=40)]
    add_counts(Counter(rounds), path)
    with ThreadPoolExecutor(4) as pool:
        adding = [pool.submit(add_counts, Counter([rounds[0]] * 2), path) for _ in range(50)]
        while not all(one.done() for one in adding):
            assert read_counts(path).total() >= len(rounds)
        assert max(one.result() for one in adding) == len(rounds) + 100
    assert read_counts(path) == Counter(rounds) + Counter({rounds[0]: 100})
    assert os.listdir(tmp_path) == ["counts.json"]


PLAN = {"form": "steps", "inflight": "keep", "version": 7}


def test_a_strike_that_comes_late_may_meet_the_commit_but_an_abort_that_was_heard_may_not():
    def verdicts(path: str, strike: str, **outcome) -> set[str]:
        return allowed(Round("base", path, "device", "transfer", strike, 1), PLAN, Outcome(**outcome), False)

    refused = {"ended": "refused", "reason": "UNKNOWN_UPDATE"}
    assert verdicts("segment", "close channel", ended={"ended": "refused", "reason": ""}) == {"old", "new"}
    assert verdicts("segment", "kill trainer", trainer_lost=True) == {"old", "new"}
    assert verdicts("segment", "abort update", ended=refused) == {"old"}
    assert verdicts("segment", "abort update", ended={"ended": "committed"}) == {"new"}
    assert verdicts("tensor", "kill trainer", trainer_lost=True) == {"old"}, "there it waits to be struck"


def test_an_adapter_is_never_torn_and_base_weights_that_come_first_refuse_it():
    def verdicts(stage: str, strike: str, form: str = "steps", **outcome) -> set[str]:
        plan = PLAN | {"form": form}
        return allowed(Round("adapter", "disk", "own", stage, strike, 1), plan, Outcome(**outcome), False)

    committed = {"ended": "committed"}
    for kind, path, staging, stage, strike in all_kinds():
        if kind == "adapter":
            for outcome in (Outcome(), Outcome(ended=committed), Outcome(trainer_lost=True)):
                found = allowed(Round(kind, path, staging, stage, strike, 1), PLAN, outcome, False)
                assert found <= {"old", "new"}
    assert verdicts("start", "new base", ended={"ended": "refused"}) == {"old"}
    assert verdicts("start", "new base", ended=committed) == {"old"}, "it was trained on others"
    assert verdicts("start", "same base", ended=committed) == {"new"}
    assert verdicts("sent", "new base", ended=committed) == {"new"}, "they were refused, an update was open"
    assert verdicts("transfer", "new base", "one call", ended={"ended": "refused"}) == {"old"}
    assert verdicts("start", "remove adapter", removed=5, ended=committed) == {"new"}
    assert verdicts("committed", "remove adapter", removed=7, ended=committed) == {"old"}, "not held"
