"""The short programs that a newcomer copies, README's own among them, over a tiny model."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import RunningEngine, serve
from tests.tiny_chat import byte_tokenizer, make_chat_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    directory = make_chat_model(tmp_path_factory.mktemp("model"), byte_tokenizer())
    (directory / "generation_config.json").unlink()  # no byte ends a completion
    return directory


@pytest.fixture(scope="module")
def engine(model_dir) -> Iterator[RunningEngine]:
    with serve(model_dir, "--num-pages", "64", forked=True) as running:
        yield running


@pytest.fixture
def printed(engine, model_dir, monkeypatch, capsys):
    """Runs a program against the engine; gives the lines that it prints."""

    def run(program: Path, *arguments: str) -> list[str]:
        monkeypatch.setenv("ROLLSYNC_ADDRESS", engine.address)
        monkeypatch.setenv("MODEL", str(model_dir))
        monkeypatch.setattr(sys, "argv", [str(program), *arguments])
        runpy.run_path(str(program), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_generate(printed):
    lines = printed(ROOT / "examples" / "generate.py", "A prompt")
    assert lines[0] == "LlamaForCausalLM, float32 on cpu, weight version 0"
    samples = [line for line in lines if re.search(r"mean logprob -\d+\.\d\d, versions \[0\]$", line)]
    assert len(samples) == 3
    assert re.fullmatch(r"  \[\d+, \d+, \d+\] -> \[-\d.*, -\d.*, -\d.*\]", lines[-1])


def test_readmes_program(printed, engine, tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert program.count("127.0.0.1:50051") == 2
    file = tmp_path / "program.py"
    file.write_text(program.replace("127.0.0.1:50051", engine.address))
    version = engine.rollout.info().weight_version
    before, report, after = printed(file)
    assert report == f"version {version + 1}, 1 tensor changed"
    assert before.startswith(f"[{version}, {version}] [-")
    assert after.startswith(f"[{version + 1}, {version + 1}] [-")


def test_an_engine_on_the_arena_of_this_process(printed, model_dir):
    options = ("--device", "cpu", "--num-threads", "1", "--max-running-requests", "4")
    lines = printed(ROOT / "examples" / "start_on_arena.py", str(model_dir), *options)
    (weights,) = re.fullmatch(r"an engine on ([\d.,]+) MB of this process's weights", lines[0]).groups()
    free, kept, reserved, left, uncounted, taken = (
        float(line.partition(" MB  ")[0].replace(",", "")) for line in lines[1:7]
    )
    assert left == pytest.approx(free + kept + reserved, abs=0.3)
    assert uncounted - left == pytest.approx(0.5 * float(weights.replace(",", "")), abs=0.2)
    assert 0 < taken < left
    told = r"version 1 in [\d.]+ ms, 0 bytes of new memory; tokens \[(\d+, ){5}\d+\] of versions \[1\]"
    assert re.fullmatch(told, lines[7])


def test_swap_weights(printed, model_dir, engine):
    version = engine.rollout.info().weight_version
    lines = printed(ROOT / "examples" / "swap_weights.py", str(model_dir))
    labels = [re.match(r"(.*): version (\d+), tokens \[", line) for line in lines]
    told = [(label[1], int(label[2])) for label in labels if label]
    assert told == [("before", version), ("after", version + 1), ("rolled back", version)]
    tokens = {
        label[1]: line.partition("tokens ")[2] for label, line in zip(labels, lines, strict=True) if label
    }
    assert tokens["before"] == tokens["rolled back"]
    (pushed,) = [line for line in lines if line.startswith("pushed ")]
    assert re.match(
        r"pushed \d+ tensors, \d+ MB, \d+ new: \d+ ms, of which generation paused \d+ ms$", pushed
    )
