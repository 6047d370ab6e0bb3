"""Hash and copy many byte ranges on a GPU in one launch, at the speed of its memory.

Everything runs on one stream for each device, behind what the caller's current stream holds so far, and
has finished when a call returns (`Launch.start` alone returns before); a forward pass on another stream goes
on meanwhile. Without triton, or on other devices, `is_fast` is False and the callers' torch code runs.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from weight_updater.host_scan import Scan

CHUNK_BYTES = 512 << 10
"""What one row of a table tells of."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """How the kernel divides chunks. parts: programs for each. words: 64-bit ones at a time."""

    parts: int
    words: int
    num_warps: int


# The fastest of some twenty on an H200. Beside the driver's own copy of 16 GB: 1.02 of its time for copying,
# 1.07 for copying and looking at the bytes, 0.47 for looking alone.
_COPYING = _Shape(parts=16, words=4096, num_warps=16)
_SCANNING = _Shape(parts=8, words=1024, num_warps=4)

_MAX_TABLES = 8
_WORTH_KEEPING = 16  # ranges; smaller tables are made anew

# dtype -> (all-ones exponent, its lowest bit) in every value of a 64-bit word
_EXPONENT_STEPS: dict[torch.dtype, tuple[int, int]] = {
    torch.bfloat16: (0x7F80 * 0x0001000100010001, 0x0080 * 0x0001000100010001),
    torch.float16: (0x7C00 * 0x0001000100010001, 0x0400 * 0x0001000100010001),
    torch.float32: (0x7F800000 * 0x0000000100000001, 0x00800000 * 0x0000000100000001),
    torch.float64: (0x7FF0000000000000, 0x0010000000000000),
}


@dataclass(frozen=True, slots=True)
class Found:
    """What a launch saw in each range.

    totals: [ranges] uint64, sums of mixed words. nonfinite: [ranges], whether a value is not finite.
    """

    totals: npt.NDArray[np.uint64]
    nonfinite: npt.NDArray[np.bool_]


_Key = tuple[tuple[int, int, int, torch.dtype | None, int], ...]
"""Per range: source and destination address, bytes, dtype of the values, first word."""


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_fast(device: torch.device) -> bool:
    """Whether the kernels can be used for memory of `device`."""
    return device.type == "cuda" and has_triton()


_streams: dict[int, torch.cuda.Stream] = {}
_tables: OrderedDict[tuple[int, _Key], _Table] = OrderedDict()
_lock = threading.Lock()  # of both


class _Table:
    """A launch's table on the device. parts: (alignment, first row, number of rows)."""

    def __init__(self, key: _Key, device: torch.device) -> None:
        self.num_ranges = len(key)
        chunks, alignments = _chunks(key)
        order = np.argsort(-alignments, kind="stable")
        values, counts = np.unique(-alignments, return_counts=True)
        ends = np.cumsum(counts)
        self.parts = [
            (int(-value), int(end - count), int(count))
            for value, end, count in zip(values, ends, counts, strict=True)
        ]
        self.chunks = torch.from_numpy(chunks[order]).to(device)


