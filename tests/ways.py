"""The four paths into an engine at a desk (tests/desk.py), each with a sender of its own in this process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import msgspec
import torch

from rollout_engine import messages as m
from tests.desk import WAIT_S, Chunks, Desk, chunks_of
from weight_updater.arena import DTYPE_NAMES
from weight_updater.checksum import checksum
from weight_updater.errors import UpdateError
from weight_updater.groups import SenderGroup
from weight_updater.meeting import listen
from weight_updater.requests import (
    BeginUpdate,
    FromDisk,
    FromDistributed,
    FromIpc,
    FromTensor,
    InitGroup,
    Manifest,
    Path,
    Staging,
    TensorSpec,
    UpdateReply,
)
from weight_updater.safetensors_io import save_weights
from weight_updater.shm import SharedSegment

Tensors = Mapping[str, torch.Tensor]

WAYS = ("disk", "distributed", "stream", "segment", "ipc")
"""`stream` and `segment` are the tensor path's two."""
STAGINGS = (Staging.DEVICE, Staging.HOST, Staging.NONE)
LOOPBACK = "127.0.0.1"
BUCKET_BYTES = 4096
KEPT_SEGMENTS = 8
"""An offer counts on its segment; no test has more of them open at a time."""
BEGIN_S = 0.01
"""How long a broadcast waits for its engine to refuse the update at begin; then the group can be kept."""


def manifest_of(tensors: Tensors, *, checksums: bool = True) -> Manifest:
    return Manifest(
        tuple(
            TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape), checksum(t) if checksums else None)
            for n, t in tensors.items()
        )
    )


def free_port() -> int:
    with listen(LOOPBACK, 0) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Offer:
    """Tensors on their way: what to begin with, and the call that brings them.

    start(update_id, begin): the UpdateWeightsFrom... call under way, all of its sender's part included.
    """

    begin: BeginUpdate
    start: Callable[[str, BeginUpdate | None], Future[m.Reply]]
    chunks: Callable[[], Chunks] | None = field(default=None)

    def send(self, update_id: str, begin: BeginUpdate | None = None) -> UpdateReply:
        return msgspec.convert(self.start(update_id, begin).result(WAIT_S).result, UpdateReply)


