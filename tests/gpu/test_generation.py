"""Forward passes on a GPU: FlashInfer against SDPA and transformers, graphs against eager, overlap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rollout_engine.sampling import SamplingParams
from rollout_engine.sequence import Sequence
from tests.local_engine import LocalEngine
from tests.tiny import load_reference

pytestmark = pytest.mark.gpu

ALL_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""What is captured by default."""


def prompts_for(vocab_size: int, lengths: list[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def engine(directory, **config) -> LocalEngine:
    values = dict(
        dtype="bfloat16", device="cuda", capture_prefill_tokens=(), num_pages=2048, prefix_cache=False
    )
    return LocalEngine(directory, **(values | config))


@pytest.fixture(scope="module", params=["tiny_bf16_dir", "tied_bf16_dir"])
def model_dir(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def graphs(model_dir) -> LocalEngine:
    """Captured at every size. Tests restart it, and leave its weights alone."""
    return engine(model_dir, capture_batch_sizes=ALL_SIZES)


@pytest.fixture(scope="module")
def references(model_dir) -> list[Any]:
    """The model in transformers, in float32 and in bfloat16."""
    return [load_reference(model_dir).to("cuda", dtype) for dtype in (torch.float32, torch.bfloat16)]


@pytest.fixture(scope="module")
def eager(model_dir) -> LocalEngine:
    made = engine(model_dir, cuda_graphs=False)
    assert made.runner.decode_graph is None
    return made


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


def test_flashinfer_agrees_with_sdpa_and_transformers(model_dir, graphs, references):
    """As near to transformers in float32 as transformers in bfloat16 is, on average over all tokens."""
    exact, rounded = references
    prompts = prompts_for(128, [3, 17, 40, 90])
    flash = graphs
    flash.restart()
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


def expected_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """torch's own, of the last tokens of one sequence: q [T, N, H] over keys and values [S, K, H]."""
    T, S = len(q), len(keys)
    q, keys, values = (tensor.transpose(0, 1)[None] for tensor in (q, keys, values))
    mask = None if T == S else torch.ones(T, S, dtype=torch.bool, device="cuda").tril(S - T)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if mask is None else SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)


def test_each_part_of_a_pass_attends_like_torch_and_whole_prompts_to_the_bit(model_dir):
    """Whole prompts, chunks behind cached tokens, and rows of one token beside them."""
    model = engine(model_dir, cuda_graphs=False, max_prefill_tokens=64, chunked_prefill=True)
    backend, pool = model.runner.attn_backend, model.runner.token_to_kv_pool
    attend, seen = backend.attend, []

    def noted(layer_id, q, batch, out=None):
        result = attend(layer_id, q, batch, out)
        ends = np.cumsum(batch.extend_lens_cpu)
        for row, (end, total) in enumerate(zip(ends, batch.seq_lens_cpu, strict=True)):
            length, places = batch.extend_lens_cpu[row], np.arange(total)
            pages = batch.page_table[batch.req_pool_indices_cpu[row]]
            slots = pages[places // pool.page_size] * pool.page_size + places % pool.page_size
            at = torch.from_numpy(slots).long().cuda()
            tokens = slice(end - length, end)
            wanted = expected_attention(q[tokens], pool.k[layer_id][at], pool.v[layer_id][at])
            kind = "one token" if length == 1 else "whole" if length == total else "behind others"
            error = (result[tokens].float() - wanted.float()).abs().max().item()
            seen.append((batch.forward_mode.name, kind, torch.equal(result[tokens], wanted), error))
        return result

    backend.attend = noted
    model.generate(prompts_for(128, [40, 90, 17]), GREEDY)
    parts = {(mode, kind) for mode, kind, _, _ in seen}
    assert parts >= {("EXTEND", "whole"), ("MIXED", "behind others"), ("MIXED", "one token")}, parts
    assert all(same for mode, kind, same, _ in seen if (mode, kind) == ("EXTEND", "whole"))
    assert max(error for *_, error in seen) < 0.04


def run_alike(model: LocalEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sequence]:
    """All prompts together, each with its own parameters."""
    model.restart()
    sequences = [model.submit(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    model.run()
    return sequences


@pytest.mark.case("B060")
@pytest.mark.parametrize("size", ALL_SIZES)
def test_graphs_equal_eager_at_the_same_padded_shape(graphs, eager, size):
    """Token for token, at each size that is captured."""
    prompts = prompts_for(128, [5 + 7 * i % 25 for i in range(size)])
    before = graphs.runner.forward_counts["decode_graph"]
    captured = run_alike(graphs, prompts, [GREEDY] * size)
    assert graphs.runner.forward_counts["decode_graph"] - before == GREEDY.max_tokens - 1
    plain = run_alike(eager, prompts, [GREEDY] * size)
    assert [one.output_ids for one in captured] == [one.output_ids for one in plain]
    for a, b in zip(captured, plain, strict=True):
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) < 0.15


@pytest.mark.parametrize("size", ALL_SIZES[1:])
def test_padding_changes_no_more_than_rounding_does(graphs, eager, size):
    """Log-probabilities of a fixed text, decoded: passes with a padded row against eager ones without it."""
    num_rows = size - 1
    prompts = prompts_for(128, [5 + i % 40 for i in range(num_rows)])
    tokens = [3 + 7 * i % 120 for i in range(num_rows)]  # each row's text is its prompt and one token, often
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=12,
            ignore_eos=True,
            seed=1,
            logit_bias=((token, 1e4),),
            logprobs="raw",
        )
        for token in tokens
    ]
    before = graphs.runner.forward_counts["decode_graph"]
    padded, plain = run_alike(graphs, prompts, params), run_alike(eager, prompts, params)
    assert graphs.runner.forward_counts["decode_graph"] - before == 11
    assert [one.output_ids for one in padded] == [[token] * 12 for token in tokens]
    differences = torch.tensor(
        [
            [abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)]
            for a, b in zip(padded, plain, strict=True)
        ]
    )
    assert differences.mean() < 0.06
    assert differences.max() < 0.4


@pytest.mark.parametrize("size", ALL_SIZES)
def test_logits_are_as_near_to_transformers_as_its_own_in_bfloat16(references, graphs, size):
    """Of the last pass at each captured size, against transformers in float32."""
    exact, rounded = references
    sums = {"ours": 0.0, "transformers": 0.0}
    for seed in range(max(1, 16 // size)):  # few values say little about a mean
        prompts = prompts_for(128, [20] * size, seed)
        sequences = run_alike(graphs, prompts, [GREEDY] * size)
        ids = torch.tensor([s.prompt_ids + s.output_ids[:-1] for s in sequences], device="cuda")
        logits = graphs.runner.decode_graph.logits[:size].float()
        with torch.no_grad():
            wanted, theirs = (m(ids).logits[:, -1].float() for m in (exact, rounded))
        sampled = torch.tensor([[s.output_ids[-1]] for s in sequences], device="cuda")
        assert torch.equal(logits.gather(1, sampled), logits.amax(-1, keepdim=True)), "another pass's logits"
        sums["ours"] += float((logits - wanted).abs().mean())
        sums["transformers"] += float((theirs - wanted).abs().mean())
    assert sums["ours"] < 2 * sums["transformers"] + 0.01, sums


@pytest.mark.case("B059")
def test_padding_touches_no_live_page(graphs):
    """Three rows in a pass of four: the pool outside their pages and the padding page stays as it was."""
    model = graphs
    model.restart()
    before = model.runner.forward_counts["decode_graph"]
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
    assert model.runner.forward_counts["decode_graph"] > before
    live = torch.zeros(pool.num_pages + 1, dtype=torch.bool)
    live[sorted(pages)] = True
    live[pool.padding_page] = True
    for layer in (*pool.k_pages, *pool.v_pages):
        assert (layer.cpu()[~live] == 7.0).all()
        assert (layer.cpu()[live] != 7.0).any()


def test_overlap_changes_nothing(graphs):
    """The same rows in the same passes of one engine, so the same bits; twice, since a race need not show."""
    model = graphs
    prompts = prompts_for(128, [11, 25, 70, 9, 130])
    for extra in ({}, {"top_p": 0.95, "min_p": 0.01}):
        params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, seed=3, **extra)
        results = []
        for overlap in (False, True, False, True):
            model.restart(overlap=overlap)
            results.append([(s.output_ids, s.logprobs) for s in model.generate(prompts, params)])
        assert results[1:] == results[:1] * 3


def test_penalties_and_bias_on_the_device(graphs):
    model = graphs
    model.restart(overlap=True)
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
def test_a_changed_weight_shows_in_a_captured_pass(graphs):
    prompts = prompts_for(128, [9])
    graphs.restart()
    before = graphs.generate(prompts, GREEDY)[0].logprobs
    norm = graphs.runner.model.model.norm.weight.data
    norm.mul_(0.5)
    torch.cuda.synchronize()
    graphs.restart()
    after = graphs.generate(prompts, GREEDY)[0].logprobs
    norm.mul_(2.0)  # as it was, to the bit
    torch.cuda.synchronize()
    assert graphs.runner.graphs.moved() == []
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.05


@pytest.mark.case("B057")
def test_graphs_are_captured_again_exactly_when_an_address_moved(graphs):
    captured, target = graphs.runner.graphs, graphs.runner.target
    assert captured.num_captured() == len(ALL_SIZES)
    prompts = prompts_for(128, [9, 30])
    graphs.restart()
    before = [s.output_ids for s in graphs.generate(prompts, GREEDY)]
    assert captured.moved() == []
    moved = target.arena.allocate(target.device)
    moved.copy_(target.buffer)
    target.bind(moved)
    assert any("qkv_proj" in name for name in captured.moved())
    torch.cuda.synchronize()
    assert captured.recapture() == len(ALL_SIZES)
    assert captured.moved() == []
    graphs.restart()
    assert [s.output_ids for s in graphs.generate(prompts, GREEDY)] == before
