"""How much memory a device has left."""

from __future__ import annotations

from pathlib import Path

import torch


def available_memory(device: torch.device) -> int:
    """Bytes free on `device` now; for a CPU what the kernel can give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; the kernel is older than 3.14")
