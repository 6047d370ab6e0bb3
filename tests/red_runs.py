"""Runs of pytest on a copy of the tree, in children forked from a parent that has imported all but the tree.

cases_red.py is that parent. Importing torch and transformers takes seconds; a fork that has them starts at
once. The parent must have one thread, and nothing of the tree but this and cases_red.py, which children drop.
"""

from __future__ import annotations

import compileall
import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rollout_engine", "weight_updater", "trainers_adapters", "tests")
COPIED = (*PACKAGES, "docs", "examples", "proto", "deploy", "pyproject.toml", "README.md")
PRELOADED = (
    "_pytest.assertion.rewrite",
    "google.protobuf.descriptor_pb2",
    "grpc",
    "grpc_health.v1.health",
    "grpc_reflection.v1alpha.reflection",
    "hypothesis",
    "msgspec",
    "numpy",
    "pydantic_settings",
    "rich.table",
    "safetensors.torch",
    "tokenizers",
    "torch.distributed",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "typer",
)
RUN_S = 360.0
"""Of one mutation's tests; a test by itself has a third of it."""
TEARDOWN_S = 10.0
"""What is left to a run once its tests have failed."""


# ---------------------------------------------------------------- a child


class Watch:
    """A pytest plugin: writes down what each test ends with, and stops once each wanted one has failed."""

    def __init__(self, tests: Sequence[str], records: Path, *, stop: bool) -> None:
        self._tests, self._stop = tests, stop
        self._records = records.open("w")
        self._failed: set[str] = set()

    def _write(self, **record: Any) -> None:
        print(json.dumps(record), file=self._records, flush=True)

    def _wanted(self, nodeid: str) -> str:
        return next((test for test in self._tests if belongs(nodeid, test)), "")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            marks = sorted({mark.args[0] for mark in item.iter_markers("case")})
            self._write(nodeid=item.nodeid, when="collect", outcome="passed", cases=marks)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(nodeid=report.nodeid, when="collect", outcome="failed", text=report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._stop and self._wanted(item.nodeid) in self._failed:
            pytest.skip("its like has failed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        error = call.excinfo.typename if call.excinfo is not None else ""
        text = report.longreprtext if report.failed else ""
        self._write(
            nodeid=item.nodeid, when=call.when, outcome=report.outcome, error=error, text=text,
            seconds=round(report.duration, 2),
        )  # fmt: skip
        if report.failed and call.when == "call":
            self._failed.add(self._wanted(item.nodeid))
            if self._stop and self._failed >= set(self._tests):
                item.session.shouldstop = "all have failed"
        return report


def belongs(nodeid: str, test: str) -> bool:
    """Whether an item is what `test` names: itself, or a test with parameters, or all of a file."""
    return nodeid == test or nodeid.startswith((f"{test}[", f"{test}::"))


def be_child(copy: Path, tests: Sequence[str], folder: Path, *, stop: bool) -> None:
    """CHILD. Run tests on a copy's code alone, and never return. folder: gets `records` and `output`."""
    code = 70
    try:
        os.setsid()
        output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            del os.environ[name]
        temporary = folder / "t"
        temporary.mkdir()
        # A broken line may not outlive its run in a cache of bytecode.
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(temporary)}
        packages = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), *elsewhere(packages, copy)])
        tempfile.tempdir, sys.dont_write_bytecode = None, True
        os.chdir(copy)
        sys.path[:] = [str(copy), *elsewhere(sys.path, copy)]
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
        importlib.invalidate_caches()
        for package in PACKAGES:
            if (spec := importlib.util.find_spec(package)) is None or not is_in(spec.origin, copy):
                raise SystemExit(f"{package} of a copy is not the copy's own")
        options = ["-p", "no:cacheprovider", "-m", "", "--tb=short", f"--timeout={RUN_S / 3}"]
        options.append(f"--basetemp={temporary / 'b'}")
        code = int(pytest.main([*options, *tests], plugins=[Watch(tests, folder / "records", stop=stop)]))
    except BaseException as error:  # noqa: BLE001 - the output is all that is left to tell
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def elsewhere(paths: Sequence[str], copy: Path) -> list[str]:
    """Those of a search path's folders that hold neither the repository nor a copy of it."""
    return [path for path in paths if path and Path(path).resolve() not in (ROOT, copy)]


def is_in(origin: str | None, folder: Path) -> bool:
    return origin is not None and Path(origin).is_relative_to(folder)


@dataclass
class Run:
    """PARENT. Tests under way in a child."""

    tests: tuple[str, ...]
    folder: Path
    pid: int
    started: float
    deadline: float
    timed_out: bool = False

    def records(self) -> list[dict[str, Any]]:
        """What is written down so far."""
        with contextlib.suppress(FileNotFoundError):
            whole = (self.folder / "records").read_text().rpartition("\n")[0]
            return [json.loads(line) for line in whole.splitlines()]
        return []

    def has_ended(self) -> bool:
        """Whether it has; a child that takes too long is killed, with all that it started."""
        pid, _ = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.monotonic() > self.deadline:
            self.timed_out = True
            os.killpg(self.pid, signal.SIGKILL)
            pid, _ = os.waitpid(self.pid, 0)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # what it left behind
        return bool(pid)

    def shorten(self) -> None:
        """Leave it no more than a teardown, if each of its tests has failed."""
        failed = {r["nodeid"] for r in self.records() if r["when"] == "call" and r["outcome"] == "failed"}
        if all(any(belongs(nodeid, test) for nodeid in failed) for test in self.tests):
            self.deadline = min(self.deadline, time.monotonic() + TEARDOWN_S)


def start(copy: Path, tests: Sequence[str], seconds: float, *, stop: bool) -> Run:
    """Fork a child that runs `tests` in `copy`."""
    assert num_threads() == 1, "a parent with threads must not fork"
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=copy.parent))
    if (pid := os.fork()) == 0:
        be_child(copy, tests, folder, stop=stop)
    now = time.monotonic()
    return Run(tuple(tests), folder, pid, now, now + seconds)


def num_threads() -> int:
    """Of this process, Python's and others."""
    return len(os.listdir("/proc/self/task"))


def copy_tree(into: Path) -> Path:
    """A copy of what runs, compiled."""
    copy = into / "tree"
    copy.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy2(ROOT / name, copy / name)
    if (ROOT / ".cache").exists():
        (copy / ".cache").symlink_to((ROOT / ".cache").resolve())  # models, which nothing here changes
    for package in PACKAGES:
        compileall.compile_dir(copy / package, quiet=2)
    return copy
