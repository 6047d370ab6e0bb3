"""AdoptedArena against a hand-written engine: whose memory the parameters are, and how an update ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rollout_engine.v1 import weights_pb2 as wpb
from tests.unit.adapters.fake_engine import FakeEngine, serving
from trainers_adapters.adopt import AdoptedArena
from trainers_adapters.clients import WeightsClient
from weight_updater.shm import SharedSegment


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.Parameter(torch.ones(3))


def layout(**norm: object) -> wpb.GetWeightLayoutResponse:
    """norm first, at byte 0; the embedding at 256; the head shares the embedding's bytes."""
    place = {"name": "norm", "dtype": wpb.DTYPE_FLOAT32, "shape": [3], "offset": 0} | norm
    embed = wpb.TensorPlacement(name="embed.weight", dtype=wpb.DTYPE_FLOAT32, shape=[4, 3], offset=256)
    head = wpb.TensorPlacement(
        name="head.weight", dtype=wpb.DTYPE_FLOAT32, shape=[4, 3], offset=256, alias_of="embed.weight"
    )
    return wpb.GetWeightLayoutResponse(
        placements=[wpb.TensorPlacement(**place), embed, head], arena_bytes=512
    )


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.layout = layout()
    return engine


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[WeightsClient]:
    with serving(engine) as address, WeightsClient(address) as client:
        yield client


def floats(data: memoryview, offset: int, count: int) -> list[float]:
    return torch.frombuffer(data, dtype=torch.float32, offset=offset, count=count).tolist()


def test_parameters_become_views_and_keep_values_ties_and_identity(engine, client):
    module = Tied()
    parameters, before = list(module.parameters()), module.embed.weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with AdoptedArena(client, module) as arena:
        assert list(map(id, module.parameters())) == list(map(id, parameters))
        assert module.head.weight is module.embed.weight
        with SharedSegment.open(arena.descriptor) as seen:
            assert floats(seen.buf, 256, 12) == before.flatten().tolist()
            module.norm.grad = torch.full((3,), 0.25)
            with arena.update(version=8):
                optimizer.step()
            assert floats(seen.buf, 0, 3) == [0.75] * 3
        assert arena.report.version == 8
        assert engine.events[-3:] == ["BeginUpdate", "UpdateWeightsFromIpc", "CommitUpdate"]
        assert engine.begun[0].adopt
        assert [t.name for t in engine.begun[0].manifest.tensors] == ["norm", "embed.weight"]
        inside = module.norm.data_ptr()
    assert engine.events[-1] == "Release"
    assert module.norm.data_ptr() != inside
    assert module.norm.tolist() == [0.75] * 3
    assert module.head.weight is module.embed.weight


def test_a_descriptor_that_cannot_be_put_in_place_leaves_no_file(engine, client, tmp_path):
    place = tmp_path / "arena.json"
    place.mkdir()
    with AdoptedArena(client, Tied()) as arena:
        with pytest.raises(IsADirectoryError):
            arena.write_descriptor(place)
        assert list(tmp_path.iterdir()) == [place]


def test_a_block_that_raises_aborts_the_update(engine, client):
    with AdoptedArena(client, Tied()) as arena:
        with pytest.raises(RuntimeError, match="diverged"), arena.update():
            raise RuntimeError("the loss diverged")
        assert engine.events[-1] == "AbortUpdate"
        assert arena.report is None
        with arena.update():
            pass
        assert arena.report.version == 1


@pytest.mark.parametrize(
    ("norm", "match"),
    [
        ({"shape": [2]}, r"norm is torch\.float32 \(3,\)"),
        ({"dtype": wpb.DTYPE_BFLOAT16}, r"needs torch\.bfloat16"),
        ({"name": "scale"}, "norm: the engine has no such slot"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_and_left_alone(norm, match, engine, client):
    engine.layout = layout(**norm)
    module = Tied()
    before = [parameter.data_ptr() for parameter in module.parameters()]
    with pytest.raises(ValueError, match=match):
        AdoptedArena(client, module)
    assert [parameter.data_ptr() for parameter in module.parameters()] == before
