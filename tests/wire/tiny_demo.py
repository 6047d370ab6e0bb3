"""examples/grpo.py over a tiny model: its own `main`, with what a tiny model needs changed.

    python -m tests.wire.tiny_demo MODEL ADDRESS LEARNING_RATE [flags of examples/grpo.py]

A tiny model answers no sum, so the reward is whether a completion's text has an odd length.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"


def load(model: Path, address: str, learning_rate: float) -> ModuleType:
    """The example as a module.

    Args:
        address: of an engine that serves the model's weights as version 0.
        learning_rate: 0 leaves every weight as it is.
    """
    spec = importlib.util.spec_from_file_location("grpo_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    grpo = importlib.util.module_from_spec(spec)
    sys.modules["grpo_example"] = grpo  # dataclasses look their module up
    spec.loader.exec_module(grpo)
    grpo.packaged_smollm2 = lambda cache: model
    grpo.serve = lambda directory, weights_root: contextlib.nullcontext(address)
    grpo.reward = lambda text, answer: float(len(text) % 2)
    grpo.LEARNING_RATE = learning_rate
    return grpo


if __name__ == "__main__":
    directory, where, rate = sys.argv[1:4]
    del sys.argv[1:4]
    load(Path(directory), where, float(rate)).main()
