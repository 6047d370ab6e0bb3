import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.holdings import open_paths
from weight_updater import shm
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import ShmSegment
from weight_updater.shm import SharedSegment, sweep


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory for segments of this test alone. In /dev/shm other processes sweep, at any moment, what
    this test looks at.
    """
    monkeypatch.setattr(shm, "_DIRECTORY", str(tmp_path))
    return str(tmp_path)


def mapped(segment: SharedSegment) -> bool:
    with open("/proc/self/maps") as maps:
        return segment.descriptor.name in maps.read()


def exists(segment: SharedSegment) -> bool:
    return os.path.exists(f"{shm._DIRECTORY}/{segment.descriptor.name}")


def refused(descriptor: ShmSegment) -> UpdateRefused:
    with pytest.raises(UpdateRefused) as caught:
        SharedSegment.open(descriptor)
    assert caught.value.reason is Reason.MEMORY_UNAVAILABLE
    return caught.value


def test_bytes_are_shared_and_start_as_zero() -> None:
    with SharedSegment.create(5000) as ours:
        assert bytes(ours.buf) == bytes(5000)
        with SharedSegment.open(ours.descriptor) as theirs:
            theirs.buf[4999] = 7
            assert ours.buf[4999] == 7
        assert exists(ours), "an opener must not unlink"
    assert not exists(ours)


def test_the_file_is_private() -> None:
    with SharedSegment.create(10) as segment:
        assert os.stat(f"/dev/shm/{segment.descriptor.name}").st_mode & 0o777 == 0o600


def test_descriptors_mappings_and_names_are_given_back() -> None:
    before = open_paths()
    for _ in range(50):
        with SharedSegment.create(1 << 16, owner_lock=True) as ours, SharedSegment.open(ours.descriptor):
            pass
        assert not exists(ours)
        assert not mapped(ours)
    assert open_paths() == before


def test_a_living_view_keeps_only_the_mapping() -> None:
    gc.collect()  # of what tests before left
    before = open_paths()
    segment = SharedSegment.create(4096)
    view = np.frombuffer(segment.buf, dtype=np.uint8)
    segment.close()
    segment.close()
    segment.unlink()
    segment.unlink()
    assert view[0] == 0
    del view
    gc.collect()
    assert not mapped(segment)
    assert open_paths() == before


def test_allocation_ids_are_new() -> None:
    ids = set()
    for _ in range(20):
        with SharedSegment.create(1) as segment:
            ids.add(segment.descriptor.allocation_id)
    assert len(ids) == 20


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../etc/passwd",
        "rollsync-",
        "rollsync-../../etc/passwd",
        "psm_1234",
        "rollsync-" + "A" * 32,
        "rollsync-" + "a" * 32 + "\n",
        "rollsync-" + "a" * 31 + "\0",
        "rollsync-" + "a" * 32 + ".new",
        "rollsync-" + "a" * 32 + ".held.held",
        "/rollsync-" + "a" * 32,
    ],
)
def test_foreign_names_are_refused(name: str) -> None:
    assert "is not the name of a rollsync segment" in refused(ShmSegment(name, 1, "x")).message


def test_a_missing_segment_is_refused() -> None:
    assert "No such file" in refused(ShmSegment("rollsync-" + "0" * 32, 1, "x")).message


def test_a_symbolic_link_is_refused() -> None:
    name = "rollsync-" + os.urandom(16).hex()
    os.symlink("/etc/passwd", f"/dev/shm/{name}")
    try:
        refused(ShmSegment(name, os.path.getsize("/etc/passwd"), "x"))
    finally:
        os.unlink(f"/dev/shm/{name}")


def test_a_segment_of_another_user_is_refused_and_never_removed(
    alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_paths()
    with SharedSegment.create(100) as segment:
        left = f"{alone}/rollsync-{os.urandom(16).hex()}.held"  # nobody holds it
        Path(left).touch()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
                assert "does not belong to this user" in refused(segment.descriptor).message
                sweep()
            assert os.path.exists(left)
        finally:
            os.unlink(left)
    assert open_paths() == before


def test_what_is_no_file_is_refused() -> None:
    name = "rollsync-" + os.urandom(16).hex()
    os.mkfifo(f"/dev/shm/{name}")
    try:
        refused(ShmSegment(name, 1, "x"))
    finally:
        os.unlink(f"/dev/shm/{name}")


@pytest.mark.parametrize("size", [99, 101])
def test_another_size_is_refused(size: int) -> None:
    before = open_paths()
    with SharedSegment.create(100) as segment:
        error = refused(ShmSegment(segment.descriptor.name, size, "x"))
    assert f"is 100 bytes, not the {size} named" in error.message
    assert open_paths() == before


def test_a_full_shared_memory_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    word = os.urandom(16).hex()  # others come and go meanwhile
    monkeypatch.setattr("weight_updater.shm.secrets.token_hex", lambda num_bytes: word)
    with pytest.raises(UpdateRefused) as caught:
        SharedSegment.create(1 << 46)
    assert caught.value.reason is Reason.NO_MEMORY
    assert [name for name in os.listdir("/dev/shm") if word in name] == []


OWNER = """
import sys
from weight_updater import shm
shm._DIRECTORY = sys.argv[2]
segment = shm.SharedSegment.create(64, owner_lock=sys.argv[1] == "lock")
d = segment.descriptor
print(d.name, d.size, d.allocation_id, flush=True)
sys.stdin.read()
"""


def test_the_death_of_an_owner_shows(alone: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, "lock", alone], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    name, size, allocation = child.stdout.readline().split()
    try:
        with SharedSegment.open(ShmSegment(name, int(size), allocation)) as segment:
            assert segment.owner_alive()
            assert segment.owner_alive(), "asking must not take the lock"
            child.kill()
            child.wait()
            assert not segment.owner_alive()
            segment.unlink()
    finally:
        child.kill()
        child.communicate()


def test_an_owner_without_a_lock_counts_as_gone() -> None:
    with SharedSegment.create(8) as ours:
        assert not ours.owner_alive()


@contextlib.contextmanager
def owner(kind: str, directory: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A process that holds a segment, and the segment's path."""
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        yield child, f"{directory}/{child.stdout.readline().split()[0]}"
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("kind", ["", "lock"])
def test_what_a_killed_process_left_goes_with_the_next_segment_and_nothing_else_does(
    kind: str, alone: str
) -> None:
    with (
        owner(kind, alone) as (dead, left),
        owner(kind, alone) as (_, held),
        SharedSegment.create(8) as ours,
    ):
        with SharedSegment.open(ours.descriptor):
            pass  # a record lock would be gone after this
        dead.kill()
        dead.wait()
        assert os.path.exists(left)
        with SharedSegment.create(8):
            assert not os.path.exists(left)
        assert os.path.exists(held)
        assert exists(ours)
        sweep_elsewhere(alone)
        assert os.path.exists(held)
        assert exists(ours)


