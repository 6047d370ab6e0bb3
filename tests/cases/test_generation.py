"""Tokens and their log-probabilities: whose they are, where they stand, and what is not finite."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollout_engine.cli.output import print_json
from rollout_engine.v1 import rollout_pb2 as pb
from tests.cases.common import EMBED, HEAD, Tensors, logits, reference, reference_logits, stored, trained
from tests.tiny import EOS
from tests.unit.server.tokenizers_for_tests import BOS, ids_of, save_tokenizer
from tests.unit.server.tokenizers_for_tests import EOS as EOS_OF_TEMPLATE
from tests.wire.front import prompt, serving
from tests.wire.trainer import PROMPT
from trainers_adapters.rollout_calls import parse_completion
from weight_updater.requests import Staging

BROKEN = 100
"""An id whose embedding is NaN in the tests that break one row."""


def scores(directory, tensors: Tensors, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len - 1, V] log-probabilities of each next token, by transformers."""
    with torch.no_grad():
        return (reference(directory, tensors)(torch.tensor([tokens])).logits[0] / temperature).log_softmax(
            -1
        )[:-1]


@pytest.mark.case("B128")
@pytest.mark.case("B131")
@pytest.mark.case("B132")
@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 0.6, 1.0, 2.0])
def test_each_logprob_is_its_own_tokens_given_all_before(temperature, mode, engine, ways, tied_dir, weights):
    new = trained(weights)
    ways.push("segment", new)
    for length in (1, 2, 15, 16, 17, 40):
        ids = PROMPT[:length]
        reply = engine.generate(ids, 12, temperature=temperature, logprobs=mode, seed=length, top_logprobs=3)
        tokens, found = reply.tokens(), reply.logprobs()
        assert len(tokens) == len(found) == 12
        scale = temperature if mode == "processed" and temperature else 1.0
        expected = scores(tied_dir, new, ids + tokens, scale)[length - 1 :]
        wanted = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(found), wanted, atol=1e-4)
        best = [part[0] for message in reply.parts[0] for part in message.top_logprobs]
        assert [i for i, _ in best] == expected.argmax(-1).tolist()
        assert [v for _, v in best] == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)
        if temperature >= 1.0:
            assert any(a != b for a, b in zip(tokens, expected.argmax(-1).tolist(), strict=True)), (
                "not the best one"
            )
    first = reply.logprobs()[0]
    whole = reference_logits(reference(tied_dir, new), ids)
    assert torch.allclose(logits(engine, ids), whole, atol=1e-4), "the prefill's last position"
    if mode == "raw" or temperature in (0.0, 1.0):
        assert first == pytest.approx(float(whole[reply.tokens()[0]]), abs=1e-4)


@pytest.mark.case("B132")
@pytest.mark.parametrize("rank", [0, 1, 9, 60])
def test_a_token_of_any_rank_has_its_own_logprob(rank, engine, ways, tied_dir, weights):
    ways.push("segment", weights)
    whole = reference_logits(reference(tied_dir, weights), PROMPT)
    token = int(whole.argsort(descending=True)[rank])
    reply = engine.generate(PROMPT, 1, logit_bias=((token, 1000.0),), logprobs="raw", top_logprobs=2)
    assert reply.tokens() == [token]
    assert reply.logprobs() == [pytest.approx(float(whole[token]), abs=1e-4)]
    assert reply.last.top_logprobs[0][0][0] == int(whole.argmax())


@pytest.mark.case("B129")
@pytest.mark.parametrize(
    "truncation", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.7}]
)
def test_kept_and_full_logprobs_differ_by_the_mass_that_is_kept(truncation, engine):
    """What a trainer over the whole vocabulary must add is one number for each token, and both are told."""
    options = {"temperature": 1.0, "seed": 5, "top_logprobs": 128, **truncation}
    kept = engine.generate(PROMPT, 8, logprobs="processed", **options)
    full = engine.generate(PROMPT, 8, logprobs="raw", **options)
    assert kept.tokens() == full.tokens(), "the mode changes no draw"
    ours, theirs = ([row for part in r.parts[0] for row in part.top_logprobs] for r in (kept, full))
    for a, b, top, whole in zip(kept.logprobs(), full.logprobs(), ours, map(dict, theirs), strict=True):
        mass = math.log(sum(math.exp(whole[i]) for i, value in top if value > -math.inf))
        assert a - b == pytest.approx(-mass, abs=1e-4)
        assert mass < 0


