"""Registration, and a verl that calls things otherwise: the missing name and the versions are said."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.workers.rollout import base, llm_server, replica

from trainers_adapters.frameworks.verl import register
from trainers_adapters.frameworks.verl_names import IncompatibleVerl, check_names

pytestmark = pytest.mark.verl


@pytest.fixture(autouse=True)
def looked_at_anew():
    check_names.cache_clear()
    yield
    check_names.cache_clear()


def refusal() -> str:
    with pytest.raises(IncompatibleVerl) as refused:
        register()
    return str(refused.value)


def test_importing_verl_registers_all_three():
    (found,) = entry_points(group="verl.plugins", name="rollsync")
    assert found.value == "trainers_adapters.frameworks.verl_plugin"
    code = """
import verl
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.checkpoint_engine import CheckpointEngineRegistry
print(get_rollout_class("rollsync").__module__, get_rollout_replica_class("rollsync").__name__,
      CheckpointEngineRegistry.get("rollsync").__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.split() == [
        "trainers_adapters.frameworks.verl_parts.rollout",
        "RollsyncReplica",
        "RollsyncCheckpointEngine",
    ]


def test_verl_as_it_is_has_every_name():
    register()
    register()
    assert base.get_rollout_class("rollsync").__name__ == "ServerAdapter"


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (base, "_ROLLOUT_REGISTRY", "verl.workers.rollout.base._ROLLOUT_REGISTRY"),
        (base.BaseRollout, "release", "BaseRollout.release(self)"),
        (replica.RolloutReplica, "launch_servers", "RolloutReplica.launch_servers(self)"),
        (CheckpointEngineRegistry, "register", "CheckpointEngineRegistry.register(backend)"),
    ],
)
def test_a_missing_name_is_named_with_the_versions(monkeypatch, owner, name, said):
    monkeypatch.delattr(owner, name)
    text = refusal()
    assert f"verl {version('verl')} lacks " in text
    assert said in text
    assert f"rollsync {version('rollsync')} is built on; install verl==0.9.1" in text


def test_other_parameters_fields_and_calls_are_named(monkeypatch):
    async def update_weights(self, weights, format="named", **kwargs):
        pass

    async def call(self, global_steps=None):
        await self.server_adapter.update_weights(self.checkpoint_engine.receive_weights(), format="x")

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        return await self.server.generate.remote(prompt_ids, sampling_params)

    monkeypatch.setattr(base.BaseRollout, "update_weights", update_weights)
    monkeypatch.setattr(CheckpointEngineWorker, "update_weights", call)
    monkeypatch.setattr(llm_server.LLMServerClient, "generate", generate)
    monkeypatch.delitem(replica.TokenOutput.model_fields, "num_preempted")
    text = refusal()
    for said in (
        "BaseRollout.update_weights(self, weights, wire_format)",
        "TokenOutput.num_preempted",
        "CheckpointEngineWorker.update_weights: wire_format",
        "LLMServerClient.generate: image_data",
    ):
        assert said in text


@pytest.mark.parametrize("part", ["server", "replica", "rollout", "push", "checkpoint"])
def test_whichever_module_a_process_imports_first_all_is_registered(part):
    code = f"""
import trainers_adapters.frameworks.verl_parts.{part}
from verl.checkpoint_engine import CheckpointEngineRegistry
print(CheckpointEngineRegistry.get("rollsync").__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.split() == ["RollsyncCheckpointEngine"]
    assert "not registered" not in done.stderr
