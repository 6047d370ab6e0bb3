"""ModuleSource: names, ties, order, dtypes, and that the trainer's tensors are only read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainers_adapters.sources import ModuleSource
from weight_updater.checksum import checksum


class Tiny(nn.Module):
    def __init__(self, *, tie: bool = True) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 6, bias=False)  # registered before the embedding on purpose
        self.embed_tokens = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("inv_freq", torch.ones(2))
        if tie:
            self.lm_head.weight = self.embed_tokens.weight


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = nn.Module()
        self.module._orig_mod = inner


@pytest.mark.case("B005")
def test_a_tie_comes_once_under_the_embedding() -> None:
    assert ModuleSource(Tiny()).names == ["embed_tokens.weight", "norm.weight", "norm.bias"]


def test_an_untied_head_comes_too_and_buffers_never_do() -> None:
    names = ModuleSource(Tiny(tie=False)).names
    assert names == ["lm_head.weight", "embed_tokens.weight", "norm.weight", "norm.bias"]


def test_views_of_the_same_memory_are_a_tie_and_disjoint_views_are_not() -> None:
    module = nn.Module()
    buffer = torch.arange(8.0)
    module.a = nn.Parameter(buffer[:4])
    module.b = nn.Parameter(buffer[4:])
    module.c = nn.Parameter(buffer[:4])
    assert ModuleSource(module).names == ["a", "b"]


def test_wrappers_are_taken_off() -> None:
    module = Tiny()
    wrapped = ModuleSource(Wrapped(module))
    assert wrapped.names == ModuleSource(module).names
    assert wrapped.manifest() == ModuleSource(module).manifest()


@pytest.mark.case("B016")
def test_unmerged_adapters_are_refused() -> None:
    module = nn.Module()
    module.lora_A = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"lora_A\.weight belongs to an adapter"):
        ModuleSource(module)


def test_names_that_collide_are_refused() -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(1))
    module.module = nn.Module()
    module.module.w = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="two parameters are called w"):
        ModuleSource(module)


def test_dtypes_that_cannot_be_sent_are_refused_unless_cast() -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(4, dtype=torch.complex64), requires_grad=False)
    with pytest.raises(ValueError, match=r"w is torch\.complex64"):
        ModuleSource(module)


def test_the_manifest_describes_what_iterating_yields() -> None:
    module = Tiny()
    module.norm.weight = nn.Parameter(torch.randn(8, 4).t()[0])  # strided
    for dtype in (None, torch.bfloat16):
        source = ModuleSource(module, dtype=dtype)
        manifest = source.manifest()
        assert [spec.name for spec in manifest.tensors] == [name for name, _ in source]
        for spec, (_, tensor) in zip(manifest.tensors, source, strict=True):
            assert spec.dtype == ("float32" if dtype is None else "bfloat16")
            assert spec.shape == tuple(tensor.shape)
            assert spec.checksum == checksum(tensor)
        assert all(spec.checksum is None for spec in source.manifest(checksums=False).tensors)


def test_values_are_read_when_iterated() -> None:
    module = Tiny()
    source = ModuleSource(module)
    before = source.manifest()
    with torch.no_grad():
        module.norm.bias.add_(1)
    after = source.manifest()
    changed = [a.name for a, b in zip(after.tensors, before.tensors, strict=True) if a.checksum != b.checksum]
    assert changed == ["norm.bias"]
    assert after.digest() == before.digest()


def test_what_is_lent_of_gpus_is_the_parameters_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Tiny()
    on_gpus = {id(parameter) for parameter in module.parameters()}
    assert ModuleSource(module).on_gpus() is None
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: id(self) in on_gpus))
    found = ModuleSource(module).on_gpus()
    assert found is not None
    expected = [
        ("embed_tokens.weight", module.embed_tokens.weight),
        ("norm.weight", module.norm.weight),
        ("norm.bias", module.norm.bias),
    ]
    assert all(
        a == b and lent is parameter for (a, lent), (b, parameter) in zip(found, expected, strict=True)
    )
    assert ModuleSource(module, dtype=torch.float64).on_gpus() is None, "a cast has to be made"
    on_gpus.remove(id(module.norm.bias))
    assert ModuleSource(module).on_gpus() is None
    on_gpus.add(id(module.norm.bias))

    class Elsewhere(nn.Parameter):
        """As a DTensor is: its own data pointer tells nothing."""

    source = ModuleSource(module)
    module.norm.bias = Elsewhere(module.norm.bias.detach())
    on_gpus.add(id(module.norm.bias))
    assert source.on_gpus() is None
