"""64-bit checksums of tensors, and a test for non-finite values in the same pass.

Definition. Let w[0], w[1], ... be the tensor's logical row-major bytes as 64-bit little-endian words, the
last one filled up with zero bytes, and n the number of bytes. All arithmetic is modulo 2**64:

    mix(w, i):  x = w xor (i + 1) * 0x9E3779B97F4A7C15
                x = x xor (x >> 32)
                x = x * 0xBF58476D1CE4E5B9
                return x xor (x >> 32)
    checksum  = mix(w[0], 0) + mix(w[1], 1) + ... + mix(n, 2**60)

`mix` is a bijection of w for each i, so any change of a single word shows for certain; the position is
mixed in before the only non-linear steps, so exchanged or shifted words show too (about one pair in 10**8
of words that differ in a single bit goes unseen, which the other words of a chunk make up for). It is a
sum, so parts add up in any order, on any number of threads. It guards against faults, not attackers.

The arithmetic is that of signed 64-bit integers with wraparound, with one multiplication for each word,
and shifts by half a word, which cost a GPU nothing. In the host's memory it is one compiled pass, or numpy's
(host_scan): torch has no logical right shift of 64-bit integers and needs a third more passes than numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from weight_updater.device_scan import checksums_on_device, is_fast, scan_many
from weight_updater.host_scan import (
    BLOCK_WORDS,
    EXPONENTS,
    HALF,
    MASK,
    MULTIPLIER,
    POSITION,
    Scan,
    Words,
    is_nonfinite_on_host,
    mix,
    scan_on_host,
)

_LENGTH_INDEX = 1 << 60  # no tensor has a word at this index

BLOCK_BYTES = 8 * BLOCK_WORDS
"""What of many small tensors is hashed at a time on a CPU."""
SMALL_BYTES = 16 << 10
"""Tensors up to this size are worth hashing together."""
_DEVICE_BLOCK_BYTES = 64 << 20
_CHUNK_BYTES = 8 << 20  # one thread's share of a large tensor, and the largest copy of a strided one


def scan(data: torch.Tensor, offset: int = 0, dtype: torch.dtype | None = None) -> Scan:
    """Hash `data`, the bytes of a tensor from byte `offset` on, and look for non-finite values.

    Args:
        data: [n] uint8, contiguous, any device, any alignment. Runs on the calling thread.
        offset: bytes, a multiple of 8; only the last chunk of a tensor may have n % 8 != 0.
        dtype: floating dtype of the values for the non-finite test; None leaves it out.

    Raises:
        ValueError: the offset is no multiple of 8.
    """
    if offset % 8:
        raise ValueError(f"a checksum's chunk starts at byte {offset}; offsets must be multiples of 8")
    if data.device.type != "cpu":
        if is_fast(data.device):
            return scan_many([data], data.device, [dtype], [offset])[0]
        return _scan_torch(data, offset, dtype)
    return scan_on_host(data.numpy(), offset // 8, dtype)


def finish(total: int, nbytes: int) -> int:
    """The checksum of a tensor of `nbytes` bytes whose chunks' totals add up to `total`."""
    return (total + _mixed_length(nbytes)) & MASK


def mixed_lengths(sizes: Sequence[int]) -> npt.NDArray[np.uint64]:
    """[tensors] uint64: what makes the checksums of tensors of so many bytes out of their totals (with
    wraparound, as arrays of uint64 add).
    """
    return np.array([_mixed_length(nbytes) for nbytes in sizes], dtype=np.uint64)


@lru_cache(maxsize=1024)
def _mixed_length(nbytes: int) -> int:
    return mix(nbytes, _LENGTH_INDEX)


