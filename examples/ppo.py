"""PPO on SmolLM2-135M, in plain PyTorch: an engine samples over gRPC, this program trains.

    python examples/ppo.py             (or `make ppo`, which also does the set-up)

Four networks take part: the policy, which is trained; the engine's copy of it, which samples and gets the new
weights after every step; a value head on the policy, which guesses the return of what is being written; and
the reference, the policy as it was at first, which the policy pays for leaving (a KL penalty). Read it from
the bottom up: `main` is the loop, `train` is PPO. docs/ppo.md walks through it.

The task is "What is a+b? Reply with the number only."; a reply that is only a number earns 0.5, the right
number 0.5 more.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rollout_engine.models.packaged import packaged_smollm2
from trainers_adapters import IpcArena, ModuleSource, Request, RolloutClient, WeightsClient, push_weights

REPOSITORY = Path(__file__).resolve().parents[1]

NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 4, 8, 12  # of one step: 32 samples
EPOCHS, MINIBATCH_PROMPTS = 2, 2  # every step goes over its samples twice, in halves
LEARNING_RATE, VALUE_LEARNING_RATE = 1e-5, 1e-3
CLIP = 0.2  # how far from 1 the ratio of new to old probability may pay
GAMMA, LAMBDA = 1.0, 0.95
KL_COEFFICIENT = 0.02


# ---------------------------------------------------------------- the engine, a process of its own


@contextmanager
def serve(model: Path) -> Iterator[str]:
    """Start `rollsync serve`, give its address once it serves, stop it at the end."""
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready.json"
        command = [sys.executable, "-m", "rollout_engine.cli", "serve", "--model", str(model), "--port", "0"]
        command += ["--dtype", "float32", "--num-pages", "256", "--ready-file", str(ready)]
        engine = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not ready.exists():
                if engine.poll() is not None:
                    raise SystemExit(f"the engine ended with exit code {engine.returncode}; see above")
                time.sleep(0.1)
            yield json.loads(ready.read_text())["address"]
        finally:
            engine.terminate()
            engine.wait()


# ---------------------------------------------------------------- the task, and samples of it


@dataclass
class Group:
    """A prompt and its samples.

    tokens: of each sample, EOS included. logprobs: the engine's, of each token: those of the old policy.
    rewards: one for each sample, earned at its last token.
    """

    prompt: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    rewards: list[float]


def reward(text: str, answer: int) -> float:
    if not re.fullmatch(r"\d+", text.strip()):
        return 0.0
    return 1.0 if int(text) == answer else 0.5


def sample(engine: RolloutClient, tokenizer: Any, rng: random.Random, version: int) -> list[Group]:
    """NUM_PROMPTS sums, NUM_SAMPLES replies to each, all sampled by the weights of `version`."""
    sums = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(NUM_PROMPTS)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {a}+{b}? Reply with the number only."}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for a, b in sums
    ]
    requests = [Request(prompt, {"seed": rng.getrandbits(63)}) for prompt in prompts]
    # min_version: an engine that has not got the last push refuses, rather than sample with older weights.
    batch = engine.generate_batch(requests, n=NUM_SAMPLES, max_tokens=MAX_TOKENS, min_version=version)
    groups = []
    for prompt, (a, b), completions in zip(prompts, sums, batch, strict=True):
        sampled_by = {v for completion in completions for v in completion.weight_versions}
        assert sampled_by == {version}, f"sampled by {sampled_by}, but version {version} was pushed"
        tokens = [completion.token_ids for completion in completions]
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        rewards = [reward(text, a + b) for text in texts]
        groups.append(Group(prompt, tokens, [c.logprobs for c in completions], rewards))
    return groups


# ---------------------------------------------------------------- one forward pass over many samples


@dataclass
class Packed:
    """Groups as rows of [prompt | sample 0 | sample 1 | ...]: no prompt is read twice.

    A sample sees the prompt and itself, at the positions that it had in the engine. ids, positions:
    [groups, length]. mask: [groups, 1, length, length], whether a place (row) sees another. sources:
    [tokens], for every sampled token the flat place that predicts it. targets: [tokens], the tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor


