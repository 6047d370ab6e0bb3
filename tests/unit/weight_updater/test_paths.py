"""Four ways in, one outcome: the same bytes are live, and the same things are told, whatever the path."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path as FilePath

import pytest
import torch

from tests.preloaded import ForkedCommand
from tests.unit.weight_updater.tiny_target import (
    EMBED,
    HEAD,
    NORM,
    TinyTarget,
    manifest_of,
    pack,
    weights,
    whole,
)
from weight_updater import gloo_parent
from weight_updater.checksum import checksum, fold_by_name
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.groups import SenderGroup
from weight_updater.receive import Receive
from weight_updater.requests import (
    BeginUpdate,
    FromDisk,
    FromDistributed,
    FromIpc,
    FromTensor,
    InitGroup,
    Path,
    Staging,
    UpdateReply,
)
from weight_updater.safetensors_io import save_weights
from weight_updater.shm import SharedSegment
from weight_updater.updater import WeightUpdater

Tensors = dict[str, torch.Tensor]
Work = Callable[[str], Receive]


@pytest.fixture
def updater(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightUpdater]:
    monkeypatch.setattr(gloo_parent, "CHILD_COMMAND", ForkedCommand(gloo_parent.CHILD_COMMAND))
    made = WeightUpdater(
        TinyTarget(), lease_s=60.0, roots=[str(tmp_path)], device_staging=True, initial_version=4
    )
    yield made
    made.close()


@contextmanager
def source(
    kind: str, updater: WeightUpdater, new: Tensors, tmp_path: FilePath
) -> Iterator[tuple[BeginUpdate, Work]]:
    """A sender of `new` by one path: what to begin with, and what receives it."""
    manifest = manifest_of(new)
    with ExitStack() as stack:
        if kind == "disk":
            save_weights(str(tmp_path / "new"), list(new.items()))
            directory = str(tmp_path / "new")
            yield (
                BeginUpdate(Path.DISK, directory=directory),
                lambda uid: updater.receiver(FromDisk(uid, directory)),
            )
        elif kind == "chunks":
            yield (
                BeginUpdate(Path.TENSOR, manifest=manifest),
                lambda uid: updater.receiver(FromTensor(uid), whole(new)),
            )
        elif kind in ("segment", "ipc"):
            segment = stack.enter_context(SharedSegment.create(manifest.packed_offsets()[1]))
            pack(segment, new)
            if kind == "segment":
                yield (
                    BeginUpdate(Path.TENSOR, manifest=manifest),
                    lambda uid: updater.receiver(FromTensor(uid, segment.descriptor)),
                )
            else:
                yield (
                    BeginUpdate(Path.IPC, manifest=manifest),
                    lambda uid: updater.receiver(FromIpc(uid, (segment.descriptor,))),
                )
        else:
            yield from distributed(updater, new, stack)


def distributed(updater: WeightUpdater, new: Tensors, stack: ExitStack) -> Iterator[tuple[BeginUpdate, Work]]:
    manifest = manifest_of(new)
    made: list[SenderGroup] = []
    port = free_port()
    joining = threading.Thread(target=lambda: made.append(SenderGroup("g", "127.0.0.1", port, 2)))
    joining.start()
    assert updater.groups.init(InitGroup("g", "127.0.0.1", port, 1, 2)) == "gloo"
    joining.join(30)
    stack.callback(made[0].close)
    sending = threading.Thread(target=lambda: made[0].broadcast(manifest, new.values(), 512))
    stack.callback(lambda: sending.join(30))

    def work(update_id: str) -> Receive:
        sending.start()
        return updater.receiver(FromDistributed(update_id, "g"))

    yield BeginUpdate(Path.DISTRIBUTED, manifest=manifest, bucket_bytes=512), work


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def run(updater: WeightUpdater, request: BeginUpdate, work: Work) -> UpdateReply:
    reply = updater.begin(request, updater.resolve(request), paused=False)
    receive = work(reply.update_id)
    receive.run()
    updater.received(receive, None)
    updater.verify(reply.update_id)
    return updater.commit(reply.update_id)


@pytest.mark.case("B001")
@pytest.mark.case("B020")
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST, Staging.NONE])
@pytest.mark.parametrize("kind", ["disk", "chunks", "segment", "ipc", "distributed"])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_every_path_ends_alike(
    updater: WeightUpdater, kind: str, staging: Staging, dtype: torch.dtype | None, tmp_path: FilePath
) -> None:
    target = updater._target
    assert isinstance(target, TinyTarget)
    addresses, new = target.addresses(), weights(1, dtype)
    with source(kind, updater, new, tmp_path) as (request, work):
        reply = run(updater, dataclasses.replace(request, staging=staging), work)
    assert all(torch.equal(target.slot(n), v.to(target.slot(n).dtype)) for n, v in new.items())
    assert target.addresses() == addresses
    assert target.head.data_ptr() == target.slot(HEAD).data_ptr()
    assert (reply.version, reply.num_tensors, reply.num_changed) == (5, 6, 6)
    assert (reply.path, reply.staging, reply.verified) == (request.path, staging, True)
    assert reply.num_bytes == sum(value.nbytes for value in new.values())
    by_name = {name: checksum(value) for name, value in new.items()}
    assert reply.received_checksum == fold_by_name(by_name)
    assert reply.live_checksum == fold_by_name(
        {name: checksum(target.slot(name)) for name in target.arena.slot_names}
    )
    assert reply.seconds.transfer > 0
    assert reply.gb_per_s > 0
    assert updater.weights_path == (str(tmp_path / "new") if kind == "disk" else "")


def test_distributed_agrees_on_buckets(updater: WeightUpdater) -> None:
    manifest = manifest_of(weights(1))
    request = BeginUpdate(Path.DISTRIBUTED, manifest=manifest, bucket_bytes=500)
    reply = updater.begin(request, updater.resolve(request), paused=False)
    assert (reply.bucket_bytes, reply.num_buckets) == (512, 3)  # 6 tensors of at most 256 bytes each
    receive = updater.receiver(FromDistributed(reply.update_id, "nobody"))
    with pytest.raises(UpdateRefused) as caught:
        receive.run()
    assert caught.value.reason is Reason.GROUP_UNKNOWN
    with pytest.raises(UpdateRefused, match="no process group 'nobody'"):
        updater.received(receive, caught.value)
    request = BeginUpdate(Path.DISTRIBUTED, manifest=manifest, bucket_bytes=-1)
    with pytest.raises(UpdateRefused, match="bucket_bytes is -1"):
        updater.begin(request, manifest, paused=False)


def test_files_without_checksums_are_not_verified(updater: WeightUpdater, tmp_path: FilePath) -> None:
    save_weights(str(tmp_path), list(weights(1).items()), checksums=False)
    request = BeginUpdate(Path.DISK, directory=str(tmp_path))
    reply = run(updater, request, lambda uid: updater.receiver(FromDisk(uid, "")))
    assert not reply.verified
    assert "the files carry no checksum" in reply.warnings[0]
    assert updater.weights_path == str(tmp_path)


def test_a_senders_checksums_prove_files_that_have_none(updater: WeightUpdater, tmp_path: FilePath) -> None:
    save_weights(str(tmp_path), list(weights(1).items()), checksums=False)
    request = BeginUpdate(Path.DISK, directory=str(tmp_path), manifest=manifest_of(weights(1)))
    assert run(updater, request, lambda uid: updater.receiver(FromDisk(uid, ""))).verified
    wrong = dataclasses.replace(request, manifest=manifest_of(weights(2)))
    with pytest.raises(UpdateRefused, match="arrived with checksum") as caught:
        run(updater, wrong, lambda uid: updater.receiver(FromDisk(uid, "")))
    assert caught.value.reason is Reason.CHECKSUM_MISMATCH


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda new: {**new, NORM: new[NORM].bfloat16()}, "the manifest has model.norm.weight .bfloat16"),
        (lambda new: {n: v for n, v in new.items() if n != EMBED}, "the manifest has no tensor of that name"),
        (lambda new: {**new, "x": torch.ones(2)}, "lacks x, which the manifest has"),
        (lambda new: {**new, NORM: new[NORM] + 1}, "with checksum"),
    ],
)
def test_a_manifest_that_contradicts_the_files_is_refused(
    updater: WeightUpdater, tmp_path: FilePath, change: Callable[[Tensors], Tensors], match: str
) -> None:
    save_weights(str(tmp_path), list(weights(1).items()))
    manifest = manifest_of(change(weights(1)))
    with pytest.raises(UpdateRefused, match=match):
        updater.resolve(BeginUpdate(Path.DISK, directory=str(tmp_path), manifest=manifest))


def test_files_that_change_after_begin_refuse(updater: WeightUpdater, tmp_path: FilePath) -> None:
    save_weights(str(tmp_path), list(weights(1).items()))
    request = BeginUpdate(Path.DISK, directory=str(tmp_path))
    reply = updater.begin(request, updater.resolve(request), paused=False)
    save_weights(str(tmp_path), list(weights(2).items()))
    receive = updater.receiver(FromDisk(reply.update_id, str(tmp_path)))
    with pytest.raises(UpdateRefused, match="did somebody write there") as caught:
        receive.run()
    with pytest.raises(UpdateRefused):
        updater.received(receive, caught.value)
    assert updater.version == 4


def test_disk_stays_under_its_roots(updater: WeightUpdater) -> None:
    with pytest.raises(UpdateRefused) as caught:
        updater.resolve(BeginUpdate(Path.DISK, directory="/etc"))
    assert caught.value.reason is Reason.PATH_FORBIDDEN
    manifest = manifest_of(weights(1))
    reply = updater.begin(BeginUpdate(Path.DISK, manifest=manifest), manifest, paused=False)
    receive = updater.receiver(FromDisk(reply.update_id, "/etc"))
    with pytest.raises(UpdateRefused) as caught:
        receive.run()
    assert caught.value.reason is Reason.PATH_FORBIDDEN
    with pytest.raises(UpdateRefused, match="needs a manifest"):
        updater.resolve(BeginUpdate(Path.TENSOR))
