"""The header of one safetensors file, read strictly: either the whole file is as it says, or it is refused.

8 bytes   n, little-endian
n bytes   JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end)}}
the rest  the tensors' bytes, back to back, without holes, to the end of the file
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.manifest import ITEMSIZE, Columns, Manifest

CHECKSUMS_KEY = "rollsync.checksums"
"""Key of the file's metadata under which our writer keeps the tensors' checksums: 16 hexadecimal digits each,
in the order of their bytes. (Files of an earlier writer have them as JSON by name.)
"""

CHECKSUMS_START = f'{{"__metadata__":{{"format":"pt","{CHECKSUMS_KEY}":"'.encode()
"""How a header of our writer with checksums begins: behind them it says the same in every step."""

MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library; a longer header is garbage."""

_DATA_ALIGNMENT = 256  # of the first tensor's byte in a file that we write
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
class StoredFile:
    """The tensors of a file in the order of their bytes.

    offsets: of each tensor's first byte in the file. file: real path.
    """

    manifest: Manifest
    offsets: list[int]
    file: str


def file_layout(columns: Columns) -> tuple[list[int], str]:
    """In which order a file that we write has these tensors, and what its header says of them.

    The format allows no holes: whole words first, then by falling item size, so that every tensor is aligned
    to its items and, but for the odd-sized ones at the end, to 8 bytes.
    """
    sizes = columns.sizes
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i] % 8 != 0, -ITEMSIZE[columns.dtypes[i]]))
    entries, end = [], 0
    for i in order:
        start, end = end, end + sizes[i]
        shape = ",".join(map(str, columns.shapes[i]))
        code = DTYPE_CODES[columns.dtypes[i]]
        entries.append(
            f"{json.dumps(columns.names[i])}:"
            f'{{"dtype":"{code}","shape":[{shape}],"data_offsets":[{start},{end}]}}'
        )
    return order, ",".join(entries)


def header(entries: str, checksums: Sequence[int]) -> bytes:
    """What a file starts with: its header's length, and the header, filled up with spaces.

    Text from the start: a tree of many small objects would be looked through by the garbage collector while
    it grows.

    Args:
        entries: from `file_layout`. checksums: in its order; nothing leaves them out.
    """
    metadata = '{"__metadata__":{"format":"pt"}'
    if checksums:
        metadata = f'{CHECKSUMS_START.decode()}{struct.pack(f">{len(checksums)}Q", *checksums).hex()}"}}'
    raw = f"{metadata},{entries}}}".encode()
    raw += b" " * (-(8 + len(raw)) % _DATA_ALIGNMENT)
    return len(raw).to_bytes(8, "little") + raw


def open_regular(path: str, shown: str) -> tuple[int, FileIdentity]:
    """Open a resolved path for reading; a missing file, a directory or a device is refused as `shown`, and
    so is (PATH_FORBIDDEN) a file that lies elsewhere, since a directory became a link after all was resolved.

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
    if _place_of(fd) not in ("", path, f"{path} (deleted)"):
        os.close(fd)
        raise UpdateRefused(
            Reason.PATH_FORBIDDEN, f"{shown} was moved as it was opened, or its directory became a link"
        )
    return fd, FileIdentity.of(found)


def _place_of(fd: int) -> str:
    """Where an open file lies, as the kernel sees it; "" where there is no /proc."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


class Headers:
    """The headers of the checkpoint that was read last. An update reads its files' headers three times, and
    in the next step they differ in their checksums only; what is the same is not parsed again. Threads that
    read at once only forget more.
    """

    def __init__(self) -> None:
        self._last: dict[str, _Known] = {}
        self._known: dict[str, _Known] = {}
        self._joined: tuple[tuple[Columns, ...], Columns] | None = None

    def start(self) -> None:
        """A checkpoint is about to be read; what is not read this time is forgotten the next."""
        self._known, self._last = self._last, {}

    def read(self, fd: int, size: int, path: str) -> StoredFile:
        """The tensors of an open file of `size` bytes.

        Raises:
            UpdateRefused: FILE_CORRUPT, or INVALID_UPDATE for a dtype that no update may bring.
        """
        raw = _header_bytes(fd, size, path)
        digits, rest = _split(raw)
        known = self._known.get(path)
        if known is None or (known.size, known.rest) != (size, rest):
            known = _Known(size, rest, digits, _parse(raw, size, path))
        elif known.digits != digits:
            columns, offsets = known.stored.manifest.columns, known.stored.offsets
            manifest = Manifest.of(columns, _numbers(digits, len(offsets), path))
            known = _Known(size, rest, digits, StoredFile(manifest, offsets, path))
        self._last[path] = known
        return known.stored

    def joined(self, files: Sequence[StoredFile]) -> Manifest:
        """One manifest of several files' tensors."""
        parts = tuple([stored.manifest.columns for stored in files])
        if len(parts) == 1:
            return files[0].manifest
        known = self._joined  # another thread may replace it
        if known is None or known[0] != parts:
            names, dtypes, shapes = (
                [one for part in parts for one in getattr(part, field)]
                for field in ("names", "dtypes", "shapes")
            )
            known = self._joined = parts, Columns(names, dtypes, shapes)
        checksums = [value for stored in files for value in stored.manifest.checksums]
        return Manifest.of(known[1], checksums)


