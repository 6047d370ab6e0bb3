"""Quantised weights and caches: there are none here, so they are refused; and nothing is worked on twice."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import save_file

from rollout_engine import messages as m
from rollout_engine.config import load_config
from rollout_engine.errors import ConfigError, EngineError
from rollout_engine.models.config import ModelConfig
from tests.cases.common import Q, assert_serves, live, stored, trained, wake
from tests.desk import desk
from tests.tiny import make_tiny
from tests.ways import STAGINGS, WAYS, Ways, manifest_of
from tests.wire.trainer import PROMPT
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import BeginUpdate, FromDisk, Manifest, Path, TensorSpec


@pytest.mark.case("B115")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_update_twice_and_back_ends_at_the_start(dtype, tied_dir, tmp_path):
    """Whatever a first load does to weights, a second one starts from what the trainer sent."""
    start = stored(tied_dir)
    other = {name: tensor * 4 for name, tensor in start.items()}
    with desk(tied_dir, dtype=dtype, weights_roots=(tmp_path,)) as engine, Ways(engine, tmp_path) as ways:
        checksums = engine.updater.checksums([])
        for way, tensors in itertools.product(WAYS, (other, other, start, other, start)):
            ways.push(way, tensors)
            target = engine.runner.target
            assert all(torch.equal(target.slot(n), t.to(target.slot(n).dtype)) for n, t in tensors.items())
        assert engine.updater.checksums([]) == checksums


@pytest.mark.case("B115")
@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int4", "float4_e2m1fn_x2"]
)
def test_a_quantised_tensor_is_refused_by_name(dtype, engine, weights):
    before = live(engine)
    specs = [
        TensorSpec(s.name, dtype if s.name == Q else s.dtype, s.shape) for s in manifest_of(weights).tensors
    ]
    for path in (Path.TENSOR, Path.DISTRIBUTED, Path.IPC):
        with pytest.raises(UpdateRefused, match=f"{Q} has dtype '{dtype}'") as refused:
            engine.begin(BeginUpdate(path, manifest=Manifest(tuple(specs))))
        assert refused.value.reason is Reason.INVALID_UPDATE
    assert live(engine) == before


@pytest.mark.case("B115")
@pytest.mark.parametrize("extra", [{}, {f"{Q}_scale": torch.ones(1)}, {f"{Q}_scale_inv": torch.ones(1, 1)}])
def test_a_quantised_checkpoint_is_refused_by_name(extra, engine, tmp_path, weights):
    before, directory = live(engine), tmp_path / "fp8"
    directory.mkdir()
    packed = {**trained(weights), **extra}
    packed[Q] = packed[Q].to(torch.float8_e4m3fn)
    save_file(packed, directory / "model.safetensors")
    with pytest.raises(UpdateRefused, match=Q):
        engine.update(FromDisk("", str(directory)), BeginUpdate(Path.DISK, directory=str(directory)))
    assert live(engine) == before


@pytest.mark.case("B115")
@pytest.mark.case("B116")
@pytest.mark.parametrize("field", ["dtype", "kv_cache_dtype"])
def test_a_quantised_engine_cannot_be_asked_for(field, tied_dir):
    with pytest.raises(ConfigError, match=field):
        load_config({"model": tied_dir, field: "fp8"})


@pytest.mark.case("B115")
def test_a_model_that_says_it_is_quantised_is_not_taken_for_a_plain_one(tmp_path):
    directory = make_tiny(tmp_path / "m", "llama")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="quantised"):
        ModelConfig.from_directory(directory, known=("LlamaForCausalLM",))


@pytest.mark.case("B116")
@pytest.mark.parametrize("staging", STAGINGS)
def test_a_cache_that_slept_is_as_one_that_never_did(staging, engine, ways, tied_dir, weights):
    """It comes back empty, in the model's own dtype, and gives the same log-probabilities to the bit."""
    new = trained(weights)
    ways.push("segment", new, staging=staging)
    before = engine.generate(PROMPT, 32)
    for _ in range(3):
        engine.call(m.ReleaseMemory, tags=["weights", "kv_cache", "graphs"])
        wake(engine)
        pool = engine.runner.token_to_kv_pool
        assert not any(layer.any() for layer in (*pool.k, *pool.v))
        assert pool.dtype is engine.runner.model_config.dtype
        ways.push("segment", new, staging=staging)
        after = engine.generate(PROMPT, 32)
        assert (after.tokens(), after.logprobs()) == (before.tokens(), before.logprobs())
    assert_serves(engine, tied_dir, new)
