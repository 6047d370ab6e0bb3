"""A receiver: a process that takes chunk streams at a port of its own, and nothing else. No torch.

    python -m rollout_engine.server.receiver --front-fd N --engine-fd M

The front starts it and tells it how to serve; the engine gives it a ring. It ends when the front closes its
socket. One thread of the interpreter carries a stream, which is why there are several receivers.
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from typing import Any

import grpc
import msgspec

from rollout_engine import messages as m
from rollout_engine.channel import HEADER, Channel
from rollout_engine.errors import EngineError
from rollout_engine.logs import Format, Level, configure, get_log, log_uncaught
from rollout_engine.server import convert
from rollout_engine.server.auth import ThreadedTokenInterceptor, TlsContents
from rollout_engine.server.chunk_wire import ChunkReader, WireChunk, parse
from rollout_engine.server.options import join_address, server_options
from rollout_engine.server.receiver_link import EngineLink
from rollout_engine.server.status import answered
from rollout_engine.server.stream_limits import LimitReports, too_many
from rollout_engine.server.uploads import pieces
from rollout_engine.v1 import weights_pb2 as pb
from weight_updater.heap import keep_freed_buffers
from weight_updater.requests import MAX_STREAMS, BeginUpdate, FromTensor, Path, UpdateReply

log = get_log(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Weights"].full_name
METHOD = "UpdateWeightsFromTensor"
GIL_SWITCH_SECONDS = 0.0005
"""How long one thread may keep the others from the interpreter; Python's own 5 ms is ten chunks."""
MESSAGES_AHEAD = 2
"""Of a stream, that may have come and wait to be passed on."""
REFUSING_THREADS = 4
"""Beside those that carry streams: they tell whom there is no room for."""
STOP_SECONDS = 0.5
"""How long the last answers may take to be sent."""
BREAK_NEWS_SECONDS = 0.05
"""A stream that broke looks like one that ended, until the news of the break arrives a moment later."""


class ReceiverConfig(msgspec.Struct, frozen=True):
    """What the front tells a receiver first.

    first_call_id: of the calls that it makes to the engine.
    max_streams: that may be open at once; one more is refused.
    """

    host: str
    max_message_bytes: int
    first_call_id: int
    max_streams: int = 2 * MAX_STREAMS
    token: str | None = None
    tls: TlsContents | None = None
    log_format: Format = "text"
    log_level: Level = "info"


class ReceiverReady(msgspec.Struct, frozen=True):
    """What it answers."""

    port: int


class _Sign(Enum):
    """What a stream is told beside messages."""

    ENDED = auto()  # the client has no more
    BROKE = auto()  # the client is gone
    ANSWERED = auto()  # by the engine


