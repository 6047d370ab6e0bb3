"""The demo's promise, by its own loop: a push that changes no checksum fails it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollout_engine.cli import demo
from rollout_engine.cli.main import app
from tests.engines import RunningEngine, serve
from tests.tiny_chat import byte_tokenizer, make_chat_model
from tests.wire.tiny_demo import load


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"), byte_tokenizer())


@pytest.fixture
def engine(model_dir, tmp_path) -> Iterator[RunningEngine]:
    """One that has not been pushed to, as the demo's own."""
    with serve(model_dir, "--num-pages", "256", "--weights-root", str(tmp_path), forked=True) as running:
        yield running


@pytest.fixture
def main(engine, model_dir, tmp_path, monkeypatch) -> Callable[[float, int], None]:
    """Runs examples/grpo.py at a learning rate for that many steps."""

    def run(learning_rate: float, steps: int) -> None:
        arguments = ["grpo.py", "--steps", str(steps), "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", arguments)
        load(model_dir, engine.address, learning_rate).main()

    return run


def test_a_trainer_that_learns_passes(main, engine, tmp_path, capsys):
    main(1e-3, 4)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["steps"], said["versions"]) == (4, 4)
    assert list(said["paths"]) == ["disk", "distributed", "tensor", "ipc"]
    assert engine.rollout.info().weight_version == 4
    assert (tmp_path / "grpo.png").read_bytes().startswith(b"\x89PNG")


def test_a_trainer_that_stops_learning_fails_at_that_push(main, engine, monkeypatch, capsys):
    step, taken = torch.optim.AdamW.step, []

    def once(optimizer: torch.optim.AdamW) -> None:
        taken.append(optimizer)
        if len(taken) == 1:
            step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", once)
    with pytest.raises(SystemExit, match=r"^the push of version 2 by distributed changed no checksum$"):
        main(1e-3, 4)
    assert len(taken) == engine.rollout.info().weight_version == 2
    assert "step  1 " in capsys.readouterr().out


def test_the_command_fails_too(engine, model_dir, tmp_path, monkeypatch, capfd):
    program = tmp_path / "grpo.py"
    program.write_text(
        "import sys, runpy\n"
        f"sys.argv[1:1] = [{str(model_dir)!r}, {engine.address!r}, '0']\n"
        "runpy.run_module('tests.wire.tiny_demo', run_name='__main__')\n"
    )
    monkeypatch.setattr(demo, "EXAMPLE", program)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    result = CliRunner().invoke(app, ["demo", "--steps", "3", "--out", str(tmp_path)])
    assert result.exit_code == 1, result.output
    told = capfd.readouterr()
    assert "the push of version 1 by disk changed no checksum" in told.err
    assert "step  1" not in told.out
