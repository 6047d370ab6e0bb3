"""GRPO on two ranks that share its model by FSDP2: both push, and the engine has the whole."""

from __future__ import annotations

import pytest

from tests.engines import serve
from tests.trl.ddp_trainer import NUM_STEPS, PER_RANK
from tests.trl.test_trl_ddp import run_ranks

pytestmark = pytest.mark.trl


def test_a_sharded_trainer_samples_from_its_whole_weights(engine, chat_model_dir, tmp_path, show):
    base = engine.rollout.info().weight_version
    ranks = run_ranks(2, engine.address, chat_model_dir, tmp_path / "two", "--fsdp2")
    first, second = ranks
    assert [rank["error"] for rank in ranks] == ["", ""]
    assert [rank["wrapped"] for rank in ranks] == ["FSDPLlamaForCausalLM"] * 2
    versions = [[base + step] * PER_RANK for step in range(1, NUM_STEPS + 1)]
    assert first["versions"] == second["versions"] == versions
    assert first["fresh"] == second["fresh"] == [True] * NUM_STEPS
    changed = [a != b for a, b in zip(first["learned"], first["learned"][1:], strict=False)]
    assert changed == [True] * (NUM_STEPS - 1)
    assert max(first["diffs"]) < 1e-4
    assert first["ratios"] == pytest.approx([1.0] * NUM_STEPS, abs=1e-3)
    show(f"FSDP2, largest log-probability difference {max(first['diffs']):.1e}")


def test_both_ranks_end_when_the_engine_stays_away_from_a_sharded_trainer(chat_model_dir, tmp_path):
    with serve(chat_model_dir, "--num-pages", "256") as doomed:
        options = ["--fsdp2", "--kill", str(doomed.pid), "--restart-s", "2"]
        first, second = run_ranks(2, doomed.address, chat_model_dir, tmp_path / "two", *options)
        assert [len(rank["versions"]) for rank in (first, second)] == [2, 2]
        lost = f"the engine at {doomed.address} was lost and is not back after 2 s"
        assert first["error"].startswith(f"EngineLost: UNREACHABLE: {lost}")
        assert second["error"].startswith(f"PushError: UNREACHABLE: on rank 0: {lost}")
        assert max(first["seconds"], second["seconds"]) < 30  # after the kill