def _chunks(key: _Key) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """([num_chunks, 8] table, [num_chunks] alignment: 16, 8 or 1); see device_kernels.py."""
    sources = np.array([row[0] for row in key], dtype=np.int64)
    destinations = np.array([row[1] for row in key], dtype=np.int64)
    sizes = np.array([row[2] for row in key], dtype=np.int64)
    steps = np.array(
        [_EXPONENT_STEPS[row[3]] if row[3] is not None else (0, 0) for row in key], dtype=np.int64
    ).reshape(-1, 2)
    counts = -(-sizes // CHUNK_BYTES)
    rows = np.repeat(np.arange(len(key)), counts)
    starts = (np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK_BYTES
    both = sources | destinations  # chunks start at multiples of 16
    alignments = np.where(both % 16 == 0, 16, np.where(both % 8 == 0, 8, 1))
    table = np.stack(
        [
            sources[rows] + starts,
            destinations[rows] + np.where(destinations[rows] != 0, starts, 0),
            np.minimum(sizes[rows] - starts, CHUNK_BYTES),
            starts // 8 + np.array([row[4] for row in key], dtype=np.int64)[rows],
            rows,
            steps[rows, 0],
            steps[rows, 1],
            np.zeros_like(rows),
        ],
        axis=1,
    )
    return np.ascontiguousarray(table, dtype=np.int64), alignments[rows]


def _table(key: _Key, device: torch.device) -> _Table:
    """The table of a launch, kept: from step to step addresses stay the same."""
    if len(key) < _WORTH_KEEPING:
        return _Table(key, device)
    where = (device.index or 0, key)
    with _lock:
        known = _tables.get(where)
        if known is not None:
            _tables.move_to_end(where)
            return known
    made = _Table(key, device)
    with _lock:
        _tables[where] = made
        while len(_tables) > _MAX_TABLES:
            _tables.popitem(last=False)
    return made


@contextmanager
def side_stream(device: torch.device, *, wait: bool = True) -> Iterator[torch.cuda.Stream | None]:
    """Run the block on the updater's own stream of `device`, behind the caller's current stream, and `wait`
    for it at the end. On other devices the block just runs.
    """
    if device.type != "cuda":
        yield None
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        with _lock:
            if index not in _streams:
                # Priority 0 is the lowest that there is: forward passes on a stream above it come first.
                _streams[index] = torch.cuda.Stream(index, priority=0)  # type: ignore[no-untyped-call]
        stream = _streams[index]
        caller = torch.cuda.current_stream(index)
        if caller != stream:
            stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            yield stream
        if wait:
            stream.synchronize()


def scan_many(
    data: Sequence[torch.Tensor],
    device: torch.device,
    dtypes: Sequence[torch.dtype | None],
    offsets: Sequence[int] | None = None,
) -> list[Scan]:
    """Hash byte ranges in GPU memory, and look for non-finite values.

    Args:
        data: each [n] uint8, contiguous, at any address that `device` can reach.
        device: that runs the kernel.
        dtypes: floating dtype of each range's values; None leaves the test for non-finite ones out.
        offsets: byte (a multiple of 8) of its tensor that each range starts at; None: all at 0.
    """
    if not data:
        return []
    words = None if offsets is None else [offset // 8 for offset in offsets]
    key = _scan_key(data, dtypes, words)
    with side_stream(device):
        return _scans(_run(_table(key, device), device, copy=False, scan=True))


def copy_many(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    dtypes: Sequence[torch.dtype | None] | None = None,
) -> list[Scan]:
    """Copy byte ranges in GPU memory; with `dtypes`, hash in the same pass what was read.

    Args:
        pairs: (destination, source), each [n] uint8 of equal n, contiguous, both reachable from `device`.
        device: that runs the kernel.
        dtypes: as in `scan_many`; None copies only, and gives nothing.
    """
    if not pairs:
        return []
    key = _copy_key(pairs, dtypes)
    with side_stream(device):
        return _scans(_run(_table(key, device), device, copy=True, scan=dtypes is not None))


class Started:
    """A launch that is under way. Memory that it was told of must live until its `result`, or until what
    is queued on the device (behind `follow`: on the stream that follows) has finished.

    Args:
        results: what it finds, on the device.
        scan: it looks at the bytes.
        stream: that it runs on; None where there are none.
    """

    def __init__(self, results: torch.Tensor, *, scan: bool, stream: torch.cuda.Stream | None) -> None:
        self._results = results
        self._scan = scan
        self._stream = stream

    def follow(self) -> None:
        """Let what the caller's current stream gets from here on come after it; nothing is waited for."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def result(self) -> Found:
        """What it found; it has finished on the device when this returns."""
        if self._stream is None:
            return _read(self._results, scan=self._scan)
        with torch.cuda.stream(self._stream):
            found = _read(self._results, scan=self._scan)
        self._stream.synchronize()
        return found


class Launch:
    """The ranges of a `scan_many` or a `copy_many` that comes again and again, at the same addresses: what
    the kernel is told is worked out once.

    Args:
        device: that runs the kernel.
        ranges: the data to hash, or (destination, source) pairs to copy; kept, since the table names their
            addresses.
        dtypes: as in `scan_many`; None (pairs only) hashes nothing.
    """

    def __init__(
        self,
        device: torch.device,
        ranges: Sequence[torch.Tensor] | Sequence[tuple[torch.Tensor, torch.Tensor]],
        dtypes: Sequence[torch.dtype | None] | None,
    ) -> None:
        self._device = device
        self._ranges = ranges
        self._scan = dtypes is not None
        pairs = [one for one in ranges if isinstance(one, tuple)]
        self._copy = bool(pairs)
        if pairs:
            self._key = _copy_key(pairs, dtypes)
        else:
            data = [one for one in ranges if isinstance(one, torch.Tensor)]
            self._key = _scan_key(data, dtypes or [])
        self._table: _Table | None = None

    def run(self) -> Found:
        """Hash, or copy (and hash) all of them; has finished on the device when it returns."""
        if not self._key:
            return Found(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.bool_))
        return self.start().result()

    def start(self) -> Started:
        """Queue it behind the caller's current stream. There is at least one range."""
        with side_stream(self._device, wait=False) as stream:
            if self._table is None:
                self._table = _Table(self._key, self._device)
            results = _queue(self._table, self._device, copy=self._copy, scan=self._scan)
        return Started(results, scan=self._scan, stream=stream)


def _scan_key(
    data: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype | None], words: Sequence[int] | None = None
) -> _Key:
    return tuple(
        [
            (source.data_ptr(), 0, source.numel(), dtype, word)
            for source, dtype, word in zip(data, dtypes, words or [0] * len(data), strict=True)
        ]
    )


def _copy_key(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], dtypes: Sequence[torch.dtype | None] | None
) -> _Key:
    assert all([a.numel() == b.numel() for a, b in pairs]), "sizes differ"
    return tuple(
        [
            (source.data_ptr(), destination.data_ptr(), source.numel(), dtype, 0)
            for (destination, source), dtype in zip(pairs, dtypes or [None] * len(pairs), strict=True)
        ]
    )


def _run(table: _Table, device: torch.device, *, copy: bool, scan: bool) -> Found:
    """Launch on the current stream, and wait for what was found; nothing is, without `scan`."""
    return _read(_queue(table, device, copy=copy, scan=scan), scan=scan)


def _queue(table: _Table, device: torch.device, *, copy: bool, scan: bool) -> torch.Tensor:
    """Launch on the current stream; gives [ranges, 2] int64 on the device, where `_read` finds the result."""
    results = torch.zeros(table.num_ranges, 2, dtype=torch.int64, device=device)
    launch(table.chunks, table.parts, results, copy=copy, scan=scan)
    return results


def _read(results: torch.Tensor, *, scan: bool) -> Found:
    """What was found, once the current stream has come so far; nothing is, without `scan`."""
    if not scan:
        return Found(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.bool_))
    found = results.cpu().numpy()
    return Found(found[:, 0].astype(np.uint64), found[:, 1] != 0)


