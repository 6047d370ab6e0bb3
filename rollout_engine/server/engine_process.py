"""The engine process as the front sees it: spawned here, one socket, frames in and out, and how it ended.

A frame is a 4-byte little-endian length and that many bytes: the configuration as JSON first, then
messages of rollout_engine.messages as msgpack.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from rollout_engine.config import ServeConfig

ENGINE_COMMAND = (sys.executable, "-m", "rollout_engine.engine_main")
PRIVATE_KEYS = {"token", "tls_cert", "tls_key", "tls_client_ca", "port", "metrics_port", "metrics_log"}
HEADER_BYTES = 4


def engine_config(config: ServeConfig) -> bytes:
    """The configuration for the engine as JSON: without the token, the keys and the address."""
    loopback = {"host": "127.0.0.1", "metrics_host": "127.0.0.1"}
    return config.model_copy(update=loopback).model_dump_json(exclude=PRIVATE_KEYS).encode()


def describe_exit(returncode: int) -> str:
    """How a process ended, in words: its exit code, or the signal that killed it."""
    if returncode >= 0:
        return f"the engine process exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"the engine process was killed by {name}"


class FrameProtocol(asyncio.Protocol):
    """Cuts the byte stream into frames and gathers the frames written in one turn of the loop.

    Args:
        on_frame: called with each whole frame.
        on_lost: called once when the other end is gone.
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._received = bytearray()
        self._outbox: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start = 0
        while len(received) - start >= HEADER_BYTES:
            end = start + HEADER_BYTES + int.from_bytes(received[start : start + HEADER_BYTES], "little")
            if len(received) < end:
                break
            self._on_frame(bytes(received[start + HEADER_BYTES : end]))
            start = end
        del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def write(self, frame: bytes) -> None:
        """Send one frame; nothing happens once the other end is gone."""
        if self._transport is None:
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outbox += (len(frame).to_bytes(HEADER_BYTES, "little"), frame)

    def flush(self) -> None:
        """Send what was gathered, without waiting for the end of the turn."""
        if self._transport is not None and self._outbox:
            self._transport.writelines(self._outbox)
        self._outbox.clear()

    def close(self) -> None:
        """Close this end; the engine reads EOF and exits."""
        if self._transport is not None:
            self.flush()
            self._transport.close()


class EngineProcess:
    """The child process and its socket. The child dies with this process: its socket reads EOF."""

    def __init__(
        self, process: asyncio.subprocess.Process, protocol: FrameProtocol, handover: socket.socket
    ) -> None:
        self._process = process
        self._protocol = protocol
        self._handover = handover
        self.write = protocol.write
        self.flush = protocol.flush

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def spawn(
        cls,
        config: ServeConfig,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[], None],
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> EngineProcess:
        """Start `command --fd N --receivers-fd M` and send it the configuration.

        The child gets no ROLLSYNC_* variable (the token may be one) and a session of its own, so that
        Ctrl-C reaches the front alone, which lets running requests finish.
        """
        ours, theirs = socket.socketpair()
        handover, their_handover = socket.socketpair()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ROLLSYNC_")}
        with theirs, their_handover:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(theirs.fileno()),
                "--receivers-fd",
                str(their_handover.fileno()),
                pass_fds=(theirs.fileno(), their_handover.fileno()),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(lambda: FrameProtocol(on_frame, on_lost), sock=ours)
        protocol.write(engine_config(config))
        return cls(process, protocol, handover)

    def lend(self, sock: socket.socket) -> None:
        """Give the engine a socket to a receiver; this process may close its own copy then.

        Raises:
            OSError: the engine is gone.
        """
        socket.send_fds(self._handover, [b"r"], [sock.fileno()])

    async def exit_reason(self, timeout_s: float) -> str:
        """How the process ended, waiting up to `timeout_s` for it to be gone."""
        try:
            return describe_exit(await asyncio.wait_for(self._process.wait(), timeout_s))
        except TimeoutError:
            return "the engine process closed its connection"

    async def wait(self, timeout_s: float) -> bool:
        """True once the process is gone."""
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self, grace_s: float) -> None:
        """Close the socket and wait for the process to exit; kill it after `grace_s`."""
        self._protocol.close()
        self._handover.close()
        if not await self.wait(grace_s):
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
