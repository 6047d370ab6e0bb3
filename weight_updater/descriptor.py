"""The file in which a trainer describes an arena that an engine is to start on: JSON of plain fields."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from dataclasses import dataclass
from typing import Any, NoReturn

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import CudaIpcRegion, Layout, ShmSegment

MAX_BYTES = 64 << 10
HANDLE_BYTES = 64

_FORMAT = "rollsync-arena-1"


@dataclass(frozen=True, slots=True)
class ArenaDescriptor:
    """region: where the arena lies. layout_digest: of the layout that it has."""

    region: ShmSegment | CudaIpcRegion
    layout_digest: str


def describe(region: ShmSegment | CudaIpcRegion, layout: Layout) -> str:
    """The text of a descriptor file."""
    fields = dataclasses.asdict(region)
    if isinstance(region, CudaIpcRegion):
        fields["handle"] = region.handle.hex()
    kind = "cuda_ipc" if isinstance(region, CudaIpcRegion) else "posix_shm"
    return json.dumps({"format": _FORMAT, "layout": layout.digest(), kind: fields}, indent=1) + "\n"


def read_descriptor(path: str) -> ArenaDescriptor:
    """Read a descriptor file, which must be this user's and no other's to read.

    Raises:
        UpdateRefused: FILE_NOT_FOUND, PATH_FORBIDDEN (somebody else's file), FILE_CORRUPT.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UpdateRefused(
            Reason.FILE_NOT_FOUND, f"the arena's descriptor {path} cannot be read: {error.strerror}"
        ) from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UpdateRefused(
            Reason.PATH_FORBIDDEN,
            f"the arena's descriptor {path} must belong to this user and be closed to others (mode 0600)",
        )
    try:
        return _parse(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UpdateRefused(
            Reason.FILE_CORRUPT,
            f"{path} describes no arena ({error}); write it with AdoptedArena.write_descriptor",
        ) from error


def _parse(fields: Any) -> ArenaDescriptor:
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        _wrong(f"its format is not {_FORMAT}")
    digest = fields["layout"]
    if not isinstance(digest, str):
        _wrong("layout is no string")
    if "posix_shm" in fields:
        return ArenaDescriptor(_segment(fields["posix_shm"]), digest)
    gpu = dict(fields["cuda_ipc"])
    handle = bytes.fromhex(gpu.pop("handle"))
    if len(handle) != HANDLE_BYTES:
        _wrong(f"the handle has {len(handle)} bytes, not {HANDLE_BYTES}")
    region = CudaIpcRegion(handle=handle, owner=_segment(gpu.pop("owner")), **gpu)
    _check(region, {"allocation_id": str, "device_uuid": str, "offset": int, "size": int, "probe_bytes": int})
    if type(region.probe_checksum) not in (int, type(None)):
        _wrong(f"probe_checksum is {region.probe_checksum!r}")
    return ArenaDescriptor(region, digest)


def _segment(fields: Any) -> ShmSegment:
    segment = ShmSegment(**fields)
    _check(segment, {"name": str, "size": int, "allocation_id": str})
    return segment


def _check(value: object, kinds: dict[str, type]) -> None:
    for name, kind in kinds.items():
        found = getattr(value, name)
        right = bool(found) if kind is str else kind is int and not str(found).startswith("-")
        if type(found) is not kind or not right:
            _wrong(f"{name} is {found!r}")


def _wrong(what: str) -> NoReturn:
    raise ValueError(what)
