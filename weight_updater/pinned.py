"""Page-locked host memory: a GPU reads it at full speed while the CPU does something else.

Locking is what costs: allocating locked memory runs at a few GB/s, locking memory that is there already
several times faster. So memory is mapped, faulted in by several threads, registered once, and kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weight_updater.cast import bytes_over
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import ShmSegment
from weight_updater.shm import SharedSegment

logger = logging.getLogger(__name__)

MAX_SEGMENTS = 2
"""Segments of trainers that stay registered; beyond them the least recently used one goes."""

_PORTABLE = 1  # cudaHostRegisterPortable
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_FAULT_BYTES = 256 << 20  # one thread's share


def register(data: torch.Tensor, device: torch.device) -> bool:
    """Page-lock the memory of a CPU tensor for copies to and from `device`. Every thread may call it.

    Returns:
        False if the driver refuses; copies are right then too, but slower, and wait for the CPU.
    """
    if not data.numel():
        return False
    with torch.cuda.device(device):
        error = int(_cudart().cudaHostRegister(data.data_ptr(), data.numel(), _PORTABLE))
    if error:
        _forget_last_error()
        fields = {"cuda_error": error, "num_bytes": data.numel()}
        logger.warning("host_memory_not_locked", extra={"event": "host_memory_not_locked", "fields": fields})
    return not error


def unregister(data: torch.Tensor, device: torch.device) -> None:
    """Undo `register`; nothing may be copied from or to the memory any more."""
    with torch.cuda.device(device):
        if int(_cudart().cudaHostUnregister(data.data_ptr())):
            _forget_last_error()


def pinned_zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    """[nbytes] uint8 zeros in page-locked memory for `device`; given back with its last view.

    Raises:
        MemoryError: the host has not enough.
    """
    start = time.perf_counter()
    region = _Region(nbytes, device)
    fields = {"num_bytes": nbytes, "seconds": round(time.perf_counter() - start, 2)}
    logger.info("host_memory_locked", extra={"event": "host_memory_locked", "fields": fields})
    return torch.from_numpy(np.asarray(region))


class _Region:
    """Anonymous memory that numpy can wrap. It is unregistered, and unmapped after that, when it dies."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._registered = False
        self._device = device
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._mapping = mmap.mmap(-1, max(1, nbytes), flags=flags)
        except OSError as error:
            raise MemoryError(f"no {nbytes} bytes of host memory: {error.strerror}") from error
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._mapping, dtype=np.uint8)
        address = whole.ctypes.data
        _fault_in(address, len(self._mapping))
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        self._view = torch.from_numpy(whole)
        self._registered = register(self._view, device)

    def __del__(self) -> None:
        if self._registered and not sys.is_finalizing():
            unregister(self._view, self._device)


def _fault_in(address: int, nbytes: int) -> None:
    """Let several threads take the pages: zeroing them is most of the cost."""
    libc = ctypes.CDLL(None, use_errno=True)

    def populate(start: int) -> int:
        size = min(_FAULT_BYTES, nbytes - start)
        failed = libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), _POPULATE_WRITE)
        return ctypes.get_errno() if failed else 0

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="fault-in") as pool:
        errors = set(pool.map(populate, range(0, nbytes, _FAULT_BYTES)))
    if errors & {errno.ENOMEM, errno.EFAULT}:  # EINVAL is an older kernel's; then registering faults them in
        raise MemoryError(f"no {nbytes} bytes of host memory")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_last_error() -> None:
    """The runtime keeps the error of a failed call, and the next kernel launch would be blamed for it."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).cudaGetLastError()


@dataclass(slots=True)
class _Held:
    segment: SharedSegment
    data: torch.Tensor  # [size] uint8
    registered: bool = False
    num_users: int = 0


class PinnedSegments:
    """Trainers' shared-memory segments, mapped and page-locked once for each allocation id.

    Args:
        device: that copies go to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Held] = OrderedDict()

    @contextlib.contextmanager
    def use(self, segment: ShmSegment) -> Iterator[torch.Tensor]:
        """WORKER. The segment's bytes ([size] uint8). No copy from them may run on when the block ends.

        Raises:
            UpdateRefused (MEMORY_UNAVAILABLE): it cannot be mapped, or its allocation id is known as that of
                another segment.
        """
        held = self._open(segment)
        try:
            yield held.data
        finally:
            with self._lock:
                held.num_users -= 1

    def release(self, allocation_ids: Sequence[str]) -> int:
        """LOOP. Unmap; unknown ids are ignored. Returns how many will be gone soon.

        Raises:
            UpdateRefused (WRONG_STATE): one of them is being read; then none is unmapped.
        """
        with self._lock:
            known = [key for key in dict.fromkeys(allocation_ids) if key in self._held]
            for key in known:
                if self._held[key].num_users:
                    raise UpdateRefused(
                        Reason.WRONG_STATE, f"allocation {key} is being read; end the update, then release it"
                    )
            self._drop([self._held.pop(key) for key in known])
        return len(known)

    def drop_unlinked(self) -> None:
        """Unmap segments whose trainer has removed them (or has died and was cleaned up after)."""
        with self._lock:
            gone = [
                key for key, held in self._held.items() if not held.num_users and not held.segment.is_linked()
            ]
            self._drop([self._held.pop(key) for key in gone])

    def close(self) -> None:
        """Unmap everything that nobody reads."""
        with self._lock:
            free = [key for key, held in self._held.items() if not held.num_users]
            self._drop([self._held.pop(key) for key in free])

    def _open(self, segment: ShmSegment) -> _Held:
        key = segment.allocation_id or segment.name  # names are never used twice either
        with self._lock:
            held = self._held.get(key)
            if held is not None and held.segment.descriptor != segment:
                known = held.segment.descriptor
                raise UpdateRefused(
                    Reason.MEMORY_UNAVAILABLE,
                    f"allocation {segment.allocation_id} is mapped as segment {known.name} of {known.size} "
                    f"bytes, not {segment.name} of {segment.size}; give every allocation an id of its own",
                )
            is_new = held is None
            if held is None:
                opened = SharedSegment.open(segment)
                held = self._held[key] = _Held(opened, bytes_over(opened.buf))
            held.segment.check_size()
            held.num_users += 1
            self._held.move_to_end(key)
            unused = [other for other in self._held if not self._held[other].num_users]
            num_too_many = max(0, len(self._held) - MAX_SEGMENTS)
            self._drop([self._held.pop(other) for other in unused[:num_too_many]])
        if is_new:  # outside of the lock: it takes a second for many gigabytes
            held.registered = register(held.data, self._device)
        return held

    def _drop(self, segments: list[_Held]) -> None:
        """Unlocking many gigabytes takes a second, for which no loop shall wait."""
        if segments:
            threading.Thread(target=self._unmap, args=(segments,), name="unmap-segments").start()

    def _unmap(self, segments: list[_Held]) -> None:
        for held in segments:
            if held.registered:
                unregister(held.data, self._device)
            del held.data
            held.segment.close()
