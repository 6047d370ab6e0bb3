"""Prefill in captured pieces on a GPU: the eager runner's bits, padding, recapture; nothing compiles late."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import triton

from rollout_engine.batch.forward import ForwardBatch
from rollout_engine.batch.schedule import CaptureHiddenMode, StepResult
from rollout_engine.config import ServeConfig
from rollout_engine.ops import decode_attention, host_reads, kernels, sampling_kernels
from rollout_engine.runner.graphs import capture_graph, smallest_fit
from rollout_engine.runner.model_runner import ModelRunner
from rollout_engine.runner.warm_up import compile_ahead
from rollout_engine.sampling import SamplingParams
from tests.hand_scheduler import GREEDY, HandScheduler
from tests.local_engine import LocalEngine

pytestmark = pytest.mark.gpu

SIZES = (16, 32, 64, 128)
DECODE_SIZES = (1, 2, 4)
DRAWN = SamplingParams(temperature=0.8, seed=5, logprobs="raw")


@pytest.fixture(scope="module", params=["tiny_bf16_dir", "tied_bf16_dir"])
def model_dir(request):
    return request.getfixturevalue(request.param)


CONFIG = {
    "dtype": "bfloat16",
    "device": "cuda",
    "capture_batch_sizes": DECODE_SIZES,
    "capture_prefill_tokens": SIZES,
    "max_running_requests": 32,
    "prefix_cache": False,
}


def engine(directory, **config) -> LocalEngine:
    return LocalEngine(directory, **(CONFIG | config))


def run_padded(runner, batch):
    """The eager runner over a batch that is padded as a graph pads it."""
    with torch.inference_mode(), torch.cuda.stream(runner.forward_stream):
        size = smallest_fit(SIZES, batch.num_tokens)
        inputs = torch.zeros((3, size), dtype=torch.int64, device=runner.device)
        pending = runner.eager.run(batch, ForwardBatch.init_new(batch, runner, inputs))
        pending.mark()
    return pending.result()


def contents(runner) -> torch.Tensor:
    """All K and V but those of the padding page, as bits."""
    torch.cuda.synchronize()
    pool = runner.token_to_kv_pool
    layers = [layer[: pool.num_pages] for layer in (*pool.k_pages, *pool.v_pages)]
    return torch.stack(layers).view(torch.int16)


def tokens_for(num: int) -> list[int]:
    return [3 + 7 * i % 120 for i in range(num)]


@pytest.fixture(scope="module")
def captured_and_eager(model_dir) -> tuple[ModelRunner, ModelRunner]:
    """Two runners that see the same batches."""
    return engine(model_dir).runner, engine(model_dir, cuda_graphs=False).runner


def run_steps(runner: ModelRunner, size: int, captured: bool) -> list[StepResult]:
    """A full size, one with padding, parts of prompts, and a chunk beside a decode row."""
    scheduler = HandScheduler(runner)
    smaller = max((other for other in SIZES if other < size), default=0)
    lengths = [size, size, size, size // 2 - 1, size - 2]
    rows = [scheduler.row(tokens_for(n), DRAWN if i % 2 else GREEDY) for i, n in enumerate(lengths)]
    steps = [[(0, size)], [(1, smaller + 1)], [(2, size // 2), (3, size // 2 - 1)], [(0, 1), (4, size - 2)]]
    before, results = runner.forward_counts["prefill_graph"], []
    for step in steps:
        work = [(rows[i], n) for i, n in step]
        batch = scheduler.batch(work)
        results.append(runner.forward(batch) if captured else run_padded(runner, batch))
        scheduler.apply(work, batch, results[-1])
    assert runner.forward_counts["prefill_graph"] - before == len(steps) * captured
    assert [len(result.token_ids) for result in results] == [1, 0, 1, 2]
    assert all(all(result.finite) for result in results)
    return results


@pytest.mark.parametrize("size", SIZES)
def test_graphs_equal_the_eager_runner_at_the_same_padded_shape(captured_and_eager, size):
    captured, eager = captured_and_eager
    assert run_steps(captured, size, True) == run_steps(eager, size, False)
    assert torch.equal(contents(captured), contents(eager))


def test_sdpa_runs_between_pieces_too(tiny_bf16_dir):
    """Not bit for bit: it gets its queries with other strides, and may take another kernel for them."""
    captured, eager = (
        run_steps(engine(tiny_bf16_dir, attention_backend="torch", cuda_graphs=graphs).runner, 64, graphs)
        for graphs in (True, False)
    )
    assert captured[0].logprobs == pytest.approx(eager[0].logprobs, abs=0.15)


def test_what_a_request_may_ask_for_comes_from_captured_passes_too(captured_and_eager):
    params = SamplingParams(temperature=0.0, prompt_logprobs=True, top_logprobs=3)
    before = captured_and_eager[0].forward_counts["prefill_graph"]
    results = []
    for captured, runner in zip((True, False), captured_and_eager, strict=True):
        scheduler = HandScheduler(runner)
        batch = scheduler.batch([(scheduler.row(tokens_for(n), params), n) for n in (9, 21, 4)])
        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        results.append(runner.forward(batch) if captured else run_padded(runner, batch))
    assert results[0] == results[1]
    assert len(results[0].hidden_states) == 34
    assert captured_and_eager[0].forward_counts["prefill_graph"] == before + 1


def test_padding_writes_to_the_padding_page_alone(model_dir):
    runner = engine(model_dir).runner
    pool = runner.token_to_kv_pool
    for layer in (*pool.k, *pool.v):
        layer.fill_(7.0)
    torch.cuda.synchronize()
    scheduler = HandScheduler(runner)
    row = scheduler.row(tokens_for(41))
    scheduler.step([(row, 41)])
    assert runner.forward_counts["prefill_graph"] == 1
    written = torch.zeros((pool.num_pages + 1) * pool.page_size, dtype=torch.bool)
    written[row.slots[:41]] = True
    written[pool.padding_slot] = True
    torch.cuda.synchronize()
    for layer in (*pool.k, *pool.v):
        assert (layer.cpu()[~written] == 7.0).all()
        assert (layer.cpu()[written] != 7.0).any(dim=-1).all()


def test_each_choice_is_counted(model_dir):
    model = engine(model_dir, max_prefill_tokens=256)
    model.generate([tokens_for(n) for n in (5, 128, 129)], SamplingParams(max_tokens=1, seed=1))
    assert model.runner.forward_counts["eager"] == 1, "262 tokens: 256 of them, then the rest"
    assert model.runner.forward_counts["prefill_graph"] == 1
    assert model.runner.forward_counts["decode_graph"] == 0


def test_all_graphs_are_captured_again_exactly_when_an_address_moved(model_dir):
    """Adoption moves the weights; the results stay, the memory too."""
    model = engine(model_dir)
    runner, graphs = model.runner, model.runner.graphs
    total = len(SIZES) + len(DECODE_SIZES)
    assert graphs.num_captured() == total
    prompts = [tokens_for(n) for n in (9, 30)]
    params = dataclasses.replace(GREEDY, max_tokens=12, ignore_eos=True, seed=1)
    before = [(s.output_ids, s.logprobs) for s in model.generate(prompts, params)]
    assert graphs.moved() == []
    runner.target.buffer.mul_(1)  # written in place: an update
    runner.target.finalise()
    assert graphs.moved() == []
    moved = runner.target.arena.allocate(runner.target.device)
    moved.copy_(runner.target.buffer)
    runner.target.bind(moved)
    for one in (runner.prefill_graph, runner.decode_graph, graphs):
        assert any("qkv_proj" in name for name in one.moved())
    torch.cuda.synchronize()
    taken, reserved = [], []
    for _ in range(5):
        started = time.perf_counter()
        assert graphs.recapture() == total
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert graphs.moved() == []
    assert max(reserved) <= reserved[0] + (4 << 20), f"memory grows with every capture: {reserved}"
    assert max(taken[1:]) < 1.0, f"recapture took {taken}"
    model.restart()
    assert [(s.output_ids, s.logprobs) for s in model.generate(prompts, params)] == before
    assert runner.forward_counts["eager"] == 0


def test_a_changed_weight_shows_in_a_captured_prefill(model_dir):
    model = engine(model_dir)
    params = dataclasses.replace(GREEDY, max_tokens=1, seed=1)
    before = model.generate([tokens_for(30)], params)[0].logprobs
    model.runner.model.layers[0].mlp.down_proj.weight.data.mul_(0.5)
    torch.cuda.synchronize()
    model.restart()
    after = model.generate([tokens_for(30)], params)[0].logprobs
    assert model.runner.forward_counts["prefill_graph"] == 2
    assert abs(before[0] - after[0]) > 1e-3


def test_graphs_released_and_resumed(model_dir):
    model = engine(model_dir)
    params = dataclasses.replace(GREEDY, max_tokens=3, ignore_eos=True, seed=1)
    before = model.generate([tokens_for(30)], params)[0]
    model.runner.release_graphs()
    assert model.runner.graphs.num_captured() == 0
    model.restart()
    model.generate([tokens_for(30)], params)
    assert (model.runner.forward_counts["prefill_graph"], model.runner.forward_counts["eager"]) == (1, 3)
    model.runner.resume_graphs()
    model.restart()
    after = model.generate([tokens_for(30)], params)[0]
    assert (after.output_ids, after.logprobs) == (before.output_ids, before.logprobs)


def test_a_spoiled_capture_is_in_the_way_of_none_after_it():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        values = torch.zeros(4, device="cuda").add_(1)  # warm
        stream.synchronize()
        with pytest.raises(RuntimeError):
            capture_graph(torch.cuda.synchronize, torch.cuda.graph_pool_handle())
        torch.cuda.empty_cache()
        graph = capture_graph(lambda: values.add_(1), torch.cuda.graph_pool_handle())
        graph.replay()
        assert values.tolist() == [2.0] * 4


def test_graphs_that_were_put_off_wait_for_weights_and_pool(model_dir):
    """An update would have moved what they are captured over while the KV pool had no memory."""
    model = engine(model_dir)
    runner, graphs = model.runner, model.runner.graphs
    params = dataclasses.replace(GREEDY, max_tokens=3, ignore_eos=True, seed=1)
    before = model.generate([tokens_for(30)], params)[0]
    weights = runner.target.buffer.clone()
    runner.release_kv()
    assert (graphs.recapture(), graphs.num_captured()) == (0, 0)
    runner.release_weights()
    runner.resume_kv()
    assert graphs.num_captured() == 0, "the weights have no memory"
    runner.resume_weights()
    assert graphs.num_captured() == len(SIZES) + len(DECODE_SIZES)
    runner.target.buffer.copy_(weights)
    runner.target.finalise()
    torch.cuda.synchronize()
    model.restart()
    after = model.generate([tokens_for(30)], params)[0]
    assert (after.output_ids, after.logprobs) == (before.output_ids, before.logprobs)
    assert runner.forward_counts["eager"] == 0


def test_overlap_changes_nothing_where_passes_are_captured(model_dir):
    """Chunks beside decode rows, whose tokens only the device knows when a pass is made up."""
    model = engine(model_dir, max_prefill_tokens=48)
    prompts = [tokens_for(n) for n in (11, 25, 70, 9, 130)]
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, seed=3)
    results = []
    for overlap in (False, True, False, True):
        model.restart(overlap=overlap)
        results.append([(s.output_ids, s.logprobs) for s in model.generate(prompts, params)])
        assert "MIXED" in model.modes
    assert results[1:] == results[:1] * 3
    assert model.runner.forward_counts["prefill_graph"] > 4


# ---------------------------------------------------------------- kernels are compiled before a request


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that are compiled, or loaded from the cache on disk, meanwhile."""
    names: list[str] = []

    def note(*, repr, **_) -> None:
        names.append(repr)

    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None


