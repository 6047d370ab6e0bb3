"""Models that several suites share."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny import make_tiny

SAID = "said"
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"


# Files of few tests that take minutes; first, so that none of them is what all wait for in the end.
LONG_FILES = ("tests/faults/test_faults.py", "tests/cases/test_updates.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FILES))


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Puts a line into the summary of the run, whatever the test ends with: a seed, say."""
    return lambda text: record_property(SAID, text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for line in (text for key, text in report.user_properties if key == SAID):
                    terminalreporter.write_line(f"{report.nodeid}: {line}")


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory) -> Path:
    """A tiny untied Llama, float32. Read only: tests that write make their own copy."""
    return make_tiny(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="session")
def tiny_tied_dir(tmp_path_factory) -> Path:
    """A tiny Qwen2 with a tied head, float32. Read only."""
    return make_tiny(tmp_path_factory.mktemp("tiny-qwen2"), "qwen2", tied=True)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in bfloat16, converted once and cached in the repository. Read only."""
    from rollout_engine.models.packaged import packaged_smollm2

    return packaged_smollm2(CACHE)


@pytest.fixture
def own_logging() -> Iterator[None]:
    """The test may set logging up anew; afterwards it is as it was."""
    root = logging.getLogger()
    level, handlers, hooks = root.level, list(root.handlers), (sys.excepthook, threading.excepthook)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)