def pack(groups: Sequence[Group]) -> Packed:
    length = max(len(group.prompt) + sum(map(len, group.tokens)) for group in groups)
    ids = torch.zeros(len(groups), length, dtype=torch.long)
    positions = torch.zeros_like(ids)
    segments = torch.full_like(ids, -1)  # 0 the prompt, k the k-th sample, -1 padding
    sources, targets = [], []
    for row, group in enumerate(groups):
        start, end = len(group.prompt), len(group.prompt)
        ids[row, :start] = torch.tensor(group.prompt)
        positions[row, :start] = torch.arange(start)
        segments[row, :start] = 0
        for k, tokens in enumerate(group.tokens, start=1):
            place = slice(end, end + len(tokens))
            ids[row, place] = torch.tensor(tokens)
            positions[row, place] = torch.arange(start, start + len(tokens))
            segments[row, place] = k
            sources += [row * length + i for i in (start - 1, *range(end, end + len(tokens) - 1))]
            targets += tokens
            end += len(tokens)
    visible = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    mask = visible & torch.ones(length, length, dtype=torch.bool).tril()
    return Packed(ids, positions, mask[:, None], torch.tensor(sources), torch.tensor(targets))


def hidden_states(model: Any, packed: Packed) -> torch.Tensor:
    """[tokens, hidden]: the last hidden state at the place that predicts each sampled token."""
    states = model.model(
        input_ids=packed.ids,
        position_ids=packed.positions,
        attention_mask=packed.mask,
        use_cache=False,
    ).last_hidden_state
    return states.flatten(0, 1)[packed.sources]


