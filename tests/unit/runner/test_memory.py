"""Memory that is taken as it is used, and really given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout_engine.runner.memory import discard_contents, lazy_zeros

CPU = torch.device("cpu")
NUM_BYTES = 64 << 20


def resident_bytes() -> int:
    """Physical memory of this process, shared mappings included."""
    fields = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in fields if line.startswith("VmRSS:"))


def make_lazy() -> torch.Tensor:
    return lazy_zeros((NUM_BYTES // 4,), torch.float32, CPU)


def make_plain() -> torch.Tensor:
    return torch.zeros(NUM_BYTES // 4)


def test_lazy_zeros_take_memory_when_they_are_written():
    before = resident_bytes()
    tensor = make_lazy()
    assert resident_bytes() - before < NUM_BYTES // 4
    tensor.fill_(1.0)
    assert resident_bytes() - before > NUM_BYTES * 3 // 4


@pytest.mark.parametrize("make", [make_lazy, make_plain])
def test_discarded_contents_are_freed_and_read_as_zeros_at_the_same_address(make):
    tensor = make().fill_(3.0)
    address, before = tensor.data_ptr(), resident_bytes()
    freed = discard_contents(tensor)
    assert NUM_BYTES - 8192 <= freed <= NUM_BYTES
    assert before - resident_bytes() > NUM_BYTES * 3 // 4
    assert tensor.data_ptr() == address
    assert not tensor.any()
    tensor.fill_(4.0)
    assert (tensor == 4.0).all()


def test_a_tensor_within_one_memory_page_is_zeroed():
    tensor = torch.ones(8)
    assert discard_contents(tensor) == 0
    assert not tensor.any()
