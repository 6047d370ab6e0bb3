"""The front's receivers: processes that take chunk streams, started when the first update asks for them.

    trainer --chunks--> receiver --ring--> engine        the receivers' own ports
    trainer --calls---> front ---messages--> engine      everything else

A receiver that dies takes its streams with it (the engine refuses or tears their update); the next update
finds a new one in its place, at another port.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from rollout_engine.logs import get_log
from rollout_engine.server.auth import TlsContents
from rollout_engine.server.engine_process import FrameProtocol
from rollout_engine.server.receiver import ReceiverConfig, ReceiverReady

if TYPE_CHECKING:
    from rollout_engine.config import ServeConfig

log = get_log(__name__)

RECEIVER_COMMAND = (sys.executable, "-m", "rollout_engine.server.receiver")
START_SECONDS = 20.0
"""How long a receiver may take to serve; an update that asks for it waits for it."""
EXIT_GRACE_S = 2.0
CALL_IDS = 1 << 32
"""Ids of calls to the engine that one receiver may use up; the front has the first so many."""


class Receiver:
    """One process. port: 0 until it serves, and once it is gone."""

    def __init__(self) -> None:
        self.port = 0
        self._serving: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._protocol: FrameProtocol | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, config: ReceiverConfig, lend_to_engine: Callable[[socket.socket], None]) -> None:
        """Start the process and wait until it serves.

        Args:
            lend_to_engine: gives the engine its end of a socket.

        Raises:
            OSError, TimeoutError: it does not.
        """
        front, its_front = socket.socketpair()
        front.setblocking(False)
        loop = asyncio.get_running_loop()
        with its_front:
            _, self._protocol = await loop.create_connection(
                lambda: FrameProtocol(self._on_frame, self._on_lost), sock=front
            )
            engine, its_engine = socket.socketpair()
            with engine, its_engine:
                self._process = await _spawn(its_front.fileno(), its_engine.fileno())
                lend_to_engine(engine)
        self._protocol.write(msgspec.json.encode(config))
        async with asyncio.timeout(START_SECONDS):
            self.port = await self._serving

    def _on_frame(self, frame: bytes) -> None:
        if not self._serving.done():
            self._serving.set_result(msgspec.json.decode(frame, type=ReceiverReady).port)

    def _on_lost(self) -> None:
        self.port = 0
        if not self._serving.done():
            self._serving.set_exception(ConnectionError("it ended before it served"))
            self._serving.exception()  # nobody may wait for it any more

    async def stop(self) -> None:
        """End the process, by force if need be."""
        self.port = 0
        if self._protocol is not None:
            self._protocol.close()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), EXIT_GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


async def _spawn(front_fd: int, engine_fd: int) -> asyncio.subprocess.Process:
    """A receiver with these ends of its sockets; as the engine, without ROLLSYNC_* and in its own session."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ROLLSYNC_")}
    return await asyncio.create_subprocess_exec(
        *RECEIVER_COMMAND,
        "--front-fd",
        str(front_fd),
        "--engine-fd",
        str(engine_fd),
        pass_fds=(front_fd, engine_fd),
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )


class Receivers:
    """All receivers of one engine.

    Args:
        most: how many there may be.
        lend_to_engine: gives the engine its end of a socket to a new one.
    """

    def __init__(
        self,
        config: ServeConfig,
        tls: TlsContents | None,
        lend_to_engine: Callable[[socket.socket], None],
    ) -> None:
        self.most = config.num_stream_receivers
        self._settings = ReceiverConfig(
            host=config.host,
            max_message_bytes=config.max_message_bytes,
            first_call_id=0,
            max_streams=config.max_weight_streams,
            token=None if config.token is None else config.token.get_secret_value(),
            tls=tls,
            log_format=config.log_format,
            log_level=config.log_level,
        )
        self._lend_to_engine = lend_to_engine
        self._live: list[Receiver] = []
        self._num_started = 0
        self._lock = asyncio.Lock()
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def live(self) -> list[Receiver]:
        """Those that serve now."""
        return [receiver for receiver in self._live if receiver.port]

    async def ports(self, wanted: int) -> list[int]:
        """Ports of up to `wanted` receivers, started if there are fewer. Fewer, or none, where they do not
        start: chunks may always come to the front.
        """
        wanted = min(wanted, self.most)
        if len(self.live) < wanted:
            # Whoever asked may go away, or be refused its update; the next one will want them too.
            starting = asyncio.create_task(self._start(wanted))
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)
            await asyncio.wait({starting})
        return [receiver.port for receiver in self.live[:wanted]]

    async def _start(self, wanted: int) -> None:
        """Start what is missing of `wanted`."""
        async with self._lock:
            if self._closed:
                return
            dead = [receiver for receiver in self._live if not receiver.port]
            self._live = self.live
            missing = wanted - len(self._live)
            await asyncio.gather(
                *(receiver.stop() for receiver in dead), *(self._start_one() for _ in range(missing))
            )

    async def _start_one(self) -> None:
        self._num_started += 1
        receiver = Receiver()
        settings = msgspec.structs.replace(self._settings, first_call_id=self._num_started * CALL_IDS)
        self._live.append(receiver)
        try:
            await receiver.start(settings, self._lend_to_engine)
        except (OSError, TimeoutError) as error:
            log.warning("receiver_not_started", error=str(error) or "it did not serve in time")
            self._live.remove(receiver)
            await receiver.stop()

    async def stop(self) -> None:
        """End all."""
        self._closed = True
        async with self._lock:
            live, self._live = self._live, []
            await asyncio.gather(*(receiver.stop() for receiver in live))
