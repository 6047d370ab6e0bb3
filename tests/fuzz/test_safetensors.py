"""Files that are nearly safetensors: what is read is what the file says, or the file is refused by name."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from tests.fuzz.strategies import mutated
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import ITEMSIZE
from weight_updater.safetensors_io import INDEX, SINGLE, open_checkpoint, save_weights

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "15")) * 20
TUNED = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
REFUSED = {Reason.FILE_CORRUPT, Reason.FILE_NOT_FOUND, Reason.INVALID_UPDATE, Reason.PATH_FORBIDDEN}
MAX_BYTES = 64 << 20
"""Of memory that reading a bad header of a few kilobytes may take."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NUMBER = st.integers(-4, 80) | st.sampled_from([1 << 31, 1 << 62, (1 << 64) - 1, -(1 << 63)])
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "f32", ""])
        | JSON,
        "shape": st.lists(NUMBER, max_size=4) | JSON,
        "data_offsets": st.lists(NUMBER, min_size=2, max_size=2) | JSON,
        "extra": JSON,
    },
)
HEADER = st.dictionaries(
    st.sampled_from(["a", "b", "a.weight", "", "__metadata__", "x" * 300]) | st.text(max_size=5),
    ENTRY | JSON,
    max_size=4,
)


@pytest.fixture
def valid(tmp_path) -> Path:
    save_weights(str(tmp_path), [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(3).bfloat16())])
    return tmp_path


def read(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]] | Reason:
    """Names with dtypes and shapes, or why the directory was refused; checks what is promised of both."""
    tracemalloc.start()
    try:
        with open_checkpoint(str(directory)) as checkpoint:
            for stored in checkpoint.stored:
                size = os.path.getsize(stored.file)
                for spec, offset in zip(stored.manifest.tensors, stored.offsets, strict=True):
                    assert 8 <= offset <= offset + spec.nbytes <= size
            return {spec.name: (spec.dtype, tuple(spec.shape)) for spec in checkpoint.manifest.tensors}
    except UpdateRefused as error:
        refused = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_BYTES
    assert refused.reason in REFUSED
    return refused.reason


def reference(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes as the safetensors library reads them; None where it refuses the file."""
    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, OverflowError):
        return None


def check_against_reference(directory: Path) -> None:
    """Never more lenient than the library that defines the format."""
    found, expected = read(directory), reference(directory / SINGLE)
    if isinstance(found, dict):
        assert expected is not None, found
        assert {name: shape for name, (_, shape) in found.items()} == expected
        total = sum(ITEMSIZE[dtype] * int(np.prod(shape, dtype=object)) for dtype, shape in found.values())
        assert total <= os.path.getsize(directory / SINGLE)


@TUNED
@given(data=st.data())
def test_any_bytes_changed(valid, data):
    path = valid / SINGLE
    whole = path.read_bytes()
    path.write_bytes(data.draw(mutated(whole)))
    check_against_reference(valid)
    path.write_bytes(whole)


@TUNED
@given(header=HEADER, tail=st.binary(max_size=64))
def test_any_header(tmp_path, header, tail):
    text = json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + tail)
    check_against_reference(tmp_path)


@TUNED
@given(
    length=st.integers(0, (1 << 64) - 1), text=st.binary(max_size=40) | st.text(max_size=30).map(str.encode)
)
def test_any_length_of_a_header(tmp_path, length, text):
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", length) + text)
    check_against_reference(tmp_path)


@TUNED
@given(
    index=JSON
    | st.fixed_dictionaries(
        {
            "weight_map": st.dictionaries(
                st.sampled_from(["a", "b"]),
                st.sampled_from(["s.safetensors", "../s", "/etc/passwd", "s\0", "", "."]) | JSON,
            )
        },
        optional={"metadata": JSON},
    )
)
def test_any_index(valid, index: Any):
    shard = valid / "s.safetensors"
    if not shard.exists():
        (valid / SINGLE).rename(shard)
    (valid / INDEX).write_text(json.dumps(index))
    found = read(valid)
    if isinstance(found, dict):
        assert found == {"a": ("float32", (2, 3)), "b": ("bfloat16", (3,))}
