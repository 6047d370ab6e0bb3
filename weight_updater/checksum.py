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
and shifts by half a word, which cost a GPU nothing. On a CPU it runs in numpy, in blocks that stay in
the cache: torch has no logical right shift of 64-bit integers and needs a third more passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from weight_updater.device_scan import checksums_on_device, is_fast, scan_many

_MASK = (1 << 64) - 1
_POSITION = 0x9E3779B97F4A7C15
_MULTIPLIER = 0xBF58476D1CE4E5B9
_LENGTH_INDEX = 1 << 60  # no tensor has a word at this index

_BLOCK_WORDS = 16384
BLOCK_BYTES = 8 * _BLOCK_WORDS
"""What is hashed at a time on a CPU: with its scratch it stays in a core's second-level cache."""
SMALL_BYTES = 16 << 10
"""Tensors up to this size are worth hashing together."""
_DEVICE_BLOCK_BYTES = 64 << 20
_CHUNK_BYTES = 8 << 20  # one thread's share of a large tensor, and the largest copy of a strided one

_Words = npt.NDArray[np.uint64]
_STEPS: _Words = np.arange(1, _BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(_POSITION)
_HALF = np.uint64(32)

# dtype -> (unsigned integer of its size, all bits but the sign, the bits of infinity). An absolute value
# at or above infinity is infinite or NaN.
_EXPONENTS: dict[torch.dtype, tuple[type[np.unsignedinteger], int, int]] = {
    torch.bfloat16: (np.uint16, 0x7FFF, 0x7F80),
    torch.float16: (np.uint16, 0x7FFF, 0x7C00),
    torch.float32: (np.uint32, 0x7FFFFFFF, 0x7F800000),
    torch.float64: (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass over bytes found: the sum of their mixed words, and whether a value is not finite."""

    total: int
    nonfinite: bool


def mix(word: int, index: int) -> int:
    """The mix of one word at one index, in Python's integers; see the module's definition."""
    x = word ^ ((index + 1) * _POSITION & _MASK)
    x ^= x >> 32
    x = x * _MULTIPLIER & _MASK
    return x ^ (x >> 32)


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
    return _scan_numpy(data.numpy(), offset // 8, dtype)


def finish(total: int, nbytes: int) -> int:
    """The checksum of a tensor of `nbytes` bytes whose chunks' totals add up to `total`."""
    return (total + _mixed_length(nbytes)) & _MASK


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
        self._total = (self._total + found.total) & _MASK
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


def row_totals(rows: _Words) -> _Words:
    """The sum of mixed words of each row of [rows, words]: many small tensors at the cost of their bytes."""
    steps = np.arange(1, rows.shape[1] + 1, dtype=np.uint64) * np.uint64(_POSITION)
    x = rows ^ steps
    high = x >> _HALF
    x ^= high
    x *= np.uint64(_MULTIPLIER)
    np.right_shift(x, _HALF, out=high)
    x ^= high
    totals: _Words = x.sum(axis=1, dtype=np.uint64)
    return totals


def rows_nonfinite(rows: npt.NDArray[np.uint8], dtype: torch.dtype) -> npt.NDArray[np.bool_]:
    """For each row of [rows, bytes], whether a value of `dtype` (floating) in it is not finite."""
    unsigned, magnitude, infinity = _EXPONENTS[dtype]
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
        list(pool.map(hash_share, _shares([tensor.nbytes for tensor in tensors], num_threads)))
    return values


def _shares(sizes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Deal indexes out so that all shares have about equal bytes: the largest first, to who has least."""
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
    if tensor.dtype not in _EXPONENTS or tensor.device.type != "cpu":
        return not bool(torch.isfinite(tensor).all())
    return any(_nonfinite_numpy(data.numpy(), tensor.dtype) for _, data in _chunks(tensor))


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


def _scan_numpy(data: npt.NDArray[np.uint8], first_word: int, dtype: torch.dtype | None) -> Scan:
    total, nonfinite = 0, False
    num_words = data.size // 8
    block = min(num_words, _BLOCK_WORDS)
    x: _Words = np.empty(block, dtype=np.uint64)
    high: _Words = np.empty(block, dtype=np.uint64)
    words = data[: num_words * 8].view(np.uint64)
    for start in range(0, num_words, _BLOCK_WORDS):
        part = words[start : start + _BLOCK_WORDS]
        n = part.size
        if n < x.size:
            x, high = x[:n], high[:n]
        np.add(_STEPS[:n], np.uint64((first_word + start) * _POSITION & _MASK), out=x)
        np.bitwise_xor(x, part, out=x)
        np.right_shift(x, _HALF, out=high)
        np.bitwise_xor(x, high, out=x)
        np.multiply(x, np.uint64(_MULTIPLIER), out=x)
        np.right_shift(x, _HALF, out=high)
        np.bitwise_xor(x, high, out=x)
        total += int(x.sum())
        if dtype is not None and not nonfinite:
            nonfinite = _block_nonfinite(part.view(np.uint8), dtype, high)
    tail = data[num_words * 8 :]
    if tail.size:
        total += mix(int.from_bytes(tail.tobytes(), "little"), first_word + num_words)
        if dtype is not None and not nonfinite:
            nonfinite = _nonfinite_numpy(tail, dtype)
    return Scan(total & _MASK, nonfinite)


def _nonfinite_numpy(data: npt.NDArray[np.uint8], dtype: torch.dtype) -> bool:
    step = _BLOCK_WORDS * 8
    scratch: _Words = np.empty(min(data.size // 8 + 1, _BLOCK_WORDS), dtype=np.uint64)
    return any(
        _block_nonfinite(data[start : start + step], dtype, scratch) for start in range(0, data.size, step)
    )


def _block_nonfinite(data: npt.NDArray[np.uint8], dtype: torch.dtype, scratch: _Words) -> bool:
    """`scratch` is overwritten; it has room for the block."""
    unsigned, magnitude, infinity = _EXPONENTS[dtype]
    values = data.view(unsigned)
    absolute = scratch.view(unsigned)[: values.size]
    np.bitwise_and(values, unsigned(magnitude), out=absolute)
    return bool(absolute.max(initial=0) >= infinity)


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
        x = position.mul_(_signed(_POSITION)).bitwise_xor_(words)
        x ^= (x >> 32).bitwise_and_(0xFFFFFFFF)
        x.mul_(_signed(_MULTIPLIER))
        x ^= (x >> 32).bitwise_and_(0xFFFFFFFF)
        totals.append(x.sum())
    total = int(torch.stack(totals).sum()) if totals else 0
    return Scan(total & _MASK, nonfinite)


def _aligned(data: torch.Tensor) -> torch.Tensor:
    return data if data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0 else data.clone()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