def sweep_elsewhere(directory: str) -> None:
    code = "import sys; from weight_updater import shm; shm._DIRECTORY = sys.argv[1]; shm.sweep()"
    subprocess.run([sys.executable, "-c", code, directory], check=True)


def test_a_sweep_drops_no_owner_lock_of_its_own_process() -> None:
    with SharedSegment.create(8, owner_lock=True) as ours, SharedSegment.create(8):
        ask = f"""if True:
            from weight_updater.requests import ShmSegment
            from weight_updater.shm import SharedSegment
            print(SharedSegment.open(ShmSegment({ours.descriptor.name!r}, 8, "x")).owner_alive())"""
        assert subprocess.run([sys.executable, "-c", ask], capture_output=True).stdout == b"True\n"


def test_a_fork_of_a_killed_creator_still_holds_its_segment(alone: str) -> None:
    code = OWNER.replace(
        "sys.stdin.read()", "import os, time\nif not os.fork(): time.sleep(30)\nsys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, "", alone],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    path = f"{alone}/{child.stdout.readline().split()[0]}"
    try:
        forks = f"/proc/{child.pid}/task/{child.pid}/children"
        while not Path(forks).read_text():
            time.sleep(0.01)
        child.kill()
        child.wait()
        sweep()
        assert os.path.exists(path)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while os.path.exists(path) and time.monotonic() < deadline:
        sweep()
        time.sleep(0.01)
    assert not os.path.exists(path)


def test_files_that_nobody_promised_to_lock_are_left_alone() -> None:
    name = "rollsync-" + os.urandom(16).hex()
    paths = [f"/dev/shm/{name}{ending}" for ending in ("", ".new", ".held.bak", ".old")]
    old = [f"/dev/shm/{'f' * 8}-{name}.held", f"/dev/shm/{name[:-1]}g.new"]
    for path in paths + old:
        with open(path, "xb"):
            pass
    for path in old:
        os.utime(path, (1, 1))
    try:
        sweep()
        assert all(map(os.path.exists, paths + old))
        os.utime(paths[1], (1, 1))  # its creator died before it could lock it
        sweep()
        assert not os.path.exists(paths[1])
    finally:
        for path in paths + old:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, weight_updater.shm, weight_updater.names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
