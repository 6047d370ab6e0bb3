"""How the whole of a sharded parameter is had, one kind of sharding each. All collectives are here.

A gatherer also says what a parameter is without gathering it (`leaves`), so that a push can be planned and
refused before anything moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from trainers_adapters.parts import Leaf, Part, Ref, is_dtensor, storage_key


class Gatherer(Protocol):
    """One kind of sharding.

    frees: whether gathered tensors are gone when `whole` ends.
    """

    frees: bool

    def ready(self) -> None:
        """ALL RANKS, before a push: bring the module into the state in which its shards are the truth."""

    def leaves(self, module: nn.Module) -> Mapping[str, Leaf]:
        """A module's own parameters, by attribute; shapes are of whole ones."""

    def group_of(self, part: Part) -> object:
        """Parts of one group are best gathered at once, however large; None: it does not matter."""

    def whole(self, refs: Sequence[Ref]) -> AbstractContextManager[list[torch.Tensor]]:
        """ALL RANKS, the same parameters in the same order: whole tensors, only to be read."""


class Tensors:
    """DTensor parameters (FSDP2, tensor parallelism, both), and those that every rank holds whole (DDP, or
    left out of the sharding).
    """

    frees = False

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._sharded = [child for child in module.modules() if isinstance(child, FSDPModule)]

    def ready(self) -> None:
        # A forward without a backward leaves whole parameters behind, in the dtype that was computed in.
        for module in self._sharded:
            module.reshard()

    def leaves(self, module: nn.Module) -> dict[str, Leaf]:
        return {
            leaf: Leaf(tuple(p.shape), p.dtype, id(p) if is_dtensor(p) else storage_key(p))
            for leaf, p in module._parameters.items()
            if p is not None
        }

    def group_of(self, part: Part) -> object:
        return None

    @contextmanager
    def whole(self, refs: Sequence[Ref]) -> Iterator[list[torch.Tensor]]:
        with torch.no_grad():
            tensors = [_full(ref.get()) for ref in refs]
        yield tensors


def _full(tensor: Any) -> torch.Tensor:
    if not is_dtensor(tensor):
        own: torch.Tensor = tensor.detach()
        return own
    device = device_of(tensor)
    if tensor.device != device:  # offloaded: its group cannot move memory of the CPU
        tensor = tensor.to(device)
    whole: torch.Tensor = tensor.full_tensor()
    return whole.detach()


def device_of(tensor: Any) -> torch.device:
    """Where a parameter is gathered."""
    device: torch.device = tensor.device
    if not is_dtensor(tensor) or device.type == tensor.device_mesh.device_type:
        return device
    return torch.device(tensor.device_mesh.device_type, torch.cuda.current_device())


class Zero3:
    """DeepSpeed's ZeRO-3: parameters are empty but for deepspeed's context."""

    frees = True

    def __init__(self) -> None:
        from deepspeed import zero

        self._zero = zero

    def ready(self) -> None:
        """Shards are always the truth."""

    def leaves(self, module: nn.Module) -> dict[str, Leaf]:
        return {
            leaf: Leaf(tuple(getattr(p, "ds_shape", p.shape)), p.dtype, id(p))
            for leaf, p in module._parameters.items()
            if p is not None
        }

    def group_of(self, part: Part) -> object:
        return None

    @contextmanager
    def whole(self, refs: Sequence[Ref]) -> Iterator[list[torch.Tensor]]:
        tensors = [ref.get() for ref in refs]
        sharded = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
        with self._zero.GatheredParameters(sharded, modifier_rank=None):
            yield [tensor.data for tensor in tensors]


class Fsdp1:
    """FullyShardedDataParallel: one unit (a wrapped module without the units in it) at a time.

    ALL RANKS make it: every unit is gathered once to see what lies in it.
    """

    frees = True

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        self._kind = FullyShardedDataParallel
        self._units = [child for child in module.modules() if isinstance(child, FullyShardedDataParallel)]
        self._unit_of: dict[int, int] = {}  # id of a module -> its unit's index
        self._leaves: dict[int, dict[str, Leaf]] = {}  # id of a module -> its parameters
        for index, unit in enumerate(self._units):  # the outermost first: it makes itself the root
            with self._summoned(index):
                for inner in self._within(unit):
                    self._unit_of[id(inner)] = index
                    self._leaves[id(inner)] = {
                        leaf: Leaf(tuple(p.shape), p.dtype, (index, id(p)))
                        for leaf, p in inner._parameters.items()
                        if p is not None
                    }

    def _within(self, module: nn.Module) -> Iterator[nn.Module]:
        """The modules of a unit: not those of the units in it, nor FSDP's own."""
        for child in module._modules.values():
            if child is not None and not isinstance(child, self._kind):
                yield child
                yield from self._within(child)

    def _summoned(self, index: int) -> AbstractContextManager[None]:
        summoned: AbstractContextManager[None] = self._kind.summon_full_params(
            self._units[index], recurse=False, writeback=False
        )
        return summoned

    def ready(self) -> None:
        """Between steps the shards are the truth."""

    def leaves(self, module: nn.Module) -> Mapping[str, Leaf]:
        if isinstance(module, self._kind):
            return {}
        known = self._leaves.get(id(module))
        if known is not None:
            return known
        return {
            leaf: Leaf(tuple(p.shape), p.dtype, storage_key(p))
            for leaf, p in module._parameters.items()
            if p is not None
        }

    def group_of(self, part: Part) -> object:
        return self._unit_of.get(id(part.refs[0].owner))

    @contextmanager
    def whole(self, refs: Sequence[Ref]) -> Iterator[list[torch.Tensor]]:
        units = dict.fromkeys(self._unit_of[id(ref.owner)] for ref in refs if id(ref.owner) in self._unit_of)
        with ExitStack() as stack:
            for index in units:
                stack.enter_context(self._summoned(index))
            yield [ref.get().detach() for ref in refs]


def gatherer_of(module: nn.Module) -> Gatherer:
    """ALL RANKS. The one that fits how `module` is sharded.

    Raises:
        ImportError: it has parameters of ZeRO-3 and deepspeed is not installed.
    """
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        return Zero3()
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
        return Fsdp1(module)
    return Tensors(module)
