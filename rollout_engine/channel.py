"""Frames between the engine process and others: 4-byte little-endian length, then bytes.

The engine's side is threads, and so is that of a receiver of chunks (the front's is asyncio, in
server/engine_client.py).
"""

from __future__ import annotations

import contextlib
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

    def send(self, *together: messages.Event | messages.Command) -> None:
        """Send messages whole, in order, and where there are several so that the other end wakes up once.
        An end that is gone is noticed by `frames`, so it is not an error here.
        """
        payloads = [messages.encoder.encode(message) for message in together]
        data = b"".join([part for payload in payloads for part in (HEADER.pack(len(payload)), payload)])
        try:
            with self._send_lock:
                if self._sock.fileno() >= 0:  # else this end was closed: the other one is gone
                    self._sock.sendall(data)
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

    def _read(self, nbytes: int) -> bytes:
        """The next bytes; fewer where the other end closed, or died with something unread."""
        try:
            found: bytes = self._stream.read(nbytes)
        except (ConnectionResetError, ValueError):  # ValueError: this end was closed meanwhile
            return b""
        return found

    def commands(self) -> Iterator[messages.Command]:
        """ENGINE. Yield decoded commands until the other end closes or dies."""
        for payload in self.frames():
            yield messages.command_decoder.decode(payload)

    def events(self) -> Iterator[messages.Event]:
        """RECEIVER. Yield decoded events until the engine closes or dies."""
        for payload in self.frames():
            yield messages.event_decoder.decode(payload)

    def close(self) -> None:
        """Close this end; a thread that reads it ends."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._stream.close()  # the socket stays open as long as this does
        with self._send_lock:  # nobody is to write to what has its descriptor next
            self._sock.close()
