"""verl's replica of rollout name `rollsync`: one engine, and one server actor beside it."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_resource_name
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import RolloutReplica

from trainers_adapters.frameworks.verl_names import check_names
from trainers_adapters.frameworks.verl_parts.server import RollsyncServer
from trainers_adapters.frameworks.verl_settings import NAME, check_config


def server_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """Of a replica's server actor. kind: "", reward or teacher."""
    return f"{NAME}_server_{kind + '_' if kind else ''}{replica_rank}_0{suffix}"


class RollsyncReplica(RolloutReplica):  # type: ignore[misc]
    """verl makes one for each engine; arguments are RolloutReplica's.

    Raises:
        ValueError: a setting that the engine cannot honour.
        IncompatibleVerl: the installed verl lacks a name that this needs.
    """

    servers: list[Any]
    workers: list[Any]

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        check_names()
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        check_config(self.config, self.model_config)

    async def launch_servers(self) -> None:
        """Start the server actor on the node of the replica's worker, with its GPU."""
        if len(self.workers) != self.world_size:
            raise ValueError(f"replica {self.replica_rank} has {len(self.workers)} workers, not one")
        node_id, node_ip, devices = await self.workers[0].__ray_call__.remote(_place, get_resource_name())
        kind = "reward" if self.is_reward_model else "teacher" if self.is_teacher_model else ""
        platform = get_platform()
        environment = {name: "1" for name in platform.ray_noset_envvars()} | platform.rollout_env_vars()
        if devices:
            environment[platform.visible_devices_envvar()] = ",".join(devices)
        server = (
            ray.remote(RollsyncServer)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                runtime_env={"env_vars": environment},
                name=server_name(self.replica_rank, kind, self.name_suffix),
                max_concurrency=self.max_concurrency,
            )
            .remote(
                config=self.config,
                model_path=_model_path(self.model_config),
                mode=self.rollout_mode.value,
                replica_rank=self.replica_rank,
                visible_devices=",".join(devices),
                node_ip=node_ip,
            )
        )
        self.servers.append(server)
        await server.launch_server.remote()
        host, port = await server.get_server_address.remote()
        self._server_handle = server
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End one request with the tokens so far."""
        answer: dict[str, Any] = await self.servers[0].abort_request.remote(request_id)
        return answer

    async def shutdown(self) -> None:
        """End the engine (if it was started here) and the server actor."""
        for server in self.servers:
            await server.shutdown.remote()
            ray.kill(server)
        self.servers = []


def _place(worker: Any, resource: str) -> tuple[str, str, list[str]]:
    """On the worker: its node, that node's address, and its devices."""
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(resource) or []
    node_ip = ray.util.get_node_ip_address().strip("[]")
    return context.get_node_id(), node_ip, [str(device) for device in devices]


def _model_path(model_config: Any) -> str:
    """The model's directory on this host."""
    local = getattr(model_config, "local_path", None)
    return str(local or copy_to_local(model_config.path, use_shm=getattr(model_config, "use_shm", False)))
