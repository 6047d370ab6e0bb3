"""The standard health service, following the engine's snapshot."""

from __future__ import annotations

from collections.abc import Iterable

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from rollout_engine.messages import Snapshot
from rollout_engine.server.engine_client import EngineClient

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def serves(snapshot: Snapshot) -> bool:
    """Whether requests are taken: yes while paused (they wait), no with torn weights, asleep or dead."""
    asleep = {"weights", "kv_cache"} & set(snapshot.released_tags)
    return snapshot.status != "not_serving" and not asleep


class EngineHealth:
    """Keeps a HealthServicer true to the engine: overall ("") and for each service."""

    def __init__(self, engine: EngineClient, services: Iterable[str]) -> None:
        self.servicer = health_aio.HealthServicer()
        self._engine = engine
        self._services = ("", *services)

    async def publish(self) -> None:
        """Set every service's status from the last snapshot."""
        status = SERVING if serves(self._engine.state) else NOT_SERVING
        for service in self._services:
            await self.servicer.set(service, status)

    async def follow(self) -> None:
        """Publish on every change, until cancelled."""
        while True:
            changed = self._engine.changed
            await self.publish()
            await changed.wait()
