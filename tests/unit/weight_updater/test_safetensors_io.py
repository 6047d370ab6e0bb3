import fcntl
import json
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.holdings import open_paths
from weight_updater.checksum import checksum
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.safetensors_header import CHECKSUMS_KEY, Headers
from weight_updater.safetensors_io import (
    INDEX,
    SINGLE,
    Checkpoint,
    open_checkpoint,
    read_headers,
    save_weights,
)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(3, 5, generator=g),
        "b.weight": torch.randn(7, generator=g).to(torch.bfloat16),
        "c.weight": torch.randn(4, 4, generator=g).to(torch.float16),
        "d.weight": torch.randn(2, 2, generator=g).double(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }


def load(directory: Path) -> dict[str, torch.Tensor]:
    """Read with the safetensors library, to hold our writer against it."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


def refused(directory: Path, reason: Reason) -> str:
    before = open_paths()
    with pytest.raises(UpdateRefused) as caught:
        read_headers(str(directory))
    assert caught.value.reason is reason, caught.value.message
    assert open_paths() == before
    return caught.value.message


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 64, 1])
def test_what_is_saved_is_what_the_library_loads(tmp_path: Path, max_shard_bytes: int) -> None:
    save_weights(str(tmp_path), weights().items(), max_shard_bytes=max_shard_bytes)
    found = load(tmp_path)
    assert found.keys() == weights().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights().items())
    assert (tmp_path / INDEX).exists() is (max_shard_bytes < 1 << 30)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 64])
def test_headers_tell_specs_checksums_and_places(tmp_path: Path, max_shard_bytes: int) -> None:
    save_weights(str(tmp_path), weights().items(), max_shard_bytes=max_shard_bytes)
    found = read_headers(str(tmp_path))
    assert {spec.name for spec, _, _ in found} == weights().keys()
    for spec, file, offset in found:
        tensor = weights()[spec.name]
        assert spec.shape == tuple(tensor.shape)
        assert f"torch.{spec.dtype}" == str(tensor.dtype)
        assert spec.checksum == checksum(tensor)
        raw = Path(file).read_bytes()[offset : offset + spec.nbytes]
        assert raw == tensor.view(-1).view(torch.uint8).numpy().tobytes()
        assert offset % 8 == 0 or spec.name == "b.weight" or spec.nbytes % 8


def test_whole_words_come_first_so_that_tensors_are_aligned(tmp_path: Path) -> None:
    save_weights(str(tmp_path), [("odd", torch.ones(3, dtype=torch.bfloat16)), ("even", torch.ones(8))])
    assert [(spec.name, offset % 256) for spec, _, offset in read_headers(str(tmp_path))] == [
        ("even", 0),
        ("odd", 32),
    ]


def test_a_file_of_the_library_loads_without_checksums(tmp_path: Path) -> None:
    safetensors.torch.save_file(weights(), tmp_path / SINGLE)
    assert {spec.name: spec.checksum for spec, _, _ in read_headers(str(tmp_path))} == dict.fromkeys(
        weights()
    )


def test_checksums_by_name_are_read_too(tmp_path: Path) -> None:
    """As an earlier writer kept them."""
    sums = {name: f"{checksum(tensor):016x}" for name, tensor in weights().items() if name != "b.weight"}
    safetensors.torch.save_file(weights(), tmp_path / SINGLE, {CHECKSUMS_KEY: json.dumps(sums)})
    found = {spec.name: spec.checksum for spec, _, _ in read_headers(str(tmp_path))}
    assert found == {name: checksum(tensor) for name, tensor in weights().items()} | {"b.weight": None}


def test_checksums_can_be_left_out(tmp_path: Path) -> None:
    save_weights(str(tmp_path), weights().items(), checksums=False)
    assert all(spec.checksum is None for spec, _, _ in read_headers(str(tmp_path)))


@pytest.mark.case("B031")
def test_strided_tensors_are_saved_by_value(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    save_weights(str(tmp_path), [("t", tensor)])
    assert torch.equal(load(tmp_path)["t"], torch.tensor([[0.0, 3], [1, 4], [2, 5]]))
    assert read_headers(str(tmp_path))[0][0].checksum == checksum(tensor)


@pytest.mark.case("B005")
def test_views_of_one_storage_are_saved_by_value(tmp_path: Path) -> None:
    base = torch.arange(8.0)
    save_weights(str(tmp_path), [("low", base[:4]), ("high", base[4:]), ("tied", base[:4])])
    found = load(tmp_path)
    assert found["low"].tolist() == found["tied"].tolist() == [0, 1, 2, 3]
    assert found["high"].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("first", [64, 1 << 30])
@pytest.mark.parametrize("second", [64, 1 << 30])
def test_saving_again_replaces_all_of_it(tmp_path: Path, first: int, second: int) -> None:
    save_weights(str(tmp_path), weights(0).items(), max_shard_bytes=first)
    (tmp_path / "config.json").write_text("{}")
    save_weights(str(tmp_path), weights(1).items(), max_shard_bytes=second)
    assert all(torch.equal(load(tmp_path)[name], tensor) for name, tensor in weights(1).items())
    assert {spec.checksum for spec, _, _ in read_headers(str(tmp_path))} == {
        checksum(tensor) for tensor in weights(1).values()
    }
    assert (tmp_path / "config.json").exists()
    kept = len(list(tmp_path.iterdir())) - 1
    save_weights(str(tmp_path), weights(1).items(), max_shard_bytes=second)
    assert len(list(tmp_path.iterdir())) - 1 == kept


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([], "no tensors"),
        ([("a", torch.ones(2)), ("a", torch.ones(2))], "a is to be saved twice"),
        ([("a", torch.ones(2, dtype=torch.int64))], "a is torch.int64"),
    ],
)
def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path, tensors: list, text: str) -> None:
    save_weights(str(tmp_path), weights().items())
    with pytest.raises(ValueError, match=text):
        save_weights(str(tmp_path), tensors, max_shard_bytes=1)
    assert [p.name for p in tmp_path.iterdir()] == [SINGLE]
    assert torch.equal(load(tmp_path)["a.weight"], weights()["a.weight"])


@pytest.mark.case("B037")
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    abandoned, young, held = (tmp_path / f".rollsync-{digit * 16}.tmp" for digit in "abc")
    for path in (abandoned, young, held):
        path.write_bytes(b"half of the weights")
    for path in (abandoned, held):
        os.utime(path, (time.time() - 3600,) * 2)
    with held.open("rb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        save_weights(str(tmp_path), [("a", torch.ones(2))])
    assert not abandoned.exists()
    assert held.exists(), "its writer lives"
    assert young.exists(), "its writer may be about to lock it"


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_shard_is_named(tmp_path: Path, which: int) -> None:
    save_weights(str(tmp_path), weights().items(), max_shard_bytes=64)
    gone = shards(tmp_path)[which]
    gone.unlink()
    assert gone.name in refused(tmp_path, Reason.FILE_NOT_FOUND)


@pytest.mark.case("B037")
def test_empty_directories_and_directories_named_like_files(tmp_path: Path) -> None:
    assert f"neither {SINGLE} nor {INDEX}" in refused(tmp_path, Reason.FILE_NOT_FOUND)
    assert "is not a directory" in refused(tmp_path / "absent", Reason.FILE_NOT_FOUND)
    assert "is not a directory" in refused(Path("a\0b"), Reason.FILE_NOT_FOUND)
    (tmp_path / SINGLE).mkdir()
    assert "is not a regular file" in refused(tmp_path, Reason.FILE_NOT_FOUND)
    assert f"neither {SINGLE}" in refused(tmp_path / SINGLE, Reason.FILE_NOT_FOUND)
    (tmp_path / SINGLE).rmdir()
    os.mkfifo(tmp_path / SINGLE)
    assert "is not a regular file" in refused(tmp_path, Reason.FILE_NOT_FOUND)
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).symlink_to(tmp_path / "nowhere")
    assert "does not exist" in refused(tmp_path, Reason.FILE_NOT_FOUND)


def with_digits(change: Callable[[bytes], bytes], after: bytes = b"") -> Callable[[bytes], bytes]:
    """Changes the checksums in a file; `after`: bytes to put behind them, so that the file stays as long."""
    known = re.compile(b'(?<="%s":")([0-9a-f]+)"' % CHECKSUMS_KEY.encode())
    return lambda data: known.sub(lambda found: change(found[1]) + b'"' + after, data)


def lfs_pointer(data: bytes) -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n"


@pytest.mark.case("B039")
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda d: d[:-1], "incomplete metadata"),
        (lambda d: d[: len(d) - 60], "incomplete metadata"),
        (lambda d: d + b"\0\0\0\0", "incomplete metadata"),
        (lambda d: d[:100], "invalid header length"),
        (lambda d: b"", "header too small"),
        (lambda d: d[:7], "header too small"),
        (lambda d: struct.pack("<Q", 1 << 40) + d[8:], "header too large"),
        (lfs_pointer, "header too large"),
        (lambda d: d[:8] + b"x" + d[9:], "invalid JSON"),
        (lambda d: d[:8] + b"\xff" + d[9:], "invalid JSON"),
        (lambda d: d.replace(b"[3,5]", b"[3,6]"), "invalid shape"),
        (lambda d: d.replace(b"[3,5]", b"[-35]"), "invalid shape"),
        (lambda d: d.replace(b"[3,5]", b"[3.5]"), "invalid shape"),
        (lambda d: d.replace(b"[3,5]", b"true "), "invalid shape"),
        (lambda d: d.replace(b'"c.weight"', b'"d.weight"'), "a key is there twice"),
        (lambda d: d.replace(b'"shape"', b'"shale"'), "lacks dtype, shape or data_offsets"),
        (lambda d: d.replace(b'"format":"pt"', b'"format":1   '), "not a map of strings"),
        (with_digits(lambda digits: b'{\\"a": ' + digits[8:]), "invalid JSON"),
        (with_digits(lambda digits: b"x" + digits[1:]), "is not hexadecimal"),
        (with_digits(lambda digits: b"  " + digits[2:]), "which are 16 each"),
        (with_digits(lambda digits: digits[16:], b" " * 16), "which are 16 each"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_damaged_files_are_named(tmp_path: Path, damage, text: str, sharded: bool) -> None:
    save_weights(str(tmp_path), weights().items(), max_shard_bytes=1 << 30)
    file = tmp_path / SINGLE
    if sharded:
        file = file.rename(tmp_path / "x.safetensors")
        weight_map = dict.fromkeys(weights(), "x.safetensors")
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    damaged = damage(file.read_bytes())
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    message = refused(tmp_path, Reason.FILE_CORRUPT)
    assert text in message
    assert file.name in message


def raw_file(entries: dict, data: bytes) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.case("B039")
@pytest.mark.parametrize(
    "offsets", [[(0, 8), (12, 20)], [(0, 8), (4, 12)], [(0, 8), (0, 8)], [(4, 12), (12, 20)]]
)
def test_holes_and_overlaps_are_refused(tmp_path: Path, offsets: list) -> None:
    entries = {
        f"t{i}": {"dtype": "F32", "shape": [2], "data_offsets": list(span)} for i, span in enumerate(offsets)
    }
    (tmp_path / SINGLE).write_bytes(raw_file(entries, bytes(max(end for _, end in offsets))))
    assert "invalid offset" in refused(tmp_path, Reason.FILE_CORRUPT)


def test_other_dtypes_are_refused_by_name(tmp_path: Path) -> None:
    safetensors.torch.save_file({"ids": torch.arange(3)}, tmp_path / SINGLE)
    assert "ids has dtype I64" in refused(tmp_path, Reason.INVALID_UPDATE)


@pytest.mark.case("B041")
def test_a_checkpoint_is_refused_until_its_index_is_there(tmp_path: Path) -> None:
    finished = tmp_path / "finished"
    save_weights(str(finished), weights().items(), max_shard_bytes=64)
    writing = tmp_path / "writing"
    writing.mkdir()
    for shard in shards(finished):
        message = refused(writing, Reason.FILE_NOT_FOUND)
        (writing / shard.name).write_bytes(shard.read_bytes())
        assert "neither" in message
    assert "is the writer still at work?" in refused(writing, Reason.FILE_NOT_FOUND)
    (writing / INDEX).write_bytes((finished / INDEX).read_bytes())
    assert len(read_headers(str(writing))) == len(weights())


@pytest.mark.case("B041")
def test_index_and_files_must_agree(tmp_path: Path) -> None:
    save_weights(str(tmp_path), weights().items(), max_shard_bytes=64)
    index = json.loads((tmp_path / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    less = {"weight_map": {n: f for n, f in index["weight_map"].items() if n != name}}
    # Its file is still named by others, or else not read at all.
    less["weight_map"]["extra"] = index["weight_map"][name]
    (tmp_path / INDEX).write_text(json.dumps(less))
    assert f"holds {name}" in refused(tmp_path, Reason.FILE_CORRUPT)
    index["weight_map"]["more"] = index["weight_map"][name]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert "lacks more" in refused(tmp_path, Reason.FILE_CORRUPT)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}', "[" * 100000],
)
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    assert INDEX in refused(tmp_path, Reason.FILE_CORRUPT)


@pytest.mark.case("B047")
@pytest.mark.parametrize(
    "file",
    [
        "../b/m.safetensors",
        "/etc/passwd",
        "a/../../m.safetensors",
        "link.safetensors",
        "linked/m.safetensors",
        "m\0.safetensors",
        "",
        "sub/",
        "..",
        "~/../m.safetensors",
    ],
)
def test_an_index_cannot_leave_its_directory(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "b"
    save_weights(str(outside), [("a", torch.ones(1))])
    (outside / SINGLE).rename(outside / "m.safetensors")
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    (inside / "link.safetensors").symlink_to(outside / "m.safetensors")
    (inside / "linked").symlink_to(outside)
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    opened: list[str] = []
    really_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(path), really_open(path, *rest))[1])
    refused(inside, Reason.PATH_FORBIDDEN)
    assert opened == [str(inside / INDEX)]


@pytest.mark.case("B047")
def test_nested_files_and_trusted_links_load(tmp_path: Path) -> None:
    elsewhere = tmp_path / "blobs"
    save_weights(str(elsewhere), [("b", torch.ones(1))])
    inside = tmp_path / "checkpoint"
    save_weights(str(inside / "sub"), [("a", torch.ones(1))])
    (inside / "link.safetensors").symlink_to(elsewhere / SINGLE)
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": f"sub/{SINGLE}", "b": "link.safetensors"}}))
    found = read_headers(str(inside), roots=[str(elsewhere)])
    assert {spec.name for spec, _, _ in found} == {"a", "b"}
    refused(inside, Reason.PATH_FORBIDDEN)
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": f"sub/{SINGLE}"}}))
    assert len(read_headers(str(inside))) == 1


def test_a_linked_index_or_single_file_outside_is_refused(tmp_path: Path) -> None:
    save_weights(str(tmp_path / "other"), [("a", torch.ones(1))])
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    (inside / SINGLE).symlink_to(tmp_path / "other" / SINGLE)
    refused(inside, Reason.PATH_FORBIDDEN)


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 200])
def test_a_header_is_parsed_again_if_its_bytes_are_others(tmp_path: Path, max_shard_bytes: int) -> None:
    headers = Headers()

    def read() -> Checkpoint:
        with open_checkpoint(str(tmp_path), headers=headers) as checkpoint:
            return checkpoint

    columns = []
    for seed in (0, 1):
        save_weights(str(tmp_path), weights(seed).items(), max_shard_bytes=max_shard_bytes)
        first, again = read(), read()
        assert all(a is b for a, b in zip(first.stored, again.stored, strict=True))
        assert [spec.checksum for spec in again.manifest.tensors] == [
            checksum(weights(seed)[name]) for name in again.manifest.columns.names
        ]
        columns.append(again.manifest.columns)
    assert columns[0] is columns[1]  # what is the same is not worked out again
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(with_digits(lambda digits: b"  " + digits[2:])(file.read_bytes()))
    with pytest.raises(UpdateRefused, match="which are 16 each"):
        read()
    save_weights(str(tmp_path), weights(2).items(), max_shard_bytes=max_shard_bytes)
    assert read().manifest.checksums[0] == checksum(weights(2)[read().manifest.columns.names[0]])
    if max_shard_bytes > 200:  # another size of the same file: the header alone does not say that
        os.truncate(tmp_path / SINGLE, os.path.getsize(tmp_path / SINGLE) - 2)
        with pytest.raises(UpdateRefused, match="incomplete metadata"):
            read()
