"""Path "disk": a directory of safetensors, read by several threads straight into the sink.

Headers are read twice: when the update begins (`read_manifest`), and when its bytes are read (`receive`),
where they must still be the same. A file that is written to in between or meanwhile refuses the update.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from weight_updater.arena import WeightTarget
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.plan import conflict, plan_update
from weight_updater.requests import FromDisk, Manifest, TensorSpec
from weight_updater.safetensors_header import corrupt
from weight_updater.safetensors_io import Checkpoint, open_checkpoint
from weight_updater.sink import Sink

CHUNK_BYTES = 4 << 20
"""Bytes per read and per call of the sink; each thread holds one buffer of this size."""

MAX_THREADS = 8


class ByteSink(Protocol):
    """What `receive` writes to; called by several threads at once, the buffer is reused on return."""

    def write(self, tensor_index: int, byte_offset: int, data: torch.Tensor) -> None: ...


def allowed_directory(directory: str, roots: Sequence[str]) -> str:
    """The real path of `directory`, if it is one of `roots` or lies under one.

    Raises:
        UpdateRefused (PATH_FORBIDDEN): with one text for whatever is wrong, so that it tells nothing about
            which files exist.
    """
    if "\0" not in directory and os.path.isabs(directory):
        path = os.path.realpath(directory)
        if any(
            os.path.commonpath([os.path.realpath(root), path]) == os.path.realpath(root) for root in roots
        ):
            return path
    raise UpdateRefused(
        Reason.PATH_FORBIDDEN,
        "the directory is not under one of the engine's weight roots; give an absolute path under one, or "
        "start the engine with another root",
    )


def read_manifest(directory: str) -> Manifest:
    """What `directory` would bring: one TensorSpec per tensor, with the checksums its files carry.

    Raises:
        UpdateRefused: as for `safetensors_io.open_checkpoint`.
    """
    with open_checkpoint(directory) as checkpoint:
        return checkpoint.manifest


def receive(
    request: FromDisk,
    manifest: Manifest,
    sink: ByteSink,
    *,
    needed: Collection[int] | None = None,
    num_threads: int = 0,
    pin: bool = False,
) -> None:
    """Read every needed tensor of `request.directory` into `sink`; blocks. WORKER.

    Args:
        manifest: what `read_manifest` gave when the update began; the files must still agree.
        needed: indexes of the tensors to read (`Plan.needed`); None reads all.
        num_threads: 0 means one per core, up to 8.
        pin: read through pinned buffers, for a sink on a GPU.

    Raises:
        UpdateRefused: FILE_CORRUPT if a file changed, was truncated or cannot be read; what
            `open_checkpoint` raises; whatever the sink raises.
    """
    with open_checkpoint(request.directory) as checkpoint:
        _check_agrees(checkpoint, manifest)
        _read(checkpoint, sink, needed, num_threads, pin)
        checkpoint.check_unchanged()


def load_directory(target: WeightTarget, directory: str, *, num_threads: int = 0) -> Manifest:
    """Fill `target` from a checkpoint, in place: the first load, before anything is served.

    The same rules match names as in an update. Files of a Hugging Face cache may be links into its blobs.
    Checksums in the files are compared.

    Returns:
        the manifest of what was loaded.

    Raises:
        UpdateRefused: as for `receive`; MANIFEST_MISMATCH naming missing or unknown tensors and shapes;
            CHECKSUM_MISMATCH. After an error of reading, `target` holds part of the checkpoint.
    """
    real = os.path.realpath(directory)
    snapshots = os.path.dirname(real)
    roots = [os.path.dirname(snapshots)] if os.path.basename(snapshots) == "snapshots" else []
    with open_checkpoint(directory, roots) as checkpoint:
        manifest = checkpoint.manifest
        plan = plan_update(target, manifest, partial=False, merged=False)
        hashing = any(tensor.checksum is not None for tensor in manifest.tensors)
        sink = Sink(plan, target.arena, target.buffer, hashing=hashing, find_nonfinite=False)
        _read(checkpoint, sink, plan.needed, num_threads, pin=target.device.type == "cuda")
        checkpoint.check_unchanged()
    for index in plan.needed:
        tensor = manifest.tensors[index]
        if tensor.checksum is not None and sink.received_checksum(index) != tensor.checksum:
            raise UpdateRefused(
                Reason.CHECKSUM_MISMATCH,
                f"{tensor.name} in {directory} has checksum {sink.received_checksum(index):016x}, its file "
                f"says {tensor.checksum:016x}; the file is damaged",
            )
    for twin, writer in plan.twins.items():
        ours, theirs = sink.slot_checksum(twin), sink.slot_checksum(writer)
        if ours != theirs:
            a, b = manifest.tensors[twin], manifest.tensors[writer]
            raise UpdateRefused(Reason.MANIFEST_MISMATCH, conflict(a, b, ours, theirs))
    target.finalise()
    return manifest


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes [start, start + size) of a tensor; they lie at `position` of an open file."""

    tensor: int
    start: int
    size: int
    fd: int
    position: int
    file: str


