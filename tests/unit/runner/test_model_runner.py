"""The order of initialisation, dispatch, overrides, split prefill, hidden states, memory."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from rollout_engine.batch.forward import ForwardBatch
from rollout_engine.batch.schedule import CaptureHiddenMode, ForwardMode, ScheduleBatch
from rollout_engine.config import ServeConfig
from rollout_engine.errors import ConfigError
from rollout_engine.runner.model_runner import InitOrderError, ModelRunner
from rollout_engine.sampling import SamplingParams
from tests.hand_scheduler import GREEDY, HandScheduler, make_runner

PROMPTS = [[5, 6, 7], list(range(10, 47)), [9] * 16, [3]]


@pytest.fixture
def runner(tiny_llama_dir) -> ModelRunner:
    return make_runner(tiny_llama_dir, num_pages=96)


def prefill(runner, mode=None, params=GREEDY):
    """A batch that prefills PROMPTS, and its scheduler's work."""
    scheduler = HandScheduler(runner)
    work = [(scheduler.row(prompt, params), len(prompt)) for prompt in PROMPTS]
    return scheduler, work, scheduler.batch(work, mode)


def as_tensors(hidden_states: list[bytes]) -> torch.Tensor:
    return torch.stack([torch.frombuffer(bytearray(row), dtype=torch.float32) for row in hidden_states])


def test_steps_out_of_order_name_the_step_that_is_missing(tiny_llama_dir):
    runner = ModelRunner(ServeConfig(model=tiny_llama_dir, device="cpu"))
    with pytest.raises(
        InitOrderError, match=r"alloc_memory_pool\(\) cannot run now: call initialize\(\) first"
    ):
        runner.alloc_memory_pool(4)
    with pytest.raises(InitOrderError, match=r"forward\(\) cannot run: call initialize\(\) first"):
        runner.forward(ScheduleBatch(ForwardMode.IDLE))
    runner.initialize()
    with pytest.raises(InitOrderError, match=r"initialize\(\) cannot run now: it was called before"):
        runner.initialize()
    with pytest.raises(InitOrderError, match=r"call alloc_memory_pool\(\) first"):
        runner.init_attention_backends()
    with pytest.raises(ConfigError, match="num_pages is 0"):
        runner.alloc_memory_pool(0)
    runner.alloc_memory_pool(4)
    with pytest.raises(InitOrderError, match=r"call init_attention_backends\(\) first"):
        runner.init_cuda_graphs()


def test_unknown_device_and_backend_are_refused(tiny_llama_dir):
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        ModelRunner(ServeConfig(model=tiny_llama_dir, device="tpu"))
    with pytest.raises(ConfigError, match="attention_backend is 'flashinfer', but the device is cpu"):
        make_runner(tiny_llama_dir, attention_backend="flashinfer")


def test_each_choice_is_counted(runner):
    scheduler, work, batch = prefill(runner)
    scheduler.apply(work, batch, runner.forward(batch))
    scheduler.step([(row, 1) for row, _ in work])
    assert runner.forward(ScheduleBatch(ForwardMode.IDLE)).token_ids == []
    _, _, split = prefill(runner, ForwardMode.SPLIT_PREFILL)
    runner.forward(split)
    assert runner.forward_counts == {
        "eager": 2,
        "decode_graph": 0,
        "prefill_graph": 0,
        "split_prefill": 1,
        "idle": 1,
    }


def test_graph_runners_are_chosen_when_they_can_run(runner):
    class Recorder:
        def __init__(self, can: bool) -> None:
            self.can, self.ran = can, 0

        def can_run_graph(self, batch):
            return self.can

        def run(self, batch):
            self.ran += 1
            return runner.eager.run(batch, ForwardBatch.init_new(batch, runner))

    runner.decode_graph, runner.prefill_graph = Recorder(True), Recorder(True)
    scheduler, work, batch = prefill(runner)
    scheduler.apply(work, batch, runner.forward(batch))
    scheduler.step([(row, 1) for row, _ in work])
    assert (runner.decode_graph.ran, runner.prefill_graph.ran) == (1, 1)
    runner.decode_graph.can = False
    scheduler.step([(row, 1) for row, _ in work])
    assert runner.forward_counts["eager"] == 1


