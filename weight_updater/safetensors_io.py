"""Directories of safetensors files: read and checked whole before anything else, written atomically.

A checkpoint is `model.safetensors`, or `model.safetensors.index.json` and the files that it names; if both
are there, the single file is the checkpoint. The index is not trusted: what it names must lie in the
directory (or in a root that the caller trusts), symbolic links included, and is not opened otherwise.

Our writer gives shards names that were never used before and moves the index last, so a reader sees
the old checkpoint or the new one, never some of each. A writer that is killed leaves what it had written
under a temporary name; the next one removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from weight_updater.arena import DTYPE_NAMES
from weight_updater.checksum import checksums as tensor_checksums
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.manifest import Columns
from weight_updater.packing import PackedBytes, together
from weight_updater.requests import Manifest, TensorSpec
from weight_updater.safetensors_header import (
    DTYPE_CODES,
    FileIdentity,
    Headers,
    StoredFile,
    corrupt,
    file_layout,
    header,
    open_regular,
    parse_json,
    read_at,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
"""As PEFT saves an adapter; read where a directory holds nothing else."""

_MAX_INDEX_BYTES = 1 << 28
_WRITE_BYTES = 16 << 20  # copied at a time from a device or a strided tensor
_BUFFER_BYTES = 1 << 20  # small tensors are written together
_TEMPORARY = re.compile(r"\.rollsync-[0-9a-f]{16}\.tmp\Z")
_LOCKED_WITHIN_S = 60.0
"""Nobody needs longer from creating a temporary file to locking it."""
_OWN_SHARD = re.compile(r"model-\d{5}-of-\d{5}-[0-9a-f]{16}\.safetensors\Z")


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint whose headers were checked. Close it, or use `with`.

    manifest: of all tensors, by file, then by place in the file. stored: the same by file.
    files: real path -> open descriptor.
    """

    directory: str
    manifest: Manifest
    stored: tuple[StoredFile, ...]
    files: dict[str, int]
    identities: dict[str, FileIdentity]

    def check_unchanged(self) -> None:
        """Refuse (FILE_CORRUPT) if a file was written to, replaced or removed since it was opened."""
        for path, identity in self.identities.items():
            try:
                now = FileIdentity.of(os.stat(path, follow_symlinks=False))
            except OSError:
                now = None
            if now != identity:
                raise corrupt(
                    path, "it changed while it was read; write a checkpoint to a new place and rename it"
                )

    def close(self) -> None:
        for fd in self.files.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self.files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_headers(directory: str, roots: Sequence[str] = ()) -> list[tuple[TensorSpec, str, int]]:
    """(tensor spec, file, offset of its data in the file) of each tensor of a checkpoint, checked whole.

    Args and errors as for `open_checkpoint`.
    """
    with open_checkpoint(directory, roots) as checkpoint:
        return [
            (spec, stored.file, offset)
            for stored in checkpoint.stored
            for spec, offset in zip(stored.manifest.tensors, stored.offsets, strict=True)
        ]


def open_checkpoint(directory: str, roots: Sequence[str] = (), headers: Headers | None = None) -> Checkpoint:
    """Open all files of a checkpoint and check their headers and the index against each other.

    Args:
        roots: directories outside of `directory` in which its files may lie (through symbolic links).
        headers: saves parsing headers again that have not changed.

    Raises:
        UpdateRefused: FILE_NOT_FOUND, FILE_CORRUPT, PATH_FORBIDDEN, or INVALID_UPDATE (a dtype that no
            update may bring), each naming the file.
    """
    if "\0" in directory or not os.path.isdir(directory):
        raise UpdateRefused(Reason.FILE_NOT_FOUND, f"{directory!r} is not a directory on the engine's host")
    base = os.path.realpath(directory)
    allowed = [base, *(os.path.realpath(root) for root in roots)]
    checkpoint = Checkpoint(base, Manifest(()), (), {}, {})
    headers = headers or Headers()
    headers.start()
    try:
        present = [name for name in (SINGLE, INDEX, ADAPTER) if os.path.lexists(os.path.join(base, name))]
        if present and present[0] != INDEX:
            return _open_single(checkpoint, present[0], allowed, headers)
        return _open_sharded(checkpoint, allowed, headers)
    except BaseException:
        checkpoint.close()
        raise


def _open_single(checkpoint: Checkpoint, file: str, allowed: Sequence[str], headers: Headers) -> Checkpoint:
    path = confined(checkpoint.directory, file, allowed)
    stored = _read_file(checkpoint, path, headers)
    return replace(checkpoint, manifest=stored.manifest, stored=(stored,))


