"""Floors: what the hardware or the library below allows, measured in the same run as what stands on it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

import torch

from tests.benchmarks.gpu.model import Weights

REPEATS = 5
PINNED_BYTES = 1 << 30
"""Of the pinned buffer that the host-to-device floor copies from again and again."""


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of REPEATS after a warm-up, each from an idle device to its end."""
    taken = []
    for _ in range(REPEATS + 1):
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_copy(weights: Weights) -> float:
    """Seconds of one flat copy of all bytes on the device."""

    def measured() -> float:
        other = torch.empty_like(weights.arena)
        return median_seconds(lambda: other.copy_(weights.arena), weights.device)

    seconds = measured()
    if weights.device.type == "cuda":
        torch.cuda.empty_cache()
    return seconds


def pinned_copy(nbytes: int, device: torch.device) -> float:
    """Seconds that `nbytes` need from pinned host memory to the device, in pieces of PINNED_BYTES."""
    piece = min(nbytes, PINNED_BYTES)
    here = torch.zeros(piece, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(piece, dtype=torch.uint8, device=device)
    return median_seconds(lambda: there.copy_(here, non_blocking=True), device) * nbytes / piece


def product_rate(
    hidden: int, intermediate: int, rows: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Multiply-adds times two, per second, of the model's widest product over `rows` tokens."""
    x = torch.randn(rows, hidden, device=device, dtype=torch.float32).to(dtype)
    weight = torch.randn(2 * intermediate, hidden, device=device, dtype=torch.float32).to(dtype)
    out = torch.empty(rows, 2 * intermediate, device=device, dtype=dtype)
    times = 10

    def products() -> None:
        for _ in range(times):
            torch.mm(x, weight.t(), out=out)

    return times * 2 * rows * hidden * 2 * intermediate / median_seconds(products, device)


def decode_rate(
    shape: dict, batch: int, num_in: int, num_out: int, copy_bytes_per_s: float, flops: float
) -> float:
    """Tokens per second that no engine can exceed: the larger of reads and products, and the KV reads.

    Args:
        copy_bytes_per_s: read plus write of a device copy, so what reads alone can reach.
        flops: of large products.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads, kv_heads, head_dim = (
        shape[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    per_layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * shape["intermediate_size"]
    body, head = layers * per_layer, hidden * shape["vocab_size"]
    kv_bytes = batch * (num_in + num_out / 2) * 2 * layers * kv_heads * head_dim * 2
    reads = (body + head) * 2 / copy_bytes_per_s
    step = max(reads, 2 * batch * (body + head) / flops) + kv_bytes / copy_bytes_per_s
    prefill = max(reads, 2 * (batch * num_in * body + batch * head) / flops)
    return batch * num_out / (prefill + (num_out - 1) * step)


def stream_rates(nbytes: int, num_receivers: int) -> dict[str, float]:
    """Bytes per second of client streams of 4 MiB chunks on loopback, by kind, one process at each end.

    raw: bytes in, nothing parsed. protobuf: our messages. aio: our messages, with a grpc.aio server.
    raw xN: as raw, from one client to N servers at once.
    """
    rates = {kind: _stream_rate(kind, 1, nbytes) for kind in ("raw", "protobuf", "aio")}
    if num_receivers > 1:
        rates[f"raw x{num_receivers}"] = _stream_rate("raw", num_receivers, nbytes)
    return rates


def _stream_rate(kind: str, num_servers: int, nbytes: int) -> float:
    from tests import children
    from tests.benchmarks.gpu import stream_server

    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(children.start("tests.benchmarks.gpu.stream_server", kind))
            for _ in range(num_servers)
        ]
        addresses = [f"127.0.0.1:{server.ask('port')}" for server in servers]
        return stream_server.client_rate(kind, addresses, nbytes)
