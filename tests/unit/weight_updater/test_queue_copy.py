"""Copies that are queued by the CUDA runtime's own call; the call is a stand-in."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weight_updater import device_memory
from weight_updater.device_memory import CudaCallFailed, queue_copy

STREAM: Any = SimpleNamespace(cuda_stream=77, device=torch.device("cuda", 1))


class Runtime:
    """Copies at once. error: what the call gives."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.asked: list[tuple[int, str, int]] = []  # bytes, kind, stream
        self.num_cleared = 0

    def cudaMemcpyAsync(self, to: int, of: int, count: int, kind: str, stream: int) -> tuple[int]:
        self.asked.append((count, kind, stream))
        if not self.error:
            ctypes.memmove(to, of, count)
        return (self.error,)

    def cudaGetLastError(self) -> None:
        self.num_cleared += 1


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(device_memory, "_memcpy", lambda: (made.cudaMemcpyAsync, "by address"))
    monkeypatch.setattr(device_memory, "_bindings", lambda: (made, None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return made


def test_bytes_go_from_one_tensor_to_the_other_on_the_stream(runtime: Runtime) -> None:
    source = torch.arange(12, dtype=torch.float32).view(3, 4)
    room = torch.full((20,), -1.0)
    assert queue_copy(room[4:16].view(3, 4), source, STREAM)
    assert torch.equal(room[4:16], source.flatten())
    assert room[:4].tolist() == room[16:].tolist() == [-1.0] * 4
    assert runtime.asked == [(48, "by address", 77)]


@pytest.mark.parametrize("which", ["destination", "source"])
def test_strided_tensors_are_left_to_torch(which: str, runtime: Runtime) -> None:
    straight, strided = torch.zeros(4), torch.ones(8)[::2]
    pair = (strided, straight) if which == "destination" else (straight, strided)
    assert not queue_copy(*pair, STREAM)
    assert runtime.asked == []


def test_a_gpu_that_is_not_the_streams_gets_no_context(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert not queue_copy(torch.zeros(4), torch.ones(4), STREAM)
    assert runtime.asked == []


def test_without_the_bindings_all_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_memcpy", lambda: None)
    destination = torch.zeros(4)
    assert not queue_copy(destination, torch.ones(4), STREAM)
    assert destination.tolist() == [0.0] * 4


def test_a_call_that_fails_is_an_error_that_nobody_else_meets(runtime: Runtime) -> None:
    runtime.error = 700
    with pytest.raises(CudaCallFailed, match="cudaMemcpyAsync failed: 700"):
        queue_copy(torch.zeros(4), torch.ones(4), STREAM)
    assert runtime.num_cleared == 1
