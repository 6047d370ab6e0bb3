"""Captured decode passes: the rows of a batch come out as they do uncaptured, and padding touches nobody."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rollout_engine.batch.packing import NUM_SLOTS
from rollout_engine.sampling import SamplingParams
from tests.hand_scheduler import GREEDY, HandScheduler, make_runner
from tests.tiny import ARCHITECTURES, make_tiny
from tests.unit.runner.standing_graphs import capture_decode, fill_adapter

SIZES = [1, 2, 4, 8]
PROMPTS = [[5, 6, 7], list(range(10, 47)), [9] * 16, [3], [8] * 15, [11, 4], list(range(20, 52))]
NUM_TOKENS = 20


@pytest.fixture(params=ARCHITECTURES)
def model_dir(request, tmp_path):
    return make_tiny(tmp_path, request.param)


def decode(runner, num_rows):
    """Rows of unequal lengths, prefilled one by one and then decoded together."""
    scheduler = HandScheduler(runner)
    rows = [scheduler.row(prompt, room=NUM_TOKENS) for prompt in PROMPTS[:num_rows]]
    for row in rows:
        scheduler.step([(row, len(row.prompt))])
    scheduler.run(rows, NUM_TOKENS)
    return rows


def written(runner, rows):
    """[token slots] bool: those that the rows' tokens went to; the last token sampled goes nowhere."""
    pool = runner.token_to_kv_pool
    mask = torch.zeros((pool.num_pages + 1) * pool.page_size, dtype=torch.bool)
    for row in rows:
        mask[row.slots[: len(row.tokens) - 1]] = True
    return mask


@pytest.mark.case("B059")
@pytest.mark.parametrize("num_rows", [1, 3, 5, 7])
def test_padded_rows_touch_no_live_page_and_reach_no_row(model_dir, num_rows, monkeypatch):
    """Every page is somebody's or full of NaN, and so is the padding page, which padded rows write to."""
    plain = make_runner(model_dir, num_pages=96)
    expected = decode(plain, num_rows)
    runner = make_runner(model_dir, num_pages=96)
    recorder = capture_decode(runner, SIZES, monkeypatch)
    assert len(recorder.graphs) == len(SIZES)
    pool = runner.token_to_kv_pool
    for layer in (*pool.k, *pool.v):
        layer.fill_(math.nan)
    rows = decode(runner, num_rows)
    assert runner.forward_counts["decode_graph"] == NUM_TOKENS - 1
    for row, other in zip(rows, expected, strict=True):
        assert row.output == other.output
        assert max(abs(a - b) for a, b in zip(row.logprobs, other.logprobs, strict=True)) < 1e-4
    live, padding = written(runner, rows), pool.num_pages * pool.page_size
    for layer, other in zip(
        (*pool.k, *pool.v), (*plain.token_to_kv_pool.k, *plain.token_to_kv_pool.v), strict=True
    ):
        assert torch.allclose(layer[live], other[live], atol=1e-4)
        live[padding] = num_rows not in SIZES
        assert layer[~live].isnan().all(), "nothing else was written"
        live[padding] = False


