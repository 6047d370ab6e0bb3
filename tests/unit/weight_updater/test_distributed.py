import gc
import glob
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from weight_updater import from_distributed
from weight_updater.arena import DTYPE_NAMES
from weight_updater.buckets import plan_buckets
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.gloo import GlooGroup, Member, listen
from weight_updater.groups import GroupRegistry, SenderGroup
from weight_updater.requests import FromDistributed, InitGroup, Manifest, TensorSpec

LOOPBACK = "127.0.0.1"


class FakeSink:
    """Collects bytes; may do something first."""

    def __init__(self, manifest: Manifest, before: Callable[[], None] = lambda: None) -> None:
        self.manifest = manifest
        self.before = before
        self.tensors = [torch.zeros(tensor.nbytes, dtype=torch.uint8) for tensor in manifest.tensors]
        self.num_bytes = 0

    def write(self, tensor_index: int, byte_offset: int, data: torch.Tensor) -> None:
        self.before()
        self.tensors[tensor_index][byte_offset : byte_offset + data.numel()] = data
        self.num_bytes += data.numel()

    def write_whole(self, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor) -> None:
        for index, position in zip(indexes, positions, strict=True):
            self.write(index, 0, data[position : position + self.tensors[index].numel()])


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(tuple(TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()))


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of several dtypes in turn, one strided, one empty, one larger than the buckets of the tests."""
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(5, 3, generator=g),
        "b": torch.randn(40, 50, generator=g).to(torch.bfloat16),
        "empty": torch.empty(0, 7),
        "strided": torch.randn(8, 6, generator=g).t(),
        "c": torch.randn(3, generator=g).to(torch.float16),
        "d": torch.randn(1, generator=g).double(),
        "large": torch.randn(3000, generator=g),
    }


@pytest.fixture
def registry() -> Iterator[GroupRegistry]:
    with GroupRegistryScope() as found:
        yield found


class GroupRegistryScope:
    def __enter__(self) -> GroupRegistry:
        self.registry = GroupRegistry()
        return self.registry

    def __exit__(self, *exc_info: object) -> None:
        self.registry.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found


def free_port(address: str = LOOPBACK) -> int:
    with listen(address, 0) as probe:
        return int(probe.getsockname()[1])


def join(
    registry: GroupRegistry,
    pool: ThreadPoolExecutor,
    *,
    name: str = "g",
    address: str = LOOPBACK,
    timeout_s: float = 10.0,
) -> SenderGroup:
    port = free_port(address)
    joined = pool.submit(registry.init, InitGroup(name, address, port, 1, 2, timeout_s=timeout_s))
    sender = SenderGroup(name, address, port, 2, timeout_s)
    assert joined.result() == "gloo"
    return sender


def send(
    pool: ThreadPoolExecutor, sender: SenderGroup, tensors: dict[str, torch.Tensor], bucket_bytes: int = 0
) -> Future[None]:
    return pool.submit(sender.broadcast, manifest_of(tensors), list(tensors.values()), bucket_bytes)


def receive(
    registry: GroupRegistry, sink: FakeSink, *, name: str = "g", timeout_s: float = 0.0, bucket_bytes: int = 0
) -> None:
    from_distributed.receive(
        FromDistributed("u", name, timeout_s), sink.manifest, sink, registry, bucket_bytes=bucket_bytes
    )


def refused(call: Callable[[], object], *reasons: Reason) -> str:
    with pytest.raises(UpdateRefused) as caught:
        call()
    assert caught.value.reason in reasons, caught.value.message
    return caught.value.message


def assert_arrived(sink: FakeSink, tensors: Iterable[torch.Tensor]) -> None:
    for spec, data, tensor in zip(sink.manifest.tensors, sink.tensors, tensors, strict=True):
        assert data.equal(tensor.contiguous().view(-1).view(torch.uint8)), spec.name


def transfer(
    registry: GroupRegistry, pool: ThreadPoolExecutor, sender: SenderGroup, seed: int, bucket_bytes: int = 0
) -> None:
    sending = send(pool, sender, weights(seed), bucket_bytes)
    sink = FakeSink(manifest_of(weights()))
    receive(registry, sink, bucket_bytes=bucket_bytes)
    sending.result()
    assert_arrived(sink, weights(seed).values())


def children_of_this_process() -> list[int]:
    """The kernel lists them by the thread that started them."""
    return [
        int(child)
        for path in glob.glob("/proc/self/task/*/children")
        for child in Path(path).read_text().split()
    ]


def mapped_segments() -> list[str]:
    """Shared-memory segments that this process maps; a name that is gone ends with "(deleted)"."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "/dev/shm/rollsync-" in line]


