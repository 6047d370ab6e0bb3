"""Weights lent by CUDA IPC handles, between two processes on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.children import Child
from tests.engines import RunningEngine
from weight_updater.device_memory import DeviceBuffer, allocation_of, handle_of, identities_of

pytestmark = pytest.mark.gpu

PROMPT = [5, 9, 77, 31, 8, 120, 64, 3] * 5


@pytest.fixture(scope="module")
def trainer(gpu_engine: RunningEngine, tiny_bf16_dir: Path, start_trainer) -> Iterator[Child]:
    with start_trainer("tests.gpu.trainer", str(tiny_bf16_dir)) as child:
        child.ask("connect", address=gpu_engine.address)
        yield child
        child.ask("close")


def assert_live(engine: RunningEngine, trainer: Child, pushed: dict) -> None:
    """What the trainer sent is live, to the bit, under the version that it was told."""
    assert "reason" not in pushed, pushed
    live = engine.weights.checksums()
    assert live.by_name == trainer.ask("checksums")
    assert live.weight_version == pushed["version"]
    completion = engine.greedy(PROMPT, ignore_eos=True)
    assert completion.weight_versions == [pushed["version"]] * 8


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("staging", ["none", "device", "host"])
def test_what_is_lent_becomes_live(staging, verify, gpu_engine, trainer):
    address = gpu_engine.rollout.info().weights_address
    for step in range(3):
        trainer.ask("train", seed=100 + step)
        pushed = trainer.ask("push", staging=staging, verify=verify)
        assert_live(gpu_engine, trainer, pushed)
        assert pushed["staging"] == staging
        assert pushed["verified"] is verify
        assert pushed["num_changed"] == pushed["num_tensors"] == len(gpu_engine.weights.checksums().by_name)
    again = trainer.ask("push", staging=staging, verify=True)
    assert again["num_changed"] == 0, "the same bytes change nothing"
    assert gpu_engine.rollout.info().weights_address == address


def test_a_wrong_checksum_is_refused_before_a_byte_is_written(gpu_engine, trainer):
    pushed = trainer.ask("push", staging="none")
    before = gpu_engine.weights.checksums().by_name
    trainer.ask("train", seed=7)
    assert trainer.ask("push_wrong_checksum") == "CHECKSUM_MISMATCH"
    after = gpu_engine.weights.checksums()
    assert (after.by_name, after.weight_version) == (before, pushed["version"])
    assert_live(gpu_engine, trainer, trainer.ask("push", staging="none"))


@pytest.mark.parametrize("staging", ["none", "device"])
@pytest.mark.parametrize("verify", [True, False])
def test_values_that_are_not_finite_are_refused(staging, verify, gpu_engine, trainer):
    trainer.ask("train", seed=8)
    pushed = trainer.ask("push", staging=staging)
    before = gpu_engine.weights.checksums().by_name
    trainer.ask("poison")
    refused = trainer.ask("push", staging=staging, verify=verify)
    assert refused["reason"] == "NONFINITE", refused
    after = gpu_engine.weights.checksums()
    assert (after.by_name, after.weight_version) == (before, pushed["version"])
    trainer.ask("train", seed=9)
    assert_live(gpu_engine, trainer, trainer.ask("push", staging=staging))


def test_a_trainer_that_moves_its_weights(gpu_engine, trainer):
    trainer.ask("train", seed=10)
    assert_live(gpu_engine, trainer, trainer.ask("push", staging="none"))
    before = set(trainer.ask("allocation_ids"))
    trainer.ask("reallocate")
    trainer.ask("train", seed=11)
    assert_live(gpu_engine, trainer, trainer.ask("push", staging="none"))
    gone = before - set(trainer.ask("allocation_ids"))
    assert gpu_engine.weights.release(sorted(gone)) == 0, (
        "the push has released what it does not lend any more"
    )


def test_memory_that_does_not_begin_as_its_trainer_says_is_not_read(gpu_engine, trainer):
    trainer.ask("train", seed=14)
    pushed = trainer.ask("push", staging="none")
    assert_live(gpu_engine, trainer, pushed)
    before = gpu_engine.weights.checksums().by_name
    trainer.ask("train", seed=15)
    reason, message = trainer.ask("push_wrong_probe")
    assert reason == "MEMORY_UNAVAILABLE"
    assert "bytes" in message
    assert gpu_engine.weights.checksums().by_name == before
    assert gpu_engine.rollout.info().state.weight_version == pushed["version"]
    assert_live(gpu_engine, trainer, trainer.ask("push", staging="none"))


@pytest.mark.case("B097")
def test_release_unmaps(gpu_engine, trainer):
    trainer.ask("train", seed=12)
    assert_live(gpu_engine, trainer, trainer.ask("push", staging="none"))
    lent = trainer.ask("allocation_ids")
    assert gpu_engine.weights.release(lent) == len(lent)
    assert gpu_engine.weights.release(lent) == 0
    trainer.ask("train", seed=13)
    assert_live(gpu_engine, trainer, trainer.ask("push", staging="none"))  # sent in full once more


@pytest.mark.case("B101")
@pytest.mark.parametrize("kind", ["expandable", "strided", "float32"])
def test_what_cannot_be_lent_as_it_is(kind, gpu_engine, tiny_bf16_dir, start_trainer):
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if kind == "expandable" else {}
    with start_trainer("tests.gpu.trainer", str(tiny_bf16_dir), env=env) as child:
        child.ask("connect", address=gpu_engine.address)
        if kind == "strided":
            child.ask("stride")
        elif kind == "float32":
            child.ask("to", dtype="float32")
        for staging in ("none", "device"):
            child.ask("train", seed=20)
            assert_live(gpu_engine, child, child.ask("push", staging=staging))
            child.ask("train", seed=21)
            assert_live(gpu_engine, child, child.ask("push", staging=staging))
        child.ask("close")


@pytest.mark.usefixtures("two_gpus")
def test_who_lends_memory_of_another_gpu_keeps_its_own_current():
    torch.cuda.set_device(0)
    far = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:1")
    allocation = allocation_of(far.data_ptr(), 1)
    assert handle_of(allocation, 1) is not None
    assert identities_of([(far.data_ptr(), 1)]) == [allocation.identity]
    buffer = DeviceBuffer(100, torch.device("cuda", 1))
    assert buffer.data is not None
    assert buffer.data.get_device() == 1
    buffer.close()
    assert torch.zeros(1, device="cuda").get_device() == torch.cuda.current_device() == 0


def test_generation_goes_on_while_an_update_is_staged(gpu_engine, trainer):
    stream = gpu_engine.rollout.generate_stream(PROMPT, max_tokens=400, temperature=0.0, ignore_eos=True)
    labels = list(next(stream).weight_versions)
    trainer.ask("train", seed=30)
    pushed = trainer.ask("push", staging="device", inflight="keep")
    for part in stream:
        labels += part.weight_versions
    assert set(labels) <= {pushed["version"] - 1, pushed["version"]}
    assert labels == sorted(labels)
    assert len(labels) == 400
    assert_live(gpu_engine, trainer, pushed)


def test_an_engine_starts_on_an_arena_on_the_gpu(tiny_bf16_dir, serve_on_gpu, start_trainer, tmp_path):
    descriptor = tmp_path / "arena.json"
    with start_trainer("tests.gpu.trainer", str(tiny_bf16_dir)) as child:
        child.ask("train", seed=1)
        child.ask("adopt", descriptor=str(descriptor))
        with serve_on_gpu(tiny_bf16_dir, "--weights", f"ipc:{descriptor}") as engine:
            info = engine.rollout.info()
            assert info.kv_capacity["preloaded_weights_bytes"] == info.weight_bytes
            assert engine.weights.checksums().by_name == child.ask("checksums")
            child.ask("connect", address=engine.address)
            assert_live(engine, child, child.ask("update", seed=2))
            assert engine.rollout.info().weights_address == info.weights_address
            assert_live(engine, child, child.ask("leave"))
