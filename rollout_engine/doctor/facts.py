"""What there is on this machine, as plain values: gathered by gather.py, judged by checks.py. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report. advice: what to do; empty if nothing."""

    check: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """What an engine is to be started with."""

    model: Path | None = None
    weights_roots: tuple[Path, ...] = ()
    host: str = "127.0.0.1"
    port: int = 50051
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    device: str = "auto"
    ring_bytes: int = 32 << 20
    """Of the upload ring in shared memory."""


@dataclass(frozen=True, slots=True)
class Package:
    """A requirement of ours. installed: its version, empty if it is not there. extra: that asks for it."""

    name: str
    wanted: str
    installed: str
    fits: bool
    extra: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch sees. Memory in bytes."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What the probe of torch said, in a process of its own.

    error: why there is no answer. cuda_build: torch's CUDA version, empty for a CPU build.
    driver: version of the kernel module; num_device_files: /dev/nvidia0 and so on.
    """

    torch_version: str = ""
    cuda_build: str = ""
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    num_device_files: int = 0
    flashinfer: str = ""
    flashinfer_error: str = ""
    triton: str = ""
    triton_error: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class KernelCache:
    """FlashInfer's compiled kernels."""

    directory: str = ""
    num_kernels: int = 0


@dataclass(frozen=True, slots=True)
class IpcProbe:
    """Whether one process could read another's GPU memory. tried: False without a GPU."""

    tried: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """/dev/shm, in bytes, and the segments of ours in it. error: why it cannot be used."""

    total_bytes: int = 0
    free_bytes: int = 0
    error: str = ""
    num_held: int = 0
    held_bytes: int = 0
    num_left: int = 0
    left_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Port:
    """An address that is to be listened on. error: why that fails. ours: a rollsync engine answers there."""

    key: str
    host: str
    port: int
    error: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Network:
    """Names and interfaces. addresses: that the host's own name resolves to; error: why it does not."""

    hostname: str = ""
    addresses: tuple[str, ...] = ()
    error: str = ""
    interfaces: tuple[str, ...] = ()
    chosen: dict[str, str] = field(default_factory=dict)  # GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME


@dataclass(frozen=True, slots=True)
class Limits:
    """Of this process: (soft, hard), -1 for none. memory in bytes."""

    open_files: tuple[int, int] = (-1, -1)
    locked_bytes: tuple[int, int] = (-1, -1)
    available_bytes: int = 0
    num_cpus: int = 1


@dataclass(frozen=True, slots=True)
class Root:
    """A directory that weights come from. error: why it cannot be read; the rest is of a readable one."""

    path: str
    is_model: bool
    error: str = ""
    free_bytes: int = 0
    weight_bytes: int = 0
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything."""

    options: Options = Options()
    python: tuple[int, int, int] = (3, 11, 0)
    rollsync: str = ""
    packages: tuple[Package, ...] | None = ()
    """None: rollsync is not installed, so nothing says what it needs."""
    accelerator: Accelerator = Accelerator()
    kernel_cache: KernelCache = KernelCache()
    compiler: str = ""
    ipc: IpcProbe = IpcProbe()
    shared_memory: SharedMemory = SharedMemory()
    ports: tuple[Port, ...] = ()
    network: Network = Network()
    limits: Limits = Limits()
    roots: tuple[Root, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)  # PYTORCH_*ALLOC_CONF
    unknown_variables: tuple[str, ...] = ()


def as_plain(findings: list[Finding]) -> dict[str, Any]:
    """One JSON object."""
    rows = [{"check": f.check, "status": f.status, "found": f.found, "advice": f.advice} for f in findings]
    return {"ok": not any(f.status == "fail" for f in findings), "checks": rows}