def _open_sharded(checkpoint: Checkpoint, allowed: Sequence[str], headers: Headers) -> Checkpoint:
    base = checkpoint.directory
    index_path = confined(base, INDEX, allowed)
    weight_map = _read_index(checkpoint, index_path)
    # All names are checked before the first is opened.
    paths = {file: confined(base, file, allowed) for file in sorted(set(weight_map.values()))}
    if len(set(paths.values())) < len(paths):
        raise corrupt(index_path, "it names one file twice, by way of a link or in another spelling")
    stored: list[StoredFile] = []
    for file, path in paths.items():
        found = _read_file(checkpoint, path, headers)
        for name in found.manifest.columns.names:
            if weight_map.get(name) != file:
                raise corrupt(path, f"it holds {name}, which {INDEX} does not place there")
        stored.append(found)
    manifest = headers.joined(stored)
    missing = weight_map.keys() - set(manifest.columns.names)
    if missing:
        name = min(missing)
        raise corrupt(paths[weight_map[name]], f"it lacks {name}, which {INDEX} places there")
    opened = replace(checkpoint, manifest=manifest, stored=tuple(stored))
    opened.check_unchanged()  # so that all these files were there at one moment
    return opened


def _read_file(checkpoint: Checkpoint, path: str, headers: Headers) -> StoredFile:
    fd, identity = open_regular(path, path)
    checkpoint.files[path] = fd
    checkpoint.identities[path] = identity
    return headers.read(fd, identity.size, path)


