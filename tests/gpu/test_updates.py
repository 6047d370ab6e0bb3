"""After an update by each path: the trainer's bytes, at the addresses of before, and the tokens of an engine
that was started with them, at the same shapes; without graphs too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_engine.config import ServeConfig
from rollout_engine.sampling import SamplingParams
from tests import children
from tests.children import Child
from tests.engines import RunningEngine
from tests.holdings import grown, held
from tests.load import check_labels
from tests.local_engine import LocalEngine
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""What is captured by default, of decode passes; prefill passes are, too."""
NUM_GRAPHS = len(SIZES) + len(ServeConfig.model_fields["capture_prefill_tokens"].default)
SOME_SIZES = (1, 8)
PATHS = [
    ("disk", "device", SIZES),
    ("disk", "host", SOME_SIZES),
    ("disk", "none", SOME_SIZES),
    ("stream", "device", SIZES),
    ("stream", "none", SOME_SIZES),
    ("segment", "device", SOME_SIZES),
    ("segment", "none", SIZES),
    ("ipc", "none", SIZES),
    ("ipc", "device", SIZES),
    ("ipc", "host", SOME_SIZES),
    ("gloo", "device", SIZES),
    ("gloo", "none", SOME_SIZES),
]
NUM_TOKENS = 5

Tokens = Mapping[int, list[list[int]]]
"""By number of rows: what each of them samples."""


def prompts_of(num_rows: int) -> list[list[int]]:
    """Of 3 to 10 tokens: with what is sampled no page of 16 is full, so that none is ever reused."""
    generator = torch.Generator().manual_seed(num_rows)
    return [
        torch.randint(3, VOCAB_SIZE, (3 + row % 8,), generator=generator).tolist() for row in range(num_rows)
    ]


def tokens_of(directory: Path, **config: Any) -> Tokens:
    """What an engine gives that was just started over a checkpoint, at each size."""
    started = LocalEngine(directory, dtype="bfloat16", device="cuda:0", num_pages=1024, **config)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
    found = {}
    for size in SIZES:
        started.restart()
        found[size] = [sequence.output_ids for sequence in started.generate(prompts_of(size), params)]
    replayed = len(SIZES) * (NUM_TOKENS - 1) * (started.runner.decode_graph is not None)
    assert started.runner.forward_counts["decode_graph"] == replayed
    return found


@pytest.fixture(scope="module")
def fresh(tiny_bf16_dir: Path, other_bf16_dir: Path) -> dict[Path, Tokens]:
    """The tokens of an engine that was started over each checkpoint. Where prompts are computed alike,
    captured decode passes give those of eager ones, at each size.
    """
    found = {}
    for directory in (tiny_bf16_dir, other_bf16_dir):
        eager = tokens_of(directory, cuda_graphs=False)
        assert tokens_of(directory, capture_prefill_tokens=()) == eager, "graphs and eager passes differ"
        found[directory] = tokens_of(directory)
    assert found[tiny_bf16_dir] != found[other_bf16_dir], "the weights do not show in the tokens"
    return found


@pytest.fixture(scope="module")
def trainer(gpu_engine: RunningEngine, tiny_bf16_dir: Path, start_trainer) -> Iterator[Child]:
    with start_trainer("tests.gpu.trainer", str(tiny_bf16_dir)) as child:
        child.ask("connect", address=gpu_engine.address)
        yield child
        child.ask("close")


def assert_tokens(engine: RunningEngine, expected: Tokens, sizes: tuple[int, ...]) -> None:
    """At each size in a captured pass of that size."""
    for size in sizes:
        before = engine.rollout.info().forward_counts
        completions = engine.together(
            prompts_of(size), max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, seed=1
        )
        after = engine.rollout.info().forward_counts
        passes = {kind: count - before[kind] for kind, count in after.items() if count != before[kind]}
        assert passes.pop("decode_graph") == NUM_TOKENS - 1, "they did not run together"
        assert passes in ({"eager": 1}, {"prefill_graph": 1}), "they did not begin together"
        assert [completion.token_ids for completion in completions] == expected[size], f"{size} rows"


def assert_live(engine: RunningEngine, trainer: Child, pushed: dict) -> None:
    assert "reason" not in pushed, pushed
    live = engine.weights.checksums()
    assert live.by_name == trainer.ask("checksums")
    assert live.weight_version == pushed["version"]


def begin_with(engine: RunningEngine, trainer: Child, directory: Path) -> int:
    """Let the engine serve a checkpoint's weights by the plainest path; gives their address."""
    trainer.ask("load", directory=str(directory))
    assert_live(engine, trainer, trainer.ask("push", staging="none"))
    return engine.rollout.info().weights_address


def test_before_any_path(gpu_engine, trainer, fresh, tiny_bf16_dir):
    begin_with(gpu_engine, trainer, tiny_bf16_dir)
    assert_tokens(gpu_engine, fresh[tiny_bf16_dir], SIZES)


