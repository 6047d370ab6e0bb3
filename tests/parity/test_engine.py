"""The engine against transformers, float32: every switch of the scheduler, every architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollout_engine.sampling import SamplingParams
from tests import pairwise
from tests.local_engine import LocalEngine
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, load_reference, make_tiny

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
SWITCHES = ("prefix_cache", "chunked_prefill", "mixed_batches")


def reference_greedy(model, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, by transformers with its own cache."""
    tokens, logprobs, cache = [], [], None
    feed = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(num_tokens):
            out = model(feed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            scores = out.logits[0, -1].float().log_softmax(-1)
            token = int(scores.argmax())
            tokens.append(token)
            logprobs.append(float(scores[token]))
            feed = torch.tensor([[token]])
    return tokens, logprobs


def prompts_for(vocab_size: int, lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    prompts.append(prompts[-1][:-3] + prompts[0][:5])  # shares a prefix
    return prompts


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request, tmp_path_factory):
    directory = make_tiny(
        tmp_path_factory.mktemp(request.param), request.param, tied=request.param == "qwen2"
    )
    model = load_reference(directory)
    prompts = prompts_for(VOCAB_SIZE, [3, 17, 40, 90, 33], seed=4)
    wanted = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    return LocalEngine(directory, max_prefill_tokens=32), prompts, wanted


def check(engine: LocalEngine, prompts, wanted, params: SamplingParams = GREEDY) -> list:
    sequences = engine.generate(prompts, params)
    for sequence, (tokens, logprobs) in zip(sequences, wanted, strict=True):
        assert sequence.output_ids == tokens
        difference = max(abs(a - b) for a, b in zip(sequence.logprobs, logprobs, strict=True))
        assert difference < 1e-4
        assert [span.start for span in sequence.spans] == [0]
    return sequences


@pairwise.parametrize(**{key: [False, True] for key in (*SWITCHES, "preemption", "overlap")})
def test_greedy_equals_transformers_whatever_is_switched_on(
    tiny, prefix_cache, chunked_prefill, mixed_batches, preemption, overlap
):
    engine, prompts, wanted = tiny
    switches = dict(zip(SWITCHES, (prefix_cache, chunked_prefill, mixed_batches), strict=True))
    engine.restart(**switches, num_pages=24 if preemption else 256, overlap=overlap)
    for _ in range(2):  # the second time over a warm cache, if there is one
        sequences = check(engine, prompts, wanted)
        assert (sum(s.num_preemptions for s in sequences) > 0) == preemption
    assert any(s.num_first_cached for s in sequences) == switches["prefix_cache"]
    assert ("MIXED" in engine.modes) == switches["mixed_batches"]


def test_smollm2_equals_transformers(smollm2_dir):
    model = load_reference(smollm2_dir)
    prompts = prompts_for(model.config.vocab_size, [7, 130], seed=5)
    params = replace(GREEDY, max_tokens=32)  # which is enough for pages to fill, and to run out
    wanted = [reference_greedy(model, prompt, 32) for prompt in prompts]
    engine = LocalEngine(smollm2_dir, max_prefill_tokens=48)
    check(engine, prompts, wanted, params)
    engine.restart(prefix_cache=False, chunked_prefill=False, mixed_batches=False, num_pages=20)
    sequences = check(engine, prompts, wanted, params)
    assert sum(s.num_preemptions for s in sequences) > 0


@pytest.mark.case("B131")
@pytest.mark.case("B132")
def test_sampled_tokens_carry_the_logprob_of_the_reference(tiny):
    engine, prompts, _ = tiny
    engine.restart()
    params = SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True, seed=9)
    model = load_reference(engine.config.model)
    for sequence in engine.generate(prompts, params):
        tokens = torch.tensor([sequence.prompt_ids + sequence.output_ids])
        with torch.no_grad():
            scores = (model(tokens).logits[0].float() / 0.7).log_softmax(-1)
        start = len(sequence.prompt_ids)
        wanted = [float(scores[start + i - 1, token]) for i, token in enumerate(sequence.output_ids)]
        assert sequence.logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_draw_depends_on_seed_index_and_position_alone(tiny):
    engine, prompts, _ = tiny
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=42, n=3, top_p=0.9)
    engine.restart(overlap=True)
    together = [engine.submit(prompt, params) for prompt in prompts]
    engine.run()
    engine.restart(prefix_cache=False, chunked_prefill=False)
    for prompt, group in zip(prompts, together, strict=True):
        alone = engine.submit(prompt, params)
        engine.run()
        assert [s.output_ids for s in alone] == [s.output_ids for s in group]
        assert len({tuple(s.output_ids) for s in group}) == 3


@pytest.mark.case("B131")
def test_prompt_logprobs_equal_transformers(tiny):
    engine, prompts, _ = tiny
    engine.restart()
    model = load_reference(engine.config.model)
    params = SamplingParams(max_tokens=0, prompt_logprobs=True, seed=0)
    for prompt in prompts:
        (sequence,) = engine.submit(prompt, params)
        engine.run()
        with torch.no_grad():
            scores = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        wanted = [float(scores[i, token]) for i, token in enumerate(prompt[1:])]
        assert sequence.prompt_logprobs == pytest.approx(wanted, abs=1e-4)
        assert sequence.output_ids == []
