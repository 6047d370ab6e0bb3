"""The wire: large tensors, clients that go away, and calls whose answer was lost."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import grpc
import pytest
import torch

from rollout_engine.messages import Chunk, command_decoder, encoder
from rollout_engine.v1 import rollout_pb2 as pb
from rollout_engine.v1 import rollout_pb2_grpc, weights_pb2
from tests.engines import RunningEngine
from tests.unit.adapters.fake_engine import FakeEngine, serving
from tests.unit.weight_updater.tiny_target import make_updater, send
from tests.wire.front import serving as serving_front
from tests.wire.trainer import PROMPT, until
from tests.wire.update_messages import chunks, header
from trainers_adapters import RolloutClient, RollsyncError
from trainers_adapters.weights_calls import update_from_tensor
from weight_updater.arena import Arena, SlotSpec, StorageSpec, WeightTarget
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import BeginUpdate, Manifest, Path, Staging, TensorSpec

# ---------------------------------------------------------------- sizes


@pytest.mark.case("B118")
@pytest.mark.parametrize(("max_message_bytes", "num_mib"), [(64 << 10, 8), (1 << 20, 64), (16 << 20, 64)])
def test_a_default_client_moves_large_tensors_whatever_the_limit(max_message_bytes, num_mib, tmp_path):
    """In chunks below both ends' limits; one that is above is refused, and nothing of it is taken."""
    data = bytes(range(256)) * 4096  # 1 MiB
    limit = min(max_message_bytes, 4 << 20)
    with serving_front(tmp_path, config={"max_message_bytes": max_message_bytes}) as front:
        piece = min(limit // 2, len(data))
        stream = [header()]
        for mib in range(num_mib):
            stream += chunks(data, piece, tensor=mib)
        reply = front.weights.UpdateWeightsFromTensor(iter(stream), timeout=30)
        assert reply.num_bytes == num_mib << 20
        if max_message_bytes < 4 << 20:
            with pytest.raises(grpc.RpcError) as refused:
                front.weights.UpdateWeightsFromTensor(
                    iter([header(), *chunks(data * 2, 2 << 20)]), timeout=30
                )
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


ROWS, COLUMNS = 262_144, 4_200
"""2.2 GB in bfloat16: more bytes than a signed 32-bit number counts."""


def huge_target() -> WeightTarget:
    """One tensor of 2.2 GB whose memory is taken only where it is written."""
    shape = (ROWS, COLUMNS)
    arena = Arena([StorageSpec("embed", torch.bfloat16, shape, (SlotSpec("embed.weight", shape),))])
    parameter = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    buffer = torch.frombuffer(mmap.mmap(-1, arena.nbytes), dtype=torch.uint8)
    return WeightTarget(arena, {"embed": parameter}, torch.device("cpu"), buffer=buffer)


@pytest.mark.case("B119")
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_beyond_two_gigabytes_land_where_they_belong(packed):
    target = huge_target()
    nbytes = target.arena.nbytes
    assert nbytes > 1 << 31
    updater = make_updater(target)
    manifest = Manifest((TensorSpec("embed.weight", "bfloat16", (ROWS, COLUMNS)),))
    begin = BeginUpdate(Path.TENSOR, manifest=manifest, staging=Staging.NONE, skip_checksums=True)
    update_id = updater.begin(begin, updater.resolve(begin), paused=False).update_id
    index = None if packed else 0
    places = [0, (1 << 31) - 16, 1 << 31, (1 << 31) + 64, nbytes - 16]
    parts = [torch.arange(16, dtype=torch.uint8) + 16 * i for i in range(len(places))]
    order = [3, 0, 4, 2, 1]
    reply = send(updater, update_id, iter([(index, places[i], parts[i]) for i in order]))
    assert reply.num_bytes == 16 * len(places)
    for at, part in zip(places, parts, strict=True):
        assert torch.equal(target.buffer[at : at + 16], part)
    assert not target.buffer[(1 << 31) + 16 : (1 << 31) + 64].any()
    with pytest.raises(UpdateRefused, match=f"embed.weight with 80 of {nbytes} bytes") as lost:
        updater.commit(update_id)
    assert lost.value.reason is Reason.INCOMPLETE
    with pytest.raises(Exception, match="overlaps"):
        send(updater, update_id, iter([(index, (1 << 31) + 64, parts[3])]))


@pytest.mark.case("B119")
def test_offsets_beyond_two_gigabytes_cross_every_border():
    far = 5 << 31
    call = update_from_tensor("u", [(0, far, b"12345678")])
    _, message = list(call.request)
    assert weights_pb2.UpdateWeightsFromTensorRequest.FromString(message).chunk.offset == far
    assert command_decoder.decode(encoder.encode(Chunk(1, 0, far, 2, 8))) == Chunk(1, 0, far, 2, 8)


# ---------------------------------------------------------------- clients that go away


def stub_of(served: RunningEngine) -> tuple[grpc.Channel, rollout_pb2_grpc.RolloutStub]:
    channel = grpc.insecure_channel(served.address, (("grpc.use_local_subchannel_pool", 1),))
    return channel, rollout_pb2_grpc.RolloutStub(channel)


def request(**fields) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=440, ignore_eos=True, temperature=0.0)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling, **fields)


