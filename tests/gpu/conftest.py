"""Tests that need a CUDA device: `make gpu`. On a machine without one nothing here is even imported.

On a machine with one nothing may be skipped, but for tests of two GPUs where there is one (`two_gpus`).
"""

from __future__ import annotations

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
FLAGS = ("--device", "cuda:0", "--num-pages", "256")


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
def tiny_bf16_64_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied Llama in bfloat16 with heads of 64. Read only."""
    directory = tmp_path_factory.mktemp("tiny-bf16-64")
    return make_tiny(directory, "llama", tied=True, head_dim=64, dtype=torch.bfloat16)


ServeOnGpu = Callable[..., AbstractContextManager[RunningEngine]]


@pytest.fixture(scope="session")
def serve_on_gpu() -> ServeOnGpu:
    """`with serve_on_gpu(model_dir, *flags) as engine`: an engine on the first GPU, bfloat16, over gRPC."""

    def start(model: Path, *flags: str) -> AbstractContextManager[RunningEngine]:
        return serve(model, *FLAGS, *flags, dtype="bfloat16", start_seconds=START_SECONDS)

    return start


@pytest.fixture(scope="module")
def gpu_engine(tiny_bf16_dir: Path, serve_on_gpu: ServeOnGpu) -> Iterator[RunningEngine]:
    """One engine for a module's tests, over tiny_bf16_dir, with a second arena for staging."""
    with serve_on_gpu(tiny_bf16_dir, "--reserve-device-staging") as engine:
        yield engine


@pytest.fixture(scope="session")
def start_trainer() -> Callable[..., AbstractContextManager[children.Child]]:
    """`with start_trainer("tests.gpu.some_trainer", address) as trainer`: a process with CUDA of its own.

    The module calls children.obey with its commands; `trainer.ask("name", key=value)` runs one.
    """
    return children.start
