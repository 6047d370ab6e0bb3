"""What a source's tensors are made of: parameters of a trainer's module, found anew each time they are read.

A part is one tensor that a source yields. Most are one parameter as it is; a LoRA layer's weight is merged
from several (lora.py). Where the parameters are sharded, the same parts are made of gathered ones
(sharding/).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from weight_updater import clean_name
from weight_updater.arena import DTYPE_NAMES
from weight_updater.names import is_adapter_name


@dataclass(frozen=True, slots=True)
class Ref:
    """A parameter by its place: wrappers that shard may put another object there."""

    owner: nn.Module
    leaf: str

    def get(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.owner, self.leaf)
        return tensor


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is known of a parameter without gathering it.

    shape, dtype: of the whole parameter. key: equal for parameters that are one (ties).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    key: object


class Merge(Protocol):
    """How several parameters become one tensor."""

    def __call__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of `dtype` in the first one's shape; the given ones are only read."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor that a source yields.

    name: cleaned. path: as the module has it. leaf: of the first parameter, which gives the shape.
    refs: what it is made of. merge: how; None: the first parameter as it is. key: equal for parts that are
    one tensor. embedding: of the parts that are one, this one's name is taken.
    """

    name: str
    path: str
    leaf: Leaf
    refs: tuple[Ref, ...]
    merge: Merge | None
    key: object
    embedding: bool

    def make(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None) -> torch.Tensor:
        """The tensor, from its whole parameters in the order of `refs`; the parameter's own if nothing has to
        be done to it.
        """
        with torch.no_grad():
            if self.merge is not None:
                return self.merge([t.detach() for t in tensors], dtype or self.leaf.dtype)
            tensor = tensors[0].detach()
            return tensor if dtype is None else tensor.to(dtype)


Leaves = Callable[[nn.Module], Mapping[str, Leaf]]
"""A module's own parameters (not its children's), by attribute."""

Special = Callable[[nn.Module, tuple[str, ...]], Iterator[Part] | None]
"""The parts of a module that is no plain one, given its path; None: it is plain."""


def storage_key(parameter: torch.Tensor) -> object:
    """Equal for tensors that are one: the same object, or views of exactly the same memory."""
    if parameter.numel() == 0 or parameter.device.type == "meta":
        return id(parameter)
    return (parameter.device, parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride())


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a parameter's values are spread over a mesh. Loads nothing: there is none before its module."""
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and isinstance(tensor, home.DTensor)


def whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a DTensor, of its memory; any other tensor as it is.

    Raises:
        ValueError: other ranks hold parts of it, so this one alone cannot tell its value.
    """
    ranks = "the trainer's"
    if is_dtensor(tensor):
        sharded: Any = tensor
        num_ranks = sharded.device_mesh.size()
        if num_ranks == 1 or all(placement.is_replicate() for placement in sharded.placements):
            local: torch.Tensor = sharded.to_local()
            return local
        ranks = str(num_ranks)
    elif name != "_flat_param" and tensor.numel() >= getattr(tensor, "ds_numel", 0):
        return tensor
    raise ValueError(
        f"{name} is sharded over {ranks} ranks; push ShardedSource(module) with push_sharded, on all of them"
    )


def whole_leaves(module: nn.Module) -> dict[str, Leaf]:
    """The own parameters of a module that is not sharded.

    Raises:
        ValueError: this rank has only a part of one.
    """
    return {
        leaf: Leaf(tuple(p.shape), p.dtype, storage_key(whole(leaf, p)))
        for leaf, p in module._parameters.items()
        if p is not None
    }


def walk(
    module: nn.Module, path: tuple[str, ...], leaves: Leaves, special: Special | None = None
) -> Iterator[Part]:
    """Every parameter as a part, in the order of named_parameters, ties each time they occur."""
    parts = special(module, path) if special is not None else None
    if parts is not None:
        yield from parts
        return
    for name, leaf in leaves(module).items():
        own = ".".join([*path, name])
        embedding = isinstance(module, nn.Embedding)
        yield Part(clean_name(own), own, leaf, (Ref(module, name),), None, leaf.key, embedding)
    for name, child in module._modules.items():
        if child is not None:
            yield from walk(child, (*path, name), leaves, special)


def plain_parts(module: nn.Module, leaves: Leaves = whole_leaves) -> list[Part]:
    """The parts of a module without adapters, each once.

    Raises:
        ValueError: as for `once`, or the module has adapters.
    """
    return once(_without_adapters(walk(module, (), leaves)), module)


def _without_adapters(parts: Iterable[Part]) -> Iterator[Part]:
    for part in parts:
        if is_adapter_name(part.path):
            raise ValueError(f"{part.path} belongs to an adapter; push PeftSource(module), which merges it")
        yield part


def once(parts: Iterable[Part], module: nn.Module) -> list[Part]:
    """Each tensor once, where it occurs first; of tied ones the embedding's name.

    Raises:
        ValueError: `module` has no parameters, or two of them end up under one name.
    """
    kept: dict[object, Part] = {}
    for part in parts:
        if part.key not in kept or (part.embedding and not kept[part.key].embedding):
            kept[part.key] = part
    if not kept:
        raise ValueError(f"{type(module).__name__} has no parameters to push")
    named: dict[str, Part] = {}
    for part in kept.values():
        if part.name in named:
            raise ValueError(
                f"two parameters are called {part.name} once wrappers are removed (one is {part.path})"
            )
        named[part.name] = part
    return list(named.values())


def check_dtypes(parts: Iterable[Part], dtype: torch.dtype | None) -> None:
    """
    Raises:
        ValueError: a part would be sent in a dtype that the wire does not have.
    """
    for part in parts:
        sent = dtype or part.leaf.dtype
        if sent not in DTYPE_NAMES:
            raise ValueError(
                f"{part.name} is {sent}; it can be sent as one of "
                f"{', '.join(DTYPE_NAMES.values())} (pass dtype=)"
            )
