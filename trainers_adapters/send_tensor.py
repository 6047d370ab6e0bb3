"""The tensor path, sending side: bytes in the call, or in a shared-memory segment named in it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, ClassVar

from trainers_adapters.chunk_wire import Bytes, Chunk, chunk_message
from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import RollsyncError
from trainers_adapters.segments import PackedSegment
from trainers_adapters.sending import Outgoing, Sender, byte_view
from weight_updater.heap import keep_freed_buffers
from weight_updater.requests import MAX_STREAMS, BeginReply, Path, UpdateReply, align

log = logging.getLogger(__name__)

CHUNK_BYTES = 2 << 20
"""Bytes of a chunk: large for what a message costs, small enough for its copies to stay in the cache."""
MESSAGES_AHEAD = 2
"""That are made while one is sent."""
STOP_SECONDS = 1.0
"""How long a stream that failed waits for the thread that made its messages."""
CONNECT_SECONDS = 3.0
"""How long a receiver that an engine names may take to be reached before the stream does without it."""


class TensorStream(Sender):
    """Client streams of chunks: work wherever gRPC does.

    An engine names receivers for them, processes with ports of their own, and chunks are dealt out to one
    stream at each. Where it names none, or none can be reached, one stream goes to the engine's own port.

    Args:
        chunk_bytes: bytes of a chunk, a multiple of 8; below the engine's max_message_bytes.
        max_streams: to one engine at once; 0 asks it for no receivers.
    """

    path: ClassVar[Path] = Path.TENSOR

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES, max_streams: int = MAX_STREAMS) -> None:
        if chunk_bytes < 8 or chunk_bytes % 8:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be a positive multiple of 8")
        if not 0 <= max_streams <= MAX_STREAMS:
            raise ValueError(f"max_streams is {max_streams}; it must be from 0 to {MAX_STREAMS}")
        self._chunk_bytes = chunk_bytes
        self._max_streams = max_streams
        self._receivers: dict[tuple[str, int], WeightsClient | None] = {}  # None: not to be reached
        self._lock = threading.Lock()
        keep_freed_buffers()

    def stage(self, outgoing: Outgoing, clients: Sequence[WeightsClient]) -> dict[str, Any]:
        return {"num_streams": self._max_streams}

    def send(self, client: WeightsClient, begun: BeginReply, outgoing: Outgoing) -> UpdateReply:
        receivers = self._reachable(client, begun.stream_ports)
        if len(receivers) > 1:
            return self._send_shares(receivers, begun, outgoing)
        with _Ahead(self._chunks(outgoing)) as messages:
            if receivers:
                return _send_to(receivers[0], begun, messages, outgoing)
            left = outgoing.seconds_left
            return client.update_from_tensor(begun.update_id, messages, timeout_s=left)

    def _send_shares(
        self, receivers: Sequence[WeightsClient], begun: BeginReply, outgoing: Outgoing
    ) -> UpdateReply:
        """Deal the chunks out to a stream at each receiver."""
        chunks = _Dealt(self._chunks(outgoing))
        with ThreadPoolExecutor(len(receivers), thread_name_prefix="stream") as pool:
            shares = [pool.submit(_send_to, receiver, begun, chunks, outgoing) for receiver in receivers]
            wait(shares, return_when=FIRST_EXCEPTION)
            chunks.stop()  # all are dealt, or one stream has failed
        for share in shares:
            if (failure := share.exception()) is not None and not isinstance(failure, RollsyncError):
                raise failure  # the source's, rather than what another stream made of it
        return max((share.result() for share in shares), key=lambda reply: reply.num_bytes)

    def close(self) -> None:
        with self._lock:
            for receiver in self._receivers.values():
                if receiver is not None:
                    receiver.close()
            self._receivers.clear()

    def _reachable(self, client: WeightsClient, ports: Sequence[int]) -> list[WeightsClient]:
        """Clients of the receivers at these ports of the engine's host; they are kept for later pushes."""
        keys = [(client.address, port) for port in ports]
        with self._lock:
            gone = [key for key in self._receivers if key[0] == client.address and key not in keys]
            closing = [self._receivers.pop(key) for key in gone]
            unknown = [key for key in keys if key not in self._receivers]
        for old in closing:
            if old is not None:
                old.close()
        new = {key: _connected(client, key[1]) for key in unknown}
        with self._lock:
            self._receivers |= new
            return [found for key in keys if (found := self._receivers.get(key)) is not None]

    def _chunks(self, outgoing: Outgoing) -> Iterator[Chunk]:
        """Large tensors in pieces; small ones together, as many as a chunk holds."""
        offsets, _ = outgoing.manifest.packed_offsets()
        small: list[memoryview] = []
        first = 0  # of the tensors in `small`
        for index, (offset, (_, tensor)) in enumerate(zip(offsets, outgoing.source, strict=True)):
            data = byte_view(tensor)
            large = len(data) > self._chunk_bytes // 2
            if small and (large or offset + len(data) - offsets[first] > self._chunk_bytes):
                yield None, offsets[first], _packed(small)
                small = []
            if large:
                for start in range(0, len(data), self._chunk_bytes):
                    yield index, start, data[start : start + self._chunk_bytes]
            else:
                first = first if small else index
                small.append(data)
        if small:
            yield None, offsets[first], _packed(small)


