"""verl's rollout `rollsync`, as it is seen from the trainer: its memory, and the weights that go to it."""

from __future__ import annotations

import asyncio
import os
from typing import Any, NoReturn
from weakref import WeakSet

import ray
import torch
from torch import distributed as dist
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from trainers_adapters.bucket_push import BucketPush
from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import PushError
from trainers_adapters.frameworks.ranks import Ranks
from trainers_adapters.frameworks.verl_names import check_names
from trainers_adapters.frameworks.verl_parts.push import Named, is_here, new_push, offer
from trainers_adapters.frameworks.verl_parts.replica import server_name
from trainers_adapters.frameworks.verl_parts.server import EngineAddress
from trainers_adapters.frameworks.verl_settings import EngineKwargs, check_config
from trainers_adapters.push import PushReport

COMMITTED = "rollsync_committed"
"""The wire format of our checkpoint engine: the sender has pushed to the engines itself, and the one item
that comes is the PushReport's version."""

adapters: WeakSet[ServerAdapter] = WeakSet()
"""Those of this process; verl gives a checkpoint engine no other way to its rollout."""


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """BaseRollout of name `rollsync`. One for each worker; a worker has one engine.

    report: of the last push from here.

    Raises:
        IncompatibleVerl: the installed verl lacks a name that this needs.
        ValueError: a setting that the engine cannot honour.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        check_names()
        super().__init__(config, model_config, device_mesh)
        check_config(self.config, self.model_config)
        self._kwargs = EngineKwargs.of(self.config)
        rank = int(os.environ.get("RANK", "0"))
        self.replica_rank = rank if replica_rank == -1 else replica_rank
        self.rollout_rank = self.node_rank = 0
        self.is_leader_rank = True
        self.report: PushReport | None = None
        self._server: Any = None
        self._client: WeightsClient | None = None
        self._push: BucketPush | None = None
        adapters.add(self)

    # ------------------------------------------------------------ memory

    async def resume(self, tags: list[str]) -> None:
        """Let the engine take memory again.

        Args:
            tags: of weights, kv_cache.
        """
        if self.config.free_cache_engine:
            await self.server().wake_up.remote(tags=list(tags))

    async def release(self) -> None:
        """Let the engine give up the memory of its weights and KV cache."""
        if self.config.free_cache_engine:
            await self.server().sleep.remote()

    # ------------------------------------------------------------ weights

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Named,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        base_sync_done: bool = True,
        **kwargs: Any,
    ) -> None:
        """ALL RANKS. Make weights live on this worker's engine: on those of all ranks, or on none.

        The generator is taken to its end whatever happens, since other ranks gather along with it.

        Args:
            weights: (name, tensor), each valid until the next is asked for.
            wire_format: named_tensors; or what our checkpoint engine says.
            global_steps: verl's number for these weights; samples name it.
            peft_config: must be None: adapters are pushed merged.

        Raises:
            PushError: refused by an engine, of this rank or of another; each keeps the weights it had.
            ValueError: a format that carries no whole tensors.
        """
        if wire_format == COMMITTED:
            async for version in ensure_async_iterator(weights):
                await self.server().committed.remote(version, global_steps)
            return
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format is {wire_format!r}; a rollsync engine takes named_tensors")
        if peft_config is not None:
            raise ValueError("adapters alone cannot be pushed by verl; set model.lora.merge=True")
        report = await self._pushed(weights)
        self.report = report
        await self.server().committed.remote(report.version, global_steps)

    async def _pushed(self, weights: Named) -> PushReport:
        await self._connect()
        push = self._push
        assert push is not None, "_connect makes it"
        failure = await offer(push, weights)
        try:
            _vote(failure)
        except Exception:
            await asyncio.to_thread(push.abort)
            raise
        report = await asyncio.to_thread(push.commit)
        if self.config.free_cache_engine:
            push.free(on_gpu_only=True)  # the KV cache wants that memory
        return report

    # ------------------------------------------------------------ where

    def server(self) -> Any:
        """The server actor, which is started after this object."""
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def engine(self) -> EngineAddress:
        """Where this worker's engine listens."""
        found: EngineAddress = await self.server().get_engine.remote()
        return found

    async def _connect(self) -> None:
        where = await self.engine()
        if self._client is not None and self._client.address == where.address:
            return
        self.close()
        self._client = WeightsClient(where.address, token=where.token or None)
        self._push = new_push([self._client], self.config, here=is_here(where))

    def close(self) -> None:
        """Give back the buckets and the connection."""
        if self._push is not None:
            self._push.close()
        if self._client is not None:
            self._client.close()
        self._push = self._client = None


def _vote(failure: Exception | None) -> None:
    """ALL RANKS. Raise on each if one of them failed."""
    count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    said = "" if failure is None else str(failure) or type(failure).__name__
    everyone = Ranks(count, dist.get_rank() if count > 1 else 0).gather(said)
    if failure is not None:
        raise failure
    for rank, text in enumerate(everyone):
        if text:
            _refused_elsewhere(rank, text, failure)


def _refused_elsewhere(rank: int, text: str, failure: Exception | None) -> NoReturn:
    raise PushError(
        "ABORTED", "RANK_FAILED", f"rank {rank} could not push ({text}), so no engine has new weights"
    ) from failure
