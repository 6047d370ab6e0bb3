"""Arenas of a trainer that the engine adopts: shared, never copied."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from tests.unit.weight_updater.test_commit import FakeGraphs
from tests.unit.weight_updater.tiny_target import (
    EMBED,
    K,
    TinyTarget,
    begin,
    lend,
    make_updater,
    pack,
    push,
    weights,
)
from weight_updater.arena import Arena
from weight_updater.cast import bytes_over
from weight_updater.errors import Reason, UpdateRefused, WeightsTorn
from weight_updater.requests import (
    Path,
    Recapture,
    RegionPlacement,
    ShmSegment,
    Staging,
    UpdateReply,
)
from weight_updater.shm import SharedSegment
from weight_updater.updater import WeightUpdater


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    with SharedSegment.create(8192) as made:
        yield made


TRAINER = """
import sys, time
from weight_updater.shm import SharedSegment
segment = SharedSegment.create(int(sys.argv[1]), owner_lock=True)
d = segment.descriptor
print(d.name, d.size, d.allocation_id, flush=True)
sys.stdin.read()
segment.unlink()
"""


class Trainer:
    """A process that owns an arena; this process writes to it as the trainer would."""

    def __init__(self, nbytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        name, size, allocation_id = self.process.stdout.readline().split()
        self.descriptor = ShmSegment(name, int(size), allocation_id)
        self.segment = SharedSegment.open(self.descriptor)
        self.data = bytes_over(self.segment.buf)

    def train(self, target: TinyTarget, tensors: dict[str, torch.Tensor]) -> None:
        for name, value in tensors.items():
            target.arena.slot_view(self.data, name).copy_(value)

    def die(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.process.communicate(timeout=10) if self.process.poll() is None else None
        self.segment.unlink()
        del self.data
        self.segment.close()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer(TinyTarget().arena.nbytes)
    yield made
    made.close()


def adopt(updater: WeightUpdater, trainer: Trainer, target: TinyTarget, seed: int) -> UpdateReply:
    new = weights(seed)
    update_id = begin(updater, new, path=Path.IPC, adopt=True)
    trainer.train(target, new)
    lend(updater, update_id, trainer.descriptor)
    updater.verify(update_id)
    return updater.commit(update_id)


def test_adopt_shares_memory_and_recaptures(trainer: Trainer) -> None:
    target = TinyTarget()
    graphs = FakeGraphs(target)
    updater = make_updater(target, graphs=graphs)
    old_addresses = target.addresses()
    reply = adopt(updater, trainer, target, 1)
    assert (reply.version, reply.verified, reply.extra_bytes, reply.staging) == (5, True, 0, Staging.NONE)
    assert (reply.graphs_recaptured, reply.num_changed) == (3, 6)
    assert "4 captured addresses moved" in reply.graphs_reason
    assert all(torch.equal(target.slot(name), value) for name, value in weights(1).items())
    assert set(target.addresses().values()).isdisjoint(old_addresses.values())
    assert target.head.data_ptr() == target.slot(EMBED).data_ptr()
    addresses = target.addresses()
    reply = adopt(updater, trainer, target, 2)
    assert (reply.version, reply.graphs_kept, reply.num_changed) == (6, 3, 6)
    assert target.addresses() == addresses
    assert all(torch.equal(target.slot(name), value) for name, value in weights(2).items())
    with pytest.raises(UpdateRefused, match="in use, by an open update or as the adopted arena"):
        updater.release([trainer.descriptor.allocation_id])


def test_adopt_before_the_first_commit_refuses_cleanly(trainer: Trainer) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    update_id = begin(updater, weights(1), path=Path.IPC, adopt=True)
    lend(updater, update_id, trainer.descriptor)  # holds zeros, not what the manifest says
    with pytest.raises(UpdateRefused, match="arrived with checksum"):
        updater.commit(update_id)
    assert updater.torn_reason == ""
    assert updater.release([trainer.descriptor.allocation_id]) == 1


def test_a_lease_that_runs_out_while_the_trainer_writes_tears(trainer: Trainer) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    adopt(updater, trainer, target, 1)
    begin(updater, weights(2), path=Path.IPC, adopt=True)
    assert updater.open is not None
    assert updater.open.adopt
    assert updater.open.written
    updater.tick(time.monotonic() + 61)
    assert "lease" in updater.torn_reason
    assert adopt(updater, trainer, target, 3).version == 6
    assert updater.torn_reason == ""
    update_id = begin(updater, weights(2), path=Path.IPC, adopt=True)
    assert updater.abort(update_id) == (True, True)
    assert "aborted" in updater.torn_reason


def test_wrong_bytes_in_the_live_arena_tear(trainer: Trainer) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    adopt(updater, trainer, target, 1)
    update_id = begin(updater, weights(2), path=Path.IPC, adopt=True)
    trainer.train(target, weights(3))
    lend(updater, update_id, trainer.descriptor)
    with pytest.raises(WeightsTorn, match="arrived with checksum"):
        updater.commit(update_id)


def test_the_death_of_the_owner_tears_until_a_full_update(trainer: Trainer) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    adopt(updater, trainer, target, 1)
    now = time.monotonic()
    updater.tick(now)
    assert updater.torn_reason == ""
    trainer.die()
    updater.tick(now + 0.1)  # not asked at every turn of the loop
    updater.tick(now + 1)
    assert updater.torn_reason == "the trainer that owns the adopted arena is gone"
    lent = trainer.data.clone()
    reply = push(updater, weights(2))
    assert reply.extra_bytes == 2 * target.arena.nbytes  # a new home, and host staging
    assert updater.torn_reason == ""
    assert all(torch.equal(target.slot(name), value) for name, value in weights(2).items())
    assert torch.equal(trainer.data, lent)
    assert updater.release([trainer.descriptor.allocation_id]) == 1
    updater.tick(now + 2)
    assert updater.torn_reason == ""


@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
def test_leaving_an_adopted_arena_writes_nothing_to_it(trainer: Trainer, staging: Staging) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    adopt(updater, trainer, target, 1)
    lent = trainer.data.clone()
    with pytest.raises(UpdateRefused) as caught:
        begin(updater, {K: weights(2)[K]}, partial=True, recapture=Recapture.NEVER)
    assert caught.value.reason is Reason.WOULD_MOVE
    push(updater, {K: weights(2)[K]}, partial=True, staging=staging)
    assert torch.equal(trainer.data, lent)
    expected = {**weights(1), K: weights(2)[K]}
    assert all(torch.equal(target.slot(name), value) for name, value in expected.items())
    assert target.head.data_ptr() == target.slot(EMBED).data_ptr()


def test_the_new_home_is_an_arena_that_can_be_released(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU only what Arena.allocate gives has memory that goes and comes back at one address."""
    target = TinyTarget()
    updater = make_updater(target)
    adopt(updater, trainer, target, 1)
    made: list[torch.Tensor] = []
    original = Arena.allocate

    def allocate(self: Arena, device: torch.device) -> torch.Tensor:
        made.append(original(self, device))
        return made[-1]

    monkeypatch.setattr(Arena, "allocate", allocate)
    push(updater, weights(2), staging=Staging.NONE)
    assert [home.data_ptr() for home in made] == [target.buffer.data_ptr()]

    def too_much(self: Arena, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA_ERROR_OUT_OF_MEMORY")

    adopt(updater, trainer, target, 3)
    monkeypatch.setattr(Arena, "allocate", too_much)
    with pytest.raises(UpdateRefused, match="no room for weights that leave the adopted arena") as caught:
        begin(updater, weights(4), staging=Staging.NONE)
    assert caught.value.reason is Reason.NO_MEMORY
    assert updater.open is None


def test_only_an_arena_can_be_adopted(trainer: Trainer, segment: SharedSegment) -> None:
    target = TinyTarget()
    updater = make_updater(target)

    def refused(match: str, *regions: ShmSegment, **fields: object) -> None:
        update_id = begin(updater, weights(1), path=Path.IPC, adopt=True)
        with pytest.raises(UpdateRefused, match=match):
            lend(updater, update_id, *regions, **fields)
        assert updater.torn_reason == ""

    shifted = (RegionPlacement(0, 0, 8),)
    refused("separate tensors cannot be adopted", trainer.descriptor, placements=shifted)
    both = (trainer.descriptor, segment.descriptor)
    refused("not 2 regions", *both, placements=(RegionPlacement(0, 0, 0),))
    trainer.train(target, weights(1))
    pack(segment, weights(1))
    refused("owner_lock", segment.descriptor)
    with SharedSegment.create(1000) as small:
        refused("has 1000 bytes|needs bytes", small.descriptor)
    with pytest.raises(UpdateRefused, match="adopt shares memory and cannot cast"):
        begin(updater, weights(1, torch.float32), path=Path.IPC, adopt=True)
