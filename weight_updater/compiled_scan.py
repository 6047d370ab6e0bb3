"""The passes over words in the host's memory, compiled by numba: a quarter of a second once on a machine,
then they come from a cache. (Numba's import and loading take more: half a second, and 115 MiB with LLVM.)

LLVM makes vectors of all of it, the multiplication and the sums included, four sums side by side. From the
cache one thread reads 15 GB/s (numpy's passes: 1 to 3), half of that on a processor without AVX2. Imported by
`host_scan` alone, at its first need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from weight_updater.host_scan import MULTIPLIER, POSITION, Passes, Words

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and interpreted, a pass would take minutes")

_POSITION = np.uint64(POSITION)
_MULTIPLIER = np.uint64(MULTIPLIER)
_HALF = np.uint64(32)


def _mix(word: np.uint64, position: np.uint64) -> np.uint64:
    x = word ^ position
    x ^= x >> _HALF
    x *= _MULTIPLIER
    return x ^ (x >> _HALF)


_mixed: Callable[[np.uint64, np.uint64], np.uint64] = numba.njit(inline="always")(_mix)
"""Put into the loops as it stands, so that they stay vectors."""


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
        total += _mixed(word, position)
        found |= (word & magnitude) + step
    return total, found


def _copy_words(
    into: Words, words: Words, position: np.uint64, magnitude: np.uint64, step: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """`_scan_words`, which writes each word into `into` ([n], any alignment) as well: what it hashes is what
    it writes, whatever becomes of `words` meanwhile. At the speed of a copy.
    """
    total = np.uint64(0)
    found = np.uint64(0)
    for i in range(words.size):
        word = words[i]
        into[i] = word
        position += _POSITION
        total += _mixed(word, position)
        found |= (word & magnitude) + step
    return total, found


def _compile(*, cache: bool) -> Passes:
    word = numba.types.uint64
    words = numba.types.Array(word, 1, "C", readonly=True, aligned=False)
    into = numba.types.Array(word, 1, "C", aligned=False)
    both = numba.types.UniTuple(word, 2)

    def compiled(function: Callable[..., Any], *arguments: object) -> Callable[..., Any]:
        made: Callable[..., Any] = numba.njit(
            both(*arguments, word, word, word), nogil=True, cache=cache, error_model="numpy"
        )(function)
        return made

    return Passes(compiled(_scan_words, words), compiled(_copy_words, into, words))


try:
    passes = _compile(cache=True)
except (OSError, RuntimeError):  # no directory that it could write to (NUMBA_CACHE_DIR), or a full one
    passes = _compile(cache=False)
