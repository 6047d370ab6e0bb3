"""Tests that need a CUDA device: `make gpu`. On a machine without one nothing here is even imported.

On a machine with one nothing may be skipped, but for tests of two GPUs where there is one (`two_gpus`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from tests import children
from tests.engines import RunningEngine, serve
from tests.tiny import make_tiny

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

NEEDS_TWO = "needs two GPUs"
START_SECONDS = 280.0
"""Of an engine, whose kernels may have to be compiled first."""
FLAGS = ("--device", "cuda:0", "--num-pages", "1024")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Fail what would be skipped: a kernel that is not there must not look like a passed test."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and NEEDS_TWO not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"skipped on a machine with a GPU: {report.longrepr}"
    return report


@pytest.fixture
def two_gpus() -> None:
    """Skip the test where there is one GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip(NEEDS_TWO)


@pytest.fixture(scope="session")
def tiny_bf16_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untied Qwen3 in bfloat16 with heads of 128, as attention kernels want them. Read only."""
    return make_tiny(tmp_path_factory.mktemp("tiny-bf16"), "qwen3", head_dim=128, dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def other_bf16_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights. Read only."""
    directory = tmp_path_factory.mktemp("other-bf16")
    return make_tiny(directory, "qwen3", head_dim=128, seed=1, dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def tied_bf16_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied Llama in bfloat16, its heads of 128 too: FlashInfer compiles for each size. Read only."""
    directory = tmp_path_factory.mktemp("tied-bf16")
    return make_tiny(directory, "llama", tied=True, head_dim=128, dtype=torch.bfloat16)


ServeOnGpu = Callable[..., AbstractContextManager[RunningEngine]]


@pytest.fixture(scope="session")
def serve_on_gpu(tmp_path_factory: pytest.TempPathFactory) -> ServeOnGpu:
    """`with serve_on_gpu(model_dir, *flags) as engine`: an engine on the first GPU, bfloat16, over gRPC. It
    may read weights from any test's directory.
    """
    root = str(tmp_path_factory.getbasetemp())

    def start(model: Path, *flags: str) -> AbstractContextManager[RunningEngine]:
        everywhere = (*FLAGS, "--weights-root", root)
        return serve(model, *everywhere, *flags, dtype="bfloat16", start_seconds=START_SECONDS)

    return start


@pytest.fixture(scope="session")
def gpu_engine(tiny_bf16_dir: Path, serve_on_gpu: ServeOnGpu) -> Iterator[RunningEngine]:
    """One engine for all tests that can share it (a start takes seconds), over tiny_bf16_dir, with a second
    arena for staging. Which weights it serves depends on the tests before.
    """
    with serve_on_gpu(tiny_bf16_dir, "--reserve-device-staging") as engine:
        yield engine


@pytest.fixture(scope="session")
def until_not_serving() -> Callable[[RunningEngine], None]:
    """Waits until an engine says that the trainer whose arena it lives on is gone; it has two seconds."""

    def wait(engine: RunningEngine) -> None:
        deadline = time.monotonic() + 2.0
        while (state := engine.rollout.info().state).status != "not_serving":
            assert time.monotonic() < deadline, "the engine has not noticed its trainer's death"
            time.sleep(0.02)
        assert "gone" in state.not_serving_reason

    return wait


@pytest.fixture(scope="session")
def start_trainer() -> Callable[..., AbstractContextManager[children.Child]]:
    """`with start_trainer("tests.gpu.trainer", model_dir) as trainer`: a process with CUDA of its own.

    The module calls children.obey with its commands; `trainer.ask("name", key=value)` runs one.
    """
    return children.start
