"""Tensors in memory as one packed stream: the same bytes and checksums as one by one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_updater import safetensors_io
from weight_updater.arena import DTYPE_NAMES
from weight_updater.arrival import Arrivals
from weight_updater.checksum import checksum
from weight_updater.manifest import Columns, Manifest, TensorSpec
from weight_updater.packing import PackedBytes
from weight_updater.safetensors_io import SINGLE, read_headers, save_weights
from weight_updater.small import SmallTensors, scan_rows

SHAPES = [(64,), (3,), (0, 2), (16, 8), (16, 8), (5, 5), (256,), (100, 90), (16, 8), (1,)]


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Small ones of equal and of odd sizes, a large one, an empty one."""
    g = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    return {
        f"t{i}.weight": torch.randn(shape, generator=g).to(dtypes[i % 3]) for i, shape in enumerate(SHAPES)
    }


def packed(named: dict[str, torch.Tensor]) -> PackedBytes:
    columns = Columns(
        named, [DTYPE_NAMES[t.dtype] for t in named.values()], [tuple(t.shape) for t in named.values()]
    )
    return PackedBytes(columns, [t.view(-1).view(torch.uint8).numpy() for t in named.values()])


def stream(named: dict[str, torch.Tensor]) -> bytes:
    offsets, size = packed(named).manifest(checksums=False).packed_offsets()
    whole = bytearray(size)
    for offset, tensor in zip(offsets, named.values(), strict=True):
        whole[offset : offset + tensor.nbytes] = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    return bytes(whole)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_part_of_the_stream_is_what_lies_there(draw: st.DataObject) -> None:
    named = tensors()
    whole = stream(named)
    start = draw.draw(st.integers(0, len(whole)))
    end = draw.draw(st.integers(start, len(whole)))
    part = np.full(end - start, 255, dtype=np.uint8)
    packed(named).read_into(part, start)
    assert part.tobytes() == whole[start:end]


def test_the_manifest_has_every_tensors_own_checksum() -> None:
    named = tensors()
    manifest = packed(named).manifest(checksums=True)
    assert list(manifest.checksums) == [checksum(tensor) for tensor in named.values()]
    assert manifest == Manifest(
        TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape), checksum(t)) for name, t in named.items()
    )
    named["t3.weight"][2, 1] += 1
    changed = packed(named).manifest(checksums=True).checksums
    assert [i for i, value in enumerate(changed) if value != manifest.checksums[i]] == [3]


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 5000])
def test_a_checkpoint_is_the_same_from_memory_and_from_tensors(
    tmp_path: Path, checksums: bool, max_shard_bytes: int
) -> None:
    for seed in (0, 1):
        for given_as, directory in ((tensors(seed).items(), "a"), (packed(tensors(seed)), "b")):
            save_weights(
                str(tmp_path / directory), given_as, checksums=checksums, max_shard_bytes=max_shard_bytes
            )
        a, b = (sorted((tmp_path / directory).glob("*.safetensors")) for directory in ("a", "b"))
        assert [file.read_bytes() for file in a] == [file.read_bytes() for file in b]
        assert len(a) == (1 if max_shard_bytes > 5000 else len(list((tmp_path / "a").glob("model-*"))))
        assert {spec.name for spec, _, _ in read_headers(str(tmp_path / "b"))} == tensors().keys()
    assert (tmp_path / "b" / SINGLE).exists() == (max_shard_bytes > 5000)


def test_small_tensors_are_copied_to_their_places() -> None:
    sizes = [8, 24, 8, 4096, 24, 16 << 10, 8]
    small = SmallTensors(sizes, [torch.float32] * len(sizes))
    indexes = np.array([6, 1, 0, 3, 5, 4])
    source = np.random.default_rng(0).integers(0, 255, 1 << 16, dtype=np.uint8)
    froms = np.array([40, 1, 9, 1000, 20000, 60000])  # anywhere
    tos = np.array([3, 100, 200, 300, 10000, 50000])
    into = np.zeros(1 << 16, dtype=np.uint8)
    small.copy(into, tos, source, froms, indexes)
    expected = np.zeros(1 << 16, dtype=np.uint8)
    for index, start, to in zip(indexes, froms, tos, strict=True):
        expected[to : to + sizes[index]] = source[start : start + sizes[index]]
    assert (into == expected).all()
    assert small.are_among(np.arange(7)).all()
    assert (
        not SmallTensors([8, 12, 0, 17 << 10], [None, torch.half, torch.half, torch.half])
        .are_among(np.arange(4))
        .any()
    )


