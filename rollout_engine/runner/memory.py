"""How much memory a device has left."""

from __future__ import annotations

import ctypes
import math
import mmap
from pathlib import Path

import torch

from weight_updater import virtual_memory


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
    if device.type == "cuda":
        flat = virtual_memory.allocate(math.prod(shape) * dtype.itemsize, device)
        return flat.view(dtype).view(shape)
    # Private: MADV_DONTNEED on a shared mapping (Python's default) frees nothing and keeps the contents.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def discard_contents(tensor: torch.Tensor) -> int:
    """Give the physical memory of a contiguous tensor back to the system; its address stays.

    On a CPU the tensor reads as zeros afterwards, and takes memory again page by page as it is written. On a
    GPU it must be a whole allocation of `lazy_zeros` or an arena, and may not be touched until
    `restore_contents`.

    Returns:
        Bytes given back: whole memory pages only. 0 on a GPU where releasing is not supported; the contents
        are kept there.
    """
    if tensor.device.type == "cuda":
        return virtual_memory.release(tensor)
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


def restore_contents(tensor: torch.Tensor) -> int:
    """Take memory again behind a tensor whose contents were discarded; bytes taken, which hold zeros.

    0 on a CPU, which takes memory as it is written, and if the tensor has kept its memory.

    Raises:
        torch.OutOfMemoryError: a GPU has not enough now; the tensor stays as it is.
    """
    return virtual_memory.resume(tensor) if tensor.device.type == "cuda" else 0
