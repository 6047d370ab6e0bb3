"""Directories that a file system lets nobody read, or that name one file in several ways."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from tests.holdings import open_paths
from weight_updater.adapter_config import FILE, read_spec
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.manifest import Columns
from weight_updater.requests import AdapterSpec, Manifest
from weight_updater.safetensors_header import Headers, StoredFile
from weight_updater.safetensors_io import INDEX, open_checkpoint, save_weights


def refused(directory: Path, reason: Reason) -> str:
    before = open_paths()
    with pytest.raises(UpdateRefused) as caught:
        open_checkpoint(str(directory))
    assert caught.value.reason is reason
    assert open_paths() == before, "all that was opened is closed"
    return caught.value.message


@pytest.mark.parametrize("alias", ["b.safetensors", "./a.safetensors", "sub/../a.safetensors"])
def test_an_index_that_names_one_file_twice_is_refused_and_leaves_nothing_open(tmp_path, alias) -> None:
    save_weights(str(tmp_path), [("x", torch.ones(1))])
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    (tmp_path / "sub").mkdir()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "z": alias}}))
    refused(tmp_path, Reason.PATH_FORBIDDEN if ".." in alias else Reason.FILE_CORRUPT)


@pytest.mark.parametrize("file", ["model.safetensors", INDEX])
def test_a_file_that_goes_stale_as_it_is_read_is_told_by_name(tmp_path, file, monkeypatch) -> None:
    """On a network file system: it was removed on another host."""
    shards = 1 << 30 if file != INDEX else 4
    save_weights(str(tmp_path), [("x", torch.ones(1)), ("y", torch.ones(1))], max_shard_bytes=shards)

    def stale(*arguments: object) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "pread", stale)
    text = refused(tmp_path, Reason.FILE_CORRUPT)
    assert file in text
    assert "it cannot be read: Stale file handle" in text
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(UpdateRefused, match="Stale file handle"):
        read_spec(str(tmp_path.resolve()), AdapterSpec("a"))


@pytest.mark.parametrize("swapped", ["sub", "."])
def test_a_directory_that_becomes_a_link_as_its_file_is_opened_is_not_followed(
    tmp_path, swapped, monkeypatch
) -> None:
    """Only the last part of a path was kept from being a link."""
    outside, inside = tmp_path / "outside", tmp_path / "checkpoint"
    for place in (outside, outside / "sub", inside / "sub"):
        save_weights(str(place), [("x", torch.ones(1))])
    (inside / INDEX).write_text(json.dumps({"weight_map": {"x": "sub/model.safetensors"}}))
    really_open = os.open

    def swap_first(path: str, *how: int) -> int:
        if path == str(inside / "sub" / "model.safetensors"):
            (inside if swapped == "." else inside / swapped).rename(tmp_path / "away")
            (inside if swapped == "." else inside / swapped).symlink_to(outside / swapped)
        return really_open(path, *how)

    monkeypatch.setattr(os, "open", swap_first)
    assert "became a link" in refused(inside, Reason.PATH_FORBIDDEN)


def test_two_that_read_headers_at_once_keep_them_apart(tmp_path) -> None:
    first, other, headers = tmp_path / "first", tmp_path / "other", Headers()
    for place, name in ((first, "a"), (other, "b")):
        save_weights(
            str(place), [(f"{name}0", torch.ones(1)), (f"{name}1", torch.ones(1))], max_shard_bytes=4
        )
    with open_checkpoint(str(other)) as checkpoint:
        theirs = checkpoint.stored

    class Meanwhile(Columns):
        """Compared with what was joined last; then another thread joins something else."""

        def __ne__(self, _: object) -> bool:
            raise AssertionError("tuples ask whether they are equal")

        def __eq__(self, _: object) -> bool:
            headers.joined(theirs)
            return True

        __hash__ = Columns.__hash__

    with open_checkpoint(str(first)) as checkpoint:
        headers.joined(checkpoint.stored)
        again = []
        for stored in checkpoint.stored:
            columns = stored.manifest.columns
            same = Meanwhile(columns.names, columns.dtypes, columns.shapes)
            again.append(
                StoredFile(Manifest.of(same, stored.manifest.checksums), stored.offsets, stored.file)
            )
        assert set(headers.joined(again).columns.names) == {"a0", "a1"}


def test_a_directory_that_cannot_be_listed_has_no_checkpoint(tmp_path, monkeypatch) -> None:
    def denied(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, "denied", path)

    before = open_paths()
    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(UpdateRefused, match="holds neither") as caught:
        open_checkpoint(str(tmp_path))
    monkeypatch.undo()
    assert caught.value.reason is Reason.FILE_NOT_FOUND
    assert open_paths() == before
