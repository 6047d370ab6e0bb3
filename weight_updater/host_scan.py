"""Hashes bytes in the host's memory and looks for non-finite values among them: compiled, or by numpy.

The compiled pass (`compiled_scan`) reads memory once, and one that copies as well takes no longer than the
copy; numpy's ten or so go over blocks that stay in the cache. Both give the same. The compiled ones need
numba (`pip install 'rollsync[cpu]'`), half a second to import it and to load the code, or 0.8 s where that
is not cached yet, and some 115 MiB of memory. So engines on a CPU call `warm_up` at their start, other
processes do it at their first large scan, and those that use a GPU, or hash little, do without. Where they
cannot be had, for whatever reason, numpy goes on.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

MASK = (1 << 64) - 1
POSITION = 0x9E3779B97F4A7C15
MULTIPLIER = 0xBF58476D1CE4E5B9

BLOCK_WORDS = 16384
"""What numpy hashes at a time: with its scratch it stays in a core's second-level cache."""
WORTH_LOADING_BYTES = 1 << 20
"""A scan of so many bytes loads the compiled pass, where nothing else did."""

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
HALF = np.uint64(32)
_STEPS: Words = np.arange(1, BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(POSITION)

EXPONENTS: dict[torch.dtype, tuple[type[np.unsignedinteger], int, int]] = {
    torch.bfloat16: (np.uint16, 0x7FFF, 0x7F80),
    torch.float16: (np.uint16, 0x7FFF, 0x7C00),
    torch.float32: (np.uint32, 0x7FFFFFFF, 0x7F800000),
    torch.float64: (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}
"""dtype -> (unsigned integer of its size, all bits but the sign, the bits of infinity). An absolute value at
or above infinity is infinite or NaN."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass over bytes found: the sum of their mixed words, and whether a value is not finite."""

    total: int
    nonfinite: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """The non-finite test of all values of a word at once: `(word & magnitude) + step` has a value's sign
    bit exactly where its absolute value is infinity's or more, and no value carries into its neighbour.
    """

    magnitude: int
    step: int
    sign: int

    @classmethod
    def of(cls, dtype: torch.dtype) -> Limits:
        _, magnitude, infinity = EXPONENTS[dtype]
        every = MASK // (2 * magnitude + 1)  # a one at each value's lowest bit
        return cls(magnitude * every, (magnitude + 1 - infinity) * every, (magnitude + 1) * every)


_LIMITS: dict[torch.dtype | None, Limits] = {dtype: Limits.of(dtype) for dtype in EXPONENTS}
_LIMITS[None] = Limits(0, 0, 0)


def mix(word: int, index: int) -> int:
    """The mix of one word at one index, in Python's integers; `checksum` has the definition."""
    x = word ^ ((index + 1) * POSITION & MASK)
    x ^= x >> 32
    x = x * MULTIPLIER & MASK
    return x ^ (x >> 32)


class ScanWords(Protocol):
    def __call__(
        self, words: Words, position: int, magnitude: int, step: int, /
    ) -> tuple[int, int]: ...  # see compiled_scan


class CopyWords(Protocol):
    def __call__(
        self, into: Words, words: Words, position: int, magnitude: int, step: int, /
    ) -> tuple[int, int]: ...  # see compiled_scan


@dataclass(frozen=True, slots=True)
class Passes:
    """What is compiled. scan: reads words. copy: writes them elsewhere as well, both in one pass."""

    scan: ScanWords
    copy: CopyWords


_loading = threading.Lock()
_loaded = False
_passes: Passes | None = None  # once loaded; None where they cannot be had


def warm_up() -> bool:
    """Load the compiled passes, if that was not done yet; returns whether they can be had."""
    global _loaded, _passes
    with _loading:
        if not _loaded:
            try:
                from weight_updater.compiled_scan import passes

                _passes = passes
            except Exception:  # noqa: BLE001  no numba, one of another LLVM, no code for this processor
                _passes = None
            _loaded = True
    return _passes is not None


def scan_on_host(data: Bytes, first_word: int, dtype: torch.dtype | None) -> Scan:
    """Hash [n] bytes that start at word `first_word` of their tensor; see `checksum.scan`."""
    passes = _compiled_for(data.size)
    if passes is None:
        return scan_by_numpy(data, first_word, dtype)
    return scan_compiled(passes, data, first_word, dtype)


def copy_on_host(into: Bytes, data: Bytes, first_word: int, dtype: torch.dtype | None) -> Scan:
    """Copy [n] bytes into as many others, and hash what was written as `scan_on_host` does."""
    passes = _compiled_for(data.size)
    if passes is None:
        # Not by torch, whose threads would wait for each other at every chunk on a busy machine.
        into[:] = data
        return scan_by_numpy(into, first_word, dtype)
    return copy_compiled(passes, into, data, first_word, dtype)


def is_nonfinite_on_host(data: Bytes, dtype: torch.dtype) -> bool:
    """Whether one of the values whose [n] bytes these are is not finite."""
    passes = _compiled_for(data.size)
    if passes is None:
        return nonfinite_by_numpy(data, dtype)
    return scan_compiled(passes, data, 0, dtype).nonfinite


def _compiled_for(nbytes: int) -> Passes | None:
    if not _loaded and nbytes >= WORTH_LOADING_BYTES and not _uses_a_gpu():
        warm_up()
    return _passes


def _uses_a_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def scan_compiled(passes: Passes, data: Bytes, first_word: int, dtype: torch.dtype | None) -> Scan:
    limits, whole = _LIMITS[dtype], data.size // 8 * 8
    words, position = data[:whole].view(np.uint64), first_word * POSITION & MASK
    total, found = passes.scan(words, position, limits.magnitude, limits.step)
    tail = _scan_tail(data[whole:], first_word + whole // 8, limits)
    return Scan((total + tail.total) & MASK, bool(found & limits.sign) or tail.nonfinite)


def copy_compiled(
    passes: Passes, into: Bytes, data: Bytes, first_word: int, dtype: torch.dtype | None
) -> Scan:
    assert into.size == data.size, "the pass does not look where it writes"
    limits, whole = _LIMITS[dtype], data.size // 8 * 8
    words, position = data[:whole].view(np.uint64), first_word * POSITION & MASK
    total, found = passes.copy(into[:whole].view(np.uint64), words, position, limits.magnitude, limits.step)
    into[whole:] = data[whole:]
    tail = _scan_tail(into[whole:], first_word + whole // 8, limits)
    return Scan((total + tail.total) & MASK, bool(found & limits.sign) or tail.nonfinite)


def scan_by_numpy(data: Bytes, first_word: int, dtype: torch.dtype | None) -> Scan:
    total, nonfinite = 0, False
    num_words = data.size // 8
    block = min(num_words, BLOCK_WORDS)
    x: Words = np.empty(block, dtype=np.uint64)
    high: Words = np.empty(block, dtype=np.uint64)
    words = data[: num_words * 8].view(np.uint64)
    for start in range(0, num_words, BLOCK_WORDS):
        part = words[start : start + BLOCK_WORDS]
        n = part.size
        if n < x.size:
            x, high = x[:n], high[:n]
        np.add(_STEPS[:n], np.uint64((first_word + start) * POSITION & MASK), out=x)
        np.bitwise_xor(x, part, out=x)
        np.right_shift(x, HALF, out=high)
        np.bitwise_xor(x, high, out=x)
        np.multiply(x, np.uint64(MULTIPLIER), out=x)
        np.right_shift(x, HALF, out=high)
        np.bitwise_xor(x, high, out=x)
        total += int(x.sum())
        if dtype is not None and not nonfinite:
            nonfinite = _block_nonfinite(part.view(np.uint8), dtype, high)
    tail = _scan_tail(data[num_words * 8 :], first_word + num_words, _LIMITS[dtype])
    return Scan((total + tail.total) & MASK, nonfinite or tail.nonfinite)


def nonfinite_by_numpy(data: Bytes, dtype: torch.dtype) -> bool:
    step = BLOCK_WORDS * 8
    scratch: Words = np.empty(min(data.size // 8 + 1, BLOCK_WORDS), dtype=np.uint64)
    return any(
        _block_nonfinite(data[start : start + step], dtype, scratch) for start in range(0, data.size, step)
    )


def _block_nonfinite(data: Bytes, dtype: torch.dtype, scratch: Words) -> bool:
    """`scratch` is overwritten; it has room for the block."""
    unsigned, magnitude, infinity = EXPONENTS[dtype]
    values = data.view(unsigned)
    absolute = scratch.view(unsigned)[: values.size]
    np.bitwise_and(values, unsigned(magnitude), out=absolute)
    return bool(absolute.max(initial=0) >= infinity)


def _scan_tail(tail: Bytes, index: int, limits: Limits) -> Scan:
    """The bytes after the last whole word, filled up with zeros, which are finite."""
    if not tail.size:
        return Scan(0, False)
    word = int.from_bytes(tail.tobytes(), "little")
    return Scan(mix(word, index), bool((word & limits.magnitude) + limits.step & limits.sign))
