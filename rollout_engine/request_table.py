"""RequestTable: the requests that are live in the engine, and what is to be told about them."""

from __future__ import annotations

import heapq
import itertools
import time

from rollout_engine import messages
from rollout_engine.errors import EngineError, Reason
from rollout_engine.replies import error_info
from rollout_engine.scheduler import Scheduler
from rollout_engine.sequence import Sequence
from weight_updater.adapters import AdapterBook


class RequestTable:
    """Maps requests to their sequences, from SubmitRequest to the last output. Called by the loop only.

    Args:
        max_waiting: sequences that may wait at once.
        min_version: no older weights may sample anything.
    """

    def __init__(self, scheduler: Scheduler, max_waiting: int, min_version: int = 0) -> None:
        self._scheduler = scheduler
        self._min_version = min_version
        self._max_waiting = max_waiting
        self._live: dict[str, list[Sequence]] = {}
        self._outputs: list[messages.SequenceOutput] = []
        self._refusals: list[messages.RequestRefused] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._ids = itertools.count()

    def submit(self, command: messages.SubmitRequest, weight_version: int) -> None:
        """Queue the n sequences of a request.

        Raises:
            EngineError: DUPLICATE_REQUEST, QUEUE_FULL, EXCEEDS_KV_POOL, UNKNOWN_ADAPTER, ADAPTER_STALE,
                VERSION_TOO_OLD (of the adapter).
        """
        params = command.params
        refused = adapter_refusal(self._scheduler.adapters, command.adapter, command.min_adapter_version)
        if refused is not None:
            raise refused
        if command.request_id in self._live:
            raise EngineError(
                Reason.DUPLICATE_REQUEST, f"request {command.request_id!r} is live already; choose another id"
            )
        if len(self._scheduler.waiting) + params.n > self._max_waiting:
            raise EngineError(
                Reason.QUEUE_FULL,
                f"{len(self._scheduler.waiting)} sequences wait already, {self._max_waiting} may; try later",
            )
        room = self._scheduler.max_sequence_tokens - len(command.token_ids)
        if room < (params.max_tokens or 0) or (room < 1 and params.max_tokens != 0):
            raise EngineError(
                Reason.EXCEEDS_KV_POOL,
                f"prompt of {len(command.token_ids)} tokens and max_tokens={params.max_tokens} do not fit: "
                f"one sequence can hold {self._scheduler.max_sequence_tokens} tokens here",
            )
        max_tokens = room if params.max_tokens is None else params.max_tokens
        deadline = time.monotonic() + command.deadline_s if command.deadline_s else 0.0
        group = [self._sequence(command, index, max_tokens, deadline) for index in range(params.n)]
        self._live[command.request_id] = list(group)
        for sequence in group:
            sequence.leader = None if sequence.index == 0 else group[0]
            self._start(sequence, weight_version)

    def _sequence(
        self, command: messages.SubmitRequest, index: int, max_tokens: int, deadline: float
    ) -> Sequence:
        number = next(self._ids)
        assert command.params.seed is not None, "the front draws a seed where the caller gave none"
        return Sequence(
            id=number,
            request_id=command.request_id,
            index=index,
            prompt_ids=command.token_ids,
            params=command.params,
            seed=command.params.seed,
            max_tokens=max_tokens,
            priority=command.priority,
            arrival=number,
            deadline=deadline,
            min_version=command.min_version,
            adapter=command.adapter,
            min_adapter_version=command.min_adapter_version,
            stream=command.stream,
            wants_hidden=command.return_hidden_states,
        )

    def _start(self, sequence: Sequence, weight_version: int) -> None:
        if sequence.samples_nothing and not sequence.wants_prompt_logprobs:
            sequence.finish_reason = "length"
            self.tell(sequence, weight_version)
            return
        self._scheduler.add(sequence)
        if sequence.deadline:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.id, sequence))

    def abort(self, request_ids: list[str], weight_version: int) -> None:
        """End these requests with what they have; unknown ids are ignored."""
        for request_id in request_ids:
            for sequence in list(self._live.get(request_id, ())):
                self.finish(sequence, "abort", "", weight_version)

    def finish_at_stop(self, command: messages.FinishSequence, weight_version: int) -> None:
        """The front found a stop string in one completion."""
        for sequence in list(self._live.get(command.request_id, ())):
            if sequence.index == command.index:
                self.finish(sequence, "stop", "", weight_version)

    def expire(self, now: float, weight_version: int) -> None:
        """End sequences whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if not sequence.finish_reason:
                self.finish(sequence, "deadline", "", weight_version)

    def end_too_old(self, weight_version: int) -> None:
        """Other weights are live: end the requests that ask for newer ones, or for an adapter that was pushed
        over others.

        One of which nothing was sampled yet is refused, as it would be at its submission; another ends with
        what it has, and with that refusal as its error.
        """
        for request_id, sequences in list(self._live.items()):
            error = self._refusal(sequences[0], weight_version)
            if error is None:
                continue
            if len(sequences) == sequences[0].params.n and not any(s.output_ids for s in sequences):
                for sequence in sequences:
                    sequence.finish_reason = "error"
                    self._scheduler.remove(sequence)
                del self._live[request_id]
                self._refusals.append(messages.RequestRefused(request_id, error_info(error)))
                continue
            for sequence in list(sequences):
                self.finish(sequence, "error", f"{error.reason}: {error.message}", weight_version)

    def _refusal(self, sequence: Sequence, weight_version: int) -> EngineError | None:
        """Why these weights may not sample a live sequence, or None."""
        wanted = max(sequence.min_version, self._min_version)
        if wanted > weight_version:
            return too_old(wanted, weight_version)
        return adapter_refusal(self._scheduler.adapters, sequence.adapter, sequence.min_adapter_version)

    def finish(self, sequence: Sequence, reason: str, error: str, weight_version: int) -> None:
        """End a live sequence from outside: free what it holds and tell its caller."""
        sequence.finish_reason, sequence.error = reason, error
        self._scheduler.remove(sequence)
        self.tell(sequence, weight_version)

    def tell(self, sequence: Sequence, weight_version: int) -> None:
        """Queue what is new about a sequence; the last time, forget it."""
        if not sequence.first_token_at and sequence.output_ids:
            sequence.first_token_at = time.monotonic()
        if sequence.finish_reason:
            group = self._live[sequence.request_id]
            group.remove(sequence)
            if not group:
                del self._live[sequence.request_id]
        if sequence.finish_reason or sequence.stream:
            self._outputs.append(sequence.take_output(weight_version))

    def take_outputs(self) -> list[messages.SequenceOutput]:
        """Everything told since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_refusals(self) -> list[messages.RequestRefused]:
        """Requests that were taken, and refused since the last call."""
        refusals, self._refusals = self._refusals, []
        return refusals


def too_old(min_version: int, weight_version: int) -> EngineError:
    """The refusal of a request that asks for `min_version` while `weight_version` is live."""
    return EngineError(
        Reason.VERSION_TOO_OLD,
        f"weight version {min_version} or newer was asked for; {weight_version} is live",
    )


def adapter_refusal(book: AdapterBook, name: str, min_version: int) -> EngineError | None:
    """Why a request for an adapter cannot be answered now, or None. name: "" asks for none."""
    if not name:
        if not min_version:
            return None
        return EngineError(
            Reason.INVALID_REQUEST, f"min_adapter_version is {min_version}, but no adapter is named"
        )
    held = book.get(name)
    if held is None:
        return EngineError(Reason.UNKNOWN_ADAPTER, f"no adapter {name!r}: {book.names()}")
    if book.is_stale(held):
        return EngineError(
            Reason.ADAPTER_STALE,
            f"adapter {name!r} (version {held.version}) was pushed over weight version {held.base_version}, "
            f"and other weights are live now; push it again",
        )
    if held.version < min_version:
        return EngineError(
            Reason.VERSION_TOO_OLD,
            f"version {min_version} of adapter {name!r} or newer was asked for; {held.version} is live",
        )
    return None
