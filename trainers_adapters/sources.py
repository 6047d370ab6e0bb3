"""A trainer's weights as a source: (Hugging Face name, tensor) in a stable order, and their manifest.

Sources only read. A tensor that a source yields may be the trainer's own: whoever takes it must not
write to it. Nothing of the trainer is merged, cast or moved in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from trainers_adapters.resident import ResidentParameters
from weight_updater import clean_name
from weight_updater.arena import DTYPE_NAMES
from weight_updater.checksum import checksums as checksums_of
from weight_updater.names import is_adapter_name
from weight_updater.packing import PackedBytes
from weight_updater.requests import Manifest, TensorSpec


class Source(Protocol):
    """What push_weights sends."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, the same names in the same order every time; borrowed, read-only."""

    def manifest(self, *, checksums: bool = True) -> Manifest:
        """What iterating yields: names, dtypes, shapes, and on request the checksums of the bytes."""


class ModuleSource:
    """The parameters of a plain nn.Module under their Hugging Face names.

    Wrapper segments (module, _orig_mod, ...) are taken off the names; buffers are left out; tied
    parameters come once, under the embedding's name. Values are read when iterated, so one source
    serves every push. Of sharded parameters (DTensor) those are taken that this process holds whole.

    Args:
        module: on any device; its parameters are never written to.
        dtype: cast on the way out (into a copy), or None to send what is there.

    Raises:
        ValueError: the module holds adapters that are not merged, parameters of which other ranks hold
            parts, no parameters at all, a dtype that cannot be sent, or two parameters that end up under
            one name.
    """

    def __init__(self, module: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._parameters = _named_once(module)
        self._in_memory = ResidentParameters(self._parameters)
        self._described: list[tuple[torch.dtype, torch.Size]] = []
        self._manifest = Manifest(())  # of what `_described` says, without checksums
        if not self._parameters:
            raise ValueError(f"{type(module).__name__} has no parameters to push")
        for name, parameter in self._parameters.items():
            if (dtype or parameter.dtype) not in DTYPE_NAMES:
                raise ValueError(
                    f"{name} is {dtype or parameter.dtype}; it can be sent as one of "
                    f"{', '.join(DTYPE_NAMES.values())} (pass dtype=)"
                )

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            tensor = whole(name, parameter.detach())
            yield name, tensor if self._dtype is None else tensor.to(self._dtype)

    def resident(self) -> PackedBytes | None:
        """Where the parameters lie, if they are sent as they are and lie in CPU memory; see resident.py."""
        if self._dtype is not None:
            return None
        return self._in_memory.look(list(self._parameters.values()))

    def manifest(self, *, checksums: bool = True) -> Manifest:
        if (packed := self.resident()) is not None:
            return packed.manifest(checksums=checksums)
        described = [(self._dtype or p.dtype, p.shape) for p in self._parameters.values()]
        if described != self._described:  # else the same object, whose digest a sender knows
            named = zip(self._parameters, described, strict=True)
            specs = [TensorSpec(name, DTYPE_NAMES[dtype], tuple(shape)) for name, (dtype, shape) in named]
            self._manifest, self._described = Manifest(tuple(specs)), described
        if not checksums:
            return self._manifest
        if self._dtype is None:
            return self._manifest.with_checksums(checksums_of([tensor for _, tensor in self]))
        # One cast copy at a time.
        return self._manifest.with_checksums([checksums_of([tensor])[0] for _, tensor in self])


def _named_once(module: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter once, under its cleaned name, in the module's order; a tie keeps the embedding."""
    embeddings = {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, nn.Embedding)
    }
    kept: dict[object, tuple[str, str, nn.Parameter]] = {}  # storage -> (own name, cleaned name, parameter)
    for own, parameter in module.named_parameters(remove_duplicate=False):
        if is_adapter_name(own):
            raise ValueError(
                f"{own} belongs to an adapter; merge the adapters into a copy of the module and push that"
            )
        key = storage_key(whole(own, parameter))
        if key not in kept or (own in embeddings and kept[key][0] not in embeddings):
            kept[key] = (own, clean_name(own), parameter)
    named: dict[str, nn.Parameter] = {}
    for own, name, parameter in kept.values():
        if name in named:
            raise ValueError(f"two parameters are called {name} once wrappers are removed (one is {own})")
        named[name] = parameter
    return named


def whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a DTensor, of its memory; any other tensor as it is.

    Raises:
        ValueError: other ranks hold parts of it, so this one alone cannot tell its value.
    """
    if not hasattr(tensor, "to_local"):  # torch.distributed.tensor, which a trainer without it never loads
        return tensor
    sharded: Any = tensor
    num_ranks = sharded.device_mesh.size()
    if num_ranks > 1 and not all(placement.is_replicate() for placement in sharded.placements):
        raise ValueError(
            f"{name} is sharded over {num_ranks} ranks; gather it on all of them (full_tensor()) first"
        )
    local: torch.Tensor = sharded.to_local()
    return local


def storage_key(parameter: torch.Tensor) -> object:
    """Equal for tensors that are one: the same object, or views of exactly the same memory."""
    if parameter.numel() == 0 or parameter.device.type == "meta":
        return id(parameter)
    return (parameter.device, parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride())
