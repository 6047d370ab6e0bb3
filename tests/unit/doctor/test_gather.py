"""How facts are gathered: files and child processes that tests make, and this machine itself."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout_engine.cli.main import app
from rollout_engine.doctor import gather as g
from rollout_engine.doctor.facts import Facts, IpcProbe, Options, SharedMemory
from tests.unit.adapters.fake_engine import FakeEngine, serving
from weight_updater import shm
from weight_updater.shm import SharedSegment, Survey, survey


def child(code: str) -> list[str]:
    """A command that stands in for a probe; it may look at its arguments."""
    return [sys.executable, "-c", f"import json, sys, time\n{code}"]


# ---------------------------------------------------------------- packages


def test_requirements_are_compared_with_what_is_installed(monkeypatch):
    lines = [
        "numpy>=1.0",
        "numpy>=9999",
        "no-such-package>=1",
        'numpy; extra == "plot"',
        'tomli>=1; python_version < "3"',
        'rollsync[plot]; extra == "demo"',
    ]
    monkeypatch.setattr(g.importlib.metadata, "requires", lambda name: lines)
    found = g.packages("rollsync")
    assert [(p.name, p.wanted, p.fits, p.extra) for p in found] == [
        ("numpy", ">=1.0", True, ""),
        ("numpy", ">=9999", False, ""),
        ("no-such-package", ">=1", False, ""),
        ("numpy", "", True, "plot"),
    ]
    assert found[2].installed == ""


def test_a_distribution_that_is_not_installed_has_no_requirements():
    assert g.packages("no-such-distribution-of-ours") is None


# ---------------------------------------------------------------- the probes


def test_what_the_probe_of_torch_says_is_taken_over(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    gpu = {"name": "H200", "capability": [9, 0], "total_bytes": 9, "free_bytes": 8}
    told = {
        "torch_version": "2.11",
        "cuda_build": "13.0",
        "gpus": [gpu],
        "flashinfer": "0.6",
        "triton": "3.6",
    }
    found = g.accelerator(child(f"print('noise'); print({json.dumps(json.dumps(told))})"), tmp_path)
    assert (found.num_device_files, found.error, found.cuda_build) == (2, "", "13.0")
    assert (found.gpus[0].capability, found.gpus[0].free_bytes) == ((9, 0), 8)


def test_a_probe_that_fails_or_hangs_is_told_of(monkeypatch, tmp_path):
    broken = g.accelerator(child("raise ImportError('libcuda.so.1')"), tmp_path)
    assert broken.error == "ImportError: libcuda.so.1"
    killed = g.accelerator(child("import os; os.kill(os.getpid(), 9)"), tmp_path)
    assert killed.error == "the probe ended with -9"
    monkeypatch.setattr(g, "PROBE_TIMEOUT_S", 1.0)
    assert "no answer within" in g.accelerator(child("time.sleep(30)"), tmp_path).error


def test_the_driver_is_read_from_its_file(tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version\n")
    assert g.driver_version(file) == "580.65.06"
    assert g.driver_version(tmp_path / "no") == ""


LEND = "if sys.argv[1] == 'lend': print(json.dumps({'checksum': 7}), flush=True); sys.stdin.read()\n"
MAP = "elif sys.argv[1] == 'map': "


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (LEND + MAP + "assert json.loads(sys.argv[2]) == {'checksum': 7}; print(7)", ""),
        (LEND + MAP + "print(8)", "what was read is not what the other process had written"),
        (LEND + MAP + "raise OSError('no')", "cannot map another process's GPU memory: OSError: no"),
        ("raise OSError('no memory')", "cannot lend GPU memory: OSError: no memory"),
    ],
)
def test_two_processes_probe_cuda_ipc(code, error):
    assert g.cuda_ipc(child(code)) == IpcProbe(True, error)


def test_a_hanging_ipc_probe_ends(monkeypatch):
    monkeypatch.setattr(g, "PROBE_TIMEOUT_S", 1.0)
    started = time.monotonic()
    assert g.cuda_ipc(child("time.sleep(60)")).error == "cannot lend GPU memory: no answer in time"
    assert time.monotonic() - started < 20
    # A lender that is not there yet when the time is up is told of as one that hangs.
    for seconds in (1.0, 5.0, 25.0):
        monkeypatch.setattr(g, "PROBE_TIMEOUT_S", seconds)
        started = time.monotonic()
        error = g.cuda_ipc(child(LEND + MAP + "time.sleep(60)")).error
        if error != "cannot lend GPU memory: no answer in time":
            break
    assert error == "cannot map another process's GPU memory: no answer in time"
    assert time.monotonic() - started < seconds + 20


def test_compiled_kernels_are_counted(tmp_path):
    cache = tmp_path / ".cache" / "flashinfer" / "0.6.12" / "90a" / "cached_ops"
    cache.mkdir(parents=True)
    (cache / "a.so").touch()
    (cache / "b.cu").touch()
    for name in ("FLASHINFER_WORKSPACE_BASE", "HOME"):
        found = g.kernel_cache({name: str(tmp_path)})
        assert (found.num_kernels, found.directory) == (1, str(tmp_path / ".cache" / "flashinfer"))
    assert g.kernel_cache({"HOME": "/no"}).num_kernels == 0


def test_the_compiler_is_the_one_that_would_be_taken(tmp_path):
    assert g.compiler({"PATH": str(tmp_path)}) == ""
    for name in ("clang", "mycc"):
        (tmp_path / name).touch(mode=0o755)
    assert g.compiler({"PATH": str(tmp_path)}) == str(tmp_path / "clang")
    assert g.compiler({"PATH": str(tmp_path), "CC": "mycc -O2"}) == str(tmp_path / "mycc")


# ---------------------------------------------------------------- shared memory


@contextlib.contextmanager
def killed_creator(directory: Path) -> Iterator[str]:
    """The name of a segment in a directory that its creator, killed, has left behind."""
    code = (
        f"import time\nfrom weight_updater import shm\nshm._DIRECTORY = {str(directory)!r}\n"
        "segment = shm.SharedSegment.create(4096)\nprint(segment.descriptor.name, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        process.send_signal(signal.SIGKILL)
        process.wait()
    yield name


def test_segments_in_use_and_left_behind_are_told_apart_and_stay(tmp_path, monkeypatch):
    """In a directory of its own: in /dev/shm other processes come, go and sweep meanwhile."""
    monkeypatch.setattr(shm, "_DIRECTORY", str(tmp_path))
    with SharedSegment.create(8192):
        before = survey()
        assert (before.num_held, before.num_left) == (1, 0)
        with killed_creator(tmp_path) as name:
            after = survey()
            assert Path(tmp_path, name).exists()
            assert survey() == after
    assert after.num_left == before.num_left + 1
    assert after.left_bytes == before.left_bytes + 4096
    assert isinstance(after, Survey)


def test_a_directory_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    assert g.shared_memory(tmp_path / "no").error == f"{tmp_path / 'no'}: No such file or directory"
    monkeypatch.setattr(g.os, "access", lambda path, mode: False)
    assert g.shared_memory(tmp_path) == SharedMemory(error=f"{tmp_path} is not writable for this user")


# ---------------------------------------------------------------- ports, network, limits, disks


def unresolved(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_ports_are_tried(monkeypatch):
    monkeypatch.setattr(g, "HEALTH_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = taken.getsockname()[1]
        stranger, metrics = g.ports(Options(port=used, metrics_port=used, metrics_host="127.0.0.1"))
    assert (stranger.error, stranger.ours) == ("Address already in use", False)
    assert (metrics.key, metrics.error) == ("metrics_port", "Address already in use")
    free, chosen = g.ports(Options(port=used, metrics_port=0))
    assert (free.error, chosen.error) == ("", "")
    monkeypatch.setattr(g.socket, "getaddrinfo", unresolved)
    assert g.bind_error("no-such-host", 1) == "Name or service not known"


def test_an_engine_of_ours_is_known_by_its_health_service(tmp_path):
    from tests.wire.front import serving as front_serving

    with front_serving(tmp_path, config={"token": "t"}) as front:
        (port,) = g.ports(Options(port=front.running.port))
    assert port.ours
    with serving(FakeEngine()) as address:  # gRPC, but no health service
        assert not g.is_ours("127.0.0.1", int(address.rpartition(":")[2]))


def test_names_and_interfaces(monkeypatch):
    found = g.network({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": ""}, "localhost")
    assert "127.0.0.1" in found.addresses
    assert "lo" in found.interfaces
    assert found.chosen == {"GLOO_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(g.socket, "getaddrinfo", unresolved)
    assert g.network({}, "box").error == "does not resolve (Name or service not known)"


def test_memory_is_the_hosts_or_what_the_container_leaves(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable:    2048 kB\n")
    group = tmp_path / "cgroup"
    assert g.available_bytes(tmp_path, group) == 2048 * 1024
    group.mkdir()
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("400000\n")
    assert g.available_bytes(tmp_path, group) == 600000
    (group / "memory.max").write_text("max\n")
    assert g.available_bytes(tmp_path, group) == 2048 * 1024


def test_directories_are_looked_into(tmp_path, tiny_llama_dir):
    file = tmp_path / "file"
    file.touch()
    options = Options(model=tiny_llama_dir, weights_roots=(tmp_path, file, tmp_path / "no"))
    model, root, no_directory, missing = g.roots(options)
    assert (model.is_model, model.error, model.missing) == (True, "", ("tokenizer.json",))
    assert model.weight_bytes == sum(path.stat().st_size for path in tiny_llama_dir.glob("*.safetensors")) > 0
    assert (root.is_model, root.error, root.missing, root.weight_bytes) == (False, "", (), 0)
    assert root.free_bytes > 0
    assert (no_directory.error, missing.error) == ("is not a directory", "does not exist")
    (empty,) = g.roots(Options(model=tmp_path))
    assert empty.missing == ("config.json", "*.safetensors", "tokenizer.json")


def test_variables_that_no_setting_is_called_after():
    names = ["ROLLSYNC_PORT", "ROLLSYNC_ADDRESS", "ROLLSYNC_PROT", "PATH", "ROLLSYNC_METRICS_PORT"]
    assert g.unknown_variables(dict.fromkeys(names, "1")) == ("ROLLSYNC_PROT",)


# ---------------------------------------------------------------- the command


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_this_machine_passes(tiny_llama_dir, tmp_path):
    """For real: torch is asked in a process of its own, segments, ports and directories are looked at."""
    arguments = ["--model", str(tiny_llama_dir), "--weights-root", str(tmp_path), "--port", "0", "--json"]
    result = invoke(*arguments)
    plain = json.loads(result.stdout)
    failed = [row for row in plain["checks"] if row["status"] == "fail"]
    assert (failed, result.exit_code, plain["ok"]) == ([], 0, True)
    checks = {row["check"] for row in plain["checks"]}
    assert {"Python", "packages", "torch", "GPU", "CUDA IPC", "/dev/shm", "port", "model"} <= checks
    assert {"open files", "locked memory", "memory", "host name", "weights root", "segments"} <= checks


@pytest.fixture
def no_torch(monkeypatch):
    """The probe of torch answers at once."""
    monkeypatch.setattr(g, "GPU_PROBE", child("print(json.dumps({'torch_version': '2.13'}))"))


def test_a_failure_is_exit_code_1_and_a_row_that_says_what_to_do(no_torch, tmp_path):
    result = invoke("--model", str(tmp_path / "no"), "--port", "0")
    assert result.exit_code == 1
    row = next(line for line in result.stdout.splitlines() if line.strip().startswith("model"))
    assert row.split()[1] == "fail"
    assert "-> name a directory that this user may read" in result.stdout
    assert result.stdout.rstrip().endswith("1 fail")
    assert "\x1b" not in result.stdout
    assert "extra [metrics]" in result.stdout or "extra [gpu]" in result.stdout


def test_a_configuration_file_says_what_to_look_at(no_torch, tmp_path, tiny_llama_dir, monkeypatch):
    seen: list[Options] = []
    monkeypatch.setattr(g, "gather", lambda options: seen.append(options) or Facts(options=options))
    file = tmp_path / "engine.toml"
    file.write_text(
        f'model = "{tiny_llama_dir}"\nport = 7\nmetrics_port = 8\nupload_slots = 2\ndevice = "cpu"\n'
    )
    invoke("--config", str(file))
    (options,) = seen
    assert (options.model, options.port, options.metrics_port) == (tiny_llama_dir, 7, 8)
    assert (options.ring_bytes, options.device) == (2 * (4 << 20), "cpu")
    file.write_text("prot = 7\n")
    result = invoke("--config", str(file), "--json")
    assert result.exit_code == 2
    assert "prot" in json.loads(result.stdout)["error"]["message"]
