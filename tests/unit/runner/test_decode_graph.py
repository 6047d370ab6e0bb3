"""Captured decode passes: the rows of a batch come out as they do uncaptured, and padding touches nobody."""

from __future__ import annotations

import math

import pytest
import torch

from tests.hand_scheduler import HandScheduler, make_runner
from tests.tiny import ARCHITECTURES, make_tiny
from tests.unit.runner.standing_graphs import capture_decode

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
