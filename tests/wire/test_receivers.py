"""Chunk streams at receivers: processes of a real engine that take nothing else, and how they can fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import torch

from rollout_engine.v1 import weights_pb2 as pb
from rollout_engine.v1.weights_pb2_grpc import WeightsStub
from tests.engines import RunningEngine, serve
from tests.tiny import make_tiny
from tests.wire.front import reason_of, serving
from tests.wire.receiver_streams import (
    SMALL,
    Halves,
    Walled,
    begin_streams,
    children_of,
    clients_at,
    half_arrived,
    receiver_pids,
)
from tests.wire.trainer import (
    PROMPT,
    InFlight,
    Named,
    assert_serves,
    begin,
    beside,
    chunks_of,
    push,
    until,
    until_closed,
)
from tests.wire.update_messages import chunk, header
from trainers_adapters import ModuleSource, PushError, RollsyncError, TensorStream, push_weights, send_tensor
from trainers_adapters.chunk_wire import Chunk, chunk_message
from trainers_adapters.clients import WeightsClient
from weight_updater.requests import BeginUpdate, Staging
from weight_updater.requests import Path as Way

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama", "llama", tied=True)


@pytest.fixture(scope="module")
def engine(model_dir) -> Iterator[RunningEngine]:
    with serve(model_dir, "--num-pages", "256", "--stream-receivers", "2") as running:
        yield running


# -------------------------------------------------------------------- what goes well


@pytest.mark.parametrize("staging", ["host", "none"])
@pytest.mark.parametrize("max_streams", [0, 1, 2, 16])
def test_a_push_uses_as_many_receivers_as_both_ends_want(max_streams, staging, engine, model):
    with TensorStream(chunk_bytes=SMALL, max_streams=max_streams) as sender:
        report = push(ModuleSource(model), engine, via=sender, staging=staging)
        assert len(sender._receivers) == min(max_streams, 2)
    assert_serves(engine, model, report.version)
    (reply,) = report.replies.values()
    assert reply.verified
    assert 0 < reply.seconds.transfer < report.seconds


def test_streams_side_by_side_bring_one_update(engine, model):
    source = ModuleSource(model)
    with Halves(engine, source) as halves:
        until(lambda: half_arrived(engine, source), "half of the bytes arrive")
        assert engine.rollout.info().state.open_update_state == "receiving"
        assert engine.greedy(PROMPT, ignore_eos=True).finish_reason == "length", "generation goes on"
        halves.gate.set()
        replies = [call.result(20) for call in halves.calls]
        assert {reply.update_id for reply in replies} == {halves.begun.update_id}
        assert "received" in {str(reply.state) for reply in replies}
        committed = engine.weights.commit(halves.begun.update_id)
    assert committed.num_bytes == source.manifest(checksums=False).nbytes
    assert_serves(engine, model, committed.version)


def test_streams_that_write_live_park_the_device_once(engine, model):
    source = ModuleSource(model)
    stream = InFlight(engine)
    with Halves(engine, source, staging=Staging.NONE, inflight="abort") as halves:
        until(lambda: half_arrived(engine, source), "half of the bytes arrive")
        assert stream.end().finish_reason == "abort"
        halves.gate.set()
        for call in halves.calls:
            call.result(20)
        committed = engine.weights.commit(halves.begun.update_id)
    assert committed.num_aborted == 1
    assert_serves(engine, model, committed.version)


def test_one_call_at_a_receiver_begins_updates_and_commits(engine, model):
    source = ModuleSource(model)
    ports = begin_streams(engine, source, update_id="only-for-the-ports").stream_ports
    engine.weights.abort("only-for-the-ports")
    with clients_at(engine, ports[:1]) as (receiver,):
        update = BeginUpdate(path=Way.TENSOR, manifest=source.manifest())
        reply = receiver.update_from_tensor(update, chunks_of(source), says_end=True)
    assert str(reply.state) == "committed"
    assert_serves(engine, model, reply.version)


def test_any_client_with_the_stubs_may_stream(engine, model):
    """Chunks in any order, as the library writes them, and no word at the end."""
    source = ModuleSource(model)
    begun = begin_streams(engine, source)
    with grpc.insecure_channel(f"127.0.0.1:{begun.stream_ports[1]}") as channel:
        chunks = [chunk(index, offset, bytes(data)) for index, offset, data in chunks_of(source, SMALL)]
        stream = iter([header(update_id=begun.update_id), *reversed(chunks)])
        reply = WeightsStub(channel).UpdateWeightsFromTensor(stream, timeout=20)
    assert reply.state == pb.UPDATE_STATE_RECEIVED
    assert_serves(engine, model, engine.weights.commit(begun.update_id).version)


def test_an_engine_may_have_no_receivers(tmp_path):
    with serving(tmp_path, config={"stream_receivers": 0}) as front:
        manifest = pb.Manifest(tensors=[pb.TensorSpec(name="a", dtype=pb.DTYPE_FLOAT32, shape=[2])])
        update = pb.BeginUpdateRequest(path=pb.WEIGHTS_PATH_TENSOR, manifest=manifest, num_streams=4)
        assert front.weights.BeginUpdate(update, timeout=10).stream_ports == []


def test_receivers_that_cannot_be_reached_are_done_without(engine, model, monkeypatch, caplog):
    monkeypatch.setattr(send_tensor, "CONNECT_SECONDS", 0.2)
    source = ModuleSource(model)
    with Walled(engine.address) as walled, TensorStream(chunk_bytes=SMALL) as sender:
        version = push_weights(source, walled, via=sender).version
        assert caplog.text.count("cannot be reached") == 2
        monkeypatch.setattr(send_tensor, "CONNECT_SECONDS", 30.0)
        start = time.monotonic()
        push_weights(source, walled, via=sender)
        assert time.monotonic() - start < 15.0
        assert caplog.text.count("cannot be reached") == 2, "it is not tried again"
    assert_serves(engine, model, version + 1)


# -------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
def test_a_receiver_that_is_killed_ends_the_update_and_not_the_next(staging, engine, model):
    source, before = ModuleSource(model), engine.weights.checksums()
    with Halves(engine, source, staging=staging) as halves:
        until(lambda: half_arrived(engine, source), "half of the bytes arrive")
        victim, survivor = receiver_pids(engine)
        os.kill(victim, signal.SIGKILL)
        reasons = halves.reasons()  # without a word from the trainer, which has nothing to send for now
    assert sorted(reasons) == ["PEER_LOST", "UNREACHABLE"]
    with pytest.raises(RollsyncError) as refused:
        engine.weights.commit(halves.begun.update_id)
    assert refused.value.reason == "UNKNOWN_UPDATE"
    assert "the process that received the stream died" in refused.value.message
    if staging is Staging.HOST:
        assert engine.weights.checksums() == before
        assert engine.greedy(PROMPT, ignore_eos=True).weight_versions == [before.weight_version] * 8
    else:
        with pytest.raises(RollsyncError) as torn:
            engine.greedy(PROMPT)
        assert torn.value.reason == "NOT_SERVING"
    with TensorStream(chunk_bytes=SMALL) as sender:
        assert_serves(engine, model, push(source, engine, via=sender).version)
        assert len(sender._receivers) == 2
    now = receiver_pids(engine)
    assert victim not in now
    assert survivor in now


def test_a_receiver_that_died_between_updates_is_replaced(engine, model):
    source = ModuleSource(model)
    with TensorStream(chunk_bytes=SMALL) as sender:
        push(source, engine, via=sender)
        ports = {port for _, port in sender._receivers}
        pid = receiver_pids(engine)[0]
        os.kill(pid, signal.SIGKILL)
        # A dying process loses its command line before its sockets: it is gone when the front has reaped it.
        until(lambda: not Path(f"/proc/{pid}").exists(), "the front has reaped the receiver")
        assert_serves(engine, model, push(source, engine, via=sender).version)
        assert len(ports & {port for _, port in sender._receivers}) == 1


def test_a_push_whose_receiver_dies_says_why_and_leaves_nothing_open(engine, model):
    source = ModuleSource(model)

    class Killing(ModuleSource):
        kills = False

        def resident(self) -> None:
            """Each tensor is asked for."""

        def manifest(self, *, checksums: bool = True):
            made = super().manifest(checksums=checksums)
            self.kills = True  # when it is read again, to be sent
            return made

        def __iter__(self):
            for number, item in enumerate(super().__iter__()):
                if self.kills and number == 8:
                    until(lambda: engine.rollout.info().state.open_update_received_bytes > 0, "bytes arrive")
                    os.kill(receiver_pids(engine)[0], signal.SIGKILL)
                yield item

    with TensorStream(chunk_bytes=SMALL) as sender, pytest.raises(PushError) as failed:
        push(Killing(model), engine, via=sender)
    assert failed.value.reason == "PEER_LOST"
    assert failed.value.committed == ()
    until_closed(engine)
    assert_serves(engine, model, push(source, engine).version)


@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
def test_a_client_that_hangs_up_breaks_its_stream(staging, engine, model):
    source, before = ModuleSource(model), engine.weights.checksums()
    begun = begin_streams(engine, source, staging=staging)
    chunks = list(chunks_of(source, SMALL))
    stop = threading.Event()

    def stream() -> Iterator[bytes]:
        yield header(update_id=begun.update_id).SerializeToString()
        yield from map(chunk_message, chunks[: len(chunks) // 2])
        stop.wait(20)

    with engine.weights.at_port(begun.stream_ports[0]) as receiver:
        call = receiver._stub.UpdateWeightsFromTensor.future(stream(), timeout=30)
        until(lambda: half_arrived(engine, source), "half of the bytes arrive")
        call.cancel()
        until_closed(engine)
        stop.set()
    if staging is Staging.HOST:
        assert engine.weights.checksums() == before
    else:
        assert engine.rollout.info().state.status == "not_serving"
    assert_serves(engine, model, push(source, engine).version)


def test_an_abort_ends_streams_that_wait(engine, model):
    source = ModuleSource(model)
    with Halves(engine, source) as halves:
        until(lambda: half_arrived(engine, source), "half of the bytes arrive")
        start = time.monotonic()
        assert engine.weights.abort(halves.begun.update_id) is True
        assert set(halves.reasons()) <= {"UNKNOWN_UPDATE", "PEER_LOST"}
        assert time.monotonic() - start < 10.0
    assert_serves(engine, model, push(source, engine).version)


def test_a_bad_chunk_of_one_stream_ends_the_other(engine, model):
    source = ModuleSource(model)
    twice = next(chunks_of(source, SMALL))
    with Halves(engine, source) as halves:
        until(lambda: half_arrived(engine, source), "half of the bytes arrive")
        with clients_at(engine, halves.begun.stream_ports[:1]) as (receiver,):
            with pytest.raises(RollsyncError) as refused:
                receiver.update_from_tensor(halves.begun.update_id, [twice], says_end=True)
            assert (refused.value.code, refused.value.reason) == ("INVALID_ARGUMENT", "BAD_CHUNK")
        assert halves.reasons() == ["BAD_CHUNK", "BAD_CHUNK"]
    assert_serves(engine, model, push(source, engine).version)


def failure(receiver: WeightsClient, messages: Sequence[bytes]) -> tuple[grpc.StatusCode, str, str]:
    """(status, reason, details) of a stream of serialised messages."""
    with pytest.raises(grpc.RpcError) as caught:
        receiver._stub.UpdateWeightsFromTensor(iter(messages), timeout=20)
    code, reason, _ = reason_of(caught.value)
    return code, reason, caught.value.details()


def test_streams_that_no_engine_takes(engine, model):
    source = ModuleSource(model)
    begun = begin_streams(engine, source)
    head = header(update_id=begun.update_id).SerializeToString()
    first = chunk_message(next(chunks_of(source, SMALL)))
    end = pb.UpdateWeightsFromTensorRequest(end={"num_chunks": 2}).SerializeToString()
    torn = pb.UpdateWeightsFromTensorRequest(chunk={"data": bytes(8), "packed": True, "tensor": 1})
    with clients_at(engine, begun.stream_ports[:1]) as (receiver,):
        for messages, text in (
            ([], "must be the header"),
            ([first], "must be the header"),
        ):
            code, reason, details = failure(receiver, messages)
            assert (code, reason) == (CODE.INVALID_ARGUMENT, "INVALID_UPDATE")
            assert text in details
        code, reason, details = failure(receiver, [b"\x12\x05no"])
        assert (code, reason) == (CODE.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert "cannot be parsed" in details
        unknown = header(update_id="nothing").SerializeToString()
        assert failure(receiver, [unknown, first])[:2] == (CODE.NOT_FOUND, "UNKNOWN_UPDATE")
        too_large = chunk_message((0, 0, bytes(5 << 20)))
        assert failure(receiver, [unknown, too_large])[0] in (CODE.RESOURCE_EXHAUSTED, CODE.NOT_FOUND)
        assert failure(receiver, [head, too_large])[0] is CODE.RESOURCE_EXHAUSTED
    until_closed(engine)
    for messages, text in (
        ([first, head], "message 2 of the stream is no chunk"),
        ([first, end], "message 2 of the stream ends 2 chunks, but 1 came"),
        ([torn.SerializeToString()], "message 1 of the stream is packed, but names tensor 1"),
        ([first, b"\xff\xff"], "cannot be parsed"),
    ):
        begun = begin_streams(engine, source)
        head = header(update_id=begun.update_id).SerializeToString()
        with clients_at(engine, begun.stream_ports[:1]) as (receiver,):
            code, reason, details = failure(receiver, [head, *messages])
        expected = "INVALID_REQUEST" if "parsed" in text else "INVALID_UPDATE"
        assert (code, reason) == (CODE.INVALID_ARGUMENT, expected)
        assert text in details
        until_closed(engine)
    assert_serves(engine, model, push(source, engine).version)


def test_a_receiver_answers_nothing_else(engine, model):
    begun = begin_streams(engine, ModuleSource(model))
    with clients_at(engine, begun.stream_ports) as receivers:
        for receiver in receivers:
            with pytest.raises(RollsyncError) as refused:
                receiver.abort(begun.update_id)
            assert refused.value.code == "UNIMPLEMENTED"
    assert engine.weights.abort(begun.update_id) is True


def test_only_so_many_streams_at_once(engine, model):
    source = ModuleSource(model)
    begun = begin_streams(engine, source)
    gate = threading.Event()

    def one(chunks: list[Chunk]) -> Iterator[Chunk]:
        yield from chunks
        gate.wait(30)

    with clients_at(engine, begun.stream_ports[:1]) as (receiver,):
        chunks = list(chunks_of(source, SMALL))
        calls = [
            beside(receiver.update_from_tensor, begun.update_id, one(chunks[k : k + 1]), timeout_s=30)
            for k in range(16)
        ]
        sizes = [len(data) for _, _, data in chunks[:16]]
        until(
            lambda: engine.rollout.info().state.open_update_received_bytes == sum(sizes),
            "all streams are open",
        )
        with pytest.raises(RollsyncError) as refused:
            receiver.update_from_tensor(begun.update_id, [])
        assert refused.value.reason == "WRONG_STATE"
        assert "16 streams" in refused.value.message
        assert engine.greedy(PROMPT, ignore_eos=True).finish_reason == "length"
        gate.set()
        for call in calls:
            call.result(20)
        receiver.update_from_tensor(begun.update_id, chunks[16:])
    assert_serves(engine, model, engine.weights.commit(begun.update_id).version)


# -------------------------------------------------------------------- the edge


def test_receivers_want_the_token_and_end_with_the_front(model_dir, model):
    source = ModuleSource(model)
    with serve(model_dir, "--num-pages", "64", "--stream-receivers", "1", token="SENTINEL-1") as running:
        begun = begin_streams(running, source, num_streams=1)
        address = f"127.0.0.1:{begun.stream_ports[0]}"
        for token in (None, "SENTINEL-", "SENTINEL-2"):
            with WeightsClient(address, token=token) as stranger, pytest.raises(RollsyncError) as refused:
                stranger.update_from_tensor(begun.update_id, chunks_of(source))
            assert (refused.value.code, refused.value.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        with clients_at(running, begun.stream_ports) as (receiver,):
            receiver.update_from_tensor(begun.update_id, chunks_of(source), says_end=True)
        assert running.weights.commit(begun.update_id).verified
        pids = receiver_pids(running)
        assert len(pids) == 1
        secrets = [Path(f"/proc/{pids[0]}/{what}").read_bytes() for what in ("cmdline", "environ")]
        assert not any(b"SENTINEL" in secret for secret in secrets)
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_killed_engine_process_ends_streams_with_its_reason(model_dir, model):
    source = ModuleSource(model)
    with serve(model_dir, "--num-pages", "64", "--stream-receivers", "2") as running:
        with pytest.raises(RollsyncError):
            begin(running, Named([("none.such", torch.zeros(2))]), num_streams=2)
        assert children_of(running, "server.receiver") == [], "an update that is refused starts none"
        with Halves(running, source) as halves:
            until(lambda: half_arrived(running, source), "half of the bytes arrive")
            os.kill(children_of(running, "engine_main")[0], signal.SIGKILL)
            assert halves.reasons() == ["ENGINE_DEAD", "ENGINE_DEAD"]
