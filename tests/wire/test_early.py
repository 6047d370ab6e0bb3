"""Updates that begin before their checksums are known, over a real process. Where trainers do that, their
tensors lie on a GPU (tests/gpu); here they come by shared memory, which takes the same calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines import RunningEngine, serve
from tests.tiny import make_tiny
from tests.wire.trainer import SEEDS, EarlyArena, assert_serves, push, train
from trainers_adapters import IpcArena, ModuleSource, PushError, RollsyncError
from trainers_adapters.sending import Outgoing
from weight_updater.requests import BeginUpdate, UpdateReply
from weight_updater.requests import Path as Way


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama", "llama", tied=True)


@pytest.fixture(scope="module")
def engine(model_dir) -> Iterator[RunningEngine]:
    with serve(model_dir, "--num-pages", "64", "--reserve-device-staging", forked=True) as running:
        yield running


def reason_of(call: Callable, *args, **kwargs) -> str:
    with pytest.raises(RollsyncError) as refused:
        call(*args, **kwargs)
    return refused.value.reason


@pytest.mark.parametrize("staging", ["host", "device", "none"])
def test_an_update_that_begins_before_its_checksums_are_known(staging, engine, model):
    with EarlyArena() as arena:
        for _ in range(3):
            train(model, next(SEEDS))
            report = push(ModuleSource(model), engine, via=arena, staging=staging)
            (reply,) = report.replies.values()
            assert (reply.state, reply.verified, reply.staging) == ("committed", True, staging)
            assert_serves(engine, model, report.version)
        before = engine.weights.checksums()
        for reason, spoil in (
            ("CHECKSUM_MISMATCH", lambda checksums: [checksums[0] ^ 1, *checksums[1:]]),
            ("INVALID_UPDATE", lambda checksums: checksums[:-1]),
        ):
            train(model, next(SEEDS))
            arena.spoil = spoil
            with pytest.raises(PushError, match="UpdateWeightsFromIpc") as refused:
                push(ModuleSource(model), engine, via=arena, staging=staging)
            assert refused.value.reason == reason
            assert engine.weights.checksums() == before
            assert engine.rollout.info().state.open_update_id == ""
        with pytest.raises(PushError, match="BeginUpdate on") as stale:
            push(ModuleSource(model), engine, version=before.weight_version, via=arena, staging=staging)
        assert stale.value.reason == "STALE_VERSION"


def test_checksums_and_the_commit_come_once_and_in_time(engine, model):
    source, weights = ModuleSource(model), engine.weights
    sums = [spec.checksum for spec in source.manifest().tensors]
    with IpcArena() as arena:
        outgoing = Outgoing(source, source.manifest(checksums=False), time.monotonic() + 60)
        arena.stage(outgoing, [weights])

        def begun(**fields) -> str:
            asked = BeginUpdate(path=Way.IPC, manifest=outgoing.manifest, **fields)
            return weights.begin(asked).update_id

        def send(update_id: str, **fields) -> UpdateReply:
            return weights.update_from_ipc(update_id, [arena.descriptor], **fields)

        skipping = begun(skip_checksums=True)
        assert reason_of(send, skipping, checksums=sums, commit=True) == "WRONG_STATE"
        assert not send(skipping, commit=True).verified
        update_id = begun()
        assert reason_of(send, update_id, checksums=sums[1:]) == "INVALID_UPDATE"
        assert send(update_id, checksums=sums).state == "received"
        assert reason_of(send, update_id, checksums=sums[::-1], commit=True) == "WRONG_STATE"
        done = send(update_id, checksums=sums, commit=True)
        assert (done.state, done.verified) == ("committed", True)
        assert send(update_id, checksums=sums, commit=True) == weights.commit(update_id) == done
        assert_serves(engine, model, done.version)
        weights.release(arena.descriptor.allocation_id)
