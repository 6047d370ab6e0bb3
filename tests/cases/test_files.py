"""Files: what is missing, damaged, half-written or malicious is refused whole, and by name."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout_engine import messages as m
from rollout_engine.config import ServeConfig
from rollout_engine.engine_main import build
from rollout_engine.errors import ConfigError, EngineError
from tests.cases.common import NORM, Tensors, assert_serves, live, trained
from tests.desk import Desk
from tests.wire.trainer import PROMPT
from weight_updater.checksum import checksum
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import BeginUpdate, FromDisk, Staging
from weight_updater.requests import Path as Way
from weight_updater.safetensors_io import INDEX, SINGLE, save_weights


@pytest.fixture
def folder(tmp_path) -> Path:
    """A directory below the engine's root."""
    return tmp_path


def load(engine: Desk, directory: Path | str, **fields):
    """`rollsync reload`: begin, read and commit in one call."""
    return engine.update(
        FromDisk("", str(directory)), BeginUpdate(Way.DISK, directory=str(directory), **fields)
    )


def load_in_steps(engine: Desk, directory: Path, **fields):
    begun = engine.begin(BeginUpdate(Way.DISK, directory=str(directory), **fields))
    engine.update(FromDisk(begun.update_id, str(directory)))
    return engine.commit(begun.update_id)


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def for_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


LOST = {
    "a shard": lambda d: shards(d)[1].unlink(),
    "the last shard": lambda d: shards(d)[-1].unlink(),
    "all shards": lambda d: [shard.unlink() for shard in shards(d)],
    "the index": lambda d: (d / INDEX).unlink(),
    "a shard, for a directory": lambda d: for_a_directory(shards(d)[0]),
    "everything": lambda d: [file.unlink() for file in d.iterdir()],
}


@pytest.mark.case("B037")
@pytest.mark.parametrize("what", LOST)
@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
def test_what_is_missing_is_named_and_nothing_is_written(staging, what, engine, folder, weights):
    directory = folder / "shards"
    save_weights(str(directory), trained(weights).items(), max_shard_bytes=40_000)
    assert len(shards(directory)) > 3
    LOST[what](directory)
    before, tokens = live(engine), engine.generate(PROMPT).tokens()
    with pytest.raises(UpdateRefused) as refused:
        load(engine, directory, staging=staging)
    assert refused.value.reason is Reason.FILE_NOT_FOUND
    assert any(name in refused.value.message for name in (INDEX, "model-000"))
    assert live(engine) == before
    assert engine.generate(PROMPT).tokens() == tokens


@pytest.mark.case("B037")
@pytest.mark.case("B039")
@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
@pytest.mark.parametrize("size", [0, 7, 100, -60, -1, 4])
def test_a_shard_of_another_size_is_named_and_nothing_is_written(size, staging, engine, folder, weights):
    directory = folder / "cut"
    save_weights(str(directory), trained(weights).items(), max_shard_bytes=40_000)
    last = shards(directory)[-1]
    data = last.read_bytes()
    last.write_bytes(data + bytes(4) if size == 4 else data[:size])
    before = live(engine)
    with pytest.raises(UpdateRefused, match=last.name) as refused:
        load(engine, directory, staging=staging)
    assert refused.value.reason is Reason.FILE_CORRUPT
    assert live(engine) == before


