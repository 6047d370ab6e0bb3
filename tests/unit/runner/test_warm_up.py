"""Passes before the first request: what they run, and that they leave no trace."""

from __future__ import annotations

import torch

from rollout_engine.config import ServeConfig
from rollout_engine.ops.fused import MANY_ROWS
from rollout_engine.runner import eager
from rollout_engine.runner.model_runner import ModelRunner
from rollout_engine.runner.warm_up import compile_ahead, make_shallow, warm_up
from tests.hand_scheduler import HandScheduler, make_runner
from weight_updater import host_scan


def test_it_runs_every_kind_of_pass_and_writes_to_the_padding_page_alone(tiny_llama_dir, monkeypatch):
    runner = make_runner(tiny_llama_dir, max_running_requests=5)
    seen = []
    sample = eager.sample

    def watched(logits, info, *rest):
        seen.append((logits.shape[0], info.untouched, info.any_raw and not info.plain))
        return sample(logits, info, *rest)

    monkeypatch.setattr(eager, "sample", watched)
    counts = dict(runner.forward_counts)
    with torch.inference_mode():
        warm_up(runner)
    kinds = [(1, True, False), (2, True, True), (2, False, False)]
    many = (-(-(MANY_ROWS + 1) // runner.model_config.context_length), True, False)
    decodes = [(rows, True, False) for rows in (1, 2, 4, 5)]
    assert seen == [*kinds, many, *decodes]
    assert runner.forward_counts == counts, "they are nobody's passes"
    pool = runner.token_to_kv_pool
    assert all(not layer[: pool.padding_slot].any() for layer in (*pool.k, *pool.v))

    class UpToTwo:
        def can_run_graph(self, batch):
            return batch.forward_mode.is_decode() and batch.batch_size <= 2

    monkeypatch.setattr(runner, "decode_graph", UpToTwo())
    seen.clear()
    with torch.inference_mode():
        warm_up(runner)
    assert seen == [*kinds, many, *decodes[2:]], "a capture loads the kernels of its passes"


def test_a_shallow_runner_has_the_shapes_of_the_model_in_one_layer(tiny_llama_dir):
    def fresh() -> ModelRunner:
        return ModelRunner(ServeConfig(model=tiny_llama_dir, device="cpu", dtype="float32", seed=3))

    whole, shallow = fresh(), fresh()
    make_shallow(shallow)
    whole.initialize()
    assert len(shallow.model.layers) == 1
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.model.named_parameters()}
    for name, tensor in shallow.model.named_parameters():
        assert tuple(tensor.shape) == shapes[name]
    scheduler = HandScheduler(shallow)
    row = scheduler.row([5, 6, 7])
    scheduler.run([row], 4)
    assert len(row.output) == 4
    assert compile_ahead(fresh()) == "torch"


def test_an_engine_on_a_cpu_loads_what_hashes_its_updates_at_its_start(tiny_llama_dir, monkeypatch):
    """Half a second that would fall into the pause of its first update otherwise."""
    asked = []
    monkeypatch.setattr(host_scan, "warm_up", lambda: asked.append(True))
    runner = make_runner(tiny_llama_dir)
    assert runner.device.type == "cpu"
    assert asked == [True]
    compile_ahead(ModelRunner(ServeConfig(model=tiny_llama_dir, device="cpu", dtype="float32")))
    assert asked == [True, True], "`rollsync warmup` fills the cache of compiled code"
