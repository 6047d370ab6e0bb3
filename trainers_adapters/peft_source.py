"""PEFT models as a source: LoRA adapters merged on the way out, into one temporary tensor at a time.

What is sent is what the model computes with now: of each layer the active adapters, of modules_to_save the
active copy. The trainer's base weights are only read, so no number of pushes moves them by a bit; merging in
place and unmerging again would.

    sent weight   W + scaling * B @ A            (+ one such term for each further active adapter)
    with DoRA     m / |W + scaling * B @ A| * (W + scaling * B @ A), the norm of each output's row

peft is imported when a source is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trainers_adapters.parts import (
    Leaves,
    Part,
    Ref,
    check_dtypes,
    once,
    walk,
    whole_leaves,
)
from trainers_adapters.sources import manifest_of, one_by_one, tensors_of
from weight_updater.requests import Manifest

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class PeftSource:
    """The weights of a module with LoRA adapters, merged, under their Hugging Face names.

    For a PeftModel or a model with injected adapters, wrapped (DDP, torch.compile) or not. Which adapters
    are active is read at every push, as are the values. Layers whose adapters peft has merged already are
    sent as they are. A merged tensor is computed in float32 at least and rounded once, to the dtype that is
    sent; it lives until the next one is asked for.

    Args:
        module: on any device; its parameters are never written to.
        dtype: cast on the way out, or None to send each weight in the dtype of its base layer.

    Raises:
        ValueError: at once, and again at a push: no adapter is active, the adapters are disabled, or an
            adapter is of a kind that cannot be merged (anything but LoRA and DoRA on Linear, Conv1D and
            Embedding layers; several active ones with DoRA among them; quantised layers). Also what
            ModuleSource refuses.
        ImportError: peft is not installed.
    """

    def __init__(self, module: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        self._module = module
        self._dtype = dtype
        check_dtypes(merged_parts(module), dtype)

    @property
    def names(self) -> list[str]:
        return [part.name for part in merged_parts(self._module)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return tensors_of(merged_parts(self._module), self._dtype)

    def manifest(self, *, checksums: bool = True) -> Manifest:
        sums = one_by_one(self) if checksums else None
        return manifest_of(merged_parts(self._module), self._dtype, sums)


def merged_parts(module: nn.Module, leaves: Leaves = whole_leaves) -> list[Part]:
    """The parts of a module with LoRA adapters as they are active now, each once.

    Raises:
        ValueError: see PeftSource.
    """
    adapted = _Adapted(leaves)
    parts = once(walk(module, (), leaves, adapted.parts), module)
    if not adapted.num_layers:
        raise ValueError(f"{type(module).__name__} has no LoRA layer; push ModuleSource(module)")
    if not adapted.any_active:
        raise ValueError(
            "no adapter is active in any layer, so the push would bring the base model; call set_adapter"
        )
    return parts


class _Adapted:
    """Finds what peft put into a module; one walk."""

    def __init__(self, leaves: Leaves) -> None:
        from peft.tuners import lora
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        self._leaves = leaves
        self._mergeable = (lora.Linear, lora.Embedding)
        self._to_save = ModulesToSaveWrapper
        self._others = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        self.num_layers = 0
        self.any_active = False

    def parts(self, module: nn.Module, path: tuple[str, ...]) -> Iterator[Part] | None:
        """The parts of a layer that peft made, or None if `module` is none."""
        kind = next((c for c in type(module).__mro__ if c.__module__.startswith("peft.")), None)
        if kind is None:
            return None
        if issubclass(kind, self._to_save):
            return self._saved(module, path)
        if kind in self._mergeable:
            return self._layer(module, path)
        if issubclass(kind, self._others):
            raise ValueError(
                f"{'.'.join(path)} is peft's {kind.__name__}, which cannot be merged on the way out; "
                "LoRA and DoRA on Linear, Conv1D and Embedding layers can"
            )
        return None

    def _saved(self, module: Any, path: tuple[str, ...]) -> Iterator[Part]:
        """Of a module that is trained whole: the active adapter's copy."""
        _check_enabled(module, path)
        chosen = module.original_module
        for adapter in module.active_adapters:
            if adapter in module.modules_to_save:
                chosen = module.modules_to_save[adapter]
                self.any_active = True
        return walk(chosen, path, self._leaves, self.parts)

    def _layer(self, layer: Any, path: tuple[str, ...]) -> Iterator[Part]:
        """A LoRA layer's base layer, its weight and bias merged."""
        self.num_layers += 1
        _check_enabled(layer, path)
        base = walk(layer.base_layer, path, self._leaves, self.parts)
        if layer.merged:  # by peft: the base layer computes alone
            self.any_active = True
            return base
        held = layer.lora_embedding_A if len(layer.lora_embedding_A) else layer.lora_A
        active = [adapter for adapter in layer.active_adapters if adapter in held]
        if not active:
            return base
        self.any_active = True
        _check_variants(layer, active, path)
        return self._merged(layer, active, base)

    def _merged(self, layer: Any, active: Sequence[str], base: Iterator[Part]) -> Iterator[Part]:
        found = [_factors(layer, adapter) for adapter in active]
        biases = [
            (Ref(_inner(layer.lora_B[adapter]), "bias"), layer.scaling[adapter])
            for adapter in active
            if layer.lora_bias.get(adapter)
        ]
        has_bias = False
        for part in base:
            leaf = part.refs[0].leaf
            has_bias = has_bias or leaf == "bias"
            if leaf == "weight":
                merge = Lora(found[0].transposed, tuple(f.scaling for f in found), found[0].dora)
                refs = [ref for factors in found for ref in factors.refs]
                yield self._changed(part, refs, merge)
            elif leaf == "bias" and biases:
                merge_bias = LoraBias(tuple(scaling for _, scaling in biases))
                yield self._changed(part, [ref for ref, _ in biases], merge_bias)
            else:
                yield part
        if biases and not has_bias:
            raise ValueError(
                f"{part.path}: an adapter with lora_bias cannot be merged into a layer without a bias"
            )

    def _changed(self, part: Part, refs: Sequence[Ref], merge: Lora | LoraBias) -> Part:
        """The part with more parameters merged into it; one with another only if all of them are."""
        leaves = [self._leaves(ref.owner)[ref.leaf] for ref in refs]
        return replace(
            part,
            refs=(*part.refs, *refs),
            merge=merge,
            key=(part.key, merge, *(leaf.key for leaf in leaves)),
        )


