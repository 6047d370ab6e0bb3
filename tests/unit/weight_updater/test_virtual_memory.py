"""The order of what is done with released memory; the driver is a stand-in, on the CPU."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from weight_updater import virtual_memory


class Data:
    """A tensor over released memory, as far as `resume` sees it."""

    device = torch.device("cuda")

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def view(self, _: object) -> Data:
        return self

    def zero_(self) -> None:
        self._done.append("zero")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in order, with memory that is one mapped region."""
    order: list[str] = []

    def call(function: object, *_: object) -> int:
        order.append(str(function))
        return 0

    region = virtual_memory._Region.__new__(virtual_memory._Region)
    region._index, region._address, region._size, region._is_mapped = 0, 0, 4096, True
    names = "cuMemUnmap", "cuMemMap", "cuMemRelease", "cuMemSetAccess"
    location = types.SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    driver = types.SimpleNamespace(
        **{name: name for name in names},
        CUmemAccessDesc=lambda: types.SimpleNamespace(location=types.SimpleNamespace()),
        CUmemLocationType=location,
        CUmemAccess_flags=types.SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3),
    )
    replaced = {
        "_call": call,
        "_driver": lambda: driver,
        "_on_device": lambda _: contextlib.nullcontext(),
        "_region_of": lambda _: region,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(virtual_memory, name, value)
    monkeypatch.setattr(region.__class__, "_create", lambda self: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: order.append("synchronize"))
    return order


def test_memory_is_taken_from_nothing_that_still_runs(done: list[str]) -> None:
    assert virtual_memory.release(Data(done)) == 4096  # type: ignore[arg-type]
    assert done == ["synchronize", "cuMemUnmap"]


def test_memory_is_zero_before_anybody_gets_it_again(done: list[str]) -> None:
    data = Data(done)
    virtual_memory.release(data)  # type: ignore[arg-type]
    done.clear()
    assert virtual_memory.resume(data) == 4096  # type: ignore[arg-type]
    assert done == ["cuMemMap", "cuMemRelease", "cuMemSetAccess", "zero", "synchronize"]
