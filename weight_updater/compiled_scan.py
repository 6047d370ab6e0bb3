"""The pass over words in the host's memory, compiled by numba: once on a machine, then it comes from a cache.

LLVM makes vectors of all of it, the multiplication and the sums included, four sums side by side; in the
cache one thread reads some 15 GB/s (numpy's passes: 1.5). Imported by `host_scan` alone, at its first need.
"""

from __future__ import annotations

import numba
import numpy as np

from weight_updater.host_scan import MULTIPLIER, POSITION, Words

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and interpreted, the pass would take minutes")

_POSITION = np.uint64(POSITION)
_MULTIPLIER = np.uint64(MULTIPLIER)
_HALF = np.uint64(32)

_WORD = numba.types.uint64
_WORDS = numba.types.Array(_WORD, 1, "C", readonly=True, aligned=False)


@numba.njit(
    numba.types.UniTuple(_WORD, 2)(_WORDS, _WORD, _WORD, _WORD),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def scan_words(
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