@dataclass(frozen=True, slots=True)
class _Factors:
    """One adapter of one layer. refs: A, B and, with DoRA, the magnitudes."""

    refs: tuple[Ref, ...]
    scaling: float
    transposed: bool
    dora: bool


def _factors(layer: Any, adapter: str) -> _Factors:
    dora = bool(layer.use_dora.get(adapter))
    if adapter in layer.lora_embedding_A:  # an embedding's weight lies as [in, out]
        refs = [Ref(layer.lora_embedding_A, adapter), Ref(layer.lora_embedding_B, adapter)]
        transposed = True
    else:
        refs = [Ref(_inner(held[adapter]), "weight") for held in (layer.lora_A, layer.lora_B)]
        transposed = bool(layer.fan_in_fan_out)
    if dora:
        refs.append(Ref(_inner(layer.lora_magnitude_vector[adapter]), "weight"))
    return _Factors(tuple(refs), float(layer.scaling[adapter]), transposed, dora)


@dataclass(frozen=True, slots=True)
class Lora:
    """W + scaling * B @ A for each adapter; with DoRA (one adapter) its rows scaled to their magnitudes.

    transposed: W is [in, out]. scalings: of the adapters in order.
    """

    transposed: bool
    scalings: tuple[float, ...]
    dora: bool

    def __call__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """
        Args:
            tensors: W [out, in] (transposed: [in, out]), then for each adapter A [rank, in] and
                B [out, rank]; with DoRA the magnitudes [out] last.
        """
        weight, *factors = tensors
        merged = weight.to(_wide(weight.dtype), copy=True)
        for index, scaling in enumerate(self.scalings):
            a, b = (factor.to(_wide(factor.dtype)) for factor in factors[2 * index : 2 * index + 2])
            delta = (b @ a).mul_(scaling).to(merged.device)
            merged += delta.T if self.transposed else delta
        if self.dora:
            rows = 0 if self.transposed else 1  # each output's weights lie along this dimension
            norms = torch.linalg.vector_norm(merged, dim=rows)
            magnitudes = factors[-1].to(merged) / norms
            merged *= magnitudes.unsqueeze(rows)
        return merged.to(dtype)


@dataclass(frozen=True, slots=True)
class LoraBias:
    """bias + scaling * B.bias for each adapter that has one (lora_bias)."""

    scalings: tuple[float, ...]

    def __call__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """
        Args:
            tensors: the base layer's bias [out], then each adapter's [out].
        """
        bias, *added = tensors
        merged = bias.to(_wide(bias.dtype), copy=True)
        for scaling, one in zip(self.scalings, added, strict=True):
            merged += scaling * one.to(merged)
        return merged.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _inner(module: nn.Module) -> nn.Module:
    """The module under wrappers that hold its parameters."""
    while True:
        wrapped = [module._modules[name] for name in _WRAPPERS if name in module._modules]
        if not wrapped or wrapped[0] is None:
            return module
        module = wrapped[0]


def _check_enabled(layer: Any, path: Sequence[str]) -> None:
    if layer.disable_adapters:
        raise ValueError(
            f"{'.'.join(path)}: its adapters are disabled, so the push would bring the base model; push "
            "outside of disable_adapter()"
        )


def _check_variants(layer: Any, active: Sequence[str], path: Sequence[str]) -> None:
    variants = getattr(layer, "lora_variant", {})
    for adapter in active:
        dora = bool(layer.use_dora.get(adapter))
        if adapter in variants and not dora:
            raise ValueError(
                f"{'.'.join(path)}: adapter {adapter} is a {type(variants[adapter]).__name__}, which cannot "
                "be merged on the way out; LoRA and DoRA can"
            )
        if dora and len(active) > 1:
            raise ValueError(
                f"{'.'.join(path)}: adapter {adapter} uses DoRA, which cannot be merged together with others "
                f"({', '.join(active)} are active); activate one"
            )