class Stream:
    """One client's stream, on its way to the engine. The engine's call is open meanwhile; either may end
    first. A chunk waits for a free slot of the ring, and the client's stream with it.

    While one message is copied into the ring, the next is on its way: a thread of its own asks for it.
    """

    def __init__(self, link: EngineLink, tensor: FromTensor, begin: BeginUpdate | None) -> None:
        self._link = link
        self._inbox: queue.SimpleQueue[bytes | _Sign] = queue.SimpleQueue()
        self._room = threading.Semaphore(MESSAGES_AHEAD)
        self._gone = threading.Event()  # the client is; or nobody asks any more
        self._call_id, self._reply = link.begin_update(tensor, begin)

    def run(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> m.Reply:
        """Feed the engine until the stream or the call ends; returns the call's Reply.

        An error of the engine ends the stream early, whatever the client is about to send. When the client
        goes away, the engine is told that the stream broke and nothing else.

        Raises:
            EngineError, UpdateError: what the engine answered, or what is wrong with a message.
        """
        context.add_callback(self._gone.set)
        self._reply.add_done_callback(lambda _: self._inbox.put(_Sign.ANSWERED))
        threading.Thread(target=self._take, args=(messages,), name="take", daemon=True).start()
        try:
            self._feed()
            return self._reply.result()
        finally:
            self._room.release()  # the thread sees that the call has ended when it asks for a message

    def _take(self, messages: Iterator[bytes]) -> None:
        """THREAD. Ask for message after message, a few ahead of those that are passed on."""
        sign = _Sign.BROKE
        try:
            self._room.acquire()
            for message in messages:
                self._inbox.put(message)
                self._room.acquire()
            sign = _Sign.ENDED
        except grpc.RpcError:
            pass
        finally:
            self._inbox.put(sign)

    def _feed(self) -> None:
        """Pass chunks on, and tell the engine how the stream ended."""
        reader, complete = ChunkReader(), False
        try:
            while not isinstance(message := self._inbox.get(), _Sign):
                self._room.release()
                chunk = reader.parse(message)
                if chunk is None:  # the end, whatever becomes of the client now
                    complete = True
                    return
                self._pass_on(chunk)
            if message is _Sign.ENDED:
                complete = not self._gone.wait(BREAK_NEWS_SECONDS)
        finally:
            if not self._reply.done():
                self._link.send(m.EndOfChunks(self._call_id, complete))

    def _pass_on(self, chunk: WireChunk) -> None:
        ring, tensor = self._link.ring, None if chunk.packed else chunk.tensor
        for start, nbytes in pieces(chunk.size, ring.slot_bytes):
            slot = ring.acquire(self._call_id)
            ring.write(slot, chunk.source, chunk.start + start, nbytes)
            if not ring.filled(slot):  # the engine has answered meanwhile
                return
            self._link.send(m.Chunk(self._call_id, tensor, chunk.offset + start, slot, nbytes))


class ReceiverService:
    """The one method that a receiver answers, to so many callers at once."""

    def __init__(self, link: EngineLink, max_streams: int) -> None:
        self._link = link
        self._max_streams = max_streams
        self._free = threading.Semaphore(max_streams)
        self._reports = LimitReports("weight", max_streams)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """By method name. Requests stay as they came: see chunk_wire.py."""
        return {
            METHOD: grpc.stream_unary_rpc_method_handler(
                self._update_from_tensor,
                response_serializer=pb.UpdateWeightsResponse.SerializeToString,
            )
        }

    def _update_from_tensor(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        return answered(context, METHOD, lambda: self._within_limit(messages, context))

    def _within_limit(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> pb.UpdateWeightsResponse:
        if not self._free.acquire(blocking=False):
            self._reports.refused(time.monotonic())
            raise too_many("weight", self._max_streams)
        try:
            return self._run(messages, context)
        finally:
            self._free.release()

    def _run(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> pb.UpdateWeightsResponse:
        header = _header(next(messages, None))
        update_id, begin = convert.target(header, Path.TENSOR)
        tensor = convert.from_tensor(header, update_id)
        if tensor.segment is None:
            reply = Stream(self._link, tensor, begin).run(messages, context)
        else:
            reply = self._link.begin_update(tensor, begin)[1].result()
        return convert.update_response(msgspec.convert(reply.result, UpdateReply))


def _header(message: bytes | None) -> pb.UpdateWeightsFromTensorHeader:
    first = None if message is None else parse(message)
    if not isinstance(first, pb.UpdateWeightsFromTensorRequest) or first.WhichOneof("message") != "header":
        convert.invalid("the first message of the stream", "must be the header")
    return first.header


def serve(config: ReceiverConfig, link: EngineLink) -> tuple[grpc.Server, int]:
    """Start to serve; gives the server and its port.

    Raises:
        RuntimeError: the address cannot be bound.
    """
    threads = config.max_streams + REFUSING_THREADS
    server = grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="stream"),
        interceptors=() if config.token is None else (ThreadedTokenInterceptor(config.token),),
        options=server_options(config.max_message_bytes),
        maximum_concurrent_rpcs=threads,
    )
    server.add_registered_method_handlers(SERVICE, ReceiverService(link, config.max_streams).handlers())
    address = join_address(config.host, 0)
    if config.tls is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, config.tls.credentials())
    server.start()
    return server, port


def main(arguments: list[str] | None = None) -> int:
    """Serve until the front closes its socket. Returns the exit code."""
    parser = argparse.ArgumentParser(description="rollsync's receiver of chunk streams; started by the front")
    parser.add_argument("--front-fd", type=int, required=True)
    parser.add_argument("--engine-fd", type=int, required=True)
    given = parser.parse_args(arguments)
    configure("text", "info", "receiver")  # until it is known how
    log_uncaught()
    sys.setswitchinterval(GIL_SWITCH_SECONDS)
    keep_freed_buffers()
    front = socket.socket(fileno=given.front_fd)
    frames = Channel(front).frames()
    try:
        config = msgspec.json.decode(next(frames), type=ReceiverConfig)
        secrets = [] if config.token is None else [config.token]
        configure(config.log_format, config.log_level, "receiver", secrets=secrets)
        link = EngineLink(Channel(socket.socket(fileno=given.engine_fd)), config.first_call_id)
        server, port = serve(config, link)
    except StopIteration:  # the front went away at once
        return 1
    except (EngineError, RuntimeError) as error:
        log.error("receiver_failed", error=str(error))
        return 1
    link.start()
    answer = msgspec.json.encode(ReceiverReady(port))
    front.sendall(HEADER.pack(len(answer)) + answer)
    for _ in frames:  # nothing more is said
        pass
    server.stop(STOP_SECONDS).wait()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads of calls that still wait for the engine would be waited for
