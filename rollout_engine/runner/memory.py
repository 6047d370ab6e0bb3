"""How much memory a device has left."""

from __future__ import annotations

import ctypes
import math
import mmap
from pathlib import Path

import torch


def available_memory(device: torch.device) -> int:
    """Bytes free on `device` now; for a CPU what the kernel can give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; the kernel is older than 3.14")


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU memory is taken page by page as it is written, so a large pool costs what is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: MADV_DONTNEED on a shared mapping (Python's default) frees nothing and keeps the contents.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def discard_contents(tensor: torch.Tensor) -> int:
    """Give the physical memory of a contiguous CPU tensor back to the system; its address stays.

    The tensor reads as zeros afterwards, and takes memory again page by page as it is written.

    Returns:
        Bytes given back: whole memory pages only. 0 on a GPU, where memory cannot be given back under a
        live address this way; the contents are kept there.
    """
    if tensor.device.type != "cpu":
        return 0
    start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    flat = tensor.view(-1).view(torch.uint8)
    if last <= first:
        flat.zero_()
        return 0
    flat[: first - start].zero_()
    flat[last - start :].zero_()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED) != 0:
        flat.zero_()  # a mapping that cannot be given back, for example locked memory
        return 0
    return last - first
