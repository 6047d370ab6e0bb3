"""A trainer's weights as a source: (Hugging Face name, tensor) in a stable order, and their manifest.

Sources only read. A tensor that a source yields may be the trainer's own: whoever takes it must not
write to it. Nothing of the trainer is merged, cast or moved in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter, getitem
from typing import Protocol

import torch
from torch import nn

from trainers_adapters.parts import Part, check_dtypes, plain_parts, whole
from trainers_adapters.resident import PLAIN, ResidentParameters
from weight_updater.arena import DTYPE_NAMES
from weight_updater.checksum import checksums as checksums_of
from weight_updater.names import is_adapter_name
from weight_updater.packing import PackedBytes
from weight_updater.requests import Manifest, TensorSpec

_IS_CUDA, _SHAPE, _DTYPE = attrgetter("is_cuda"), attrgetter("shape"), attrgetter("dtype")


class Source(Protocol):
    """What push_weights sends."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, the same names in the same order every time; borrowed, read-only."""

    def manifest(self, *, checksums: bool = True) -> Manifest:
        """What iterating yields: names, dtypes, shapes, and on request the checksums of the bytes."""


def is_gathered(source: Source) -> bool:
    """Whether its tensors are gathered as they are asked for, so that nobody may keep all of them."""
    return bool(getattr(source, "gathered", False))


class ModuleSource:
    """The parameters of a plain nn.Module under their Hugging Face names.

    Wrapper segments (module, _orig_mod, ...) are taken off the names; buffers are left out; tied
    parameters come once, under the embedding's name. Parameters and values are read when iterated, so one
    source serves every push. Of sharded parameters (DTensor) those are taken that this process holds whole.

    Args:
        module: on any device; its parameters are never written to.
        dtype: cast on the way out (into a copy), or None to send what is there.

    Raises:
        ValueError: the module holds adapters (PeftSource is for those), parameters of which other ranks
            hold parts (ShardedSource), no parameters at all, a dtype that cannot be sent, or two parameters
            that end up under one name.
    """

    def __init__(self, module: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        parts = plain_parts(module)
        check_dtypes(parts, dtype)
        self._names = [part.name for part in parts]
        refs = [part.refs[0] for part in parts]
        self._places = [ref.owner._parameters for ref in refs], [ref.leaf for ref in refs]
        self._in_memory = ResidentParameters(self._names)
        self._described: tuple[list[torch.dtype], list[torch.Size]] = [], []
        self._manifest = Manifest(())  # of what `_described` says, without checksums

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in zip(self._names, self._parameters(), strict=True):
            tensor = whole(name, parameter.detach())
            yield name, tensor if self._dtype is None else tensor.to(self._dtype)

    def resident(self) -> PackedBytes | None:
        """Where the parameters lie, if they are sent as they are and lie in CPU memory; see resident.py."""
        if self._dtype is not None:
            return None
        return self._in_memory.look(self._parameters())

    def on_gpus(self) -> list[tuple[str, torch.Tensor]] | None:
        """What iterating yields, if that is the parameters as they are and all of them lie on GPUs: the
        parameters themselves, since a tensor made for each would take longer than a look at all of them.
        """
        parameters = self._parameters()
        if self._dtype is not None or not PLAIN.issuperset(map(type, parameters)):
            return None
        return list(zip(self._names, parameters, strict=True)) if all(map(_IS_CUDA, parameters)) else None

    def _parameters(self) -> list[torch.Tensor]:
        """As they are now: load_state_dict(assign=True), for one, puts others in their place."""
        owners, leaves = self._places
        try:
            return list(map(getitem, owners, leaves))  # type: ignore[arg-type]
        except KeyError as error:
            raise ValueError(
                f"the module has no parameter {error} any more, which it had when this source was made; make "
                f"a new one"
            ) from error

    def manifest(self, *, checksums: bool = True) -> Manifest:
        if (packed := self.resident()) is not None:
            return packed.manifest(checksums=checksums)
        parameters = self._parameters()
        dtypes = [self._dtype] * len(parameters) if self._dtype else list(map(_DTYPE, parameters))
        described = dtypes, list(map(_SHAPE, parameters))
        if described != self._described:  # else the same object, whose digest a sender knows
            columns = zip(self._names, *described, strict=True)
            specs = [TensorSpec(name, DTYPE_NAMES[dtype], tuple(shape)) for name, dtype, shape in columns]
            self._manifest, self._described = Manifest(tuple(specs)), described
        if not checksums:
            return self._manifest
        if self._dtype is None:
            return self._manifest.with_checksums(checksums_of([tensor for _, tensor in self]))
        return self._manifest.with_checksums(one_by_one(self))


def has_adapters(module: nn.Module) -> bool:
    """Whether `module` holds adapters; asked of modules, since a sharded one may not show its parameters."""
    return any(is_adapter_name(name) for name, _ in module.named_modules())


def source_of(module: nn.Module, *, dtype: torch.dtype | None = None) -> Source:
    """PeftSource for a module with adapters, else ModuleSource; arguments and errors are theirs."""
    if has_adapters(module):
        from trainers_adapters.peft_source import PeftSource

        return PeftSource(module, dtype=dtype)
    return ModuleSource(module, dtype=dtype)


def tensors_of(parts: Sequence[Part], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of parts that are not sharded, one made at a time."""
    for part in parts:
        yield part.name, part.make([whole(part.name, ref.get()) for ref in part.refs], dtype)


def manifest_of(
    parts: Sequence[Part], dtype: torch.dtype | None, checksums: Sequence[int] | None
) -> Manifest:
    """The manifest of parts that are sent as `dtype`."""
    sums = [None] * len(parts) if checksums is None else checksums
    return Manifest(
        tuple(
            [
                TensorSpec(part.name, DTYPE_NAMES[dtype or part.leaf.dtype], part.leaf.shape, value)
                for part, value in zip(parts, sums, strict=True)
            ]
        )
    )


def one_by_one(source: Source) -> list[int]:
    """The checksums of a source that makes its tensors: one is there at a time."""
    return [checksums_of([tensor])[0] for _, tensor in source]
