"""adapter_config.json, which PEFT writes beside an adapter's tensors: rank and scaling of its modules."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import AdapterSpec
from weight_updater.safetensors_header import corrupt, open_regular

FILE = "adapter_config.json"
MAX_BYTES = 1 << 20

_REFUSED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "arrow_config",
    "velora_config",
    "monteclora_config",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
)
"""Settings of which none may be on: they add something else than B @ A, or want patterns to be evaluated to
know the rank and the scaling of a module (a trainer that pushes names its modules instead).
"""


def read_spec(directory: str, asked: AdapterSpec) -> AdapterSpec:
    """`asked` with what the directory's adapter_config.json says.

    Raises:
        UpdateRefused: FILE_NOT_FOUND, FILE_CORRUPT, or INVALID_UPDATE for an adapter that is no plain LoRA.
    """
    path = os.path.join(directory, FILE)
    config = _read(path)
    if config.get("peft_type") != "LORA":
        raise _not_plain(asked, f"its peft_type is {config.get('peft_type')!r}")
    if on := [name for name in _REFUSED if config.get(name)]:
        raise _not_plain(asked, f"it has {on[0]}={config[on[0]]!r}")
    if config.get("bias", "none") != "none":
        raise _not_plain(asked, f"it trains biases (bias={config['bias']!r})")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not isinstance(alpha, int | float) or rank < 1:
        raise corrupt(path, f"r is {rank!r} and lora_alpha {alpha!r}")
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return AdapterSpec(asked.name, rank, scaling, (), asked.base_checksum)


def _read(path: str) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise UpdateRefused(
            Reason.FILE_NOT_FOUND,
            f"{os.path.dirname(path)} has no {FILE}; give rank and scaling of it",
        )
    fd, identity = open_regular(path, path)
    try:
        if identity.size > MAX_BYTES:
            raise corrupt(path, f"a configuration of {identity.size} bytes")
        config = json.loads(os.pread(fd, identity.size, 0))
    except ValueError as error:
        raise corrupt(path, f"it is no JSON ({error})") from error
    finally:
        os.close(fd)
    if not isinstance(config, dict):
        raise corrupt(path, "it is no JSON object")
    return config


def _not_plain(asked: AdapterSpec, what: str) -> UpdateRefused:
    return UpdateRefused(
        Reason.INVALID_UPDATE,
        f"adapter {asked.name} cannot be read from its {FILE}: {what}; plain LoRA on linear layers can, "
        f"others are pushed by their trainer, as an adapter or merged",
    )
