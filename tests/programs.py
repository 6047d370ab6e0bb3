"""The programs that stand in docs/: what a reader would copy is what the tests run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_program(
    document: str, directory: Path, *, number: int = 0, num_ranks: int = 0, **environment: str
) -> str:
    """Run a Python program of docs/`document`; gives what it printed.

    Args:
        number: of the program in the document, from 0.
        num_ranks: run that many of it under torchrun; 0 runs it alone.
    """
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / document).read_text(), re.DOTALL)
    assert len(found) > number, f"{document} holds {len(found)} programs"
    file = directory / "program.py"
    file.write_text(found[number])
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(launch if num_ranks else []), str(file)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{document}'s program failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout
