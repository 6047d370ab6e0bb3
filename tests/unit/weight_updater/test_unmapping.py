"""A trainer's memory on a GPU is not unmapped under a worker that verifies what was lent in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.weight_updater.fake_gpu import FakeGpu, fake_gpu
from tests.unit.weight_updater.test_from_cuda import lay_out, receive
from tests.unit.weight_updater.tiny_target import TinyTarget, begin, make_updater, weights
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import Path, Staging
from weight_updater.slot_scan import cast_checksum


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as made:
        yield made


def test_memory_that_a_verification_reads_is_not_unmapped(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that need a cast are read once more, to hash them as they will lie in the slots."""
    updater = make_updater(TinyTarget())
    handle = gpu.allocate(1, 8192)
    new = weights(1, torch.float32)
    request = lay_out(gpu, new, [handle])
    identity = request.cuda_regions[0].allocation_id
    refused: list[Reason] = []

    def abort_and_release(*arguments: Any) -> int:
        updater.abort(update_id)
        with pytest.raises(UpdateRefused) as caught:
            updater.release([identity])
        refused.append(caught.value.reason)
        return cast_checksum(*arguments)

    update_id = begin(updater, new, path=Path.IPC, staging=Staging.NONE)
    receive(updater, request, update_id)
    monkeypatch.setattr("weight_updater.sink.cast_checksum", abort_and_release)
    updater.verify(update_id)
    assert refused
    assert set(refused) == {Reason.WRONG_STATE}
    assert gpu.closed == []
    assert updater.release([identity]) == 1
    assert gpu.closed == [handle]


def test_a_verification_that_comes_late_reads_nothing(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update has ended since its bytes were brought in, and the trainer's memory is gone."""
    updater = make_updater(TinyTarget())
    new = weights(1, torch.float32)
    request = lay_out(gpu, new, [gpu.allocate(1, 8192)])
    update_id = begin(updater, new, path=Path.IPC, staging=Staging.NONE)
    work = updater.receiver(replace(request, update_id=update_id))
    original = work.run

    def run() -> None:
        original()
        updater.abort(update_id)
        assert updater.release([request.cuda_regions[0].allocation_id]) == 1

    def read(*arguments: Any) -> int:
        raise AssertionError("it was read after it was unmapped")

    monkeypatch.setattr(work, "run", run)
    monkeypatch.setattr("weight_updater.sink.cast_checksum", read)
    with pytest.raises(UpdateRefused, match="aborted"):
        updater.run_all(work)
