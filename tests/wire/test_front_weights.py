"""Weight updates through the front: every call, the upload ring, and streams that break."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import zlib

import grpc
import pytest

from rollout_engine.v1 import rollout_pb2
from rollout_engine.v1 import weights_pb2 as pb
from tests.wire.fake_replies import LAYOUT, weight_bytes
from tests.wire.front import reason_of, serving, wait_until
from tests.wire.update_messages import chunk, chunks, header, packed_chunk, read

CODE = grpc.StatusCode
BEGIN = pb.BeginUpdateRequest(
    update_id="u1",
    path=pb.WEIGHTS_PATH_TENSOR,
    manifest=pb.Manifest(tensors=[pb.TensorSpec(name="a.weight", dtype=pb.DTYPE_FLOAT32, shape=[2, 3])]),
    checksums=[2**64 - 1],
)
IPC = pb.BeginUpdateRequest(path=pb.WEIGHTS_PATH_IPC, manifest=BEGIN.manifest)


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("model")) as made:
        yield made


PACKED_AND_NAMED = packed_chunk(0, bytes(8), tensor=3)


# -------------------------------------------------------------------- one call each


def test_begin_reaches_the_engine_field_by_field(front):
    reply = front.weights.BeginUpdate(BEGIN, timeout=10)
    sent = front.commands("Begin")[-1]["request"]
    assert sent["manifest"]["tensors"] == [
        {"name": "a.weight", "dtype": "float32", "shape": [2, 3], "checksum": None}
    ]
    assert (sent["path"], sent["update_id"], sent["checksums"]) == ("tensor", "u1", [2**64 - 1])
    assert (reply.update_id, reply.total_bytes, reply.staging) == ("u1", 24, pb.STAGING_HOST)
    assert (list(reply.unmatched), reply.lease_ms) == (["extra.weight"], 60000)


def test_the_life_of_an_update_and_its_replies(front):
    before = front.weights.GetWeightLayout(pb.GetWeightLayoutRequest(), timeout=10).weight_version
    prepared = front.weights.PrepareUpdate(
        pb.PrepareUpdateRequest(update_id="u", deadline_ms=1500), timeout=10
    )
    assert prepared.state == pb.UPDATE_STATE_PREPARED
    assert front.commands("Prepare")[-1]["deadline_s"] == 1.5
    committed = front.weights.CommitUpdate(pb.CommitUpdateRequest(update_id="u"), timeout=10)
    assert committed.state == pb.UPDATE_STATE_COMMITTED
    assert (committed.weight_version, committed.previous_weight_version) == (before + 1, before)
    assert (committed.seconds.pause, committed.graphs.recaptured) == (3.0, 14)
    assert (committed.live_checksum, list(committed.warnings)) == (2**63, ["slow"])
    back = front.weights.RollbackUpdate(pb.RollbackUpdateRequest(inflight=pb.INFLIGHT_KEEP), timeout=10)
    assert back.state == pb.UPDATE_STATE_ROLLED_BACK
    assert front.commands("Rollback")[-1]["inflight"] == "keep"


def test_calls_beside_an_update(front):
    weights = front.weights
    found = weights.AbortUpdate(pb.AbortUpdateRequest(update_id="open"), timeout=10)
    assert (found.found, found.torn, found.weight_version >= 5) == (True, False, True)
    assert not weights.AbortUpdate(pb.AbortUpdateRequest(update_id="none"), timeout=10).found
    assert weights.RenewLease(pb.RenewLeaseRequest(update_id="u", lease_ms=250), timeout=10).lease_ms == 250
    assert weights.Release(pb.ReleaseRequest(allocation_ids=["a", "b"]), timeout=10).num_released == 2
    group = pb.InitWeightsUpdateGroupRequest(
        group_name="known", master_address="::1", master_port=29500, rank=1, world_size=2
    )
    assert weights.InitWeightsUpdateGroup(group, timeout=10).backend == "gloo"
    assert front.commands("InitWeightsGroup")[-1]["request"]["timeout_s"] == 30.0
    destroy = pb.DestroyWeightsUpdateGroupRequest(group_name="known")
    assert weights.DestroyWeightsUpdateGroup(destroy, timeout=10).found
    checksums = weights.GetWeightChecksums(pb.GetWeightChecksumsRequest(names=["norm.weight"]), timeout=10)
    assert [(c.name, c.checksum) for c in checksums.checksums] == [("norm.weight", 2**64 - 1)]
    assert checksums.folded == 2**63
    layout = weights.GetWeightLayout(pb.GetWeightLayoutRequest(), timeout=10)
    assert layout.arena_bytes == LAYOUT.arena_bytes
    assert [(p.name, p.offset, p.alias_of) for p in layout.placements] == [
        ("embed.weight", 0, ""),
        ("norm.weight", 2621440, ""),
        ("lm_head.weight", 0, "embed.weight"),
    ]


def test_paths_reach_the_engine_with_their_own_request(front):
    weights = front.weights
    weights.UpdateWeightsFromDisk(pb.UpdateWeightsFromDiskRequest(update_id="u", directory="/w"), timeout=10)
    assert front.commands("Update")[-1]["disk"] == {"update_id": "u", "directory": "/w"}
    begin = pb.BeginUpdateRequest(path=pb.WEIGHTS_PATH_DISK, update_id="one", inflight=pb.INFLIGHT_ABORT)
    one_call = pb.UpdateWeightsFromDiskRequest(begin=begin, directory="/w")
    assert weights.UpdateWeightsFromDisk(one_call, timeout=10).state == pb.UPDATE_STATE_COMMITTED
    sent = front.commands("Update")[-1]
    assert (sent["begin"]["directory"], sent["begin"]["inflight"]) == ("/w", "abort")
    assert sent["disk"] == {"update_id": "one", "directory": "/w"}
    group = pb.UpdateWeightsFromDistributedRequest(update_id="u", group_name="g", timeout_ms=500)
    weights.UpdateWeightsFromDistributed(group, timeout=10)
    sent = front.commands("Update")[-1]["distributed"]
    assert sent == {"update_id": "u", "group_name": "g", "timeout_s": 0.5}
    shm = pb.SharedMemorySegment(name="rollsync-x", size=256, allocation_id="A")
    handle = pb.MemoryHandle(allocation_id="A", size=256, posix_shm=shm)
    weights.UpdateWeightsFromIpc(pb.UpdateWeightsFromIpcRequest(update_id="u", handles=[handle]), timeout=10)
    region = {"name": "rollsync-x", "size": 256, "allocation_id": "A"}
    assert front.commands("Update")[-1]["ipc"]["regions"] == [region]
    assert not front.commands("Update")[-1]["commit"]
    whole = pb.UpdateWeightsFromIpcRequest(update_id="u", handles=[handle], checksums=[7], commit=True)
    weights.UpdateWeightsFromIpc(whole, timeout=10)
    sent = front.commands("Update")[-1]
    assert (sent["ipc"]["checksums"], sent["commit"], sent["begin"]) == ([7], True, None)
    messages = [header(update_id="u", segment=shm)]
    weights.UpdateWeightsFromTensor(iter(messages), timeout=10)
    assert front.commands("Update")[-1]["tensor"] == {"update_id": "u", "segment": region}


@pytest.mark.parametrize(
    ("call", "request_", "text"),
    [
        ("BeginUpdate", pb.BeginUpdateRequest(), "path is unspecified"),
        ("BeginUpdate", pb.BeginUpdateRequest(path=7), "path is 7"),
        ("UpdateWeightsFromDisk", pb.UpdateWeightsFromDiskRequest(directory="/w"), "update_id is empty"),
        ("UpdateWeightsFromDisk", pb.UpdateWeightsFromDiskRequest(begin=BEGIN), "begin.path is tensor"),
        ("UpdateWeightsFromDisk", pb.UpdateWeightsFromDiskRequest(update_id="u", directory="a\0b"), "NUL"),
        ("UpdateWeightsFromIpc", pb.UpdateWeightsFromIpcRequest(), "update_id is empty"),
        ("UpdateWeightsFromIpc", pb.UpdateWeightsFromIpcRequest(begin=IPC, checksums=[1]), "checksums goes"),
        ("UpdateWeightsFromIpc", pb.UpdateWeightsFromIpcRequest(begin=IPC, commit=True), "commit goes"),
        ("CommitUpdate", pb.CommitUpdateRequest(), "update_id is empty"),
        ("RollbackUpdate", pb.RollbackUpdateRequest(inflight=9), "inflight is 9"),
        ("InitWeightsUpdateGroup", pb.InitWeightsUpdateGroupRequest(group_name="g"), "master_address"),
    ],
)
def test_bad_fields_never_reach_the_engine(front, call, request_, text):
    before = len(front.commands())
    with pytest.raises(grpc.RpcError) as caught:
        getattr(front.weights, call)(request_, timeout=10)
    assert reason_of(caught.value) == (CODE.INVALID_ARGUMENT, "INVALID_UPDATE", "refused")
    assert text in caught.value.details()
    assert len(front.commands()) == before


@pytest.mark.case("B049")
def test_nothing_on_the_wire_is_unpickled(front, tmp_path):
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    payload = pickle.dumps(Evil())
    handle = pb.MemoryHandle(
        allocation_id="A", size=8, cuda_ipc=pb.CudaIpcHandle(device_uuid="g", handle=payload)
    )
    with pytest.raises(grpc.RpcError) as caught:
        front.weights.UpdateWeightsFromIpc(
            pb.UpdateWeightsFromIpcRequest(update_id="u", handles=[handle]), timeout=10
        )
    assert caught.value.code() is CODE.INVALID_ARGUMENT
    reply = front.weights.UpdateWeightsFromTensor(iter([header(), chunk(0, 0, payload)]), timeout=10)
    assert reply.received_checksum == zlib.crc32(payload)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (["refused", "STALE_VERSION", "version 3 is not larger than 5"], CODE.FAILED_PRECONDITION),
        (["torn", "WRITE_FAILED", "wrote part of version 6"], CODE.DATA_LOSS),
        (["engine", "ASLEEP", "weights are released"], CODE.FAILED_PRECONDITION),
    ],
)
def test_an_error_of_the_engine_becomes_a_status(tmp_path, error, code):
    with serving(tmp_path, error_on={"Commit": error}) as front:
        with pytest.raises(grpc.RpcError) as caught:
            front.weights.CommitUpdate(pb.CommitUpdateRequest(update_id="u"), timeout=10)
        kind, reason, message = error
        assert reason_of(caught.value) == (code, reason, kind)
        assert caught.value.details() == message


# -------------------------------------------------------------------- the stream of chunks


@pytest.mark.case("B118")
def test_a_default_client_moves_a_tensor_of_64_mib(front):
    data = os.urandom(1 << 20) * 64
    stream = iter([header(), *chunks(data, 2 << 20)])
    reply = front.weights.UpdateWeightsFromTensor(stream, timeout=60)
    assert (reply.num_bytes, reply.received_checksum) == (64 << 20, zlib.crc32(data))
    assert reply.state == pb.UPDATE_STATE_RECEIVED


def test_chunks_larger_than_a_slot_are_cut_at_multiples_of_8(tmp_path):
    with serving(tmp_path, ring_slots=2, ring_slot_bytes=1004) as front:
        data = os.urandom(5003)
        stream = iter([header(), chunk(1, 16, data), chunk(0, 0, b"12345678")])
        reply = front.weights.UpdateWeightsFromTensor(stream, timeout=10)
        assert reply.num_bytes == 5011
        assert reply.received_checksum == zlib.crc32(bytes(16) + data, zlib.crc32(b"12345678"))
        sent = front.commands("Chunk")
        assert [(c["offset"], c["nbytes"]) for c in sent[:2]] == [(16, 1000), (1016, 1000)]
        assert all(c["offset"] % 8 == 0 for c in sent)


def test_packed_chunks_reach_the_engine_without_a_tensor(tmp_path):
    with serving(tmp_path, ring_slots=2, ring_slot_bytes=1004) as front:
        data = os.urandom(1300)
        stream = iter([header(), packed_chunk(256, data)])
        assert front.weights.UpdateWeightsFromTensor(stream, timeout=10).num_bytes == 1300
        sent = [(c["tensor"], c["offset"], c["nbytes"]) for c in front.commands("Chunk")]
        assert sent == [(None, 256, 1000), (None, 1256, 300)]


def test_a_slow_engine_holds_the_client_back(tmp_path):
    with serving(tmp_path, ring_slots=2, ring_slot_bytes=1 << 20, chunk_s=0.05) as front:
        sent = []

        def stream():
            yield header()
            for message in chunks(bytes(20 << 20), 1 << 20):
                sent.append(time.monotonic())
                yield message

        start = time.monotonic()
        reply = front.weights.UpdateWeightsFromTensor(stream(), timeout=30)
        assert reply.num_bytes == 20 << 20
        assert sent[-1] - start > 0.4  # the client could not run ahead of 20 * 0.05 s by much
        assert front.on_loop(lambda: front.running.engine.ring.num_free) == 2


def test_one_call_begins_updates_and_commits(tmp_path):
    with serving(tmp_path) as front:
        stream = iter([header(begin=BEGIN), chunk(0, 0, bytes(24))])
        reply = front.weights.UpdateWeightsFromTensor(stream, timeout=10)
        assert (reply.state, reply.weight_version) == (pb.UPDATE_STATE_COMMITTED, 6)
        # Whoever was told of the commit finds the new version in the state at once.
        assert front.running.engine.state.weight_version == 6
        end = {"type": "EndOfChunks", "call_id": 1, "complete": True, "reason": ""}
        assert front.commands("EndOfChunks") == [end]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "must be the header"),
        ([chunk(0, 0, b"x")], "must be the header"),
        ([header(), PACKED_AND_NAMED], "message 1 of the stream is packed, but names tensor 3"),
        ([header(), header()], "message 1 of the stream is no chunk"),
        ([header(), pb.UpdateWeightsFromTensorRequest()], "message 1 of the stream is no chunk"),
    ],
)
def test_streams_in_the_wrong_order_are_refused(front, messages, text):
    with pytest.raises(grpc.RpcError) as caught:
        front.weights.UpdateWeightsFromTensor(iter(messages), timeout=10)
    assert reason_of(caught.value)[1] == "INVALID_UPDATE"
    assert text in caught.value.details()


def test_an_error_of_the_engine_ends_the_stream_early(tmp_path):
    with serving(tmp_path, fail_after_chunks=2) as front:
        stop = threading.Event()

        def stream():
            yield header()
            yield from chunks(bytes(8 << 20), 1 << 20)
            stop.wait(20)  # the client has more, but waits

        with pytest.raises(grpc.RpcError) as caught:
            front.weights.UpdateWeightsFromTensor(stream(), timeout=15)
        stop.set()
        assert reason_of(caught.value) == (CODE.INVALID_ARGUMENT, "BAD_CHUNK", "refused")
        wait_until(lambda: front.on_loop(lambda: front.running.engine.ring.num_free) == 4, 20, "free slots")
        assert front.commands("EndOfChunks") == []


def test_a_cancelled_stream_is_told_to_the_engine_and_nothing_else(tmp_path):
    with serving(tmp_path) as front:
        stop = threading.Event()

        def stream():
            yield header()
            yield chunk(0, 0, bytes(64))
            stop.wait(20)

        call = front.weights.UpdateWeightsFromTensor.future(stream(), timeout=60)
        front.wait_for("Chunk")
        call.cancel()
        assert [end["complete"] for end in front.wait_for("EndOfChunks")] == [False]
        stop.set()
        wait_until(lambda: front.on_loop(lambda: front.running.engine.ring.num_free) == 4, 20, "free slots")
        assert [entry["type"] for entry in front.commands()] == ["config", "Update", "Chunk", "EndOfChunks"]


def test_a_killed_sender_is_a_broken_stream(tmp_path):
    with serving(tmp_path) as front:
        program = (
            "import time, grpc\n"
            "from rollout_engine.v1 import weights_pb2 as pb, weights_pb2_grpc\n"
            "def stream():\n"
            "    yield pb.UpdateWeightsFromTensorRequest(header={'update_id': 'open'})\n"
            "    yield pb.UpdateWeightsFromTensorRequest(chunk={'data': bytes(64)})\n"
            "    time.sleep(60)\n"
            f"stub = weights_pb2_grpc.WeightsStub(grpc.insecure_channel({front.address!r}))\n"
            "stub.UpdateWeightsFromTensor(stream())\n"
        )
        client = subprocess.Popen([sys.executable, "-c", program])
        front.wait_for("Chunk")
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
        assert [end["complete"] for end in front.wait_for("EndOfChunks")] == [False]


@pytest.mark.parametrize("call", ["CommitUpdate", "UpdateWeightsFromTensor"])
def test_an_expired_call_of_an_update_sends_nothing_more(tmp_path, call):
    late = dict.fromkeys(["Commit", "Update", "FlushCache"], 3.3)
    with serving(tmp_path, delay_on=late) as front:
        grpc.channel_ready_future(front.channel).result(20)
        if call == "CommitUpdate":
            future = front.weights.CommitUpdate.future(pb.CommitUpdateRequest(update_id="u"), timeout=3.0)
        else:
            stream = iter([header(), chunk(0, 0, bytes(8))])
            future = front.weights.UpdateWeightsFromTensor.future(stream, timeout=3.0)
        with pytest.raises(grpc.RpcError) as caught:
            future.result()
        assert caught.value.code() is CODE.DEADLINE_EXCEEDED
        # As late as the reply that nobody waits for, and after it.
        front.rollout.FlushCache(rollout_pb2.FlushCacheRequest(), timeout=20)
        kinds = [entry["type"] for entry in front.commands()][1:-1]
        assert kinds == (["Commit"] if call == "CommitUpdate" else ["Update", "Chunk", "EndOfChunks"])
        assert front.on_loop(lambda: front.running.engine.ring.num_free) == 4


# -------------------------------------------------------------------- reading weights back


@pytest.mark.case("B118")
def test_weights_are_read_in_pieces_that_a_default_client_takes(front):
    names = ["embed.weight", "norm.weight"]
    pieces = list(front.weights.GetWeightsByName(read(*names), timeout=20))
    assert all(piece.ByteSize() < 4 << 20 for piece in pieces)
    for name, size in (("embed.weight", 1024 * 1280 * 2), ("norm.weight", 40)):
        mine = [piece for piece in pieces if piece.name == name]
        data = b"".join(piece.data for piece in mine)
        assert [piece.offset for piece in mine] == list(range(0, size, 1 << 20))
        assert data == weight_bytes(name, 0, size)
    assert (pieces[0].dtype, list(pieces[0].shape)) == (pb.DTYPE_BFLOAT16, [1024, 1280])
    assert pieces[0].weight_version >= 5


def test_small_messages_make_small_pieces(tmp_path):
    with serving(tmp_path, config={"max_message_bytes": 65536}, ring_slots=2, ring_slot_bytes=50000) as front:
        request = read("embed.weight")
        pieces = list(front.weights.GetWeightsByName(request, timeout=20))
        assert {len(piece.data) for piece in pieces[:-1]} == {49152}
        assert b"".join(piece.data for piece in pieces) == weight_bytes("embed.weight", 0, 2621440)


def test_an_unknown_weight_is_named(front):
    with pytest.raises(grpc.RpcError) as caught:
        list(
            front.weights.GetWeightsByName(
                pb.GetWeightsByNameRequest(names=["embed.weight", "x"]), timeout=10
            )
        )
    assert reason_of(caught.value) == (CODE.NOT_FOUND, "UNKNOWN_NAME", "engine")
    assert "'x'" in caught.value.details()


def test_a_commit_in_between_ends_a_read(tmp_path):
    with serving(tmp_path, ring_slot_bytes=50_000, delay_on={"ReadWeight": 0.1}) as front:
        stream = front.weights.GetWeightsByName(read("embed.weight"), timeout=20)
        next(stream)  # of 54 pieces, a tenth of a second each
        front.weights.CommitUpdate(pb.CommitUpdateRequest(update_id="u"), timeout=10)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert reason_of(caught.value)[1] == "BUSY"
        assert "changed to version 6" in caught.value.details()


def test_a_reader_that_goes_away_gives_its_slot_back(tmp_path):
    with serving(tmp_path, delay_on={"ReadWeight": 0.3}) as front:
        stream = front.weights.GetWeightsByName(read("embed.weight"), timeout=20)
        front.wait_for("ReadWeight")
        stream.cancel()
        wait_until(lambda: front.on_loop(lambda: front.running.engine.ring.num_free) == 4, 20, "free slots")