def resources() -> tuple[int, int, int, int]:
    """Numbers of descriptors, child processes, mapped segments and threads of this process."""
    gc.collect()
    num_files = len(os.listdir("/proc/self/fd"))
    return num_files, len(children_of_this_process()), len(mapped_segments()), threading.active_count()


def eventually(is_true: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true()


@pytest.mark.case("B031")
@pytest.mark.case("B092")
def test_logical_values_arrive_in_any_bucket_size(registry, pool) -> None:
    with join(registry, pool) as sender:
        for seed, bucket_bytes in enumerate([0, 256, 1024, 5000, 1024]):
            transfer(registry, pool, sender, seed, bucket_bytes)
        assert all(line.endswith(" (deleted)") for line in mapped_segments())


def test_only_what_is_needed_reaches_the_sink(registry, pool) -> None:
    with join(registry, pool) as sender:
        tensors = weights()
        manifest = manifest_of(tensors)
        sending = send(pool, sender, tensors)
        sink = FakeSink(manifest)
        from_distributed.receive(FromDistributed("u", "g"), manifest, sink, registry, needed=[1, 3])
        sending.result()
        assert sink.num_bytes == tensors["b"].nbytes + tensors["strided"].nbytes


@pytest.mark.case("B025")
@pytest.mark.case("B092")
@pytest.mark.case("B093")
def test_a_disagreement_is_refused_on_both_sides_and_harms_nothing(registry, pool) -> None:
    a, b = torch.ones(2), torch.full((2,), 2.0)
    with join(registry, pool) as sender:
        for theirs, ours, bucket_bytes, texts in [
            ({"a": a, "b": b}, {"b": b, "a": a}, 512, ["digest"]),
            ({"a": a}, {"a": a.to(torch.bfloat16)}, 512, ["digest"]),
            ({"a": torch.ones(2, 3)}, {"a": torch.ones(3, 2)}, 512, ["digest"]),
            ({"a": a, "b": b}, {"a": a}, 512, ["num_tensors 2", "num_tensors 1"]),
            ({"a": a}, {"a": a}, 1024, ["bucket_bytes 512", "bucket_bytes 1024"]),
        ]:
            sending = send(pool, sender, theirs, 512)
            sink = FakeSink(manifest_of(ours))
            start = time.monotonic()
            call = lambda sink=sink, size=bucket_bytes: receive(registry, sink, bucket_bytes=size)  # noqa: E731
            here = refused(call, Reason.MANIFEST_MISMATCH)
            there = refused(sending.result, Reason.MANIFEST_MISMATCH)
            assert time.monotonic() - start < 1
            assert all(text in here and text in there for text in texts), here
            assert sink.num_bytes == 0
        transfer(registry, pool, sender, 3)


@pytest.mark.case("B025")
@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([torch.ones(2)], "b is missing"),
        ([torch.ones(2), torch.ones(3), torch.ones(1)], "more tensors came"),
        ([torch.ones(2), torch.ones(4)], r"the manifest says b, float32 \[3\]"),
        ([torch.ones(2), torch.ones(3).double()], "float64"),
    ],
)
def test_a_sender_whose_tensors_are_not_its_manifest_tells_both_sides(registry, pool, tensors, text) -> None:
    manifest = manifest_of({"a": torch.ones(2), "b": torch.ones(3)})
    with join(registry, pool) as sender:
        sending = pool.submit(sender.broadcast, manifest, tensors)
        start = time.monotonic()
        message = refused(lambda: receive(registry, FakeSink(manifest)), Reason.PEER_LOST)
        with pytest.raises(UpdateRefused, match=text):
            sending.result()
        assert time.monotonic() - start < 5
        assert "rank 0: " in message
        assert registry.names == []
        refused(lambda: sender.broadcast(manifest, []), Reason.GROUP_UNKNOWN)


