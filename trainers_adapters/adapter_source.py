"""A LoRA adapter as a source of its own: A and B alone, for an engine that holds adapters beside its weights.

What is sent is a thousandth of the model. The engine must serve the very base weights that the adapter is
trained on, so the push says their checksum, and an engine that serves others refuses it.

peft is imported when a source is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainers_adapters.parts import Part, check_dtypes, once, walk, whole, whole_leaves
from trainers_adapters.sources import manifest_of, one_by_one, tensors_of
from weight_updater.arena import TORCH_DTYPES
from weight_updater.checksum import checksums as checksums_of
from weight_updater.checksum import fold_by_name
from weight_updater.requests import AdapterModule, AdapterSpec, Layout, Manifest


@dataclass(frozen=True, slots=True)
class _Layer:
    """One adapted linear layer. parts: A and B."""

    module: str
    parts: tuple[Part, Part]
    scaling: float

    @property
    def rank(self) -> int:
        return self.parts[0].leaf.shape[0]


class AdapterSource:
    """One adapter of a PEFT model, under the names of its layers; push_weights sends it like any source.

    Values are read at every push. The base weights are hashed at the first push and then again when one of
    them was written to in a way that autograd counts, or replaced.

    Args:
        module: a PeftModel or a model with injected adapters, wrapped or not; it is only read.
        name: that requests choose the adapter by.
        adapter: which of the model's adapters; None takes the active one.
        dtype: cast on the way out, or None to send what is there; the engine rounds to its own dtype.
        check_base: say the base weights' checksum. Without it nothing shows that the engine serves the same
            (quantised base weights cannot be compared).

    Raises:
        ValueError: at once, and again at a push: no adapter of that name, several active ones, disabled ones,
            one that peft has merged into the base layers, or one that is more than LoRA on linear layers
            (modules_to_save, embeddings, biases, DoRA ...), which only PeftSource can send.
        ImportError: peft is not installed.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        *,
        adapter: str | None = None,
        dtype: torch.dtype | None = None,
        check_base: bool = True,
    ) -> None:
        self.name = name
        self._module = module
        self._adapter = adapter
        self._dtype = dtype
        self._check_base = check_base
        self._base: tuple[object, int] = (None, 0)  # what was hashed, and its checksum
        if not name:
            raise ValueError("an adapter needs a name; requests choose it by one")
        check_dtypes(self._parts(), dtype)

    @property
    def names(self) -> list[str]:
        return [part.name for part in self._parts()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return tensors_of(self._parts(), self._dtype)

    def manifest(self, *, checksums: bool = True) -> Manifest:
        return manifest_of(self._parts(), self._dtype, one_by_one(self) if checksums else None)

    def spec(self, layout: Layout) -> AdapterSpec:
        """What BeginUpdate says of the adapter.

        Args:
            layout: of the engine, whose dtypes the base weights are compared in.

        Raises:
            ValueError: the engine has a weight that the base model lacks.
        """
        layers = list(self._walk().layers)
        first = layers[0]
        others = [layer for layer in layers if (layer.rank, layer.scaling) != (first.rank, first.scaling)]
        return AdapterSpec(
            name=self.name,
            rank=first.rank,
            scaling=first.scaling,
            modules=tuple(AdapterModule(layer.module, layer.rank, layer.scaling) for layer in others),
            base_checksum=self._base_checksum(layout) if self._check_base else None,
        )

    def _base_checksum(self, layout: Layout) -> int:
        """One checksum over the base weights as the engine would hold them, in the order of their names."""
        found = {part.name: part.refs[0].get() for part in once(self._walk().base, self._module)}
        slots = [place for place in layout.placements if not place.alias_of]
        if lacking := [place.name for place in slots if place.name not in found]:
            raise ValueError(
                f"the engine has {lacking[0]}, which the base model lacks ({len(lacking)} weights); do "
                f"both come of the same model?"
            )
        tensors = [whole(place.name, found[place.name]).detach() for place in slots]
        state = layout.digest(), tuple([(t.data_ptr(), t._version) for t in tensors])
        if state != self._base[0]:
            values: dict[str, int] = {}
            for place, tensor in zip(slots, tensors, strict=True):
                (values[place.name],) = checksums_of([tensor.to(TORCH_DTYPES[place.dtype])])
            self._base = state, fold_by_name(values)
        return self._base[1]

    def _parts(self) -> list[Part]:
        return [part for layer in self._walk().layers for part in layer.parts]

    def _walk(self) -> _Walk:
        return _Walk(self._module, self._adapter)


class _Walk:
    """What a module holds now: the adapter's layers, and every parameter of the base model."""

    def __init__(self, module: nn.Module, adapter: str | None) -> None:
        from peft.tuners import lora
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        self._lora_linear = lora.Linear
        self._to_save = ModulesToSaveWrapper
        self._others = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        self._adapter = adapter
        self.layers: list[_Layer] = []
        self.base = list(walk(module, (), whole_leaves, self._special))
        if not self.layers:
            wanted = "LoRA layer" if adapter is None else f"layer with adapter {adapter!r}"
            raise ValueError(f"{type(module).__name__} has no {wanted}")

    def _special(self, module: Any, path: tuple[str, ...]) -> Iterator[Part] | None:
        """The base parameters of a layer that peft made, or None if `module` is none."""
        if not isinstance(module, self._others):
            return None
        if isinstance(module, self._to_save):
            if self._chosen(module, path, module.modules_to_save):
                raise _not_alone(path, "is trained whole (modules_to_save)")
            return walk(module.original_module, path, whole_leaves, self._special)
        if type(module) is not self._lora_linear:
            raise _not_alone(path, f"is peft's {type(module).__name__}")
        adapter = self._chosen(module, path, module.lora_A)
        if adapter is not None:
            self.layers.append(_layer(module, adapter, path))
        return walk(module.base_layer, path, whole_leaves, self._special)

    def _chosen(self, module: Any, path: tuple[str, ...], held: Any) -> str | None:
        """The adapter of this layer that is to be sent, or None if it has none."""
        if module.disable_adapters:
            raise ValueError(f"{'.'.join(path)}: adapters are disabled; push outside of disable_adapter()")
        if getattr(module, "merged", False):
            raise ValueError(
                f"{'.'.join(path)}: peft has merged adapters into its base layer, so one that is pushed "
                f"beside it would count twice; call unmerge_adapter(), or push PeftSource"
            )
        if self._adapter is not None:
            return self._adapter if self._adapter in held else None
        active = [adapter for adapter in module.active_adapters if adapter in held]
        if len(active) > 1:
            raise ValueError(
                f"{'.'.join(path)}: {', '.join(active)} are active; say which one with adapter=, or push "
                f"their sum with PeftSource"
            )
        return active[0] if active else None


def _layer(layer: Any, adapter: str, path: tuple[str, ...]) -> _Layer:
    if adapter in getattr(layer, "lora_variant", {}) or layer.use_dora.get(adapter):
        raise _not_alone(path, f"has a variant of LoRA in adapter {adapter}")
    if layer.lora_bias.get(adapter):
        raise _not_alone(path, f"has a bias in adapter {adapter}")
    if layer.fan_in_fan_out:
        raise _not_alone(path, "has its weight transposed")
    (a,), (b,) = (
        walk(getattr(layer, side)[adapter], (*path, side), whole_leaves) for side in ("lora_A", "lora_B")
    )
    return _Layer(a.name.removesuffix(".lora_A.weight"), (a, b), float(layer.scaling[adapter]))


def _not_alone(path: tuple[str, ...], what: str) -> ValueError:
    return ValueError(
        f"{'.'.join(path)} {what}, which an engine cannot hold beside its base weights; push PeftSource, "
        f"which merges it"
    )
