"""Uniform numbers that depend on nothing but what they are drawn for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MASK = (1 << 64) - 1


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64-bit words in which each bit moves every other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def uniforms(seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Floats in [0, 1) with 53 random bits, each the same for the same three integers, anywhere.

    Args:
        seeds: taken modulo 2^64.

    Returns:
        [S] float64.
    """

    def words(values: Sequence[int]) -> np.ndarray:
        return np.array([value & MASK for value in values], dtype=np.uint64)

    one = np.uint64(1)
    state = _mix(words(seeds) + np.uint64(0x9E3779B97F4A7C15))
    state = _mix(state + (words(sample_indices) + one) * np.uint64(0xD1342543DE82EF95))
    state = _mix(state + (words(positions) + one) * np.uint64(0x9E3779B97F4A7C15))
    draws: np.ndarray = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return draws