def stream(stub: rollout_pb2_grpc.RolloutStub, number: int):
    call = stub.Generate(request(request_id=f"gone-{number}"), timeout=30)
    next(call)
    return call


def batch(stub: rollout_pb2_grpc.RolloutStub, number: int):
    items = [request(request_id=f"gone-{number}-{i}") for i in range(2)]
    return stub.GenerateBatch(pb.GenerateBatchRequest(requests=items), timeout=30)


def score(stub: rollout_pb2_grpc.RolloutStub, number: int):
    return stub.Score.future(
        pb.ScoreRequest(sequences=[pb.TokenIds(ids=[5 + number % 50] * 400)] * 4), timeout=30
    )


def flushed(served: RunningEngine) -> bool:
    """Whether the cache could be flushed, which takes that nothing runs: the state is an earlier moment's."""
    try:
        served.rollout.flush_cache()
    except RollsyncError as error:
        if error.reason != "BUSY":
            raise
        return False
    state = served.rollout.info().state
    return not state.num_running + state.num_waiting


def drop_channel(channel: grpc.Channel, call) -> None:
    channel.close()


def cancel(channel: grpc.Channel, call) -> None:
    call.cancel()


@pytest.mark.case("B121")
@pytest.mark.case("B122")
@pytest.mark.parametrize("leave", [cancel, drop_channel])
@pytest.mark.parametrize("start", [stream, batch, score])
def test_what_a_client_leaves_behind_is_given_back(start: Callable, leave, served: RunningEngine):
    before = served.rollout.info().state.num_generated_tokens
    for number in range(10):
        channel, stub = stub_of(served)
        leave(channel, start(stub, number))
        channel.close()
    names = [f"gone-{number}{item}" for number in range(10) for item in ("", "-0", "-1")]
    # A call that was left at once may arrive after others that were made later, on connections of their own.
    until(lambda: flushed(served) and not served.rollout.abort(names).aborted, "all have come and ended")
    state = served.rollout.info().state
    assert state.num_generated_tokens - before < 10 * 440 / 2, "they ended early, not by themselves"
    assert state.num_free_pages == state.num_total_pages
    found = served.rollout.abort(["gone-0", "gone-0-0", "unknown"])
    assert (found.aborted, found.unknown) == ([], ["gone-0", "gone-0-0", "unknown"]), "never a bare OK"


@pytest.mark.case("B122")
def test_an_abort_of_somebody_elses_request_is_effective(served: RunningEngine):
    channel, stub = stub_of(served)
    with channel:
        call = stub.Generate(request(request_id="theirs"), timeout=30)
        first = next(call)
        found = served.rollout.abort(["theirs", "nobody's"])
        assert (found.aborted, found.unknown) == (["theirs"], ["nobody's"])
        messages = [first, *call]
        assert messages[-1].finish_reason == pb.FINISH_REASON_ABORT
        assert 0 < sum(len(message.token_ids) for message in messages) < 440


# ---------------------------------------------------------------- answers that are lost


LOST = (grpc.StatusCode.UNAVAILABLE, "", "connection reset")


@pytest.mark.case("B124")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("ContinueGeneration", lambda client: client.resume()),
        ("GetEngineInfo", lambda client: client.info()),
    ],
)
def test_a_control_call_whose_answer_was_lost_is_made_again(name, call):
    engine = FakeEngine()
    engine.once[name] = LOST
    with serving(engine) as address, RolloutClient(address) as client:
        call(client)
    assert engine.events.count(name) == 2
