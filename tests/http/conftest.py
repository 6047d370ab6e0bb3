"""An engine with a tokenizer behind the facade, for all tests of HTTP."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import RunningEngine, serve
from tests.http.facade import Answer, facade, fetch
from tests.tiny import load_reference, make_tiny
from tests.unit.server.tokenizers_for_tests import save_tokenizer
from tests.wire.trainer import train

Call = Callable[..., Answer]


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine's weights root."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="package")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tiny(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="package")
def engine(model_dir: Path, root: Path) -> Iterator[RunningEngine]:
    with serve(
        model_dir, "--weights-root", str(root), "--num-pages", "160", "--max-adapters", "2", forked=True
    ) as running:
        yield running


@pytest.fixture(scope="package")
def call(engine: RunningEngine) -> Iterator[Call]:
    """call(path, body): status and answer of the facade before `engine`."""
    with facade(engine.address, model_names=["policy"]) as address:
        yield lambda path, body=None, **query: fetch(address, path, body, **query)


@pytest.fixture
def trained(model_dir: Path) -> Any:
    model = load_reference(model_dir)
    train(model, 5)
    return model


@pytest.fixture(scope="package")
def adapter_dir(model_dir: Path, root: Path) -> Path:
    """A LoRA adapter as PEFT saves it, below the root."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load_reference(model_dir), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(root / "adapter")
    return root / "adapter"


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
