"""How fast a device copies: the floor of every commit."""

from __future__ import annotations

import time

import torch


def measure_copy_rate(device: torch.device) -> float:
    """Bytes per second of one plain copy of 64 MiB on `device`: the floor of every commit."""
    source = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return source.numel() / best
