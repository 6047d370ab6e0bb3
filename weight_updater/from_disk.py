"""Path "disk": a directory of safetensors, read by several threads straight into the sink.

Headers are read twice: when the update begins (`read_manifest`), and when its bytes are read (`receive`),
where they must still be the same. A file that is written to in between or meanwhile refuses the update.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from weight_updater.arena import WeightTarget
from weight_updater.device_copies import HostRing, Passage, ring_to
from weight_updater.device_sink import DeviceSink, make_sink
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.plan import conflict, plan_update
from weight_updater.requests import FromDisk, Manifest, TensorSpec
from weight_updater.safetensors_header import FileIdentity, Headers, corrupt
from weight_updater.safetensors_io import Checkpoint, open_checkpoint
from weight_updater.small import Indexes

CHUNK_BYTES = 4 << 20
"""Bytes per read on a CPU; each thread holds one buffer of this size."""

MAX_THREADS = 8
MAX_THREADS_TO_DEVICE = 14
"""Reading from the page cache is copying: it takes many cores to keep up with the link to a GPU."""


class ByteSink(Protocol):
    """What `receive` writes to; called by several threads at once. The buffer is reused on return, or (the
    sink of a device) once its bytes have travelled.
    """

    def write(self, tensor_index: int, byte_offset: int, data: torch.Tensor) -> None: ...

    def write_whole(self, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor) -> None: ...


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
        "start the engine with another (--weights-root)",
    )


def read_manifest(directory: str, headers: Headers | None = None) -> Manifest:
    """What `directory` would bring: one TensorSpec per tensor, with the checksums its files carry.

    Args:
        headers: as for `safetensors_io.open_checkpoint`.

    Raises:
        UpdateRefused: as for `safetensors_io.open_checkpoint`.
    """
    with open_checkpoint(directory, headers=headers) as checkpoint:
        return checkpoint.manifest


def receive(
    request: FromDisk,
    manifest: Manifest,
    sink: ByteSink,
    *,
    needed: Collection[int] | None = None,
    num_threads: int = 0,
    ring: HostRing | None = None,
    headers: Headers | None = None,
    seen: Mapping[str, FileIdentity] | None = None,
) -> dict[str, FileIdentity]:
    """Read every needed tensor of `request.directory` into `sink`; blocks. WORKER.

    Args:
        manifest: what `read_manifest` gave when the update began; the files must still agree.
        needed: indexes of the tensors to read (`Plan.needed`); None reads all.
        num_threads: 0 means one per core, up to 8 (14 for a device).
        ring: page-locked slots to read into, for the sink of a device; None takes the process's own.
        headers: as for `safetensors_io.open_checkpoint`.
        seen: what an earlier reading returned; the files must still be the same.

    Returns:
        real path -> what file was read there.

    Raises:
        UpdateRefused: FILE_CORRUPT if a file changed, was truncated or cannot be read; what
            `open_checkpoint` raises; whatever the sink raises.
    """
    with open_checkpoint(request.directory, headers=headers) as checkpoint:
        _check_agrees(checkpoint, manifest)
        if seen is not None and checkpoint.identities != seen:
            raise corrupt(
                checkpoint.directory,
                "its files changed since they were looked at; begin again",
            )
        _read(checkpoint, sink, needed, num_threads, ring)
        checkpoint.check_unchanged()
        return checkpoint.identities


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
        hashing = any(value is not None for value in manifest.checksums)
        sink = make_sink(plan, target.arena, target.buffer, hashing=hashing, find_nonfinite=False)
        _read(checkpoint, sink, plan.needed, num_threads)
        checkpoint.check_unchanged()
    received = sink.received_checksums(plan.needed) if hashing else []
    for index, value in zip(plan.needed, received, strict=False):
        promised = manifest.checksums[index]
        if promised is not None and value != promised:
            raise UpdateRefused(
                Reason.CHECKSUM_MISMATCH,
                f"{manifest.tensor(index).name} in {directory} has checksum {value:016x}, its file says "
                f"{promised:016x}; the file is damaged",
            )
    for twin, writer in plan.twins.items():
        ours, theirs = sink.slot_checksum(twin), sink.slot_checksum(writer)
        if ours != theirs:
            a, b = manifest.tensor(twin), manifest.tensor(writer)
            raise UpdateRefused(Reason.MANIFEST_MISMATCH, conflict(a, b, ours, theirs))
    target.finalise()
    return manifest


@dataclass(slots=True)
class _Read:
    """One read: `size` bytes at `position` of an open file.

    tensors: whose bytes they are: several whole ones that start at `places` of what is read, or one, from
        its byte `start` on.
    """

    file: str
    fd: int
    position: int
    size: int
    tensors: list[int]
    places: list[int]
    start: int


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
    checkpoint: Checkpoint,
    sink: ByteSink,
    needed: Collection[int] | None,
    num_threads: int,
    ring: HostRing | None = None,
) -> None:
    """Read what is needed into `sink` by several threads; all bytes lie in their places when it returns."""
    wanted = (
        np.arange(len(checkpoint.manifest)) if needed is None else np.array(sorted(needed), dtype=np.int64)
    )
    if isinstance(sink, DeviceSink):
        assert sink.destination is not None
        ring = ring or ring_to(sink.destination.device)
        # The engine's loop and the thread that queues the copies want a core each.
        num_threads = num_threads or max(1, min(MAX_THREADS_TO_DEVICE, (os.cpu_count() or 1) - 2))
        reads = _Reads(checkpoint, wanted, ring.slot_bytes)
        with ring.passage(sink.copies) as passage:
            try:
                _read_to_device(reads, passage, sink, num_threads)
            finally:
                sink.flush()  # before the slots are somebody else's, or the error is told
    else:
        num_threads = num_threads or min(MAX_THREADS, os.cpu_count() or 1)
        reads = _Reads(checkpoint, wanted, CHUNK_BYTES)
        _in_threads([partial(_read_to_host, reads, sink)] * num_threads)


def _read_to_host(reads: _Reads, sink: ByteSink) -> None:
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    view = buffer.numpy().data
    for read in reads.take():
        _fill(view[: read.size], read)
        _give(read, buffer, sink)


def _read_to_device(reads: _Reads, passage: Passage[_Read], sink: DeviceSink, num_threads: int) -> None:
    """Fill slots in `num_threads` threads, and queue their copies in this one."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="read-weights") as pool:
        workers = [pool.submit(_fill_slots, reads, passage) for _ in range(num_threads)]
        try:
            for data, read in passage.arrivals(num_threads):
                _give(read, data, sink)
        finally:
            passage.stop()
    for worker in workers:
        worker.result()


