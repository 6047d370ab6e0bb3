"""Trainer and rollout on different GPUs: verl's checkpoint manager and workers, and our engine between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.agent_loop import AgentLoopManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager

from tests.verl.settings import compose
from tests.verl.workers import make_trainers
from trainers_adapters import RolloutClient, RollsyncError, WeightsClient
from trainers_adapters.frameworks.verl_parts.checkpoint import RollsyncCheckpointEngine
from weight_updater.checksum import checksum

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def separate(cluster: None, chat_model_dir) -> Iterator[Any]:
    """One trainer, and two engines that verl starts standalone."""
    config = compose(
        chat_model_dir,
        "actor_rollout_ref.rollout.checkpoint_engine.backend=rollsync",
        "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollsync.timeout_s=120",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.response_length=8",
    )
    trainers = make_trainers(config, 1, with_rollout=False)
    manager = LLMServerManager.create(config=config)
    engine_config = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    checkpoints = CheckpointEngineManager(engine_config, trainers, manager.get_replicas())
    servers = [replica.server_handle for replica in manager.get_replicas()]
    yield SimpleNamespace(
        config=config, trainers=trainers, manager=manager, checkpoints=checkpoints, servers=servers
    )
    for replica in manager.get_replicas():
        for worker in replica.workers:
            ray.kill(worker)
        asyncio.run(replica.shutdown())
    for worker in trainers.workers:
        ray.kill(worker)


def engines(separate: Any) -> list[Any]:
    return ray.get([server.get_engine.remote() for server in separate.servers])


def live(separate: Any) -> list[tuple[dict[str, int], int]]:
    found = []
    for where in engines(separate):
        with WeightsClient(where.address, token=where.token) as client:
            sums = client.checksums()
            found.append((sums.by_name, sums.weight_version))
    return found


def test_standalone_engines_want_the_token_that_was_made_for_them(separate):
    for where in engines(separate):
        with RolloutClient(where.address) as stranger, pytest.raises(RollsyncError, match="token"):
            stranger.info()


def test_an_update_reaches_every_replica_and_verl_hears_what_it_took(separate):
    for step in (1, 2):
        before = live(separate)
        separate.trainers.learn(0.01)
        metrics = separate.checkpoints.update_weights(global_steps=step)
        (sums,) = separate.trainers.checksums()
        version = before[0][1] + 1
        assert live(separate) == [(sums, version)] * 2
        assert metrics["rollsync/weight_version"] == version
        assert 0 < metrics["rollsync/pause_seconds"] < metrics["rollsync/update_seconds"]
        infos = ray.get([server.get_info.remote() for server in separate.servers])
        assert [(info["global_steps"], info["status"], info["released_tags"]) for info in infos] == [
            (step, "serving", [])
        ] * 2


def test_what_is_live_can_be_read_back(separate):
    (sums,) = separate.trainers.checksums()
    engine = RollsyncCheckpointEngine(bucket_size=1 << 20)
    engine.init_process_group(1, "none", engines(separate)[:1])

    async def read() -> dict[str, int]:
        return {name: checksum(tensor) async for name, tensor in engine.get_weights()}

    assert asyncio.run(read()) == sums


def test_a_refused_update_ends_on_both_sides_and_the_next_one_works(separate, monkeypatch):
    before = live(separate)
    separate.trainers.learn(0.01)
    spoiled = separate.trainers.update_weights
    monkeypatch.setattr(
        separate.trainers, "update_weights", lambda **kwargs: spoiled(**kwargs, spoil="nan@0"), raising=False
    )
    with pytest.raises(RollsyncError, match="NONFINITE"):
        separate.checkpoints.update_weights(global_steps=3)
    monkeypatch.undo()
    assert live(separate) == before
    ray.get([server.resume_kv_cache.remote() for server in separate.servers])
    metrics = separate.checkpoints.update_weights(global_steps=4)
    assert metrics["rollsync/weight_version"] == before[0][1] + 1


def test_verls_agent_loop_samples_a_batch(separate):
    """A dataset's rows through AgentLoopManager and its worker, to the tensors that verl trains on."""
    separate.checkpoints.update_weights(global_steps=5)
    loop = AgentLoopManager.create(config=separate.config, llm_client=separate.manager.get_client())
    questions = [[{"role": "user", "content": f"What is {a}+{a}?" + " Please." * a}] for a in range(4)]
    prompts = np.empty(4, dtype=object)
    prompts[:] = questions
    rows = {
        "raw_prompt": prompts,
        "data_source": np.array(["sums"] * 4, dtype=object),
        "reward_model": np.array([{"style": "rule", "ground_truth": "2"}] * 4, dtype=object),
        "index": np.arange(4),
    }
    batch = DataProto.from_dict(tensors=None, non_tensors=rows, meta_info={"global_steps": 5})
    output = loop.generate_sequences(batch)
    for worker in loop.agent_loop_workers:
        ray.kill(worker)
    assert output.batch["responses"].shape == (4, 8)
    (version,) = {version for _, version in live(separate)}
    assert output.non_tensor_batch["weight_version"].tolist() == [version] * 4
    assert output.non_tensor_batch["min_global_steps"].tolist() == [5] * 4
    for row in range(4):
        prompt = output.batch["prompts"][row]
        prompt = prompt[output.batch["attention_mask"][row, : len(prompt)].bool()].tolist()
        mask = output.batch["response_mask"][row].bool()
        completion = output.batch["responses"][row][mask].tolist()
        (own,) = separate.trainers.logprobs(prompt, completion, 1.0)
        assert output.batch["rollout_log_probs"][row][mask].tolist() == pytest.approx(own, abs=1e-4)
