"""The engine behind the facade, as its routers see it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from trainers_adapters.aio import AsyncRolloutClient, AsyncWeightsClient
from trainers_adapters.connection import Tls
from trainers_adapters.errors import RollsyncError
from trainers_adapters.results import Completion
from trainers_adapters.rollout_calls import Request
from weight_updater.requests import (
    AdapterSpec,
    BeginUpdate,
    Inflight,
    Manifest,
    Path,
    Recapture,
    TensorSpec,
    UpdateReply,
)

T = TypeVar("T")


class CallerLeft(Exception):
    """Whoever asked is gone, and what it asked for was ended."""


@dataclass
class Engine:
    """Clients of one engine.

    model_names: other names that callers know the model by. said: what callers are told besides of the
    server. snapshot: checksums by name that /weights_checker keeps to compare with. writes_text: False
    once the engine has said that it has no tokenizer.
    """

    rollout: AsyncRolloutClient
    weights: AsyncWeightsClient
    model_names: Sequence[str] = ()
    said: Mapping[str, Any] = field(default_factory=dict)
    snapshot: dict[str, int] = field(default_factory=dict)
    writes_text: bool = True

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, address: str, token: str | None, tls: Tls | None, **others: Any
    ) -> AsyncIterator[Engine]:
        async with (
            AsyncRolloutClient(address, token=token, tls=tls) as rollout,
            AsyncWeightsClient(address, token=token, tls=tls) as weights,
        ):
            yield cls(rollout, weights, **others)

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """All completions, with their text if there is a tokenizer: callers reward the text of ids, too."""
        if self.writes_text:
            try:
                return await self.rollout.generate_batch(requests, return_text=True)
            except RollsyncError as error:
                self._do_without_text(error, requests)
        return await self.rollout.generate_batch(requests)

    async def generate_stream(self, request: Request) -> AsyncIterator[Completion]:
        """The parts of one request's completions, with their text if there is a tokenizer."""
        while True:
            try:
                async for part in self.rollout.generate_stream(
                    request.prompt,
                    request_id=request.request_id,
                    priority=request.priority,
                    adapter=request.adapter or "",
                    return_text=self.writes_text,
                    **request.sampling,
                ):
                    yield part
                return
            except RollsyncError as error:  # of a missing tokenizer: nothing was sampled, let alone yielded
                self._do_without_text(error, [request])

    def _do_without_text(self, error: RollsyncError, requests: Sequence[Request]) -> None:
        """Note that there is no tokenizer, or raise the error: it is another, or the requests need one."""
        needed = any(isinstance(request.prompt, str) or request.sampling.get("stop") for request in requests)
        if error.reason != "NO_TOKENIZER" or needed:
            raise error
        self.writes_text = False

    async def update_from_disk(
        self,
        directory: str,
        version: str | int | None,
        *,
        abort_all: bool = False,
        recapture: Recapture = Recapture.AUTO,
    ) -> UpdateReply:
        """Swap the weights for those of a directory, in one call."""
        begin = BeginUpdate(
            path=Path.DISK,
            directory=directory,
            version=version_number(version),
            inflight=await self._inflight(abort_all=abort_all),
            recapture=recapture,
        )
        return await self.weights.update_from_disk(begin, directory)

    async def load_adapter(self, name: str, directory: str) -> UpdateReply:
        """Make the adapter of a directory live under a name, in one call."""
        begin = BeginUpdate(
            path=Path.DISK,
            directory=directory,
            adapter=AdapterSpec(name),
            inflight=await self._inflight(abort_all=False),
        )
        return await self.weights.update_from_disk(begin, directory)

    async def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a caller's `model` names; None: the base model.

        Raises:
            RollsyncError: the name is neither an adapter's nor one of the model's.
        """
        if not model or model in self.model_names:
            return None
        info = await self.rollout.info()
        if model == info.model_path:
            return None
        held = [adapter.name for adapter in info.state.adapters]
        if model in held:
            return model
        raise RollsyncError(
            "NOT_FOUND",
            "UNKNOWN_MODEL",
            f"model {model!r} is neither an adapter ({', '.join(held) or 'none is held'}) nor a name of the "
            f"served model ({', '.join([info.model_path, *self.model_names])}); --model-name adds one",
        )

    async def update_from_distributed(
        self,
        specs: list[tuple[str, str, list[int]]],
        group_name: str,
        version: str | int | None,
        *,
        abort_all: bool = False,
        bucket_bytes: int = 0,
    ) -> UpdateReply:
        """Swap the weights named (name, dtype, shape) for those that the group's sender broadcasts."""
        manifest = Manifest(
            tuple(
                TensorSpec(name, dtype.removeprefix("torch."), tuple(shape)) for name, dtype, shape in specs
            )
        )
        begin = BeginUpdate(
            path=Path.DISTRIBUTED,
            manifest=manifest,
            version=version_number(version),
            inflight=await self._inflight(abort_all=abort_all),
            bucket_bytes=bucket_bytes,
        )
        return await self.weights.update_from_distributed(begin, group_name)

    async def _inflight(self, *, abort_all: bool) -> Inflight:
        """What the callers of these paths expect: an update waits for what runs, or keeps what is paused."""
        if abort_all:
            return Inflight.ABORT
        state = (await self.rollout.info()).state
        return Inflight.KEEP if state.paused_by else Inflight.WAIT

    async def compare_with_snapshot(self) -> list[str]:
        """Names of the weights that differ from the snapshot."""
        live = (await self.weights.checksums()).by_name
        names = live.keys() | self.snapshot.keys()
        return sorted(name for name in names if live.get(name) != self.snapshot.get(name))

    async def flush_with_running(self) -> int:
        """Drop the cache, and the pages of what runs or is frozen, which is then computed anew."""
        paused = bool((await self.rollout.info()).state.paused_by)
        await self.rollout.pause("retract")
        try:
            return await self.rollout.flush_cache()
        finally:
            if not paused:
                await self.rollout.resume()