def test_rows_are_scanned_wherever_they_lie() -> None:
    values = torch.randn(50)
    values[13] = math.inf
    data = np.concatenate([np.zeros(3, dtype=np.uint8), values.view(torch.uint8).numpy()])
    offsets = np.array([3 + 8 * k for k in (0, 6, 20, 5)])
    totals, nonfinite = scan_rows(data, offsets, 16, torch.float32)
    assert nonfinite.tolist() == [False, True, False, True]  # values 12 to 15, and 10 to 13
    assert totals.tolist() == [scan_rows(data[at : at + 16], np.array([0]), 16)[0].item() for at in offsets]


def test_what_arrived_is_counted_once() -> None:
    arrivals = Arrivals(np.array([16, 0, 32, 8, 8]))
    everything = range(5)
    assert arrivals.missing(everything) == [0, 2, 3, 4]
    assert arrivals.claim(2, 8, 16) is None
    assert arrivals.claim_whole(np.array([0, 2, 3])) == 2  # and none of them
    assert arrivals.missing(everything) == [0, 2, 3, 4]
    assert arrivals.claim_whole(np.array([3, 0, 3])) == 3
    assert arrivals.claim_whole(np.array([0, 1])) is None
    assert arrivals.claim_whole(np.array([3, 0])) == 0
    assert arrivals.claim(0, 8, 16) == (0, 16)
    assert arrivals.claim(2, 16, 32) is None
    assert arrivals.spans(2) == [(8, 32)]
    assert arrivals.claim(2, 0, 16) == (8, 32)
    assert arrivals.claim(2, 0, 8) is None
    assert arrivals.spans(2) == [(0, 32)]
    assert arrivals.missing(everything) == [3, 4]
    assert arrivals.missing([4, 3, 0]) == [4, 3]


def test_manifests_of_one_kind_share_what_does_not_change() -> None:
    first = Manifest([TensorSpec("a", "float32", (2,), 7), TensorSpec("b", "bfloat16", (3, 4))])
    second = first.with_checksums([1, None])
    assert second.columns is first.columns
    assert second.digest() == first.digest()
    assert second != first
    assert second == Manifest([TensorSpec("a", "float32", (2,), 1), TensorSpec("b", "bfloat16", (3, 4))])
    assert hash(second) == hash(Manifest(second.tensors))
    assert second.tensors == (second.tensor(0), second.tensor(1))
    assert second.tensor(0).checksum == 1
    assert (first.nbytes, first.packed_offsets(), len(first)) == (32, ([0, 256], 512), 2)
    for wrong in ([], [1], [1, 2, 3]):
        with pytest.raises(ValueError, match="checksums"):
            first.with_checksums(wrong)
    with pytest.raises(ValueError, match="as many names"):
        Columns(["a"], ["float32", "float32"], [(1,)])


@pytest.mark.parametrize("fails", ["hashing", "writing"])
def test_a_fault_while_bytes_are_written_and_hashed_leaves_the_old_checkpoint(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both go on at once: whichever fails, nothing of the new file stays."""
    save_weights(str(tmp_path), packed(tensors(1)))
    before = (tmp_path / SINGLE).read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no room")

    if fails == "hashing":
        monkeypatch.setattr(PackedBytes, "checksums", fail)
    else:
        monkeypatch.setattr(safetensors_io, "together", lambda arrays, _: map(fail, arrays))
    with pytest.raises(OSError, match="no room"):
        save_weights(str(tmp_path), packed(tensors(2)))
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert (tmp_path / SINGLE).read_bytes() == before


def test_the_header_that_comes_last_is_the_one_that_would_come_first(tmp_path: Path) -> None:
    named = tensors(3)
    save_weights(str(tmp_path / "packed"), packed(named))
    save_weights(str(tmp_path / "one by one"), named.items())
    assert (tmp_path / "packed" / SINGLE).read_bytes() == (tmp_path / "one by one" / SINGLE).read_bytes()