@pytest.mark.case("B059")
def test_the_last_page_belongs_to_whom_it_was_given(model_dir, monkeypatch):
    """Slot -1 of a table would be the last slot of the last page: a live one here."""
    pages = sum(-(-(len(prompt) + NUM_TOKENS) // 16) for prompt in PROMPTS[:3])
    expected = decode(make_runner(model_dir, num_pages=pages), 3)
    runner = make_runner(model_dir, num_pages=pages)
    capture_decode(runner, SIZES, monkeypatch)
    rows = decode(runner, 3)
    assert runner.forward_counts["decode_graph"] == NUM_TOKENS - 1
    assert sorted(slot for row in rows for slot in row.slots) == list(range(16 * pages)), (
        "every page is in use"
    )
    assert [row.output for row in rows] == [row.output for row in expected]


@pytest.mark.case("B060")
def test_a_replay_follows_page_tables_that_grow_and_batches_that_shrink(model_dir, monkeypatch):
    """Rows leave one by one, over the borders of pages and of captured sizes."""
    found = []
    for captured in (False, True):
        runner = make_runner(model_dir, num_pages=96)
        if captured:
            capture_decode(runner, SIZES, monkeypatch)
        scheduler = HandScheduler(runner)
        rows = [scheduler.row(prompt, room=80) for prompt in PROMPTS]
        for row in rows:
            scheduler.step([(row, len(row.prompt))])
        for index in reversed(range(len(rows))):
            scheduler.run(rows[: index + 1], 10 * (len(rows) - index))
        assert runner.forward_counts["decode_graph"] == (69 if captured else 0)
        found.append(rows)
    for row, other in zip(*found, strict=True):
        assert row.output == other.output
        assert max(abs(a - b) for a, b in zip(row.logprobs, other.logprobs, strict=True)) < 1e-4


def runners_for(model_dir, monkeypatch, **flags):
    """One that replays decode passes, and one that does not."""
    captured, plain = (make_runner(model_dir, num_pages=96, **flags) for _ in range(2))
    capture_decode(captured, SIZES, monkeypatch)
    return captured, plain


def test_rows_go_through_their_adapters(model_dir, monkeypatch):
    """Adapters are written after the capture, as a push is; rows change theirs, and padded rows have none."""
    outputs = []
    for runner in runners_for(model_dir, monkeypatch, max_adapters=2, max_adapter_rank=4):
        one, two = (fill_adapter(runner, slot, 4, slot) for slot in (1, 3))
        scheduler = HandScheduler(runner)
        rows = [scheduler.row(prompt, room=NUM_TOKENS) for prompt in PROMPTS[:3]]
        for row in rows:
            scheduler.step([(row, len(row.prompt))])
        for chosen in ([one, None, two], [two, two, None], [None] * 3, [one] * 3) * 3:
            batch = scheduler.batch(work := [(row, 1) for row in rows])
            batch.adapters = chosen if any(chosen) else []
            scheduler.apply(work, batch, runner.forward(batch))
        outputs.append([(row.output, row.logprobs) for row in rows])
        assert runner.forward_counts["decode_graph"] == (0 if outputs[1:] else 12)
    for (tokens, logprobs), (others, other_logprobs) in zip(*outputs, strict=True):
        assert tokens == others
        assert max(abs(a - b) for a, b in zip(logprobs, other_logprobs, strict=True)) < 1e-4


@pytest.mark.parametrize("sampled", [[1], [0, 2], [2], [0, 1, 2]])
def test_rows_that_are_sampled_are_told_from_those_that_are_not(tiny_llama_dir, sampled, monkeypatch):
    """Each by its own parameters, and noted at its own row of the pool for the next pass."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=5),
        SamplingParams(seed=6, top_k=3, min_p=0.1),
    ]
    found = []
    for runner in runners_for(tiny_llama_dir, monkeypatch):
        scheduler = HandScheduler(runner)
        for _ in range(2):  # so that indices in the batch are not those in the pool
            scheduler.row([1])
        rows = [scheduler.row(PROMPTS[i], kinds[i], room=NUM_TOKENS) for i in range(3)]
        for row in rows:
            scheduler.step([(row, len(row.prompt))])
        runner.last_tokens.fill_(-7)
        batch = scheduler.batch([(row, 1) for row in rows])
        batch.samples = [batch.samples[i] for i in sampled]
        result = runner.forward(batch)
        noted = runner.last_tokens[:5].tolist()
        assert [noted[rows[i].index] for i in sampled] == result.token_ids
        assert noted.count(-7) == 5 - len(sampled)
        found.append((result.token_ids, result.logprobs))
    (tokens, logprobs), (others, other_logprobs) = found
    assert tokens == others
    assert logprobs == pytest.approx(other_logprobs, abs=1e-4)


@pytest.mark.parametrize("captured", [True, False])
def test_a_steps_arrays_never_wait_for_the_step_in_flight(captured, tiny_llama_dir, monkeypatch):
    """On a GPU each of them takes a pinned buffer, and a buffer is used again once the device has read it."""
    runner = make_runner(tiny_llama_dir)
    if captured:
        capture_decode(runner, SIZES, monkeypatch)
    scheduler = HandScheduler(runner)
    asks = SamplingParams(
        temperature=0.5,
        top_k=8,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        logit_bias=((3, 1.0),),
        seed=1,
    )
    rows = [scheduler.row(prompt, asks if i else GREEDY) for i, prompt in enumerate(PROMPTS[:3])]
    for row in rows:
        scheduler.step([(row, len(row.prompt))])
    work = [(row, 1) for row in rows]
    batch = scheduler.batch(work)
    batch.samples = [replace(sample, forbidden_ids=(2,)) for sample in batch.samples[1:]]
    batch.slot_writes = [(row.index, 0, row.slots) for row in rows]  # each has got a page
    batch.input_ids[0] = -1  # not known yet
    taken = []
    for name in ("put", "fill"):
        original = getattr(runner.packer, name)
        monkeypatch.setattr(
            runner.packer, name, lambda *given, call=original: (taken.append(given), call(*given))[1]
        )
    runner.forward(batch)
    assert 8 < len(taken) <= NUM_SLOTS // 2
