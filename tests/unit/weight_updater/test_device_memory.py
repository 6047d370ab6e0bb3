"""Whose GPU is current while the driver is asked, and after it; runtime and driver are stand-ins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weight_updater import device_memory
from weight_updater.device_memory import Allocation, DeviceBuffer, MappedAllocation
from weight_updater.errors import Reason, UpdateRefused

OWN, OTHER = 0, 1
PLACES = [(100, OWN), (200, OTHER), (300, OWN)]


class Status(int):
    name = "cudaErrorInvalidValue"


class Driver:
    """Notes each call with the GPU that was current. current: that GPU. fails: name of a call that does."""

    def __init__(self) -> None:
        self.current = OWN
        self.calls: list[tuple[str, int]] = []
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == "cudaSetDevice":
                self.current = arguments[0]
                return (Status(0),)
            self.calls.append((name, self.current))
            results: dict[str, tuple[Any, ...]] = {
                "cuMemGetAddressRange": (4096, 8192),
                "cuPointerGetAttribute": arguments[-1:],
                "cudaIpcGetMemHandle": (SimpleNamespace(reserved=b"h" * 64),),
                "cudaIpcOpenMemHandle": (4096,),
                "cudaMalloc": (4096,),
            }
            return (Status(name == self.fails), *results.get(name, ()))

        call.__name__ = name
        return call

    CUdeviceptr = staticmethod(int)
    cudaIpcMemHandle_t = SimpleNamespace
    CUpointer_attribute = SimpleNamespace(
        CU_POINTER_ATTRIBUTE_BUFFER_ID=1, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE=2
    )
    cudaIpcMemLazyEnablePeerAccess = 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, made.current = made.current, index
        try:
            yield
        finally:
            made.current = before

    monkeypatch.setattr(device_memory, "_bindings", lambda: (made, made))
    monkeypatch.setattr(device_memory, "device_of", lambda uuid, own: OTHER)
    monkeypatch.setattr(device_memory, "bytes_at", lambda *arguments: torch.zeros(arguments[1]))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(synchronize=lambda: None))
    return made


def map_and_close(driver: Driver) -> None:
    mapped = MappedAllocation(b"h" * 64, "GPU-1", torch.device("cuda", OWN))
    assert driver.current == OWN
    mapped.check_holds(8192)
    with pytest.raises(UpdateRefused, match="of an allocation of 8192 bytes"):
        mapped.check_holds(8193)
    assert driver.current == OWN
    mapped.close()


def take_and_free(driver: Driver) -> None:
    buffer = DeviceBuffer(100, torch.device("cuda", OTHER))
    assert driver.current == OWN
    buffer.close()


@pytest.mark.parametrize(
    ("work", "calls"),
    [
        (
            lambda driver: device_memory.identities_of(PLACES),
            [("cuPointerGetAttribute", OWN)] * 2 + [("cuPointerGetAttribute", OTHER)],
        ),
        (
            lambda driver: device_memory.allocation_of(200, OTHER),
            [("cuMemGetAddressRange", OTHER)] + [("cuPointerGetAttribute", OTHER)] * 2,
        ),
        (
            lambda driver: device_memory.handle_of(Allocation(4096, 8192, 7, True), OTHER),
            [("cudaIpcGetMemHandle", OTHER)],
        ),
        (
            map_and_close,
            [("cudaIpcOpenMemHandle", OTHER), ("cudaDeviceEnablePeerAccess", OWN)]
            + [("cuMemGetAddressRange", OTHER)] * 2
            + [("cudaIpcCloseMemHandle", OTHER)],
        ),
        (take_and_free, [("cudaMalloc", OTHER), ("cudaFree", OTHER)]),
    ],
    ids=["identities_of", "allocation_of", "handle_of", "MappedAllocation", "DeviceBuffer"],
)
def test_a_thread_that_lends_memory_of_another_gpu_keeps_its_own(
    work: Callable[[Driver], object], calls: list[tuple[str, int]], driver: Driver
) -> None:
    """A trainer's next tensor on "cuda" would lie elsewhere."""
    work(driver)
    assert driver.calls == calls
    assert driver.current == OWN


def test_identities_come_in_the_order_of_the_places(driver: Driver) -> None:
    assert device_memory.identities_of(PLACES) == [100, 200, 300]
    assert device_memory.identities_of([]) == []
    driver.fails = "cuPointerGetAttribute"
    assert device_memory.identities_of(PLACES) == [0, 0, 0]


@pytest.mark.parametrize(
    ("fails", "work", "reason"),
    [
        ("cudaIpcOpenMemHandle", map_and_close, Reason.MEMORY_UNAVAILABLE),
        ("cudaDeviceEnablePeerAccess", map_and_close, Reason.MEMORY_UNAVAILABLE),
        ("cudaMalloc", take_and_free, Reason.NO_MEMORY),
    ],
)
def test_a_call_that_fails_leaves_the_threads_gpu_current(
    fails: str, work: Callable[[Driver], object], reason: Reason, driver: Driver
) -> None:
    driver.fails = fails
    with pytest.raises(UpdateRefused) as refused:
        work(driver)
    assert refused.value.reason is reason
    assert driver.current == OWN
    names = [name for name, _ in driver.calls]
    assert ("cudaIpcCloseMemHandle" in names) is (fails == "cudaDeviceEnablePeerAccess"), "what was opened"


def test_a_buffer_is_zeroed_before_it_is_handed_out(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros that were queued alone could come behind what another stream fills it with."""
    log: list[str] = []

    class Memory:
        def zero_(self) -> None:
            log.append("zero")

    def stream(index: int) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: log.append(f"wait for the stream of GPU {index}"))

    monkeypatch.setattr(device_memory, "bytes_at", lambda *arguments: Memory())
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    DeviceBuffer(100, torch.device("cuda", OTHER))
    assert log == ["zero", f"wait for the stream of GPU {OTHER}"]
