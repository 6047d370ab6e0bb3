"""What tests of adapters look at."""

from __future__ import annotations

import torch

from rollout_engine import messages as m
from tests.desk import Desk
from tests.lora import greedy

PROMPT = [5, 6, 7, 8, 9]
RANK = 8


def assert_samples(engine: Desk, model, name: str, version: int) -> None:
    running = engine.generate(PROMPT, adapter=name)
    tokens, logprobs = greedy(model, PROMPT)
    assert running.tokens() == tokens
    assert (torch.tensor(running.logprobs()) - torch.tensor(logprobs)).abs().max() < 1e-4
    assert running.adapter_labels() == [(name, version)] * len(tokens)
    assert running.labels() == [engine.version] * len(tokens)


def state_of(engine: Desk, name: str) -> m.AdapterState:
    engine.call(m.GetInfo)
    (found,) = [adapter for adapter in engine.now.adapters if adapter.name == name]
    return found