def token_logprobs(
    model: Any, hidden: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each token, and the entropy of what it was drawn from: [tokens] each."""
    logprobs = torch.log_softmax(model.lm_head(hidden), dim=-1)
    entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


class ValueHead(nn.Linear):
    """How much reward is still to come, from the hidden state that predicts the next token.

    It reads the policy's states but does not train them: a guess that knows nothing yet would only disturb.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.detach())[:, 0]


# ---------------------------------------------------------------- PPO


def advantages_of(rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Generalised advantage estimation for one sample: [tokens] rewards and values to [tokens] advantages.

    Nothing follows the last token, so its value is what was guessed and its surprise reward - value.
    """
    advantages = torch.empty_like(rewards)
    following, advantage = torch.zeros(()), torch.zeros(())
    for t in reversed(range(len(rewards))):
        surprise = rewards[t] + GAMMA * following - values[t]
        advantage = surprise + GAMMA * LAMBDA * advantage
        advantages[t] = advantage
        following = values[t]
    return advantages


def clipped_loss(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """PPO's: a token's gradient ends where its ratio has moved by CLIP in the direction that pays."""
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


@dataclass
class Targets:
    """What one group's tokens are trained towards: [tokens of the group] each.

    old: the engine's log-probabilities. advantages: not yet normalised. returns: of the value head.
    """

    old: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


@torch.no_grad()
def look_back(
    policy: Any, value_head: ValueHead, reference: Any, groups: list[Group]
) -> tuple[list[Targets], dict[str, float]]:
    """Rewards with the KL penalty, values and advantages of what was sampled; all before any update."""
    packed = pack(groups)
    hidden = hidden_states(policy, packed)
    logprobs, entropy = token_logprobs(policy, hidden, packed.targets)
    anchored, _ = token_logprobs(reference, hidden_states(reference, packed), packed.targets)
    values = value_head(hidden)
    old = torch.tensor([x for group in groups for sample in group.logprobs for x in sample])
    rewards = -KL_COEFFICIENT * (old - anchored)  # at each token: what leaving the reference costs
    lengths = [len(tokens) for group in groups for tokens in group.tokens]
    ends = torch.tensor(lengths).cumsum(0) - 1
    rewards[ends] += torch.tensor([x for group in groups for x in group.rewards])
    advantages = torch.cat(
        [advantages_of(r, v) for r, v in zip(rewards.split(lengths), values.split(lengths), strict=True)]
    )
    of_groups = [sum(map(len, group.tokens)) for group in groups]
    parts = [x.split(of_groups) for x in (old, advantages, advantages + values)]
    told = {
        "logprob_diff": float((old - logprobs).abs().max()),
        "kl": float((old - anchored).mean()),
        "entropy": float(entropy.mean()),
    }
    return [Targets(*columns) for columns in zip(*parts, strict=True)], told


def train(
    policy: Any,
    value_head: ValueHead,
    reference: Any,
    optimizer: torch.optim.Optimizer,
    groups: list[Group],
    rng: random.Random,
) -> dict[str, float]:
    """One step of PPO on one batch of samples; gives figures to print."""
    targets, told = look_back(policy, value_head, reference, groups)
    everything = torch.cat([target.advantages for target in targets])
    center, spread = everything.mean(), everything.std() + 1e-6
    clipped, errors = [], []
    for _ in range(EPOCHS):
        order = rng.sample(range(len(groups)), len(groups))
        for start in range(0, len(order), MINIBATCH_PROMPTS):
            chosen = order[start : start + MINIBATCH_PROMPTS]
            packed = pack([groups[i] for i in chosen])
            old, advantages, returns = (
                torch.cat([getattr(targets[i], name) for i in chosen])
                for name in ("old", "advantages", "returns")
            )
            hidden = hidden_states(policy, packed)
            logprobs, _ = token_logprobs(policy, hidden, packed.targets)
            value_loss = functional.mse_loss(value_head(hidden), returns)
            loss = clipped_loss(logprobs, old, (advantages - center) / spread) + value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            clipped.append(((logprobs.detach() - old).exp() - 1).abs().gt(CLIP).float().mean().item())
            errors.append(value_loss.item())
    return told | {"clipped": mean(clipped), "value_loss": mean(errors)}


# ---------------------------------------------------------------- the report


def plot(history: list[dict[str, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    steps = range(1, len(history) + 1)
    rewards = [step["reward"] for step in history]
    smooth = [mean(rewards[max(0, end - 5) : end]) for end in steps]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(steps, rewards, ".", color="tab:blue", alpha=0.5, label="step")
    left.plot(steps, smooth, color="tab:blue", label="mean of the last five")
    left.set(title="Mean reward", xlabel="step", ylim=(0, 1))
    left.legend(loc="upper left", frameon=False)
    right.plot(steps, [step["kl"] for step in history], color="tab:orange", label="KL to the reference")
    right.plot(steps, [step["value_loss"] for step in history], color="tab:green", label="value loss")
    right.set(title="KL (nats a token), value loss", xlabel="step", ylim=(0, None))
    right.legend(loc="upper left", frameon=False)
    for axes in (left, right):
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def line(version: int, told: dict[str, float], push_seconds: float) -> str:
    return (
        f"step {version:2}  reward {told['reward']:.3f}  kl {told['kl']:6.3f}  "
        f"entropy {told['entropy']:.2f}  clipped {told['clipped']:4.0%}  "
        f"value loss {told['value_loss']:.3f}  push {push_seconds * 1e3:4.0f} ms  "
        f"logprob diff {told['logprob_diff']:.1e}"
    )


# ---------------------------------------------------------------- the loop


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="another than SmolLM2, with a chat template")
    parser.add_argument("--plot", type=Path, default=REPOSITORY / "demo_out" / "ppo.png")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine is stopped then, too
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    print(f"model: {args.model or 'SmolLM2-135M-Instruct (unpacked once, about a minute)'}", flush=True)
    directory = args.model or packaged_smollm2(REPOSITORY / ".cache")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    reference = copy.deepcopy(policy).requires_grad_(False)
    policy.get_input_embeddings().requires_grad_(False)  # and the tied head: a third less to train
    value_head = ValueHead(policy.config.hidden_size)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in policy.parameters() if p.requires_grad], "lr": LEARNING_RATE},
            {"params": value_head.parameters(), "lr": VALUE_LEARNING_RATE},
        ],
        weight_decay=0.0,
    )
    source, rng, history, version = ModuleSource(policy), random.Random(args.seed), [], 0
    started = time.perf_counter()
    with (
        serve(directory) as address,
        RolloutClient(address) as engine,
        WeightsClient(address) as weights,
        IpcArena() as arena,
    ):
        for _ in range(args.steps):
            groups = sample(engine, tokenizer, rng, version)
            told = train(policy, value_head, reference, optimizer, groups, rng)
            report = push_weights(source, weights, via=arena)
            if report.num_changed == 0:
                raise SystemExit(f"the push of version {report.version} changed no tensor")
            version = report.version
            told["reward"] = mean(x for group in groups for x in group.rewards)
            history.append(told)
            print(line(version, told, report.seconds), flush=True)
    plot(history, args.plot)
    print(f"plot: {os.path.relpath(args.plot)}")
    rewards = [step["reward"] for step in history]
    summary = {
        "steps": len(history),
        "reward_first": round(mean(rewards[:5]), 4),
        "reward_last": round(mean(rewards[-5:]), 4),
        "max_logprob_diff": max(step["logprob_diff"] for step in history),
        "versions": version,
        "seconds": round(time.perf_counter() - started),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
