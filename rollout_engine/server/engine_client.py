"""The front's end of the engine: calls and their replies, live requests, the ring, the last snapshot."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from rollout_engine import messages as m
from rollout_engine.config import ServeConfig
from rollout_engine.errors import EngineError, Reason
from rollout_engine.logs import get_log
from rollout_engine.server.engine_process import ENGINE_COMMAND, EngineProcess
from rollout_engine.server.journal import StateJournal, log_update
from rollout_engine.server.live import Inbox, LiveRequest, LiveRequests
from rollout_engine.server.ring import Ring
from rollout_engine.server.status import error_from
from rollout_engine.server.tally import Tally

log = get_log(__name__)

EXIT_WAIT_S = 2.0
"""How long a process whose socket is closed may take to be gone before its exit code is given up."""
INFO_WAIT_S = 0.3
"""How long GetEngineInfo waits for fresh counts before it answers with the last ones."""
FIRST_SNAPSHOT_S = 10.0


class EngineClient:
    """One engine process. Made by `start`; everything here runs on the front's event loop."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.requests = LiveRequests(self.send, tally)
        self.snapshot: m.Snapshot | None = None
        self.changed = asyncio.Event()  # set, and replaced, whenever the snapshot changes
        self.death_reason: str | None = None
        self.stopping = False
        self._process: EngineProcess | None = None
        self._ready: asyncio.Future[m.Ready] = asyncio.get_running_loop().create_future()
        self._first_snapshot = asyncio.Event()
        self._dying: asyncio.Task[None] | None = None
        self._failed: m.ErrorInfo | None = None
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[m.Reply]] = {}
        self._info: m.EngineInfo | None = None
        self._ring: Ring | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._journal = StateJournal()

    # -------------------------------------------------------- start and end

    @classmethod
    async def start(
        cls, config: ServeConfig, command: Sequence[str] = ENGINE_COMMAND, tally: Tally | None = None
    ) -> EngineClient:
        """Spawn the engine and wait until it serves.

        Args:
            tally: counts what happens; a new one if none is given.

        Raises:
            EngineError or UpdateError: what the engine failed with; ENGINE_DEAD if it just went away.
        """
        client = cls(tally or Tally())
        client._process = await EngineProcess.spawn(config, client._on_frame, client._on_lost, command)
        try:
            ready = await client._ready
            client._ring = Ring(ready)
            client._info = ready.info
            client.tally.engine_ready(ready.info)
            async with asyncio.timeout(FIRST_SNAPSHOT_S):
                await client._first_snapshot.wait()
        except TimeoutError:
            await client.stop(0.0)
            raise EngineError(
                Reason.ENGINE_DEAD,
                f"the engine sent no snapshot within {FIRST_SNAPSHOT_S:.0f} s of its start",
            ) from None
        except BaseException:
            await client.stop(EXIT_WAIT_S)
            raise
        return client

    def lend(self, sock: socket.socket) -> None:
        """Give the engine a socket to a receiver. Raises OSError if it is gone."""
        assert self._process is not None
        self._process.lend(sock)

    def shutdown(self, grace_s: float) -> None:
        """Ask the engine to finish what runs and to exit."""
        self.stopping = True
        self.send(m.Shutdown(grace_s))

    async def wait_exit(self, timeout_s: float) -> bool:
        """True once the process is gone."""
        assert self._process is not None
        return await self._process.wait(timeout_s)

    async def stop(self, grace_s: float) -> None:
        """Close the socket, wait for the process, kill it if need be."""
        self.stopping = True
        if self._process is not None:
            await self._process.stop(grace_s)
        if self._dying is not None:
            await self._dying
        if self._ring is not None:
            self._ring.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def info(self) -> m.EngineInfo:
        """What the engine last said about itself."""
        assert self._info is not None
        return self._info

    @property
    def ring(self) -> Ring:
        assert self._ring is not None
        return self._ring

    @property
    def state(self) -> m.Snapshot:
        """The last snapshot."""
        assert self.snapshot is not None
        return self.snapshot

    # -------------------------------------------------------- commands

    def send(self, command: m.Command) -> None:
        """Send a command that is not answered by a Reply."""
        if self._process is not None and self.death_reason is None:
            self._process.write(m.encoder.encode(command))

    def _check_alive(self) -> None:
        if self.death_reason is not None:
            raise EngineError(Reason.ENGINE_DEAD, self.death_reason)

    def submit(self, request: m.SubmitRequest, inbox: Inbox) -> LiveRequest:
        """Run a request; its outputs arrive in `inbox`.

        Raises:
            EngineError: DUPLICATE_REQUEST, ENGINE_DEAD.
        """
        self._check_alive()
        return self.requests.submit(request, inbox)

    def begin_call(self, kind: type[m.Call], **fields: Any) -> tuple[int, asyncio.Future[m.Reply]]:
        """Send a Call; returns its id and the future of its Reply.

        The future fails with the domain error that the engine answered, or ENGINE_DEAD.
        """
        self._check_alive()
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self.send(kind(call_id=call_id, **fields))  # type: ignore[arg-type]  # every Call is a Command
        return call_id, future

    async def call(self, kind: type[m.Call], **fields: Any) -> m.Reply:
        """Send a Call and wait for its Reply, which is without error.

        A caller that goes away stops waiting; the engine finishes the call.
        """
        _, future = self.begin_call(kind, **fields)
        if self._process is not None:
            self._process.flush()  # the caller waits for this one
        return await future

    async def fresh_info(self) -> m.EngineInfo:
        """EngineInfo with counts of now if the engine answers at once, else the last it gave."""
        if self.death_reason is None:
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = asyncio.create_task(self._refresh_info())
            await asyncio.wait({self._refreshing}, timeout=INFO_WAIT_S)
        return self.info

    async def _refresh_info(self) -> None:
        try:
            reply = await self.call(m.GetInfo)
        except EngineError:  # it died meanwhile; the snapshot says so
            return
        self._info = msgspec.convert(reply.result, m.EngineInfo)

    # -------------------------------------------------------- events

    def _on_frame(self, frame: bytes) -> None:
        event = m.event_decoder.decode(frame)
        match event:
            case m.Outputs():
                for output in event.outputs:
                    self.requests.deliver(output.request_id, output)
            case m.Reply():
                self._on_reply(event)
            case m.ChunkTaken():
                self.ring.release(event.slot, event.call_id)
            case m.Snapshot():
                self._journal.see(event)
                self._publish(event)
                self._first_snapshot.set()
            case m.UpdateEnded():
                self.tally.update_ended(event.record)
                # In a later turn of the loop: the trainer's reply is mostly right behind, and goes first.
                asyncio.get_running_loop().call_later(0, log_update, event.record)
            case m.RequestRefused():
                self.requests.deliver(event.request_id, event)
            case m.Ready():
                self._ready.set_result(event)
            case m.Failed():
                self._failed = event.error
                log.error("engine_failed", reason=event.error.reason, error=event.error.message)

    def _on_reply(self, reply: m.Reply) -> None:
        if self._ring is not None:
            self._ring.release_all(reply.call_id)
        # A caller that was told of a commit must not find the old version in the state.
        if self.snapshot is not None and reply.commit_sequence > self.snapshot.commit_sequence:
            self._publish(
                msgspec.structs.replace(
                    self.snapshot,
                    weight_version=reply.weight_version,
                    commit_sequence=reply.commit_sequence,
                )
            )
        future = self._calls.pop(reply.call_id, None)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(error_from(reply.error))
        else:
            future.set_result(reply)

    def _publish(self, snapshot: m.Snapshot) -> None:
        if snapshot != self.snapshot:
            self.snapshot = snapshot
            self.changed.set()
            self.changed = asyncio.Event()

    def _on_lost(self) -> None:
        self._dying = asyncio.create_task(self._die())

    async def _die(self) -> None:
        """The socket is closed: fail everyone who waits, once it is known how the process ended."""
        assert self._process is not None
        reason = await self._process.exit_reason(EXIT_WAIT_S)
        if self._failed is not None:
            reason = f"{self._failed.message} ({reason})"
        self.death_reason = reason
        dead = EngineError(Reason.ENGINE_DEAD, reason)
        if not self.stopping and self._failed is None:  # else it has told why itself
            log.error("engine_dead", reason=reason)
        self.tally.engine_gone(asked=self.stopping)
        if not self._ready.done():
            started = dead if self._failed is None else error_from(self._failed)
            self._ready.set_exception(started)
        if self.snapshot is not None:
            self._publish(
                msgspec.structs.replace(
                    self.snapshot, status="not_serving", reason=reason, num_running=0, num_waiting=0
                )
            )
        calls, self._calls = self._calls, {}
        for call_id, future in calls.items():
            if self._ring is not None:
                self._ring.release_all(call_id)
            if not future.done():
                future.set_exception(dead)
        self.requests.fail_all(dead)


def _retrieve(future: asyncio.Future[m.Reply]) -> None:
    """Mark an error as seen: the caller of a call may have gone away before its Reply."""
    if not future.cancelled():
        future.exception()
