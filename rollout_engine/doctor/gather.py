"""Gathers the facts of this machine. What could crash or hang runs in a process of its own, for a while."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import resource
import select
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_engine.doctor.facts import (
    Accelerator,
    Facts,
    Gpu,
    IpcProbe,
    KernelCache,
    Limits,
    Network,
    Options,
    Package,
    Port,
    Root,
    SharedMemory,
)
from weight_updater import shm

PROBE_TIMEOUT_S = 120.0
"""Importing torch and starting CUDA takes seconds, on a busy machine many."""
HEALTH_TIMEOUT_S = 2.0
GPU_PROBE = (sys.executable, "-m", "rollout_engine.doctor.gpu_probe")
IPC_PROBE = (sys.executable, "-m", "rollout_engine.doctor.ipc_probe")
ALLOC_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NEEDED_FILES = ("config.json", "*.safetensors", "tokenizer.json")


def gather(options: Options) -> Facts:
    """Look at everything; takes as long as importing torch does."""
    environment = dict(os.environ)
    found = accelerator(GPU_PROBE)
    return Facts(
        options=options,
        python=sys.version_info[:3],
        rollsync=_version("rollsync"),
        packages=packages("rollsync"),
        accelerator=found,
        kernel_cache=kernel_cache(environment),
        compiler=compiler(environment),
        ipc=cuda_ipc(IPC_PROBE) if found.gpus else IpcProbe(),
        shared_memory=shared_memory(Path("/dev/shm")),
        ports=tuple(ports(options)),
        network=network(environment),
        limits=limits(),
        roots=tuple(roots(options)),
        environment={name: environment[name] for name in ALLOC_VARIABLES if name in environment},
        unknown_variables=unknown_variables(environment),
    )


# ---------------------------------------------------------------- packages


def packages(name: str) -> tuple[Package, ...] | None:
    """The requirements of an installed distribution and its extras; None if it is not installed."""
    from packaging.requirements import Requirement

    try:
        wanted = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = []
    for line in wanted:
        requirement = Requirement(line)
        extra = re.search(r"""extra\s*==\s*["']([\w-]+)["']""", line)
        applies = requirement.marker is None or requirement.marker.evaluate(
            {"extra": extra[1] if extra else ""}
        )
        if not applies or requirement.name == name:
            continue
        version = _version(requirement.name)
        found.append(
            Package(
                name=requirement.name,
                wanted=str(requirement.specifier),
                installed=version,
                fits=bool(version) and requirement.specifier.contains(version, prereleases=True),
                extra=extra[1] if extra else "",
            )
        )
    return tuple(found)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


# ---------------------------------------------------------------- GPU


def accelerator(command: Sequence[str], devices: Path = Path("/dev")) -> Accelerator:
    """What gpu_probe says, and what the system shows without it."""
    number = len([path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    told, error = _json_of(command)
    gpus = tuple(
        Gpu(gpu["name"], (gpu["capability"][0], gpu["capability"][1]), gpu["total_bytes"], gpu["free_bytes"])
        for gpu in told.pop("gpus", ())
    )
    return Accelerator(**told, gpus=gpus, driver=driver_version(), num_device_files=number, error=error)


def _json_of(command: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The object that a command prints last, or why there is none."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {PROBE_TIMEOUT_S:.0f} s: the driver or an import hangs"
    if done.returncode != 0:
        return {}, _last_line(done.stderr) or f"the probe ended with {done.returncode}"
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told, ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Of NVIDIA's kernel module; empty if it is not loaded."""
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", path.read_text())
    except OSError:
        return ""
    return found[1] if found else "of unknown version"


def kernel_cache(environment: Mapping[str, str]) -> KernelCache:
    """FlashInfer's own: below FLASHINFER_WORKSPACE_BASE or the home directory."""
    base = environment.get("FLASHINFER_WORKSPACE_BASE") or environment.get("HOME") or "/"
    directory = Path(base) / ".cache" / "flashinfer"
    kernels = sum(1 for _ in directory.rglob("*.so")) if directory.is_dir() else 0
    return KernelCache(str(directory), kernels)


def compiler(environment: Mapping[str, str]) -> str:
    """The C compiler that Triton would take."""
    asked = environment.get("CC", "").split()
    for name in (*asked[:1], "gcc", "clang", "cc"):
        if path := shutil.which(name, path=environment.get("PATH")):
            return path
    return ""


def cuda_ipc(command: Sequence[str]) -> IpcProbe:
    """Let one process lend GPU memory and another read it."""
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    lender = subprocess.Popen(
        [*command, "lend"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = _read_line(lender, deadline)
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, errors = lender.communicate(timeout=1.0)
                if lender.returncode != 0:  # else it did answer, but late
                    return IpcProbe(True, f"cannot lend GPU memory: {_last_line(errors)}")
            return IpcProbe(True, "cannot lend GPU memory: no answer in time")
        try:
            mapped = subprocess.run(
                [*command, "map", line],
                capture_output=True,
                text=True,
                timeout=max(1.0, deadline - time.monotonic()),
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return IpcProbe(True, "cannot map another process's GPU memory: no answer in time")
        if mapped.returncode != 0:
            return IpcProbe(True, f"cannot map another process's GPU memory: {_last_line(mapped.stderr)}")
        if mapped.stdout.split()[-1:] != [str(json.loads(line)["checksum"])]:
            return IpcProbe(True, "what was read is not what the other process had written")
        return IpcProbe(True)
    finally:
        lender.kill()
        lender.communicate()


def _read_line(process: subprocess.Popen[str], deadline: float) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
    return process.stdout.readline().strip() if ready else ""


# ---------------------------------------------------------------- shared memory, ports, network


def shared_memory(directory: Path) -> SharedMemory:
    """Size, permission, and the segments of ours."""
    try:
        size = os.statvfs(directory)
    except OSError as error:
        return SharedMemory(error=f"{directory}: {error.strerror}")
    if not os.access(directory, os.W_OK | os.X_OK):
        return SharedMemory(error=f"{directory} is not writable for this user")
    found = shm.survey()
    return SharedMemory(
        total_bytes=size.f_blocks * size.f_frsize,
        free_bytes=size.f_bavail * size.f_frsize,
        num_held=found.num_held,
        held_bytes=found.held_bytes,
        num_left=found.num_left,
        left_bytes=found.left_bytes,
    )


def ports(options: Options) -> list[Port]:
    """Whether the addresses can be listened on; one that cannot may be an engine of ours."""
    wanted = [("port", options.host, options.port)]
    if options.metrics_port is not None:
        wanted.append(("metrics_port", options.metrics_host, options.metrics_port))
    found = []
    for key, host, port in wanted:
        error = bind_error(host, port) if port else ""
        ours = key == "port" and bool(error) and is_ours(host, port)
        found.append(Port(key, host, port, error, ours))
    return found


def bind_error(host: str, port: int) -> str:
    """Why an address cannot be listened on; empty if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have that name
        return getattr(error, "strerror", None) or str(error)
    return ""


def is_ours(host: str, port: int) -> bool:
    """Whether the standard health service there knows a service of ours. It wants no token, but maybe TLS."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    request = health_pb2.HealthCheckRequest(service="rollout_engine.v1.Rollout")
    with grpc.insecure_channel(address) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=HEALTH_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return True


def network(environment: Mapping[str, str], hostname: str = "") -> Network:
    """The host's name and what it resolves to, and the interfaces."""
    name = hostname or socket.gethostname()
    chosen = {key: environment[key] for key in INTERFACE_VARIABLES if environment.get(key)}
    interfaces = tuple(interface for _, interface in socket.if_nameindex())
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError as error:
        text = f"does not resolve ({error.strerror})"
        return Network(name, error=text, interfaces=interfaces, chosen=chosen)
    return Network(name, tuple(sorted(addresses)), interfaces=interfaces, chosen=chosen)


# ---------------------------------------------------------------- limits, disks, settings


def limits() -> Limits:
    """Of this process, which an engine started here would inherit."""
    return Limits(
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        available_bytes=available_bytes(),
        num_cpus=len(os.sched_getaffinity(0)),
    )


def _limit(which: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(which)
    none = resource.RLIM_INFINITY
    return -1 if soft == none else soft, -1 if hard == none else hard


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be had without swapping: the host's, or what the container's limit leaves."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    host = int(found[1]) * 1024 if found else 0
    with contextlib.suppress(OSError, ValueError):  # cgroup v1, no limit ("max"), or not mounted
        most = int((cgroup / "memory.max").read_text())
        return min(host, max(0, most - int((cgroup / "memory.current").read_text())))
    return host


def roots(options: Options) -> list[Root]:
    """The directories that were named."""
    named = [(options.model, True)] if options.model else []
    return [
        _root(path, is_model)
        for path, is_model in [*named, *((path, False) for path in options.weights_roots)]
    ]


def _root(path: Path, is_model: bool) -> Root:
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return Root(str(path), is_model, "does not exist")
    except OSError as error:
        return Root(str(path), is_model, f"cannot be read ({error.strerror})")
    if not is_directory:
        return Root(str(path), is_model, "is not a directory")
    if not os.access(path, os.R_OK | os.X_OK):
        return Root(str(path), is_model, "cannot be read by this user")
    size = os.statvfs(path)
    return Root(
        str(path),
        is_model,
        free_bytes=size.f_bavail * size.f_frsize,
        weight_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")) if is_model else 0,
        missing=tuple(name for name in NEEDED_FILES if is_model and not any(path.glob(name))),
    )


def unknown_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """ROLLSYNC_* variables that no setting is called after."""
    from rollout_engine.config import CLIENT_VARIABLES, ServeConfig

    known = {f"ROLLSYNC_{name.upper()}" for name in ServeConfig.model_fields} | CLIENT_VARIABLES
    return tuple(sorted(name for name in environment if name.startswith("ROLLSYNC_") and name not in known))
