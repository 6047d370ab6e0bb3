"""What facts mean: hand-made machines, and the rows that they earn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollout_engine.doctor.checks import CHECKS, examine, gib
from rollout_engine.doctor.facts import (
    Accelerator,
    Facts,
    Finding,
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
    as_plain,
)

GIB = 1 << 30
TORCH = Package("torch", ">=2.11,<2.15", "2.13.0", True)
PROMETHEUS = Package("prometheus-client", ">=0.21", "0.26", True, "metrics")
MATPLOTLIB = Package("matplotlib", ">=3.9", "3.11", True, "plot")
FLASHINFER = Package("flashinfer-python", ">=0.6.12", "0.6.12", True, "gpu")

CPU = Facts(
    rollsync="0.1.0",
    packages=(TORCH, PROMETHEUS, MATPLOTLIB, replace(FLASHINFER, installed="", fits=False)),
    accelerator=Accelerator(torch_version="2.13.0+cpu"),
    compiler="/usr/bin/gcc",
    shared_memory=SharedMemory(total_bytes=16 * GIB, free_bytes=15 * GIB, num_held=1, held_bytes=GIB),
    ports=(Port("port", "127.0.0.1", 50051),),
    network=Network("host", ("10.0.0.2",), interfaces=("lo", "eth0")),
    limits=Limits((65536, 65536), (8 << 20, 8 << 20), 32 * GIB, 8),
    roots=(Root("/m", True, free_bytes=100 * GIB, weight_bytes=2 * GIB),),
)
H200 = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB)
CUDA = Accelerator(
    torch_version="2.11.0",
    cuda_build="13.0",
    gpus=(H200,),
    driver="580.65",
    num_device_files=1,
    flashinfer="0.6.12",
    triton="3.6.0",
)
GPU = replace(
    CPU,
    packages=(TORCH, PROMETHEUS, MATPLOTLIB, FLASHINFER),
    accelerator=CUDA,
    kernel_cache=KernelCache("/root/.cache/flashinfer", 12),
    ipc=IpcProbe(True),
    limits=replace(CPU.limits, locked_bytes=(-1, -1)),
)


def found(facts: Facts, check: str) -> Finding:
    """The one row of a check; the last, if there are several."""
    return [finding for finding in examine(facts) if finding.check == check][-1]


def troubles(facts: Facts) -> dict[str, str]:
    """Check -> status of all that is not ok; each of these says what to do."""
    rows = [finding for finding in examine(facts) if finding.status != "ok"]
    assert all(row.advice for row in rows), rows
    return {row.check: row.status for row in rows}


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_good_machine_has_nothing_to_fix(machine):
    assert troubles(machine) == {}
    findings = examine(machine)
    assert len({finding.check for finding in findings}) >= 16
    assert not any(finding.advice for finding in findings)


def test_every_check_has_its_say():
    for check in CHECKS:
        some = replace(GPU, unknown_variables=("ROLLSYNC_X",))
        assert list(check(some)), check.__name__


def accelerated(**changes) -> Facts:
    return replace(GPU, accelerator=replace(CUDA, **changes))


def shared(**changes) -> Facts:
    return replace(CPU, shared_memory=replace(CPU.shared_memory, **changes))


def limited(**changes) -> Facts:
    return replace(CPU, limits=replace(CPU.limits, **changes))


def rooted(*roots: Root) -> Facts:
    return replace(CPU, roots=roots)


MODEL = Root("/m", True, weight_bytes=2 * GIB)
OLD_TORCH = replace(TORCH, installed="2.9.1", fits=False)
NO_PROMETHEUS = replace(PROMETHEUS, installed="", fits=False)

TROUBLES = {
    "old Python": (replace(CPU, python=(3, 10, 4)), "Python", "fail", "3.10.4", "3.11"),
    "not installed": (
        replace(CPU, packages=None),
        "packages",
        "warn",
        "not installed",
        "pip install rollsync",
    ),
    "wrong torch": (
        replace(CPU, packages=(OLD_TORCH,)),
        "packages",
        "fail",
        "torch 2.9.1, wants >=2.11,<2.15",
        "pip install 'torch>=2.11,<2.15'",
    ),
    "metrics without the package": (
        replace(CPU, packages=(NO_PROMETHEUS,), options=Options(metrics_port=9464)),
        "extra [metrics]",
        "fail",
        "prometheus-client is not installed",
        "pip install 'rollsync[metrics]'",
    ),
    "GPU without flashinfer's package": (
        replace(GPU, packages=(replace(FLASHINFER, installed="0.5", fits=False),)),
        "extra [gpu]",
        "warn",
        "flashinfer-python 0.5, wants >=0.6.12",
        "rollsync[gpu]",
    ),
    "torch does not import": (
        accelerated(error="ImportError: libcudart.so.13", gpus=()),
        "torch",
        "fail",
        "libcudart",
        "reinstall torch",
    ),
    "CPU build on a GPU machine": (
        accelerated(cuda_build="", gpus=()),
        "GPU",
        "warn",
        "torch is a CPU build",
        "CUDA build of torch",
    ),
    "torch sees no GPU": (accelerated(gpus=()), "GPU", "warn", "sees none", "nvidia-smi"),
    "no GPU where one is asked for": (
        replace(CPU, options=Options(device="cuda:0")),
        "GPU",
        "fail",
        "there is no /dev/nvidia",
        "--gpus all",
    ),
    "GPU that is asked for is not seen": (
        replace(accelerated(gpus=()), options=Options(device="cuda")),
        "GPU",
        "fail",
        "sees none",
        "nvidia-smi",
    ),
    "old GPU": (
        accelerated(gpus=(replace(H200, name="T4", capability=(7, 5)),)),
        "compute capability",
        "warn",
        "T4: 7.5",
        "--dtype float32",
    ),
    "broken FlashInfer": (
        accelerated(flashinfer="", flashinfer_error="cannot be imported: no libnvrtc"),
        "FlashInfer",
        "warn",
        "libnvrtc",
        "SDPA",
    ),
    "cold FlashInfer": (
        replace(GPU, kernel_cache=KernelCache("/c", 0)),
        "FlashInfer",
        "warn",
        "nothing compiled in /c",
        "rollsync warmup",
    ),
    "no Triton": (
        accelerated(triton_error="not installed"),
        "Triton",
        "warn",
        "not installed",
        "CUDA builds",
    ),
    "no compiler": (replace(GPU, compiler=""), "Triton", "fail", "no C compiler", "gcc"),
    "IPC is cut off": (
        replace(GPU, ipc=IpcProbe(True, "cannot map another process's GPU memory: x")),
        "CUDA IPC",
        "warn",
        "cannot map",
        "--ipc=host",
    ),
    "expandable segments": (
        replace(
            GPU, environment={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}
        ),
        "CUDA IPC",
        "warn",
        "expandable_segments",
        "copies once more",
    ),
    "no shared memory": (shared(error="/dev/shm: No such file"), "/dev/shm", "fail", "No such file", "tmpfs"),
    "docker's 64 MB": (
        shared(total_bytes=64 << 20, free_bytes=60 << 20),
        "/dev/shm",
        "warn",
        "2.0 GiB",
        "--shm-size",
    ),
    "no room for the ring": (shared(free_bytes=1 << 20), "/dev/shm", "fail", "32.0 MiB", "--shm-size"),
    "segments left behind": (
        shared(num_left=2, left_bytes=GIB),
        "segments",
        "warn",
        "2 left behind by killed processes (1.0 GiB)",
        "removes them",
    ),
    "used port": (
        replace(CPU, ports=(Port("metrics_port", "127.0.0.1", 9464, "Address already in use"),)),
        "metrics_port",
        "fail",
        "127.0.0.1:9464: Address already in use",
        "--metrics-port",
    ),
    "name that does not resolve": (
        replace(CPU, network=Network("box", error="does not resolve")),
        "host name",
        "warn",
        "box: does not resolve",
        "/etc/hosts",
    ),
    "interface that is not there": (
        replace(CPU, network=replace(CPU.network, chosen={"GLOO_SOCKET_IFNAME": "ib0"})),
        "interfaces",
        "fail",
        "GLOO_SOCKET_IFNAME names ib0",
        "unset GLOO_SOCKET_IFNAME",
    ),
    "few files": (
        limited(open_files=(512, 4096)),
        "open files",
        "warn",
        "512 (hard limit 4096)",
        "ulimit -n",
    ),
    "hardly any files": (
        limited(open_files=(64, -1)),
        "open files",
        "fail",
        "64 (hard limit none)",
        "ulimit -n",
    ),
    "locked memory on a GPU": (
        replace(GPU, limits=CPU.limits),
        "locked memory",
        "warn",
        "8.0 MiB",
        "ulimit -l",
    ),
    "little memory": (
        limited(available_bytes=3 * GIB),
        "memory",
        "warn",
        "the weights take 2.0 GiB",
        "staging",
    ),
    "too little memory": (
        limited(available_bytes=GIB),
        "memory",
        "fail",
        "the weights take 2.0 GiB",
        "smaller",
    ),
    "no such model": (
        rooted(Root("/no", True, "does not exist")),
        "model",
        "fail",
        "/no: does not exist",
        "read",
    ),
    "empty model": (
        rooted(replace(MODEL, missing=("config.json", "*.safetensors", "tokenizer.json"))),
        "model",
        "fail",
        "no config.json and no *.safetensors",
        "Hugging Face",
    ),
    "no tokenizer": (
        rooted(replace(MODEL, missing=("tokenizer.json",))),
        "model",
        "warn",
        "no tokenizer",
        "ids",
    ),
    "full disk": (
        rooted(MODEL, Root("/w", False, free_bytes=GIB)),
        "weights root",
        "warn",
        "2.0 GiB",
        "free some",
    ),
    "no such root": (
        rooted(Root("/w", False, "is not a directory")),
        "weights root",
        "fail",
        "/w: is",
        "name",
    ),
    "unknown variable": (
        replace(CPU, unknown_variables=("ROLLSYNC_PROT",)),
        "environment",
        "fail",
        "ROLLSYNC_PROT",
        "unset",
    ),
}


@pytest.mark.parametrize(("facts", "check", "status", "text", "advice"), TROUBLES.values(), ids=TROUBLES)
def test_a_trouble_is_one_row_that_says_what_to_do(facts, check, status, text, advice):
    assert troubles(facts) == {check: status}
    row = found(facts, check)
    assert text in row.found
    assert advice in row.advice


def test_what_is_not_needed_is_no_trouble():
    assert found(CPU, "extra [gpu]").found == (
        "flashinfer-python is not installed, wants >=0.6.12; only for attention on GPUs"
    )
    without = replace(CPU, packages=(TORCH, NO_PROMETHEUS))
    assert troubles(without) == {}
    small = replace(GPU, limits=replace(GPU.limits, available_bytes=GIB))  # the weights lie on the GPU
    assert troubles(small) == {"memory": "warn"}
    excluded = replace(CPU, network=replace(CPU.network, chosen={"NCCL_SOCKET_IFNAME": "^docker,lo"}))
    prefix = replace(CPU, network=replace(CPU.network, chosen={"NCCL_SOCKET_IFNAME": "eth"}))
    assert troubles(excluded) == troubles(prefix) == {}


def test_a_port_where_an_engine_serves_is_not_taken_by_a_stranger():
    ours = Port("port", "127.0.0.1", 50051, "Address already in use", True)
    assert found(replace(CPU, ports=(ours,)), "port") == Finding(
        "port", "ok", "127.0.0.1:50051: an engine of rollsync serves there already"
    )
    assert found(replace(CPU, ports=(Port("port", "127.0.0.1", 0),)), "port").found == "0: the system chooses"


def test_the_report_is_ok_unless_something_fails():
    assert as_plain(examine(limited(open_files=(512, 512))))["ok"] is True
    plain = as_plain(examine(limited(open_files=(64, 64))))
    assert plain["ok"] is False
    (row,) = (row for row in plain["checks"] if row["status"] == "fail")
    assert set(row) == {"check", "status", "found", "advice"}


def test_bytes_for_people():
    assert [gib(n) for n in (10, 1 << 20, 3 << 29, 5 << 30)] == ["10 bytes", "1.0 MiB", "1.5 GiB", "5.0 GiB"]
