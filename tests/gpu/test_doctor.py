"""`rollsync doctor` on a machine with a GPU: the probes for real."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from rollout_engine.cli.main import app
from rollout_engine.doctor import gather as g
from rollout_engine.doctor.facts import IpcProbe

pytestmark = pytest.mark.gpu


def test_the_probe_of_torch_sees_what_torch_sees():
    found = g.accelerator(g.GPU_PROBE)
    assert (found.error, found.cuda_build) == ("", torch.version.cuda)
    assert len(found.gpus) == torch.cuda.device_count()
    assert found.gpus[0].capability == torch.cuda.get_device_capability(0)
    assert 0 < found.gpus[0].free_bytes <= found.gpus[0].total_bytes
    assert (found.flashinfer_error, found.triton_error) == ("", "")
    assert found.driver


def test_one_process_reads_another_ones_gpu_memory():
    assert g.cuda_ipc(g.IPC_PROBE) == IpcProbe(True)


def test_this_machine_passes():
    result = CliRunner().invoke(app, ["doctor", "--port", "0", "--device", "cuda", "--json"])
    rows = {row["check"]: row for row in json.loads(result.stdout)["checks"]}
    assert [row for row in rows.values() if row["status"] == "fail"] == []
    assert result.exit_code == 0
    assert torch.cuda.get_device_name(0) in rows["GPU"]["found"]
    assert rows["CUDA IPC"]["found"] == "one process read what another had written"
