"""The goals on a GPU, line by line: what is measured, against which floor, and what would be good."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """One line. `limit` is in `unit`; a row may replace it by one that depends on what it measured.

    at_most: the value should not exceed the limit; else it should reach it.
    """

    name: str
    what: str
    unit: str
    goal: str
    limit: float
    at_most: bool
    floor_is: str


def _most(name: str, what: str, unit: str, limit: float, floor_is: str, goal: str = "") -> Goal:
    return Goal(name, what, unit, goal or f"<= {limit:g} {unit}", limit, True, floor_is)


def _least(name: str, what: str, unit: str, limit: float, floor_is: str, goal: str = "") -> Goal:
    return Goal(name, what, unit, goal or f">= {limit:,g} {unit}", limit, False, floor_is)


GOALS = (
    _most("ipc_none", "ipc, staging none, checksums off", "ms", 12, "one device copy"),
    _most(
        "ipc_device",
        "ipc, staging device (two copies, the first beside generation)",
        "ms",
        20,
        "two device copies",
    ),
    _most(
        "ipc_checksums",
        "ipc, staging none, with checksums compared",
        "ms",
        20,
        "two device copies: a read, a copy, a read",
    ),
    _most(
        "ipc_adopt",
        "ipc `adopt` (no copy, shared memory)",
        "ms",
        10,
        "0 bytes are copied",
        "<= 10 ms + recapture; 0 bytes of new weight memory",
    ),
    _most(
        "pause",
        "pause seen by running sequences, staging device, any path",
        "ms",
        12,
        "one device copy",
        "<= 12 ms + one decode step",
    ),
    _most("distributed", "distributed, 2 GPUs, NCCL", "ms", 56, "1 GiB broadcasts by torch.distributed"),
    _most("tensor_shm", "tensor, shared memory on one host", "s", 0.39, "pinned host-to-device copy"),
    _least(
        "tensor_stream",
        "tensor, gRPC stream on loopback",
        "GB/s",
        4,
        "raw synchronous grpcio stream, 4 MiB chunks",
        ">= 80% of the floor on one stream; >= 4 GB/s with several receivers",
    ),
    _most("disk", "disk, warm page cache, safetensors", "s", 0.40, "pinned host-to-device copy"),
    _most(
        "graphs",
        "graphs recaptured, sizes 1 2 4 8 16 32 64 128 256",
        "s",
        1,
        "none",
        "<= 1 s; 0 s when no address moved",
    ),
    _most(
        "updates_under_load",
        "1,000 updates by ipc under load: kinds of memory, handles, threads and files that grew",
        "kinds",
        0,
        "none",
        "<= 0",
    ),
    _least("decode_1", "decode, batch 1, 128 in, 128 out", "tok/s", 210, "reads at the copy's rate"),
    _least("decode_32", "decode, batch 32, 128 in, 256 out", "tok/s", 5550, "reads and products"),
    _least("decode_256", "decode, batch 256, 128 in, 256 out", "tok/s", 20000, "reads and products"),
    _most(
        "start",
        "start to first token, warm page cache, graphs on, compile caches warm",
        "s",
        30,
        "none",
    ),
    _least(
        "grpc_share",
        "`GenerateBatch` through gRPC against the engine called in its own process, batch 256",
        "%",
        95,
        "in process",
    ),
    _least(
        "decode_during_update",
        "decode while an update is received into staging",
        "%",
        80,
        "undisturbed",
    ),
    _most(
        "logprobs",
        "abs difference of the sampled tokens' log-probabilities to the Hugging Face model in bf16",
        "mean",
        0.059,
        "the Hugging Face model against itself at another batch shape",
        "mean <= 1.2x the floor and <= 0.059",
    ),
)
"""In the order of the table that people see. Rows are measured in another order; see rows.ORDER."""

BY_NAME = {goal.name: goal for goal in GOALS}
