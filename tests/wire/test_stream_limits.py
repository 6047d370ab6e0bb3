"""Limits on streams: one more is told which limit it met, and whatever ends a fault is answered beside it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from rollout_engine.server import metrics as names
from rollout_engine.server.app import SERVICES
from rollout_engine.server.stream_limits import KINDS
from rollout_engine.v1 import rollout_pb2 as pb
from rollout_engine.v1 import weights_pb2 as wpb
from tests.wire.front import TIMEOUT_S, Front, prompt, reason_of, serving, wait_until

TOKEN = "a-long-secret"
BEARER = (("authorization", f"Bearer {TOKEN}"),)
LIMITS = {"generate": 3, "weight": 2, "watch": 1, "health": 2}
METHODS = [(kind, method) for kind, methods in KINDS.items() for method in methods]
FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS", "engine")


@pytest.fixture(scope="module")
def front(tmp_path_factory) -> Iterator[Front]:
    config = {f"max_{kind}_streams": limit for kind, limit in LIMITS.items()} | {"token": TOKEN}
    with serving(tmp_path_factory.mktemp("model"), config=config) as made:
        yield made


def num_open(front: Front) -> dict[str, float]:
    """As the metrics have it."""
    values = front.on_loop(lambda: front.running.observers.tally.values(None))
    return {kind: values.number(names.STREAMS, kind) for kind in KINDS}


def open_silent(front: Front, method: str, silence: threading.Event, metadata=BEARER):
    """A stream that says nothing, not even its request, until it is cancelled."""

    def say_nothing() -> Iterator[bytes]:
        silence.wait(20)
        yield from ()

    return front.channel.stream_stream(method)(say_nothing(), metadata=metadata, timeout=20)


@contextlib.contextmanager
def filled(front: Front, *methods: str) -> Iterator[list[grpc.Call]]:
    """As many silent streams of these methods as their kinds may have."""
    silence, streams = threading.Event(), []
    kinds = {kind: method for kind, method in METHODS if method in methods}
    try:
        for kind, method in kinds.items():
            streams += [open_silent(front, method, silence) for _ in range(LIMITS[kind])]
        want = {kind: LIMITS[kind] if kind in kinds else 0 for kind in KINDS}
        wait_until(lambda: num_open(front) == want, TIMEOUT_S, f"{want} streams")
        yield streams
    finally:
        silence.set()
        for stream in streams:
            stream.cancel()
        wait_until(lambda: not any(num_open(front).values()), TIMEOUT_S, "that no stream is open")


def refused(front: Front, method: str, metadata=BEARER) -> grpc.RpcError:
    """What one more stream hears."""
    silence = threading.Event()
    with pytest.raises(grpc.RpcError) as caught:
        next(open_silent(front, method, silence, metadata))
    silence.set()
    return caught.value


def test_every_stream_that_there_is_has_a_limit():
    services = [pb.DESCRIPTOR.services_by_name["Rollout"], wpb.DESCRIPTOR.services_by_name["Weights"]]
    services += [
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    ]
    streams = {
        f"/{service.full_name}/{method.name}"
        for service in services
        for method in service.methods
        if method.server_streaming or method.client_streaming
    }
    assert {method for _, method in METHODS} == streams | {f"/{SERVICES[0]}/Score"}


@pytest.mark.parametrize(("kind", "method"), METHODS)
def test_one_more_is_refused_by_the_name_of_its_limit(front, kind, method):
    with filled(front, KINDS[kind][0]):
        error = refused(front, method)
        assert reason_of(error) == FULL
        assert error.details().startswith(f"{LIMITS[kind]} {kind} streams are open")
        assert f"--max-{kind}-streams" in error.details()
    with filled(front, method):  # it counts for this kind too, and there is room again
        assert reason_of(refused(front, KINDS[kind][0])) == FULL


def test_health_abort_and_pause_are_answered_when_everything_is_full(front):
    health = health_pb2_grpc.HealthStub(front.channel)
    options = {"metadata": BEARER, "timeout": 5}
    with filled(front, *(methods[0] for methods in KINDS.values())):
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1
        assert front.rollout.GetEngineInfo(pb.GetEngineInfoRequest(), **options).state.status
        answer = front.rollout.Abort(pb.AbortRequest(request_ids=["none"]), **options)
        assert answer.unknown_request_ids == ["none"]
        for call, request in (
            (front.rollout.PauseGeneration, pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP)),
            (front.rollout.ContinueGeneration, pb.ContinueGenerationRequest()),
            (front.weights.AbortUpdate, wpb.AbortUpdateRequest(update_id="none")),
        ):
            assert call(request, **options).weight_version == 5


def test_a_stream_is_counted_no_longer_however_it_ended(front):
    options = {"metadata": BEARER}
    for _ in range(LIMITS["generate"] + 1):
        assert len(list(front.rollout.Generate(prompt(1, max_tokens=2), timeout=5, **options))) > 0
        with pytest.raises(grpc.RpcError):  # refused for another reason
            list(front.rollout.Generate(prompt(max_tokens=2), timeout=5, **options))
        with pytest.raises(grpc.RpcError):  # the client's time ran out
            list(front.channel.stream_stream(KINDS["generate"][0])(_slowly(), timeout=0.05, **options))
        wait_until(lambda: not num_open(front)["generate"], TIMEOUT_S, "that no stream is open")


def _slowly() -> Iterator[bytes]:
    threading.Event().wait(0.2)
    yield from ()


def test_who_may_not_call_takes_no_room(front):
    for _ in range(LIMITS["generate"] + 1):
        error = refused(front, KINDS["generate"][0], metadata=())
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not any(num_open(front).values())


def test_refusals_are_counted_and_logged_once_in_a_while(tmp_path, caplog):
    with serving(tmp_path, config={"max_watch_streams": 1}) as front, caplog.at_level(logging.WARNING):
        silence = threading.Event()
        watching = open_silent(front, KINDS["watch"][0], silence, metadata=())
        wait_until(lambda: num_open(front)["watch"] == 1, TIMEOUT_S, "the first")
        for _ in range(5):
            assert reason_of(refused(front, KINDS["watch"][0])) == FULL
        values = front.on_loop(lambda: front.running.observers.tally.values(None))
        assert values.number(names.ERRORS, "engine", "TOO_MANY_STREAMS") == 5
        lines = [record.getMessage() for record in caplog.records if "streams_refused" in record.getMessage()]
        assert lines == ["streams_refused setting=max_watch_streams limit=1 refused=1"]
        silence.set()
        watching.cancel()
