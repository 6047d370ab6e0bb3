"""adapter_config.json, which PEFT writes beside an adapter's tensors: rank and scaling of its modules."""

from __future__ import annotations

import math
import os
from types import UnionType
from typing import Any

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import AdapterSpec
from weight_updater.safetensors_header import corrupt, open_regular, parse_json, read_at
from weight_updater.safetensors_io import confined

FILE = "adapter_config.json"
MAX_BYTES = 1 << 20
MAX_RANK = (1 << 31) - 1
"""More is no rank at all; what the engine has room for (`--max-adapter-rank`) is compared later."""

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

_FREE_BASE = ("gaussian", "eva", "mica", "orthogonal")
"""How peft fills A and B at first without a change of the base weights. Others (pissa, corda, olora, loftq,
lora_ga) subtract what they fill in, so that B @ A is right over weights that no file of the adapter has.
"""


def read_spec(directory: str, asked: AdapterSpec) -> AdapterSpec:
    """`asked` with what the directory's adapter_config.json says.

    Raises:
        UpdateRefused: FILE_NOT_FOUND, FILE_CORRUPT, PATH_FORBIDDEN (a link that leaves the directory), or
            INVALID_UPDATE for an adapter that is no plain LoRA.
    """
    path, config = _read(directory)
    if config.get("peft_type") != "LORA":
        raise _not_plain(asked, f"its peft_type is {_shown(config.get('peft_type'))}")
    if on := [name for name in _REFUSED if config.get(name)]:
        raise _not_plain(asked, f"it has {on[0]}={_shown(config[on[0]])}")
    if config.get("bias", "none") != "none":
        raise _not_plain(asked, f"it trains biases (bias={_shown(config['bias'])})")
    init = config.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in _FREE_BASE)):
        raise _not_plain(asked, f"its init_lora_weights={_shown(init)} may have changed the base weights")
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if not (_is_number(rank, int) and 0 < rank <= MAX_RANK and _is_number(alpha, int | float)):
        raise corrupt(path, f"r is {_shown(rank)} and lora_alpha {_shown(alpha)}")
    try:
        scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    except OverflowError as error:
        raise corrupt(path, f"lora_alpha is {_shown(alpha)}") from error
    return AdapterSpec(asked.name, rank, scaling, (), asked.base_checksum)


def _read(directory: str) -> tuple[str, dict[str, Any]]:
    """The file's real path, and the object that it holds."""
    if not os.path.lexists(os.path.join(directory, FILE)):
        raise UpdateRefused(
            Reason.FILE_NOT_FOUND,
            f"{directory} has no {FILE}; give rank and scaling of it",
        )
    path = confined(directory, FILE, [directory])
    fd, identity = open_regular(path, path)
    try:
        if identity.size > MAX_BYTES:
            raise corrupt(path, f"a configuration of {identity.size} bytes")
        return path, parse_json(read_at(fd, identity.size, 0, path), path)
    finally:
        os.close(fd)


def _is_number(value: Any, kind: type | UnionType) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _not_plain(asked: AdapterSpec, what: str) -> UpdateRefused:
    return UpdateRefused(
        Reason.INVALID_UPDATE,
        f"adapter {asked.name} cannot be read from its {FILE}: {what}; plain LoRA on linear layers can, "
        f"others are pushed by their trainer, as an adapter or merged",
    )
