"""Shapes, dtypes and strides: what arrives is what was meant, or it is refused before a byte is written."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from tests.cases.common import (
    EMBED,
    HEAD,
    NORM,
    UP,
    K,
    Q,
    Tensors,
    assert_serves,
    live,
    stored,
    strided,
    trained,
)
from tests.desk import desk
from tests.tiny import make_tiny
from tests.ways import STAGINGS, WAYS, Ways
from tests.wire.trainer import PROMPT
from trainers_adapters import ModuleSource, TensorStream
from trainers_adapters.sending import Outgoing
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.requests import Staging
from weight_updater.safetensors_io import save_weights

HALFWAY = torch.tensor([1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)])
"""Between two bfloat16 values: ties go to the even one."""
ROUNDED = [1.0, 1.0, 1.015625, -1.0]


@pytest.fixture(scope="module")
def narrow(tied_dir, tmp_path_factory):
    """A bfloat16 engine, and ways to it."""
    folder = tmp_path_factory.mktemp("narrow")
    with (
        desk(tied_dir, dtype="bfloat16", reserve_device_staging=True, weights_roots=(folder,)) as engine,
        Ways(engine, folder) as ways,
    ):
        yield engine, ways


@pytest.mark.case("B024")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", WAYS)
def test_values_are_rounded_to_nearest_even(way, staging, dtype, narrow, weights):
    engine, ways = narrow
    new = {name: tensor.to(dtype) for name, tensor in trained(weights).items()}
    new[NORM] = HALFWAY.to(dtype).repeat(16)
    reply = ways.push(way, new, staging=staging)
    target = engine.runner.target
    assert target.slot(NORM).tolist() == ROUNDED * 16
    assert all(torch.equal(target.slot(name), tensor.bfloat16()) for name, tensor in new.items())
    assert reply.verified


@pytest.mark.case("B024")
@pytest.mark.parametrize("way", WAYS)
def test_values_that_overflow_are_refused(way, narrow, weights):
    engine, ways = narrow
    before, new = live(engine), trained(weights)
    new[UP][1, 2] = 3.4e38  # finite as it comes, infinite in the engine's dtype
    with pytest.raises(UpdateRefused, match=f"{UP} has NaN or infinite values in bfloat16") as refused:
        ways.push(way, new, staging=Staging.HOST)
    assert refused.value.reason is Reason.NONFINITE
    assert live(engine) == before


def cut(*shape: int):
    """The first rows and columns of a tensor."""
    return lambda tensor: tensor[tuple(slice(n) for n in shape)].clone()


SHAPES = {
    "another size": (Q, lambda t: torch.ones(48, 48)),
    "rows missing": (Q, cut(63, 64)),
    "a row more": (EMBED, lambda t: torch.cat([t, t[:1]])),
    "one row, which would broadcast": (UP, cut(1, 64)),
    "one column": (UP, cut(96, 1)),
    "a vector": (UP, lambda t: t[0].clone()),
    "a number": (NORM, lambda t: t[0].clone()),
    "one value": (NORM, cut(1)),
    "transposed": (K, lambda t: t.t().contiguous()),
    "flat": (K, lambda t: t.reshape(-1).clone()),
    "another dimension": (K, lambda t: t[None].clone()),
    "heads apart": (K, lambda t: t.view(2, 16, 64).clone()),
}


@pytest.mark.case("B027")
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_another_shape_is_refused_before_a_byte_moves(shape, partial, engine, ways, weights):
    name, change = SHAPES[shape]
    before, tokens = live(engine), engine.generate(PROMPT).tokens()
    new = trained(weights)
    new[name] = change(new[name])
    for way in WAYS:
        with pytest.raises(UpdateRefused) as refused:
            ways.push(way, new, partial=partial, staging=Staging.NONE)
        assert refused.value.reason is Reason.MANIFEST_MISMATCH
        sides = (
            f"{name} has shape {list(new[name].shape)}, the model's {name} has {list(weights[name].shape)}"
        )
        assert refused.value.message.partition("; if that is one rank's shard")[0] == sides
    assert live(engine) == before
    assert engine.generate(PROMPT).tokens() == tokens


@pytest.mark.case("B027")
def test_a_checkpoint_of_another_model_is_refused(engine, ways, tmp_path, weights):
    before, tokens = live(engine), engine.generate(PROMPT).tokens()
    wider = stored(make_tiny(tmp_path / "wider", "llama", tied=True, hidden_size=48, head_dim=16))
    for way in WAYS:
        with pytest.raises(
            UpdateRefused, match=rf"{EMBED} has shape \[128, 48\], the model's {EMBED} has \[128, 64\]"
        ):
            ways.push(way, wider)
    assert live(engine) == before
    assert engine.generate(PROMPT).tokens() == tokens


@pytest.mark.case("B029")
@pytest.mark.parametrize("tied", [True, False])
def test_another_number_of_vocabulary_rows_is_refused(tied, tmp_path):
    """Padded, trimmed or grown: the engine has the rows of its config, and keeps them where they are."""
    directory = make_tiny(tmp_path / "m", "llama", tied=tied, vocab_size=100)
    with desk(directory, weights_roots=(tmp_path,)) as engine, Ways(engine, tmp_path) as ways:
        addresses = engine.runner.target.addresses()
        new = trained(stored(directory))
        ways.push("stream", new)
        assert_serves(engine, directory, new, [5, 9, 77])
        before = live(engine)
        for rows in (128, 104, 101, 99, 96):
            for names in ([EMBED], [HEAD], [EMBED, HEAD]):
                wrong: Tensors = trained(new)
                for name in {*names} & {*new} or {EMBED}:
                    wrong[name] = torch.cat([wrong[name], torch.zeros(28, 64)])[:rows].contiguous()
                for way in ("disk", "stream", "segment", "ipc"):
                    with pytest.raises(UpdateRefused, match=rf"has shape \[{rows}, 64\]"):
                        ways.push(way, wrong)
        assert live(engine) == before
        assert engine.runner.target.addresses() == addresses
        assert engine.generate([5], 32).tokens(), "and every id that is sampled is one of the 100"


@pytest.mark.case("B031")
@pytest.mark.case("B106")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", WAYS)
def test_strided_tensors_arrive_by_value(way, staging, engine, ways, tied_dir, weights):
    new = trained(weights)
    assert ways.push(way, strided(new), staging=staging).verified
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B031")
def test_a_library_that_saves_no_strides_is_helped(tmp_path):
    transposed = torch.arange(6.0).view(2, 3).t()
    with pytest.raises(ValueError, match="non contiguous"):
        save_file({"t": transposed}, tmp_path / "raw.safetensors")
    save_weights(str(tmp_path / "ours"), [("t", transposed)])
    assert stored(tmp_path / "ours")["t"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.case("B106")
def test_a_view_is_sent_as_what_it_shows(tied_dir):
    """The bytes of the view, not of the storage behind it; two views of one storage are two tensors."""
    base = torch.arange(1e6)
    module = torch.nn.Module()
    module.a, module.b = torch.nn.Parameter(base[10:20]), torch.nn.Parameter(base[500_000:500_003])
    source = ModuleSource(module)
    outgoing = Outgoing(source, source.manifest(), 0.0)
    assert [spec.shape for spec in outgoing.manifest.tensors] == [(10,), (3,)]
    chunks = list(TensorStream()._chunks(outgoing))
    ((_, _, pieces),) = chunks
    data = b"".join(pieces)
    assert len(data) < 1000
    sent = torch.frombuffer(bytearray(data), dtype=torch.float32)
    assert sent[:10].tolist() == list(range(10, 20))
    assert sent[64:67].tolist() == [500_000, 500_001, 500_002]


@pytest.mark.case("B106")
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_are_views_of_one_storage_arrive(way, engine, ways, tied_dir, weights):
    """As a flat optimizer has them: all in one storage, each from an offset of its own."""
    new = trained(weights)
    flat = torch.cat([torch.zeros(7), *(tensor.reshape(-1) for tensor in new.values())])
    views, at = {}, 7
    for name, tensor in new.items():
        views[name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    ways.push(way, views)
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B142")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST])
@pytest.mark.parametrize("way", WAYS)
def test_values_that_are_not_finite_are_refused_by_name(way, staging, bad, engine, ways, weights):
    before = live(engine)
    for name in (EMBED, K, NORM):  # the first, one in the middle of a fused matrix, the last
        new = trained(weights)
        new[name].view(-1)[-1] = bad
        for checks in ({}, {"skip_checksums": True}):
            with pytest.raises(UpdateRefused, match=f"{name} has NaN or infinite values") as refused:
                ways.push(way, new, staging=staging, **checks)
            assert refused.value.reason is Reason.NONFINITE
    assert live(engine) == before


@pytest.mark.case("B142")
@pytest.mark.parametrize("way", WAYS)
def test_without_staging_they_are_refused_or_torn_but_never_served(way, engine, ways, tied_dir, weights):
    before, new = live(engine), trained(weights)
    bad = {**new, K: new[K] * float("nan")}
    with pytest.raises(UpdateError, match=f"{K} has NaN"):
        ways.push(way, bad, staging=Staging.NONE)
    assert engine.version == before[2]
    if way in ("stream", "distributed"):  # their bytes are seen only once they are written
        assert "NaN" in engine.updater.torn_reason
    else:
        assert live(engine) == before
    ways.push(way, new)
    assert_serves(engine, tied_dir, new)