def test_a_pass_that_gives_nothing_back_is_waited_for(runner, monkeypatch):
    """Else an update without staging would write to weights that a chunk of a prompt is computed with."""
    waited = []

    class Event:
        def __init__(self):
            self.num_recorded = 0

        def record(self):
            self.num_recorded += 1

        def synchronize(self):
            assert self.num_recorded == 1
            waited.append(self)

    runner.forward_stream = object()
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    scheduler = HandScheduler(runner)
    row = scheduler.row(PROMPTS[1], GREEDY)
    batch = scheduler.batch([(row, 20)])
    first = runner.launch(batch)
    assert not waited
    assert first.result().token_ids == []
    assert len(waited) == 1
    scheduler.apply([(row, 20)], batch, first.result())
    second = runner.launch(scheduler.batch([(row, len(PROMPTS[1]) - 20)]))
    assert len(second.result().token_ids) == 1
    assert waited[-1] is second._ready


def test_split_prefill_equals_extend(runner):
    params = SamplingParams(temperature=0.0, prompt_logprobs=True, top_logprobs=3)
    _, _, batch = prefill(runner, params=params)
    whole = runner.forward(batch)
    _, _, split = prefill(runner, ForwardMode.SPLIT_PREFILL, params)
    assert runner.forward(split) == whole


def test_split_prefill_lets_other_steps_run_in_between(runner):
    scheduler = HandScheduler(runner)
    decoding = scheduler.row(PROMPTS[1])
    alone = HandScheduler(make_runner(runner.config.model, num_pages=96))
    expected, other = alone.row(PROMPTS[1]), alone.row(PROMPTS[2])
    alone.run([expected, other], 6)

    scheduler.step([(decoding, len(decoding.prompt))])
    row = scheduler.row(PROMPTS[2])
    work = [(row, len(row.prompt))]
    batch = scheduler.batch(work, ForwardMode.SPLIT_PREFILL)
    prefilling = runner.start_split_prefill(batch)
    with pytest.raises(RuntimeError, match="layer 0 of 2"):
        prefilling.finish()
    with pytest.raises(ValueError, match="at least one layer"):
        prefilling.advance(0)
    assert prefilling.advance(1) is False
    scheduler.step([(decoding, 1)])
    assert prefilling.advance(1) is True
    scheduler.step([(decoding, 1)])
    scheduler.apply(work, batch, prefilling.finish().result())
    scheduler.run([decoding, row], 6)
    assert decoding.output == expected.output
    assert row.output == other.output


def test_overrides_are_consumed_once(runner):
    _, _, batch = prefill(runner)
    batch.capture_hidden_mode = CaptureHiddenMode.LAST
    batch.return_hidden_states_before_norm = True
    batch.seq_lens_cpu_cache = list(batch.seq_lens)
    assert len(runner.forward(batch).hidden_states) == len(PROMPTS)
    assert batch.capture_hidden_mode is CaptureHiddenMode.NULL
    assert batch.return_hidden_states_before_norm is False
    assert batch.seq_lens_cpu_cache is None
    assert runner.forward(batch).hidden_states == []


def test_hidden_states(runner):
    captured = {}
    for mode in (CaptureHiddenMode.LAST, CaptureHiddenMode.FULL):
        for before_norm in (False, True):
            _, _, batch = prefill(runner)
            batch.capture_hidden_mode, batch.return_hidden_states_before_norm = mode, before_norm
            captured[mode, before_norm] = as_tensors(runner.forward(batch).hidden_states)
    full, last = captured[CaptureHiddenMode.FULL, False], captured[CaptureHiddenMode.LAST, False]
    assert full.shape == (sum(map(len, PROMPTS)), runner.model_config.hidden_size)
    ends = torch.tensor([len(prompt) for prompt in PROMPTS]).cumsum(0) - 1
    torch.testing.assert_close(last, full[ends])
    for mode in (CaptureHiddenMode.LAST, CaptureHiddenMode.FULL):
        torch.testing.assert_close(runner.model.norm(captured[mode, True]), captured[mode, False])
    _, _, batch = prefill(runner)
    assert runner.model.compute_logits(last).argmax(-1).tolist() == runner.forward(batch).token_ids


