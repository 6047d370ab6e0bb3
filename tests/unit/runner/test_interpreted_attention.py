"""Decode attention where there is no GPU: in triton's interpreter, if triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_any_number_of_query_heads_shares_a_kv_head() -> None:
    """Those beyond the sixteenth were left as they lay in memory."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.runner.interpreted_attention"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
