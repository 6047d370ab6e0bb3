"""Uniform numbers that depend on nothing but what they are drawn for."""

from __future__ import annotations

MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit words in which each bit moves every other."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A float in [0, 1) with 53 random bits, the same for the same three integers, anywhere."""
    state = _mix((seed + 0x9E3779B97F4A7C15) & MASK)
    state = _mix((state + (sample_index + 1) * 0xD1342543DE82EF95) & MASK)
    state = _mix((state + (position + 1) * 0x9E3779B97F4A7C15) & MASK)
    return (state >> 11) * 2.0**-53
