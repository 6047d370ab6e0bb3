"""Device memory whose physical part can be given back while its address stays.

An address range is reserved, and physical memory is mapped into it. Releasing unmaps: the tensors over the
range stay the same objects at the same address, and so do the addresses that CUDA graphs captured; but
whatever touches them before memory is mapped again is a fault of the device, which ends the process.

Needs the package cuda-bindings, which CUDA builds of torch bring along. Without it memory is allocated the
plain way, and releasing it gives nothing back.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """[nbytes] uint8 on a CUDA device, zeroed, at an address that is a multiple of 256.

    Raises:
        torch.OutOfMemoryError: the device has not enough.
    """
    if nbytes == 0 or not is_supported():
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    with _on_device(index):
        region = _Region(nbytes, index)
        data = torch.as_tensor(region, device=torch.device("cuda", index))
    with _lock:
        _regions[data.data_ptr()] = region
    return data.zero_()


def release(data: torch.Tensor) -> int:
    """Give the physical memory of what `allocate` returned back, once the device has done all that was queued
    so far. Nothing that touches it may be queued meanwhile.

    Args:
        data: over the whole allocation, of any dtype and shape; it and its views stay where they are, but
            may not be touched.

    Returns:
        bytes given back; 0 if it is released already, or is no such memory (then its contents stay).
    """
    region = _region_of(data)
    return region.release() if region is not None else 0


def resume(data: torch.Tensor) -> int:
    """Put memory behind the address again, zeroed on return; harmless if it is there. Returns bytes taken.

    Raises:
        torch.OutOfMemoryError: the device has not enough now; the memory stays released.
    """
    region = _region_of(data)
    taken = region.resume() if region is not None else 0
    if taken:
        data.view(-1).view(torch.uint8).zero_()
        torch.cuda.synchronize(data.device)  # a pass on another stream would not wait for the zeros
    return taken


@cache
def is_supported() -> bool:
    """Whether memory can be released here."""
    try:
        found = importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:  # there is no package `cuda` at all
        return False
    return found is not None and torch.cuda.is_available()


class _Region:
    """Reserved addresses with memory behind them, as torch takes it; given back when its last tensor dies."""

    def __init__(self, nbytes: int, index: int) -> None:
        driver = _driver()
        self._index = index
        self._address = 0
        self._is_mapped = False
        step = _call(
            driver.cuMemGetAllocationGranularity,
            self._properties(),
            driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
        self._size = -(-nbytes // int(step)) * int(step)
        self._address = int(_call(driver.cuMemAddressReserve, self._size, 0, driver.CUdeviceptr(0), 0))
        self.resume()
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "strides": None,
            "version": 2,
        }

    def release(self) -> int:
        """Unmap; returns bytes given back."""
        if not self._is_mapped:
            return 0
        with _on_device(self._index):
            torch.cuda.synchronize()  # a pass whose sequences ended before it may be at it, on any stream
            _call(_driver().cuMemUnmap, self._address, self._size)
        self._is_mapped = False
        return self._size

    def resume(self) -> int:
        """Map fresh memory, whose contents are undefined; returns bytes taken."""
        if self._is_mapped:
            return 0
        driver = _driver()
        with _on_device(self._index):
            handle = self._create()
            try:
                _call(driver.cuMemMap, self._address, self._size, 0, handle, 0)
            finally:
                _call(driver.cuMemRelease, handle)  # the mapping keeps the memory
            self._is_mapped = True
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = self._index
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _call(driver.cuMemSetAccess, self._address, self._size, [access], 1)
        return self._size

    def _create(self) -> Any:
        """Physical memory; what torch only caches is given back for it if there is not enough."""
        driver = _driver()
        try:
            return _call(driver.cuMemCreate, self._size, self._properties(), 0)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return _call(driver.cuMemCreate, self._size, self._properties(), 0)

    def _properties(self) -> Any:
        driver = _driver()
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._index
        return properties

    def __del__(self) -> None:
        if not self._address or sys.is_finalizing():
            return
        with _on_device(self._index):
            if self._is_mapped:
                torch.cuda.synchronize()  # as when memory is freed: kernels may be at it on any stream
                _driver().cuMemUnmap(self._address, self._size)
            _driver().cuMemAddressFree(self._address, self._size)


_lock = threading.Lock()
_regions: weakref.WeakValueDictionary[int, _Region] = weakref.WeakValueDictionary()


def _region_of(data: torch.Tensor) -> _Region | None:
    with _lock:
        return _regions.get(data.data_ptr()) if data.device.type == "cuda" else None


@contextmanager
def _on_device(index: int) -> Iterator[None]:
    """Make a device's context the calling thread's, which the driver's calls need, and its stream idle."""
    with torch.cuda.device(index):
        torch.cuda.current_stream().synchronize()
        yield


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver, whose functions give (status, results...).

    Raises:
        torch.OutOfMemoryError, RuntimeError: the call failed.
    """
    status, *results = function(*arguments)
    if int(status) != 0:
        name = getattr(status, "name", str(status))
        text = f"{getattr(function, '__name__', 'a call of the CUDA driver')} failed: {name}"
        raise torch.OutOfMemoryError(text) if "OUT_OF_MEMORY" in name else RuntimeError(text)
    return results[0] if results else None
