"""PeftSource sends what peft's own merging makes, and what the model computes; nothing of it is moved."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.late import peft
from tests.unit.adapters.fake_engine import FakeEngine, serving
from trainers_adapters import (
    IpcArena,
    ModuleSource,
    PeftSource,
    TensorStream,
    WeightsClient,
    push_weights,
    source_of,
)
from weight_updater.checksum import checksum

if TYPE_CHECKING:
    from peft import PeftModel

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")

WIDTH, VOCAB = 12, 20


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        from transformers.pytorch_utils import Conv1D

        self.down = Conv1D(WIDTH, 2 * WIDTH)  # its weight lies as [in, out]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.q_proj(x))))


class Net(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block(bias), Block(bias)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


IDS = torch.tensor([[1, 5, 9, 0, 19]])
TARGETS = ["q_proj", "up", "down"]


def randomised(model: nn.Module, seed: int = 1) -> nn.Module:
    """Adapters start as nothing (B is zero); training would have moved them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(torch.rand(parameter.shape, generator=generator).to(parameter) + 0.5)
            elif parameter.requires_grad or "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def make(seed: int = 0, dtype: torch.dtype = torch.float32, *, bias: bool = True, **config) -> PeftModel:
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS} | config
    return randomised(peft.get_peft_model(Net(bias=bias).to(dtype), peft.LoraConfig(**config)))


def merged_by_peft(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in copy.deepcopy(model).merge_and_unload().named_parameters()}


def sent(source) -> dict[str, torch.Tensor]:
    return dict(source)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def bits(model: nn.Module) -> dict[str, int]:
    return {name: checksum(p.detach()) for name, p in model.named_parameters()}


CONFIGS: dict[str, dict] = {
    "plain": {},
    "one rank": {"r": 1, "lora_alpha": 1},
    "rslora": {"use_rslora": True},
    "rank and alpha patterns": {
        "rank_pattern": {"layers.0.up": 2, "q_proj": 3},
        "alpha_pattern": {"layers.1.q_proj": 17, "down": 2},
    },
    "bias all": {"bias": "all"},
    "bias of the adapted": {"bias": "lora_only"},
    "bias of the adapter": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["head", "norm"]},
    "embedding": {"target_modules": ["embed", "q_proj", "head"]},
    "Conv1D": {"target_modules": ["down"], "fan_in_fan_out": True},
    "one of two layers": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "layers",
    },
    "dropout": {"lora_dropout": 0.3},
}


@pytest.mark.case("B009")
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_sent_is_what_peft_merges(name: str) -> None:
    model = make(**CONFIGS[name])
    expected = merged_by_peft(model)
    source = PeftSource(model)
    assert_equal(sent(source), expected)
    assert source.names == list(expected) == [name for name, _ in Net().named_parameters()]
    plain = sent(ModuleSource(Net()))
    assert {n: t.shape for n, t in expected.items()} == {n: t.shape for n, t in plain.items()}
    manifest = source.manifest()
    assert [(s.name, s.shape, s.checksum) for s in manifest.tensors] == [
        (n, tuple(t.shape), checksum(t)) for n, t in expected.items()
    ]
    assert source.manifest(checksums=False).digest() == manifest.digest()


def test_the_net_with_what_is_sent_computes_what_the_trainer_does() -> None:
    model = make(bias="all", modules_to_save=["head"], target_modules=["embed", "q_proj", "down"]).eval()
    net = Net()
    net.load_state_dict(sent(PeftSource(model)))
    assert torch.allclose(net(IDS), model(IDS), atol=1e-4)
    with model.disable_adapter():
        assert not torch.allclose(net(IDS), model(IDS), atol=0.1)


@pytest.mark.parametrize(
    "targets", [["q_proj", "up"], ["down"], ["embed"]], ids=["Linear", "Conv1D", "Embedding"]
)
def test_dora_scales_rows_to_their_magnitudes(targets: list[str]) -> None:
    model = make(use_dora=True, target_modules=targets, fan_in_fan_out=targets == ["down"]).eval()
    expected = merged_by_peft(model)
    got = sent(PeftSource(model))
    assert list(got) == list(expected)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    net = Net()
    net.load_state_dict(got)
    torch.testing.assert_close(net(IDS), model(IDS), rtol=1e-4, atol=1e-4)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": lambda model: _Module(model),
    "compile": lambda model: torch.compile(model),
    "compile of DDP": lambda model: torch.compile(_Module(model)),
    "DDP of compile": lambda model: _Module(torch.compile(model)),
}


