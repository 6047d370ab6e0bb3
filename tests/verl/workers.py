"""Trainers of the tests: verl workers with a transformers model, which push it as verl's own workers do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.rollout.base import get_rollout_class

from weight_updater.checksum import checksum

Weights = Iterator[tuple[str, torch.Tensor]]


class TrainerWorker(Worker):
    """A rank with the whole model, and verl's rollout or checkpoint engine beside it.

    Args:
        config: verl's `actor_rollout_ref`. with_rollout: as in a hybrid worker.
    """

    def __init__(self, config: Any, with_rollout: bool) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=120, backend="cpu:gloo")
        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
        self.yielded = 0
        self.rollout = None
        if with_rollout:
            rollout = omega_conf_to_dataclass(config.rollout)
            model = omega_conf_to_dataclass(config.model)
            self.rollout = get_rollout_class("rollsync")(config=rollout, model_config=model, device_mesh=None)
        backend = config.rollout.checkpoint_engine.backend
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            backend, bucket_size=64 << 10, is_master=self.rank == 0
        )

    def weights(self, spoil: str = "") -> Weights:
        """The model's weights as state_dict has them.

        spoil: "nan@1": with such a value on rank 1; "raise@0": with an error half way on rank 0.
        """
        what, _, rank = spoil.partition("@")
        here = bool(what) and int(rank) == self.rank
        self.yielded = 0
        for name, tensor in self.model.state_dict().items():
            lent = tensor.clone()
            if here and name.endswith("model.norm.weight"):
                if what == "raise":
                    raise RuntimeError("the shards cannot be gathered")
                lent[0] = float(what)
            self.yielded += 1
            yield name, lent
            lent.fill_(float("nan"))  # nobody may use it any longer

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def learn(self, amount: float) -> int:
        """Change every weight; the checksum of the last norm."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(amount * torch.sin(torch.arange(parameter.numel())).view(parameter.shape))
        return checksum(self.model.model.norm.weight)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(
        self, global_steps: int | None = None, mode: str = "naive", spoil: str = ""
    ) -> Any:
        """In the order of verl's ActorRolloutRefWorker."""
        if mode != "naive":
            return await self.checkpoint_engine.send_weights(self.weights(spoil), global_steps=global_steps)
        if self.config.rollout.free_cache_engine:
            await self.rollout.resume(tags=["weights"])
        await self.rollout.update_weights(
            self.weights(spoil), peft_config=None, base_sync_done=True, global_steps=global_steps
        )
        if self.config.rollout.free_cache_engine:
            await self.rollout.resume(tags=["kv_cache"])
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def num_yielded(self) -> int:
        """How far the last generator came."""
        return self.yielded

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checksums(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in self.model.named_parameters()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def logprobs(self, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
        """The model's own, of each token of the completion."""
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            logits = self.model(ids).logits[0, len(prompt) - 1 : -1] / temperature
        return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()


def make_trainers(config: Any, count: int, *, with_rollout: bool) -> RayWorkerGroup:
    """A worker group of `count` ranks, each with a GPU of Ray's."""
    pool = RayResourcePool([count], use_gpu=True, max_colocate_count=2)
    made = RayClassWithInitArgs(
        cls=ray.remote(TrainerWorker), config=config.actor_rollout_ref, with_rollout=with_rollout
    )
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
