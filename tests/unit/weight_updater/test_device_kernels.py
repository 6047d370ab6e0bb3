"""The GPU's kernels where there is no GPU: in triton's interpreter, if triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_kernels_agree_with_the_cpu_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.weight_updater.interpreted_kernels"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
