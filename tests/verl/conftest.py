"""Tests of the verl adapter with the real verl: `make verl`, in an environment of its own.

Where verl is not installed nothing here is even imported. verl's trainer runs on the platform of
cpu_platform.py, in Ray's processes on this machine, placed by GPUs that are not there.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]

REPOSITORY = Path(__file__).resolve().parents[2]

os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu_platform",
    "VERL_ENGINE_DEVICE": "cuda",
    "PYTHONPATH": str(REPOSITORY),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray on this machine, with GPUs that are not there: enough for all modules, which give none back."""
    import ray

    ray.init(num_cpus=64, num_gpus=16, include_dashboard=False, object_store_memory=256 << 20)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def chat_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer and a chat template, float32. Read only."""
    from tests.tiny_chat import byte_tokenizer, make_chat_model

    return make_chat_model(tmp_path_factory.mktemp("tiny-chat"), byte_tokenizer())
