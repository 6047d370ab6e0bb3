"""AsyncRolloutClient and AsyncWeightsClient: clients.py's methods for asyncio. No torch.

Streams are async iterators; everything else is awaited. A client belongs to the event loop that it was
made in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc.aio

from rollout_engine.v1.rollout_pb2_grpc import RolloutStub
from trainers_adapters import engine_calls, rollout_calls, weights_calls
from trainers_adapters.calls import RETRY_PAUSES_S, Gathered, Stream, Unary
from trainers_adapters.chunk_wire import ChunkStreamStub
from trainers_adapters.connection import CHANNEL_OPTIONS, Address, Tls
from trainers_adapters.errors import RollsyncError, translated

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound="AsyncClient")


class AsyncClient:
    """A channel to one engine; closes with the `async with` block that it was opened in."""

    stub_class: Callable[[Any], Any]

    def __init__(self, address: str, *, token: str | None = None, tls: Tls | None = None) -> None:
        self.address = address
        self._where = Address(address, token, tls)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=CHANNEL_OPTIONS)
        self._stub = type(self).stub_class(self._channel)
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()

    async def __aenter__(self: C) -> C:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _start(self, call: Unary[Any] | Stream[Any] | Gathered[Any]) -> Any:
        if self._closed:
            raise self._is_closed()
        method = getattr(self._stub, call.method)
        return method(call.request, timeout=call.timeout_s, metadata=self._where.metadata)

    def _is_closed(self) -> RollsyncError:
        return RollsyncError("CANCELLED", "CLOSED", f"this client of {self.address} is closed")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """As `translated`; a call that ends because the client is closed cancels nobody's task."""
        try:
            with translated(self.address):
                yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise self._is_closed() from None

    async def _unary(self, call: Unary[R]) -> R:
        pauses = iter(RETRY_PAUSES_S if call.idempotent else ())
        while True:
            try:
                with self._translated():
                    return call.parse(await self._start(call))
            except (RollsyncError, asyncio.CancelledError) as error:
                if call.failure is not None:
                    raise call.failure from None
                if not isinstance(error, RollsyncError):
                    raise
                pause = next(pauses, None)
                if pause is None or not error.unreachable:
                    raise
                await asyncio.sleep(pause)

    async def _gathered(self, call: Gathered[R]) -> R:
        add, result = call.gather()
        with self._translated():
            stream = self._start(call)
            try:
                async for message in stream:
                    add(message)
            finally:
                stream.cancel()  # after the end it does nothing; before it, the engine stops working
        return result()

    async def _stream(self, call: Stream[R]) -> AsyncIterator[R]:
        with self._translated():
            stream = self._start(call)
            try:
                async for message in stream:
                    yield call.parse(message)
            finally:
                stream.cancel()


def unary(build: Callable[P, Unary[R]]) -> Callable[Concatenate[Any, P], Awaitable[R]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        return self._unary(build(*args, **kwargs))

    update_wrapper(method, build)
    return method


def gathered(build: Callable[P, Gathered[R]]) -> Callable[Concatenate[Any, P], Awaitable[R]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        return self._gathered(build(*args, **kwargs))

    update_wrapper(method, build)
    return method


def stream(build: Callable[P, Stream[R]]) -> Callable[Concatenate[Any, P], AsyncIterator[R]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        return self._stream(build(*args, **kwargs))

    update_wrapper(method, build)
    return method


class AsyncRolloutClient(AsyncClient):
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


class AsyncWeightsClient(AsyncClient):
    """The life of a weight update, step by step."""

    stub_class = ChunkStreamStub

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
