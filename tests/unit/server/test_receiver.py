"""A receiver's server, in this process, with the engine's end of its link played by the test."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import msgspec
import pytest

from rollout_engine import messages as m
from rollout_engine.channel import Channel
from rollout_engine.server import receiver
from rollout_engine.server.auth import TlsContents
from rollout_engine.server.receiver import METHOD, SERVICE, ReceiverConfig, Stream, serve
from rollout_engine.server.receiver_link import EngineLink
from rollout_engine.v1 import weights_pb2 as pb
from rollout_engine.v1.weights_pb2_grpc import WeightsStub
from tests.wire.fake_replies import update_reply
from tests.wire.front import reason_of, wait_until
from tests.wire.test_front_auth import make_certificate
from tests.wire.update_messages import chunk, header, packed_chunk
from weight_updater.requests import FromTensor, UpdateState
from weight_updater.shm import SharedSegment

CODE = grpc.StatusCode
SLOT_BYTES = 1004


class Engine:
    """Takes chunks out of a ring of two slots, `seconds` after each came, and answers at the end of a stream.

    With `fails_after` chunks it refuses the update.
    """

    def __init__(self, *, seconds: float = 0.0, fails_after: int = 0) -> None:
        self.seen: list[m.Command] = []
        self.data: dict[int | None, bytearray] = {}
        self._seconds, self._fails_after = seconds, fails_after
        ours, theirs = socket.socketpair()
        self._channel, self._receivers = Channel(ours), Channel(theirs)
        self.segment = SharedSegment.create(2 * SLOT_BYTES)
        self._channel.send(m.UploadRing(self.segment.descriptor.name, 2, SLOT_BYTES))
        self.link = EngineLink(self._receivers, first_call_id=100)
        self.link.start()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for command in self._channel.commands():
            self.seen.append(command)
            if isinstance(command, m.Chunk):
                self._take(command)
                num_chunks = sum(isinstance(one, m.Chunk) for one in self.seen)
                if num_chunks == self._fails_after:
                    error = m.ErrorInfo("refused", "BAD_CHUNK", "a chunk overlaps")
                    self._channel.send(m.Reply(command.call_id, None, error, 5, 1))
            elif isinstance(command, m.EndOfChunks):
                reply = update_reply("u", UpdateState.RECEIVED, 5, 5, 1)
                self._channel.send(m.Reply(command.call_id, msgspec.to_builtins(reply), None, 5, 1))

    def _take(self, one: m.Chunk) -> None:
        time.sleep(self._seconds)
        start, tensor = one.slot * SLOT_BYTES, self.data.setdefault(one.tensor, bytearray())
        tensor += bytes(max(0, one.offset + one.nbytes - len(tensor)))
        tensor[one.offset : one.offset + one.nbytes] = self.segment.buf[start : start + one.nbytes]
        self._channel.send(m.ChunkTaken(one.call_id, one.slot))

    def of(self, kind: type[m.Command]) -> list:
        return [command for command in self.seen if isinstance(command, kind)]

    def close(self) -> None:
        self._channel.close()
        self.segment.close()


@contextlib.contextmanager
def receiving(engine: Engine, **config) -> Iterator[str]:
    """A receiver of this engine; gives its address."""
    settings = ReceiverConfig(
        **{"host": "127.0.0.1", "max_message_bytes": 1 << 20, "first_call_id": 100, **config}
    )
    server, port = serve(settings, engine.link)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
        engine.close()


@contextlib.contextmanager
def stub_of(address: str, credentials: grpc.ChannelCredentials | None = None) -> Iterator[WeightsStub]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, credentials, options)
    with channel:
        yield WeightsStub(channel)


def test_chunks_are_cut_to_slots_and_arrive_whole():
    engine, data = Engine(), os.urandom(5003)
    with receiving(engine) as address, stub_of(address) as stub:
        stream = iter([header(), chunk(1, 16, data), packed_chunk(256, b"12345678")])
        reply = stub.UpdateWeightsFromTensor(stream, timeout=10)
        assert reply.state == pb.UPDATE_STATE_RECEIVED
        assert engine.data == {1: bytes(16) + data, None: bytes(256) + b"12345678"}
        cuts = [(one.offset, one.nbytes) for one in engine.of(m.Chunk)]
        assert cuts[:2] == [(16, 1000), (1016, 1000)]
        assert engine.of(m.EndOfChunks) == [m.EndOfChunks(100, complete=True)]


def test_a_slow_engine_holds_the_client_back():
    engine, sent = Engine(seconds=0.05), []

    def stream() -> Iterator[pb.UpdateWeightsFromTensorRequest]:
        yield header()
        for index in range(20):
            sent.append(time.monotonic())
            yield chunk(0, index * 1000, os.urandom(1000))

    with receiving(engine) as address, stub_of(address) as stub:
        start = time.monotonic()
        stub.UpdateWeightsFromTensor(stream(), timeout=20)
        assert time.monotonic() - start >= 20 * 0.05
        assert len(engine.data[0]) == 20_000


def test_a_refusal_ends_the_stream_though_the_client_waits_and_frees_its_slots():
    engine, stop = Engine(fails_after=2), threading.Event()

    def stream() -> Iterator[pb.UpdateWeightsFromTensorRequest]:
        yield header()
        for index in range(2):
            yield chunk(0, index * 1000, bytes(1000))
        stop.wait(20)

    with receiving(engine) as address, stub_of(address) as stub:
        threads = threading.active_count()
        with pytest.raises(grpc.RpcError) as caught:
            stub.UpdateWeightsFromTensor(stream(), timeout=15)
        assert reason_of(caught.value) == (CODE.INVALID_ARGUMENT, "BAD_CHUNK", "refused")
        assert caught.value.details() == "a chunk overlaps"
        stop.set()
        wait_until(
            lambda: len(engine.link.ring._free) == 2 and threading.active_count() <= threads + 1,
            20,
            "the slots and the threads to be given back",
        )
        assert engine.of(m.EndOfChunks) == []


@pytest.mark.parametrize("says_end", [True, False])
def test_a_client_that_goes_away_after_its_last_chunk(says_end, monkeypatch):
    """With an end the stream was whole, whatever came of the client; without, it broke."""
    monkeypatch.setattr(receiver, "BREAK_NEWS_SECONDS", 20.0)  # the news of it may be late on a busy machine
    engine, end = Engine(), threading.Event()

    def stream() -> Iterator[pb.UpdateWeightsFromTensorRequest]:
        yield header()
        yield chunk(0, 0, bytes(8))
        if says_end:
            yield pb.UpdateWeightsFromTensorRequest(end={"num_chunks": 1})
        end.wait(20)  # never reached where the answer to the end came first

    with receiving(engine) as address, stub_of(address) as stub:
        call = stub.UpdateWeightsFromTensor.future(stream(), timeout=30)
        wait_until(lambda: bool(engine.of(m.EndOfChunks if says_end else m.Chunk)), 20, "the last message")
        call.cancel()
        wait_until(lambda: bool(engine.of(m.EndOfChunks)), 20, "the end")
        end.set()
        assert engine.of(m.EndOfChunks)[0].complete is says_end


def test_only_the_token_opens_it():
    engine = Engine()
    with receiving(engine, token="SENTINEL") as address, grpc.insecure_channel(address) as channel:
        for path in (f"/{SERVICE}/{METHOD}", f"/{SERVICE}/CommitUpdate", "/no.Such/Method"):
            call = channel.stream_unary(path)
            for metadata in ((), (("authorization", "Bearer x"),), (("authorization", "SENTINEL"),)):
                with pytest.raises(grpc.RpcError) as caught:
                    call(iter([header().SerializeToString()]), metadata=metadata, timeout=5)
                assert reason_of(caught.value) == (CODE.UNAUTHENTICATED, "UNAUTHENTICATED", "engine")
                assert "SENTINEL" not in str(caught.value)
        assert engine.seen == []
        allowed = (("authorization", "Bearer SENTINEL"),)
        answer = channel.stream_unary(f"/{SERVICE}/{METHOD}")(
            iter([header().SerializeToString()]), metadata=allowed, timeout=5
        )
        assert pb.UpdateWeightsResponse.FromString(answer).state == pb.UPDATE_STATE_RECEIVED
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE}/CommitUpdate")(b"", metadata=allowed, timeout=5)
        assert caught.value.code() is CODE.UNIMPLEMENTED


def test_mtls_wants_a_certificate_of_the_ca(tmp_path):
    for name, issuer in (("ca", None), ("server", "ca"), ("client", "ca"), ("stranger", None)):
        make_certificate(tmp_path, name, issuer)
    read = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tls = TlsContents(read["server.key"], read["server.crt"], read["ca.crt"])
    sent = msgspec.json.decode(msgspec.json.encode(tls), type=TlsContents)  # as a receiver gets it
    engine, outcomes = Engine(), {}
    with receiving(engine, tls=sent) as address:
        for name in ("client", "stranger"):
            credentials = grpc.ssl_channel_credentials(
                read["ca.crt"], read[f"{name}.key"], read[f"{name}.crt"]
            )
            with stub_of(address, credentials) as stub:
                try:
                    outcomes[name] = stub.UpdateWeightsFromTensor(iter([header()]), timeout=5).state
                except grpc.RpcError as error:
                    outcomes[name] = error.code()
    assert outcomes == {"client": pb.UPDATE_STATE_RECEIVED, "stranger": CODE.UNAVAILABLE}


def test_a_receiver_without_a_front_or_an_engine_ends():
    ours, theirs = socket.socketpair()
    engine_ours, engine_theirs = socket.socketpair()
    command = [sys.executable, "-m", "rollout_engine.server.receiver", "--front-fd", str(theirs.fileno())]
    command += ["--engine-fd", str(engine_theirs.fileno())]
    fds = (theirs.fileno(), engine_theirs.fileno())
    with theirs, engine_theirs:
        process = subprocess.Popen(command, pass_fds=fds, stderr=subprocess.PIPE, text=True)
    config = msgspec.json.encode(ReceiverConfig("127.0.0.1", 1 << 20, 1))
    ours.sendall(len(config).to_bytes(4, "little") + config)
    engine_ours.close()
    assert process.wait(20) == 1
    assert "the engine process closed its connection" in process.stderr.read()
    ours.close()


def test_one_stream_above_the_limit_is_refused_until_one_has_ended():
    engine, end = Engine(), threading.Event()

    def stream() -> Iterator[pb.UpdateWeightsFromTensorRequest]:
        yield header()
        end.wait(20)

    with receiving(engine, max_streams=2) as address, stub_of(address) as stub:
        with ThreadPoolExecutor(2) as pool:
            streams = [pool.submit(stub.UpdateWeightsFromTensor, stream(), timeout=20) for _ in range(2)]
            deadline = time.monotonic() + 10
            while len(engine.of(m.Update)) < 2:
                assert time.monotonic() < deadline, "two streams are not open"
                time.sleep(0.005)
            for _ in range(3):
                with pytest.raises(grpc.RpcError) as caught:
                    stub.UpdateWeightsFromTensor(iter([header()]), timeout=10)
                assert reason_of(caught.value) == (CODE.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS", "engine")
                assert caught.value.details().startswith("2 weight streams are open")
            end.set()
            assert {one.result(20).state for one in streams} == {pb.UPDATE_STATE_RECEIVED}
        last = stub.UpdateWeightsFromTensor(iter([header()]), timeout=10)
        assert last.state == pb.UPDATE_STATE_RECEIVED


class Leaving:
    """The context of a client that half-closes; the news of its break comes `seconds` later, if ever."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def add_callback(self, gone) -> None:
        if self._seconds is not None:
            threading.Timer(self._seconds, gone).start()


@pytest.mark.parametrize(("seconds", "complete"), [(0.01, False), (None, True)])
def test_news_of_a_break_may_come_a_moment_after_the_end(seconds, complete, monkeypatch):
    if seconds is not None:  # a busy machine may let the news wait for longer than a stream does
        monkeypatch.setattr(receiver, "BREAK_NEWS_SECONDS", 20.0)
    engine = Engine()
    stream = Stream(engine.link, FromTensor("u"), None)
    stream.run(iter([chunk(0, 0, bytes(8)).SerializeToString()]), Leaving(seconds))
    assert engine.of(m.EndOfChunks) == [m.EndOfChunks(100, complete=complete)]
    engine.close()
