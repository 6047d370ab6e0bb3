import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import ShmSegment
from weight_updater.shm import SharedSegment


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped(segment: SharedSegment) -> bool:
    with open("/proc/self/maps") as maps:
        return segment.descriptor.name in maps.read()


def exists(segment: SharedSegment) -> bool:
    return os.path.exists(f"/dev/shm/{segment.descriptor.name}")


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
    before = open_files()
    for _ in range(50):
        with SharedSegment.create(1 << 16, owner_lock=True) as ours, SharedSegment.open(ours.descriptor):
            pass
        assert not exists(ours)
        assert not mapped(ours)
    assert open_files() == before


def test_a_living_view_keeps_only_the_mapping() -> None:
    before = open_files()
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
    assert open_files() == before


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


@pytest.mark.parametrize("size", [99, 101])
def test_another_size_is_refused(size: int) -> None:
    before = open_files()
    with SharedSegment.create(100) as segment:
        error = refused(ShmSegment(segment.descriptor.name, size, "x"))
    assert f"is 100 bytes, not the {size} named" in error.message
    assert open_files() == before


def test_a_full_shared_memory_is_refused_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(UpdateRefused) as caught:
        SharedSegment.create(1 << 46)
    assert caught.value.reason is Reason.NO_MEMORY
    assert {name for name in os.listdir("/dev/shm") if name.startswith("rollsync-")} <= before


OWNER = """
import sys
from weight_updater.shm import SharedSegment
segment = SharedSegment.create(64, owner_lock=sys.argv[1] == "lock")
d = segment.descriptor
print(d.name, d.size, d.allocation_id, flush=True)
sys.stdin.read()
"""


def test_the_death_of_an_owner_shows() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, weight_updater.shm, weight_updater.names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
