"""push_weights against hand-written engines over real gRPC: order of calls, bytes, failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
import torch
from torch import nn

from tests.unit.adapters.fake_engine import FakeEngine, serving
from trainers_adapters import push, send_distributed
from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import PushError
from trainers_adapters.push import push_weights
from trainers_adapters.send_distributed import BroadcastGroup
from trainers_adapters.send_ipc import IpcArena
from trainers_adapters.send_tensor import TensorSegment, TensorStream
from trainers_adapters.sending import Outgoing
from trainers_adapters.sources import ModuleSource
from weight_updater.requests import Manifest, TensorSpec

REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, "CHECKSUM_MISMATCH", "w differs")
GONE = (grpc.StatusCode.UNAVAILABLE, "", "connection refused")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(5, 7, generator=generator))
        self.strided = nn.Parameter(torch.randn(6, 3, generator=generator).t())
        self.narrow = nn.Parameter(torch.randn(9, generator=generator).to(torch.bfloat16))


def test_a_stream_packs_small_tensors_and_cuts_large_ones() -> None:
    sizes = [600, 96, 0, 700, 2000, 40, 264, 1000]
    tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8).view(torch.float32) for size in sizes]
    source = [(str(i), tensor) for i, tensor in enumerate(tensors)]
    manifest = Manifest(tuple(TensorSpec(name, "float32", tuple(t.shape)) for name, t in source))
    sender = TensorStream(chunk_bytes=1400)
    chunks = [
        (index, offset, b"".join(data) if isinstance(data, list) else data)
        for index, offset, data in sender._chunks(Outgoing(source, manifest, 0.0))  # type: ignore[arg-type]
    ]
    assert [(index, offset, len(data)) for index, offset, data in chunks] == [
        (None, 0, 768 + 256),  # the last of them is empty; the next would not fit
        (None, 1024, 700),
        (4, 0, 1400),
        (4, 1400, 600),
        (None, 3840, 256 + 264),
        (7, 0, 1000),
    ]
    packed = bytearray(manifest.packed_offsets()[1])
    offsets = manifest.packed_offsets()[0]
    for index, offset, data in chunks:
        start = offset if index is None else offsets[index] + offset
        packed[start : start + len(data)] = data
    for start, tensor in zip(offsets, tensors, strict=True):
        assert packed[start : start + tensor.nbytes] == tensor.numpy().tobytes()


def bytes_of(module: nn.Module) -> dict[str, bytes]:
    return {
        name: p.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, p in module.named_parameters()
    }


@pytest.fixture
def module() -> Small:
    return Small()


@pytest.fixture
def engines() -> list[FakeEngine]:
    return [FakeEngine(), FakeEngine()]


@pytest.fixture
def clients(engines: list[FakeEngine]) -> Iterator[list[WeightsClient]]:
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(engine)) for engine in engines]
        yield [stack.enter_context(WeightsClient(address)) for address in addresses]


@pytest.mark.case("B013")
@pytest.mark.case("B015")
@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorStream(chunk_bytes=16),
        lambda: TensorStream(chunk_bytes=400),
        TensorStream,
        TensorSegment,
        IpcArena,
    ],
    ids=["stream", "stream of parts and packs", "stream of one pack", "shm", "ipc"],
)
def test_one_engine_gets_the_trainers_bytes_and_the_trainer_keeps_them(make, module, engines, clients):
    before = bytes_of(module)
    addresses = [p.data_ptr() for p in module.parameters()]
    with make() as sender:
        report = push_weights(ModuleSource(module), clients[0], 4, via=sender)
    assert engines[0].weights == before == bytes_of(module)
    assert [p.data_ptr() for p in module.parameters()] == addresses
    assert report.version == engines[0].version == 4
    assert report.num_changed == 3
    assert [e for e in engines[0].events if e != "Release"] == [
        "BeginUpdate",
        engines[0].events[1],
        "CommitUpdate",
    ]


def test_no_other_thread_reads_before_the_gpu_has_written(module, engines, clients, monkeypatch):
    """The trainer may have queued its writes on a stream that is no other thread's."""
    waited: list[tuple[str, list[str]]] = []

    class Stream:
        def synchronize(self) -> None:
            waited.append((threading.current_thread().name, list(engines[0].events)))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    push_weights(ModuleSource(module), clients[0], via=TensorStream(), verify=False)
    assert waited == [(threading.current_thread().name, ["BeginUpdate"])]
    assert "UpdateWeightsFromTensor" in engines[0].events


