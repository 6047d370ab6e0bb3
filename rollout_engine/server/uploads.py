"""The tensor path's stream: a client's chunks through the upload ring to the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from rollout_engine import messages as m
from rollout_engine.server.chunk_wire import ChunkReader, unpacked
from rollout_engine.server.engine_client import EngineClient
from rollout_engine.v1 import weights_pb2 as pb
from weight_updater.requests import BeginUpdate, FromTensor

CHUNK_ALIGNMENT = 8
"""Bytes; chunks start at multiples of it (checksums are summed over 64-bit words)."""


def pieces(size: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut bytes into (offset, size) of at most `limit` bytes; every offset is a multiple of 8."""
    step = limit - limit % CHUNK_ALIGNMENT
    for start in range(0, size, step):
        yield start, min(step, size - start)


class Upload:
    """One stream. The engine's Update call is open while chunks are fed; either may end first.

    Back-pressure: a chunk waits for a free slot of the ring, and the client's stream with it.
    """

    def __init__(self, engine: EngineClient, request: FromTensor, begin: BeginUpdate | None) -> None:
        self._engine = engine
        self._call_id, self._reply = engine.begin_call(m.Update, tensor=request, begin=begin)
        self._ended = False
        self._confirming = False

    async def run(
        self,
        messages: AsyncIterator[pb.UpdateWeightsFromTensorRequest],
        confirm_end: Callable[[], Awaitable[None]],
    ) -> m.Reply:
        """Feed the engine until the stream or the call ends; returns the call's Reply.

        An error of the engine ends the stream early. When the client goes away, the engine is told that
        the stream broke and nothing else; its lease cleans up.

        Args:
            messages: what follows the header.
            confirm_end: awaited when `messages` ended; does not return if the client is gone. A stream that
                broke looks like one that ended, until the news of the break arrives a moment later.
        """
        feeding = asyncio.create_task(self._feed(messages, confirm_end))
        try:
            await asyncio.wait((feeding, self._reply), return_when=asyncio.FIRST_COMPLETED)
            if feeding.done() and not self._reply.done():
                feeding.result()  # a bad message ends the call here
                await asyncio.wait({self._reply})
            elif self._confirming:
                # Sending headers is not to be cut off: the call's status would never be sent after that.
                await asyncio.wait({feeding})
            return self._reply.result()
        finally:
            feeding.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # its error was raised above
                await feeding
            if self._reply.done():
                # A chunk may have been sent in the same turn of the loop in which the reply came.
                self._engine.ring.release_all(self._call_id)
            else:
                self._end(complete=False)

    async def _feed(
        self,
        messages: AsyncIterator[pb.UpdateWeightsFromTensorRequest],
        confirm_end: Callable[[], Awaitable[None]],
    ) -> None:
        ring, reader = self._engine.ring, ChunkReader()
        async for message in messages:
            chunk = reader.take(unpacked(message))
            if chunk is None:
                continue  # the end; should anything follow, the reader refuses it
            tensor = None if chunk.packed else chunk.tensor
            for start, nbytes in pieces(chunk.size, ring.slot_bytes):
                slot = await ring.acquire(self._call_id)
                ring.write(slot, chunk.data[start : start + nbytes])
                self._engine.send(m.Chunk(self._call_id, tensor, chunk.offset + start, slot, nbytes))
        self._confirming = True
        await confirm_end()
        self._end(complete=True)

    def _end(self, *, complete: bool) -> None:
        if not self._ended:
            self._ended = True
            self._engine.send(m.EndOfChunks(self._call_id, complete))