class _Known(NamedTuple):
    """A header that was parsed. size: of its file. digits: its checksums. rest: all else of its bytes."""

    size: int
    rest: bytes
    digits: bytes
    stored: StoredFile


def _split(raw: bytes) -> tuple[bytes, bytes]:
    """(checksums, all else) of a header by our writer; of others (nothing, all)."""
    if not raw.startswith(CHECKSUMS_START):
        return b"", raw
    end = raw.find(b'"', len(CHECKSUMS_START))
    return raw[len(CHECKSUMS_START) : end], raw[end:]


def _header_bytes(fd: int, size: int, path: str) -> bytes:
    if size < 8:
        raise corrupt(path, f"header too small: the file has {size} bytes")
    length = int.from_bytes(read_at(fd, 8, 0, path), "little")
    if length > MAX_HEADER_BYTES:
        raise corrupt(
            path, f"header too large: {length} bytes; is it a safetensors file, not a pointer to one?"
        )
    if 8 + length > size:
        raise corrupt(path, f"invalid header length: {length} bytes in a file of {size}")
    raw = read_at(fd, length, 8, path)
    if len(raw) != length:
        raise corrupt(path, "it was truncated while it was read")
    return raw


def _parse(raw: bytes, size: int, path: str) -> StoredFile:
    header = parse_json(raw, path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt(path, "__metadata__ is not a map of strings")
    tensors = [_entry(name, entry, path) for name, entry in header.items()]
    tensors.sort(key=itemgetter(0, 1))
    expected = 0
    for begin, end, name, _, _ in tensors:
        if begin != expected:
            raise corrupt(path, f"invalid offset: {name} starts at byte {begin}, not at {expected}")
        expected = end
    data_start = 8 + len(raw)
    if data_start + expected != size:
        raise corrupt(
            path, f"incomplete metadata: it describes {data_start + expected} bytes, the file has {size}"
        )
    columns = Columns([t[2] for t in tensors], [t[3] for t in tensors], [t[4] for t in tensors])
    checksums = _checksums(metadata.get(CHECKSUMS_KEY), columns.names, path)
    return StoredFile(Manifest.of(columns, checksums), [data_start + t[0] for t in tensors], path)


def read_at(fd: int, size: int, offset: int, path: str) -> bytes:
    """Up to `size` bytes of an open file. Raises UpdateRefused (FILE_CORRUPT): it cannot be read."""
    try:
        return os.pread(fd, size, offset)
    except OSError as error:
        raise corrupt(path, f"it cannot be read: {os.strerror(error.errno or 0)}") from error


def corrupt(path: str, what: str) -> UpdateRefused:
    """The refusal of a file that cannot be right."""
    return UpdateRefused(Reason.FILE_CORRUPT, f"{path}: {what}")


def parse_json(raw: bytes, path: str) -> dict[str, Any]:
    """A JSON object without repeated keys, all of whose texts can be written as UTF-8."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is there twice")
        return found

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique)
        if b"\\u" in raw:  # an escape may be half of a surrogate pair, which could be sent to nobody
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise corrupt(path, "invalid JSON: not an object")
    return value


def _checksums(text: str | None, names: Sequence[str], path: str) -> Sequence[int | None]:
    """Per tensor its checksum; nothing if the file has none."""
    if text is None:
        return ()
    if not text.startswith("{"):
        return _numbers(text.encode(), len(names), path)
    try:
        by_name = {
            name: int(digits, 16) & (1 << 64) - 1 for name, digits in parse_json(text.encode(), path).items()
        }
    except (TypeError, ValueError) as error:
        raise corrupt(path, f"{CHECKSUMS_KEY} is not a map of hexadecimal numbers") from error
    return [by_name.get(name) for name in names]


def _numbers(digits: bytes, count: int, path: str) -> list[int]:
    """`count` numbers of 16 hexadecimal digits each."""
    try:
        words = bytes.fromhex(digits.decode())
    except ValueError as error:
        raise corrupt(path, f"{CHECKSUMS_KEY} is not hexadecimal: {error}") from error
    if not len(digits) == 2 * len(words) == 16 * count:  # white space between digits counts for nothing
        raise corrupt(
            path, f"{CHECKSUMS_KEY} has {len(digits)} digits for {count} tensors, which are 16 each"
        )
    return list(struct.unpack(f">{count}Q", words))


def _entry(name: str, entry: Any, path: str) -> tuple[int, int, str, str, tuple[int, ...]]:
    """(begin, end, name, dtype, shape) of one entry, checked by itself."""
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
    return begin, end, name, dtype, tuple(shape)


def _are_sizes(value: Any) -> bool:
    # A bool is an int, but of another type.
    return isinstance(value, list) and all([type(item) is int and 0 <= item < _MAX_SIZE for item in value])
