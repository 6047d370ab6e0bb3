"""What an update takes of a GPU's memory while it runs is no more than its reply says."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.unit.weight_updater.tiny_target import make_updater, push
from weight_updater.arena import Arena, SlotSpec, StorageSpec, WeightTarget
from weight_updater.requests import Staging, UpdateReply
from weight_updater.updater import WeightUpdater

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

DEVICE = torch.device("cuda:0")
SHAPE = (4096, 4096)  # 32 MiB in bfloat16
NAMES = ("a", "b", "c", "d")
SLACK = 8 << 20
"""What the driver and torch's allocator round up to."""


def target_of(names: tuple[str, ...]) -> WeightTarget:
    storages = [StorageSpec(name, torch.bfloat16, SHAPE, (SlotSpec(name, SHAPE),)) for name in names]
    parameters = {
        name: torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16, device=DEVICE), requires_grad=False)
        for name in names
    }
    return WeightTarget(Arena(storages), parameters, DEVICE)


def values(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SHAPE, generator=generator).bfloat16().to(dtype) for name in NAMES}


class LeastFree:
    """The least free memory of the GPU while the block runs, in bytes."""

    def __init__(self) -> None:
        self.nbytes = free_bytes()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._stopping.is_set():
            self.nbytes = min(self.nbytes, torch.cuda.mem_get_info(DEVICE)[0])

    def __enter__(self) -> LeastFree:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()
        self.nbytes = min(self.nbytes, torch.cuda.mem_get_info(DEVICE)[0])


def free_bytes() -> int:
    torch.cuda.synchronize(DEVICE)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(DEVICE)[0]


def taken_by(updater: WeightUpdater, new: dict[str, torch.Tensor], **fields: Any) -> tuple[int, UpdateReply]:
    """Bytes of the GPU that an update took at its peak, beside what was taken before; and its reply."""
    before = free_bytes()
    with LeastFree() as least:
        reply = push(updater, new, **fields)
    return before - least.nbytes, reply


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST, Staging.NONE])
def test_an_update_takes_what_it_says(staging: Staging, dtype: torch.dtype) -> None:
    target = target_of(NAMES)
    updater = make_updater(target, device_staging=True)
    try:
        push(updater, values(1, dtype), staging=staging)  # kernels are loaded, staging on the host is there
        taken, reply = taken_by(updater, values(2, dtype), staging=staging)
        on_host = target.arena.nbytes if staging is Staging.HOST else 0
        said = reply.extra_bytes - on_host
        assert said < target.arena.nbytes // 2, "bounded, whatever the model's size"
        assert taken <= said + SLACK
        for name, value in values(2, dtype).items():
            assert torch.equal(target.slot(name).cpu(), value.bfloat16())
    finally:
        updater.close()


def test_keeping_the_previous_version_takes_a_bounded_scratch() -> None:
    target = target_of(NAMES)
    updater = make_updater(target, device_staging=True)
    try:
        push(updater, values(1, torch.bfloat16), staging=Staging.DEVICE)
        new = values(2, torch.bfloat16)
        taken, reply = taken_by(updater, new, staging=Staging.DEVICE, keep_previous=True)
        assert 0 < reply.extra_bytes <= 16 << 20
        assert taken <= reply.extra_bytes + SLACK
        taken, _ = taken_by(updater, values(3, torch.bfloat16), staging=Staging.DEVICE, keep_previous=True)
        assert taken <= SLACK, "it is kept"
        updater.rollback()
        for name, value in new.items():
            assert torch.equal(target.slot(name).cpu(), value)
    finally:
        updater.close()
