"""Adapters beside the base weights against PEFT's own forward pass in float32, for every architecture."""

from __future__ import annotations

import pytest
import torch

from rollout_engine import messages as m
from tests.desk import desk
from tests.lora import adapted, greedy, learn, lora, push
from tests.tiny import ARCHITECTURES, make_tiny
from tests.ways import ways_to
from trainers_adapters import AdapterSource

TOLERANCE = 1e-4
PROMPTS = [[5, 6, 7], list(range(10, 47)), [9] * 16, [3]]
NUM_TOKENS = 12


@pytest.fixture(
    scope="module", params=[(name, name == "qwen2") for name in ARCHITECTURES], ids=lambda p: p[0]
)
def pair(request, tmp_path_factory):
    """(engine, trainer, base model's answers before anything was pushed); two adapters are held."""
    name, tied = request.param
    folder = tmp_path_factory.mktemp(name)
    directory = make_tiny(folder / "model", name, tied=tied)
    model = adapted(directory)
    # Other ranks and scalings in some modules, none in others.
    patterns = {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"q_proj": 11}}
    modules = ["q_proj", "v_proj", "o_proj", "up_proj"]
    model.add_adapter("second", lora(r=8, use_rslora=True, target_modules=modules, **patterns))
    model.set_adapter("second")
    learn(model)
    with desk(directory, max_adapters=2, weights_roots=(folder,)) as engine, ways_to(engine, folder) as ways:
        base = answers(engine, [("", prompt) for prompt in PROMPTS])
        for adapter in ("default", "second"):
            source = AdapterSource(model, adapter, adapter=adapter)
            assert push(engine, ways, source).num_changed == len(source.names)
        yield engine, model, base


def answers(engine, asked):
    """Greedy answers to (adapter, prompt), all in the same passes."""
    engine.call(m.Pause)
    running = [engine.submit(list(p), adapter=name, max_tokens=NUM_TOKENS) for name, p in asked]
    engine.call(m.Continue)
    return [(one.end().tokens(), one.logprobs()) for one in running]


def of_peft(model, name, prompt):
    if not name:
        with model.disable_adapter():
            return greedy(model, prompt, NUM_TOKENS)
    model.set_adapter(name)
    return greedy(model, prompt, NUM_TOKENS)


@pytest.mark.parametrize("name", ["default", "second"])
def test_an_adapter_samples_what_peft_computes(pair, name):
    engine, model, base = pair
    found = answers(engine, [(name, prompt) for prompt in PROMPTS])
    for prompt, (tokens, logprobs) in zip(PROMPTS, found, strict=True):
        theirs, their_logprobs = of_peft(model, name, prompt)
        assert tokens == theirs
        assert (torch.tensor(logprobs) - torch.tensor(their_logprobs)).abs().max() < TOLERANCE
    assert [tokens for tokens, _ in found] != [tokens for tokens, _ in base], "the adapter does something"


def test_base_answers_keep_every_bit_beside_adapters(pair):
    engine, _, base = pair
    engine.call(m.FlushCache)  # what is cached is not computed: passes of fewer rows round differently
    assert answers(engine, [("", prompt) for prompt in PROMPTS]) == base


def test_a_mixed_batch_equals_each_alone(pair):
    """Prefill and decode rows of both adapters and of none, in the same passes."""
    engine, _, _ = pair
    asked = [(name, prompt) for prompt in PROMPTS for name in ("", "default", "second")]
    engine.call(m.FlushCache)
    together = answers(engine, asked)
    for one, (tokens, logprobs) in zip(asked, together, strict=True):
        engine.call(m.FlushCache)
        [(alone, their_logprobs)] = answers(engine, [one])
        assert tokens == alone
        assert (torch.tensor(logprobs) - torch.tensor(their_logprobs)).abs().max() < TOLERANCE


def test_prompts_are_scored_through_their_adapter(pair):
    engine, model, _ = pair
    prompt = PROMPTS[1]
    for name in ("", "default", "second"):
        running = engine.submit(
            prompt, adapter=name, max_tokens=0, prompt_logprobs=True, temperature=1.0
        ).end()
        with torch.no_grad():
            if name:
                model.set_adapter(name)
                logits = model(torch.tensor([prompt])).logits[0]
            else:
                with model.disable_adapter():
                    logits = model(torch.tensor([prompt])).logits[0]
        wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert (torch.tensor(running.last.prompt_logprobs) - wanted).abs().max() < TOLERANCE
        assert {(span.adapter, span.adapter_version) for span in running.last.spans} == {
            (name, int(bool(name)))
        }
