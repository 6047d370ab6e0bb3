"""The list of broken lines fits the tree, and a run that shows nothing is never taken for a red one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases_red import GREEN, Mutation, find_line, read_mutations, verdict
from tests.cases_table import read_cases
from tests.red_runs import ROOT, belongs, elsewhere

MUTATIONS = read_mutations()
TEST = "tests/a.py::test_a"
MUTATION = Mutation("kind", ("B001",), "a.py", "if x:", "if False:", (TEST,), "DID NOT RAISE")


def marks_of(test: str) -> set[str]:
    """The cases of a test function, without importing it."""
    file, _, name = test.partition("::")
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name.partition("[")[0]:
            calls = [c for one in node.decorator_list for c in ast.walk(one) if isinstance(c, ast.Call)]
            return {
                ast.literal_eval(call.args[0])
                for call in calls
                if ast.unparse(call.func) == "pytest.mark.case"
            }
    raise AssertionError(f"there is no {test}")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.cases[0]}-{m.file}")
def test_every_mutation_breaks_one_line_that_its_tests_are_about(mutation):
    text = (ROOT / mutation.file).read_text()
    assert find_line(text, mutation.line) is not None, "exactly one line has it"
    compile(text.replace(mutation.line, mutation.replacement), mutation.file, "exec")
    assert {*mutation.cases} <= set().union(*map(marks_of, mutation.tests))
    assert mutation.says, "what the failure says is part of it"


def test_every_kind_of_case_has_a_mutation():
    broken = {case for mutation in MUTATIONS for case in mutation.cases}
    cases = read_cases()
    assert broken <= cases.keys()
    assert {name for name, case in cases.items() if not case.reason} - broken == {"B098"}, "which needs a GPU"


def test_a_line_counts_where_it_stands_once():
    assert find_line("a = 1\nif x:\n    y\n", "if x:") == 2
    assert find_line("if x:\nif x:\n", "if x:") is None
    assert find_line("f(a), f(a)\n", "f(a)") is None
    assert find_line("", "f(a)") is None


def test_a_copy_finds_installed_packages_and_no_other_copy(tmp_path):
    installed = str(tmp_path / "site")
    assert elsewhere([str(ROOT), installed, "", str(tmp_path / "copy")], tmp_path / "copy") == [installed]


def test_what_a_test_names():
    assert belongs(TEST, TEST)
    assert belongs(f"{TEST}[x]", TEST)
    assert belongs(TEST, "tests/a.py")
    assert not belongs(f"{TEST}bc", TEST)


def record(when: str = "call", outcome: str = "failed", **fields: Any) -> dict[str, Any]:
    return {"nodeid": f"{TEST}[x]", "when": when, "outcome": outcome, "error": "", "text": ""} | fields


COLLECTED = record("collect", "passed", cases=["B001"])


@pytest.mark.parametrize(
    ("records", "result"),
    [
        ([COLLECTED, record(text="E  Failed: DID NOT RAISE X")], "red"),
        ([COLLECTED, record(outcome="passed"), record(text="DID NOT RAISE", nodeid=f"{TEST}[y]")], "red"),
        ([COLLECTED, record(outcome="passed")], GREEN),
        ([COLLECTED, record("setup", "skipped"), record("teardown", "passed")], GREEN),
        ([COLLECTED, record(text="E  assert 1 == 2")], "ANOTHER REASON"),
        ([COLLECTED, record(text="DID NOT RAISE", error="NameError")], "BROKEN MUTATION"),
        ([COLLECTED, record("setup", text="E  OSError")], "NOT RUN"),
        ([record("collect", text="SyntaxError", nodeid="tests/a.py")], "NOT RUN"),
        ([COLLECTED], "NOT RUN"),
        ([], "NOT RUN"),
        ([record("collect", "passed", cases=["B002"]), record(text="DID NOT RAISE")], "NOT MARKED"),
    ],
)
def test_what_a_run_says(records, result):
    assert verdict(MUTATION, records, timed_out=False, output="").result == result


def test_a_run_that_is_cut_off_is_red_only_if_its_tests_had_failed():
    failed = record(text="DID NOT RAISE")
    assert verdict(MUTATION, [COLLECTED, failed], timed_out=True, output="").result == "red"
    assert verdict(MUTATION, [COLLECTED], timed_out=True, output="").result == "TIMED OUT"


def test_each_test_of_a_mutation_must_fail():
    two = Mutation("kind", ("B001",), "a.py", "if x:", "if False:", (TEST, "tests/b.py::test_b"), "")
    other = record(outcome="passed", nodeid="tests/b.py::test_b")
    assert verdict(two, [COLLECTED, record(), other], timed_out=False, output="").result == GREEN
    assert (
        verdict(
            two, [COLLECTED, record(), record(**{**other, "outcome": "failed"})], timed_out=False, output=""
        ).result
        == "red"
    )


def test_a_list_with_an_entry_that_breaks_nothing_is_refused(tmp_path: Path):
    entry = '[[mutation]]\nkind = "k"\ncases = ["B001"]\nfile = "a"\nline = "x"\nsays = "y"\n'
    file = tmp_path / "list.toml"
    for rest in ('replacement = "x"\ntests = ["t"]\n', 'replacement = "y"\ntests = []\n'):
        file.write_text(entry + rest)
        with pytest.raises(ValueError, match="breaks nothing"):
            read_mutations(file)


@pytest.mark.parametrize(
    ("modules", "starter"), [(("json", "quiet"), ""), (("json", "threaded", "quiet"), "threaded")]
)
def test_modules_that_start_threads_are_found_before_the_parent_has_them(
    modules: tuple[str, ...], starter: str, tmp_path: Path
):
    (tmp_path / "quiet.py").write_text("")
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    program = (
        "import os, sys; from tests import cases_red, red_runs\n"
        f"cases_red.PRELOADED = {modules}\n"
        "found = cases_red.look_around()\n"
        "print(found[1], red_runs.num_threads(), sorted({'quiet', 'threaded'} & sys.modules.keys()))"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert (ran.stdout, ran.stderr) == (f"{starter} 1 []\n", "")
