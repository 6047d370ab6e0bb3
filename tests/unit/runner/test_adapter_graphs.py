"""Captured prefill with adapters: the products of all slots, at addresses that no push moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.hand_scheduler import HandScheduler, make_runner
from tests.tiny import ARCHITECTURES, make_tiny
from tests.unit.runner.standing_graphs import capture_prefill, fill_adapter, use_kernels

SIZES = [16, 64]
PROMPTS = [[5, 6, 7], list(range(10, 47)), [9] * 12, [3]]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_captured_passes_give_what_eager_ones_do(name, in_place, tmp_path, monkeypatch):
    directory = make_tiny(tmp_path, name)
    runners = [make_runner(directory, num_pages=96, max_adapters=2, max_adapter_rank=4) for _ in range(2)]
    if in_place:
        for runner in runners:
            use_kernels(runner, monkeypatch)
    capture_prefill(runners[0], SIZES)
    addresses = [part.a.data_ptr() for part in runners[0].adapters.parts.values()]
    # Written after the capture, as a push is.
    adapters = [None, *(fill_adapter(runners[0], slot, 4, slot) for slot in (1, 3))]
    for slot in (1, 3):
        fill_adapter(runners[1], slot, 4, slot)
    schedulers = [HandScheduler(runner) for runner in runners]
    rows = [[s.row(prompt) for prompt in PROMPTS] for s in schedulers]
    chosen = [adapters[1], None, adapters[2], adapters[1]]
    steps = [[(0, 3), (1, 20), (2, 12), (3, 1)], [(0, 1), (1, 17), (2, 1)], [(0, 1), (1, 1), (3, 1)]]
    for step in steps:
        results = []
        for scheduler, row in zip(schedulers, rows, strict=True):
            work = [(row[i], n) for i, n in step]
            batch = scheduler.batch(work)
            batch.adapters = [chosen[i] for i, _ in step]
            results.append(scheduler.runner.forward(batch))
            scheduler.apply(work, batch, results[-1])
        assert results[0].token_ids == results[1].token_ids
        assert torch.allclose(torch.tensor(results[0].logprobs), torch.tensor(results[1].logprobs), atol=1e-4)
    assert runners[0].forward_counts["prefill_graph"] == 2
    assert runners[1].forward_counts["prefill_graph"] == 0
    assert [part.a.data_ptr() for part in runners[0].adapters.parts.values()] == addresses


def test_rows_of_the_pass_before_are_not_those_of_this_one(tiny_llama_dir):
    """The slots lie in the same buffer from pass to pass: padding and rows without an adapter are written."""
    runner = make_runner(tiny_llama_dir, num_pages=96, max_adapters=1, max_adapter_rank=4)
    plain = make_runner(tiny_llama_dir, num_pages=96)
    capture_prefill(runner, SIZES)
    capture_prefill(plain, SIZES)
    held = fill_adapter(runner, 1, 4, 1)
    first, second = HandScheduler(runner), HandScheduler(plain)
    batch = first.batch([(first.row([4] * 16), 16)])
    batch.adapters = [replace(held)]
    through = runner.forward(batch)
    results = [s.step([(s.row([7] * 9), 9), (s.row([8] * 5), 5)]) for s in (first, second)]
    assert results[0].token_ids == results[1].token_ids
    assert torch.equal(torch.tensor(results[0].logprobs), torch.tensor(results[1].logprobs))
    assert through.logprobs != second.step([(second.row([4] * 16), 16)]).logprobs