def launch(
    chunks: torch.Tensor,
    parts: Sequence[tuple[int, int, int]],
    results: torch.Tensor,
    *,
    copy: bool,
    scan: bool,
) -> None:
    """Enqueue the kernel for each alignment of a table on the current stream."""
    from weight_updater.device_kernels import chunks_kernel

    shape = _SCANNING if scan else _COPYING
    for alignment, first, count in parts:
        chunks_kernel[(count * shape.parts,)](
            chunks[first : first + count],
            results,
            copy,
            scan,
            alignment,
            CHUNK_BYTES // 8 // shape.parts,
            shape.parts,
            shape.words,
            num_warps=shape.num_warps,
        )


def warm(device: torch.device) -> None:
    """Compile the kernels now (seconds the first time on a machine, then cached), not in an update."""
    if not is_fast(device):
        return
    data = torch.zeros(64, dtype=torch.uint8, device=device)
    for offset in (0, 8, 1):
        source, destination = data[offset : offset + 16], data[offset + 32 : offset + 48]
        scan_many([source], device, [torch.bfloat16])
        copy_many([(destination, source)], device)
        copy_many([(destination, source)], device, [torch.bfloat16])


def _scans(found: Found) -> list[Scan]:
    return list(map(Scan, found.totals.tolist(), found.nonfinite.tolist()))


def checksums_on_device(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Checksums of many tensors on GPUs, of any dtype and strides, with one launch for each GPU."""
    from weight_updater.checksum import finish  # which uses this module

    values = [0] * len(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        indexes = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        # A strided tensor is copied first; at most these copies are needed beside the tensors.
        data = [_flat_bytes(tensors[index]) for index in indexes]
        found = scan_many(data, device, [None] * len(data))
        for index, bytes_of, one in zip(indexes, data, found, strict=True):
            values[index] = finish(one.total, bytes_of.numel())
    return values


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[n] uint8; the tensor itself if it is that already."""
    if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
