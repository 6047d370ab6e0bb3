"""The arithmetic of examples/ppo.py: advantages, the clipped loss, packing, and that a step learns."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoTokenizer

from tests.tiny import load_reference
from tests.tiny_chat import make_chat_model

FILE = Path(__file__).resolve().parents[3] / "examples" / "ppo.py"


@pytest.fixture(scope="module")
def ppo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ppo_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ppo_example"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_advantages_are_discounted_sums_of_surprises(ppo) -> None:
    rewards, values = torch.tensor([0.1, -0.2, 1.0]), torch.tensor([0.5, 0.25, 0.75])
    surprises = [0.1 + 0.25 - 0.5, -0.2 + 0.75 - 0.25, 1.0 - 0.75]
    last = surprises[2]
    middle = surprises[1] + 0.95 * last
    first = surprises[0] + 0.95 * middle
    torch.testing.assert_close(ppo.advantages_of(rewards, values), torch.tensor([first, middle, last]))


def test_the_loss_is_clipped_only_where_moving_on_would_pay(ppo) -> None:
    logprobs = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = ppo.clipped_loss(logprobs, torch.zeros(4), advantages)
    loss.backward()
    up, down = 0.5, -0.5
    e = torch.tensor([1.2, 2.718281828**down, -(2.718281828**up), -0.8])
    torch.testing.assert_close(loss, -e.mean())
    assert [g != 0 for g in logprobs.grad.tolist()] == [False, True, True, False]


def groups_of(ppo, model) -> list:
    """Two prompts with two samples each; log-probabilities as an engine would give them."""
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 128, (n,), generator=generator).tolist()

    groups = []
    for prompt, lengths, rewards in ((5, (3, 1), [1.0, 0.0]), (7, (2, 4), [0.0, 0.5])):
        group = ppo.Group(tokens(prompt), [tokens(n) for n in lengths], [], rewards)
        group.logprobs = [alone(model, group.prompt, sample) for sample in group.tokens]
        groups.append(group)
    return groups


def alone(model, prompt: list[int], sample: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sample])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sample)[:, None])[:, 0].tolist()


def test_packed_samples_do_not_see_each_other(ppo, tiny_llama_dir) -> None:
    model = load_reference(tiny_llama_dir)
    groups = groups_of(ppo, model)
    packed = ppo.pack(groups)
    logprobs, entropy = ppo.token_logprobs(model, ppo.hidden_states(model, packed), packed.targets)
    expected = torch.tensor([x for group in groups for sample in group.logprobs for x in sample])
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    assert entropy.shape == expected.shape
    assert entropy.min() > 0


def test_steps_make_rewarded_samples_likelier(ppo, tiny_llama_dir) -> None:
    model, reference = load_reference(tiny_llama_dir), load_reference(tiny_llama_dir)
    head = ppo.ValueHead(model.config.hidden_size)
    optimizer = torch.optim.AdamW(
        [{"params": model.parameters(), "lr": 1e-3}, {"params": head.parameters(), "lr": 1e-3}]
    )
    groups = groups_of(ppo, model)
    before = [[sum(x) for x in group.logprobs] for group in groups]
    told = ppo.train(model, head, reference, optimizer, groups, random.Random(0))
    after = [[sum(alone(model, g.prompt, sample)) for sample in g.tokens] for g in groups]
    assert after[0][0] - before[0][0] > after[0][1] - before[0][1]
    assert after[1][1] - before[1][1] > after[1][0] - before[1][0]
    assert told["logprob_diff"] < 1e-4
    assert abs(told["kl"]) < 1e-5  # the reference is the policy that sampled


def test_leaving_the_reference_costs(ppo, tiny_llama_dir) -> None:
    model, reference = load_reference(tiny_llama_dir), load_reference(tiny_llama_dir)
    groups = groups_of(ppo, model)
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.5)
    targets, told = ppo.look_back(model, ppo.ValueHead(model.config.hidden_size), reference, groups)
    kl = [
        a - b
        for g in groups
        for s, old in zip(g.tokens, g.logprobs, strict=True)
        for a, b in zip(old, alone(reference, g.prompt, s), strict=True)
    ]
    assert told["kl"] == pytest.approx(sum(kl) / len(kl), abs=1e-4)
    # values are zero at first, so a sample's last advantage is its reward less the cost of its last token
    ends = [2, 3, 5, 9]
    rewards = [1.0, 0.0, 0.0, 0.5]
    got = torch.cat([target.advantages for target in targets])[ends]
    expected = [r - ppo.KL_COEFFICIENT * kl[end] for r, end in zip(rewards, ends, strict=True)]
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_the_whole_program_runs_over_another_model(smollm2_dir, tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model, plot = make_chat_model(tmp_path / "model", tokenizer), tmp_path / "ppo.png"
    done = subprocess.run(
        [sys.executable, str(FILE), "--model", str(model), "--steps", "2", "--plot", str(plot)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FILE.parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["steps"], said["versions"]) == (2, 2)
    assert said["max_logprob_diff"] < 1e-4
    assert plot.read_bytes().startswith(b"\x89PNG")