@pytest.mark.case("B127")
@pytest.mark.case("B141")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "extra", [{}, {"logit_bias": ()}, {"top_p": 0.9, "temperature": 1.0}, {"top_k": 1, "n": 2}]
)
def test_one_row_that_is_not_finite_ends_alone(extra, bad, untied):
    """Weights that their trainer wanted: one id's embedding is broken, so one of four requests is."""
    engine, ways, directory = untied
    weights = stored(directory)
    broken = trained(weights)
    broken[EMBED][BROKEN] = broken[HEAD][BROKEN] = 0.0  # so nobody samples it, without a bias too
    ways.push("segment", broken)
    options = {"max_tokens": 12, "logit_bias": ((BROKEN, -math.inf),), **extra}
    prompts = [[5, 6], [7, BROKEN, 8], [9] * 20, [3]]
    good = [engine.submit(p, **options).end() for p in prompts]
    broken[EMBED][BROKEN] = bad
    ways.push("segment", broken, allow_nonfinite=True)
    mixed = [engine.submit(p, **options) for p in prompts]
    for i, request in enumerate(mixed):
        request.end()
        for index in range(extra.get("n", 1)):
            if i == 1:
                assert request.finish(index) == "error"
                assert "not finite" in request.parts[index][-1].error
                assert (request.tokens(index), request.logprobs(index)) == ([], []), "nothing is made up"
            else:
                assert request.tokens(index) == good[i].tokens(index)
                assert request.logprobs(index) == pytest.approx(good[i].logprobs(index), abs=1e-4)
                assert request.finish(index) == "length"
    ways.push("segment", weights)
    assert engine.generate([5, 6]).finish() == "length", "the engine lives on"
    engine.idle()


@pytest.mark.case("B127")
def test_minus_infinity_of_a_prompt_is_told_as_it_is(engine, capsys):
    """top_k = 1 leaves the prompt's own tokens no probability: that is a number, and JSON has none for it."""
    reply = engine.generate(PROMPT, 2, top_k=1, temperature=1.0, prompt_logprobs=True, top_logprobs=5)
    values = [value for part in reply.parts[0] for rows in part.top_logprobs for _, value in rows]
    assert -math.inf in values
    assert 0.0 not in [value for value in values if value != max(values)]
    assert reply.finish() == "length"
    wire = pb.GenerateResponse(token_ids=[1, 2], logprobs=[float("nan"), float("-inf")])
    completion = parse_completion(pb.GenerateResponse.FromString(wire.SerializeToString()))
    assert math.isnan(completion.logprobs[0])
    assert completion.logprobs[1] == -math.inf
    print_json({"completions": [completion], "top": values})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert told["completions"][0]["logprobs"] == [None, None]
    assert told["top"] == [None if value == -math.inf else value for value in values]