class Ways:
    """Senders to one desk; what they hold is kept from push to push. Use `with`."""

    def __init__(self, desk: Desk, folder: FilePath) -> None:
        self.desk = desk
        self._folder = folder
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(4)
        self._segments: list[SharedSegment] = []
        self._group: SenderGroup | None = None
        self._group_name = ""
        self._sending: tuple[Future[None], Future[m.Reply]] | None = None

    def __enter__(self) -> Ways:
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave_if_alone()
        if self._group is not None:
            self._group.close()
        self._pool.shutdown()
        for segment in self._segments:
            segment.close()
            segment.unlink()

    def push(self, way: str, tensors: Tensors, **fields: Any) -> UpdateReply:
        """Begin, send and commit in one call."""
        checksums = bool(fields.pop("checksums_came", True))
        offer = self.offer(way, tensors, checksums=checksums)
        return offer.send("", replace(offer.begin, **fields))

    def push_in_steps(self, way: str, tensors: Tensors, **fields: Any) -> UpdateReply:
        """Begin, send and commit, each in a call of its own."""
        offer = self.offer(way, tensors)
        begun = self.desk.begin(replace(offer.begin, **fields))
        offer.send(begun.update_id)
        return self.desk.commit(begun.update_id)

    def offer(self, way: str, tensors: Tensors, *, checksums: bool = True) -> Offer:
        """Put the bytes where they will be fetched."""
        if way == "disk":
            return self._on_disk(tensors, checksums)
        manifest = manifest_of(tensors, checksums=checksums)
        if way == "stream":
            begin = BeginUpdate(Path.TENSOR, manifest=manifest)
            chunks = lambda: chunks_of(tensors, 1024)  # noqa: E731
            return Offer(begin, lambda uid, one: self._stream(uid, one, chunks()), chunks)
        if way == "distributed":
            return self._broadcast(tensors, manifest)
        while len(self._segments) >= KEPT_SEGMENTS:
            old = self._segments.pop(0)
            old.close()
            old.unlink()
        segment = SharedSegment.create(manifest.packed_offsets()[1] or 1)
        self._segments.append(segment)
        fill(segment, tensors)
        if way == "segment":
            begin = BeginUpdate(Path.TENSOR, manifest=manifest)
            request = lambda uid: FromTensor(uid, segment.descriptor)  # noqa: E731
            return Offer(begin, lambda uid, one: self.desk.start_update(request(uid), one))
        begin = BeginUpdate(Path.IPC, manifest=manifest)
        lend = lambda uid: FromIpc(uid, (segment.descriptor,))  # noqa: E731
        return Offer(begin, lambda uid, one: self.desk.start_update(lend(uid), one))

    def _on_disk(self, tensors: Tensors, checksums: bool) -> Offer:
        directory = str(self._folder / f"push-{next(self._numbers)}")
        save_weights(directory, list(tensors.items()), checksums=checksums)
        begin = BeginUpdate(Path.DISK, directory=directory)
        return Offer(begin, lambda uid, one: self.desk.start_update(FromDisk(uid, directory), one))

    def _stream(self, update_id: str, one: BeginUpdate | None, chunks: Chunks) -> Future[m.Reply]:
        call = self.desk.start_update(FromTensor(update_id), one)
        self._pool.submit(self.desk.feed, call, chunks)
        return call

    def _broadcast(self, tensors: Tensors, manifest: Manifest) -> Offer:
        self.join()
        begin = BeginUpdate(Path.DISTRIBUTED, manifest=manifest, bucket_bytes=BUCKET_BYTES)

        def broadcast(call: Future[m.Reply]) -> None:
            wait([call], BEGIN_S)
            if call.done():
                return  # refused at its begin, so nobody listens
            assert self._group is not None
            with contextlib.suppress(UpdateError):  # the engine's reply says what went wrong
                self._group.broadcast(manifest, tensors.values(), BUCKET_BYTES)

        def start(update_id: str, one: BeginUpdate | None) -> Future[m.Reply]:
            call = self.desk.start_update(FromDistributed(update_id, self._group_name), one)
            self._sending = self._pool.submit(broadcast, call), call
            return call

        return Offer(begin, start)

    def _leave_if_alone(self) -> None:
        """A broadcast whose engine refused before it listened would wait for it: end the group, as a trainer
        does.
        """
        if self._sending is None:
            return
        sending, call = self._sending
        self._sending = None
        refused = call.exception(WAIT_S) is not None
        if refused and not sending.done():
            assert self._group is not None
            self._group.close()
            self.desk.call(m.DestroyWeightsGroup, group_name=self._group_name)
        sending.result(WAIT_S)

    def join(self) -> None:
        """Make the process group, unless the engine still has it."""
        self._leave_if_alone()
        if self._group_name in self.desk.updater.groups.names:
            return
        if self._group is not None:
            self._group.close()
        self._group_name = f"g{next(self._numbers)}"
        port = free_port()
        request = InitGroup(self._group_name, LOOPBACK, port, 1, 2, "gloo", WAIT_S)
        joined = self.desk.start(m.InitWeightsGroup, request=request)
        self._group = SenderGroup(self._group_name, LOOPBACK, port, 2, WAIT_S)
        assert joined.result(WAIT_S).result == {"backend": "gloo"}


def fill(segment: SharedSegment, tensors: Tensors) -> None:
    """Write tensors in order, each at a multiple of 256 bytes."""
    offsets, _ = manifest_of(tensors, checksums=False).packed_offsets()
    for offset, tensor in zip(offsets, tensors.values(), strict=True):
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        segment.buf[offset : offset + len(data)] = data


@contextlib.contextmanager
def ways_to(desk: Desk, folder: FilePath) -> Iterator[Ways]:
    with Ways(desk, folder) as made:
        yield made
