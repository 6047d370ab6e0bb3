"""The kernels of a GPU's forward pass without a GPU: in triton's interpreter, if triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def interpret(module: str) -> None:
    """Run a module of this directory with kernels interpreted; a process of its own, since that is decided
    when triton is imported.
    """
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.unit.runner.{module}"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_any_number_of_query_heads_shares_a_kv_head() -> None:
    """Those beyond the sixteenth were left as they lay in memory."""
    interpret("interpreted_attention")


def test_kernels_between_products_and_those_that_draw_agree_with_plain_torch() -> None:
    interpret("interpreted_kernels")
