"""An engine's side of an NCCL group: buckets are received straight into the arena where they fit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weight_updater.buckets import BucketPlan, Piece
from weight_updater.device_copies import Copies, copies_to
from weight_updater.device_sink import DeviceSink
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.meeting import Member
from weight_updater.nccl import Build, NcclGroup, Work, build_nccl
from weight_updater.requests import InitGroup


class ByteSink(Protocol):
    """What a receiver writes to; the bytes it gives are overwritten in the order of the copies."""

    def write(self, tensor_index: int, byte_offset: int, data: torch.Tensor) -> None: ...

    def write_whole(self, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor) -> None: ...

    def flush(self) -> None:
        """Until all that was written lies in its place, and what it came from may change."""
        ...


class NcclReceiver:
    """One group that this engine joined. One thread at a time; `kill` by any.

    Args:
        request: checked already.
        device: of the weights.
        build: makes the process group.
        copies: order what is put away from a buffer, where a sink has no order of its own.
    """

    def __init__(
        self,
        request: InitGroup,
        device: torch.device,
        *,
        build: Build = build_nccl,
        copies: Callable[[torch.device], Copies] = copies_to,
    ) -> None:
        self.request = request
        self.member = Member(
            request.group_name,
            request.master_address,
            request.master_port,
            request.rank,
            request.world_size,
            request.timeout_s,
            "nccl",
        )
        self._device = device
        self._build = build
        self._copies = copies
        self._group: NcclGroup | None = None
        self._buffers = torch.empty(0, dtype=torch.uint8)  # kept: the next update is cut like the last one

    def join(self) -> None:
        """Rendezvous; blocks.

        Raises:
            UpdateRefused: TIMEOUT, PEER_LOST or INVALID_UPDATE.
        """
        self._group = NcclGroup(self.member, self._device, build=self._build)

    def alive(self) -> bool:
        """Whether rank 0 is still there."""
        return self._group is not None and self._group.rank_0_lives()

    def receive(
        self,
        plan: BucketPlan,
        sink: ByteSink,
        wanted: Collection[int],
        timeout_s: float,
        limit: float | None,
    ) -> None:
        """Agree with the other ranks, receive all buckets, and wait until every rank has done so.

        Args:
            wanted: tensors that the sink takes.
            timeout_s: seconds for each wait. limit: `time.monotonic()` at which all must be done, or None.

        Raises:
            HeaderRefused (MANIFEST_MISMATCH), which leaves the group usable.
            UpdateRefused: TIMEOUT or PEER_LOST, or what the sink raises. Nothing is on its way any more.
        """
        group = self._group
        assert group is not None, "the engine joins first"

        def wait_s() -> float:
            return timeout_s if limit is None else max(0.0, min(timeout_s, limit - time.monotonic()))

        with group.on_device():
            buckets = _Buckets(self, group, plan, sink, set(wanted), wait_s)
            group.agree(plan, wait_s())
            buckets.receive()
        group.finish(wait_s())

    def buffers(self, size: int) -> list[torch.Tensor]:
        """Two device buffers of `size` bytes, for buckets that fit nowhere as they are.

        Raises:
            UpdateRefused (NO_MEMORY): the device has no room for them.
        """
        if self._buffers.numel() != 2 * size:
            self._buffers = torch.empty(0, dtype=torch.uint8)
            try:
                self._buffers = torch.empty(2 * size, dtype=torch.uint8, device=self._device)
            except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
                raise UpdateRefused(
                    Reason.NO_MEMORY,
                    f"no room on {self._device} for two buffers of {size} bytes, which buckets need that do "
                    f"not lie as the arena does; choose smaller bucket_bytes ({error})",
                ) from error
        return list(self._buffers.view(2, size))

    def copies_of(self, sink: ByteSink) -> Copies:
        """The order in which bytes are put away."""
        return sink.copies if isinstance(sink, DeviceSink) else self._copies(self._device)

    def give_up(self, text: str) -> None:
        """Leave after telling the other ranks why."""
        if self._group is not None:
            self._group.abort(text)
        self.close()

    def kill(self) -> None:
        """End whatever runs. ANY THREAD; whoever waits for it gets an error soon."""
        if self._group is not None:
            self._group.abort("the group was destroyed")

    def close(self) -> None:
        """Leave the group and give everything back; harmless twice."""
        if self._group is not None:
            self._group.close()
        self._buffers = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class _Coming:
    """A bucket whose broadcast is under way. data: a buffer, or None if it comes to where it belongs."""

    bucket: int
    pieces: list[Piece]
    work: Work
    data: torch.Tensor | None


class _Buckets:
    """The buckets of one update: queues their broadcasts, and puts away what came into a buffer.

    The buffers are taken here, before the other ranks count on this one.
    """

    def __init__(
        self,
        receiver: NcclReceiver,
        group: NcclGroup,
        plan: BucketPlan,
        sink: ByteSink,
        wanted: set[int],
        wait_s: Callable[[], float],
    ) -> None:
        self._receiver = receiver
        self._group = group
        self._plan = plan
        self._sink = sink
        self._wanted = wanted
        self._wait_s = wait_s
        self._copies = receiver.copies_of(sink)
        self._coming: deque[_Coming] = deque()
        self._claimed: list[Piece] = []
        self._num_buffered = 0
        self._straight = [self._place(bucket) for bucket in range(len(plan))]
        self._buffers: list[torch.Tensor] = []
        if any(place is None for place in self._straight):
            size = min(plan.bucket_bytes, plan.total_bytes)
            self._buffers = receiver.buffers(size)
            if isinstance(sink, DeviceSink):
                sink.extra_bytes += 2 * size

    def receive(self) -> None:
        """All of them. After an error the communicator is aborted, so that nothing comes late."""
        if not isinstance(self._sink, DeviceSink):
            self._run()
            return
        with self._sink.stoppable(lambda: self._group.abort("the update ended")):
            self._run()

    def _run(self) -> None:
        try:
            for bucket in range(len(self._plan)):
                self._start(bucket)
            while self._coming:
                self._settle()
        except BaseException as error:
            self._group.abort(str(error) or type(error).__name__)
            raise
        finally:
            if isinstance(self._sink, DeviceSink):
                self._sink.landed(self._claimed)
            self._sink.flush()

    def _place(self, bucket: int) -> torch.Tensor | None:
        """Where a bucket is received to as it is; None if it has to come into a buffer."""
        if not isinstance(self._sink, DeviceSink):
            return None
        pieces = self._plan.pieces(bucket)
        if not all(piece.tensor in self._wanted for piece in pieces):
            return None
        return self._sink.in_place(pieces, self._plan.size(bucket))

    def _start(self, bucket: int) -> None:
        pieces, size = self._plan.pieces(bucket), self._plan.size(bucket)
        straight = self._straight[bucket]
        if straight is not None:
            assert isinstance(self._sink, DeviceSink)
            self._sink.claim(pieces)
            self._claimed += pieces
        into = self._next_buffer()[:size] if straight is None else straight
        with self._copies.current():  # behind what was put away from the buffer
            work = self._group.broadcast(into, self._wait_s())
        self._coming.append(_Coming(bucket, pieces, work, into if straight is None else None))

    def _next_buffer(self) -> torch.Tensor:
        """The one of two buffers whose bytes were put away first."""
        while sum(coming.data is not None for coming in self._coming) >= 2:
            self._settle()
        self._num_buffered += 1
        return self._buffers[self._num_buffered % 2]

    def _settle(self) -> None:
        """Wait for the oldest broadcast; put its bytes away if it came into a buffer."""
        oldest = self._coming.popleft()
        with self._copies.current():
            self._group.wait(oldest.work, oldest.bucket, self._wait_s())
            if oldest.data is not None:
                self._put_away([p for p in oldest.pieces if p.tensor in self._wanted], oldest.data)

    def _put_away(self, pieces: list[Piece], data: torch.Tensor) -> None:
        whole = [piece for piece in pieces if self._plan.is_whole(piece)]
        self._sink.write_whole([p.tensor for p in whole], [p.position for p in whole], data)
        for piece in pieces:
            if not self._plan.is_whole(piece):
                self._sink.write(
                    piece.tensor, piece.start, data[piece.position : piece.position + piece.size]
                )
