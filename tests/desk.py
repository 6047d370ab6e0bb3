"""An engine in this process: its real loop on a thread, and this test where its front would be.

Everything but gRPC, the tokenizer and the second process is real, so a test costs milliseconds, may break
a part of the engine on purpose, and may look at what no RPC shows. What crosses is encoded as between
processes.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path as FilePath
from typing import Any

import msgspec
import torch

from rollout_engine import messages as m
from rollout_engine.channel import Channel
from rollout_engine.config import ServeConfig
from rollout_engine.engine import Engine
from rollout_engine.engine_main import build
from rollout_engine.runner.model_runner import ModelRunner
from rollout_engine.sampling import SamplingParams
from rollout_engine.server.status import error_from
from weight_updater.requests import BeginReply, BeginUpdate, FromTensor, ShmSegment, UpdateReply
from weight_updater.shm import SharedSegment
from weight_updater.updater import WeightUpdater

WAIT_S = 20.0
SEEDS = itertools.count(1)

Chunks = Iterable[tuple[int | None, int, Any]]


class Running:
    """One request, as its outputs come."""

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self.parts: list[list[m.SequenceOutput]] = [[] for _ in range(n)]
        self._num_left = n
        self._changed = threading.Condition()
        self._refused: m.ErrorInfo | None = None

    def take(self, event: m.SequenceOutput | m.RequestRefused) -> None:
        """READER."""
        with self._changed:
            if isinstance(event, m.RequestRefused):
                self._refused, self._num_left = event.error, 0
            else:
                self.parts[event.index].append(event)
                self._num_left -= bool(event.finish_reason)
            self._changed.notify_all()

    def until(self, holds: Callable[[], bool], seconds: float = WAIT_S) -> None:
        """Wait for outputs until something holds; a refusal is raised."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._refused is not None or holds(), seconds), "no output"
        if self._refused is not None:
            raise error_from(self._refused)

    def started(self, num_tokens: int = 1) -> Running:
        """Wait for the first tokens of every completion."""
        self.until(lambda: all(len(self.tokens(i)) >= num_tokens for i in range(len(self.parts))))
        return self

    def end(self, seconds: float = WAIT_S) -> Running:
        """Wait for the last output of every completion."""
        self.until(lambda: self._num_left == 0, seconds)
        return self

    @property
    def ended(self) -> bool:
        return self._num_left == 0

    def tokens(self, index: int = 0) -> list[int]:
        return [token for part in self.parts[index] for token in part.token_ids]

    def logprobs(self, index: int = 0) -> list[float]:
        return [value for part in self.parts[index] for value in part.logprobs]

    def spans(self, index: int = 0) -> list[m.Span]:
        """The span of each token."""
        found: list[m.Span] = []
        for part in self.parts[index]:
            if not part.token_ids:
                continue  # the end of an aborted one
            ends = [*(span.start for span in part.spans[1:]), len(found) + len(part.token_ids)]
            for span, end in zip(part.spans, ends, strict=True):
                found += [span] * (end - len(found))
        return found

    def labels(self, index: int = 0) -> list[int]:
        """The weight version of each token."""
        return [span.weight_version for span in self.spans(index)]

    def adapter_labels(self, index: int = 0) -> list[tuple[str, int]]:
        """The adapter of each token, and its version."""
        return [(span.adapter, span.adapter_version) for span in self.spans(index)]

    def finish(self, index: int = 0) -> str:
        return self.parts[index][-1].finish_reason

    @property
    def last(self) -> m.SequenceOutput:
        return self.parts[0][-1]

    @property
    def num_cached(self) -> int:
        """Prompt tokens whose KV the first completion found."""
        return self.parts[0][0].num_cached_tokens


