"""Tests of the TRL adapter with the real TRL: `make trl`, in an environment of its own.

Where TRL is not installed nothing here is even imported.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines import RunningEngine, serve

collect_ignore_glob = [] if importlib.util.find_spec("trl") else ["test_*.py"]

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

SHOWN: list[str] = []
"""What the tests measured, printed at the end."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore::FutureWarning")  # of TRL about transformers


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in SHOWN:
        terminalreporter.write_line(line)


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """show(text): a line of the summary."""
    return lambda text: SHOWN.append(f"{request.node.name}: {text}")


@pytest.fixture(scope="session")
def chat_model_dir(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Path:
    """A tiny random Llama with SmolLM2's tokenizer and chat template, float32. Read only."""
    from transformers import AutoTokenizer

    from tests.tiny_chat import make_chat_model

    return make_chat_model(tmp_path_factory.mktemp("tiny-chat"), AutoTokenizer.from_pretrained(smollm2_dir))


@pytest.fixture(scope="module")
def engine(chat_model_dir: Path) -> Iterator[RunningEngine]:
    """One engine for a module's tests, over chat_model_dir."""
    with serve(chat_model_dir, "--num-pages", "512") as running:
        yield running
