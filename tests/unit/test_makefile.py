"""What make would run, for an interpreter that has the packages of a GPU machine and one that has not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def planned(target: str, tmp_path: Path, *, has_cuda: str, **variables: str) -> str:
    """Its commands, with an interpreter that answers `has_cuda` when asked for a CUDA build of torch."""
    interpreter = tmp_path / "python-there"
    interpreter.write_text(f'#!/bin/sh\ncase "$*" in *torch.version.cuda*) echo {has_cuda};; esac\n')
    interpreter.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    settings = [f"{name}={value}" for name, value in variables.items()]
    ran = subprocess.run(
        ["make", "-n", target, f"PYTHON={interpreter}", "VENV=.venv-that-is-not-there", *settings],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.replace(str(interpreter), "PYTHON")


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("gpu", "PYTHON -m pytest -m 'gpu and alone' tests/gpu"),
        ("bench-gpu", "PYTHON -m tests.benchmarks.gpu"),
    ],
)
def test_an_interpreter_beside_a_gpu_is_taken_as_it_is(target: str, runs: str, tmp_path: Path) -> None:
    commands = planned(target, tmp_path, has_cuda="True")
    assert runs in commands
    assert "install" not in commands
    assert "venv" not in commands


@pytest.mark.parametrize("has_cuda", ["False", ""])
def test_one_without_cuda_makes_an_environment(has_cuda: str, tmp_path: Path) -> None:
    commands = planned("gpu", tmp_path, has_cuda=has_cuda)
    assert "PYTHON -m venv .venv-that-is-not-there" in commands
    assert ".venv-that-is-not-there/bin/python -m pytest -m 'gpu and alone' tests/gpu" in commands


def test_other_targets_make_one_beside_a_gpu_too(tmp_path: Path) -> None:
    assert "PYTHON -m venv" in planned("test", tmp_path, has_cuda="True")
    assert "venv" not in planned("test", tmp_path, has_cuda="True", SETUP="no")