@pytest.mark.case("B040")
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST, Staging.NONE])
@pytest.mark.parametrize("where", [0.0, 0.3, 0.7, 1.0])
def test_a_flipped_byte_is_refused_or_shown(where, staging, engine, folder, weights):
    new = trained(weights)
    for checksums in (True, False):
        directory = folder / f"flipped-{checksums}"
        save_weights(str(directory), new.items(), checksums=checksums)
        file = directory / SINGLE
        raw = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        raw[start + int(where * (len(raw) - start - 1)) // 4 * 4] ^= 1  # the lowest bit of a value
        file.write_bytes(raw)
    before = live(engine)
    with pytest.raises(UpdateRefused, match="checksum") as refused:
        load(engine, folder / "flipped-True", staging=staging)
    assert refused.value.reason is Reason.CHECKSUM_MISMATCH
    assert live(engine) == before
    reply = load(engine, folder / "flipped-False", staging=staging)
    assert not reply.verified
    assert reply.live_checksum != 0
    theirs, ours = engine.updater.checksums([]), {n: checksum(t) for n, t in new.items()}
    assert len([name for name in ours if theirs[name] != ours[name]]) == 1, "the trainer can see which"


@pytest.mark.case("B041")
def test_a_checkpoint_that_is_being_written_is_refused_until_it_is_there(engine, folder, tied_dir, weights):
    """A writer publishes its index last; one that writes the index first is found out by its files."""
    new, finished, writing = trained(weights), folder / "finished", folder / "writing"
    save_weights(str(finished), new.items(), max_shard_bytes=40_000)
    before = live(engine)
    for order in ([*shards(finished), finished / INDEX], [finished / INDEX, *shards(finished)]):
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
        for file in order:
            with pytest.raises(UpdateRefused) as refused:
                load(engine, writing)
            assert refused.value.reason is Reason.FILE_NOT_FOUND
            assert live(engine) == before
            half = file.read_bytes()[: file.stat().st_size // 2]
            (writing / file.name).write_bytes(half)
            with pytest.raises(UpdateRefused):
                load(engine, writing)
            shutil.copyfile(file, writing / file.name)
    assert load(engine, writing).verified
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B041")
def test_new_values_at_the_same_path_are_read(engine, folder, tied_dir, weights):
    for call in (load, load_in_steps, load):
        for max_shard_bytes in (5 << 30, 40_000):
            new = trained(weights)
            save_weights(str(folder / "same"), new.items(), max_shard_bytes=max_shard_bytes)
            call(engine, folder / "same")
            assert_serves(engine, tied_dir, new)


REFUSED_BESIDE_A_WRITER = (
    Reason.FILE_CORRUPT,
    Reason.FILE_NOT_FOUND,
    Reason.CHECKSUM_MISMATCH,
    Reason.MANIFEST_MISMATCH,  # other checksums than those of the begin
)


@pytest.mark.case("B041")
def test_a_writer_beside_readers_never_gives_a_mixture(engine, folder, weights):
    """Every load is refused, or gives the values of one save."""
    versions = [trained(weights) for _ in range(2)]
    save_weights(str(folder / "busy"), versions[0].items(), max_shard_bytes=40_000)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            save_weights(str(folder / "busy"), versions[number % 2].items(), max_shard_bytes=40_000)

    writer = threading.Thread(target=write)
    writer.start()
    outcomes = set()
    started = time.monotonic()

    def enough() -> bool:
        """A second; or, on a busy machine, until one was not written to while it was read."""
        passed = time.monotonic() - started
        return passed > 30.0 or (passed > 1.0 and bool(outcomes & {"0", "1"}))

    try:
        while not enough():
            try:
                load(engine, folder / "busy", staging=Staging.HOST)
            except UpdateRefused as refused:
                outcomes.add(refused.reason)
                continue
            target = engine.runner.target
            which = [all(torch.equal(target.slot(n), t) for n, t in one.items()) for one in versions]
            assert any(which), "a mixture of two saves is live"
            outcomes.add(str(which.index(True)))
    finally:
        stop.set()
        writer.join()
    assert outcomes & {"0", "1"}
    assert outcomes <= {"0", "1", *REFUSED_BESIDE_A_WRITER}


def spoil_header(directory: Path) -> None:
    (directory / SINGLE).write_bytes(b"\xff" * 100)


def spoil_values(directory: Path) -> None:
    raw = bytearray((directory / SINGLE).read_bytes())
    raw[-4] ^= 1
    (directory / SINGLE).write_bytes(raw)


BAD: dict[str, Callable[[Path], object]] = {
    "gone": shutil.rmtree,
    "a broken header": spoil_header,
    "flipped bytes": spoil_values,
    "another model": lambda d: save_weights(str(d), [("x", torch.ones(2))]),
    "not finite": lambda d: save_weights(str(d), [(NORM, torch.full((64,), float("nan")))]),
}


@pytest.mark.case("B043")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
def test_after_a_failed_reload_the_last_good_one_counts(staging, bad, engine, folder, tied_dir, weights):
    new = trained(weights)
    save_weights(str(folder / "good"), new.items())
    load(engine, folder / "good", staging=staging)
    save_weights(str(folder / "bad"), trained(weights).items())
    BAD[bad](folder / "bad")
    before = live(engine)
    for call in (load, load_in_steps):
        with pytest.raises(UpdateRefused):
            call(engine, folder / "bad", staging=staging, partial=bad == "not finite")
    state = engine.now
    assert (state.status, state.open_update_id) == ("serving", "") or engine.abort_update(
        state.open_update_id
    )
    assert live(engine) == before
    assert engine.call(m.GetInfo)["weights_path"] == str(folder / "good"), (
        "what `reload` without a path takes"
    )
    load(engine, engine.call(m.GetInfo)["weights_path"])
    assert_serves(engine, tied_dir, new)


class Exploit:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Every file that is opened below a test's folder."""
    names: list[str] = []
    really_open, really_os_open = open, os.open

    def watch(path, *rest, **more):
        names.append(str(path))
        return really_open(path, *rest, **more)

    def watch_os(path, *rest, **more):
        names.append(str(path))
        return really_os_open(path, *rest, **more)

    monkeypatch.setattr("builtins.open", watch)
    monkeypatch.setattr(os, "open", watch_os)
    return names


def pickled_files(directory: Path, marker: Path, tensors: Tensors) -> None:
    """What trainers of other frameworks leave beside weights."""
    directory.mkdir(exist_ok=True)
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name in names:
        torch.save(tensors, directory / name)
    index = {"weight_map": dict.fromkeys(tensors, names[0])}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for name in ("training_args.bin", "optimizer.pt", "pytorch_model.bin", "rng_state.pth", "scheduler.pt"):
        (directory / name).write_bytes(pickle.dumps(Exploit(marker)))


@pytest.mark.case("B045")
@pytest.mark.case("B046")
@pytest.mark.parametrize("max_shard_bytes", [5 << 30, 40_000])
def test_only_safetensors_are_opened(max_shard_bytes, engine, folder, tied_dir, weights, opened):
    new, directory, marker = trained(weights), folder / "mixed", folder / "marker"
    pickled_files(directory, marker, trained(weights))
    before = live(engine)
    with pytest.raises(UpdateRefused, match=f"neither {SINGLE} nor {INDEX}") as refused:
        load(engine, directory)
    assert refused.value.reason is Reason.FILE_NOT_FOUND
    assert live(engine) == before
    save_weights(str(directory), new.items(), max_shard_bytes=max_shard_bytes)
    save_file({"x": torch.ones(1)}, directory / "adapter_model.safetensors")
    opened.clear()
    load(engine, directory)
    assert_serves(engine, tied_dir, new)
    assert opened, "the test sees what is opened"
    wrong = [n for n in opened if n.endswith((".bin", ".pt", ".pth", "bin.index.json")) or "adapter" in n]
    assert wrong == []
    assert not marker.exists()


@pytest.mark.case("B046")
@pytest.mark.case("B050")
@pytest.mark.parametrize("what", ["single", "index", "shard"])
def test_a_pickle_under_the_name_of_weights_is_data(what, engine, folder, weights):
    directory, marker = folder / "evil", folder / "marker"
    save_weights(str(directory), trained(weights).items(), max_shard_bytes=170_000)
    name = {"single": SINGLE, "index": INDEX, "shard": shards(directory)[0].name}[what]
    if name == SINGLE:
        (directory / INDEX).unlink()
    (directory / name).write_bytes(pickle.dumps(Exploit(marker)))
    before = live(engine)
    with pytest.raises(UpdateRefused, match=name) as refused:
        load(engine, directory)
    assert refused.value.reason is Reason.FILE_CORRUPT
    assert live(engine) == before
    assert not marker.exists()


PATHS = [
    "/etc",
    "/etc/passwd",
    "/proc/self",
    "../../x",
    "{root}/../..",
    "{root}/out",
    "attacker/repo",
    "meta-llama/Llama-3.2-1B",
    "~",
    "~root",
    "file://{root}/in",
    "https://host.invalid/model",
    "s3://bucket/model",
    "",
    "/a\0b",
    "{root}/absent/../../..",
]


@pytest.mark.case("B048")
@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_the_callers_opens_nothing_and_asks_nobody(path, engine, weights, monkeypatch, opened):
    """One text for all of them, so that it does not tell what exists; and no name is looked up."""
    root = Path(engine.updater._manifests._roots[1])
    (root / "out").unlink(missing_ok=True)
    (root / "out").symlink_to("/etc")

    def no_network(*args, **kwargs):
        raise AssertionError("somebody used the network")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    before = live(engine)
    texts = set()
    opened.clear()
    for directory in (path.format(root=root), "/nowhere/at/all"):
        for call in (load, load_in_steps):
            with pytest.raises(UpdateRefused) as refused:
                call(engine, Path(directory) if directory else directory)  # type: ignore[arg-type]
            if directory:
                assert refused.value.reason is Reason.PATH_FORBIDDEN
                texts.add(refused.value.message)
            else:
                assert refused.value.reason in (Reason.PATH_FORBIDDEN, Reason.INVALID_UPDATE)
    assert len(texts) == 1
    assert [name for name in opened if "proc" not in name] == []
    assert live(engine) == before


@pytest.mark.case("B048")
@pytest.mark.parametrize(
    "model", ["attacker/repo", "meta-llama/Llama-3.2-1B", "/nowhere", "https://host.invalid/m"]
)
def test_a_model_that_is_no_directory_is_not_fetched(model, monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("somebody used the network")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    with pytest.raises((ConfigError, EngineError), match=r"config\.json cannot be read"):
        build(ServeConfig(model=Path(model), device="cpu"), None)  # type: ignore[arg-type]
