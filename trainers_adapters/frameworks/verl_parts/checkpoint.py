"""verl's checkpoint engine `rollsync`: from a trainer to the engines of all replicas, on other GPUs than its
own.

Rank 0 of the trainer pushes to the engines itself, to all or to none; the rollout's workers move no bytes and
only look at what their engine says of the update. So `receive_weights` yields no tensors: it yields the
version that was committed, and the adapter (wire format COMMITTED) tells it to verl.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineWithCache

from trainers_adapters.aio import AsyncRolloutClient, AsyncWeightsClient
from trainers_adapters.bucket_push import BucketPush
from trainers_adapters.clients import WeightsClient
from trainers_adapters.engine_layout import in_shares
from trainers_adapters.errors import PushError, RollsyncError
from trainers_adapters.frameworks.verl_parts.push import Named, is_here, offer
from trainers_adapters.frameworks.verl_parts.rollout import COMMITTED, ServerAdapter, adapters
from trainers_adapters.frameworks.verl_parts.server import EngineAddress
from weight_updater.checksum import checksum

LOOK_S = 0.05
"""Between two looks at what an engine says of an update."""
READ_BYTES = 64 << 20
"""How much get_weights asks an engine for at once, at most, or one tensor."""


class RollsyncCheckpointEngine(CheckpointEngineWithCache):  # type: ignore[misc]
    """CheckpointEngine of name `rollsync`; the rollout must be `rollsync` too.

    Args:
        bucket_size: bytes; the sender holds two buckets. is_master: verl's; its rank 0 sends.
        path: ipc, tensor, or auto (ipc if every engine is on the sender's host).
        staging, inflight: as push_weights takes them. timeout_s: of each call, and of a whole receive.
    """

    wire_format = COMMITTED

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        path: str = "auto",
        staging: str = "auto",
        inflight: str = "wait",
        timeout_s: float = 600.0,
    ) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._path = path
        self._options: dict[str, Any] = {"staging": staging, "inflight": inflight, "timeout_s": timeout_s}
        self._timeout_s = timeout_s
        self._rank = -1
        self._update_id = ""
        self._engines: list[EngineAddress] = []
        self._clients: list[WeightsClient] = []
        self._push: BucketPush | None = None

    # ------------------------------------------------------------ before an update

    def prepare(self) -> dict[str, Any]:
        """What the others must know: {"engine": where this worker's engine listens}; None in the trainer."""
        return {"engine": _own_engine()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Who sends to whom, and under which id the update will go.

        Raises:
            ValueError: a rollout worker has no rollsync engine.
        """
        engines = [one["engine"] for one in metadata[actor_wg_world_size:]]
        if len(engines) != rollout_world_size or not all(engines):
            raise ValueError(
                "checkpoint_engine.backend is 'rollsync', but a rollout worker has no rollsync engine; set "
                "rollout.name=rollsync too"
            )
        update_id = f"verl-{secrets.token_hex(8)}"
        actors = range(actor_wg_world_size)
        return (
            {
                "rank": list(actors),
                "update_id": [update_id for _ in actors],
                "engines": [engines if rank == 0 else [] for rank in actors],
            },
            {
                "rank": [actor_wg_world_size + number for number in range(rollout_world_size)],
                "update_id": [update_id for _ in engines],
                "engines": [[engine] for engine in engines],
            },
        )

    def init_process_group(self, rank: int, update_id: str, engines: list[EngineAddress]) -> None:
        """Take what build_topology says for this worker; the sender connects."""
        self._rank, self._update_id = rank, update_id
        if rank == 0 and engines != self._engines:
            self._disconnect()
            self._clients = [WeightsClient(one.address, token=one.token or None) for one in engines]
            path = self._path
            if path == "auto":
                path = "ipc" if all(is_here(one) for one in engines) else "tensor"
            self._push = BucketPush(self._clients, path=path, bucket_bytes=self.bucket_size, **self._options)
        self._engines = list(engines)

    def finalize(self) -> None:
        """Give the buckets back; the connections stay."""
        if self._push is not None:
            self._push.free()

    # ------------------------------------------------------------ the trainer

    @torch.no_grad()
    async def send_weights(self, weights: Named, global_steps: int | None = None) -> dict[str, float] | None:
        """ACTOR RANKS. Rank 0 pushes; the others gather along. The generator is taken to its end.

        Returns:
            On rank 0 metrics of the push.

        Raises:
            PushError: nothing was committed, or not everywhere; the message says which.
        """
        push = self._push if self._rank == 0 else None
        failure = await offer(push, weights, update_id=self._update_id)
        if failure is not None:
            if push is not None:
                await asyncio.to_thread(push.abort)
            raise failure
        if push is None:
            return None
        report = await asyncio.to_thread(push.commit)
        return {
            "rollsync/weight_version": float(report.version),
            "rollsync/update_seconds": report.seconds,
            "rollsync/pause_seconds": report.pause_seconds,
        }

    def _disconnect(self) -> None:
        if self._push is not None:
            self._push.close()
        for client in self._clients:
            client.close()
        self._push, self._clients = None, []

    # ------------------------------------------------------------ the rollout

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[int]:
        """ROLLOUT WORKERS. Wait for the end of the update on this worker's engine.

        Yields:
            The version that is live by it.

        Raises:
            PushError: the engine refused it, or heard nothing of it in time.
        """
        (engine,) = self._engines
        give_up = time.monotonic() + self._timeout_s
        async with AsyncRolloutClient(engine.address, token=engine.token or None) as client:
            while True:
                info = await client.info()
                ended = [one for one in info.recent_updates if one.update_id == self._update_id]
                if ended:
                    break
                if time.monotonic() > give_up:
                    text = f"{engine.address} saw no end of update {self._update_id} in {self._timeout_s:g} s"
                    raise PushError("DEADLINE_EXCEEDED", "DEADLINE", text)
                await asyncio.sleep(LOOK_S)
        last = ended[-1]
        if last.end != "committed":
            raise PushError("ABORTED", last.reason, f"{engine.address} {last.end} the update: {last.message}")
        yield last.weight_version

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """ROLLOUT WORKERS. What is live on this worker's engine, which is the cache of the last update.

        Yields:
            (name, tensor), each compared with the engine's checksum of it.

        Raises:
            RollsyncError: other weights went live meanwhile.
        """
        (engine,) = self._engines
        async with AsyncWeightsClient(engine.address, token=engine.token or None) as client:
            layout = await client.layout()
            live = await client.checksums()
            for names in in_shares(layout.placements, READ_BYTES):
                for name, weight in (await client.get_weights(names)).items():
                    tensor = weight.tensor()
                    if checksum(tensor) != live.by_name[name]:
                        text = f"{name} changed on {engine.address} while it was read; ask again"
                        raise RollsyncError("ABORTED", "CHECKSUM_MISMATCH", text)
                    yield name, tensor


def _own_engine() -> EngineAddress | None:
    """Of this process's adapter; None in a trainer, which has none, or none with a server."""
    adapter: ServerAdapter | None = next(iter(adapters), None)
    try:
        server = adapter.server() if adapter is not None else None
    except ValueError:  # ray knows no such actor
        server = None
    engine: EngineAddress | None = None if server is None else ray.get(server.get_engine.remote())
    return engine
