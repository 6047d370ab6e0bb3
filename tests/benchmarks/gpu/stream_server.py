"""The floor of the gRPC stream: servers that only count bytes, as processes, and their client.

python -m tests.benchmarks.gpu.stream_server raw|protobuf|aio
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc

from rollout_engine.v1 import weights_pb2 as pb
from tests.children import obey

METHOD = "/floor.Floor/Stream"
CHUNK_BYTES = (4 << 20) - 4096
REPEATS = 5
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
)
Request = pb.UpdateWeightsFromTensorRequest


def _count(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _size(message: Any) -> int:
    return len(message) if isinstance(message, bytes) else len(message.chunk.data)


def _sync_total(messages: Iterator[Any], context: grpc.ServicerContext) -> bytes:
    return _count(sum(_size(message) for message in messages))


async def _aio_total(messages: Any, context: Any) -> bytes:
    total = 0
    async for message in messages:
        total += _size(message)
    return _count(total)


def _handlers(kind: str, behaviour: Callable) -> grpc.GenericRpcHandler:
    parse = None if kind == "raw" else Request.FromString
    method = grpc.stream_unary_rpc_method_handler(behaviour, request_deserializer=parse)
    return grpc.method_handlers_generic_handler("floor.Floor", {"Stream": method})


def serve(kind: str) -> int:
    """Start the server of one kind in this process; gives its port."""
    if kind == "aio":
        return _serve_aio()
    server = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
    server.add_generic_rpc_handlers((_handlers(kind, _sync_total),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _alive.append(server)
    return port


_alive: list[grpc.Server] = []
"""A server ends with its last reference."""


def _serve_aio() -> int:
    ports: list[int] = []
    started = threading.Event()

    async def run() -> None:
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((_handlers("aio", _aio_total),))
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        started.set()
        await server.wait_for_termination()

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    started.wait(30)
    return ports[0]


def client_rate(kind: str, addresses: Sequence[str], nbytes: int) -> float:
    """Bytes per second of streams to all addresses at once, of together about `nbytes`: the median of
    REPEATS after a warm-up.
    """
    data = bytes(CHUNK_BYTES)
    num_chunks = max(1, nbytes // CHUNK_BYTES // len(addresses))

    def messages() -> Iterator[Any]:
        for index in range(num_chunks):
            if kind == "raw":
                yield data
            else:
                yield Request(chunk=pb.TensorChunk(tensor=index, offset=0, data=data))

    def send(channel: grpc.Channel) -> None:
        serialise = None if kind == "raw" else Request.SerializeToString
        answer = channel.stream_unary(METHOD, request_serializer=serialise)(messages())
        assert int.from_bytes(answer, "little") == num_chunks * CHUNK_BYTES

    taken = []
    with ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(where, OPTIONS)) for where in addresses]
        pool = stack.enter_context(ThreadPoolExecutor(len(channels)))
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            list(pool.map(send, channels))
            taken.append(time.perf_counter() - start)
    return len(addresses) * num_chunks * CHUNK_BYTES / statistics.median(taken[1:])


if __name__ == "__main__":
    port = serve(sys.argv[1])
    obey({"port": lambda: port})
