"""Raw calls to an engine: any bytes as a request, and what came of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import MethodDescriptor

from rollout_engine.v1 import rollout_pb2, weights_pb2
from tests.engines import RunningEngine
from trainers_adapters.errors import from_rpc_error

SERVICES = (
    rollout_pb2.DESCRIPTOR.services_by_name["Rollout"],
    weights_pb2.DESCRIPTOR.services_by_name["Weights"],
)
METHODS = {method.name: method for service in SERVICES for method in service.methods}
MAX_ANSWERS = 4
"""Answers of a stream that are read before it is cancelled."""


@dataclass(frozen=True)
class Outcome:
    """code: of the status. reason: the engine's word for what was wrong; "" if nothing was."""

    code: str
    reason: str = ""
    message: str = ""

    @property
    def is_typed(self) -> bool:
        """An answer, or an error that says what was wrong and did not come of a bug."""
        return self.code == "OK" or (bool(self.reason) and self.reason not in ("UNREACHABLE", "INTERNAL"))


def call(
    channel: grpc.Channel, method: MethodDescriptor, requests: Sequence[bytes], seconds: float
) -> Outcome:
    """Send messages as they are (one, unless the method takes a stream)."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.client_streaming:
            stub = channel.stream_unary(path, request_serializer=_as_it_is, response_deserializer=_as_it_is)
            stub(iter(requests), timeout=seconds)
        elif method.server_streaming:
            stub = channel.unary_stream(path, request_serializer=_as_it_is, response_deserializer=_as_it_is)
            answers = stub(requests[0], timeout=seconds)
            for _ in itertools.islice(answers, MAX_ANSWERS):
                pass
            answers.cancel()
        else:
            stub = channel.unary_unary(path, request_serializer=_as_it_is, response_deserializer=_as_it_is)
            stub(requests[0], timeout=seconds)
    except grpc.RpcError as error:
        told = from_rpc_error(error, "the engine")
        return Outcome(told.code, told.reason, told.message)
    return Outcome("OK")


SECONDS = 20.0
WAITING_SECONDS = 0.3
MAY_WAIT = {"WatchEngine", "Generate", "GenerateBatch", "Score", "InitWeightsUpdateGroup", "BeginUpdate"}
"""Calls that may rightly take as long as the caller lets them: for a change, a peer, a paused engine."""


def call_and_check(
    channel: grpc.Channel, name: str, requests: Sequence[bytes], *, may_wait: bool = True
) -> Outcome:
    """Call; fail if it hangs, or ends in an error without a reason, or with that of a bug.

    Args:
        may_wait: whether a call of MAY_WAIT may wait now.
    """
    may_wait = may_wait and name in MAY_WAIT
    seconds = WAITING_SECONDS if may_wait else SECONDS
    outcome = call(channel, METHODS[name], requests, seconds)
    if outcome.reason == "DEADLINE":
        assert may_wait, f"{name} hung for {seconds} s"
    else:
        assert outcome.is_typed, f"{name}: {outcome}"
    return outcome


def tidy(engine: RunningEngine) -> None:
    """Let no example decide what the next one finds; fails if an engine does not answer any more."""
    state = engine.rollout.info(timeout_s=SECONDS).state
    if state.open_update_id:
        engine.weights.abort(state.open_update_id)
    engine.rollout.abort(all=True)
    engine.rollout.resume_memory()
    engine.rollout.resume()


def _as_it_is(data: bytes) -> bytes:
    return data