def test_a_manifest_that_was_seen_is_named_by_its_digest(module, engines, clients):
    source = ModuleSource(module)
    push_weights(source, clients[0])
    with torch.no_grad():
        module.w.add_(1)
    report = push_weights(source, clients[0])
    assert report.version == 2
    assert report.num_changed == 1
    assert [b.WhichOneof("source_manifest") for b in engines[0].begun] == ["manifest", "manifest_digest"]
    assert len(engines[0].begun[1].checksums) == 3
    engines[0].manifests.clear()  # the engine was started anew
    assert push_weights(source, clients[0]).version == 3
    assert engines[0].begun[-1].WhichOneof("source_manifest") == "manifest"


@pytest.mark.parametrize("make", [TensorStream, TensorSegment, IpcArena])
def test_parameters_that_take_anothers_place_are_what_is_pushed(make, module, engines, clients):
    """As load_state_dict(assign=True) does it."""
    source = ModuleSource(module)
    with make() as sender:
        push_weights(source, clients[0], via=sender)
        other = {name: tensor + 1 for name, tensor in module.state_dict().items()}
        module.load_state_dict(other, assign=True)
        report = push_weights(source, clients[0], via=sender)
    assert report.num_changed == 3
    assert engines[0].weights == bytes_of(module)


def test_a_parameter_that_is_gone_is_named(module, engines, clients):
    source = ModuleSource(module)
    del module.narrow
    with pytest.raises(ValueError, match="no parameter 'narrow' any more"):
        push_weights(source, clients[0])
    assert engines[0].events == []


def test_an_ipc_arena_is_allocated_once_and_released_before_it_is_freed(module, engines, clients):
    with IpcArena() as arena:
        push_weights(ModuleSource(module), clients[0], via=arena)
        first = arena.descriptor
        push_weights(ModuleSource(module), clients[0], via=arena)
        assert arena.descriptor == first
        push_weights(ModuleSource(module, dtype=torch.float64), clients[0], via=arena)
        assert arena.descriptor.allocation_id != first.allocation_id
    assert engines[0].events.count("Release") == 2


def test_an_engine_that_left_the_fleet_keeps_no_arena_from_the_others(module, engines, clients):
    """Its client is closed; what it was lent before is allocated anew for a source of another size."""
    with IpcArena() as arena:
        push_weights(ModuleSource(module), clients, via=arena)
        clients[1].close()
        report = push_weights(ModuleSource(module, dtype=torch.float64), clients[0], via=arena)
        assert report.version == 2
    assert engines[0].events.count("Release") == 2


