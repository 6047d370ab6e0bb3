"""Whoever looks on: the tally, the metrics port and the metrics log, opened and closed together."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rollout_engine.config import ServeConfig
from rollout_engine.server.engine_client import EngineClient
from rollout_engine.server.metrics import Values
from rollout_engine.server.metrics_http import MetricsServer
from rollout_engine.server.metrics_log import MetricsLog, sample
from rollout_engine.server.tally import Tally


class Observers:
    """Made before the engine, so that a used port or an unwritable file is known before a model loads.

    Attributes:
        engine: whom they look at; None while it loads.

    Raises:
        ConfigError: a port that cannot be bound, a file that cannot be written, a package that is missing.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.tally = Tally()
        self.engine: EngineClient | None = None
        self._every_s = config.metrics_log_seconds
        self._http = MetricsServer(config) if config.metrics_port is not None else None
        self._log: MetricsLog | None = None
        try:
            if config.metrics_log is not None:
                self._log = MetricsLog(config.metrics_log, config.metrics_log_bytes, self._every_s)
        except BaseException:
            if self._http is not None:
                self._http.close()
            raise

    @property
    def metrics_address(self) -> str:
        """host:port of the metrics; empty if they are not served."""
        if self._http is None:
            return ""
        host = f"[{self._http.host}]" if ":" in self._http.host else self._http.host
        return f"{host}:{self._http.port}"

    def serve(self) -> None:
        """Answer scrapes from now on, while the engine loads too. Called on the event loop."""
        if self._http is not None:
            self._http.start(self._values, lambda: self.engine.pid if self.engine else 0)

    def watch(self, engine: EngineClient) -> None:
        """The engine serves."""
        self.engine = engine
        if self._log is not None:
            self.tally.on_update = self._log.add_update
            self._log.start(self._sample)

    def _values(self) -> Values:
        return self.tally.values(None if self.engine is None else self.engine.snapshot)

    def _sample(self) -> dict[str, Any]:
        assert self.engine is not None
        return sample(self.engine.state, self._values(), time.time())

    async def close(self) -> None:
        """Write what is pending, answer no more."""
        if self._log is not None:
            await self._log.close()
        if self._http is not None:
            await asyncio.to_thread(self._http.close)
