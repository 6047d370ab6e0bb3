"""What the facts mean: rows with ok, warn or fail, and what to do. Pure functions over facts.py.

fail: an engine cannot start, or not as it is asked to. warn: it can, but something will be slower, smaller
or missing. What is not needed here is ok.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rollout_engine.doctor.facts import Facts, Finding, Package, Port, Root, Status

MIN_PYTHON = (3, 11)
MIN_CAPABILITY = (8, 0)
"""bfloat16 and FlashInfer's prefill kernels."""
MIN_OPEN_FILES = 256
GOOD_OPEN_FILES = 1024
GOOD_LOCKED_BYTES = 64 << 20
ALLOC_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXTRAS = {
    "metrics": "serve --metrics-port",
    "plot": "rollsync plot",
    "http": "rollsync http",
    "gpu": "attention on GPUs",
}


def examine(facts: Facts) -> list[Finding]:
    """Every check, in the order of the report."""
    return [finding for check in CHECKS for finding in check(facts)]


def gib(nbytes: int) -> str:
    """Bytes for people."""
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


# ---------------------------------------------------------------- Python and packages


def python(facts: Facts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    if facts.python < MIN_PYTHON:
        yield Finding("Python", "fail", version, "rollsync needs Python 3.11 or newer")
    else:
        yield Finding("Python", "ok", version)


def packages(facts: Facts) -> Iterator[Finding]:
    if facts.packages is None:
        text = "rollsync is not installed, so nothing says what it needs"
        yield Finding("packages", "warn", text, "pip install rollsync")
        return
    base = [package for package in facts.packages if not package.extra]
    if wrong := [package for package in base if not package.fits]:
        yield Finding("packages", "fail", "; ".join(map(_said, wrong)), _install(wrong))
    else:
        text = f"rollsync {facts.rollsync}, and all {len(base)} packages that it needs"
        yield Finding("packages", "ok", text)


def extras(facts: Facts) -> Iterator[Finding]:
    needed: dict[str, Status] = {}
    if facts.options.metrics_port is not None:
        needed["metrics"] = "fail"
    if facts.accelerator.gpus:
        needed["gpu"] = "warn"
    for extra, use in EXTRAS.items():
        asked = [package for package in facts.packages or () if package.extra == extra]
        wrong = [package for package in asked if not package.fits]
        name = f"extra [{extra}]"
        if not wrong:
            if asked:
                yield Finding(name, "ok", ", ".join(f"{p.name} {p.installed}" for p in asked))
        elif extra in needed:
            advice = f"for {use}: pip install 'rollsync[{extra}]'"
            yield Finding(name, needed[extra], "; ".join(map(_said, wrong)), advice)
        else:
            yield Finding(name, "ok", f"{'; '.join(map(_said, wrong))}; only for {use}")


def _said(package: Package) -> str:
    wanted = f", wants {package.wanted}" if package.wanted else ""
    return f"{package.name} {package.installed or 'is not installed'}{wanted}"


def _install(wrong: list[Package]) -> str:
    return "pip install " + " ".join(f"'{package.name}{package.wanted}'" for package in wrong)


# ---------------------------------------------------------------- GPU


def gpu(facts: Facts) -> Iterator[Finding]:
    found, device = facts.accelerator, facts.options.device
    wants_gpu = device.startswith("cuda")
    if found.error:
        yield Finding("torch", "fail", found.error, "reinstall torch; `python -c 'import torch'` shows more")
        return
    build = f"CUDA {found.cuda_build}" if found.cuda_build else "a CPU build"
    yield Finding("torch", "ok", f"{found.torch_version}, {build}")
    driver = f"driver {found.driver}" if found.driver else "no driver"
    if found.gpus:
        names = "; ".join(
            f"{gpu.name}, {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free" for gpu in found.gpus
        )
        yield Finding("GPU", "ok", f"{names}; {driver}")
        return
    if not found.num_device_files and not wants_gpu:
        yield Finding("GPU", "ok", "none: the engine runs on the CPU")
        return
    status: Status = "fail" if wants_gpu else "warn"
    if not found.num_device_files:
        text = f"device {device} is asked for, and there is no /dev/nvidia*"
        yield Finding(
            "GPU", status, text, "in a container: start it with the GPUs (--gpus all); or use device cpu"
        )
    elif not found.cuda_build:
        text = f"{found.num_device_files} in /dev, and torch is a CPU build"
        yield Finding("GPU", status, text, "install a CUDA build of torch, or the engine runs on the CPU")
    else:
        text = f"{found.num_device_files} in /dev, {driver}, and torch sees none of them"
        advice = "is the driver new enough for torch's CUDA, and CUDA_VISIBLE_DEVICES right? see nvidia-smi"
        yield Finding("GPU", status, text, advice)


def compute_capability(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.accelerator.gpus:
        capability = ".".join(map(str, gpu.capability))
        if gpu.capability < MIN_CAPABILITY:
            advice = "8.0 or newer has bfloat16 and FlashInfer; use --dtype float32 --attention-backend torch"
            yield Finding("compute capability", "warn", f"{gpu.name}: {capability}", advice)
        else:
            yield Finding("compute capability", "ok", f"{gpu.name}: {capability}")


def flashinfer(facts: Facts) -> Iterator[Finding]:
    found, cache = facts.accelerator, facts.kernel_cache
    if not found.gpus:
        yield Finding("FlashInfer", "ok", "not needed without a GPU")
    elif found.flashinfer_error:
        advice = "pip install 'rollsync[gpu]'; without it attention runs on torch's SDPA, without CUDA graphs"
        yield Finding("FlashInfer", "warn", found.flashinfer_error, advice)
    elif not cache.num_kernels:
        text = f"{found.flashinfer}, nothing compiled in {cache.directory}"
        yield Finding(
            "FlashInfer", "warn", text, "the first start takes a minute more; `rollsync warmup` does it now"
        )
    else:
        text = f"{found.flashinfer}, {cache.num_kernels} compiled kernels in {cache.directory}"
        yield Finding("FlashInfer", "ok", text)


def triton(facts: Facts) -> Iterator[Finding]:
    found = facts.accelerator
    if not found.gpus:
        yield Finding("Triton", "ok", "not needed without a GPU")
    elif found.triton_error:
        advice = "it comes with CUDA builds of torch; without it no pass is captured, and checksums are slow"
        yield Finding("Triton", "warn", found.triton_error, advice)
    elif not facts.compiler:
        advice = "install gcc or clang (or set CC): Triton compiles its launchers with it"
        yield Finding("Triton", "fail", f"{found.triton}, but there is no C compiler", advice)
    else:
        yield Finding("Triton", "ok", f"{found.triton}, compiler {facts.compiler}")


def cuda_ipc(facts: Facts) -> Iterator[Finding]:
    if not facts.ipc.tried:
        yield Finding("CUDA IPC", "ok", "not needed without a GPU")
        return
    if facts.ipc.error:
        advice = (
            "the ipc path cannot work: trainer and engine need one host, one user, one IPC and PID namespace "
            "(docker: --ipc=host --pid=host) and the package cuda-bindings"
        )
        yield Finding("CUDA IPC", "warn", facts.ipc.error, advice)
    else:
        yield Finding("CUDA IPC", "ok", "one process read what another had written")
    for name in ALLOC_VARIABLES:
        if "expandable_segments:true" in facts.environment.get(name, "").lower().replace(" ", ""):
            advice = "such memory has no handle: each push copies once more; leave it out in the trainer"
            yield Finding("CUDA IPC", "warn", f"{name} sets expandable_segments", advice)


# ---------------------------------------------------------------- shared memory, ports, network


def shared_memory(facts: Facts) -> Iterator[Finding]:
    shm, ring_bytes = facts.shared_memory, facts.options.ring_bytes
    if shm.error:
        advice = "no engine starts without it; mount a tmpfs there that this user may write (mode 1777)"
        yield Finding("/dev/shm", "fail", shm.error, advice)
        return
    text = f"{gib(shm.free_bytes)} of {gib(shm.total_bytes)} free"
    weights = _weight_bytes(facts)
    larger = "make it larger (docker: --shm-size; else mount -o remount,size=...)"
    if shm.free_bytes < ring_bytes:
        text += f", and the upload ring takes {gib(ring_bytes)}"
        yield Finding("/dev/shm", "fail", text, larger)
    elif shm.free_bytes < weights:
        text += f", and a segment of the weights takes {gib(weights)}"
        advice = f"for TensorSegment (and IpcArena on a CPU) {larger}"
        yield Finding("/dev/shm", "warn", text, advice)
    else:
        yield Finding("/dev/shm", "ok", text)
    held = f"{shm.num_held} in use ({gib(shm.held_bytes)})"
    if shm.num_left:
        text = f"{held}, {shm.num_left} left behind by killed processes ({gib(shm.left_bytes)})"
        advice = "the next engine or trainer that makes one removes them"
        yield Finding("segments", "warn", text, advice)
    else:
        yield Finding("segments", "ok", f"{held}, none left behind")


def ports(facts: Facts) -> Iterator[Finding]:
    for port in facts.ports:
        yield _port(port)


def _port(port: Port) -> Finding:
    where = f"{port.host}:{port.port}"
    if port.port == 0:
        return Finding(port.key, "ok", "0: the system chooses")
    if port.ours:
        return Finding(port.key, "ok", f"{where}: an engine of rollsync serves there already")
    if port.error:
        option = f"--{port.key.replace('_', '-')}"
        return Finding(port.key, "fail", f"{where}: {port.error}", f"choose another with {option}, or 0")
    return Finding(port.key, "ok", f"{where} is free")


def network(facts: Facts) -> Iterator[Finding]:
    net = facts.network
    if net.error:
        advice = "put it into /etc/hosts; or give addresses, not names, to process groups"
        yield Finding("host name", "warn", f"{net.hostname}: {net.error}", advice)
    else:
        yield Finding("host name", "ok", f"{net.hostname} is {', '.join(net.addresses)}")
    yield Finding("interfaces", "ok", ", ".join(net.interfaces) or "none")
    for variable, wanted in net.chosen.items():
        names = [name.lstrip("^=").split(":")[0] for name in wanted.split(",")]
        unknown = [name for name in names if not any(i.startswith(name) for i in net.interfaces)]
        if unknown and not wanted.startswith("^"):
            text = f"{variable} names {unknown[0]}, and there is no such interface"
            yield Finding("interfaces", "fail", text, f"unset {variable}, or name one of those above")


# ---------------------------------------------------------------- limits and disks


def limits(facts: Facts) -> Iterator[Finding]:
    soft, hard = facts.limits.open_files
    text = "no limit" if soft < 0 else f"{soft} (hard limit {'none' if hard < 0 else hard})"
    if soft < 0 or soft >= GOOD_OPEN_FILES:
        yield Finding("open files", "ok", text)
    else:
        status: Status = "warn" if soft >= MIN_OPEN_FILES else "fail"
        yield Finding("open files", status, text, "raise it: ulimit -n 4096")
    locked, _ = facts.limits.locked_bytes
    text = "no limit" if locked < 0 else gib(locked)
    if 0 <= locked < GOOD_LOCKED_BYTES and facts.accelerator.gpus:
        advice = "NCCL over InfiniBand locks more: ulimit -l unlimited (docker: --ulimit memlock=-1)"
        yield Finding("locked memory", "warn", text, advice)
    else:
        yield Finding("locked memory", "ok", text)
    yield _memory(facts)


def _memory(facts: Facts) -> Finding:
    available, weights = facts.limits.available_bytes, _weight_bytes(facts)
    text = f"{gib(available)} available, {facts.limits.num_cpus} CPUs"
    if available >= 2 * weights:
        return Finding("memory", "ok", text)
    text += f"; the weights take {gib(weights)}"
    if available < weights and (not facts.accelerator.gpus or facts.options.device == "cpu"):
        return Finding("memory", "fail", text, "free some, or serve a smaller model")
    advice = "staging=host keeps a copy of them there: use staging none or device, or free some"
    return Finding("memory", "warn", text, advice)


def roots(facts: Facts) -> Iterator[Finding]:
    if not facts.roots:
        yield Finding("directories", "ok", "none named (--model and --weights-root are looked at)")
    for root in facts.roots:
        yield _root(root, _weight_bytes(facts))


def _weight_bytes(facts: Facts) -> int:
    """Of the model that is to be served; 0 if none is named."""
    return max((root.weight_bytes for root in facts.roots if root.is_model), default=0)


def _root(root: Root, weights: int) -> Finding:
    name = "model" if root.is_model else "weights root"
    if root.error:
        return Finding(name, "fail", f"{root.path}: {root.error}", "name a directory that this user may read")
    if not root.is_model:
        text = f"{root.path}: {gib(root.free_bytes)} free"
        if root.free_bytes >= weights:
            return Finding(name, "ok", text)
        text += f", and the weights take {gib(weights)}"
        return Finding(name, "warn", text, "free some, or use another disk")
    if required := [file for file in root.missing if file != "tokenizer.json"]:
        text = f"{root.path} has no {' and no '.join(required)}"
        return Finding(name, "fail", text, "name a directory in Hugging Face's layout")
    text = f"{root.path}: {gib(root.weight_bytes)} of weights"
    if root.missing:
        advice = "without it requests bring token ids, not text"
        return Finding(name, "warn", f"{text}, no tokenizer.json", advice)
    return Finding(name, "ok", text)


def environment(facts: Facts) -> Iterator[Finding]:
    if facts.unknown_variables:
        names = ", ".join(facts.unknown_variables)
        advice = "`rollsync serve` refuses what it does not know; unset it"
        yield Finding("environment", "fail", f"{names}: no such setting", advice)


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    python,
    packages,
    extras,
    gpu,
    compute_capability,
    flashinfer,
    triton,
    cuda_ipc,
    shared_memory,
    ports,
    network,
    limits,
    roots,
    environment,
)
