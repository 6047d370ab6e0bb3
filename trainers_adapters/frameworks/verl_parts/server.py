"""One replica's server: verl's agent loops ask it for tokens, verl's trainer tells it to sleep and to wake.

It runs as a Ray actor, and sampling, aborting and memory go through it; weights do not: whoever pushes them
talks to the engine itself and then says here what was committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from trainers_adapters.aio import AsyncRolloutClient
from trainers_adapters.errors import RollsyncError
from trainers_adapters.frameworks.owned_engine import OwnedEngine
from trainers_adapters.frameworks.verl_settings import (
    EngineKwargs,
    as_arguments,
    max_tokens_of,
    sampling_of,
    serve_flags,
)
from trainers_adapters.results import Completion

log = logging.getLogger(__name__)

DRAIN_S = 60.0
"""Seconds in which aborted requests must come back, and in which an engine must be idle before it sleeps."""
LOOK_S = 0.01

STOP_REASONS = {"stop": "completed", "length": "completed", "abort": "aborted"}
"""verl's word for each of the engine's; others are given as they are."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where a replica's engine listens, and who it is."""

    address: str
    token: str
    node_ip: str


class RollsyncServer:
    """Starts an engine, or finds the one that runs, and stands between it and verl.

    Args:
        config: the RolloutConfig. model_path: a directory. mode: hybrid, colocated or standalone.
        replica_rank: of this server. visible_devices: the GPUs of its workers, "" for none.
    """

    def __init__(
        self, config: Any, model_path: str, mode: str, replica_rank: int, visible_devices: str, node_ip: str
    ) -> None:
        self._config = config
        self._kwargs = EngineKwargs.of(config)
        self._model_path = model_path
        self._mode = mode
        self._replica_rank = replica_rank
        self._visible_devices = visible_devices
        self._node_ip = node_ip
        self._engine: OwnedEngine | None = None
        self._where: EngineAddress | None = None
        self._client: AsyncRolloutClient | None = None
        self._context = 0
        self._running: set[str] = set()  # requests that are past the gate
        self._open = asyncio.Event()  # the gate
        self._open.set()
        self._rejecting = False
        self._steps: dict[int, int] = {}  # weight version -> verl's global step
        self._latest: tuple[int, int | None] = (0, None)  # (weight version, global step)

    # ------------------------------------------------------------ life

    async def launch_server(self) -> None:
        """Start the engine, or meet the one that is there."""
        kwargs = self._kwargs
        if kwargs.addresses:
            if self._replica_rank >= len(kwargs.addresses):
                raise ValueError(
                    f"replica {self._replica_rank} has no engine: engine_kwargs.rollsync.addresses names "
                    f"{len(kwargs.addresses)}; name one for each replica"
                )
            self._where = EngineAddress(kwargs.addresses[self._replica_rank], kwargs.token, self._node_ip)
        else:
            self._engine = await asyncio.to_thread(self._start)
            self._where = EngineAddress(self._engine.address, self._engine.token, self._node_ip)
        self._client = AsyncRolloutClient(self._where.address, token=self._where.token or None)
        info = await self._client.info()
        self._context = min(info.context_length, self._config.max_model_len or info.context_length)
        self._latest = (info.weight_version, None)

    def _start(self) -> OwnedEngine:
        """THREAD."""
        import torch

        on_gpu = bool(self._visible_devices) and torch.cuda.is_available()
        flags = serve_flags(self._config, self._model_path, self._kwargs, on_gpu=on_gpu)
        public = self._mode == "standalone"  # its weights come from other hosts
        if public:
            flags.setdefault("host", self._node_ip)
        return OwnedEngine(
            as_arguments(flags),
            env={"CUDA_VISIBLE_DEVICES": self._visible_devices} if self._visible_devices else None,
            public=public,
            start_s=self._kwargs.start_s,
        )

    async def get_engine(self) -> EngineAddress:
        """Where weights are pushed to."""
        assert self._where is not None, "launch_server comes first"
        return self._where

    async def get_server_address(self) -> tuple[str, int]:
        """(host, port) of the engine, as seen from other hosts; unique among replicas."""
        host, _, port = (await self.get_engine()).address.rpartition(":")
        loopback = host in ("127.0.0.1", "localhost", "[::1]")
        return self._node_ip if loopback else host.strip("[]"), int(port)

    async def shutdown(self) -> None:
        """End the engine, if it is ours."""
        if self._client is not None:
            await self._client.close()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    @property
    def _rollout(self) -> AsyncRolloutClient:
        assert self._client is not None, "launch_server comes first"
        return self._client

    # ------------------------------------------------------------ tokens

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """One completion of token ids.

        Returns:
            token_ids, EOS included; log_probs of each (if sampling_params.logprobs); stop_reason completed or
            aborted, then with the tokens so far; num_preempted; and extra_fields: global_steps (verl's number
            for the weights that sampled the last token), min_global_steps, max_global_steps, weight_version,
            num_cached_tokens.

        Raises:
            ValueError: images, or a parameter that the engine does not know.
            RollsyncError: the engine refused, or is gone.
        """
        if image_data or video_data or audio_data:
            raise ValueError("a rollsync engine samples from text; the prompt has images, video or audio")
        prompt = [int(token) for token in prompt_ids]
        sampling = sampling_of(sampling_params, self._config, request_id)
        sampling["max_tokens"] = max_tokens_of(sampling_params, len(prompt), self._config, self._context)
        while not self._open.is_set():
            if self._rejecting:
                return self._aborted()
            await self._open.wait()
        self._running.add(request_id)
        try:
            (completion,) = await self._rollout.generate(
                prompt,
                request_id=request_id,
                priority=priority,
                timeout_s=self._kwargs.request_s,
                **sampling,
            )
        finally:
            self._running.discard(request_id)
        if completion.finish_reason == "error":
            raise RollsyncError("INTERNAL", "REQUEST_FAILED", completion.error)
        return self._output(completion, logprobs=bool(sampling_params.get("logprobs")))

    def _output(self, completion: Completion, *, logprobs: bool) -> TokenOutput:
        versions = completion.weight_versions or [completion.weight_version]
        steps = [self._steps.get(version) for version in versions]
        known = [step for step in steps if step is not None]
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.logprobs if logprobs else None,
            stop_reason=STOP_REASONS.get(completion.finish_reason, completion.finish_reason),
            num_preempted=completion.num_preemptions,
            extra_fields={
                "global_steps": steps[-1],
                "min_global_steps": min(known, default=None),
                "max_global_steps": max(known, default=None),
                "weight_version": versions[-1],
                "num_cached_tokens": completion.num_cached_tokens,
            },
        )

    def _aborted(self) -> TokenOutput:
        version, step = self._latest
        return TokenOutput(
            token_ids=[],
            log_probs=[],
            stop_reason="aborted",
            num_preempted=0,
            extra_fields={
                "global_steps": step,
                "min_global_steps": step,
                "max_global_steps": step,
                "weight_version": version,
                "num_cached_tokens": None,
            },
        )

    # ------------------------------------------------------------ abort

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End what runs, with the tokens so far, and let nothing new in until resume_generation.

        Args:
            reject_request: what comes meanwhile is answered as aborted at once; otherwise it waits.

        Raises:
            RollsyncError: requests did not come back in time.
        """
        self._rejecting = reject_request
        if reject_request:
            self._open.set()  # wakes those that wait; they look again once it is closed, and are rejected
        self._open.clear()
        aborted: set[str] = set()
        give_up = asyncio.get_running_loop().time() + DRAIN_S
        while self._running:
            running = sorted(self._running)
            aborted.update((await self._rollout.abort(running)).aborted)
            if asyncio.get_running_loop().time() > give_up:
                text = f"{len(running)} requests did not end within {DRAIN_S:g} s (first: {running[0]})"
                raise RollsyncError("DEADLINE_EXCEEDED", "BUSY", text)
            await asyncio.sleep(LOOK_S)
        return {"aborted_count": len(aborted), "request_ids": sorted(aborted)}

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End one request with the tokens so far."""
        found = await self._rollout.abort([request_id])
        return {"aborted": bool(found.aborted), "request_id": request_id}

    async def resume_generation(self) -> None:
        """Let requests in again."""
        self._rejecting = False
        self._open.set()

    async def wait_for_requests_to_drain(self) -> None:
        """Until no request is past the gate.

        Raises:
            RollsyncError: they did not end in time.
        """
        give_up = asyncio.get_running_loop().time() + DRAIN_S
        while self._running:
            if asyncio.get_running_loop().time() > give_up:
                text = f"{len(self._running)} requests still run after {DRAIN_S:g} s; abort them first"
                raise RollsyncError("DEADLINE_EXCEEDED", "BUSY", text)
            await asyncio.sleep(LOOK_S)

    # ------------------------------------------------------------ memory

    async def sleep(self) -> None:
        """Give the device's memory to the trainer: the KV cache, and (hybrid) the weights, which the next
        update brings back.
        """
        if self._mode == "standalone" or not self._config.free_cache_engine:
            return
        await self._release(["weights", "kv_cache"] if self._mode == "hybrid" else ["kv_cache"])

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again: weights, kv_cache, or all that was given."""
        if self._mode != "standalone":
            await self._rollout.resume_memory(list(tags or ()), timeout_s=self._kwargs.timeout_s)

    async def release_kv_cache(self) -> None:
        """Give up the KV cache alone, for the length of an update."""
        if self._config.free_cache_engine and self._mode != "colocated":
            await self._release(["kv_cache"])

    async def resume_kv_cache(self) -> None:
        """Undo release_kv_cache."""
        if self._config.free_cache_engine and self._mode != "colocated":
            await self._rollout.resume_memory(["kv_cache"], timeout_s=self._kwargs.timeout_s)

    async def _release(self, tags: list[str]) -> None:
        await self.wait_for_requests_to_drain()
        await self._rollout.release_memory(tags, timeout_s=self._kwargs.timeout_s)

    async def clear_kv_cache(self) -> None:
        """Drop cached prefixes. Those of older weights never match anyhow, so running requests are left
        alone.
        """
        try:
            await self._rollout.flush_cache()
        except RollsyncError as error:
            if error.reason != "BUSY":
                raise
            log.info("the prefix cache stays, since requests run: %s", error)

    # ------------------------------------------------------------ versions

    async def committed(self, weight_version: int, global_steps: int | None) -> None:
        """An update was committed: its tokens belong to verl's global step `global_steps`."""
        self._latest = (weight_version, global_steps)
        if global_steps is not None:
            self._steps[weight_version] = global_steps

    async def set_global_steps(self, global_steps: int) -> None:
        """verl's number for the weights that are live now."""
        info = await self._rollout.info()
        await self.committed(info.weight_version, global_steps)

    async def get_info(self) -> dict[str, Any]:
        """For tests and people: what is live."""
        info = await self._rollout.info()
        return {
            "weight_version": info.weight_version,
            "global_steps": self._latest[1],
            "status": info.state.status,
            "released_tags": list(info.state.released_tags),
            "pid": self._engine.process.pid if self._engine is not None else None,
        }

    # ------------------------------------------------------------ profiler

    async def start_profile(self, **kwargs: Any) -> None:
        """Nothing: the engine's own metrics tell."""

    async def stop_profile(self) -> None:
        """Nothing."""
