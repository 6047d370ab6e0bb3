"""The trainer's side: what is pushed is what it has, nothing of it changes, and success means applied."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

import grpc
import pytest
import torch
from torch import nn

from tests.cases.common import strided
from tests.engines import RunningEngine
from tests.tiny import load_reference
from tests.unit.adapters.fake_engine import FakeEngine, serving
from tests.wire.trainer import PATHS, SEEDS, all_senders, assert_serves, checksums_of, train
from trainers_adapters import ModuleSource, PushError, TensorStream, push_weights
from trainers_adapters.clients import WeightsClient
from weight_updater.checksum import checksum


@pytest.fixture(scope="module")
def senders(served, tmp_path_factory):
    with all_senders(tmp_path_factory.mktemp("pushes")) as made:
        yield made


@pytest.fixture
def model(tied_dir):
    made = load_reference(tied_dir)
    train(made, next(SEEDS))
    return made


OPTIONS = [
    dict(zip(("staging", "verify", "keep_previous", "partial"), values, strict=True))
    for values in itertools.product(("host", "none"), (True, False), (False, True), (False, True))
    if not (values[0] == "none" and values[2])
]


def values_of(model: nn.Module) -> dict[str, int]:
    """Checksums of the parameters as the trainer has them, whatever a source makes of them."""
    return checksums_of((name, parameter.detach()) for name, parameter in model.named_parameters())


@pytest.mark.case("B016")
@pytest.mark.parametrize("path", PATHS)
def test_a_push_after_a_step_changes_the_engine_whatever_is_switched_on(
    path, served: RunningEngine, senders, model
):
    """And one without a step says that it changed nothing."""
    source = ModuleSource(model)
    push_weights(source, served.weights)
    for options in OPTIONS:
        before = served.weights.checksums().by_name
        assert before == values_of(model)
        train(model, next(SEEDS))
        report = push_weights(source, served.weights, via=senders[path], **options)
        assert report.num_changed > 0
        after = served.weights.checksums()
        assert after.by_name == values_of(model), options
        assert all(after.by_name[name] != value for name, value in before.items()), options
        assert after.weight_version == report.version
        if options["verify"] or (path in ("disk", "segment", "ipc") and options["staging"] == "host"):
            again = push_weights(source, served.weights, via=senders[path], **options)
            assert again.num_changed == 0, options
            assert again.version == report.version + 1
    assert_serves(served, model, served.rollout.info().weight_version)


@pytest.mark.case("B016")
def test_one_tensor_that_learned_is_one_that_changed(served: RunningEngine, senders, model):
    source = ModuleSource(model)
    push_weights(source, served.weights)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.view(-1)[0] += 0.5
        assert push_weights(source, served.weights, via=senders["ipc"]).num_changed == 1, name


class Forgets(TensorStream):
    """A transport that somebody switched off: it reports success and sends nothing."""

    def send(self, client, begun, outgoing):
        return None


class SendsLess(TensorStream):
    """One that sends all but the last chunk."""

    def _chunks(self, outgoing) -> Iterator:
        return iter(list(super()._chunks(outgoing))[:-1])


@pytest.mark.case("B072")
@pytest.mark.parametrize("make", [Forgets, SendsLess])
def test_a_transport_that_sends_nothing_is_no_new_version(make, served: RunningEngine, model):
    before = served.weights.checksums()
    with pytest.raises(PushError) as failed:
        push_weights(ModuleSource(model), served.weights, via=make(chunk_bytes=64))
    assert failed.value.reason == "INCOMPLETE"
    after = served.weights.checksums()
    assert (after.by_name, after.weight_version) == (before.by_name, before.weight_version)
    assert served.rollout.info().state.open_update_id == ""


@pytest.mark.case("B072")
def test_a_version_comes_from_the_engines_reply_alone():
    engine = FakeEngine()
    with serving(engine) as address, WeightsClient(address) as client:
        source = ModuleSource(nn.Linear(3, 2))
        assert push_weights(source, client, 4).version == 4
        engine.num_tensors_said = 0
        with pytest.raises(PushError, match="applied no tensor"):
            push_weights(source, client, 5)
        engine.num_tensors_said = None
        engine.refuse["CommitUpdate"] = (grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH", "no")
        with pytest.raises(PushError) as failed:
            push_weights(source, client, 9)
        assert (failed.value.version, failed.value.committed) == (0, ())


@pytest.mark.case("B013")
@pytest.mark.case("B015")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pushing_leaves_the_trainer_as_it_was(dtype, path, served: RunningEngine, senders, model):
    """To the bit and in place: it is read, never merged, cast or moved."""
    model.to(dtype)
    before = {name: (p.detach().clone(), p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    for options in ({}, {"staging": "none"}, {"verify": False}):
        push_weights(ModuleSource(model), served.weights, via=senders[path], **options)
    for name, parameter in model.named_parameters():
        value, address, kind = before[name]
        assert torch.equal(parameter, value)
        assert (parameter.data_ptr(), parameter.dtype) == (address, kind)
        assert parameter.requires_grad


@pytest.mark.case("B031")
@pytest.mark.case("B106")
@pytest.mark.parametrize("path", PATHS)
def test_parameters_of_any_strides_arrive_by_value(path, served: RunningEngine, senders, model):
    """Transposed, a column of a wider one, every second row, from an offset: logical values are sent."""
    parameters = list(model.parameters())
    for parameter, view in zip(parameters, strided(dict(model.named_parameters())).values(), strict=True):
        parameter.data = view
    assert not any(parameter.is_contiguous() for parameter in parameters)
    for options in ({}, {"staging": "none"}, {"verify": False}):
        train(model, next(SEEDS))
        report = push_weights(ModuleSource(model), served.weights, via=senders[path], **options)
        assert served.weights.checksums().by_name == checksums_of(ModuleSource(model)), options
    assert_serves(served, model, report.version)


@pytest.fixture(scope="module")
def mesh():
    """A mesh of this one process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.case("B095")