def _read_index(checkpoint: Checkpoint, path: str) -> dict[str, str]:
    """Tensor name -> file of the index; both are strings, nothing more is known of them."""
    if not os.path.lexists(path):
        others: list[str] = []
        with contextlib.suppress(OSError):  # it may be gone by now, or not to be listed
            others = sorted(n for n in os.listdir(checkpoint.directory) if n.endswith(".safetensors"))
        hint = f"; it holds {', '.join(others[:3])}, is the writer still at work?" if others else ""
        raise UpdateRefused(
            Reason.FILE_NOT_FOUND, f"{checkpoint.directory} holds neither {SINGLE} nor {INDEX}{hint}"
        )
    fd, identity = open_regular(path, path)
    checkpoint.files[path] = fd
    checkpoint.identities[path] = identity
    if identity.size > _MAX_INDEX_BYTES:
        raise corrupt(path, f"an index of {identity.size} bytes")
    weight_map = parse_json(read_at(fd, identity.size, 0, path), path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise corrupt(path, "weight_map is missing or empty")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise corrupt(path, "weight_map is not a map of tensor names to file names")
    return weight_map


def confined(base: str, file: str, allowed: Sequence[str]) -> str:
    """The real path of `file` in `base`; PATH_FORBIDDEN if it leaves all of `allowed`. Opens nothing."""
    parts = file.split("/")
    if "\0" in file or os.path.isabs(file) or not parts[-1] or ".." in parts:
        raise UpdateRefused(
            Reason.PATH_FORBIDDEN, f"{INDEX} names {file!r}; files must lie in the checkpoint's directory"
        )
    path = os.path.realpath(os.path.join(base, file))
    if not any(os.path.commonpath([root, path]) == root for root in allowed):
        raise UpdateRefused(
            Reason.PATH_FORBIDDEN, f"{file!r} in {base} is a link that leaves the checkpoint's directory"
        )
    return path


def save_weights(
    directory: str,
    tensors: Iterable[tuple[str, torch.Tensor]] | PackedBytes,
    *,
    max_shard_bytes: int = 5 << 30,
    checksums: bool = True,
) -> None:
    """Write a checkpoint, replacing one that is there, at one moment.

    Args:
        directory: made if it is missing.
        tensors: (name, tensor) of any device and strides, float64, float32, bfloat16 or float16. At most
            `max_shard_bytes` of them (or the largest one) are held at a time. Or their bytes, where they lie.
        checksums: keep each tensor's checksum in its file's metadata.

    Raises:
        ValueError: a name that comes twice, no tensor at all, or another dtype.
    """
    os.makedirs(directory, exist_ok=True)
    _remove_abandoned(directory)
    temporary: list[str] = []
    weight_map: dict[str, int] = {}
    try:
        with contextlib.ExitStack() as held:  # open files and their locks, which say that we are alive
            if isinstance(tensors, PackedBytes) and sum(tensors.columns.sizes) <= max_shard_bytes:
                temporary.append(_temporary_in(directory))
                _write_packed(held, temporary[0], tensors, checksums)
                _publish(directory, temporary, weight_map)
                return
            for shard in _shards(tensors, max_shard_bytes):
                for name, tensor in shard:
                    if name in weight_map:
                        raise ValueError(f"{name} is to be saved twice")
                    if tensor.dtype not in DTYPE_NAMES:
                        raise ValueError(
                            f"{name} is {tensor.dtype}; weights are saved as {', '.join(DTYPE_CODES)}"
                        )
                    weight_map[name] = len(temporary)
                temporary.append(_temporary_in(directory))
                _write_file(held, temporary[-1], shard, checksums)
            if not temporary:
                raise ValueError(f"no tensors to save in {directory}")
            _publish(directory, temporary, weight_map)
    finally:
        for path in temporary:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _temporary_in(directory: str) -> str:
    return os.path.join(directory, f".rollsync-{secrets.token_hex(8)}.tmp")


def _shards(
    tensors: Iterable[tuple[str, torch.Tensor]] | PackedBytes, max_shard_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    shard: list[tuple[str, torch.Tensor]] = []
    nbytes = 0
    for name, tensor in tensors.tensors() if isinstance(tensors, PackedBytes) else tensors:
        if shard and nbytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, nbytes = [], 0
        shard.append((name, tensor.detach() if tensor.requires_grad else tensor))
        nbytes += tensor.nbytes
    if shard:
        yield shard


def _remove_abandoned(directory: str) -> None:
    """Remove the temporary files of writers that were killed: those that nobody holds a lock on."""
    for name in filter(_TEMPORARY.match, os.listdir(directory)):
        path = os.path.join(directory, name)
        # Another writer may be as quick; and a file system without locks tells nothing, so nothing goes.
        with contextlib.suppress(OSError), open(path, "rb+") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > _LOCKED_WITHIN_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)


def _write_file(
    held: contextlib.ExitStack, path: str, shard: list[tuple[str, torch.Tensor]], checksums: bool
) -> None:
    columns = Columns(
        [name for name, _ in shard],
        [DTYPE_NAMES[tensor.dtype] for _, tensor in shard],
        [tuple(tensor.shape) for _, tensor in shard],
    )
    values = tensor_checksums([tensor for _, tensor in shard]) if checksums else []
    order, entries = file_layout(columns)
    parts = (part for index in order for part in _row_major_bytes(shard[index][1]))
    _write(held, path, header(entries, [values[index] for index in order] if checksums else []), parts)


def _write_packed(held: contextlib.ExitStack, path: str, packed: PackedBytes, checksums: bool) -> None:
    order, entries = _known_layout(packed.columns)
    parts = together([packed.arrays[index] for index in order], _BUFFER_BYTES)
    if not checksums:
        _write(held, path, header(entries, []), parts)
        return
    # One thread writes, so others hash meanwhile; a header is as long with any sums.
    with ThreadPoolExecutor(1, thread_name_prefix="hash-packed") as pool:
        values = pool.submit(packed.checksums)
        blank = header(entries, [0] * len(order))
        _write(held, path, blank, parts, lambda: header(entries, [values.result()[i] for i in order]))


_known_layout = lru_cache(maxsize=4)(file_layout)
"""Mostly the same tensors are saved again and again."""


def _write(
    held: contextlib.ExitStack,
    path: str,
    head: bytes,
    parts: Iterable[memoryview],
    last: Callable[[], bytes] | None = None,
) -> None:
    """Write and sync a file, which stays open and locked as long as `held` does.

    Args:
        last: what takes the place of `head`, and is as long, once all parts are written.
    """
    file = held.enter_context(open(path, "xb", buffering=_BUFFER_BYTES))  # noqa: SIM115 - `held` closes it
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.write(head)
    for part in parts:
        file.write(part)
    if last is not None:
        file.seek(0)
        file.write(last())
    file.flush()
    os.fsync(file.fileno())


def _row_major_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = tensor.reshape(-1)  # copies a strided tensor, once
    if tensor.nbytes <= _WRITE_BYTES:
        yield flat.contiguous().cpu().view(torch.uint8).numpy().data
        return
    step = _WRITE_BYTES // tensor.element_size()
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step].contiguous().cpu()
        yield part.view(torch.uint8).numpy().data


def _publish(directory: str, temporary: list[str], weight_map: dict[str, int]) -> None:
    """Give the files their names, what readers look for first last, and remove what they replace."""
    single, index = os.path.join(directory, SINGLE), os.path.join(directory, INDEX)
    own_names: list[str] = []
    if len(temporary) == 1:
        os.replace(temporary[0], single)
        stale = [INDEX]
    else:
        token = secrets.token_hex(8)
        own_names = [
            f"model-{i + 1:05d}-of-{len(temporary):05d}-{token}.safetensors" for i in range(len(temporary))
        ]
        for path, name in zip(temporary, own_names, strict=True):
            os.replace(path, os.path.join(directory, name))
        content = {
            "metadata": {"total_size": sum(os.path.getsize(os.path.join(directory, n)) for n in own_names)},
            "weight_map": {name: own_names[shard] for name, shard in weight_map.items()},
        }
        temporary.append(_temporary_in(directory))
        with open(temporary[-1], "x") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary[-1], index)
        stale = [SINGLE]
    stale += [n for n in os.listdir(directory) if _OWN_SHARD.match(n) and n not in own_names]
    for name in stale:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
