"""AsyncGRPOTrainer with a worker and a transfer of ours: TRL's own loop, its protocols, what they carry."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch
from transformers import AttentionInterface, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from tests.engines import Replaceable
from tests.tiny_chat import ENDING_IDS
from tests.trl.trainers import MAX_TOKENS, NUM_GENERATIONS, Learned, Seen, checksums_of, questions
from trainers_adapters import ModuleSource
from trainers_adapters.frameworks.live_engine import EngineLost
from trainers_adapters.frameworks.trl_async import RolloutWorker, WeightTransfer

pytestmark = pytest.mark.trl

STEPS = 3


def tree_attention_on_cpu(
    module, query, key, value, mask, *, tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, scaling, **rest
):
    """What TRL's packed attention computes, without its GPU kernel: each segment sees its own path."""
    query, key, value = (x[0].float() for x in (query, key, value))
    heads = query.shape[0] // key.shape[0]
    key, value = (x[:, tree_kv_index].repeat_interleave(heads, 0) for x in (key, value))
    pieces = []
    segments = zip(
        tree_cu_seqlens_q[:-1],
        tree_cu_seqlens_q[1:],
        tree_cu_seqlens_k[:-1],
        tree_cu_seqlens_k[1:],
        strict=True,
    )
    for q0, q1, k0, k1 in segments:
        length, path = int(q1 - q0), int(k1 - k0)
        seen = torch.ones(length, path, dtype=torch.bool).tril(path - length)
        pieces.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, q0:q1], key[:, k0:k1], value[:, k0:k1], attn_mask=seen, scale=scaling
            )
        )
    return torch.cat(pieces, 1).transpose(0, 1)[None], None


@pytest.fixture
def cpu(monkeypatch):
    """What AsyncGRPOTrainer needs of a GPU, told or computed otherwise."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "none")
    yield
    AttentionInterface.register("tree_fa3", tree_attention_on_cpu)


def make_config(out, **settings) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        **{
            "output_dir": str(out),
            "use_cpu": True,
            "bf16": False,
            "max_steps": STEPS,
            "per_device_train_batch_size": NUM_GENERATIONS,
            "num_generations": NUM_GENERATIONS,
            "max_completion_length": MAX_TOKENS,
            "token_budget": -1,
            "max_inflight_tasks": 2 * NUM_GENERATIONS,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            **settings,
        }
    )


def test_the_async_trainer_trains(engine, chat_model_dir, tmp_path, cpu):
    config = make_config(tmp_path, max_staleness=1, queue_maxsize=NUM_GENERATIONS)
    tokenizer, reward, learned = AutoTokenizer.from_pretrained(chat_model_dir), Seen(), Learned()
    base = engine.rollout.info().weight_version
    transfer = WeightTransfer(engine.address, restart_s=20.0)
    worker = RolloutWorker(transfer, questions(), reward, tokenizer, config)
    trainer = AsyncGRPOTrainer(
        model=str(chat_model_dir),
        args=config,
        train_dataset=questions(),
        processing_class=tokenizer,
        callbacks=[learned],
        rollout_worker=worker,
        weight_transfer=transfer,
    )
    AttentionInterface.register("tree_fa3", tree_attention_on_cpu)
    trainer.train()
    live = engine.weights.checksums()
    assert live.weight_version == base + STEPS + 1
    assert live.by_name == checksums_of(trainer.model) == learned.after_steps[-1]
    assert trainer.model_version == STEPS + 1
    ratios = [entry["ratio"] for entry in trainer.state.log_history if "ratio" in entry]
    stale = [entry["sample/staleness_max"] for entry in trainer.state.log_history if "ratio" in entry]
    assert len(ratios) == STEPS
    assert all(abs(ratio - 1) < (1e-4 if age == 0 else 0.5) for ratio, age in zip(ratios, stale, strict=True))
    assert ratios[0] == pytest.approx(1, abs=1e-4)
    assert all(base < version <= base + STEPS + 1 for batch in reward.versions for version in batch)
    assert threading.active_count() < 20
    assert not any(thread.name.startswith("rollouts-") for thread in threading.enumerate())


def drain(worker: RolloutWorker, seconds: float = 30.0):
    """The next sample that the worker puts out."""
    return worker.rollout_buffer.get(timeout=seconds)


def wait_for_samples(worker: RolloutWorker, seconds: float) -> None:
    """Take samples as TRL does, which asks for the worker's health while there are none."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            drain(worker, 0.1)
        except queue.Empty:
            worker.check_health(stale_after_s=seconds)


