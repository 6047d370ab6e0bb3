"""Frames between the front and its engine: cut where they end, gathered where that costs nobody time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_engine.server.engine_process import FrameProtocol


class Transport(asyncio.WriteTransport):
    """Notes what is written together."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def writelines(self, list_of_data: Any) -> None:
        self.written.append(b"".join(list_of_data))

    def close(self) -> None:
        self.written.append(b"closed")


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_frames_come_whole_however_the_bytes_do(step: int) -> None:
    payloads = [b"one", b"", b"three" * 50]
    frames: list[bytes] = []
    protocol = FrameProtocol(frames.append, lambda: None)
    stream = b"".join(map(frame, payloads))
    for start in range(0, len(stream), step):
        protocol.data_received(stream[start : start + step])
    assert frames == payloads


def test_frames_of_one_turn_are_written_together_at_its_end_or_when_somebody_waits() -> None:
    async def turns() -> list[bytes]:
        transport = Transport()
        protocol = FrameProtocol(lambda frame: None, lambda: None)
        protocol.connection_made(transport)
        protocol.write(b"a")
        protocol.write(b"b")
        assert transport.written == []
        await asyncio.sleep(0)
        assert transport.written == [frame(b"a") + frame(b"b")]
        protocol.write(b"c")
        protocol.write(b"call")
        protocol.flush()
        assert transport.written[1:] == [frame(b"c") + frame(b"call")]
        await asyncio.sleep(0)  # the end of the turn has nothing left to write
        protocol.write(b"last")
        protocol.close()
        await asyncio.sleep(0)
        protocol.connection_lost(None)
        protocol.write(b"nobody is there")
        protocol.flush()
        return transport.written[2:]

    assert asyncio.run(turns()) == [frame(b"last"), b"closed"]


def test_a_call_is_on_its_way_before_its_caller_waits() -> None:
    """The turn ends behind everything else that is due in it."""
    from rollout_engine import messages as m
    from rollout_engine.server.engine_client import EngineClient
    from rollout_engine.server.tally import Tally

    async def call() -> list[type[Any]]:
        transport = Transport()
        protocol = FrameProtocol(lambda frame: None, lambda: None)
        protocol.connection_made(transport)
        client = EngineClient(Tally())
        client._process = protocol  # type: ignore[assignment]  # all that a call needs of it
        seen: list[int] = []
        waiting = asyncio.create_task(client.call(m.GetInfo))
        asyncio.get_running_loop().call_soon(lambda: seen.append(len(transport.written)))
        await asyncio.sleep(0)
        waiting.cancel()
        assert seen == [1]
        return [type(m.command_decoder.decode(transport.written[0][4:]))]

    assert asyncio.run(call()) == [m.GetInfo]
