"""Directories that a file system lets nobody read, or that name one file in several ways."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from weight_updater.adapter_config import FILE, read_spec
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import AdapterSpec
from weight_updater.safetensors_io import INDEX, open_checkpoint, save_weights


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def refused(directory: Path, reason: Reason) -> str:
    before = num_descriptors()
    with pytest.raises(UpdateRefused) as caught:
        open_checkpoint(str(directory))
    assert caught.value.reason is reason
    assert num_descriptors() == before, "all that was opened is closed"
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


def test_a_directory_that_cannot_be_listed_has_no_checkpoint(tmp_path, monkeypatch) -> None:
    def denied(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, "denied", path)

    before = num_descriptors()
    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(UpdateRefused, match="holds neither") as caught:
        open_checkpoint(str(tmp_path))
    monkeypatch.undo()
    assert caught.value.reason is Reason.FILE_NOT_FOUND
    assert num_descriptors() == before