class PartialChecksum:
    """Adds up the chunks of one tensor, in any order. Not thread-safe: one per tensor.

    Args:
        dtype: floating dtype of the values, to look for non-finite ones as well; None leaves it out.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._total = 0
        self.nonfinite = False

    def add(self, offset: int, data: torch.Tensor) -> None:
        """Take in `data` ([n] uint8), which lies at byte `offset` (a multiple of 8) of the tensor."""
        found = scan(data, offset, self._dtype)
        self._total = (self._total + found.total) & MASK
        self.nonfinite = self.nonfinite or found.nonfinite

    def value(self, nbytes: int) -> int:
        """The checksum, once every byte of a tensor of `nbytes` bytes was added exactly once."""
        return finish(self._total, nbytes)


def checksum(tensor: torch.Tensor) -> int:
    """The checksum of a tensor of any dtype, device, strides and alignment: an int in [0, 2**64).

    Large CPU tensors are hashed by as many threads as torch uses.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or nbytes <= _CHUNK_BYTES:
        return finish(sum(scan(data, offset).total for offset, data in _chunks(tensor)), nbytes)
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        totals = pool.map(lambda chunk: scan(chunk[1], chunk[0]).total, _chunks(tensor))
        return finish(sum(totals), nbytes)


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The checksums of many tensors; CPU tensors are shared out over as many threads as torch uses."""
    if tensors and all(is_fast(tensor.device) for tensor in tensors):
        return checksums_on_device(tensors)
    values = [0] * len(tensors)
    others = _together(tensors, values)
    for index, value in zip(others, _one_by_one([tensors[i] for i in others]), strict=True):
        values[index] = value
    return values


def is_small(nbytes: int) -> bool:
    """Whether a tensor is worth hashing as a row among others of its size: small, and of whole words."""
    return 0 < nbytes <= SMALL_BYTES and nbytes % 8 == 0


def row_totals(rows: Words) -> Words:
    """The sum of mixed words of each row of [rows, words]: many small tensors at the cost of their bytes."""
    steps = np.arange(1, rows.shape[1] + 1, dtype=np.uint64) * np.uint64(POSITION)
    x = rows ^ steps
    high = x >> HALF
    x ^= high
    x *= np.uint64(MULTIPLIER)
    np.right_shift(x, HALF, out=high)
    x ^= high
    totals: Words = x.sum(axis=1, dtype=np.uint64)
    return totals


def rows_nonfinite(rows: npt.NDArray[np.uint8], dtype: torch.dtype) -> npt.NDArray[np.bool_]:
    """For each row of [rows, bytes], whether a value of `dtype` (floating) in it is not finite."""
    unsigned, magnitude, infinity = EXPONENTS[dtype]
    absolute = rows.view(unsigned) & unsigned(magnitude)
    if absolute.max(initial=0) < infinity:  # nearly always, and a fifth of what a maximum by rows takes
        return np.zeros(len(rows), dtype=np.bool_)
    found: npt.NDArray[np.bool_] = absolute.max(axis=1) >= infinity
    return found


def _together(tensors: Sequence[torch.Tensor], values: list[int]) -> list[int]:
    """Hash small CPU tensors, alike ones as rows of one block, into `values`; returns the others' indexes."""
    alike: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    others = []
    for index, tensor in enumerate(tensors):
        if tensor.is_cpu and is_small(tensor.nbytes):
            alike.setdefault((tensor.dtype, tensor.shape), []).append(index)
        else:
            others.append(index)
    for (dtype, shape), indexes in alike.items():
        nbytes = shape.numel() * dtype.itemsize
        step = max(1, BLOCK_BYTES // nbytes)
        for first in range(0, len(indexes), step):
            part = indexes[first : first + step]
            with torch.no_grad():
                block = torch.stack([tensors[index] for index in part]).view(-1)
            rows = block.view(torch.uint8).numpy().view(np.uint64).reshape(len(part), nbytes // 8)
            for index, total in zip(part, row_totals(rows).tolist(), strict=True):
                values[index] = finish(total, nbytes)
    return others


def _one_by_one(tensors: Sequence[torch.Tensor]) -> list[int]:
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(tensors) < 2 or tensors[0].device.type != "cpu":
        return [checksum(tensor) for tensor in tensors]

    def one(tensor: torch.Tensor) -> int:
        total = sum(scan(data, offset).total for offset, data in _chunks(tensor))
        return finish(total, tensor.numel() * tensor.element_size())

    values = [0] * len(tensors)

    def hash_share(share: Sequence[int]) -> None:
        for index in share:
            values[index] = one(tensors[index])

    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        list(pool.map(hash_share, even_shares([tensor.nbytes for tensor in tensors], num_threads)))
    return values


def even_shares(sizes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Deal indexes of `sizes` out so that all shares have about equal bytes: the largest first, to who has
    least.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += sizes[index]
    return shares


def fold(values: Iterable[int]) -> int:
    """One checksum over the checksums of many tensors, in order."""
    words = np.fromiter(values, dtype=np.uint64)
    return finish(int(row_totals(words.reshape(1, -1))[0]), words.nbytes)


def fold_by_name(values: Mapping[str, int]) -> int:
    """One checksum over those of named tensors, in the order of the names: equal tensors give an equal
    number, whatever order they came or lie in.
    """
    return fold(values[name] for name in sorted(values))


def has_nonfinite(tensor: torch.Tensor) -> bool:
    """Whether a value is NaN or infinite; False for dtypes that have no such values."""
    if not tensor.is_floating_point():
        return False
    if tensor.dtype not in EXPONENTS or tensor.device.type != "cpu":
        return not bool(torch.isfinite(tensor).all())
    return any(is_nonfinite_on_host(data.numpy(), tensor.dtype) for _, data in _chunks(tensor))


def _chunks(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(byte offset, [n] uint8) over the logical row-major bytes; copies at most a few rows at a time."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        data = tensor.view(-1).view(torch.uint8)
        step = _CHUNK_BYTES if tensor.device.type == "cpu" else max(1, data.numel())
        for offset in range(0, data.numel(), step):
            yield offset, data[offset : offset + step]
        return
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    rows = max(8, _CHUNK_BYTES // row_bytes // 8 * 8)  # a multiple of 8, so that offsets are too
    for row in range(0, tensor.shape[0], rows):
        yield row * row_bytes, tensor[row : row + rows].contiguous().view(-1).view(torch.uint8)


def _scan_torch(data: torch.Tensor, offset: int, dtype: torch.dtype | None) -> Scan:
    """The same in torch operations, for devices; one synchronisation at the end."""
    nonfinite = False
    if dtype is not None:
        nonfinite = not bool(torch.isfinite(_aligned(data).view(dtype)).all())
    totals = []
    for start in range(0, data.numel(), _DEVICE_BLOCK_BYTES):
        part = data[start : start + _DEVICE_BLOCK_BYTES]
        part = torch.nn.functional.pad(part, (0, -part.numel() % 8)) if part.numel() % 8 else _aligned(part)
        words = part.view(torch.int64)
        first = (offset + start) // 8
        position = torch.arange(first + 1, first + 1 + words.numel(), device=data.device)
        x = position.mul_(_signed(POSITION)).bitwise_xor_(words)
        x ^= (x >> 32).bitwise_and_(0xFFFFFFFF)
        x.mul_(_signed(MULTIPLIER))
        x ^= (x >> 32).bitwise_and_(0xFFFFFFFF)
        totals.append(x.sum())
    total = int(torch.stack(totals).sum()) if totals else 0
    return Scan(total & MASK, nonfinite)


def _aligned(data: torch.Tensor) -> torch.Tensor:
    return data if data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0 else data.clone()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
