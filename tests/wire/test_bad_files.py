"""Checkpoints that cannot be right, over a real process: each has its own status and reason."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.engines import RunningEngine, serve
from tests.tiny import load_reference, make_tiny
from tests.wire.bad_input import INVALID, assert_serves_on, refusal
from tests.wire.trainer import Named, assert_serves, train
from trainers_adapters import ModuleSource, push_weights
from weight_updater.requests import BeginUpdate
from weight_updater.requests import Path as Way
from weight_updater.safetensors_io import save_weights


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "mistral", "mistral")


@pytest.fixture(scope="module")
def engine(model_dir, root) -> Iterator[RunningEngine]:
    with serve(model_dir, "--weights-root", str(root), "--num-pages", "24", forked=True) as running:
        yield running


@pytest.fixture(scope="module")
def model(model_dir):
    model = load_reference(model_dir)
    train(model, 1)
    return model


@pytest.fixture(autouse=True)
def _serves_on(engine, model):
    """Whatever a test throws at the engine, it has the weights it had and answers the next request."""
    push_weights(ModuleSource(model), engine.weights)
    yield
    assert_serves_on(engine, model)


def load(engine: RunningEngine, directory: Path, **fields):
    update = BeginUpdate(path=Way.DISK, directory=str(directory), **fields)
    return engine.weights.update_from_disk(update, str(directory))


def damage_header(directory: Path) -> None:
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[:8] = (1 << 40).to_bytes(8, "little")
    file.write_bytes(data)


def lose_a_shard(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[0].unlink()


def cut(directory: Path) -> None:
    file = sorted(directory.glob("*.safetensors"))[-1]
    os.truncate(file, file.stat().st_size - 1)


FILES = {
    "header": (damage_header, 5 << 30, ("DATA_LOSS", "FILE_CORRUPT")),
    "shard gone": (lose_a_shard, 100_000, ("NOT_FOUND", "FILE_NOT_FOUND")),
    "cut shard": (cut, 100_000, ("DATA_LOSS", "FILE_CORRUPT")),
}


@pytest.mark.case("B037")
@pytest.mark.case("B039")
@pytest.mark.parametrize("fault", FILES)
def test_files_that_cannot_be_right(fault, engine, model, root):
    spoil, shard_bytes, expected = FILES[fault]
    directory = root / fault.replace(" ", "-")
    save_weights(str(directory), ModuleSource(model), max_shard_bytes=shard_bytes)
    spoil(directory)
    assert refusal(load, engine, directory) == expected


def name_a_tensor_that_is_no_text(directory: Path) -> None:
    header = b'{"\\ud800.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def name_a_file_that_is_no_text(directory: Path) -> None:
    os.rename(directory / "model.safetensors", os.fsencode(directory) + b"/\xff.safetensors")


def index_a_name_that_is_no_text(directory: Path) -> None:
    os.rename(directory / "model.safetensors", directory / "other.safetensors")
    index = '{"weight_map": {"\\udfff": "other.safetensors", "\\ud800": "\\udc00"}}'
    (directory / "model.safetensors.index.json").write_text(index)


def test_a_name_of_any_length_leaves_the_engines_records_readable(engine, model, root):
    directory = root / "long"
    save_weights(str(directory), ModuleSource(model))
    header = json.dumps({"x" * (6 << 20): {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}).encode()
    file = len(header).to_bytes(8, "little") + header + bytes(4)
    (directory / "model.safetensors").write_bytes(file)
    assert refusal(load, engine, directory) == ("DATA_LOSS", "FILE_CORRUPT")
    last = engine.rollout.info().recent_updates[-1]
    assert (last.end, last.reason, last.message[-3:]) == ("refused", "FILE_CORRUPT", "...")


NO_TEXT = {
    name_a_tensor_that_is_no_text: ("DATA_LOSS", "FILE_CORRUPT"),
    name_a_file_that_is_no_text: ("NOT_FOUND", "FILE_NOT_FOUND"),
    index_a_name_that_is_no_text: ("DATA_LOSS", "FILE_CORRUPT"),
}


@pytest.mark.parametrize("spoil", NO_TEXT, ids=lambda spoil: spoil.__name__)
def test_names_that_no_message_can_hold(spoil, engine, model, root):
    directory = root / spoil.__name__
    save_weights(str(directory), ModuleSource(model))
    spoil(directory)
    assert refusal(load, engine, directory) == NO_TEXT[spoil]


@pytest.mark.case("B048")
@pytest.mark.parametrize("where", ["/etc", "{root}/../..", "attacker/repo", "~"])
def test_directories_outside_the_roots(where, engine, root):
    directory = where.format(root=root)
    assert refusal(load, engine, directory) == ("PERMISSION_DENIED", "PATH_FORBIDDEN")


@pytest.mark.case("B040")
def test_a_flipped_bit_loads_unverified_where_nothing_can_show_it(engine, model, root):
    for checksums in (True, False):
        directory = root / f"flipped-{checksums}"
        save_weights(str(directory), ModuleSource(model), checksums=checksums)
        file = directory / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1000] ^= 1
        file.write_bytes(data)
    assert refusal(load, engine, root / "flipped-True") == ("DATA_LOSS", "CHECKSUM_MISMATCH")
    reply = load(engine, root / "flipped-False")
    assert (reply.state, reply.verified, reply.num_changed) == ("committed", False, 1)
    save_weights(str(root / "good"), ModuleSource(model))
    version = load(engine, root / "good").version
    assert_serves(engine, model, version)


@pytest.mark.case("B005")
def test_dtypes_that_no_update_brings(engine, model, root):
    named = {name: tensor.detach() for name, tensor in ModuleSource(model)}
    name = next(iter(named))
    directory = root / "integers"
    directory.mkdir()
    save_file(named | {name: named[name].to(torch.int32)}, directory / "model.safetensors")
    code, _ = refusal(load, engine, directory)
    assert code in (INVALID, "DATA_LOSS")
    half = Named((n, t.to(torch.float64)) for n, t in named.items())
    assert push_weights(half, engine.weights).num_changed == 0, "a wider dtype is cast, and is the same here"
