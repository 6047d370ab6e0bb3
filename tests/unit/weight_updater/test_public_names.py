"""What `import weight_updater` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import weight_updater


def test_every_public_name_loads() -> None:
    for name in weight_updater.__all__:
        assert getattr(weight_updater, name) is not None
    assert set(weight_updater.__all__) == set(dir(weight_updater))
    with pytest.raises(AttributeError, match="weight_updater has no 'nope'"):
        weight_updater.nope  # noqa: B018


def test_describing_an_update_never_loads_torch() -> None:
    code = (
        "import sys, weight_updater, weight_updater.shm, weight_updater.errors, weight_updater.requests\n"
        "weight_updater.BeginUpdate, weight_updater.SharedSegment, weight_updater.UpdateRefused\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
