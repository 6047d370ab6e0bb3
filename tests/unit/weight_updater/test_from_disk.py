import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.holdings import open_paths
from weight_updater import from_disk
from weight_updater.arena import Arena, SlotSpec, StorageSpec, WeightTarget
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import FromDisk, Manifest
from weight_updater.safetensors_io import SINGLE, save_weights


class FakeSink:
    """Collects bytes; refuses to take one twice."""

    def __init__(self, manifest: Manifest) -> None:
        self.tensors = [torch.zeros(tensor.nbytes, dtype=torch.uint8) for tensor in manifest.tensors]
        self.spans: set[tuple[int, int, int]] = set()
        self.lock = threading.Lock()

    def write(self, tensor_index: int, byte_offset: int, data: torch.Tensor) -> None:
        span = (tensor_index, byte_offset, data.numel())
        with self.lock:
            assert span not in self.spans
            self.spans.add(span)
        self.tensors[tensor_index][byte_offset : byte_offset + data.numel()] = data

    def write_whole(self, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor) -> None:
        for index, position in zip(indexes, positions, strict=True):
            self.write(index, 0, data[position : position + self.tensors[index].numel()])


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(16, 8, generator=g),
        "q.weight": torch.randn(8, 8, generator=g).to(torch.bfloat16),
        "k.weight": torch.randn(3, generator=g).to(torch.bfloat16),
        "none": torch.empty(0),
    }


def receive(directory: Path, manifest: Manifest, **options) -> FakeSink:
    sink = FakeSink(manifest)
    from_disk.receive(FromDisk("u", str(directory)), manifest, sink, **options)
    return sink


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 200])
def test_every_byte_comes_once(
    tmp_path: Path, num_threads: int, max_shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_disk, "CHUNK_BYTES", 64)
    save_weights(str(tmp_path), weights().items(), max_shard_bytes=max_shard_bytes)
    before, threads = open_paths(), threading.active_count()
    manifest = from_disk.read_manifest(str(tmp_path))
    sink = receive(tmp_path, manifest, num_threads=num_threads)
    for spec, data in zip(manifest.tensors, sink.tensors, strict=True):
        assert data.equal(weights()[spec.name].view(-1).view(torch.uint8)), spec.name
    assert sum(size for _, _, size in sink.spans) == manifest.nbytes
    assert open_paths() == before
    assert threading.active_count() == threads


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    save_weights(str(tmp_path), weights().items())
    manifest = from_disk.read_manifest(str(tmp_path))
    at = [spec.name for spec in manifest.tensors].index("q.weight")
    sink = receive(tmp_path, manifest, needed=[at])
    assert {index for index, _, _ in sink.spans} == {at}


@pytest.mark.case("B041")
def test_new_values_at_the_same_place_are_read(tmp_path: Path) -> None:
    for seed in range(3):
        save_weights(str(tmp_path), weights(seed).items(), max_shard_bytes=200)
        manifest = from_disk.read_manifest(str(tmp_path))
        sink = receive(tmp_path, manifest)
        at = [spec.name for spec in manifest.tensors].index("embed.weight")
        assert sink.tensors[at].view(torch.float32).equal(weights(seed)["embed.weight"].view(-1))


@pytest.mark.case("B041")
def test_a_checkpoint_that_changed_since_the_beginning_is_refused(tmp_path: Path) -> None:
    save_weights(str(tmp_path), weights(0).items())
    manifest = from_disk.read_manifest(str(tmp_path))
    save_weights(str(tmp_path), weights(1).items())
    with pytest.raises(UpdateRefused, match=r"changed since the update began.*embed\.weight") as caught:
        receive(tmp_path, manifest)
    assert caught.value.reason is Reason.FILE_CORRUPT


class MeddlingSink(FakeSink):
    """Does something to the file after the first piece."""

    def __init__(self, manifest: Manifest, meddle) -> None:
        super().__init__(manifest)
        self.meddle = meddle

    def write(self, tensor_index: int, byte_offset: int, data: torch.Tensor) -> None:
        super().write(tensor_index, byte_offset, data)
        with self.lock:
            meddle, self.meddle = self.meddle, lambda: None
        meddle()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def overwrite(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\x01")
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


def replace(file: Path) -> None:
    save_weights(str(file.parent), weights(1).items())


@pytest.mark.case("B041")
@pytest.mark.parametrize("meddle", [truncate, overwrite, replace, Path.unlink])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, meddle) -> None:
    save_weights(str(tmp_path), weights().items())
    before = open_paths()
    manifest = from_disk.read_manifest(str(tmp_path))
    sink = MeddlingSink(manifest, lambda: meddle(tmp_path / SINGLE))
    with pytest.raises(UpdateRefused, match=SINGLE) as caught:
        from_disk.receive(FromDisk("u", str(tmp_path)), manifest, sink, num_threads=1)
    assert caught.value.reason is Reason.FILE_CORRUPT
    assert open_paths() == before


def test_an_error_of_the_sink_stops_all_readers(tmp_path: Path) -> None:
    save_weights(str(tmp_path), weights().items())
    manifest = from_disk.read_manifest(str(tmp_path))

    def refuse() -> None:
        raise UpdateRefused(Reason.TIMEOUT, "the lease ran out")

    before = open_paths()
    with pytest.raises(UpdateRefused, match="the lease ran out"):
        from_disk.receive(
            FromDisk("u", str(tmp_path)), manifest, MeddlingSink(manifest, refuse), num_threads=2
        )
    assert open_paths() == before


