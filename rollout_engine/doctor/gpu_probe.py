"""What torch, FlashInfer and Triton are here: `python -m rollout_engine.doctor.gpu_probe` prints JSON.

A process of its own, since a broken driver may crash or hang whoever asks it, and CUDA once started stays.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def probe() -> dict[str, Any]:
    """Values for facts.Accelerator."""
    import torch

    found: dict[str, Any] = {"torch_version": torch.__version__, "cuda_build": torch.version.cuda or ""}
    if not torch.cuda.is_available():
        return found
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": torch.cuda.get_device_name(index),
                "capability": list(torch.cuda.get_device_capability(index)),
                "total_bytes": total,
                "free_bytes": free,
            }
        )
    found["gpus"] = gpus
    for name in ("flashinfer", "triton"):
        version, error = imported(name)
        found[name], found[f"{name}_error"] = version, error
    return found


def imported(name: str) -> tuple[str, str]:
    """(version, "") of a package that can be imported; ("", why) of another."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return "", "not installed" if error.name == name else f"cannot be imported: {error}"
    except Exception as error:  # noqa: BLE001 - whatever a foreign package does while it loads
        return "", f"cannot be imported: {type(error).__name__}: {error}"
    return str(getattr(module, "__version__", "unknown version")), ""


if __name__ == "__main__":
    print(json.dumps(probe()))
    sys.stdout.flush()
