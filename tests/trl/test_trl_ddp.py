"""Two ranks by gloo: rank 0 pushes and samples for both, nobody samples early, all end together."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines import Replaceable, serve
from tests.trl.ddp_trainer import NUM_STEPS, PER_RANK

pytestmark = pytest.mark.trl


def run_ranks(count: int, address: str, model: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    """What each rank saw, by rank."""
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += ["-m", "tests.trl.ddp_trainer", address, str(model), str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(count)]


def test_two_ranks_train_as_one(engine, chat_model_dir, tmp_path, show):
    first, second = run_ranks(2, engine.address, chat_model_dir, tmp_path / "two")
    assert [first["ranks"], first["error"], second["error"]] == [2, "", ""]
    assert first["versions"] == second["versions"] == [[v] * PER_RANK for v in range(1, NUM_STEPS + 1)]
    assert first["fresh"] == second["fresh"] == [True] * NUM_STEPS
    assert first["learned"] == second["learned"]
    assert len(first["diffs"]) == NUM_STEPS
    assert max(first["diffs"]) < 1e-4
    show(f"largest log-probability difference {max(first['diffs']):.1e}")

    together = [a + b for a, b in zip(first["completion_ids"], second["completion_ids"], strict=True)]
    for batch in together:
        assert len({tuple(ids) for ids in batch}) > PER_RANK  # no rank repeats the other's samples
    assert together[0] != together[1]


def test_both_ranks_end_when_the_engine_stays_away(chat_model_dir, tmp_path):
    with serve(chat_model_dir, "--num-pages", "256") as doomed:
        first, second = run_ranks(
            2, doomed.address, chat_model_dir, tmp_path / "two", "--kill", str(doomed.pid), "--restart-s", "2"
        )
        assert [len(rank["versions"]) for rank in (first, second)] == [2, 2]
        lost = f"the engine at {doomed.address} was lost and is not back after 2 s"
        assert first["error"].startswith(f"EngineLost: UNREACHABLE: {lost}")
        assert second["error"].startswith(f"RollsyncError: UNREACHABLE: rank 0 failed: {lost}")
        assert max(first["seconds"], second["seconds"]) < 30  # after the kill


@pytest.mark.timeout(600)  # two runs
def test_both_ranks_go_on_when_the_engine_is_replaced(chat_model_dir, tmp_path):
    with Replaceable(chat_model_dir, "--num-pages", "256") as replaceable:
        run = partial(run_ranks, 2, replaceable.address, chat_model_dir)
        undisturbed = run(tmp_path / "undisturbed", "--uncorrected")
        killed = replaceable.engine.process

        def replace() -> None:
            killed.wait(200)
            replaceable.kill()
            replaceable.start()

        replacing = threading.Thread(target=replace)
        replacing.start()
        ranks = run(tmp_path / "two", "--uncorrected", "--kill", str(killed.pid))
        replacing.join()
        assert [rank["error"] for rank in ranks] == ["", ""]
        for rank, expected in zip(ranks, undisturbed, strict=True):
            assert rank["fresh"] == [True] * NUM_STEPS
            assert rank["completion_ids"] == expected["completion_ids"]
            assert rank["learned"] == expected["learned"]
