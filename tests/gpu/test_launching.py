"""Passes are launched without waiting for the device, and attention without FlashInfer."""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter

import pytest
import torch

from rollout_engine.sampling import SamplingParams
from tests.gpu.test_generation import GREEDY, engine, prompts_for
from tests.local_engine import LocalEngine

pytestmark = pytest.mark.gpu

LENGTHS = [11, 25, 70, 9]
ASKED = {
    "plain": {},
    "truncated": {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "top log-probabilities": {"top_logprobs": 3},
    "of the prompt": {"prompt_logprobs": True},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.1, "repetition_penalty": 1.1},
    "bias": {"logit_bias": ((77, 3.0),)},
}


@pytest.fixture(scope="module")
def overlapping(tiny_bf16_dir) -> LocalEngine:
    return engine(tiny_bf16_dir, capture_batch_sizes=(1, 2, 4), capture_prefill_tokens=(64,), overlap=True)


@pytest.fixture
def watched(overlapping, monkeypatch) -> Counter[str]:
    """The modes of passes that were launched while waiting for the device was an error."""
    launch, launched = overlapping.runner.launch, Counter()

    def without_waiting(batch):
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        launched[batch.forward_mode.name] += 1
        return pending

    monkeypatch.setattr(overlapping.runner, "launch", without_waiting)
    return launched


def test_waiting_for_the_device_would_be_an_error():
    one = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            one.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("asked", ASKED)
def test_a_launch_reads_nothing_back_from_the_device(asked, overlapping, watched):
    """What was sampled comes one step late, by copies that nobody waits for here."""
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=3, **ASKED[asked])
    overlapping.restart()
    before = Counter(overlapping.runner.forward_counts)
    sequences = overlapping.generate(prompts_for(128, LENGTHS), params)
    assert [len(sequence.output_ids) for sequence in sequences] == [12] * len(LENGTHS)
    assert sum(watched.values()) >= 12
    assert watched["DECODE"] >= 10
    counted = Counter(overlapping.runner.forward_counts) - before
    assert counted["decode_graph"] >= 10


def test_without_flashinfer_a_gpu_attends_by_sdpa_and_says_so_once(tiny_bf16_dir, monkeypatch, caplog):
    wanted = engine(tiny_bf16_dir, attention_backend="torch").generate(prompts_for(128, LENGTHS), GREEDY)
    found = importlib.util.find_spec

    def find_spec(name, package=None):
        return None if name == "flashinfer" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    caplog.set_level(logging.INFO)
    model = engine(tiny_bf16_dir, attention_backend="auto")
    sequences = model.generate(prompts_for(128, LENGTHS), GREEDY)
    assert [s.output_ids for s in sequences] == [s.output_ids for s in wanted]
    told = [entry for entry in caplog.records if getattr(entry, "event", "") == "attention_falls_back"]
    assert len(told) == 1
    assert told[0].levelno == logging.WARNING
    assert model.runner.decode_graph is None
