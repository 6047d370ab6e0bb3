"""Adapters on a GPU: captured passes with the products of all slots, and pushes from a trainer's GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_engine import messages as m
from tests.desk import Desk, desk
from tests.engines import RunningEngine
from tests.lora import adapted, learn
from tests.ways import ways_to
from trainers_adapters import (
    AdapterSource,
    DiskDirectory,
    IpcArena,
    TensorSegment,
    TensorStream,
    push_weights,
)

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7], list(range(10, 47)), [9] * 16, [3]]
NAMES = ["math", "", "code", "math"]
NUM_TOKENS = 16
CONFIG = {"dtype": "bfloat16", "device": "cuda:0", "num_pages": 512, "capture_batch_sizes": (4,)}


def answers(engine: Desk, asked: list[tuple[str, list[int]]]) -> list[tuple[list[int], list[float]]]:
    """Greedy answers to (adapter, prompt), all in the same passes, nothing cached."""
    engine.idle()
    engine.call(m.FlushCache)
    engine.call(m.Pause)
    running = [engine.submit(list(p), adapter=name, max_tokens=NUM_TOKENS) for name, p in asked]
    engine.call(m.Continue)
    return [(one.end().tokens(), one.logprobs()) for one in running]


def trainer(directory: Path) -> Any:
    """Two adapters, in float32 on the GPU, over the base weights in bfloat16 as the engine has them."""
    model = adapted(directory)
    model.add_adapter("code", model.peft_config["default"])
    model.set_adapter("code")
    learn(model)
    return model.to("cuda:0")


def push_both(engine: Desk, model: Any, folder: Path) -> None:
    with ways_to(engine, folder) as ways:
        for name, adapter in (("math", "default"), ("code", "code")):
            source = AdapterSource(model, name, adapter=adapter)
            tensors = {key: tensor.cpu() for key, tensor in source}
            spec = source.spec(engine.runner.target.arena.layout)
            reply = ways.push("segment", tensors, adapter=spec)
            assert (reply.adapter_version, reply.verified) == (1, True)


@pytest.fixture(scope="module")
def model(tiny_bf16_dir: Path) -> Any:
    return trainer(tiny_bf16_dir)


@pytest.fixture(scope="module")
def engines(model, tiny_bf16_dir: Path, tmp_path_factory) -> Iterator[tuple[Desk, Desk]]:
    """One with decode graphs and one without any graph, both with the trainer's adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    config = {**CONFIG, "capture_prefill_tokens": (), "max_adapters": 2, "weights_roots": (folder,)}
    with (
        desk(tiny_bf16_dir, **config) as graphs,
        desk(tiny_bf16_dir, **config | {"cuda_graphs": False}) as eager,
    ):
        for engine in (graphs, eager):
            push_both(engine, model, folder)
        yield graphs, eager


def test_captured_decode_passes_equal_eager_ones(engines):
    """Four rows, as captured: two adapters and none in one batch. Graphs were captured before the push."""
    graphs, eager = engines
    asked = list(zip(NAMES, PROMPTS, strict=True))
    before = graphs.runner.forward_counts["decode_graph"]
    found, wanted = answers(graphs, asked), answers(eager, asked)
    assert graphs.runner.forward_counts["decode_graph"] - before == NUM_TOKENS - 1
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    base = answers(graphs, [("", prompt) for prompt in PROMPTS])
    assert [found[at] != base[at] for at in range(4)] == [bool(name) for name in NAMES]


def test_base_rows_keep_every_bit_beside_adapters(engines, tiny_bf16_dir: Path):
    graphs, _ = engines
    asked = [("", prompt) for prompt in PROMPTS]
    with desk(tiny_bf16_dir, **CONFIG, capture_prefill_tokens=()) as plain:
        assert answers(graphs, asked) == answers(plain, asked)


def test_captured_prefill_takes_its_rows_adapters(model, tiny_bf16_dir: Path, tmp_path: Path, engines):
    """Padded to the captured size, so compared by log-probabilities: no more than rounding differs."""
    _, eager = engines
    config = {**CONFIG, "capture_prefill_tokens": (64, 96), "max_adapters": 2, "weights_roots": (tmp_path,)}
    asked = list(zip(NAMES, PROMPTS, strict=True))
    with desk(tiny_bf16_dir, **config) as captured:
        push_both(captured, model, tmp_path)
        before = captured.runner.forward_counts["prefill_graph"]
        found = answers(captured, asked)
        assert captured.runner.forward_counts["prefill_graph"] > before
    for (tokens, logprobs), (theirs, their_logprobs) in zip(found, answers(eager, asked), strict=True):
        assert tokens[0] == theirs[0]
        assert abs(logprobs[0] - their_logprobs[0]) < 0.05


def scores(model: Any, tokens: list[int], start: int) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([tokens], device="cuda:0")).logits[0].float().log_softmax(-1)
    return (
        logits[start - 1 : -1].gather(1, torch.tensor(tokens[start:], device="cuda:0")[:, None])[:, 0].cpu()
    )


def test_tokens_are_those_of_peft_but_for_rounding(engines, model):
    """As near to PEFT in float32 as a bfloat16 model may be: 0.05 on average over all tokens."""
    graphs, _ = engines
    for name, adapter in (("math", "default"), ("code", "code")):
        model.set_adapter(adapter)
        asked = [(name, prompt) for prompt in PROMPTS]
        differences = [
            (torch.tensor(logprobs) - scores(model, prompt + tokens, len(prompt))).abs()
            for prompt, (tokens, logprobs) in zip(PROMPTS, answers(graphs, asked), strict=True)
        ]
        assert float(torch.cat(differences).mean()) < 0.05


@pytest.fixture(scope="module")
def served(serve_on_gpu, tiny_bf16_dir: Path) -> Iterator[RunningEngine]:
    with serve_on_gpu(tiny_bf16_dir, "--max-adapters", "1", "--capture-batch-sizes", "1,4") as engine:
        yield engine


def test_every_path_brings_an_adapter_from_the_trainers_gpu(served: RunningEngine, model, tmp_path: Path):
    """A step of the trainer's shows in what is sampled; the last push brings the first step's bytes again."""
    source = AdapterSource(model, "walk", adapter="default")
    model.set_adapter("default")
    first = {name: tensor.clone() for name, tensor in source}
    seen = []
    with (
        DiskDirectory(tmp_path) as disk,
        TensorStream() as stream,
        TensorSegment() as segment,
        IpcArena() as ipc,
    ):
        for version, sender in enumerate((ipc, disk, stream, segment, ipc), 1):
            if version == 5:
                for name, tensor in source:
                    tensor.copy_(first[name])
            report = push_weights(source, served.weights, via=sender)
            assert report.version == version
            completion = served.greedy([5, 6, 7], max_tokens=NUM_TOKENS, adapter="walk", ignore_eos=True)
            assert completion.adapter_versions == [version] * NUM_TOKENS
            seen.append((completion.token_ids, completion.logprobs))
            with torch.no_grad():
                for _, tensor in source:
                    tensor.add_(torch.randn_like(tensor) * 0.1)
    assert seen[4] == seen[0]
    assert all(now != before for before, now in pairwise(seen))
