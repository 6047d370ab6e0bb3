"""ModelConfig: what a model directory says about its model, checked once and free of "maybe"."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout_engine.errors import ConfigError, EngineError, Reason

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
ROPE_TYPES = ("default", "linear", "llama3")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
PARTIAL = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. factor is read for rope_type linear and llama3, what follows it for llama3 alone."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192  # tokens


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model and what serving it needs.

    context_length: tokens that one sequence may have. eos_token_ids: every id that ends a completion.
    tie: the head shares the embedding's storage.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    tie: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes in all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @classmethod
    def from_directory(
        cls, directory: Path, *, known: tuple[str, ...], dtype: str = "auto", context_length: int = 0
    ) -> ModelConfig:
        """Read `config.json` (through transformers) and `generation_config.json`.

        Args:
            known: architectures that can be served.
            dtype: a key of DTYPES, or "auto" for the checkpoint's.
            context_length: 0 for the model's own.

        Raises:
            EngineError(MODEL_INVALID): a directory that cannot be read or a model that cannot be served.
            ConfigError: a context_length beyond the model's.
        """
        raw = read_json(directory / "config.json")
        named = raw.get("architectures")
        architecture = named[0] if isinstance(named, list) and named else named
        if architecture not in known:
            raise invalid(
                directory,
                f"its architecture is {architecture!r}; known: {', '.join(sorted(known))} "
                "(add a file and a line in rollout_engine/models/registry.py)",
            )
        if quantised := raw.get("quantization_config"):
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise invalid(
                directory,
                f"its weights are quantised ({method}); only float32, bfloat16 and float16 are served",
            )
        hf = _by_transformers(directory)
        _refuse_others(directory, architecture, raw, hf)
        num_heads, num_kv_heads, head_dim = _heads(directory, hf)
        return cls(
            architecture=architecture,
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=hf["rms_norm_eps"],
            context_length=_context_length(directory, hf, context_length),
            eos_token_ids=_eos_token_ids(directory, hf),
            dtype=_dtype(directory, raw, dtype),
            tie=bool(hf.get("tie_word_embeddings", False)),
            attention_bias=bool(hf.get("attention_bias", False)),
            mlp_bias=bool(hf.get("mlp_bias", False)),
            rope=_rope(directory, hf),
        )


def _by_transformers(directory: Path) -> dict[str, Any]:
    """config.json as transformers reads it, which fills in the defaults of each architecture, unifies the
    spellings of releases, and refuses what it finds impossible.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (AttributeError, LookupError, OSError, TypeError, ValueError, StrictDataclassError) as error:
        text = " ".join(str(error).split())
        raise invalid(directory, f"transformers refuses its config.json ({text})") from error
    found: dict[str, Any] = config.to_dict()
    return found


def _refuse_others(directory: Path, architecture: str, raw: dict[str, Any], hf: dict[str, Any]) -> None:
    """Refuse models that would be computed otherwise than here.

    Args:
        raw: config.json. hf: as transformers reads it.
    """
    model_type = str(raw.get("model_type"))  # transformers may read one Mistral as another
    if model_type.replace("_", "") != architecture.removesuffix("ForCausalLM").lower():
        raise invalid(
            directory, f"its model_type is {model_type!r}, which is another model than {architecture}"
        )
    if wrong := [name for name in SIZES if not hf.get(name, 1) > 0]:
        raise invalid(directory, f"its {wrong[0]} is {hf[wrong[0]]}; it must be at least 1")
    if hf.get("hidden_act", "silu") != "silu":
        raise invalid(directory, f"hidden_act is {hf['hidden_act']!r}; only 'silu' is supported")
    if not hf.get("is_causal", True):
        raise invalid(directory, "its tokens attend to later ones, too (is_causal is false)")


def _heads(directory: Path, hf: dict[str, Any]) -> tuple[int, int, int]:
    """Query heads, kv heads, and the size of each."""
    num_heads: int = hf["num_attention_heads"]
    num_kv_heads: int = hf.get("num_key_value_heads") or num_heads
    head_dim: int = hf.get("head_dim") or hf["hidden_size"] // num_heads
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise invalid(directory, f"{num_heads} query heads cannot share {num_kv_heads} kv heads evenly")
    if head_dim % 2:
        raise invalid(directory, f"its head_dim is {head_dim}; a rotation takes pairs")
    return num_heads, num_kv_heads, head_dim


