"""The pass over words in the host's memory, compiled by numba: a fifth of a second once on a machine, then it
comes from a cache. (Numba's import takes more: 0.45 s, and 115 MiB with what it loads of LLVM.)

LLVM makes vectors of all of it, the multiplication and the sums included, four sums side by side. From the
cache one thread reads 15 GB/s (numpy's passes: 1 to 3), half of that on a processor without AVX2. Imported by
`host_scan` alone, at its first need.
"""

from __future__ import annotations

import numba
import numpy as np

from weight_updater.host_scan import MULTIPLIER, POSITION, ScanWords, Words

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and interpreted, the pass would take minutes")

_POSITION = np.uint64(POSITION)
_MULTIPLIER = np.uint64(MULTIPLIER)
_HALF = np.uint64(32)


def _scan_words(
    words: Words, position: np.uint64, magnitude: np.uint64, step: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Sum up mixed words, and see whether a value's carry reaches its sign; see `host_scan.Limits`.

    Args:
        words: [n], any alignment.
        position: what is mixed into the word before the first one.

    Returns:
        the sum, and the union of all words' bits after the steps.
    """
    total = np.uint64(0)
    found = np.uint64(0)
    for i in range(words.size):  # by index: over the words themselves, LLVM gathers them one by one
        word = words[i]
        position += _POSITION
        x = word ^ position
        x ^= x >> _HALF
        x *= _MULTIPLIER
        total += x ^ (x >> _HALF)
        found |= (word & magnitude) + step
    return total, found


def _compile(*, cache: bool) -> ScanWords:
    word = numba.types.uint64
    words = numba.types.Array(word, 1, "C", readonly=True, aligned=False)
    signature = numba.types.UniTuple(word, 2)(words, word, word, word)
    compiled: ScanWords = numba.njit(signature, nogil=True, cache=cache, error_model="numpy")(_scan_words)
    return compiled


try:
    scan_words = _compile(cache=True)
except (OSError, RuntimeError):  # no directory that it could write to (NUMBA_CACHE_DIR), or a full one
    scan_words = _compile(cache=False)