def _check_agrees(checkpoint: Checkpoint, manifest: Manifest) -> None:
    found = checkpoint.manifest
    if found == manifest:
        return
    before, now = _first_difference(manifest.tensors, found.tensors)
    raise corrupt(
        checkpoint.directory,
        f"it changed since the update began: {_describe(before)} became {_describe(now)}; begin again",
    )


def _first_difference(
    before: Sequence[TensorSpec], now: Sequence[TensorSpec]
) -> tuple[TensorSpec | None, TensorSpec | None]:
    for a, b in zip(before, now, strict=False):
        if a != b:
            return a, b
    shorter = min(len(before), len(now))
    return (before[shorter] if shorter < len(before) else None, now[shorter] if shorter < len(now) else None)


def _describe(spec: TensorSpec | None) -> str:
    if spec is None:
        return "nothing"
    checksum = "none" if spec.checksum is None else f"{spec.checksum:016x}"
    return f"{spec.name} ({spec.dtype} {list(spec.shape)}, checksum {checksum})"


def _read(
    checkpoint: Checkpoint, sink: ByteSink, needed: Collection[int] | None, num_threads: int, pin: bool
) -> None:
    wanted = range(len(checkpoint.tensors)) if needed is None else sorted(needed)
    pieces = iter(_pieces(checkpoint, wanted))
    turn = threading.Lock()
    failed = threading.Event()

    def work() -> None:
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pin)
        view = buffer.numpy().data
        while not failed.is_set():
            with turn:
                piece = next(pieces, None)
            if piece is None:
                return
            try:
                _fill(view[: piece.size], piece)
                sink.write(piece.tensor, piece.start, buffer[: piece.size])
            except BaseException:
                failed.set()  # the others stop after their piece; the error is raised below
                raise

    num_threads = num_threads or min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="read-weights") as pool:
        workers = [pool.submit(work) for _ in range(num_threads)]
    for worker in workers:
        worker.result()


def _pieces(checkpoint: Checkpoint, wanted: Collection[int]) -> list[_Piece]:
    pieces = []
    for index in wanted:
        stored = checkpoint.tensors[index]
        nbytes, fd = stored.spec.nbytes, checkpoint.files[stored.file]
        for start in range(0, nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, nbytes - start)
            pieces.append(_Piece(index, start, size, fd, stored.offset + start, stored.file))
    return pieces


def _fill(view: memoryview, piece: _Piece) -> None:
    filled = 0
    while filled < piece.size:
        try:
            count = os.preadv(piece.fd, [view[filled:]], piece.position + filled)
        except OSError as error:
            raise corrupt(piece.file, f"it cannot be read: {os.strerror(error.errno or 0)}") from error
        if not count:
            raise corrupt(piece.file, "it was truncated while it was read")
        filled += count
