"""A kernel that reads page-locked host memory itself. Needs triton.

A copy engine carries out one copy after another: a step's few kilobytes would wait behind the gigabytes of an
update that is received meanwhile. A kernel's reads share the link with them instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 1024  # 64-bit words that a program takes
_FLAG = 1 << 62
"""Set in every address that is passed, and in no real one: a number below 2^31 would be typed as 32 bits."""


@triton.jit(do_not_specialize=["source", "size"])
def _fetch_kernel(source, target, size, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = (source - FLAG).to(tl.pointer_type(tl.int64))
    # Volatile: what the host has written since the last launch must be seen.
    tl.store(target + at, tl.load(words + at, mask=at < size, volatile=True), mask=at < size)


def fetch(target: torch.Tensor, pinned: torch.Tensor) -> None:
    """Copy page-locked host memory to the device, on the current stream; returns at once.

    Args:
        target: [n] uint8 on the device, n and its address multiples of 8.
        pinned: [n] uint8, page-locked for the device, at an address that is a multiple of 8; it must stay as
            it is until the device has come to here.
    """
    words = target.view(torch.int64)
    size = words.numel()
    grid = (triton.cdiv(size, _WORDS),)
    _fetch_kernel[grid](pinned.data_ptr() | _FLAG, words, size, FLAG=_FLAG, BLOCK=_WORDS)
