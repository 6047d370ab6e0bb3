"""NCCL between two GPUs: a trainer on one, the weights of an engine on the other."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from tests.gpu.test_host_paths import LARGE, large_target
from tests.unit.weight_updater.tiny_target import SHAPES, TinyTarget, make_updater, manifest_of, weights
from weight_updater.arena import WeightTarget
from weight_updater.buckets import plan_buckets
from weight_updater.checksum import checksum
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.groups import SenderGroup
from weight_updater.meeting import listen
from weight_updater.requests import BeginUpdate, FromDistributed, InitGroup, Path, Staging, UpdateReply
from weight_updater.updater import WeightUpdater

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]

ENGINE, TRAINER = torch.device("cuda:0"), torch.device("cuda:1")
BACKEND = "nccl"
LOOPBACK = "127.0.0.1"
Tensors = dict[str, torch.Tensor]


@contextmanager
def joined(updater: WeightUpdater, timeout_s: float = 30.0) -> Iterator[SenderGroup]:
    """A group of the trainer's GPU and the engine's."""
    with listen(LOOPBACK, 0) as probe:
        port = int(probe.getsockname()[1])
    with ThreadPoolExecutor(1) as pool:
        request = InitGroup("g", LOOPBACK, port, 1, 2, timeout_s=timeout_s)
        joining = pool.submit(updater.groups.init, request)
        sender = SenderGroup("g", LOOPBACK, port, 2, timeout_s, backend=BACKEND, device=TRAINER)
        assert joining.result() == BACKEND
    try:
        yield sender
    finally:
        sender.close()
        updater.groups.destroy("g")


@contextmanager
def updater_of(target: WeightTarget) -> Iterator[WeightUpdater]:
    updater = make_updater(target, device_staging=True)
    try:
        yield updater
    finally:
        updater.close()


def push(
    updater: WeightUpdater, sender: SenderGroup, new: Tensors, staging: Staging, bucket_bytes: int
) -> UpdateReply:
    """The life of an update; the trainer's half runs in a thread, as it does in its own process."""
    on_trainer = [value.to(TRAINER) for value in new.values()]
    torch.cuda.synchronize(TRAINER)
    manifest = manifest_of(new)
    with ThreadPoolExecutor(1) as pool:
        update_id = begin(updater, new, staging, bucket_bytes)
        sending = pool.submit(sender.broadcast, manifest, on_trainer, bucket_bytes)
        run(updater, update_id)
        sending.result()
    updater.verify(update_id)
    return updater.commit(update_id)


def begin(updater: WeightUpdater, new: Tensors, staging: Staging, bucket_bytes: int) -> str:
    request = BeginUpdate(
        Path.DISTRIBUTED, manifest=manifest_of(new), staging=staging, bucket_bytes=bucket_bytes
    )
    return updater.begin(request, updater.resolve(request), paused=False).update_id


def run(updater: WeightUpdater, update_id: str, timeout_s: float = 0.0) -> None:
    receive = updater.receiver(FromDistributed(update_id, "g", timeout_s))
    error: Exception | None = None
    try:
        receive.run()
    except UpdateError as caught:
        error = caught
    updater.received(receive, error)


@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST, Staging.NONE])
@pytest.mark.parametrize("bucket_bytes", [256, 1 << 20])
def test_the_same_bytes_are_live_and_proven(staging, bucket_bytes):
    target = TinyTarget(device=ENGINE)
    with updater_of(target) as updater, joined(updater) as sender:
        for seed in (1, 2, 3):
            new = weights(seed)
            reply = push(updater, sender, new, staging, bucket_bytes)
            assert reply.verified
            for name in SHAPES:
                assert torch.equal(target.slot(name).cpu(), new[name])
            assert updater.checksums([]) == {name: checksum(value) for name, value in new.items()}


@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.NONE])
def test_values_are_cast_to_the_slots_dtype(staging):
    target, new = TinyTarget(device=ENGINE), weights(4, torch.float32)
    with updater_of(target) as updater, joined(updater) as sender:
        push(updater, sender, new, staging, 512)
    for name in SHAPES:
        slot = target.slot(name)
        assert torch.equal(slot.cpu(), new[name].to(slot.dtype))


@pytest.mark.parametrize("in_order", [True, False])
def test_large_buckets_straight_into_the_arena_and_through_buffers(in_order):
    target = large_target()
    generator = torch.Generator().manual_seed(5)
    names = list(LARGE) if in_order else list(reversed(LARGE))
    new = {name: torch.randn(LARGE[name], generator=generator).bfloat16() for name in names}
    with updater_of(target) as updater, joined(updater) as sender:
        for _ in range(2):
            target.buffer.zero_()
            torch.cuda.synchronize(ENGINE)
            push(updater, sender, new, Staging.NONE, 64 << 20)
            for name, value in new.items():
                assert torch.equal(target.slot(name).cpu(), value)


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


