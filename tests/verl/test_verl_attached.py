"""A replica's server over an engine that runs already, without Ray."""

from __future__ import annotations

import asyncio

import pytest
from verl.utils.config import omega_conf_to_dataclass

from tests.engines import serve
from tests.tiny import load_reference
from tests.verl.settings import compose
from trainers_adapters import ModuleSource, RollsyncError, push_weights
from trainers_adapters.frameworks.verl_parts.server import RollsyncServer

pytestmark = pytest.mark.verl

PROMPT = [256, 93, 198, 180, 14]


def server_of(model, address: str, replica_rank: int = 0) -> RollsyncServer:
    own = "+actor_rollout_ref.rollout.engine_kwargs.rollsync"
    config = compose(model, f"{own}.addresses=['{address}']", f"{own}.token=secret")
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    return RollsyncServer(rollout, str(model), "hybrid", replica_rank, "", "10.1.2.3")


def test_an_engine_that_runs_is_used_and_left_running(chat_model_dir):
    async def meet(server: RollsyncServer) -> tuple:
        await server.launch_server()
        first = await server.generate(PROMPT, {"logprobs": True, "max_tokens": 5}, "a")
        report = push_weights(ModuleSource(load_reference(chat_model_dir)), engine.weights)
        await server.committed(report.version, 12)
        second = await server.generate(PROMPT, {"max_tokens": 5, "temperature": 0}, "b")
        where = await server.get_server_address()
        await server.shutdown()
        return first, second, where

    with serve(chat_model_dir, "--num-pages", "64", token="secret") as engine:
        first, second, where = asyncio.run(meet(server_of(chat_model_dir, engine.address)))
        assert engine.greedy(PROMPT, 5).token_ids == second.token_ids
        assert where == ("10.1.2.3", int(engine.address.rpartition(":")[2]))
    assert len(first.log_probs) == len(first.token_ids)
    assert first.extra_fields["global_steps"] is None
    assert second.log_probs is None
    assert {second.extra_fields[f"{kind}global_steps"] for kind in ("", "min_", "max_")} == {12}


def test_a_replica_without_an_engine_and_an_engine_that_is_gone_are_named(chat_model_dir):
    with pytest.raises(ValueError, match=r"replica 1 has no engine: .*addresses names 1"):
        asyncio.run(server_of(chat_model_dir, "127.0.0.1:1", 1).launch_server())
    with pytest.raises(RollsyncError, match=r"no engine answers at 127\.0\.0\.1:1"):
        asyncio.run(server_of(chat_model_dir, "127.0.0.1:1").launch_server())