async def while_there(request: HttpRequest, work: Awaitable[T]) -> T:
    """What `work` gives. If the caller goes away, it is cancelled: tokens for nobody would take the place of
    others.

    Args:
        request: its body has been read.

    Raises:
        CallerLeft: it did.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerLeft
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await leaving


async def _left(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def engine_of(request: HttpRequest) -> Engine:
    """FastAPI dependency. A query parameter that the path does not know is refused by name."""
    known = {param.alias for param in request.scope["route"].dependant.query_params}
    unknown = sorted(request.query_params.keys() - known)
    if unknown:
        raise RollsyncError(
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            f"{request.url.path} knows no query parameter {unknown[0]!r}"
            + (f"; it knows {', '.join(sorted(known))}" if known else ""),
        )
    engine: Engine = request.app.state.engine
    return engine


LEAST_LOGPROB = -9999.0
"""Stands for -inf (a token that top_k or the like left out), as in vLLM."""


def written(logprob: float) -> float | None:
    """A log-probability as JSON can hold it, which knows neither -inf nor NaN (None)."""
    return None if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)


MEMORY = {"kv_cache": ("kv_cache", "graphs"), "cuda_graph": ("graphs",)}
"""By a caller's tag: the engine's. Callers that know no graphs have them with the cache."""


def memory_tags(tags: Sequence[str] | None) -> list[str]:
    """The engine's tags for a caller's; none means all."""
    return [own for tag in tags or () for own in MEMORY.get(tag, (tag,))]


def version_number(version: str | int | None) -> int:
    """A weight version as these paths write it; None, "" and "default" let the engine count on."""
    if version in (None, "", "default"):
        return 0
    try:
        number = int(version)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise RollsyncError(
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            f"weight_version is {version!r}; versions are whole numbers that grow from update to update",
        )
    return number


def not_here(what: str, instead: str) -> RollsyncError:
    """The error of a path that this engine does not serve, naming what does the same."""
    return RollsyncError("UNIMPLEMENTED", "NOT_SERVED_HERE", f"{what}; {instead}")