class Desk:
    """Commands and what comes back. Use `with desk(...)`."""

    def __init__(self, config: ServeConfig) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._sockets = ours, theirs
        self._calls: dict[int, Future[m.Reply]] = {}
        self._call_ids = itertools.count(1)
        self._requests: dict[str, Running] = {}
        self._request_ids = itertools.count()
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._owners: dict[int, int] = {}  # slot -> the call that it is lent to
        self.state: m.Snapshot | None = None
        self.replies: list[m.Reply] = []
        self.engine: Engine = build(config, Channel(theirs))
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._loop = threading.Thread(target=self.engine.run, daemon=True)
        self._loop.start()
        assert self._ready.wait(WAIT_S), "the engine does not get ready"

    @property
    def runner(self) -> ModelRunner:
        return self.engine._runner

    @property
    def updater(self) -> WeightUpdater:
        return self.engine._updater

    @property
    def version(self) -> int:
        return self.updater.version

    @property
    def now(self) -> m.Snapshot:
        """The last snapshot."""
        assert self.state is not None
        return self.state

    # ------------------------------------------------------------ calls

    def start(self, kind: type[m.Call], **fields: Any) -> Future[m.Reply]:
        """Send a call; its reply, or the error it was refused with."""
        call_id = next(self._call_ids)
        future: Future[m.Reply] = Future()
        self._calls[call_id] = future
        self._channel.send(kind(call_id=call_id, **fields))  # type: ignore[arg-type]
        future.call_id = call_id  # type: ignore[attr-defined]
        return future

    def call(self, kind: type[m.Call], **fields: Any) -> Any:
        """Send a call and wait for its result."""
        return self.start(kind, **fields).result(WAIT_S).result

    def begin(self, request: BeginUpdate) -> BeginReply:
        return msgspec.convert(self.call(m.Begin, request=request), BeginReply)

    def commit(self, update_id: str) -> UpdateReply:
        return msgspec.convert(self.call(m.Commit, update_id=update_id), UpdateReply)

    def abort_update(self, update_id: str) -> bool:
        return bool(self.call(m.AbortUpdate, update_id=update_id)["found"])

    def start_update(self, request: Any = None, begin: BeginUpdate | None = None) -> Future[m.Reply]:
        """Start an update_weights_from_* call by the type of its request; chunks are sent with `feed`."""
        path = type(request).__name__.removeprefix("From").lower()
        return self.start(m.Update, begin=begin, **{path: request})

    def update(self, request: Any, begin: BeginUpdate | None = None) -> UpdateReply:
        reply = self.start_update(request, begin).result(WAIT_S)
        return msgspec.convert(reply.result, UpdateReply)

    def stream(self, update_id: str, chunks: Chunks, begin: BeginUpdate | None = None) -> UpdateReply:
        """The tensor path: a stream of (tensor or None, offset, bytes)."""
        call = self.start_update(FromTensor(update_id), begin)
        self.feed(call, chunks)
        return msgspec.convert(call.result(WAIT_S).result, UpdateReply)

    def feed(self, call: Future[m.Reply], chunks: Chunks, *, complete: bool = True) -> None:
        """Send the chunks of a call that was started; ends early if the call does."""
        call_id: int = call.call_id  # type: ignore[attr-defined]
        for tensor, offset, data in chunks:
            view = memoryview(data).cast("B")
            for start in range(0, len(view), self._slot_bytes):
                piece = view[start : start + self._slot_bytes]
                slot = self._slots.get(timeout=WAIT_S)
                self._owners[slot] = call_id
                at = slot * self._slot_bytes
                self._ring.buf[at : at + len(piece)] = piece
                self._channel.send(m.Chunk(call_id, tensor, offset + start, slot, len(piece)))  # type: ignore[arg-type]
            if call.done():
                return
        self._channel.send(m.EndOfChunks(call_id, complete))  # type: ignore[arg-type]

    # ------------------------------------------------------------ requests

    def submit(
        self,
        prompt: list[int],
        *,
        request_id: str = "",
        min_version: int = 0,
        adapter: str = "",
        min_adapter_version: int = 0,
        **params: Any,
    ) -> Running:
        """Start a request; greedy unless told otherwise."""
        values = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "seed": 0} | params
        sampling = SamplingParams(**values)
        name = request_id or f"r{next(self._request_ids)}"
        running = self._requests[name] = Running(name, sampling.n)
        self._channel.send(
            m.SubmitRequest(  # type: ignore[arg-type]
                name,
                prompt,
                sampling,
                min_version=min_version,
                adapter=adapter,
                min_adapter_version=min_adapter_version,
            )
        )
        return running

    def generate(self, prompt: list[int], max_tokens: int = 8, **params: Any) -> Running:
        return self.submit(prompt, max_tokens=max_tokens, **params).end()

    def abort(self, *request_ids: str) -> None:
        self._channel.send(m.AbortRequests(list(request_ids)))  # type: ignore[arg-type]

    def until(self, holds: Callable[[m.Snapshot], bool], what: str, seconds: float = WAIT_S) -> None:
        """Wait for a snapshot of which something holds."""
        deadline = time.monotonic() + seconds
        while not holds(self.now):
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}; {self.now}"
            time.sleep(0.005)

    def idle(self) -> m.Snapshot:
        """Wait until nothing is live, and check the books of pages."""
        self.until(lambda state: not state.num_running + state.num_waiting, "the engine is idle")
        self.call(m.GetInfo)  # a turn of the loop later
        self.engine._scheduler.check()
        return self.now

    # ------------------------------------------------------------ the other end

    def _read(self) -> None:
        for payload in self._channel.frames():
            event = m.event_decoder.decode(payload)
            match event:
                case m.Reply():
                    self.replies.append(event)
                    for slot in list(self._owners):  # an ended call reads no slot any more
                        self._give_back(slot, event.call_id)
                    future = self._calls.pop(event.call_id)
                    if event.error is None:
                        future.set_result(event)
                    else:
                        future.set_exception(error_from(event.error))
                case m.Outputs():
                    for output in event.outputs:
                        self._requests[output.request_id].take(output)
                case m.RequestRefused():
                    self._requests[event.request_id].take(event)
                case m.ChunkTaken():
                    self._give_back(event.slot, event.call_id)
                case m.Ready():
                    self._open_ring(event)
                case m.Snapshot():
                    self.state = event
                    self._ready.set()

    def _give_back(self, slot: int, call_id: int) -> None:
        if self._owners.get(slot) == call_id:
            del self._owners[slot]
            self._slots.put(slot)

    def _open_ring(self, ready: m.Ready) -> None:
        self._slot_bytes = ready.ring_slot_bytes
        size = ready.ring_slots * ready.ring_slot_bytes
        self._ring = SharedSegment.open(ShmSegment(ready.ring_name, size, ""))
        for slot in range(ready.ring_slots):
            self._slots.put(slot)

    def close(self) -> None:
        """Stop the engine as its front would, and see that the loop ends."""
        self._channel.send(m.Shutdown())  # type: ignore[arg-type]
        self._loop.join(WAIT_S)
        assert not self._loop.is_alive(), "the engine's loop does not end"
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._reader.join(WAIT_S)
        self._ring.close()


def num_threads() -> int:
    """Threads of this process, but for workers of engines' pools: they start, up to a limit, whenever none
    of those that are there says at that very moment that it is idle.
    """
    return sum(not thread.name.startswith("rollsync-worker") for thread in threading.enumerate())


@contextlib.contextmanager
def desk(model: FilePath, **config: Any) -> Iterator[Desk]:
    """An engine that serves `model`; on the CPU in float32, if nothing else is said."""
    values = {"dtype": "float32", "device": "cpu", "num_pages": 128} | config
    opened = Desk(ServeConfig(model=model, **values))
    try:
        yield opened
    finally:
        opened.close()


def chunks_of(
    tensors: Mapping[str, torch.Tensor], chunk_bytes: int = 1 << 20
) -> Iterator[tuple[int, int, Any]]:
    """The bytes of tensors as the tensor path sends them."""
    for index, tensor in enumerate(tensors.values()):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for offset in range(0, len(data), chunk_bytes):
            yield index, offset, data[offset : offset + chunk_bytes]