class _Module(nn.Module):
    """DDP's attribute without its process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.case("B006")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_around_the_model_do_not_show(wrapper: str) -> None:
    model = make(modules_to_save=["head"])
    assert_equal(sent(PeftSource(WRAPPERS[wrapper](model))), merged_by_peft(model))


def test_wrappers_within_the_model_do_not_show() -> None:
    model = make()
    expected = merged_by_peft(model)
    base = model.get_base_model()
    base.layers[0] = torch.compile(base.layers[0])
    layer = base.layers[1].up
    layer.base_layer = torch.compile(layer.base_layer)
    layer.lora_A["default"] = torch.compile(layer.lora_A["default"])
    assert_equal(sent(PeftSource(model)), expected)


@pytest.mark.case("B015")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_hundred_pushes_move_nothing_and_send_the_same_bytes(dtype: torch.dtype) -> None:
    model = make(dtype=dtype, modules_to_save=["head"])
    before, addresses = bits(model), [p.data_ptr() for p in model.parameters()]
    engine = FakeEngine()
    with serving(engine) as address, WeightsClient(address) as client, IpcArena() as arena:
        source = PeftSource(model)
        push_weights(source, client)
        first = dict(engine.weights)
        for step in range(99):
            report = push_weights(source, client, via=arena if step % 2 else TensorStream())
            assert engine.weights == first
        assert report.version == 100
    assert bits(model) == before
    assert [p.data_ptr() for p in model.parameters()] == addresses
    merging = copy.deepcopy(model)
    merging.merge_adapter()
    merging.unmerge_adapter()
    assert bits(merging) != before, "merging in place would have kept the bits too: the test shows nothing"


@pytest.mark.case("B016")
def test_a_step_of_the_adapter_changes_the_layers_that_it_adapts() -> None:
    model = make(target_modules=["q_proj"])
    source = PeftSource(model)
    before = source.manifest()
    with torch.no_grad():
        model.get_base_model().layers[1].q_proj.lora_B["default"].weight.add_(0.5)
    after = source.manifest()
    changed = [a.name for a, b in zip(before.tensors, after.tensors, strict=True) if a.checksum != b.checksum]
    assert changed == ["layers.1.q_proj.weight"]


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_half_precision_is_rounded_once(dtype: torch.dtype | None) -> None:
    model = make(dtype=torch.bfloat16, target_modules=["up"])
    got = sent(PeftSource(model, dtype=dtype))["layers.0.up.weight"]
    layer = model.get_base_model().layers[0].up
    a, b = (held["default"].weight.double() for held in (layer.lora_A, layer.lora_B))
    exact = layer.base_layer.weight.double() + 1.5 * b @ a
    assert got.dtype == (dtype or torch.bfloat16)
    assert torch.equal(got, exact.to(got.dtype)) or dtype is not None
    torch.testing.assert_close(got.double(), exact, rtol=1e-6 if dtype else 2**-8, atol=1e-6)


def two_adapters() -> PeftModel:
    model = make(modules_to_save=["head"])
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=9, target_modules=["up", "q_proj"]))
    return randomised(model, seed=2)


@pytest.mark.parametrize("active", ["default", "other"])
def test_the_active_adapter_is_sent(active: str) -> None:
    model = two_adapters()
    model.set_adapter(active)
    expected = merged_by_peft(model)
    source = PeftSource(model)
    assert_equal(sent(source), expected)
    base = model.get_base_model()
    saved = base.head.modules_to_save["default"] if active == "default" else base.head.original_module
    assert torch.equal(sent(source)["head.weight"], saved.weight)


def test_switching_the_adapter_shows_in_the_next_push_of_the_same_source() -> None:
    model = two_adapters()
    source = PeftSource(model)
    before = sent(source)
    model.set_adapter("other")
    after = sent(source)
    assert_equal(after, merged_by_peft(model))
    assert not torch.equal(before["layers.0.down.weight"], after["layers.0.down.weight"])  # "other" has none


def test_several_active_adapters_add_up() -> None:
    model = make()
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=9, target_modules=["up", "q_proj"]))
    randomised(model, seed=2).base_model.set_adapter(["default", "other"])
    expected = merged_by_peft(model)
    assert_equal(sent(PeftSource(model)), expected)


@pytest.mark.case("B010")
def test_what_peft_has_merged_is_not_merged_again() -> None:
    model = make()
    expected = merged_by_peft(model)
    model.merge_adapter()
    assert_equal(sent(PeftSource(model)), expected)
    model.unmerge_adapter()
    got = sent(PeftSource(model))
    assert all(torch.allclose(got[name], tensor, atol=1e-5) for name, tensor in expected.items())


def test_disabled_adapters_are_no_silent_push_of_the_base_model() -> None:
    model = make()
    source = PeftSource(model)
    with model.disable_adapter(), pytest.raises(ValueError, match=r"q_proj: its adapters are disabled"):
        sent(source)
    sent(source)


def test_no_active_adapter_is_no_silent_push_of_the_base_model() -> None:
    model = make()
    model.base_model.set_adapter([])
    with pytest.raises(ValueError, match="no adapter is active"):
        PeftSource(model)


def test_adapters_that_cannot_be_merged_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.q_proj: adapter default is a MiCALinearVariant"):
        PeftSource(make(init_lora_weights="mica", target_modules=["q_proj"]))
    ia3 = peft.get_peft_model(Net(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match=r"layers\.0\.q_proj is peft's Linear"):
        PeftSource(ia3)
    tokens = make(target_modules=["q_proj"], trainable_token_indices={"embed": [1, 2]})
    with pytest.raises(ValueError, match=r"embed is peft's TrainableTokensWrapper"):
        PeftSource(tokens)
    dora = make(use_dora=True, target_modules=["q_proj"])
    dora.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    dora.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="adapter default uses DoRA"):
        PeftSource(dora)
    with pytest.warns(UserWarning, match="no bias"):
        no_bias = make(bias=False, lora_bias=True, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="lora_bias cannot be merged"):
        PeftSource(no_bias)
    with pytest.raises(ValueError, match=r"torch\.complex64"):
        PeftSource(make(), dtype=torch.complex64)


def test_a_source_is_chosen_by_what_the_module_holds() -> None:
    assert isinstance(source_of(make()), PeftSource)
    assert isinstance(source_of(Net()), ModuleSource)
    assert source_of(Net(), dtype=torch.float64).manifest().tensors[0].dtype == "float64"
    with pytest.raises(ValueError, match="push ModuleSource"):
        PeftSource(Net())
    with pytest.raises(ValueError, match="push PeftSource"):
        ModuleSource(make())


@pytest.mark.case("B005")
def test_a_tied_head_comes_once_unless_an_adapter_parts_it() -> None:
    def tied(targets: list[str], **config) -> PeftModel:
        torch.manual_seed(0)
        net = Net()
        net.head.weight = net.embed.weight
        return randomised(peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=targets, **config)))

    assert "head.weight" not in PeftSource(tied(["q_proj"])).names
    parted = tied(["embed"])
    got = sent(PeftSource(parted))
    base = parted.get_base_model()
    assert torch.equal(got["head.weight"], base.head.weight)
    assert not torch.equal(got["embed.weight"], got["head.weight"])


@pytest.mark.parametrize("make_sender", [TensorStream, IpcArena], ids=["stream", "ipc"])
def test_one_merged_tensor_is_there_at_a_time(make_sender: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainers_adapters.peft_source import Lora

    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    merge = Lora.__call__

    def counted(self: Lora, tensors, dtype: torch.dtype) -> torch.Tensor:
        nonlocal most
        merged = merge(self, tensors, dtype)
        alive.add(merged)
        most = max(most, len(alive))
        return merged

    monkeypatch.setattr(Lora, "__call__", counted)
    model = make(target_modules=["q_proj", "up"])
    with serving(FakeEngine()) as address, WeightsClient(address) as client, make_sender() as sender:
        push_weights(PeftSource(model), client, via=sender)
    assert 1 <= most <= 2, "the one that was just made, and the one before if its taker still holds it"


def test_ddp_of_a_peft_model(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make()
        assert_equal(sent(PeftSource(DistributedDataParallel(model))), merged_by_peft(model))
    finally:
        torch.distributed.destroy_process_group()
