"""RolloutClient and WeightsClient: a running engine in plain Python. No torch, no protobuf outside.

    with RolloutClient("127.0.0.1:50051") as rollout:
        completion, = rollout.generate([1, 2, 3], max_tokens=8)
        print(completion.token_ids, completion.weight_versions)

What each method takes and gives stands where its call is built: rollout_calls.py, engine_calls.py and
weights_calls.py. Every method raises RollsyncError. Clients may be used from several threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from rollout_engine.v1.rollout_pb2_grpc import RolloutStub
from trainers_adapters import engine_calls, rollout_calls, weights_calls
from trainers_adapters.calls import RETRY_PAUSES_S, Gathered, Stream, Unary
from trainers_adapters.chunk_wire import ChunkStreamStub
from trainers_adapters.connection import CHANNEL_OPTIONS, Address, Tls
from trainers_adapters.errors import RollsyncError, translated

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound="Client")

PROBE = "/grpc.health.v1.Health/Check"


class Client:
    """A channel to one engine; closes with the `with` block that it was opened in."""

    stub_class: Callable[[grpc.Channel], Any]

    def __init__(self, address: str, *, token: str | None = None, tls: Tls | None = None) -> None:
        self.address = address
        self._where = Address(address, token, tls)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, tls.credentials(), options=CHANNEL_OPTIONS)
        self._stub = type(self).stub_class(self._channel)
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._channel.close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, call: Unary[Any] | Stream[Any] | Gathered[Any]) -> Any:
        if self._closed:
            raise RollsyncError("CANCELLED", "CLOSED", f"this client of {self.address} is closed")
        method = getattr(self._stub, call.method)
        return method(call.request, timeout=call.timeout_s, metadata=self._where.metadata)

    def _unary(self, call: Unary[R]) -> R:
        pauses = iter(RETRY_PAUSES_S if call.idempotent else ())
        while True:
            try:
                with translated(self.address):
                    return call.parse(self._start(call))
            except RollsyncError as error:
                if call.failure is not None:
                    raise call.failure from None
                pause = next(pauses, None)
                if pause is None or not error.unreachable:
                    raise
                time.sleep(pause)

    def _gathered(self, call: Gathered[R]) -> R:
        add, result = call.gather()
        with translated(self.address):
            stream = self._start(call)
            try:
                for message in stream:
                    add(message)
            finally:
                stream.cancel()  # after the end it does nothing; before it, the engine stops working
        return result()

    def _stream(self, call: Stream[R]) -> Iterator[R]:
        with translated(self.address):
            stream = self._start(call)
            try:
                for message in stream:
                    yield call.parse(message)
            finally:
                stream.cancel()


def unary(build: Callable[P, Unary[R]]) -> Callable[Concatenate[Any, P], R]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._unary(build(*args, **kwargs))

    update_wrapper(method, build)
    return method


def gathered(build: Callable[P, Gathered[R]]) -> Callable[Concatenate[Any, P], R]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._gathered(build(*args, **kwargs))

    update_wrapper(method, build)
    return method


def stream(build: Callable[P, Stream[R]]) -> Callable[Concatenate[Any, P], Iterator[R]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        return self._stream(build(*args, **kwargs))

    update_wrapper(method, build)
    return method


class RolloutClient(Client):
    """Generation, and the engine's own state."""

    stub_class = RolloutStub

    generate = gathered(rollout_calls.generate)
    generate_stream = stream(rollout_calls.generate_stream)
    generate_batch = gathered(rollout_calls.generate_batch)
    generate_batch_stream = stream(rollout_calls.generate_batch_stream)
    score = unary(rollout_calls.score)
    abort = unary(rollout_calls.abort)
    pause = unary(engine_calls.pause)
    resume = unary(engine_calls.resume)
    flush_cache = unary(engine_calls.flush_cache)
    release_memory = unary(engine_calls.release_memory)
    resume_memory = unary(engine_calls.resume_memory)
    info = unary(engine_calls.info)
    watch = stream(engine_calls.watch)


class WeightsClient(Client):
    """The life of a weight update, step by step; push_weights takes all the steps.

    manifest_digests: of the manifests that this engine has seen; push_weights names them by these.
    """

    stub_class = ChunkStreamStub

    def __init__(self, address: str, *, token: str | None = None, tls: Tls | None = None) -> None:
        super().__init__(address, token=token, tls=tls)
        self.manifest_digests: set[str] = set()

    def at_port(self, port: int) -> WeightsClient:
        """A client of the same host, with the same credentials, at another port; the caller closes it."""
        host = self.address.rpartition(":")[0]
        return WeightsClient(f"{host}:{port}", token=self._where.token, tls=self._where.tls)

    def is_ready(self, timeout_s: float) -> bool:
        """Whether somebody listens there; connects, if it is not connected."""
        # A channel that was watched for being ready (grpc.channel_ready_future) takes 0.2 s to close. A call
        # that waits for it is answered by whoever listens, if only by that there is no such method.
        call = self._channel.unary_unary(PROBE)
        try:
            call(b"", timeout=timeout_s, wait_for_ready=True, metadata=self._where.metadata)
        except grpc.RpcError as error:
            return error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        return True

    begin = unary(weights_calls.begin)
    update_from_disk = unary(weights_calls.update_from_disk)
    update_from_distributed = unary(weights_calls.update_from_distributed)
    update_from_tensor = unary(weights_calls.update_from_tensor)
    update_from_ipc = unary(weights_calls.update_from_ipc)
    prepare = unary(weights_calls.prepare)
    commit = unary(weights_calls.commit)
    abort = unary(weights_calls.abort)
    rollback = unary(weights_calls.rollback)
    remove_adapter = unary(weights_calls.remove_adapter)
    renew = unary(weights_calls.renew)
    release = unary(weights_calls.release)
    init_group = unary(weights_calls.init_group)
    destroy_group = unary(weights_calls.destroy_group)
    layout = unary(weights_calls.layout)
    checksums = unary(weights_calls.checksums)
    get_weights = gathered(weights_calls.get_weights)