def _connected(client: WeightsClient, port: int) -> WeightsClient | None:
    """A client of the receiver at a port of the engine's host; None if it cannot be reached."""
    receiver = client.at_port(port)
    if receiver.is_ready(CONNECT_SECONDS):
        return receiver
    receiver.close()
    log.warning("the receiver of %s at port %d cannot be reached; doing without it", client.address, port)
    return None


def _send_to(
    receiver: WeightsClient, begun: BeginReply, chunks: Iterable[Chunk | bytes], outgoing: Outgoing
) -> UpdateReply:
    """One stream at a receiver."""
    left = outgoing.seconds_left
    try:
        return receiver.update_from_tensor(begun.update_id, chunks, says_end=True, timeout_s=left)
    except RollsyncError as error:
        if not error.unreachable:
            raise
        # It answered when the update began, and nothing can have been committed since.
        text = f"the engine's receiver at {receiver.address} hung up ({error.message}); push again"
        raise RollsyncError(error.code, "PEER_LOST", text) from error


def _packed(tensors: Sequence[memoryview]) -> list[Bytes]:
    """Tensors as the bytes of one chunk: each but the first at a multiple of 256 bytes."""
    parts: list[Bytes] = []
    for data in tensors:
        if parts:
            parts.append(bytes(align(len(parts[-1])) - len(parts[-1])))
        parts.append(data)
    return parts


class _Dealt:
    """Chunks that several streams take from; whoever asks first gets the next."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self._lock = threading.Lock()
        self._stopped = False

    def __iter__(self) -> _Dealt:
        return self

    def __next__(self) -> Chunk:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._chunks)

    def stop(self) -> None:
        """Nothing more is dealt out, but for what somebody waits for already."""
        self._stopped = True


class _Ahead:
    """Chunks as messages, made by a thread of its own while the message before is being sent."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self._made: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(MESSAGES_AHEAD)
        self._stopped = False
        self._maker = threading.Thread(target=self._make, name="chunks", daemon=True)

    def __enter__(self) -> _Ahead:
        self._maker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped = True
        self._room.release()
        self._maker.join(STOP_SECONDS)  # a source may wait for something of its own

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> bytes:
        made = self._made.get()
        if made is None:
            raise StopIteration
        if isinstance(made, Exception):
            raise made
        self._room.release()
        return made

    def _make(self) -> None:
        """THREAD. Until the chunks end, or nobody sends them any more."""
        end: Exception | None = None
        try:
            for chunk in self._chunks:
                self._room.acquire()
                if self._stopped:
                    return
                self._made.put(chunk_message(chunk))
        except Exception as error:  # noqa: BLE001 - whoever sends them must learn of it
            end = error
        finally:
            self._made.put(end)


class TensorSegment(Sender):
    """Shared memory: for engines on this host. Bytes are copied into the segment once for all engines.

    The segment is kept for later pushes and removed when the `with` block ends.
    """

    path: ClassVar[Path] = Path.TENSOR

    def __init__(self) -> None:
        self._segment = PackedSegment()

    def stage(self, outgoing: Outgoing, clients: Sequence[WeightsClient]) -> dict[str, Any]:
        self._segment.fill(outgoing)
        return {}

    def send(self, client: WeightsClient, begun: BeginReply, outgoing: Outgoing) -> UpdateReply:
        return client.update_from_tensor(
            begun.update_id, segment=self._segment.descriptor, timeout_s=outgoing.seconds_left
        )

    def close(self) -> None:
        self._segment.close()