def _fill_slots(reads: _Reads, passage: Passage[_Read]) -> None:
    try:
        for read in reads.take():
            slot = passage.take()
            if slot is None:
                return
            _fill(slot.view[: read.size], read)
            passage.fill(slot, read)
    finally:
        passage.end()


def _give(read: _Read, buffer: torch.Tensor, sink: ByteSink) -> None:
    if len(read.tensors) > 1:
        sink.write_whole(read.tensors, read.places, buffer[: read.size])
    else:
        sink.write(read.tensors[0], read.start, buffer[: read.size])


def _in_threads(work: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(work), thread_name_prefix="read-weights") as pool:
        workers = [pool.submit(one) for one in work]
    for worker in workers:
        worker.result()


class _Reads:
    """The reads of a checkpoint, handed out to threads one by one until one of them fails."""

    def __init__(self, checkpoint: Checkpoint, wanted: Indexes, most_bytes: int) -> None:
        self._left = _plan_reads(checkpoint, wanted, most_bytes)
        self._turn = threading.Lock()
        self._failed = False

    def take(self) -> Iterator[_Read]:
        """Reads for one thread, as long as there are any."""
        while True:
            with self._turn:
                read = None if self._failed else next(self._left, None)
            if read is None:
                return
            done = False
            try:
                yield read
                done = True
            finally:
                self._failed = self._failed or not done  # the others stop after what they are at


def _plan_reads(checkpoint: Checkpoint, wanted: Indexes, most_bytes: int) -> Iterator[_Read]:
    """Cut the wanted tensors into reads of up to `most_bytes`; neighbours in a file share one.

    Args:
        wanted: in order.
    """
    first = 0
    for stored in checkpoint.stored:
        count = len(stored.offsets)
        here = wanted[(wanted >= first) & (wanted < first + count)] - first
        starts = np.array(stored.offsets, dtype=np.int64)[here]
        ends = starts + np.array(stored.manifest.columns.sizes, dtype=np.int64)[here]
        fd = checkpoint.files[stored.file]
        gaps = np.append(np.flatnonzero(starts[1:] != ends[:-1]) + 1, here.size)  # where no neighbour follows
        at = 0
        while at < here.size:
            run = gaps[np.searchsorted(gaps, at, side="right")]
            until = max(at + 1, min(run, np.searchsorted(ends, starts[at] + most_bytes, side="right")))
            start, size = int(starts[at]), int(ends[until - 1] - starts[at])
            tensors, places = (here[at:until] + first).tolist(), (starts[at:until] - start).tolist()
            for done in range(0, size, most_bytes):  # more than one read only of a single tensor
                read = min(most_bytes, size - done)
                yield _Read(stored.file, fd, start + done, read, tensors, places, done)
            at = until
        first += count


def _fill(view: memoryview, read: _Read) -> None:
    filled = 0
    while filled < read.size:
        try:
            count = os.preadv(read.fd, [view[filled:]], read.position + filled)
        except OSError as error:
            raise corrupt(read.file, f"it cannot be read: {os.strerror(error.errno or 0)}") from error
        if not count:
            raise corrupt(read.file, "it was truncated while it was read")
        filled += count
