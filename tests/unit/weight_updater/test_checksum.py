import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_updater import checksum as cs
from weight_updater import host_scan

BLOCK_BYTES = cs.BLOCK_BYTES
MASK = (1 << 64) - 1


@pytest.fixture(params=["numpy", "compiled"], scope="module", autouse=True)
def passes(request: pytest.FixtureRequest) -> Iterator[None]:
    """All that stands here is so with either way to read the host's memory."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "compiled":
            pytest.importorskip("numba")
            assert host_scan.warm_up()
        else:
            monkeypatch.setattr(host_scan, "_loaded", True)
            monkeypatch.setattr(host_scan, "_passes", None)
        yield


def reference(data: bytes) -> int:
    """The definition once more, in Python's integers and by itself."""

    def mix(word: int, index: int) -> int:
        x = word ^ ((index + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = x ^ (x >> 32)
        x = (x * 0xBF58476D1CE4E5B9) % 2**64
        return x ^ (x >> 32)

    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    return (sum(mix(word, i) for i, word in enumerate(words)) + mix(len(data), 2**60)) % 2**64


def from_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def random_bytes(n: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(n)


@given(st.binary(max_size=200))
def test_equals_the_definition(data: bytes) -> None:
    assert cs.checksum(from_bytes(data)) == reference(data)


@pytest.mark.parametrize("nbytes", [BLOCK_BYTES - 8, BLOCK_BYTES, BLOCK_BYTES + 8, 2 * BLOCK_BYTES + 13])
def test_equals_the_definition_across_blocks(nbytes: int) -> None:
    data = random_bytes(nbytes)
    assert cs.checksum(from_bytes(data)) == reference(data)


def test_known_values_stay() -> None:
    """They are in files and manifests: a change would make old ones wrong."""
    assert cs.checksum(torch.empty(0)) == 0x61175472B78CA13E
    assert cs.checksum(torch.arange(5, dtype=torch.float32)) == 0x55BAC2BA46EAB857
    assert cs.fold([1, 2, 3]) == 0xED616E9BE044B2F7


@given(st.binary(max_size=300), st.randoms(use_true_random=False), st.data())
def test_parts_add_up_in_any_order(data: bytes, random, draw) -> None:
    num_words = math.ceil(len(data) / 8)
    cuts = sorted(draw.draw(st.sets(st.integers(0, num_words), max_size=8)) | {0, num_words})
    chunks = [(8 * a, data[8 * a : 8 * b]) for a, b in itertools.pairwise(cuts)]
    random.shuffle(chunks)
    part = cs.PartialChecksum()
    for offset, chunk in chunks:
        part.add(offset, from_bytes(chunk))
    assert part.value(len(data)) == reference(data)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_flipped_bit_shows(data: bytes, draw) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert cs.checksum(from_bytes(bytes(flipped))) != cs.checksum(from_bytes(data))


@given(st.binary(min_size=16, max_size=400), st.data())
def test_exchanged_words_show(data: bytes, draw) -> None:
    words = [data[i : i + 8] for i in range(0, len(data) // 8 * 8, 8)]
    i = draw.draw(st.integers(0, len(words) - 1))
    j = draw.draw(st.integers(0, len(words) - 1))
    before = cs.checksum(from_bytes(b"".join(words)))
    words[i], words[j] = words[j], words[i]
    same = words[i] == words[j]
    assert (cs.checksum(from_bytes(b"".join(words))) == before) is same


@pytest.mark.parametrize("chunk", [8, 64, 4096, 1 << 16])
def test_exchanged_chunks_of_like_values_show(chunk: int) -> None:
    tensor = (torch.randn(1 << 17, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16)
    data = tensor.view(torch.uint8).clone()
    before = cs.checksum(data)
    first = data[:chunk].clone()
    data[:chunk] = data[chunk : 2 * chunk]
    data[chunk : 2 * chunk] = first
    assert cs.checksum(data) != before


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=100), st.integers(1, 40))
def test_shifts_and_lengths_show(data: bytes, by: int) -> None:
    sums = {cs.checksum(from_bytes(d)) for d in (data, bytes(by) + data, data + bytes(by))}
    assert len(sums) == (3 if any(data) else 2)


def test_the_end_of_a_tensor_counts_even_if_it_is_zero() -> None:
    sums = {cs.checksum(torch.zeros(n, dtype=torch.uint8)) for n in range(64)}
    assert len(sums) == 64


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.int64],
)
def test_any_dtype_hashes_its_bytes(dtype: torch.dtype) -> None:
    tensor = (torch.randn(5, 7, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    assert cs.checksum(tensor) == reference(tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.case("B031")
def test_strides_do_not_count() -> None:
    base = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert cs.checksum(base.t()) == cs.checksum(base.t().contiguous())
    assert cs.checksum(base.t()) != cs.checksum(base)
    assert cs.checksum(torch.ones(1).expand(4, 3)) == cs.checksum(torch.ones(4, 3))
    assert cs.checksum(torch.empty(3, 0).t()) == cs.checksum(torch.empty(0, 3))
    column = torch.arange(60, dtype=torch.bfloat16).view(20, 3)[:, 1]
    assert cs.checksum(column) == cs.checksum(column.clone())


def test_a_large_strided_tensor_is_hashed_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(37, 101, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).t()
    whole = cs.checksum(tensor.contiguous())
    monkeypatch.setattr(cs, "_CHUNK_BYTES", 128)
    assert cs.checksum(tensor) == whole
    assert cs.checksum(tensor.contiguous()) == whole


@pytest.mark.parametrize("shift", range(8))
def test_unaligned_storage(shift: int) -> None:
    data = random_bytes(1000)
    assert cs.checksum(from_bytes(bytes(shift) + data)[shift:]) == reference(data)


def test_a_parameter_and_a_scalar() -> None:
    assert cs.checksum(torch.nn.Parameter(torch.ones(3))) == cs.checksum(torch.ones(3))
    assert cs.checksum(torch.tensor(1.5)) == cs.checksum(torch.tensor([1.5]))


def test_chunks_must_start_at_words() -> None:
    with pytest.raises(ValueError, match="starts at byte 4"):
        cs.PartialChecksum().add(4, from_bytes(b"abcd"))


@pytest.mark.parametrize("offset", [0, 8, 8 * 123457])
@pytest.mark.parametrize("nbytes", [0, 3, 8, 1003])
def test_device_arithmetic_is_the_same(offset: int, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cs, "_DEVICE_BLOCK_BYTES", 256)
    data = from_bytes(random_bytes(nbytes))
    assert cs._scan_torch(data, offset, None) == cs.scan(data, offset)


def test_many_at_once() -> None:
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in range(7)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert cs.checksums(tensors) == [cs.checksum(t) for t in tensors]
    finally:
        torch.set_num_threads(before)


def test_fold_depends_on_order_and_number() -> None:
    assert len({cs.fold(v) for v in ([], [0], [0, 0], [1, 2], [2, 1], [MASK])}) == 6
    assert cs.fold([5, 6]) == reference((5).to_bytes(8, "little") + (6).to_bytes(8, "little"))


@pytest.mark.case("B142")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 20000, 70000, -1])
def test_nonfinite_values_are_found(dtype: torch.dtype, value: float, at: int) -> None:
    tensor = torch.full((70001,), torch.finfo(dtype).max, dtype=dtype)
    tensor[1::2] = -torch.finfo(dtype).max
    data = tensor.view(torch.uint8)
    assert not cs.has_nonfinite(tensor)
    assert not cs.scan(data, 0, dtype).nonfinite
    tensor[at] = value
    assert cs.has_nonfinite(tensor)
    assert cs.scan(data, 0, dtype).nonfinite
    assert cs._scan_torch(data, 0, dtype).nonfinite
    assert cs.scan(data, 0, dtype).total == cs.scan(data).total


def test_what_has_no_nonfinite_values() -> None:
    assert not cs.has_nonfinite(torch.full((4,), 2**62))
    assert not cs.has_nonfinite(torch.empty(0))
    part = cs.PartialChecksum(torch.float32)
    part.add(8, torch.ones(2).view(torch.uint8))
    part.add(0, torch.tensor([1.0, math.nan]).view(torch.uint8))
    assert part.nonfinite


def test_many_small_tensors_hash_together_as_they_do_alone() -> None:
    shapes = [(4, 4)] * 200 + [(16,), (2, 3), (0, 8), (5,), (64, 64), (100, 100), (4, 4), ()]
    tensors = []
    for i, shape in enumerate(shapes):
        tensor = torch.randn(shape).to(torch.bfloat16 if i % 3 else torch.float32)
        tensors.append(torch.nn.Parameter(tensor.t() if len(shape) == 2 and i % 5 == 0 else tensor))
    assert cs.checksums(tensors) == [cs.checksum(tensor) for tensor in tensors]
    assert cs.checksums([]) == []
