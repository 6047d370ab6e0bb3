"""A small net, and the ways in which trainers spread one over two gloo ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from tests.tiny import load_reference
from tests.unit.adapters import zero3_stand_in
from trainers_adapters import ModuleSource

WIDTH, VOCAB = 6, 11  # rows that two ranks cannot share evenly


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


IDS = torch.tensor([[0, 3, 10]])


def moved_model(directory: Path, seed: int) -> Any:
    """The transformers model of `directory`, its weights moved by a seed: the same in every process."""
    torch.manual_seed(seed)
    model = load_reference(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


# ---------------------------------------------------------------- the ways to shard it


def fsdp2(net: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in getattr(net, "layers", ()):
        fully_shard(layer, **options)
    return fully_shard(net, **options)


def fsdp2_half(net: nn.Module) -> nn.Module:
    """Computes in bfloat16; the shards, which are the truth, stay in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp2(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def fsdp2_with_ignored(net: nn.Module) -> nn.Module:
    """Some parameters stay as they are, next to DTensors."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(net.layers[0])
    return fully_shard(net, ignored_params=set(net.norm.parameters()) | {net.layers[1].up.weight})


def tensor_parallel(net: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    return parallelize_module(net, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def tensor_parallel_transformer(model: Any) -> nn.Module:
    """A causal model of transformers: heads, rows and the vocabulary over the ranks, its head tied again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"model.embed_tokens": RowwiseParallel()}
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{part}"] = ColwiseParallel()
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{part}"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    model.lm_head.weight = model.model.embed_tokens.weight  # sharding made another Parameter of it
    return model


def fsdp1(net: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    options = {"device_id": torch.device("cpu"), **options}
    for index, layer in enumerate(net.layers):
        net.layers[index] = Fsdp(layer, **options)
    return Fsdp(net, **options)


def fsdp1_own_parameters(net: nn.Module) -> nn.Module:
    return fsdp1(net, use_orig_params=True)


def ddp(net: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net)


def zero3(net: nn.Module) -> nn.Module:
    zero3_stand_in.install()
    return zero3_stand_in.shard(net)


WAYS = {
    f.__name__: f
    for f in (fsdp2, fsdp2_half, fsdp2_with_ignored, tensor_parallel, fsdp1, fsdp1_own_parameters, ddp, zero3)
}


# ---------------------------------------------------------------- adapters


def with_adapters(net: nn.Module) -> Any:
    """LoRA on most layers, and a head that is trained whole, as if they had been trained."""
    from peft import LoraConfig, get_peft_model

    targets = ["up", "down", "embed"]
    model = get_peft_model(
        net, LoraConfig(r=3, lora_alpha=5, target_modules=targets, modules_to_save=["head"])
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape))
    return model


def shard_under_adapters(model: Any, way: str) -> nn.Module:
    """Shard what the PeftModel wraps."""
    model.base_model.model = WAYS[way](model.base_model.model)
    return model


def expected_of(net: Any, lora: bool) -> Iterable[tuple[str, torch.Tensor]]:
    """What has to arrive, of a net that is not sharded yet."""
    return ModuleSource(copy.deepcopy(net).merge_and_unload() if lora else net)