def merging_tokenizer() -> Tokenizer:
    """`he`, `ll`, `llo`, `hello`: some texts can be spelled in several ways, and encoding takes one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["he", "ll", "llo", "hello"]
    vocab = {token: i for i, token in enumerate([*letters, *words])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.mark.case("B134")
@pytest.mark.parametrize("spelling", [["he", "llo"], ["h", "e", "l", "l", "o"], ["he", "ll", "o"], ["hello"]])
def test_ids_are_what_was_sampled_and_not_what_their_text_encodes_to(spelling, tmp_path):
    tokenizer = merging_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = [tokenizer.token_to_id(word) for word in spelling]
    assert tokenizer.decode(ids) == "hello"
    canonical = tokenizer.encode("hello").ids
    assert (canonical == ids) == (spelling == ["hello"])
    with serving(tmp_path, tokens=ids) as front:
        request = prompt(1, max_tokens=len(ids), return_text=True)
        messages = [parse_completion(part) for part in front.rollout.Generate(request, timeout=10)]
        assert [i for part in messages for i in part.token_ids] == ids
        assert "".join(part.text for part in messages) == "hello"
        assert sum(len(part.logprobs) for part in messages) == len(ids)
        list(front.rollout.Generate(prompt(*ids, max_tokens=1), timeout=10))
        assert front.commands("SubmitRequest")[-1]["token_ids"] == ids, (
            "and the next turn's are taken as they are"
        )


@pytest.mark.case("B131")
@pytest.mark.case("B134")
@pytest.mark.parametrize("n", [1, 3])
def test_what_was_sampled_scores_as_it_was_sampled(n, engine, ways, weights):
    """Ids that come back as a prompt get the log-probabilities that they were drawn with, each its own."""
    ways.push("segment", trained(weights))
    for temperature in (0.7, 1.0):
        drawn = engine.submit(PROMPT, n=n, max_tokens=20, temperature=temperature, seed=3).end()
        for index in range(n):
            whole = PROMPT + drawn.tokens(index)
            scored = (
                engine.submit(whole, max_tokens=0, prompt_logprobs=True, temperature=temperature).end().last
            )
            assert len(scored.prompt_logprobs) == len(whole) - 1
            assert scored.prompt_logprobs[len(PROMPT) - 1 :] == pytest.approx(drawn.logprobs(index), abs=1e-4)


@pytest.mark.case("B137")
@pytest.mark.case("B138")
@pytest.mark.parametrize("n", [1, 3])
def test_eos_of_a_model_that_says_nothing_else(n, engine):
    always = ((EOS, 1000.0),)
    stopped = engine.submit(PROMPT, n=n, max_tokens=16, ignore_eos=False, logit_bias=always).end()
    ignored = engine.submit(PROMPT, n=n, max_tokens=16, ignore_eos=True, logit_bias=always).end()
    asked = engine.submit(
        PROMPT, n=n, max_tokens=16, ignore_eos=True, logit_bias=always, stop_token_ids=(EOS,)
    ).end()
    other = engine.submit(PROMPT, n=n, max_tokens=16, ignore_eos=False, logit_bias=((5, 1000.0),)).end()
    for index in range(n):
        assert (stopped.tokens(index), stopped.finish(index)) == ([EOS], "stop")
        assert len(stopped.logprobs(index)) == 1, "EOS has its log-probability"
        assert (ignored.tokens(index), ignored.finish(index)) == ([EOS] * 16, "length")
        assert (asked.tokens(index), asked.finish(index)) == ([EOS], "stop")
        assert (other.tokens(index), other.finish(index)) == ([5] * 16, "length"), (
            "no EOS where none was sampled"
        )


@pytest.mark.case("B135")
@pytest.mark.parametrize(("bos", "eos"), [(True, False), (True, True), (False, False)])
def test_a_templated_text_gets_no_second_bos(bos, eos, tmp_path):
    """With and without the template's own BOS, in single requests and in a batch; ids are verbatim."""
    tokenizer = save_tokenizer(tmp_path, bos=bos, eos=eos)
    body = ids_of(tokenizer, "user: hi")
    with serving(tmp_path) as front:
        texts = ["user: hi", "<s>user: hi"] if bos else ["user: hi"]
        items = [pb.GenerateRequest(text=text, sampling=pb.SamplingParams(max_tokens=1)) for text in texts]
        for item in items:
            list(front.rollout.Generate(item, timeout=10))
        list(front.rollout.GenerateBatch(pb.GenerateBatchRequest(requests=items), timeout=10))
        for ids in ([BOS, BOS, 9], [9], [BOS, *body]):
            list(front.rollout.Generate(prompt(*ids, max_tokens=1), timeout=10))
        sent = [entry["token_ids"] for entry in front.commands("SubmitRequest")]
    expected = [BOS] * bos + body + [EOS_OF_TEMPLATE] * eos
    assert sent[: 2 * len(texts)] == [expected] * (2 * len(texts))
    assert sent[2 * len(texts) :] == [[BOS, BOS, 9], [9], [BOS, *body]]


@pytest.mark.case("B142")
@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
def test_nan_that_is_wanted_is_told_at_the_first_token(staging, engine, ways, weights):
    """allow_nonfinite is the trainer's own decision; then no token is made up, and the engine lives."""
    broken = {name: tensor * float("nan") for name, tensor in weights.items()}
    ways.push("segment", broken, allow_nonfinite=True, staging=staging)
    for _ in range(3):
        reply = engine.generate(PROMPT)
        assert (reply.finish(), reply.tokens()) == ("error", [])
    ways.push("segment", weights, staging=staging)
    assert engine.generate(PROMPT).finish() == "length"