@pytest.mark.case("B048")
@pytest.mark.parametrize(
    "directory", ["/etc", "../../x", "attacker/repo", "~", "file://x", "", "/a\0b", "/absent"]
)
def test_directories_outside_of_the_roots_are_refused_alike(tmp_path: Path, directory: str) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(UpdateRefused) as caught:
        from_disk.allowed_directory(directory, [str(tmp_path / "root")])
    with pytest.raises(UpdateRefused) as other:
        from_disk.allowed_directory(str(tmp_path), [str(tmp_path / "root")])
    assert caught.value.reason is Reason.PATH_FORBIDDEN
    assert caught.value.message == other.value.message


def test_directories_under_a_root_are_allowed_where_they_really_are(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "step").mkdir(parents=True)
    (root / "out").symlink_to(tmp_path)
    (root / "in").symlink_to(root / "step")
    assert from_disk.allowed_directory(str(root / "in"), ["/nowhere", str(root)]) == str(root / "step")
    assert from_disk.allowed_directory(str(root), [str(root)]) == str(root)
    for bad in (root / "out", root / ".." / "root2", tmp_path / "root2"):
        with pytest.raises(UpdateRefused):
            from_disk.allowed_directory(str(bad), [str(root)])


def tied_target() -> WeightTarget:
    arena = Arena(
        [
            StorageSpec("embed", torch.float32, (16, 8), (SlotSpec("embed.weight", (16, 8)),)),
            StorageSpec(
                "qk",
                torch.bfloat16,
                (12, 8),
                (SlotSpec("q.weight", (8, 8)), SlotSpec("k.weight", (4, 8))),
            ),
        ],
        aliases={"head.weight": "embed.weight"},
    )
    parameters = {
        key: torch.nn.Parameter(torch.empty(storage.shape, dtype=storage.dtype))
        for key, storage in arena.storages.items()
    }
    return WeightTarget(arena, parameters, torch.device("cpu"), is_buffer=lambda name: "inv_freq" in name)


def tied_weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    return {
        "embed.weight": torch.randn(16, 8, generator=g),
        "q.weight": torch.randn(8, 8, generator=g),
        "k.weight": torch.randn(4, 8, generator=g).to(torch.bfloat16),
    }


@pytest.mark.case("B001")
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("extra", [{}, {"rotary.inv_freq": torch.ones(4)}])
def test_the_first_load_of_a_tied_checkpoint(tmp_path: Path, ours: bool, extra: dict) -> None:
    tensors = tied_weights() | extra
    if ours:
        save_weights(str(tmp_path), tensors.items(), max_shard_bytes=300)
    else:
        safetensors.torch.save_file(tensors, tmp_path / SINGLE)
    target = tied_target()
    before = target.addresses()
    from_disk.load_directory(target, str(tmp_path))
    for name, tensor in tied_weights().items():
        assert target.slot(name).equal(tensor.to(target.slot(name).dtype)), name
    assert target.slot("head.weight").data_ptr() == target.slot("embed.weight").data_ptr()
    assert target.addresses() == before


@pytest.mark.case("B002")
@pytest.mark.parametrize("ours", [True, False])
def test_both_tied_names_must_agree(tmp_path: Path, ours: bool) -> None:
    def save(tensors: dict[str, torch.Tensor]) -> None:
        if ours:
            save_weights(str(tmp_path), tensors.items())
        else:
            safetensors.torch.save_file(tensors, tmp_path / SINGLE)

    tensors = tied_weights()
    save(tensors | {"head.weight": tensors["embed.weight"].clone()})
    from_disk.load_directory(tied_target(), str(tmp_path))
    save(tensors | {"head.weight": tensors["embed.weight"] + 1})
    with pytest.raises(UpdateRefused, match=r"head\.weight and embed\.weight are tied"):
        from_disk.load_directory(tied_target(), str(tmp_path))


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    tensors = tied_weights()
    del tensors["k.weight"]
    save_weights(str(tmp_path), tensors.items())
    with pytest.raises(UpdateRefused, match=r"lacks 1 .*k\.weight") as caught:
        from_disk.load_directory(tied_target(), str(tmp_path))
    assert caught.value.reason is Reason.MANIFEST_MISMATCH
    save_weights(str(tmp_path), (tied_weights() | {"v.weight": torch.ones(2)}).items())
    with pytest.raises(UpdateRefused, match=r"v\.weight"):
        from_disk.load_directory(tied_target(), str(tmp_path))


@pytest.mark.case("B040")
def test_a_flipped_byte_is_found_by_our_checksums(tmp_path: Path) -> None:
    save_weights(str(tmp_path), tied_weights().items())
    raw = bytearray((tmp_path / SINGLE).read_bytes())
    raw[-3] ^= 1
    (tmp_path / SINGLE).write_bytes(raw)
    with pytest.raises(UpdateRefused, match="the file is damaged") as caught:
        from_disk.load_directory(tied_target(), str(tmp_path))
    assert caught.value.reason is Reason.CHECKSUM_MISMATCH


def test_a_hugging_face_cache_of_links_loads(tmp_path: Path) -> None:
    save_weights(str(tmp_path / "blobs"), tied_weights().items())
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / SINGLE).symlink_to(f"../../blobs/{SINGLE}")
    from_disk.load_directory(tied_target(), str(snapshot))
