"""Casts between the dtype that arrives and the dtype of a slot: always round to nearest even."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

PIECE_ELEMENTS = 1 << 20
"""Elements that are cast at a time; bounds the memory that a cast needs."""
_COMPARED_BYTES = 512 << 10


def cast_into(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Write `source` into `destination` (1-D, equal length), rounding to nearest even.

    float64 goes to a 16-bit dtype through a float32 that was rounded to odd: rounding to nearest twice
    would move values that lie just beside a tie.
    """
    if source.dtype == torch.float64 and destination.dtype.itemsize == 2:
        for start in range(0, source.numel(), PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            destination[piece].copy_(_round_to_odd(source[piece]))
    else:
        destination.copy_(source)


def cast_pieces(source: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first element, piece in `dtype`) over a 1-D tensor, in bounded memory."""
    for start in range(0, source.numel(), PIECE_ELEMENTS):
        part = source[start : start + PIECE_ELEMENTS]
        piece = torch.empty_like(part, dtype=dtype)
        cast_into(piece, part)
        yield start, piece


def _round_to_odd(source: torch.Tensor) -> torch.Tensor:
    """float64 -> float32: towards zero, with the last bit set where bits were lost."""
    near = source.to(torch.float32)
    lost = (near.double() != source) & ~source.isnan() & ~source.isinf()
    away = lost & (near.double().abs() > source.abs())
    bits = near.view(torch.int32) - away.to(torch.int32)
    return (bits | lost.to(torch.int32)).view(torch.float32)


def as_dtype(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View 1-D bytes as `dtype`; bytes at an address that does not fit it are copied first."""
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def bytes_over(buffer: memoryview) -> torch.Tensor:
    """The buffer's memory as [n] uint8, borrowed: the tensor keeps the memory from being unmapped."""
    # Through numpy, which holds on to the buffer; torch.frombuffer lets go of it, and a closed mapping
    # would leave the tensor pointing nowhere.
    return torch.from_numpy(np.frombuffer(buffer, dtype=np.uint8))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous CPU tensors of equal size hold the same bytes (NaN equals itself)."""
    x, y = (t.detach().view(-1).view(torch.uint8).numpy() for t in (a, b))
    # torch.equal compares bytes one by one, six times slower than words. Piece by piece: mostly the first one
    # tells already, and what numpy finds in one stays in the cache.
    words = x.size // 8 * 8
    return all(
        np.array_equal(
            x[at : min(at + _COMPARED_BYTES, words)].view(np.uint64),
            y[at : min(at + _COMPARED_BYTES, words)].view(np.uint64),
        )
        for at in range(0, words, _COMPARED_BYTES)
    ) and np.array_equal(x[words:], y[words:])