@pytest.mark.parametrize("placement", ["sharded", "replicated"])
@pytest.mark.parametrize("path", PATHS)
def test_sharded_plain_and_offloaded_parameters_arrive_alike(path, placement, mesh, served, senders, model):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    expected = checksums_of(ModuleSource(model))
    layer = model.model.layers[0]
    where = [Shard(0)] if placement == "sharded" else [Replicate()]
    for module in (layer.self_attn.q_proj, layer.mlp.up_proj, model.model.norm):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach().clone(), mesh, where))
    assert isinstance(layer.self_attn.q_proj.weight, DTensor)
    assert not isinstance(layer.self_attn.k_proj.weight, DTensor)
    source = ModuleSource(model)
    assert {spec.name: spec.checksum for spec in source.manifest().tensors} == expected
    report = push_weights(source, served.weights, via=senders[path])
    live = served.weights.checksums()
    assert (live.by_name, live.weight_version) == (expected, report.version)
    assert all(type(tensor) is torch.Tensor for _, tensor in source)


@pytest.mark.case("B095")
def test_a_part_of_a_parameter_is_never_sent_for_the_whole(monkeypatch, mesh):
    """Of a parameter that other ranks hold parts of, one rank alone cannot send the whole."""
    from torch.distributed.tensor import Shard, distribute_tensor

    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    monkeypatch.setattr(type(module.weight.device_mesh), "size", lambda self, *args: 2)
    with pytest.raises(ValueError, match=r"weight is sharded over 2 ranks"):
        ModuleSource(module)


@pytest.mark.case("B010")
@pytest.mark.case("B016")
def test_adapters_that_were_not_merged_are_refused_by_the_source():
    """Base weights alone would be what the engine has already, for a whole run."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(4, 4)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})

    module = nn.Module()
    module.q_proj = Lora()
    with pytest.raises(ValueError, match="belongs to an adapter"):
        ModuleSource(module)
    assert checksum(module.q_proj.base_layer.weight) != 0
