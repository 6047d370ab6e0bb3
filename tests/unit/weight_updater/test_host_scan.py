"""The two ways to read the host's memory: they find the same, and the compiled one is never needed."""

import builtins
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_updater import checksum, host_scan
from weight_updater.host_scan import BLOCK_WORDS, MASK, Scan, mix, nonfinite_by_numpy, scan_by_numpy

FLOATS = list(host_scan.EXPONENTS)
Bytes = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def compiled() -> host_scan.Passes:
    pytest.importorskip("numba")
    from weight_updater.compiled_scan import passes

    return passes


def defined(data: bytes, first_word: int) -> int:
    padded = data + bytes(-len(data) % 8)
    words = (int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8))
    return sum(mix(word, first_word + i) for i, word in enumerate(words)) & MASK


def at_address(data: bytes, shift: int) -> Bytes:
    """The bytes in memory that starts `shift` bytes after a multiple of 64."""
    memory = np.zeros(len(data) + 128, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + shift
    memory[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)
    found: Bytes = memory[start : start + len(data)]
    assert not data or found.ctypes.data % 64 == shift
    return found


first_words = st.one_of(st.integers(0, 40), st.integers(0, 2**61 - 1))


@settings(deadline=None)
@given(data=st.binary(max_size=400), shift=st.integers(0, 63), first_word=first_words)
def test_both_sum_up_the_mixed_words(
    compiled: host_scan.Passes, data: bytes, shift: int, first_word: int
) -> None:
    view = at_address(data, shift)
    wanted = Scan(defined(data, first_word), False)
    assert host_scan.scan_compiled(compiled, view, first_word, None) == wanted
    assert scan_by_numpy(view, first_word, None) == wanted


@settings(deadline=None, max_examples=60)
@given(
    nbytes=st.integers(8, 3 * 8 * BLOCK_WORDS),
    shift=st.integers(0, 63),
    first_word=first_words,
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([None, *FLOATS]),
)
def test_both_find_the_same_in_long_ranges(
    compiled: host_scan.Passes,
    nbytes: int,
    shift: int,
    first_word: int,
    seed: int,
    dtype: torch.dtype | None,
) -> None:
    if dtype is not None:
        nbytes -= nbytes % dtype.itemsize
    view = at_address(np.random.default_rng(seed).bytes(nbytes), shift)
    found = host_scan.scan_compiled(compiled, view, first_word, dtype)
    assert found == scan_by_numpy(view, first_word, dtype)
    if dtype is not None:
        values = torch.from_numpy(view.copy()).view(dtype)
        assert found.nonfinite is nonfinite_by_numpy(view, dtype) is not bool(torch.isfinite(values).all())


@settings(deadline=None)
@given(
    data=st.binary(max_size=400),
    from_shift=st.integers(0, 63),
    to_shift=st.integers(0, 63),
    first_word=first_words,
    dtype=st.sampled_from([None, *FLOATS]),
    by_numpy=st.booleans(),
)
def test_a_copy_is_whole_and_hashed_as_it_is_written_and_nothing_beside_it(
    compiled: host_scan.Passes,
    data: bytes,
    from_shift: int,
    to_shift: int,
    first_word: int,
    dtype: torch.dtype | None,
    by_numpy: bool,
) -> None:
    if dtype is not None:
        data = data[: len(data) // dtype.itemsize * dtype.itemsize]
    source = at_address(data, from_shift)
    memory = np.full(len(data) + 128, 0xA5, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + to_shift
    into = memory[start : start + len(data)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(host_scan, "_loaded", True)
        monkeypatch.setattr(host_scan, "_passes", None if by_numpy else compiled)
        found = host_scan.copy_on_host(into, source, first_word, dtype)
    assert into.tobytes() == source.tobytes() == data
    assert found == scan_by_numpy(source, first_word, dtype)
    assert (memory[:start] == 0xA5).all()
    assert (memory[start + len(data) :] == 0xA5).all()


def test_long_copies_are_vectorised_alike(compiled: host_scan.Passes) -> None:
    data = np.random.default_rng(0).integers(0, 256, (1 << 20) + 5, dtype=np.uint8)
    for shift in (0, 1, 8, 33):
        into = np.zeros(data.size + 64, dtype=np.uint8)
        found = host_scan.copy_compiled(compiled, into[shift : shift + data.size], data, 7, torch.float32)
        assert found == scan_by_numpy(data, 7, torch.float32)
        assert np.array_equal(into[shift : shift + data.size], data)
        assert not into[:shift].any()
        assert not into[shift + data.size :].any()


def test_a_copy_over_itself_changes_nothing(compiled: host_scan.Passes) -> None:
    data = np.random.default_rng(1).integers(0, 256, 4099, dtype=np.uint8)
    before = data.copy()
    found = host_scan.copy_compiled(compiled, data, data, 0, None)
    assert found == scan_by_numpy(before, 0, None)
    assert np.array_equal(data, before)


@settings(deadline=None, max_examples=200)
@given(
    dtype=st.sampled_from(FLOATS),
    num_values=st.integers(1, 200),
    at=st.one_of(st.just(0), st.just(-1), st.integers(0, 199)),
    value=st.sampled_from([math.nan, -math.nan, math.inf, -math.inf]),
    shift=st.integers(0, 63),
)
def test_one_value_that_is_not_finite_is_found_wherever_it_is(
    compiled: host_scan.Passes, dtype: torch.dtype, num_values: int, at: int, value: float, shift: int
) -> None:
    """Among the largest values of either sign, whose bits carry furthest: first, last, in the tail."""
    tensor = torch.full((num_values,), torch.finfo(dtype).max, dtype=dtype)
    tensor[1::2] = torch.finfo(dtype).min
    tensor[2::5] = 0.0
    for wanted in (False, True):
        view = at_address(tensor.view(torch.uint8).numpy().tobytes(), shift)
        assert host_scan.scan_compiled(compiled, view, 5, dtype).nonfinite is wanted
        assert scan_by_numpy(view, 5, dtype).nonfinite is wanted
        assert nonfinite_by_numpy(view, dtype) is wanted
        tensor[at if at < 0 else at % num_values] = value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_two_bytes_counts_as_torch_counts_it(
    compiled: host_scan.Passes, dtype: torch.dtype
) -> None:
    """Each beside the neighbours whose carries would reach it, if there were any."""
    for neighbour in (0x0000, 0x7BFF if dtype == torch.float16 else 0x7F7F, 0x8000):
        values = np.full((1 << 16, 4), neighbour, dtype=np.uint16)
        values[np.arange(1 << 16), np.arange(1 << 16) % 4] = np.arange(1 << 16)
        finite = torch.isfinite(torch.from_numpy(values).view(dtype)).all(dim=1).tolist()
        rows = values.view(np.uint8)
        for row in [*range(0, 1 << 16, 97), *range(0x7BFE, 0x7C03), *range(0x7F7E, 0x7F83), 0x7FFF, 0xFF80]:
            found = host_scan.scan_compiled(compiled, rows[row], 0, dtype)
            assert found.nonfinite is not finite[row]


def test_a_read_only_range_is_scanned(compiled: host_scan.Passes) -> None:
    data = np.frombuffer(bytes(range(100)), dtype=np.uint8)
    assert not data.flags.writeable
    assert host_scan.scan_compiled(compiled, data, 3, None) == scan_by_numpy(data, 3, None)


@pytest.mark.parametrize("error", [ImportError("no numba"), RuntimeError("no code for this processor")])
def test_numpy_goes_on_where_the_compiled_pass_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Without numba, or with whatever a compiler may say."""
    tensor = torch.randn(1 << 19, generator=torch.Generator().manual_seed(0))
    before = checksum.checksum(tensor)
    monkeypatch.setattr(host_scan, "_loaded", False)
    monkeypatch.setattr(host_scan, "_passes", None)
    monkeypatch.delitem(sys.modules, "weight_updater.compiled_scan", raising=False)
    real, asked = builtins.__import__, []

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name == "weight_updater.compiled_scan":
            asked.append(name)
            raise error
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert checksum.checksum(tensor) == before
    assert not checksum.has_nonfinite(tensor)
    assert not host_scan.warm_up()
    assert len(asked) == 1  # asked once, not at every scan


def _in_a_process(code: str, **environment: str) -> str:
    root = Path(__file__).parents[3]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "HOME": "/nonexistent", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


HASH = """
import sys, torch
from weight_updater import checksum, host_scan
torch.cuda.is_initialized = lambda: {on_gpu}
{before}
checksum.checksum(torch.zeros({nbytes}, dtype=torch.uint8))
print("numba" in sys.modules, host_scan._passes is not None)
"""


def test_numba_is_loaded_by_the_first_large_scan_alone() -> None:
    pytest.importorskip("numba")
    assert _in_a_process(HASH.format(nbytes=(1 << 20) - 1, on_gpu=False, before="")) == "False False"
    assert _in_a_process(HASH.format(nbytes=4 << 20, on_gpu=True, before="")) == "False False"
    assert _in_a_process(HASH.format(nbytes=1 << 20, on_gpu=False, before="")) == "True True"


def test_without_a_cache_it_is_compiled_in_each_process_and_never_interpreted() -> None:
    pytest.importorskip("numba")
    nowhere = "from numba.core.caching import CacheImpl; CacheImpl._locator_classes = []"
    assert _in_a_process(HASH.format(nbytes=1 << 20, on_gpu=False, before=nowhere)) == "True True"
    code = HASH.format(nbytes=1 << 20, on_gpu=False, before="")
    assert _in_a_process(code, NUMBA_DISABLE_JIT="1") == "True False"
