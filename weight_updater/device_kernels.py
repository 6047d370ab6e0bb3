"""Triton kernels over many byte ranges in one launch: hash, copy, or both in one pass. Needs triton.

A launch takes a table of chunks, [num_chunks, 8] int64, PARTS programs for each:

    source        address of the chunk's bytes
    destination   address that they are copied to; 0 where nothing is copied
    nbytes        of the chunk; a multiple of 8 but for the last chunk of a range
    first_word    the chunk's first 64-bit word counted from the start of its range
    row           of the results that the chunk adds to
    exponent      the bits of an all-ones exponent in each value of a word; 0 looks for no such values
    step          the lowest bit of the exponent in each value of a word, or 0
    (unused)      so that rows, and tables that start at any of them, are aligned to 16 bytes

and [num_rows, 2] int64 results, zeroed: the sum of the mixed words, and how many words hold a value that
is not finite. The mix is that of checksum.py, in the same arithmetic.

Arguments carry no annotations but constexpr: the compiler would evaluate them.
"""

from __future__ import annotations

import triton
import triton.language as tl

_POSITION = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER = tl.constexpr(0xBF58476D1CE4E5B9)


@triton.jit
def _bits(value):
    return value.to(tl.uint64, bitcast=True)


@triton.jit
def _mix(words, positions):
    """words, positions: uint64; position of word i is (i + 1) * _POSITION."""
    x = words ^ positions
    x = x ^ (x >> 32)
    x = x * _MULTIPLIER
    return x ^ (x >> 32)


@triton.jit
def _nonfinite(words, exponent, step):
    """The top bit of every value whose exponent is all ones.

    exponent + step has just the top bit of every value set, and no carry leaves a value.
    """
    return ((words & exponent) + step) & (exponent + step)


@triton.jit
def chunks_kernel(
    table,
    results,
    COPY: tl.constexpr,
    SCAN: tl.constexpr,
    ALIGNED: tl.constexpr,
    PART_WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One part of a chunk per program; parts behind the end of a short chunk are empty.

    Args:
        ALIGNED: what both addresses are multiples of: 16, 8, or 1 (slow; each word is put together).
        PART_WORDS: of a full part; a multiple of WORDS.
        PARTS: of a full chunk.
        WORDS: 64-bit words at a time, a power of two.
    """
    number = tl.program_id(0).to(tl.int64)
    row_of_table = table + number // PARTS * 8
    before = number % PARTS * PART_WORDS  # words of the chunk that other programs take
    source = tl.load(row_of_table) + before * 8
    destination = tl.load(row_of_table + 1) + before * 8
    nbytes = tl.minimum(tl.maximum(tl.load(row_of_table + 2) - before * 8, 0), PART_WORDS * 8)
    first_word = tl.load(row_of_table + 3) + before
    row = tl.load(row_of_table + 4)
    exponent = _bits(tl.load(row_of_table + 5))
    step = _bits(tl.load(row_of_table + 6))
    stride = (WORDS * _POSITION) & 0xFFFFFFFFFFFFFFFF  # folded by the compiler: uint64 has no room for it

    lane = tl.arange(0, WORDS).to(tl.int64)
    position = (_bits(first_word + lane) + 1) * _POSITION
    total = tl.zeros([WORDS], dtype=tl.uint64)
    found = tl.zeros([WORDS], dtype=tl.uint64)
    num_words = nbytes // 8

    if ALIGNED == 1:
        source_bytes = source.to(tl.pointer_type(tl.uint8))
        destination_bytes = destination.to(tl.pointer_type(tl.uint8))
        start = nbytes * 0
        while start < num_words:
            inside = start + lane < num_words
            words = tl.zeros([WORDS], dtype=tl.uint64)
            for k in tl.static_range(8):
                byte = tl.load(source_bytes + (start + lane) * 8 + k, mask=inside, other=0)
                if COPY:
                    tl.store(destination_bytes + (start + lane) * 8 + k, byte, mask=inside)
                words = words | (byte.to(tl.uint64) << (8 * k))
            if SCAN:
                total += tl.where(inside, _mix(words, position), 0)
                found |= _nonfinite(words, exponent, step)
                position += stride
            start += WORDS
    else:
        source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), ALIGNED)
        destination_words = tl.multiple_of(destination.to(tl.pointer_type(tl.int64)), ALIGNED)
        if num_words == PART_WORDS:  # nearly all: no masks, and a known number of steps
            for k in range(PART_WORDS // WORDS):
                data = tl.load(source_words + k * WORDS + lane)
                if COPY:
                    tl.store(destination_words + k * WORDS + lane, data)
                if SCAN:
                    total += _mix(_bits(data), position)
                    found |= _nonfinite(_bits(data), exponent, step)
                    position += stride
        else:
            start = nbytes * 0
            while start < num_words:
                inside = start + lane < num_words
                data = tl.load(source_words + start + lane, mask=inside, other=0)
                if COPY:
                    tl.store(destination_words + start + lane, data, mask=inside)
                if SCAN:
                    total += tl.where(inside, _mix(_bits(data), position), 0)
                    found |= _nonfinite(_bits(data), exponent, step)
                    position += stride
                start += WORDS

    if nbytes % 8 != 0:  # only the last chunk of a range: its last word is filled up with zeros
        tail = lane < nbytes % 8
        tail_bytes = source.to(tl.pointer_type(tl.uint8)) + num_words * 8 + lane
        byte = tl.load(tail_bytes, mask=tail, other=0)
        if COPY:
            tl.store(destination.to(tl.pointer_type(tl.uint8)) + num_words * 8 + lane, byte, mask=tail)
        if SCAN:
            word = tl.sum(byte.to(tl.uint64) << tl.where(tail, lane * 8, 0).to(tl.uint64), axis=0)
            last = _mix(word, (_bits(first_word + num_words) + 1) * _POSITION)
            total += tl.where(lane == 0, last, 0)
            found |= tl.where(lane == 0, _nonfinite(word, exponent, step), 0)

    if SCAN:
        tl.atomic_add(results + row * 2, tl.sum(total, axis=0).to(tl.int64, bitcast=True), sem="relaxed")
        num_found = tl.sum((found != 0).to(tl.int64), axis=0)
        if num_found > 0:
            tl.atomic_add(results + row * 2 + 1, num_found, sem="relaxed")
