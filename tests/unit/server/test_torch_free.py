"""The front never loads torch or transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import rollout_engine.server

SERVER = Path(rollout_engine.server.__file__).parent


def test_the_front_does_not_load_torch():
    modules = [
        f"rollout_engine.server.{path.stem}" for path in SERVER.glob("*.py") if path.stem != "__init__"
    ]
    program = (
        f"import sys, importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "print(len(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_modules_of_the_front_are_short():
    for path in SERVER.glob("*.py"):
        assert len(path.read_text().splitlines()) < 400, path