@pytest.mark.parametrize(("path", "staging", "sizes"), PATHS)
def test_after_an_update(
    path, staging, sizes, gpu_engine, trainer, fresh, tiny_bf16_dir, other_bf16_dir, tmp_path_factory
):
    address = begin_with(gpu_engine, trainer, tiny_bf16_dir)
    trainer.ask("load", directory=str(other_bf16_dir))
    if path == "disk":
        path = f"disk:{tmp_path_factory.mktemp('weights')}"
    pushed = trainer.ask("push_by", path=path, staging=staging)
    assert_live(gpu_engine, trainer, pushed)
    assert (pushed["staging"], pushed["verified"]) == (staging, True)
    assert pushed["num_changed"] == pushed["num_tensors"]
    assert gpu_engine.rollout.info().weights_address == address
    assert (pushed["graphs_kept"], pushed["graphs_recaptured"]) == (NUM_GRAPHS, 0)
    assert_tokens(gpu_engine, fresh[other_bf16_dir], sizes)


@pytest.mark.parametrize("staging", ["device", "none"])
def test_after_an_update_from_another_gpu(
    staging, two_gpus, gpu_engine, trainer, fresh, tiny_bf16_dir, other_bf16_dir, start_trainer
):
    address = begin_with(gpu_engine, trainer, tiny_bf16_dir)
    with start_trainer("tests.gpu.trainer", str(other_bf16_dir), "cuda:1") as child:
        child.ask("connect", address=gpu_engine.address)
        pushed = child.ask("push_by", path="nccl", staging=staging)
        assert_live(gpu_engine, child, pushed)
        child.ask("close")
    assert gpu_engine.rollout.info().weights_address == address
    assert (pushed["graphs_kept"], pushed["graphs_recaptured"]) == (NUM_GRAPHS, 0)
    assert_tokens(gpu_engine, fresh[other_bf16_dir], SIZES)


@pytest.mark.alone
@pytest.mark.case("B097")
def test_fifty_updates_under_load_leave_nothing_behind(gpu_engine, trainer):
    """Memory, threads and files are flat after the first updates; each token has one label, and they come
    in the order of the commits.
    """
    first = trainer.ask("push")
    with children.start("tests.load", gpu_engine.address) as load:
        load.ask("start", num_streams=4, num_in=40, num_out=400, vocab_size=VOCAB_SIZE)
        reports = trainer.ask("push_many", num_updates=10, first_seed=1)
        before, free = held(gpu_engine.pid, trainer.ask("pid")), trainer.ask("free_bytes")
        reports += trainer.ask("push_many", num_updates=50, first_seed=20)
        after, free_after = held(gpu_engine.pid, trainer.ask("pid")), trainer.ask("free_bytes")
        completions = load.ask("stop")
    assert [report["reason"] for report in reports if "reason" in report] == []
    assert sum(report["num_kept"] > 0 for report in reports) > 30, "the load has ended too early"
    commits = [(report["version"], report["commit_sequence"]) for report in (first, *reports)]
    assert check_labels(completions, commits) > 5
    assert list(grown(before, after, {"RSS": 16 << 10})) == []
    assert free - free_after <= 2 << 20
    assert gpu_engine.weights.checksums().by_name == trainer.ask("checksums")


def test_adoption(tiny_bf16_dir, other_bf16_dir, fresh, serve_on_gpu, start_trainer, until_not_serving):
    """The engine's slots point to the trainer's memory, and back; then its trainer dies."""
    with (
        serve_on_gpu(tiny_bf16_dir) as engine,
        start_trainer("tests.gpu.trainer", str(tiny_bf16_dir)) as child,
    ):
        child.ask("connect", address=engine.address)
        home = engine.rollout.info().weights_address
        assert_tokens(engine, fresh[tiny_bf16_dir], SIZES)
        child.ask("adopt")
        first = child.ask("update", directory=str(other_bf16_dir))
        assert (first["extra_bytes"], first["graphs_recaptured"]) == (0, NUM_GRAPHS)
        assert_live(engine, child, first)
        inside = engine.rollout.info().weights_address
        assert inside != home
        assert_tokens(engine, fresh[other_bf16_dir], SIZES)
        for directory in (tiny_bf16_dir, other_bf16_dir):
            again = child.ask("update", directory=str(directory))
            assert (again["extra_bytes"], again["graphs_recaptured"]) == (0, 0)
            assert_live(engine, child, again)
            assert engine.rollout.info().weights_address == inside, "it moves once"
            assert_tokens(engine, fresh[directory], SOME_SIZES)
        assert_live(engine, child, child.ask("leave"))
        assert engine.rollout.info().weights_address != inside
        assert_tokens(engine, fresh[other_bf16_dir], SOME_SIZES)
        child.ask("adopt")
        child.ask("update", seed=4)
        child.process.kill()
        child.process.wait()
        until_not_serving(engine)
