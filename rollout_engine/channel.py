"""Frames between the front process and the engine process: 4-byte little-endian length, then bytes.

The engine's side is threads (the front's is asyncio, in server/engine_client.py).
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

from rollout_engine import messages

HEADER = struct.Struct("<I")


class Channel:
    """One end of a stream socket; `send` may be called by any thread, `frames` by one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._stream = sock.makefile("rb", buffering=1 << 20)
        self._send_lock = threading.Lock()

    def send(self, event: messages.Event) -> None:
        """Send one event whole. A front that is gone is noticed by `frames`, so it is not an error here."""
        payload = messages.encoder.encode(event)
        try:
            with self._send_lock:
                self._sock.sendall(HEADER.pack(len(payload)) + payload)
        except (BrokenPipeError, ConnectionResetError):
            return

    def frames(self) -> Iterator[bytes]:
        """Yield the payload of each frame until the other end closes or dies."""
        while len(header := self._read(HEADER.size)) == HEADER.size:
            (length,) = HEADER.unpack(header)
            payload = self._read(length)
            if len(payload) < length:
                return
            yield payload

    def _read(self, num_bytes: int) -> bytes:
        try:
            data: bytes = self._stream.read(num_bytes)
        except ConnectionResetError:  # the other end was killed with messages that it had not read yet
            return b""
        return data

    def commands(self) -> Iterator[messages.Command]:
        """Yield decoded commands until the front closes or dies."""
        for payload in self.frames():
            yield messages.command_decoder.decode(payload)