def test_prefill_computes_logits_of_sampled_rows_only(runner, monkeypatch):
    shapes = []
    compute = runner.model.compute_logits
    monkeypatch.setattr(runner.model, "compute_logits", lambda h: shapes.append(h.shape[0]) or compute(h))
    _, _, batch = prefill(runner)
    runner.forward(batch)
    assert shapes == [len(PROMPTS)]
    shapes.clear()
    runner.eager.max_prompt_logits_rows = 20
    _, _, batch = prefill(runner, params=SamplingParams(temperature=0.0, prompt_logprobs=True))
    result = runner.forward(batch)
    assert shapes == [20, 20, 13, len(PROMPTS)]  # 2 + 36 + 15 prompt rows, in blocks of 20
    assert [len(values) for values in result.prompt_logprobs] == [2, 36, 15]


@pytest.mark.case("B059")
def test_a_row_does_not_see_what_pages_held_before(runner):
    """NaN left in reused pages (of a sequence that broke) must not reach their next owner."""
    scheduler = HandScheduler(runner)
    rows = [scheduler.row(prompt, room=12) for prompt in PROMPTS]
    scheduler.run(rows, 10, chunk=8)
    for pool in (*runner.token_to_kv_pool.k, *runner.token_to_kv_pool.v):
        pool.fill_(math.nan)
    again = HandScheduler(runner)
    fresh = [again.row(prompt, room=12) for prompt in PROMPTS]
    again.run(fresh, 10, chunk=8)
    assert [row.output for row in fresh] == [row.output for row in rows]


@pytest.mark.case("B141")
def test_nan_weights_end_one_way_and_leave_no_trace(runner):
    scheduler = HandScheduler(runner)
    row = scheduler.row(PROMPTS[0])
    slot = runner.target.slot("model.embed_tokens.weight")
    kept = slot.clone()
    slot[5] = math.nan  # the first token of PROMPTS[0], of no other prompt
    other = scheduler.row(PROMPTS[1])
    result = scheduler.step([(row, 3), (other, len(PROMPTS[1]))])
    assert result.finite == [False, True]
    slot.copy_(kept)
    scheduler.run([other], 8)
    clean = HandScheduler(make_runner(runner.config.model, num_pages=96))
    expected = clean.row(PROMPTS[1])
    clean.run([expected], 8)
    assert other.output == expected.output


@pytest.mark.case("B058")
def test_released_kv_comes_back_zeroed_in_the_same_tensors(runner):
    scheduler = HandScheduler(runner)
    row = scheduler.row(PROMPTS[1])
    scheduler.run([row], 4)
    pool = runner.token_to_kv_pool
    tensors = [*pool.k, *pool.v]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert runner.release_kv() == pool.nbytes
    assert runner.resume_kv() == pool.nbytes
    assert all(a is b for a, b in zip([*pool.k, *pool.v], tensors, strict=True))
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert all(not tensor.any() for tensor in tensors)
    again = HandScheduler(runner).row(PROMPTS[1])
    HandScheduler(runner).run([again], 4)
    assert again.output == row.output


def test_available_memory_is_in_bytes_and_plausible(runner):
    assert 64 << 20 < runner.available_memory() < 1 << 50


def test_random_weights_depend_on_the_seed_alone(tiny_llama_dir):
    first, same, other = (
        make_runner(tiny_llama_dir, load_format="random", seed=seed).target for seed in (7, 7, 8)
    )
    assert torch.equal(first.buffer, same.buffer)
    assert not torch.equal(first.buffer, other.buffer)
    assert (first.slot("model.norm.weight") == 1).all()
    weights = first.slot("model.layers.0.self_attn.q_proj.weight")
    assert weights.std().item() == pytest.approx(0.02, rel=0.1)


def test_bfloat16_runs(tiny_llama_dir):
    runner = make_runner(tiny_llama_dir, dtype="bfloat16")
    scheduler = HandScheduler(runner)
    rows = [scheduler.row(prompt) for prompt in PROMPTS]
    scheduler.run(rows, 5, chunk=8)
    assert all(len(row.output) == 5 and all(map(math.isfinite, row.logprobs)) for row in rows)
    assert runner.token_to_kv_pool.dtype is torch.bfloat16
