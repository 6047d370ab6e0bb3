"""Forward passes on a GPU: FlashInfer against SDPA and transformers, graphs against eager, overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout_engine.sampling import SamplingParams
from tests.local_engine import LocalEngine
from tests.tiny import load_reference

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 8)


def prompts_for(vocab_size: int, lengths: list[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def engine(directory, **config) -> LocalEngine:
    values = dict(
        dtype="bfloat16",
        device="cuda",
        capture_batch_sizes=SIZES,
        capture_prefill_tokens=(),
        num_pages=256,
    )
    return LocalEngine(directory, **(values | config))


@pytest.fixture(scope="module", params=["tiny_bf16_dir", "tiny_bf16_64_dir"])
def model_dir(request):
    return request.getfixturevalue(request.param)


def score(model: LocalEngine, tokens: list[int], num_prompt: int) -> list[float]:
    """Log-probabilities of tokens[num_prompt:] by one prefill."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=True, seed=0)
    (sequence,) = model.submit(tokens, params)
    model.run()
    return sequence.prompt_logprobs[num_prompt - 1 :]


def mean_difference(found: list[float], wanted: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) / len(wanted)


def reference_scores(model: Any, tokens: list[int], num_prompt: int) -> list[float]:
    """Log-probabilities of tokens[num_prompt:] by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens], device="cuda")).logits[0].float().log_softmax(-1)
    return [float(logits[at - 1, tokens[at]]) for at in range(num_prompt, len(tokens))]


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1)


def test_flashinfer_agrees_with_sdpa_and_transformers(model_dir):
    """As near to transformers in float32 as transformers in bfloat16 is, on average over all tokens."""
    exact = load_reference(model_dir).to("cuda", torch.float32)
    rounded = load_reference(model_dir).to("cuda", torch.bfloat16)
    prompts = prompts_for(128, [3, 17, 40, 90])
    flash = engine(model_dir)
    assert flash.runner.attention_backend_name == "flashinfer"
    oracle = engine(model_dir, attention_backend="torch")
    sums = dict.fromkeys(("transformers", "decoded", "flashinfer", "sdpa"), 0.0)
    for sequence in flash.generate(prompts, GREEDY):
        tokens, start = sequence.prompt_ids + sequence.output_ids, len(sequence.prompt_ids)
        wanted = reference_scores(exact, tokens, start)
        sums["transformers"] += mean_difference(reference_scores(rounded, tokens, start), wanted)
        sums["decoded"] += mean_difference(sequence.logprobs, wanted)
        sums["flashinfer"] += mean_difference(score(flash, tokens, start), wanted)
        sums["sdpa"] += mean_difference(score(oracle, tokens, start), wanted)
    assert max(sums.values()) < 2 * sums["transformers"] + 0.01, sums


@pytest.mark.case("B060")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8])
def test_graphs_equal_eager_at_the_same_padded_shape(model_dir, num_rows):
    """Token for token where no row is padded; by log-probabilities of the same tokens where some are."""
    prompts = prompts_for(128, [11 + 7 * i for i in range(num_rows)])
    graphs, eager = engine(model_dir), engine(model_dir, cuda_graphs=False)
    captured = graphs.generate(prompts, GREEDY)
    assert graphs.runner.forward_counts["decode_graph"] == GREEDY.max_tokens - 1
    assert eager.runner.decode_graph is None
    plain = eager.generate(prompts, GREEDY)
    for a, b in zip(captured, plain, strict=True):
        if num_rows in SIZES:
            assert a.output_ids == b.output_ids
        shared = next(
            (i for i, (x, y) in enumerate(zip(a.output_ids, b.output_ids, strict=True)) if x != y),
            len(a.output_ids),
        )
        assert shared > 0
        assert max(abs(x - y) for x, y in zip(a.logprobs[:shared], b.logprobs[:shared], strict=True)) < 0.15


@pytest.mark.case("B059")
def test_padding_touches_no_live_page(model_dir):
    """Three rows in a pass of four: the pool outside their pages and the padding page stays as it was."""
    model = engine(model_dir, prefix_cache=False)
    pool = model.runner.token_to_kv_pool
    for layer in (*pool.k, *pool.v):
        layer.fill_(7.0)
    sequences = [model.submit(p, GREEDY)[0] for p in prompts_for(128, [20, 33, 5])]
    pages: set[int] = set()
    original = model.scheduler.schedule

    def schedule(*args, **kwargs):
        batch = original(*args, **kwargs)
        pages.update(page for sequence in sequences for page in sequence.pages)
        return batch

    model.scheduler.schedule = schedule
    model.run()
    assert model.runner.forward_counts["decode_graph"] > 0
    live = torch.zeros(pool.num_pages + 1, dtype=torch.bool)
    live[sorted(pages)] = True
    live[pool.padding_page] = True
    for layer in (*pool.k_pages, *pool.v_pages):
        assert (layer.cpu()[~live] == 7.0).all()
        assert (layer.cpu()[live] != 7.0).any()


def test_overlap_changes_nothing(model_dir):
    """The same rows in the same passes of one engine, so the same bits; twice, since a race need not show."""
    model = engine(model_dir, prefix_cache=False)
    prompts = prompts_for(128, [11, 25, 70, 9, 130])
    for extra in ({}, {"top_p": 0.95, "min_p": 0.01}):
        params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, seed=3, **extra)
        results = []
        for overlap in (False, True, False, True):
            model.restart(overlap=overlap)
            results.append([(s.output_ids, s.logprobs) for s in model.generate(prompts, params)])
        assert results[1:] == results[:1] * 3


def test_penalties_and_bias_on_the_device(model_dir):
    model = engine(model_dir, overlap=True)
    prompt = prompts_for(128, [12])[0]
    params = SamplingParams(
        temperature=0.0, max_tokens=20, ignore_eos=True, seed=3, frequency_penalty=100.0, top_logprobs=2
    )
    (sequence,) = model.generate([prompt], params)
    assert len(set(sequence.output_ids)) == 20, "a token that was sampled once costs 100 from then on"
    biased = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, seed=3, logit_bias=((77, 1000.0),)
    )
    assert model.generate([prompt], biased)[0].output_ids == [77] * 4


@pytest.mark.case("B057")
def test_graphs_are_captured_again_exactly_when_an_address_moved(model_dir):
    model = engine(model_dir)
    graphs, target = model.runner.graphs, model.runner.target
    assert graphs.num_captured() == len(SIZES)
    prompts = prompts_for(128, [9, 30])
    before = [s.output_ids for s in model.generate(prompts, GREEDY)]
    assert graphs.moved() == []
    moved = target.arena.allocate(target.device)
    moved.copy_(target.buffer)
    target.bind(moved)
    assert any("qkv_proj" in name for name in graphs.moved())
    torch.cuda.synchronize()
    assert graphs.recapture() == len(SIZES)
    assert graphs.moved() == []
    model.restart()
    assert [s.output_ids for s in model.generate(prompts, GREEDY)] == before


@pytest.mark.case("B057")
def test_a_changed_weight_shows_in_a_captured_pass(model_dir):
    model = engine(model_dir)
    prompts = prompts_for(128, [9])
    before = model.generate(prompts, GREEDY)[0].logprobs
    model.runner.model.model.norm.weight.data.mul_(0.5)
    torch.cuda.synchronize()
    model.restart()
    after = model.generate(prompts, GREEDY)[0].logprobs
    assert model.runner.decode_graph.moved() == []
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.05
