"""From a generator of verl's to engines: all that it yields, once, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.utils import ensure_async_iterator

from trainers_adapters.bucket_push import BucketPush
from trainers_adapters.clients import WeightsClient
from trainers_adapters.frameworks.verl_parts.server import EngineAddress
from trainers_adapters.frameworks.verl_settings import EngineKwargs

Named = AsyncIterator[tuple[str, torch.Tensor]] | Iterable[tuple[str, torch.Tensor]]


async def offer(push: BucketPush | None, weights: Named, *, update_id: str = "") -> Exception | None:
    """Send all that a generator yields, as far as its end, and let the engines vote on it.

    Other ranks gather along with the generator, so after a failure it is taken to its end all the same.

    Args:
        push: None on a rank that only gathers along.

    Returns:
        None if all engines voted for it: `commit` is next. Else what went wrong: `abort` is.
    """
    failure: Exception | None = None
    try:
        if push is not None:
            await asyncio.to_thread(push.begin, update_id=update_id)
    except Exception as error:  # noqa: BLE001 - returned
        failure = error
    try:
        async for name, tensor in ensure_async_iterator(weights):
            if push is not None and failure is None:
                failure = await _added(push, name, tensor)
        if push is not None and failure is None:
            await asyncio.to_thread(push.prepare)
    except Exception as error:  # noqa: BLE001 - returned
        failure = failure or error
    return failure


async def _added(push: BucketPush, name: str, tensor: torch.Tensor) -> Exception | None:
    """What went wrong, if something did."""
    try:
        if push.add(name, tensor):
            await asyncio.to_thread(push.send)
    except Exception as error:  # noqa: BLE001 - returned
        return error
    return None


def new_push(clients: list[WeightsClient], config: Any, *, here: bool) -> BucketPush:
    """A BucketPush as the rollout configuration wants it. here: the engines are on this host."""
    kwargs = EngineKwargs.of(config)
    path = ("ipc" if here else "tensor") if kwargs.path == "auto" else kwargs.path
    return BucketPush(
        clients,
        path=path,
        staging=kwargs.staging,
        inflight=kwargs.inflight,
        bucket_bytes=config.checkpoint_engine.update_weights_bucket_megabytes << 20,
        timeout_s=kwargs.timeout_s,
    )


def is_here(where: EngineAddress) -> bool:
    """Whether an engine is on this host."""
    host = where.address.rpartition(":")[0].strip("[]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    mine = ray.util.get_node_ip_address().strip("[]")
    return where.node_ip == mine and (loopback or host == mine)
