"""The model of the goals (the shapes of Qwen3-8B, random weights) and the trainer's copy of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from weight_updater.arena import TORCH_DTYPES
from weight_updater.checksum import checksums as checksums_of
from weight_updater.requests import Layout, Manifest, Placement, ShmSegment, TensorSpec
from weight_updater.shm import SharedSegment

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
}
TINY = QWEN3_8B | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 96,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NORM_VALUE = 1.0
STD = 0.02


def write_config(directory: Path, shape: dict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape, indent=1))
    return directory


class Weights:
    """A trainer's tensors, all in one allocation; a source for push_weights.

    named: names and views of the engine's slots, without aliases.
    """

    def __init__(self, layout: Layout, device: torch.device, seed: int) -> None:
        self.device = device
        self.arena = torch.zeros(layout.arena_bytes, dtype=torch.uint8, device=device)
        places = [place for place in layout.placements if not place.alias_of]
        self.named = {place.name: _view(self.arena, place) for place in places}
        self.dtype = next(iter(self.named.values())).dtype
        self._sign = 1
        self._draw(seed)
        specs = (TensorSpec(place.name, place.dtype, place.shape) for place in places)
        self._manifest = Manifest(tuple(specs))
        self.digest = self._manifest.digest()

    def _draw(self, seed: int) -> None:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for tensor in self.named.values():
            if tensor.dim() == 1:
                tensor.fill_(NORM_VALUE)
            else:
                tensor.normal_(0.0, STD, generator=generator)
        self._synchronise()

    @property
    def nbytes(self) -> int:
        return self._manifest.nbytes

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.named.items())

    def manifest(self, *, checksums: bool = True) -> Manifest:
        if not checksums:
            return self._manifest
        found = zip(self._manifest.tensors, self.checksums(), strict=True)
        return Manifest(tuple(TensorSpec(s.name, s.dtype, s.shape, value) for s, value in found))

    def checksums(self) -> list[int]:
        """In the manifest's order; hashed anew each time, as a trainer has to."""
        return list(checksums_of(list(self.named.values())))

    def change(self) -> None:
        """Another value for every weight: the other sign."""
        self.arena.view(self.dtype).neg_()
        self._sign = -self._sign
        self._synchronise()

    def restore(self) -> None:
        """The values that were drawn."""
        if self._sign < 0:
            self.change()

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class HostWeights:
    """A copy of Weights in a shared-memory segment, packed in the manifest's order, for the tensor path."""

    def __init__(self, weights: Weights) -> None:
        manifest = weights.manifest(checksums=False)
        offsets, size = manifest.packed_offsets()
        self._segment = SharedSegment.create(size)
        self._manifest = manifest
        data = torch.frombuffer(self._segment.buf, dtype=torch.uint8)
        self.named: dict[str, torch.Tensor] = {}
        for (name, tensor), offset in zip(weights, offsets, strict=True):
            place = data[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor)
            self.named[name] = place

    @property
    def descriptor(self) -> ShmSegment:
        return self._segment.descriptor

    def close(self) -> None:
        self.named = {}
        self._segment.close()
        self._segment.unlink()


class Part:
    """The first tensors of a source, at least `nbytes` of them if it has so many: a source too."""

    def __init__(self, named: dict[str, torch.Tensor], manifest: Manifest, nbytes: int) -> None:
        self._named: dict[str, torch.Tensor] = {}
        self.nbytes = 0
        for name, tensor in named.items():
            if self.nbytes >= nbytes:
                break
            self._named[name] = tensor
            self.nbytes += tensor.nbytes
        self._manifest = Manifest(tuple(spec for spec in manifest.tensors if spec.name in self._named))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._named.items())

    def manifest(self, *, checksums: bool = True) -> Manifest:
        if not checksums:
            return self._manifest
        sums = checksums_of(list(self._named.values()))
        found = zip(self._manifest.tensors, sums, strict=True)
        return Manifest(tuple(TensorSpec(s.name, s.dtype, s.shape, value) for s, value in found))


def as_module(named: dict[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters are these tensors, under these names."""
    root = nn.Module()
    for name, tensor in named.items():
        *path, leaf = name.split(".")
        parent = root
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def _view(arena: torch.Tensor, place: Placement) -> torch.Tensor:
    spec = TensorSpec(place.name, place.dtype, place.shape)
    data = arena[place.offset : place.offset + spec.nbytes]
    return data.view(TORCH_DTYPES[place.dtype]).view(place.shape)
