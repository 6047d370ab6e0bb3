"""State, health and control: answered from the last snapshot, whatever the engine does, and when it dies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollout_engine.v1 import rollout_pb2 as pb
from rollout_engine.v1 import weights_pb2
from tests.wire.front import prompt, reason_of, serving, wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("", "rollout_engine.v1.Rollout", "rollout_engine.v1.Weights")


def health(front) -> set[int]:
    """The status of all three names."""
    stub = health_pb2_grpc.HealthStub(front.channel)
    return {stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status for name in SERVICES}


def info(front, timeout: float = 5.0) -> pb.GetEngineInfoResponse:
    return front.rollout.GetEngineInfo(pb.GetEngineInfoRequest(), timeout=timeout)


def test_info_describes_the_engine(tmp_path):
    with serving(tmp_path) as front:
        list(front.rollout.Generate(prompt(1, max_tokens=3), timeout=10))
        front.weights.CommitUpdate(weights_pb2.CommitUpdateRequest(update_id="u"), timeout=5)
        answer = info(front)
        assert answer.instance_id.startswith("fake-")
        assert (answer.vocab_size, answer.context_length, list(answer.eos_token_ids)) == (512, 1024, [3])
        assert answer.kv_capacity.kv_bytes == 800
        assert answer.forward_counts.eager == 3
        assert (answer.weight_version, answer.state.weight_version) == (6, 6)
        assert answer.state.status == pb.SERVING_STATUS_SERVING
        (update,) = answer.recent_updates
        assert (update.update_id, update.end, update.path, update.weight_version) == (
            "u",
            "committed",
            "tensor",
            6,
        )
        assert (update.seconds["pause"], update.seconds["whole"], update.ended_at) == (3.0, 8.0, 1000.5)
        unset = {f.name for f in answer.DESCRIPTOR.fields} - {f.name for f, _ in answer.ListFields()}
        assert unset == set()


def test_control_calls(tmp_path):
    with serving(tmp_path) as front:
        rollout = front.rollout
        pause = pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_RETRACT)
        assert rollout.PauseGeneration(pause, timeout=5).weight_version == 5
        assert front.commands("Pause")[-1]["mode"] == "retract"
        wait_until(lambda: info(front).state.status == pb.SERVING_STATUS_PAUSED, 20, "paused")
        assert health(front) == {SERVING}
        rollout.ContinueGeneration(pb.ContinueGenerationRequest(), timeout=5)
        wait_until(lambda: info(front).state.status == pb.SERVING_STATUS_SERVING, 20, "serving")
        assert rollout.FlushCache(pb.FlushCacheRequest(), timeout=5).num_pages == 7
        with pytest.raises(grpc.RpcError) as caught:
            rollout.PauseGeneration(pb.PauseGenerationRequest(mode=9), timeout=5)
        assert reason_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "engine")


def test_released_memory_is_not_serving_until_it_is_resumed(tmp_path):
    with serving(tmp_path) as front:
        released = front.rollout.ReleaseMemoryOccupation(pb.ReleaseMemoryOccupationRequest(), timeout=5)
        assert (released.released_bytes, released.weight_version) == (300, 5)
        assert front.commands("ReleaseMemory")[-1]["tags"] == ["weights", "kv_cache", "graphs"]
        wait_until(lambda: health(front) == {NOT_SERVING}, 20, "not serving")
        assert len(info(front).state.released_tags) == 3
        request = pb.ResumeMemoryOccupationRequest(tags=[pb.MEMORY_TAG_WEIGHTS])
        assert front.rollout.ResumeMemoryOccupation(request, timeout=5).needs_update
        wait_until(lambda: len(info(front).state.released_tags) == 2, 20, "weights resumed")
        rest = front.rollout.ResumeMemoryOccupation(pb.ResumeMemoryOccupationRequest(), timeout=5)
        assert (rest.resumed_bytes, rest.needs_update) == (200, False)
        wait_until(lambda: health(front) == {SERVING}, 20, "serving")


def test_torn_weights_are_not_serving(tmp_path):
    with serving(tmp_path, status="not_serving", reason="torn: wrote part of version 6") as front:
        assert health(front) == {NOT_SERVING}
        assert info(front).state.not_serving_reason == "torn: wrote part of version 6"
        with pytest.raises(grpc.RpcError) as caught:
            list(front.rollout.Generate(prompt(1), timeout=5))
        assert reason_of(caught.value) == (grpc.StatusCode.UNAVAILABLE, "NOT_SERVING", "engine")


def test_watch_sends_the_state_at_once_and_on_each_change(tmp_path):
    with serving(tmp_path) as front:
        stream = front.rollout.WatchEngine(pb.WatchEngineRequest(), timeout=10)
        first = next(stream)
        assert (first.status, first.weight_version) == (pb.SERVING_STATUS_SERVING, 5)
        front.weights.CommitUpdate(weights_pb2.CommitUpdateRequest(update_id="u"), timeout=5)
        assert next(state for state in stream if state.commit_sequence == 1).weight_version == 6
        front.rollout.PauseGeneration(pb.PauseGenerationRequest(), timeout=5)
        assert next(state for state in stream if state.paused_by == "user").status == pb.SERVING_STATUS_PAUSED
        stream.cancel()


def test_a_silent_engine_does_not_hold_the_front_up(tmp_path):
    with serving(tmp_path, silent_on="FlushCache", step_s=0.01) as front:
        stream = front.rollout.Generate(prompt(1, max_tokens=900, request_id="r"), timeout=30)
        next(stream)
        flush = front.rollout.FlushCache.future(pb.FlushCacheRequest(), timeout=30)
        front.wait_for("FlushCache")
        took = []
        for ids in (["r", "x"], ["x"], ["x"]):
            start = time.monotonic()
            assert health(front) == {SERVING}
            assert info(front).weight_version == 5
            assert next(front.rollout.WatchEngine(pb.WatchEngineRequest(), timeout=5)).weight_version == 5
            answer = front.rollout.Abort(pb.AbortRequest(request_ids=ids), timeout=5)
            assert (list(answer.aborted_request_ids), list(answer.unknown_request_ids)) == (ids[:-1], ["x"])
            took.append(time.monotonic() - start)
        assert min(took) < 1.0, f"not within a second, though asked three times: {took}"
        flush.cancel()


def test_a_dead_engine_fails_everyone_who_waits_and_is_not_serving(tmp_path):
    with serving(tmp_path, die_on="FlushCache", step_s=0.02) as front:
        stream = front.rollout.Generate(prompt(1, max_tokens=900), timeout=30)
        next(stream)
        stop = threading.Event()

        def chunks():
            yield weights_pb2.UpdateWeightsFromTensorRequest(header={"update_id": "u"})
            stop.wait(20)

        upload = front.weights.UpdateWeightsFromTensor.future(chunks(), timeout=30)
        front.wait_for("Update")
        watch = front.rollout.WatchEngine(pb.WatchEngineRequest(), timeout=30)
        next(watch)
        failed = []
        for call in (
            lambda: front.rollout.FlushCache(pb.FlushCacheRequest(), timeout=10),
            lambda: list(stream),
            upload.result,
            lambda: list(front.rollout.Generate(prompt(1), timeout=5)),
            lambda: front.weights.CommitUpdate(weights_pb2.CommitUpdateRequest(update_id="u"), timeout=5),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            failed.append((*reason_of(caught.value), caught.value.details()))
        stop.set()
        text = "the engine process was killed by SIGKILL"
        assert failed == [(grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", "engine", text)] * 5
        last = next(state for state in watch if state.status == pb.SERVING_STATUS_NOT_SERVING)
        assert (last.not_serving_reason, last.num_running) == (text, 0)
        assert health(front) == {NOT_SERVING}
        assert info(front).state.not_serving_reason == text
        items = pb.GenerateBatchRequest(requests=[prompt(1)])
        (answer,) = front.rollout.GenerateBatch(items, timeout=5)
        assert answer.error.reason == "ENGINE_DEAD"


def test_health_watch_follows_the_engine(tmp_path):
    with serving(tmp_path, die_on="FlushCache") as front:
        watch = health_pb2_grpc.HealthStub(front.channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert next(watch).status == SERVING
        # Held on to: a call that nobody holds is cancelled, perhaps before it is sent.
        dying = front.rollout.FlushCache.future(pb.FlushCacheRequest(), timeout=5)
        assert next(watch).status == NOT_SERVING
        assert dying.exception() is not None
        watch.cancel()


@pytest.mark.case("B052")
def test_an_unexpected_exception_does_not_reach_the_client(tmp_path, caplog):
    with serving(tmp_path, bad_result_on="FlushCache") as front:
        with pytest.raises(grpc.RpcError) as caught:
            front.rollout.FlushCache(pb.FlushCacheRequest(), timeout=5)
        assert reason_of(caught.value) == (grpc.StatusCode.INTERNAL, "INTERNAL", "engine")
        assert "string indices" not in caught.value.details()
        assert "string indices" in caplog.text
        assert info(front).weight_version == 5


def test_reflection_lists_the_services(tmp_path):
    with serving(tmp_path) as front:
        stub = reflection_pb2_grpc.ServerReflectionStub(front.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=5)
        names = {service.name for service in answer.list_services_response.service}
        assert {*SERVICES[1:], "grpc.health.v1.Health"} <= names


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
END_OF_STREAM, END_OF_HEADERS, ACK = 1, 4, 1


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """A frame of HTTP/2; stream 0 is the connection itself."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def read_frames(raw: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """(kind, flags, payload) of what comes, until the other side closes or says nothing for 5 s."""
    with raw.makefile("rb") as stream:
        while len(head := stream.read(9)) == 9:
            yield head[3], head[4], stream.read(int.from_bytes(head[:3]))


def empty_call(path: str, authority: str) -> bytes:
    """A call with an empty request, on stream 1; header fields as they are, neither indexed nor coded."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": authority,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(HEADERS, block, flags=END_OF_HEADERS, stream=1) + frame(
        DATA, bytes(5), flags=END_OF_STREAM, stream=1
    )


@pytest.mark.case("B120")
@pytest.mark.parametrize("gap_s", [0.0, 0.02])
def test_pings_of_a_client_pass_through_a_silent_call(gap_s, tmp_path):
    """However often they come. A default server says GOAWAY (too many pings) after the third, but gRPC's own
    Python clients ping once a second at most, whatever they are told: so the frames are written here.
    """
    with serving(tmp_path, delay_on={"FlushCache": 1.0}) as front:
        host, _, port = front.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            call = empty_call("/rollout_engine.v1.Rollout/FlushCache", front.address)
            raw.sendall(PREFACE + frame(SETTINGS) + call)
            sent = [number.to_bytes(8) for number in range(20)]
            for payload in sent:
                raw.sendall(frame(PING, payload))
                time.sleep(gap_s)
            answered, replies = [], []
            for kind, flags, payload in read_frames(raw):
                assert kind != GOAWAY, payload
                if kind == PING and flags & ACK:
                    answered.append(payload)
                if kind == DATA:
                    replies.append(payload[5:])
                if len(answered) == len(sent) and replies:
                    break
            assert answered == sent
            assert pb.FlushCacheResponse.FromString(replies[0]).num_pages == 7
