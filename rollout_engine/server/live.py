"""Which requests are live in the engine, and where their outputs go.

A request is live from its submission until the engine has said the last of it, whether or not its client
is still there: so an abort of any live id finds it, and an id is not used twice at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from rollout_engine.errors import EngineError, Reason
from rollout_engine.messages import (
    AbortRequests,
    Command,
    FinishSequence,
    RequestRefused,
    SequenceOutput,
    SubmitRequest,
)
from rollout_engine.server.tally import Tally

Arrival = SequenceOutput | RequestRefused


class Inbox:
    """Where what the engine says about one call's requests waits to be taken. One taker."""

    def __init__(self) -> None:
        self._arrived: list[Arrival] = []
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, arrival: Arrival) -> None:
        self._arrived.append(arrival)
        self._wake()

    def fail(self, error: EngineError) -> None:
        """No more will arrive: `take` raises this once what had arrived is taken."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Arrival]:
        """Everything that arrived since the last call; waits until there is something.

        Raises:
            EngineError: the engine died.
        """
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        return arrived


class LiveRequest:
    """One submitted request. `leave` must be called when its client is answered or gone."""

    def __init__(
        self, request: SubmitRequest, inbox: Inbox, send: Callable[[Command], None], tally: Tally
    ) -> None:
        self.request_id = request.request_id
        self._inbox: Inbox | None = inbox
        self._send = send
        self._tally = tally
        self._submitted_at = tally.submitted()
        self._running = set(range(request.params.n))  # completions that the engine has not ended
        self._finishing: set[int] = set()  # of these, those that it was told to finish

    @property
    def ended(self) -> bool:
        """The engine has said the last of it."""
        return not self._running

    def finish(self, index: int) -> None:
        """Completion `index` hit a stop string: its client has all it will get."""
        if index in self._running and index not in self._finishing:
            self._finishing.add(index)
            self._send(FinishSequence(self.request_id, index))

    def leave(self) -> None:
        """Drop what still arrives; end what still runs."""
        if self._inbox is not None and self._running - self._finishing:
            self._send(AbortRequests([self.request_id]))
        self._inbox = None

    def deliver(self, arrival: Arrival) -> None:
        if isinstance(arrival, RequestRefused):
            self._running.clear()
        elif arrival.finish_reason:
            self._running.discard(arrival.index)
            self._tally.finished(arrival, self._submitted_at)
        if self._inbox is not None:
            self._inbox.put(arrival)

    def fail(self, error: EngineError) -> None:
        self._running.clear()
        if self._inbox is not None:
            self._inbox.fail(error)


class LiveRequests:
    """The table of live requests, by id."""

    def __init__(self, send: Callable[[Command], None], tally: Tally) -> None:
        self._send = send
        self._tally = tally
        self._live: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def submit(self, request: SubmitRequest, inbox: Inbox) -> LiveRequest:
        """Send a request to the engine; what it answers arrives in `inbox`.

        Raises:
            EngineError(DUPLICATE_REQUEST): the id is that of a live request.
        """
        if request.request_id in self._live:
            raise EngineError(
                Reason.DUPLICATE_REQUEST,
                f"request_id {request.request_id!r} is live; choose another or wait until it has ended",
            )
        live = self._live[request.request_id] = LiveRequest(request, inbox, self._send, self._tally)
        self._send(request)
        return live

    def deliver(self, request_id: str, arrival: Arrival) -> None:
        """Route what the engine said to the request's inbox."""
        live = self._live.get(request_id)
        if live is None:
            return
        live.deliver(arrival)
        if live.ended:
            del self._live[request_id]

    def abort(self, request_ids: Iterable[str]) -> tuple[list[str], list[str]]:
        """End requests; returns (those that were live, those that were not), each in the order given."""
        known: list[str] = []
        unknown: list[str] = []
        for request_id in dict.fromkeys(request_ids):
            (known if request_id in self._live else unknown).append(request_id)
        if known:
            self._send(AbortRequests(known))
        return known, unknown

    def ids(self) -> list[str]:
        return list(self._live)

    def fail_all(self, error: EngineError) -> None:
        """The engine died."""
        live, self._live = self._live, {}
        for request in live.values():
            request.fail(error)