def test_samples_carry_tokens_logprobs_advantages_and_the_trainers_version(engine, chat_model_dir, tmp_path):
    from tests.tiny import load_reference

    model, tokenizer = load_reference(chat_model_dir), AutoTokenizer.from_pretrained(chat_model_dir)
    config = make_config(tmp_path, max_inflight_tasks=NUM_GENERATIONS, queue_maxsize=1, temperature=0.7)
    transfer = WeightTransfer(engine.address)
    worker = RolloutWorker(transfer, questions(), Seen(), tokenizer, config)
    transfer.init_weight_transfer()
    transfer.send_weights(iter(ModuleSource(model)))
    worker.update_model_version(41)
    worker.start()
    group = [drain(worker) for _ in range(NUM_GENERATIONS)]
    worker.stop()
    transfer.destroy()
    assert {sample.group_id for sample in group} == {0}
    assert {sample.model_version for sample in group} == {41}
    assert sum(sample.advantage for sample in group) == pytest.approx(0, abs=1e-6)
    prompt = tokenizer.apply_chat_template(group[0].prompt, add_generation_prompt=True, return_dict=False)
    for sample in group:
        start = len(prompt)
        ids, mask = sample.input_ids.tolist(), sample.completion_mask.tolist()
        assert ids[:start] == prompt
        assert mask == [0] * start + [1] * (len(ids) - start)
        assert ids[-1] in ENDING_IDS or len(ids) == start + MAX_TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, start - 1 : -1] / 0.7
        mine = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
        assert torch.from_numpy(sample.old_log_probs[start:]).sub(mine).abs().max() < 1e-4
        assert sample.old_log_probs[:start].tolist() == [0.0] * start
        assert sample.metrics["rewards/seen"] == sum(i % 2 for i in ids[start:]) / (len(ids) - start)


def test_frozen_tensors_stay_and_others_come(engine, chat_model_dir):
    from tests.tiny import load_reference

    model = load_reference(chat_model_dir)
    transfer = WeightTransfer(engine.address)
    transfer.send_weights(iter(ModuleSource(model)))
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    transfer.send_weights((name, tensor) for name, tensor in ModuleSource(model) if "norm" in name)
    assert engine.weights.checksums().by_name == checksums_of(model)
    transfer.destroy()


def test_a_lost_engine_is_mended_by_the_next_push_or_named(chat_model_dir, tmp_path):
    from tests.tiny import load_reference

    model, tokenizer = load_reference(chat_model_dir), AutoTokenizer.from_pretrained(chat_model_dir)
    config = make_config(tmp_path, max_inflight_tasks=NUM_GENERATIONS, queue_maxsize=1)
    with Replaceable(chat_model_dir, "--num-pages", "128") as replaceable:
        transfer = WeightTransfer(replaceable.address, restart_s=60.0)
        worker = RolloutWorker(transfer, questions(), Seen(), tokenizer, config)
        transfer.send_weights(iter(ModuleSource(model)))
        worker.update_model_version(1)
        worker.start()
        drain(worker)
        replaceable.kill()
        replaceable.start()
        before = transfer.engine.version
        transfer.send_weights(iter(ModuleSource(model)))
        worker.update_model_version(2)
        assert transfer.engine.version == before + 1
        deadline = time.monotonic() + 30
        while drain(worker).model_version != 2:
            assert time.monotonic() < deadline
        worker.check_health(stale_after_s=30.0)

        transfer.engine.restart_s = 1.0
        replaceable.kill()
        with pytest.raises(EngineLost, match="has not had the weights of this run"):
            wait_for_samples(worker, seconds=30)
        worker.stop()
        transfer.destroy()


def test_samples_may_not_be_cut_short_by_updates():
    with pytest.raises(ValueError, match="inflight is 'abort', which would cut samples short"):
        WeightTransfer("127.0.0.1:1", inflight="abort")


def test_a_reward_function_that_fails_is_named_by_check_health(engine, chat_model_dir, tmp_path):
    from tests.tiny import load_reference

    def broken(**given):
        raise KeyError("no answer column")

    tokenizer = AutoTokenizer.from_pretrained(chat_model_dir)
    transfer = WeightTransfer(engine.address)
    worker = RolloutWorker(transfer, questions(), broken, tokenizer, make_config(tmp_path))
    transfer.send_weights(iter(ModuleSource(load_reference(chat_model_dir))))
    worker.start()
    with pytest.raises(RuntimeError, match="rollouts failed: 'no answer column'"):
        wait_for_samples(worker, seconds=30)
    worker.stop()
    transfer.destroy()
