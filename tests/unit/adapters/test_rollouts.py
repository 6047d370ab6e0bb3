"""Rollouts over a hand-written engine: one request for equal prompts, seeds, pushing again; and two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from trainers_adapters import Completion
from trainers_adapters.errors import RollsyncError
from trainers_adapters.frameworks.live_engine import WeightsLost
from trainers_adapters.frameworks.ranks import Ranks
from trainers_adapters.frameworks.rollouts import Rollouts
from trainers_adapters.rollout_calls import Request

LOST = WeightsLost("UNAVAILABLE", "UNREACHABLE", "it died")


class Engine:
    """Answers each request with its prompt, its index and the version; `failures` come first."""

    address = "127.0.0.1:1"

    def __init__(self, *failures: RollsyncError, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self.resyncs = 0
        self.version = 0
        self.asked: list[list[Request]] = []
        self.failures = list(failures)
        self.pushed: list[list[Any]] = []

    def push(self, source: Any) -> Engine:
        self.version += 1
        if source is not None:
            self.pushed = [[spec.name, spec.checksum] for spec in source.manifest().tensors]
        return self

    def sample(self, requests: list[Request], *, timeout_s: float) -> list[list[Completion]]:
        self.asked.append(list(requests))
        if self.failures:
            raise self.failures.pop(0)
        return [
            [
                Completion("", index, [*request.prompt, index], [-float(self.version)], (), "stop")  # type: ignore[list-item]
                for index in range(request.sampling["n"])
            ]
            for request in requests
        ]


def make_rollouts(engine: Engine) -> Rollouts:
    return Rollouts(engine, Ranks(), lambda: None)  # type: ignore[arg-type, return-value]


def test_equal_prompts_in_a_row_are_one_request():
    engine = Engine()
    rollouts = make_rollouts(engine)
    rollouts.sync()
    a, b = [1, 2], [3]
    samples = rollouts.generate([a, a, b, a], {"temperature": 0.5}, "0/train/7")
    assert [sample.token_ids for sample in samples] == [[1, 2, 0], [1, 2, 1], [3, 0], [1, 2, 0]]
    (asked,) = engine.asked
    assert [(request.prompt, request.sampling["n"]) for request in asked] == [(a, 2), (b, 1), (a, 1)]
    assert {request.sampling["temperature"] for request in asked} == {0.5}
    assert (rollouts.version, rollouts.num_tokens) == (1, 11)


def test_more_samples_than_a_request_may_have_are_several():
    engine = Engine()
    rollouts = make_rollouts(engine)
    rollouts.sync()
    assert len(rollouts.generate([[1]] * 2050, {}, "s")) == 2050
    assert [request.sampling["n"] for request in engine.asked[0]] == [1024, 1024, 2]
    assert len({request.sampling["seed"] for request in engine.asked[0]}) == 3


def test_lost_weights_are_pushed_again_and_the_same_is_asked_again():
    engine = Engine(LOST, LOST)
    rollouts = make_rollouts(engine)
    rollouts.sync()
    (sample,) = rollouts.generate([[1]], {}, "s")
    assert sample.logprobs == [-3.0]
    assert (rollouts.version, engine.resyncs) == (3, 2)
    assert engine.asked[0] == engine.asked[1] == engine.asked[2]
    seeds = [request.sampling["seed"] for request in engine.asked[0]]
    rollouts.generate([[1]], {}, "t")
    assert engine.asked[3][0].sampling["seed"] not in seeds


def test_an_engine_lost_again_and_again_ends_with_the_deadline():
    rollouts = make_rollouts(Engine(*[LOST] * 10**6, timeout_s=0.2))
    rollouts.sync()
    with pytest.raises(WeightsLost, match="it died"):
        rollouts.generate([[1]], {}, "s")


def test_a_refusal_is_not_tried_again():
    engine = Engine(RollsyncError("INVALID_ARGUMENT", "PROMPT_TOO_LONG", "too long"))
    rollouts = make_rollouts(engine)
    rollouts.sync()
    with pytest.raises(RollsyncError, match="too long"):
        rollouts.generate([[1]], {}, "s")
    assert len(engine.asked) == 1


RANK = """
import datetime, json, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from tests.unit.adapters.test_rollouts import LOST, Engine, make_rollouts
from trainers_adapters.errors import RollsyncError
from trainers_adapters.frameworks.ranks import Ranks
from trainers_adapters.frameworks.rollouts import Rollouts
from trainers_adapters.sharding.source import ShardedSource
from trainers_adapters.sources import ModuleSource
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
)
refusal = RollsyncError("INVALID_ARGUMENT", "PROMPT_TOO_LONG", "too long")
engine = Engine(LOST, timeout_s=20.0)
rollouts = Rollouts(engine, Ranks(2, rank), lambda: None)
rollouts.sync()
samples = rollouts.generate([[1]] if rank == 0 else [[1], [5, 6]], {}, "s")
said = {"ids": [s.token_ids for s in samples], "logprobs": [s.logprobs for s in samples]}
said |= {"version": rollouts.version, "asked": len(engine.asked)}
engine.failures = [refusal]
try:
    rollouts.generate([[1]], {}, "s")
except RollsyncError as error:
    said["error"] = [type(error).__name__, error.code, error.reason, error.message]

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
said["whole"] = [[spec.name, spec.checksum] for spec in ModuleSource(net).manifest().tensors]
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
sharded = ShardedSource(fully_shard(net, mesh=mesh), timeout_s=20.0)
engine.failures = [LOST]
rollouts = Rollouts(engine, Ranks(2, rank), lambda: sharded)
rollouts.sync()
rollouts.generate([[1]], {}, "s")
said |= {"pushed": engine.pushed, "sharded_version": rollouts.version}


def refuse(source):
    raise refusal


engine.push = refuse
try:
    rollouts.sync()
except RollsyncError as error:
    said["push_error"] = [error.code, error.reason, error.message]
print(json.dumps(said))
"""


def test_rank_0_acts_for_all_and_all_hear_of_it(tmp_path):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    first, second = (json.loads(process.communicate(timeout=60)[0]) for process in ranks)
    assert first["ids"] == [[1, 0]]
    assert second["ids"] == [[1, 1], [5, 6, 0]]  # its first prompt is the same request as rank 0's
    assert (first["version"], second["version"]) == (2, 2)
    assert first["logprobs"] + second["logprobs"] == [[-2.0]] * 3
    assert (first["asked"], second["asked"]) == (2, 0)
    assert first["error"] == ["RollsyncError", "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "too long"]
    assert second["error"] == [*first["error"][:3], "rank 0 failed: too long"]

    assert [name for name, _ in first["whole"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert (first["pushed"], second["pushed"]) == (first["whole"], [])
    assert (first["sharded_version"], second["sharded_version"]) == (4, 4)
    assert first["push_error"] == ["INVALID_ARGUMENT", "PROMPT_TOO_LONG", "too long"]
    assert second["push_error"] == ["INVALID_ARGUMENT", "PROMPT_TOO_LONG", "on rank 0: too long"]