def invalid(directory: Path, problem: str) -> EngineError:
    return EngineError(Reason.MODEL_INVALID, f"cannot serve {directory}: {problem}")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises EngineError(MODEL_INVALID) naming the file."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(
            path.parent, f"{path.name} cannot be read ({error}); is it a model directory?"
        ) from error
    if not isinstance(value, dict):
        raise invalid(path.parent, f"{path.name} is not a JSON object")
    return value


def _context_length(directory: Path, hf: dict[str, Any], wanted: int) -> int:
    limit = hf["max_position_embeddings"]
    if wanted > limit:
        raise ConfigError(
            f"context_length is {wanted}, but {directory} goes to {limit}: give {limit} or less"
        )
    length = wanted or limit
    window = hf.get("sliding_window")
    layered = hf.get("layer_types") or []
    if others := sorted(set(layered) - {"full_attention", "sliding_attention"}):
        raise invalid(directory, f"it has layers of {others[0]!r}; only full attention is supported")
    windowed = "sliding_attention" in layered if layered else hf.get("use_sliding_window", True)
    if window and windowed and window < length:
        raise ConfigError(
            f"{directory} attends over a sliding window of {window} tokens, which is not supported beyond "
            f"the window: set context_length to {window} or less (it is {length})"
        )
    return length


def _eos_token_ids(directory: Path, hf: dict[str, Any]) -> tuple[int, ...]:
    """Ids of generation_config.json first, then those of config.json, without repeats."""
    path = directory / "generation_config.json"
    sources = [read_json(path)] if path.exists() else []
    ids: dict[int, None] = {}
    for source in (*sources, hf):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int):
                raise invalid(directory, f"its eos_token_id is {value!r}; it must be an id, or a list of ids")
            ids[int(token_id)] = None
    return tuple(ids)


def _dtype(directory: Path, raw: dict[str, Any], wanted: str) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") if wanted == "auto" else wanted
    if name is None:
        return _stored_dtype(directory)
    if not isinstance(name, str) or name not in DTYPES:
        raise invalid(directory, f"its dtype is {name!r}; set dtype to one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _stored_dtype(directory: Path) -> torch.dtype:
    """The dtype of the first tensor of the checkpoint, for a config that names none."""
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                stored = file.get_slice(key).get_dtype()
                if stored in SAFETENSORS_DTYPES:
                    return SAFETENSORS_DTYPES[stored]
    return torch.float32


def _rope(directory: Path, hf: dict[str, Any]) -> RopeConfig:
    # transformers 5 keeps everything in rope_parameters; 4 has rope_theta beside rope_scaling.
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if nested := [key for key, value in scaling.items() if isinstance(value, dict)]:
        raise invalid(directory, f"its layers rotate differently (rope_parameters of {nested[0]!r})")
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise invalid(directory, f"its rope_type is {rope_type!r}; supported: {', '.join(ROPE_TYPES)}")
    if any(partial not in (None, 1) for partial in (scaling.get(PARTIAL), hf.get(PARTIAL))):
        raise invalid(directory, f"it rotates a part of each head only ({PARTIAL})")

    def number(name: str, default: float | None) -> float:
        value = scaling.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise invalid(directory, f"its rope_parameters say {name}={value!r}, which is no positive number")
        return float(value)

    theta = number("rope_theta", hf.get("rope_theta", 10000.0))
    if rope_type == "default":
        return RopeConfig(rope_type, theta)
    if rope_type == "linear":
        return RopeConfig(rope_type, theta, number("factor", None))
    # As in transformers, what stands beside the other parameters goes first.
    beside = hf.get(ORIGINAL)
    return RopeConfig(
        rope_type,
        theta,
        factor=number("factor", None),
        low_freq_factor=number("low_freq_factor", None),
        high_freq_factor=number("high_freq_factor", None),
        original_context=int(number(ORIGINAL, hf["max_position_embeddings"]) if beside is None else beside),
    )