class Failing(ModuleSource):
    """Its second tensor cannot be gathered."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, named in enumerate(super().__iter__()):
            if number == 1:
                raise LookupError("the gather failed on rank 3")
            yield named


def test_a_stream_tells_why_the_source_failed(module, engines, clients):
    source = Failing(module)
    with pytest.raises(LookupError, match="rank 3"):
        push_weights(source, clients, via=TensorStream(chunk_bytes=16), verify=False)
    assert [engine.open for engine in engines] == [None, None]
    assert all("AbortUpdate" in engine.events for engine in engines)


def test_many_engines_prepare_before_any_commits(module, engines, clients):
    report = push_weights(ModuleSource(module), clients, 9)
    for engine in engines:
        assert engine.events == ["BeginUpdate", "UpdateWeightsFromTensor", "PrepareUpdate", "CommitUpdate"]
        assert engine.begun[0].num_engines == 2
        assert engine.weights == bytes_of(module)
    assert report.version == 9
    assert set(report.replies) == {client.address for client in clients}


@pytest.mark.case("B073")
@pytest.mark.parametrize("method", ["BeginUpdate", "UpdateWeightsFromTensor", "PrepareUpdate"])
def test_one_failed_vote_aborts_all_and_names_the_engine(method, module, engines, clients):
    engines[1].refuse[method] = REFUSED
    with pytest.raises(PushError, match="w differs") as error:
        push_weights(ModuleSource(module), clients, 9)
    assert error.value.reason == "CHECKSUM_MISMATCH"
    assert clients[1].address in error.value.message
    assert error.value.committed == ()
    assert [engine.version for engine in engines] == [0, 0]
    assert engines[0].open is None
    assert all("AbortUpdate" in engine.events for engine in engines)
    engines[1].refuse.clear()
    assert push_weights(ModuleSource(module), clients, 9).version == 9


def test_after_the_first_commit_the_push_goes_forward_and_names_the_laggard(
    module, engines, clients, monkeypatch
):
    monkeypatch.setattr(push, "COMMIT_RETRY_S", 0.3)
    engines[1].refuse["CommitUpdate"] = GONE
    with pytest.raises(PushError, match="min_version=9") as error:
        push_weights(ModuleSource(module), clients, 9)
    assert error.value.committed == (clients[0].address,)
    assert error.value.laggards == (clients[1].address,)
    assert error.value.version == engines[0].version == 9
    assert "AbortUpdate" not in engines[0].events


def test_a_first_commit_that_was_refused_aborts_all(module, engines, clients):
    engines[0].refuse["CommitUpdate"] = (grpc.StatusCode.NOT_FOUND, "UNKNOWN_UPDATE", "the lease ran out")
    with pytest.raises(PushError, match="nothing was committed"):
        push_weights(ModuleSource(module), clients, 9)
    assert "CommitUpdate" not in engines[1].events
    assert [engine.version for engine in engines] == [0, 0]


@pytest.mark.case("B124")
def test_a_commit_whose_answer_was_lost_is_asked_again(module, engines, clients):
    engines[0].once["CommitUpdate"] = GONE
    assert push_weights(ModuleSource(module), clients[0], 3).version == 3


@pytest.mark.case("B072")
def test_a_commit_of_no_tensor_is_an_error(module, engines, clients):
    engines[0].num_tensors_said = 0
    with pytest.raises(PushError, match="applied no tensor") as error:
        push_weights(ModuleSource(module), clients[0])
    assert error.value.reason == "NOT_APPLIED"


def test_engines_that_would_commit_different_versions_are_refused(module, engines, clients):
    engines[1].version = 5
    with pytest.raises(PushError, match="pass a version larger than all") as error:
        push_weights(ModuleSource(module), clients)
    assert error.value.reason == "ENGINES_DISAGREE"
    assert engines[0].open is None


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"path": "disk"}, "DiskDirectory"),
        ({"path": "carrier-pigeon"}, "must be disk"),
        ({"staging": "x"}, "x"),
    ],
)
def test_arguments_that_cannot_be_right(arguments, match, module, clients):
    with pytest.raises(ValueError, match=match):
        push_weights(ModuleSource(module), clients, **arguments)
    with pytest.raises(ValueError, match="at least one engine"):
        push_weights(ModuleSource(module), [])


class FakeGroup:
    """SenderGroup's face: broadcast blocks until it is told how to end."""

    def __init__(self, *args: object, backend: str, device: torch.device | None) -> None:
        assert (backend, device) == ("gloo", None)  # these weights lie on a CPU
        self.closed = threading.Event()
        self.error: Exception | None = None
        self.block = False
        self.tensors: list[torch.Tensor] = []
        FakeGroup.last = self

    def broadcast(self, manifest: object, tensors: Iterator[torch.Tensor], bucket_bytes: int) -> None:
        self.tensors = list(tensors)
        if FakeGroup.fails is not None:
            raise FakeGroup.fails
        if FakeGroup.blocks and not self.closed.wait(20):
            raise AssertionError("nobody ended the broadcast")

    def close(self) -> None:
        self.closed.set()

    last: FakeGroup
    fails: Exception | None = None
    blocks = False


@pytest.fixture
def fake_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_distributed, "SenderGroup", FakeGroup)
    monkeypatch.setattr(FakeGroup, "fails", None)
    monkeypatch.setattr(FakeGroup, "blocks", False)


@pytest.mark.usefixtures("fake_group")
def test_a_group_is_made_once_and_broadcasts_beside_the_engines_calls(module, engines, clients):
    with BroadcastGroup() as group:
        push_weights(ModuleSource(module), clients, via=group)
        first = FakeGroup.last
        push_weights(ModuleSource(module), clients, via=group)
        assert FakeGroup.last is first
        assert len(first.tensors) == 3
    assert first.closed.is_set()
    for rank, engine in enumerate(engines, start=1):
        assert engine.events.count(f"InitWeightsUpdateGroup {rank}/3") == 1
        assert engine.events[-1] == "DestroyWeightsUpdateGroup"


@pytest.mark.case("B087")
@pytest.mark.usefixtures("fake_group")
def test_an_engines_error_ends_the_broadcast(module, engines, clients, monkeypatch):
    monkeypatch.setattr(FakeGroup, "blocks", True)
    engines[1].refuse["UpdateWeightsFromDistributed"] = REFUSED
    started = time.monotonic()
    with BroadcastGroup() as group:
        with pytest.raises(PushError, match="w differs"):
            push_weights(ModuleSource(module), clients, via=group)
        assert time.monotonic() - started < 20
        monkeypatch.setattr(FakeGroup, "blocks", False)
        engines[1].refuse.clear()
        assert push_weights(ModuleSource(module), clients, via=group).version == 1


@pytest.mark.usefixtures("fake_group")
def test_the_broadcasts_error_ends_the_update(module, engines, clients, monkeypatch):
    monkeypatch.setattr(FakeGroup, "fails", OSError("connection closed by peer"))
    with BroadcastGroup() as group, pytest.raises(OSError, match="closed by peer"):
        push_weights(ModuleSource(module), clients, via=group)
    assert [engine.version for engine in engines] == [0, 0]
    assert [engine.open for engine in engines] == [None, None]