@pytest.mark.case("B085")
def test_a_collective_that_waits_for_nobody_is_aborted_at_its_deadline_and_the_device_goes_on():
    target, new = TinyTarget(device=ENGINE), weights(6)
    with updater_of(target) as updater:
        with joined(updater) as sender:
            update_id = begin(updater, new, Staging.DEVICE, 256)
            plan = plan_buckets(manifest_of(new), 256)
            agreeing = in_thread(lambda: sender._group.agree(plan, 10.0))  # and then it sends nothing
            started = time.monotonic()
            with pytest.raises(UpdateRefused) as refused:
                run(updater, update_id, timeout_s=2.0)
            agreeing.join()
            assert refused.value.reason is Reason.TIMEOUT
            assert 1.5 < time.monotonic() - started < 10.0
            assert updater.groups.names == []
            started = time.monotonic()
            torch.cuda.synchronize(ENGINE)
            assert time.monotonic() - started < 5.0
        with joined(updater) as sender:
            push(updater, sender, new, Staging.DEVICE, 256)
        for name in SHAPES:
            assert torch.equal(target.slot(name).cpu(), new[name])


def test_an_abort_ends_a_receive_under_way():
    target, new = TinyTarget(device=ENGINE), weights(7)
    before = {name: value.cpu() for name, value in target.values().items()}
    with updater_of(target) as updater, joined(updater) as sender:
        update_id = begin(updater, new, Staging.DEVICE, 256)
        plan = plan_buckets(manifest_of(new), 256)
        agreeing = in_thread(lambda: sender._group.agree(plan, 10.0))
        receive = updater.receiver(FromDistributed(update_id, "g", 20.0))
        caught: list[Exception] = []

        def work() -> None:
            try:
                receive.run()
            except UpdateError as error:
                caught.append(error)

        receiving = in_thread(work)
        agreeing.join()
        time.sleep(0.5)
        started = time.monotonic()
        assert updater.abort(update_id) == (True, False)
        receiving.join(10.0)
        assert time.monotonic() - started < 8.0
        assert caught
        torch.cuda.synchronize(ENGINE)
    for name in SHAPES:
        assert torch.equal(target.slot(name).cpu(), before[name])


SENDER = """
import sys, time, torch
from tests.unit.weight_updater.tiny_target import manifest_of, weights
from weight_updater.groups import SenderGroup

port, backend, device = int(sys.argv[1]), sys.argv[2], torch.device(sys.argv[3])
new = weights(9)

def tensors():
    # Buckets hold two or three of them: the first is on its way when the last one is asked for.
    *first, last = [value.to(device) for value in new.values()]
    yield from first
    print("stopped", flush=True)
    time.sleep(60)

with SenderGroup("g", "127.0.0.1", port, 2, 30.0, backend=backend, device=device) as group:
    print("joined", flush=True)
    group.broadcast(manifest_of(new), tensors(), 256)
"""


@pytest.mark.case("B084")
def test_a_sender_killed_between_two_broadcasts_is_noticed_and_a_relaunched_one_is_joined():
    target, new = TinyTarget(device=ENGINE), weights(10)
    before = {name: value.cpu() for name, value in target.values().items()}
    with updater_of(target) as updater, ThreadPoolExecutor(1) as pool:
        with listen(LOOPBACK, 0) as probe:
            port = int(probe.getsockname()[1])
        joining = pool.submit(updater.groups.init, InitGroup("g", LOOPBACK, port, 1, 2, timeout_s=30.0))
        command = [sys.executable, "-c", SENDER, str(port), BACKEND, str(TRAINER)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
            try:
                assert sender.stdout is not None
                assert sender.stdout.readline() == "joined\n"
                assert joining.result() == BACKEND
                update_id = begin(updater, weights(9), Staging.DEVICE, 256)
                receiving = pool.submit(run, updater, update_id, 20.0)
                assert sender.stdout.readline() == "stopped\n"
                sender.kill()
                started = time.monotonic()
                with pytest.raises(UpdateRefused) as refused:
                    receiving.result()
                assert refused.value.reason is Reason.PEER_LOST
                assert time.monotonic() - started < 10.0
            finally:
                sender.kill()
        assert updater.groups.names == []
        for name in SHAPES:
            assert torch.equal(target.slot(name).cpu(), before[name])
        with joined(updater) as relaunched:
            push(updater, relaunched, new, Staging.DEVICE, 256)
        for name in SHAPES:
            assert torch.equal(target.slot(name).cpu(), new[name])


@pytest.mark.case("B025")
def test_a_disagreement_harms_nothing():
    target, new = TinyTarget(device=ENGINE), weights(8)
    with updater_of(target) as updater, joined(updater) as sender, ThreadPoolExecutor(1) as pool:
        update_id = begin(updater, new, Staging.DEVICE, 256)
        on_trainer = [value.to(TRAINER) for value in new.values()]
        sending = pool.submit(sender.broadcast, manifest_of(new), on_trainer, 512)
        with pytest.raises(UpdateRefused) as refused:
            run(updater, update_id)
        assert refused.value.reason is Reason.MANIFEST_MISMATCH
        with pytest.raises(UpdateRefused):
            sending.result()
        push(updater, sender, new, Staging.DEVICE, 512)
    for name in SHAPES:
        assert torch.equal(target.slot(name).cpu(), new[name])
