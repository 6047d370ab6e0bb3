"""A trainer of two ranks, sharded by FSDP2, and a real engine: every path brings the whole weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.children import Child
from tests.engines import RunningEngine, serve
from tests.programs import run_program
from tests.tiny import make_tiny
from tests.unit.adapters.sharded_nets import moved_model
from tests.unit.adapters.sharded_ranks import ask_all, two_ranks
from tests.wire.trainer import PATHS, PROMPT, reference_tokens


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", tied=True)


@pytest.fixture(scope="module")
def engine(model_dir, work_dir) -> Iterator[RunningEngine]:
    with serve(model_dir, "--weights-root", str(work_dir), "--num-pages", "64", forked=True) as running:
        yield running


@pytest.fixture(scope="module")
def ranks(engine, tmp_path_factory) -> Iterator[list[Child]]:
    with two_ranks(tmp_path_factory.mktemp("ranks"), [engine.address]) as running:
        yield running


@pytest.mark.parametrize("path", PATHS)
def test_every_path_brings_the_whole_weights(path, engine, ranks, model_dir, work_dir):
    expected, same = ask_all(ranks, "load", directory=str(model_dir))
    assert expected == same
    via = {"tensor": "stream"}.get(path, path)
    one, other = ask_all(ranks, "push", via=via, directory=str(work_dir / "pushes"))
    assert one["version"] == other["version"]
    live = engine.weights.checksums()
    assert (live.by_name, live.weight_version) == (expected, one["version"])
    assert engine.greedy(PROMPT, ignore_eos=True).weight_versions == [one["version"]] * 8


@pytest.mark.case("B001")
@pytest.mark.case("B021")
@pytest.mark.parametrize("via", ["stream", "disk", "distributed"])
def test_heads_and_the_tied_head_of_a_tensor_parallel_trainer_arrive_whole(
    via, engine, ranks, model_dir, work_dir
):
    """Each rank holds half of the heads of q, k and v, and half of the rows that embedding and head share."""
    seed = 2 + ["stream", "disk", "distributed"].index(via)
    expected, same = ask_all(ranks, "load", directory=str(model_dir), way="tensor_parallel", seed=seed)
    assert expected == same
    assert "lm_head.weight" not in expected
    one, _ = ask_all(ranks, "push", via=via, directory=str(work_dir / "pushes"))
    live = engine.weights.checksums()
    assert (live.by_name, live.weight_version) == (expected, one["version"])
    completion = engine.greedy(PROMPT, ignore_eos=True)
    assert completion.token_ids == reference_tokens(moved_model(model_dir, seed), PROMPT)


def test_the_program_of_the_documentation(engine, model_dir, tmp_path):
    before = engine.weights.checksums().weight_version
    printed = run_program(
        "sharded.md", tmp_path, num_ranks=2, MODEL=str(model_dir), ROLLSYNC_ADDRESS=engine.address
    )
    said = re.findall(r"rank (\d): version (\d+)", printed)  # two processes may break each other's lines
    assert sorted((int(r), int(v)) for r, v in said) == [(r, before + v) for r in (0, 1) for v in (1, 2, 3)]
