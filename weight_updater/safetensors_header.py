"""The header of one safetensors file, read strictly: either the whole file is as it says, or it is refused.

8 bytes   n, little-endian
n bytes   JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end)}}
the rest  the tensors' bytes, back to back, without holes, to the end of the file
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import ITEMSIZE, TensorSpec

CHECKSUMS_KEY = "rollsync.checksums"
"""Key of the file's metadata under which our writer keeps {tensor name: 16 hex digits} as JSON."""

MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library; a longer header is garbage."""

_MAX_SIZE = 1 << 62
_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
DTYPE_CODES = {name: code for code, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What changes when a file is written to or replaced: device, inode, size, modification time in ns."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileIdentity:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. file: real path. offset: of its first byte in the file."""

    spec: TensorSpec
    file: str
    offset: int


def open_regular(path: str, shown: str) -> tuple[int, FileIdentity]:
    """Open a resolved path for reading; a missing file, a directory or a device is refused as `shown`.

    Returns the descriptor, which the caller closes.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer. O_NOFOLLOW: the path was resolved before.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise UpdateRefused(
            Reason.FILE_NOT_FOUND, f"{shown} does not exist; is the checkpoint complete?"
        ) from None
    except OSError as error:
        raise UpdateRefused(
            Reason.FILE_NOT_FOUND, f"{shown} cannot be opened: {os.strerror(error.errno or 0)}"
        ) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise UpdateRefused(Reason.FILE_NOT_FOUND, f"{shown} is not a regular file")
    return fd, FileIdentity.of(found)


class Headers:
    """The headers of the checkpoint that was read last. An update reads its files' headers three times; they
    are parsed again only if their bytes are others. Threads that read at once only forget more.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, int, bytes], list[StoredTensor]] = {}
        self._known: dict[tuple[str, int, bytes], list[StoredTensor]] = {}

    def start(self) -> None:
        """A checkpoint is about to be read; what is not read this time is forgotten the next."""
        self._known, self._last = self._last, {}

    def read(self, fd: int, size: int, path: str) -> list[StoredTensor]:
        """The tensors of an open file of `size` bytes, in the order of their bytes; not to be changed.

        Raises:
            UpdateRefused: FILE_CORRUPT, or INVALID_UPDATE for a dtype that no update may bring.
        """
        raw = _header_bytes(fd, size, path)
        key = (path, size, hashlib.blake2b(raw, digest_size=32).digest())
        tensors = self._known.get(key)
        if tensors is None:
            tensors = _parse(raw, size, path)
        self._last[key] = tensors
        return tensors


def _header_bytes(fd: int, size: int, path: str) -> bytes:
    if size < 8:
        raise corrupt(path, f"header too small: the file has {size} bytes")
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > MAX_HEADER_BYTES:
        raise corrupt(
            path, f"header too large: {length} bytes; is it a safetensors file, not a pointer to one?"
        )
    if 8 + length > size:
        raise corrupt(path, f"invalid header length: {length} bytes in a file of {size}")
    raw = os.pread(fd, length, 8)
    if len(raw) != length:
        raise corrupt(path, "it was truncated while it was read")
    return raw


def _parse(raw: bytes, size: int, path: str) -> list[StoredTensor]:
    header = parse_json(raw, path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt(path, "__metadata__ is not a map of strings")
    checksums = _checksums(metadata, path)
    data_start = 8 + len(raw)
    tensors = [_entry(name, entry, checksums.get(name), path) for name, entry in header.items()]
    tensors.sort(key=itemgetter(0, 1))
    expected = 0
    for begin, end, spec in tensors:
        if begin != expected:
            raise corrupt(path, f"invalid offset: {spec.name} starts at byte {begin}, not at {expected}")
        expected = end
    if data_start + expected != size:
        raise corrupt(
            path, f"incomplete metadata: it describes {data_start + expected} bytes, the file has {size}"
        )
    return [StoredTensor(spec, path, data_start + begin) for begin, _, spec in tensors]


def corrupt(path: str, what: str) -> UpdateRefused:
    """The refusal of a file that cannot be right."""
    return UpdateRefused(Reason.FILE_CORRUPT, f"{path}: {what}")


def parse_json(raw: bytes, path: str) -> dict[str, Any]:
    """A JSON object without repeated keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is there twice")
        return found

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise corrupt(path, "invalid JSON: not an object")
    return value


def _checksums(metadata: dict[str, str], path: str) -> dict[str, int]:
    text = metadata.get(CHECKSUMS_KEY)
    if text is None:
        return {}
    try:
        return {
            name: int(digits, 16) & (1 << 64) - 1 for name, digits in parse_json(text.encode(), path).items()
        }
    except (TypeError, ValueError) as error:
        raise corrupt(path, f"{CHECKSUMS_KEY} is not a map of hexadecimal numbers") from error


def _entry(name: str, entry: Any, checksum: int | None, path: str) -> tuple[int, int, TensorSpec]:
    """(begin, end, spec) of one entry, checked by itself."""
    if not isinstance(entry, dict) or not entry.keys() >= _ENTRY_KEYS:
        raise corrupt(path, f"{name} lacks dtype, shape or data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt(path, f"{name} has an invalid shape or data_offsets: {shape}, {offsets}")
    if not isinstance(code, str) or code not in DTYPES:
        raise UpdateRefused(
            Reason.INVALID_UPDATE,
            f"{path}: {name} has dtype {code}; an update brings one of {', '.join(DTYPES)}",
        )
    begin, end = offsets
    dtype = DTYPES[code]
    if math.prod(shape) * ITEMSIZE[dtype] != end - begin:
        raise corrupt(
            path,
            f"invalid shape: {name} is {code} {shape}, but has {end - begin} bytes",
        )
    return begin, end, TensorSpec(name, dtype, tuple(shape), checksum)


def _are_sizes(value: Any) -> bool:
    # A bool is an int, but of another type.
    return isinstance(value, list) and all([type(item) is int and 0 <= item < _MAX_SIZE for item in value])