@pytest.mark.case("B025")
def test_a_sender_that_sends_too_much_kills_the_child_and_no_more(registry, pool) -> None:
    """This sender keeps to the protocol until its broadcast, which is longer than it said."""
    manifest = manifest_of({"a": torch.ones(64)})
    with listen(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
        joined = pool.submit(registry.init, InitGroup("g", LOOPBACK, port, 1, 2, timeout_s=5.0))
        group = GlooGroup(Member("g", LOOPBACK, port, 0, 2, 5.0), listener)
        joined.result()
        receiving = pool.submit(receive, registry, FakeSink(manifest))
        group.agree(plan_buckets(manifest), 5.0)
        work = group.broadcast(torch.ones(4096, dtype=torch.uint8), 2.0)
        message = refused(receiving.result, Reason.PEER_LOST, Reason.TIMEOUT)
        assert "'g', rank 1 of world size 2" in message
        refused(lambda: (group.wait(work, 0, 2.0), group.finish(2.0)), Reason.PEER_LOST, Reason.TIMEOUT)
        group.close()
    with join(registry, pool) as sender:
        transfer(registry, pool, sender, 1)


@pytest.mark.case("B087")
def test_an_error_while_bytes_are_put_away_reaches_the_sender(registry, pool) -> None:
    tensors = {"a": torch.ones(1000), "b": torch.ones(1000)}

    def fail() -> None:
        if sink.num_bytes:
            raise UpdateRefused(Reason.TIMEOUT, "the lease ran out at bucket 1")

    sink = FakeSink(manifest_of(tensors), fail)
    with join(registry, pool) as sender:
        sending = send(pool, sender, tensors, 1024)
        start = time.monotonic()
        refused(lambda: receive(registry, sink, bucket_bytes=1024), Reason.TIMEOUT)
        assert "rank 1: the lease ran out at bucket 1" in refused(sending.result, Reason.PEER_LOST)
        assert time.monotonic() - start < 5
    with join(registry, pool) as sender:
        transfer(registry, pool, sender, 1)


def test_the_death_of_the_receiving_process_reaches_both_sides(registry, pool) -> None:
    tensors = {"a": torch.ones(5000)}

    def kill_child() -> None:
        for child in children_of_this_process():
            os.kill(child, signal.SIGKILL)

    with join(registry, pool) as sender:
        sending = send(pool, sender, tensors, 1024)
        sink = FakeSink(manifest_of(tensors), kill_child)
        start = time.monotonic()
        message = refused(lambda: receive(registry, sink, bucket_bytes=1024), Reason.PEER_LOST)
        refused(sending.result, Reason.PEER_LOST)
        assert time.monotonic() - start < 5
        assert "exit status -9" in message


def test_closing_the_sender_from_another_thread_ends_both_sides(registry, pool) -> None:
    tensors = {"a": torch.ones(5000)}
    hold = threading.Event()
    sender = join(registry, pool, timeout_s=20.0)
    sending = send(pool, sender, tensors, 1024)
    sink = FakeSink(manifest_of(tensors), lambda: hold.wait(1.0))
    receiving = pool.submit(receive, registry, sink, bucket_bytes=1024)
    time.sleep(0.3)
    start = time.monotonic()
    sender.close()
    refused(sending.result, Reason.PEER_LOST)
    assert time.monotonic() - start < 2
    hold.set()
    assert "the sender closed the group" in refused(receiving.result, Reason.PEER_LOST)
    sender.close()


def test_engines_that_receive_from_a_sender_that_never_sends(registry, pool) -> None:
    with join(registry, pool, timeout_s=20.0):
        start = time.monotonic()
        refused(lambda: receive(registry, FakeSink(manifest_of(weights())), timeout_s=1.0), Reason.TIMEOUT)
        assert time.monotonic() - start < 4
        assert "init it first" in refused(
            lambda: receive(registry, FakeSink(manifest_of(weights()))), Reason.GROUP_UNKNOWN
        )


SENDER = """
import sys, time, torch
from weight_updater.groups import SenderGroup
from weight_updater.requests import Manifest, TensorSpec

port = int(sys.argv[1])
manifest = Manifest(tuple(TensorSpec(f"t{i}", "float32", (256,)) for i in range(3)))

def tensors():
    # The third tensor is asked for when the second is on its way, so the first has gone.
    yield torch.zeros(256)
    yield torch.ones(256)
    print("stopped", flush=True)
    time.sleep(60)

with SenderGroup("g", "127.0.0.1", port, 2, 10.0) as group:
    print("joined", flush=True)
    group.broadcast(manifest, tensors(), 1024)
"""


@pytest.mark.case("B076")
@pytest.mark.case("B084")
@pytest.mark.parametrize("idle", [True, False])
def test_a_killed_sender_can_be_relaunched(registry, pool, idle: bool) -> None:
    manifest = Manifest(tuple(TensorSpec(f"t{i}", "float32", (256,)) for i in range(3)))
    port = free_port()
    joined = pool.submit(registry.init, InitGroup("g", LOOPBACK, port, 1, 2, timeout_s=10.0))
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert sender.stdout is not None
        assert sender.stdout.readline() == "joined\n"
        joined.result()
        if idle:
            sender.kill()
            sender.wait()  # and the next init replaces the group, whose trainer is dead
        else:
            sink = FakeSink(manifest)
            receiving = pool.submit(receive, registry, sink, bucket_bytes=1024)
            assert sender.stdout.readline() == "stopped\n"
            assert eventually(lambda: sink.num_bytes > 0)
            sender.kill()
            start = time.monotonic()
            refused(receiving.result, Reason.PEER_LOST)
            assert time.monotonic() - start < 3
            assert registry.names == []
    finally:
        sender.kill()
        sender.communicate()
    with join(registry, pool) as relaunched:
        transfer(registry, pool, relaunched, 1)


@pytest.mark.case("B076")
def test_groups_that_come_and_go_leave_nothing(registry, pool) -> None:
    before = None
    for fails in (False, True, False):
        with join(registry, pool) as sender:
            transfer(registry, pool, sender, 1)
            if fails:
                refused(
                    lambda: receive(registry, FakeSink(manifest_of(weights())), timeout_s=0.2), Reason.TIMEOUT
                )
        assert registry.destroy("g") is not fails
        before = before or resources()
    assert eventually(lambda: resources() == before), (resources(), before)


@pytest.mark.case("B077")
def test_names_exist_once_and_destroying_is_idempotent(registry, pool) -> None:
    assert not registry.destroy("g")
    with join(registry, pool):
        request = InitGroup("g", LOOPBACK, free_port(), 1, 2, timeout_s=2.0)
        refused(lambda: registry.init(request), Reason.GROUP_EXISTS)
        assert registry.names == ["g"]
        assert registry.destroy("g")
        assert not registry.destroy("g")
    with join(registry, pool) as sender:
        transfer(registry, pool, sender, 1)
        assert registry.destroy("g")


@pytest.mark.case("B079")
@pytest.mark.case("B082")
@pytest.mark.case("B083")
def test_a_rendezvous_without_a_trainer_ends_at_its_timeout(registry) -> None:
    before = resources()
    port = free_port()
    start = time.monotonic()
    message = refused(
        lambda: registry.init(InitGroup("grp", LOOPBACK, port, 3, 5, timeout_s=1.0)),
        Reason.TIMEOUT,
        Reason.PEER_LOST,
    )
    assert time.monotonic() - start < 8  # a process starts first
    assert "group 'grp', rank 3 of world size 5, rank 0 at 127.0.0.1:" in message
    assert str(port) in message
    assert registry.names == []
    assert resources() == before


@pytest.mark.case("B079")
def test_a_sender_alone_ends_at_its_timeout_and_frees_its_port() -> None:
    port = free_port()
    start = time.monotonic()
    message = refused(lambda: SenderGroup("g", LOOPBACK, port, 3, 0.5), Reason.TIMEOUT)
    assert time.monotonic() - start < 3
    assert "rank 1 did not come within 0.5 s" in message
    gc.collect()
    with listen(LOOPBACK, port):
        pass


@pytest.mark.case("B079")
@pytest.mark.case("B089")
def test_members_that_disagree_hear_of_it_at_once(registry, pool) -> None:
    port = free_port()
    joined = pool.submit(registry.init, InitGroup("a", LOOPBACK, port, 1, 2, timeout_s=20.0))
    start = time.monotonic()
    message = refused(lambda: SenderGroup("b", LOOPBACK, port, 2, 20.0), Reason.INVALID_UPDATE)
    assert "group is" in message
    assert "'b' at rank 0" in message
    assert "'a' at rank 1" in message
    refused(joined.result, Reason.INVALID_UPDATE, Reason.PEER_LOST)
    port = free_port()
    joins = [
        pool.submit(registry.init, InitGroup(name, LOOPBACK, port, 1, 3, timeout_s=20.0))
        for name in ("c", "d")
    ]
    refused(lambda: SenderGroup("c", LOOPBACK, port, 3, 20.0), Reason.INVALID_UPDATE)
    for joining in joins:
        refused(joining.result, Reason.INVALID_UPDATE, Reason.PEER_LOST)
    assert time.monotonic() - start < 15


@pytest.mark.case("B080")
@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_other_spellings_of_addresses(registry, pool, address: str) -> None:
    with join(registry, pool, address=address) as sender:
        transfer(registry, pool, sender, 1)


def test_several_engines_receive_alike(pool) -> None:
    with GroupRegistryScope() as first, GroupRegistryScope() as second:
        port = free_port()
        joins = [
            pool.submit(registry.init, InitGroup("g", LOOPBACK, port, rank, 3, timeout_s=10.0))
            for rank, registry in ((1, first), (2, second))
        ]
        with SenderGroup("g", LOOPBACK, port, 3, 10.0) as sender:
            for joining in joins:
                joining.result()
            sinks = [FakeSink(manifest_of(weights())) for _ in range(2)]
            receives = [
                pool.submit(receive, registry, sink, bucket_bytes=1024)
                for registry, sink in zip((first, second), sinks, strict=True)
            ]
            send(pool, sender, weights(7), 1024).result()
            for receiving, sink in zip(receives, sinks, strict=True):
                receiving.result()
                assert_arrived(sink, weights(7).values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_name": ""},
        {"master_address": ""},
        {"master_port": 0},
        {"master_port": 65536},
        {"world_size": 1},
        {"rank": 0},
        {"rank": 2},
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"backend": "mpi"},
    ],
)
def test_impossible_groups_are_refused(registry, wrong: dict) -> None:
    fields = {"group_name": "g", "master_address": LOOPBACK, "master_port": 1, "rank": 1, "world_size": 2}
    message = refused(lambda: registry.init(InitGroup(**(fields | wrong))), Reason.INVALID_UPDATE)
    assert next(iter(wrong)) in message


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refused(lambda: SenderGroup("g", LOOPBACK, port, 2, 1.0), Reason.INVALID_UPDATE)