def forget_kernels() -> None:
    """Let every kernel be compiled, or loaded from the disk, once more."""
    for module in (kernels, sampling_kernels, decode_attention, host_reads):
        for value in vars(module).values():
            if isinstance(value, triton.JITFunction):
                value.device_caches.clear()


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_no_kernel_compiles_after_the_start(model_dir, cuda_graphs):
    """Few and many rows, odd and even; each way to draw; passes with and without a graph."""
    forget_kernels()
    with compilations() as at_start:
        model = engine(model_dir, cuda_graphs=cuda_graphs)
    assert any("_draw_kernel" in name for name in at_start)
    params = [
        SamplingParams(max_tokens=5, ignore_eos=True, seed=1),
        SamplingParams(max_tokens=4, ignore_eos=True, seed=1, temperature=0.3, logprobs="raw"),
        SamplingParams(max_tokens=3, ignore_eos=True, seed=1, top_p=0.5, frequency_penalty=1.0),
    ]
    with compilations() as later:
        for num_rows in (1, 2, 3, 5, 7, 20):
            for chosen in (params[:1], params[1:2], params):
                for prompt in range(num_rows):
                    for one in chosen:
                        model.submit(tokens_for(1 + 11 * prompt), one)
                model.run()
                model.restart()
    assert later == []


def test_warmup_compiles_what_an_engine_needs(tiny_bf16_dir):
    """An engine of the whole model, made after one of one layer, compiles nothing of its own."""
    forget_kernels()
    runner = ModelRunner(ServeConfig(model=tiny_bf16_dir, **CONFIG))
    with compilations() as ahead:
        assert compile_ahead(runner) == "flashinfer"
    assert len(runner.model.layers) == 1
    assert any("_attend_kernel" in name for name in ahead)
    with compilations() as later:
        engine(tiny_bf16_dir)
    assert later == []
