"""The engine behind the facade, as its routers see it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fastapi import Request

from trainers_adapters.aio import AsyncRolloutClient, AsyncWeightsClient
from trainers_adapters.connection import Tls
from trainers_adapters.errors import RollsyncError
from weight_updater.requests import BeginUpdate, Inflight, Manifest, Path, Recapture, TensorSpec, UpdateReply


@dataclass
class Engine:
    """Clients of one engine. snapshot: checksums by name that /weights_checker keeps to compare with."""

    rollout: AsyncRolloutClient
    weights: AsyncWeightsClient
    snapshot: dict[str, int] = field(default_factory=dict)

    @classmethod
    @asynccontextmanager
    async def connect(cls, address: str, token: str | None, tls: Tls | None) -> AsyncIterator[Engine]:
        async with (
            AsyncRolloutClient(address, token=token, tls=tls) as rollout,
            AsyncWeightsClient(address, token=token, tls=tls) as weights,
        ):
            yield cls(rollout, weights)

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
        return Inflight.KEEP if state.status == "paused" else Inflight.WAIT

    async def compare_with_snapshot(self) -> list[str]:
        """Names of the weights that differ from the snapshot."""
        live = (await self.weights.checksums()).by_name
        names = live.keys() | self.snapshot.keys()
        return sorted(name for name in names if live.get(name) != self.snapshot.get(name))


def engine_of(request: Request) -> Engine:
    """FastAPI dependency."""
    engine: Engine = request.app.state.engine
    return engine


def version_number(version: str | int | None) -> int:
    """A weight version as these paths write it; None, "" and "default" let the engine count on."""
    if version in (None, "", "default"):
        return 0
    try:
        return int(version)
    except ValueError:
        raise RollsyncError(
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            f"weight_version is {version!r}; versions are whole numbers that grow from update to update",
        ) from None


def not_here(what: str, instead: str) -> RollsyncError:
    """The error of a path that this engine does not serve, naming what does the same."""
    return RollsyncError("UNIMPLEMENTED", "NOT_SERVED_HERE", f"{what}; {instead}")
