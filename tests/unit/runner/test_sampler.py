"""Draws, penalties, truncation and log-probabilities, against numbers worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rollout_engine.batch.forward import SamplingInfo
from rollout_engine.batch.packing import Packer
from rollout_engine.batch.random_draw import uniforms
from rollout_engine.batch.schedule import SampleRow
from rollout_engine.runner.sampler import NO_TOKEN, inverse_cdf, sample
from rollout_engine.sampling import SamplingParams

CPU = torch.device("cpu")


def row(params, *, seed=0, index=0, position=0, prompt=(), output=(), forbidden=()) -> SampleRow:
    return SampleRow(0, params, seed, index, position, list(prompt), list(output), tuple(forbidden))


def run(logits, rows):
    return sample(torch.as_tensor(logits, dtype=torch.float32), SamplingInfo.from_rows(rows, Packer(CPU)))


def all_logprobs(logits, params, **kwargs) -> list[float]:
    """Log-probability of every id in the order of ids; -inf where it cannot be drawn."""
    size = len(logits)
    wide = SamplingParams(**{**params, "top_logprobs": size})
    result = run([logits], [row(wide, **kwargs)])
    values = [0.0] * size
    for token_id, value in zip(result.top_ids[0].tolist(), result.top_logprobs[0].tolist(), strict=True):
        values[token_id] = value
    return values


@pytest.mark.case("B128")
@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.5, [-0.1429, -2.1429, -4.1429]),
        (0.6, [-0.2026, -1.8693, -3.5360]),
        (2.0, [-0.6803, -1.1803, -1.6803]),
        (0.0, [-0.4076, -1.4076, -2.4076]),
    ],
)
def test_processed_is_log_softmax_at_the_temperature(temperature, expected):
    assert all_logprobs([2.0, 1.0, 0.0], {"temperature": temperature}) == pytest.approx(expected, abs=1e-4)


def test_raw_ignores_temperature_and_truncation():
    params = {"temperature": 0.5, "top_k": 1, "logprobs": "raw"}
    assert all_logprobs([2.0, 1.0, 0.0], params) == pytest.approx([-0.4076, -1.4076, -2.4076], abs=1e-4)


@pytest.mark.case("B129")
def test_top_p_keeps_the_smallest_set_and_renormalises():
    logits = [math.log(p) for p in (0.6, 0.3, 0.1)]
    processed = all_logprobs(logits, {"top_p": 0.8})
    assert processed == pytest.approx([-0.4055, -1.0986, -math.inf], abs=1e-4)
    raw = all_logprobs(logits, {"top_p": 0.8, "logprobs": "raw"})
    assert raw == pytest.approx([-0.5108, -1.2040, -2.3026], abs=1e-4)
    assert processed[0] - raw[0] == pytest.approx(0.1054, abs=1e-4)


@pytest.mark.case("B132")
def test_the_logprob_is_of_the_sampled_token_not_of_the_best():
    logits = torch.zeros(1, 12)
    logits[0, :9] = torch.arange(9, 0, -1)
    forced = SamplingParams(logit_bias=((9, 1000.0),), logprobs="raw", top_logprobs=1)
    result = run(logits, [row(forced)])
    assert result.token_ids.tolist() == [9]
    assert result.logprobs[0].item() == pytest.approx(torch.log_softmax(logits, -1)[0, 9].item(), abs=1e-5)
    assert result.top_ids.tolist() == [[0]]


def probabilities(logits, params, **kwargs) -> list[float]:
    return [math.exp(value) for value in all_logprobs(logits, params, **kwargs)]


def test_top_k_then_top_p_over_what_is_left():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert probabilities(logits, {"top_k": 2}) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-6)
    # Of top_k = 2 the first holds 0.571 of the mass: enough for top_p 0.55, though 0.4 of all was not.
    assert probabilities(logits, {"top_k": 2, "top_p": 0.55}) == pytest.approx([1, 0, 0, 0])
    assert probabilities(logits, {"top_p": 0.55}) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-6)


def test_min_p_is_relative_to_the_most_likely():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert probabilities(logits, {"min_p": 0.25}) == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])
    assert probabilities(logits, {"min_p": 1.0}) == pytest.approx([1, 0, 0, 0])


def test_ties_are_kept_in_the_order_of_ids():
    assert probabilities([1.0] * 5, {"top_k": 2}) == pytest.approx([0.5, 0.5, 0, 0, 0])
    result = run([[0.0, 3.0, 1.0, 3.0, 1.0]], [row(SamplingParams(top_logprobs=3, temperature=0.0))])
    assert result.top_ids.tolist() == [[1, 3, 2]]
    assert result.token_ids.tolist() == [1]


@pytest.mark.case("B141")
def test_a_huge_top_k_is_off():
    one_hot = torch.full((1, 8), -1e9)
    one_hot[0, 1] = 0.0
    for seed in range(20):
        assert run(one_hot, [row(SamplingParams(top_k=1 << 30), seed=seed)]).token_ids.tolist() == [1]


def test_penalties():
    logits = [2.0, -1.0, 1.0, 0.5]
    params = {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    # id 0: in the prompt alone; 1: twice in the output; 2: in both; 3: in neither.
    adjusted = torch.tensor([2.0 / 2, -1.0 * 2 - 2 * 0.5 - 0.25, 1.0 / 2 - 0.5 - 0.25, 0.5])
    got = all_logprobs(logits, params, prompt=[0, 0, 2], output=[1, 2, 1])
    assert got == pytest.approx(torch.log_softmax(adjusted, -1).tolist(), abs=1e-5)


def test_penalties_of_one_row_leave_the_others():
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    penalised = SamplingParams(frequency_penalty=1.0, temperature=0.0)
    plain = SamplingParams(temperature=0.0)
    rows = [row(plain, output=[0]), row(penalised, output=[0, 0]), row(plain, output=[0])]
    assert run(logits, rows).token_ids.tolist() == [0, 1, 0]


def test_bias_and_forbidden_ids():
    params = {"logit_bias": ((2, 1.5), (0, -math.inf), (2, 0.5))}
    expected = torch.log_softmax(torch.tensor([-math.inf, 1.0, 2.0]), -1).tolist()
    assert all_logprobs([2.0, 1.0, 0.0], params) == pytest.approx(expected, abs=1e-5)
    greedy = SamplingParams(temperature=0.0)
    result = run([[2.0, 1.0, 0.0]] * 2, [row(greedy, forbidden=[0]), row(greedy)])
    assert result.token_ids.tolist() == [1, 0]


def test_the_input_is_not_changed():
    logits = torch.randn(2, 50)
    before = logits.clone()
    params = SamplingParams(
        top_k=3, min_p=0.1, repetition_penalty=2.0, logit_bias=((1, 3.0),), temperature=0.7
    )
    run(logits, [row(params, prompt=[1], output=[2]), row(SamplingParams())])
    assert torch.equal(logits, before)


@pytest.mark.case("B141")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_stay_alone(bad):
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    rows = [row(SamplingParams(top_p=0.9, top_logprobs=2), seed=i) for i in range(4)]
    clean = run(logits, rows)
    logits[2, 7] = bad
    result = run(logits, rows)
    assert (result.token_ids != NO_TOKEN).tolist() == [True, True, False, True]
    assert result.token_ids[2] == NO_TOKEN
    assert math.isnan(result.logprobs[2])
    others = [0, 1, 3]
    assert torch.equal(result.token_ids[others], clean.token_ids[others])
    assert torch.equal(result.logprobs[others], clean.logprobs[others])


def test_a_row_without_any_token_left_is_not_finite():
    nothing = SamplingParams(logit_bias=tuple((i, -math.inf) for i in range(3)))
    result = run([[2.0, 1.0, 0.0]] * 2, [row(nothing), row(SamplingParams(temperature=0.0))])
    assert (result.token_ids != NO_TOKEN).tolist() == [False, True]
    assert result.token_ids.tolist() == [NO_TOKEN, 0]


def test_draws_are_inverse_cdf():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    goals = [0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1.0 - 2**-53]
    drawn = [inverse_cdf(probs, torch.tensor([u], dtype=torch.float64)).item() for u in goals]
    assert drawn == [1, 1, 3, 3, 3, 4, 4]


def test_inverse_cdf_over_many_blocks_agrees_with_a_plain_cumulative_sum():
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(64, 5000, generator=generator).pow(8)
    probs[probs < 0.2] = 0.0
    draws = torch.rand(64, dtype=torch.float64, generator=generator)
    cumulative = probs.double().cumsum(-1)
    expected = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0]
    drawn = inverse_cdf(probs, draws)
    assert torch.equal(drawn, expected)
    assert (probs.gather(1, drawn[:, None]) > 0).all()


def test_probability_zero_is_never_drawn_at_the_edges():
    probs = torch.zeros(1, 1000)
    probs[0, 300] = 1.0
    for u in (0.0, 0.5, 1.0 - 2**-53):
        assert inverse_cdf(probs, torch.tensor([u], dtype=torch.float64)).item() == 300


def test_draws_follow_the_distribution():
    probs = [0.5, 0.2, 0.15, 0.1, 0.05]
    count = 4000
    logits = torch.tensor([[math.log(p) for p in probs]]).expand(count, -1)
    rows = [row(SamplingParams(), seed=9, index=i % 8, position=i // 8) for i in range(count)]
    counts = torch.bincount(run(logits, rows).token_ids, minlength=5).tolist()
    chi_square = sum((n - count * p) ** 2 / (count * p) for n, p in zip(counts, probs, strict=True))
    assert chi_square < 18.5  # 0.1% of fair draws exceed it at 4 degrees of freedom


def test_uniforms_are_uniform_and_independent_of_each_other():
    triples = list(itertools.product(range(10), range(10), range(50)))
    values = torch.from_numpy(uniforms(*zip(*triples, strict=True)))
    assert 0.0 <= values.min() < 0.001
    assert 0.999 < values.max() < 1.0
    assert len(set(values.tolist())) == 5000
    counts = torch.histc(values.float(), bins=20, min=0, max=1)
    assert ((counts - 250) ** 2 / 250).sum() < 43.8  # 0.1% at 19 degrees of freedom
    assert abs(torch.corrcoef(torch.stack((values[:-1], values[1:])))[0, 1]) < 0.05
    largest = (2**64 - 1, 1023, 131071)
    alone, beside = uniforms(*[[n] for n in largest]), uniforms(*[[0, n] for n in largest])
    assert alone[0] == beside[1]


def test_a_draw_depends_on_seed_index_and_position_alone():
    vocab = 300
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(2))
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.9, temperature=1.3),
        SamplingParams(top_k=20, min_p=0.02),
        SamplingParams(presence_penalty=0.5, logprobs="raw"),
        SamplingParams(temperature=0.0, top_logprobs=4),
    ]
    rows = [row(p, seed=i, index=i, position=10 + i, output=[i, 2 * i]) for i, p in enumerate(kinds)]
    together = run(logits, rows)
    for i in range(6):
        alone = run(logits[i : i + 1], rows[i : i + 1])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0].item() == pytest.approx(together.logprobs[i].item(), abs=1e-6)
    backwards = run(logits.flip(0), rows[::-1])
    assert torch.equal(backwards.token_ids.flip(0), together.token_ids)
    moved = run(logits[:1].expand(64, -1), [row(kinds[0], seed=0, index=i) for i in range(64)])
    assert moved.token_ids.unique().numel() > 10
