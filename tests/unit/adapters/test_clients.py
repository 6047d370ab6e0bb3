"""The clients against a hand-written engine over real gRPC, sync and asyncio."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from rollout_engine.v1 import rollout_pb2 as rpb
from tests.unit.adapters.fake_engine import FakeEngine, serving
from trainers_adapters.aio import AsyncRolloutClient, AsyncWeightsClient
from trainers_adapters.clients import RolloutClient, WeightsClient
from trainers_adapters.errors import RollsyncError
from trainers_adapters.rollout_calls import Request
from weight_updater.requests import BeginUpdate, Manifest, Path, TensorSpec, UpdateState

UNREACHABLE = "127.0.0.1:1"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(engine) as where:
        yield where


def test_importing_the_clients_loads_no_torch() -> None:
    code = (
        "import sys, trainers_adapters, trainers_adapters.clients, trainers_adapters.aio; "
        "trainers_adapters.WeightsClient; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_generate_joins_the_parts_of_each_completion(engine: FakeEngine, address: str) -> None:
    with RolloutClient(address, token="secret") as client:
        completions = client.generate([1, 2, 3], n=2, max_tokens=4, temperature=0.5, logit_bias={5: -1.0})
    assert [c.index for c in completions] == [0, 1]
    assert completions[1].token_ids == [10, 11, 12, 13]
    assert completions[1].logprobs == [-0.5, -1.5, -0.5, -1.5]
    assert completions[1].weight_versions == [7, 7, 9, 9]
    assert completions[1].text == "<0><2>"
    assert completions[1].finish_reason == "length"
    assert completions[1].logprob_mode == "processed"
    sent = engine.generated[0]
    assert list(sent.token_ids.ids) == [1, 2, 3]
    assert (sent.sampling.n, sent.sampling.max_tokens, sent.sampling.temperature) == (2, 4, 0.5)
    assert [(b.token_id, b.bias) for b in sent.sampling.logit_bias] == [(5, -1.0)]
    assert not sent.sampling.HasField("seed")
    assert engine.metadata[0]["authorization"] == "Bearer secret"


def test_generate_stream_gives_parts_with_their_own_versions(address: str) -> None:
    with RolloutClient(address) as client:
        parts = list(client.generate_stream("hi", return_text=True))
    assert [part.token_ids for part in parts] == [[0, 1], [2, 3]]
    assert [part.weight_versions for part in parts] == [[7, 7], [9, 9]]
    assert [part.finish_reason for part in parts] == ["", "length"]


def test_generate_batch_is_in_the_order_of_the_prompts(address: str) -> None:
    with RolloutClient(address) as client:
        batch = client.generate_batch([[1], "two", Request([3], {"n": 1})], n=2)
    assert [[c.token_ids for c in group] for group in batch] == [
        [[0, 0], [0, 1]],
        [[1, 0], [1, 1]],
        [[2, 0]],
    ]


def test_a_refused_prompt_of_a_batch_is_named(address: str) -> None:
    with RolloutClient(address) as client:
        items = list(client.generate_batch_stream([[1], []]))
        with pytest.raises(RollsyncError, match="prompt 1 of the batch") as error:
            client.generate_batch([[1], []])
    assert error.value.reason == "EMPTY_PROMPT"
    assert error.value.code == "INVALID_ARGUMENT"
    assert [item.request_index for item in items] == [1, 0]
    assert items[0].error is not None
    assert items[0].error.reason == "EMPTY_PROMPT"
    assert items[1].completion is not None


def test_an_error_carries_code_reason_and_message(address: str) -> None:
    with RolloutClient(address) as client, pytest.raises(RollsyncError) as error:
        client.generate([])
    assert (error.value.code, error.value.reason) == ("INVALID_ARGUMENT", "EMPTY_PROMPT")
    assert error.value.message == "the prompt has no token"


def test_no_engine_is_unreachable_and_says_what_to_do() -> None:
    with RolloutClient(UNREACHABLE) as client, pytest.raises(RollsyncError, match="rollsync serve") as error:
        client.info()
    assert error.value.reason == "UNREACHABLE"
    assert error.value.unreachable


@pytest.mark.parametrize(
    ("option", "error", "match"),
    [
        ({"temprature": 1.0}, TypeError, "unknown sampling option 'temprature'"),
        ({"n": 0}, ValueError, "n is 0"),
        ({"logprobs": "cooked"}, ValueError, "logprobs is 'cooked'"),
    ],
)
def test_bad_sampling_options_are_refused_before_the_call(option, error, match):
    with RolloutClient(UNREACHABLE) as client, pytest.raises(error, match=match):
        client.generate([1], **option)


@pytest.mark.case("B124")
def test_idempotent_calls_are_retried_and_others_are_not(engine: FakeEngine, address: str) -> None:
    gone = (grpc.StatusCode.UNAVAILABLE, "", "connection reset")
    with RolloutClient(address) as client:
        engine.once["GetEngineInfo"] = gone
        assert client.info().architecture == "LlamaForCausalLM"
        engine.once["Generate"] = gone
        with pytest.raises(RollsyncError):
            client.generate([1])
        engine.once["GetEngineInfo"] = (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", "killed")
        with pytest.raises(RollsyncError, match="killed"):
            client.info()
    assert engine.events == ["GetEngineInfo", "GetEngineInfo", "Generate", "GetEngineInfo"]


def test_a_call_that_takes_too_long_ends_with_deadline(engine: FakeEngine, address: str) -> None:
    with RolloutClient(address) as client:
        engine.delay_s = 2.0
        with pytest.raises(RollsyncError, match="did not answer in time") as error:
            client.pause(timeout_s=0.1)
    assert error.value.reason == "DEADLINE"


def test_the_other_calls_of_the_rollout_service(engine: FakeEngine, address: str) -> None:
    with RolloutClient(address) as client:
        assert client.score([[1, 2, 3]])[0].logprobs == [-1.0, -1.0]
        assert client.abort("r1").unknown == ["r1"]
        assert client.pause("retract") == 2
        assert client.resume() == 0
        info = client.info()
        assert next(client.watch()).status == "serving"
    assert f"PauseGeneration {rpb.PAUSE_MODE_RETRACT}" in engine.events
    assert (info.eos_token_ids, info.state.status, info.state.num_total_pages) == ([2], "serving", 8)
    assert info.weights_path == "/models/last-good"


def test_an_update_step_by_step(engine: FakeEngine, address: str) -> None:
    manifest = Manifest((TensorSpec("w", "float32", (4,), checksum=2**64 - 1),))
    with WeightsClient(address) as client:
        begun = client.begin(BeginUpdate(path=Path.TENSOR, update_id="u1", version=5, manifest=manifest))
        assert begun.next_version == 5
        assert begun.lease_s == 60
        assert engine.begun[0].manifest.tensors[0].checksum == 2**64 - 1
        client.update_from_tensor("u1", [(0, 8, b"cdefghij"), (0, 0, b"01234567")])
        reply = client.commit("u1")
        assert (reply.state, reply.version, reply.num_tensors) == (UpdateState.COMMITTED, 5, 1)
        assert client.commit("u1") == reply
        assert client.checksums().by_name == {"w": 2**63 + 5}
        live = client.get_weights("w")["w"]
        assert (bytes(live.data), live.dtype, live.weight_version) == (b"01234567cdefghij", "float32", 5)
        assert not client.abort("u1")


def test_asyncio_clients_do_the_same(engine: FakeEngine, address: str) -> None:
    async def main() -> None:
        async with AsyncRolloutClient(address) as rollout, AsyncWeightsClient(address) as weights:
            (completion,) = await rollout.generate([1], max_tokens=4)
            assert completion.weight_versions == [7, 7, 9, 9]
            assert [part.text async for part in rollout.generate_stream([1])] == ["<0>", "<2>"]
            engine.once["GetEngineInfo"] = (grpc.StatusCode.UNAVAILABLE, "", "reset")
            assert (await rollout.info()).dtype == "float32"
            with pytest.raises(RollsyncError, match="no token"):
                await rollout.generate([])
            manifest = Manifest((TensorSpec("w", "float32", (2,)),))
            begun = await weights.begin(BeginUpdate(path=Path.TENSOR, manifest=manifest))
            await weights.update_from_tensor(begun.update_id, [(0, 0, b"01234567")])
            assert (await weights.commit(begun.update_id)).version == 1

    asyncio.run(main())
    assert engine.weights["w"] == b"01234567"


def failing_chunks() -> Iterator[tuple[int, int, bytes]]:
    yield 0, 0, bytes(8)
    raise LookupError("the gather failed on rank 3")


BEGIN = BeginUpdate(Path.TENSOR, "u", manifest=Manifest((TensorSpec("w", "float32", (8,)),)))


def test_a_stream_raises_what_its_chunks_raise(address: str) -> None:
    with WeightsClient(address) as client:
        client.begin(BEGIN)
        with pytest.raises(LookupError, match="rank 3"):
            client.update_from_tensor("u", failing_chunks())


def test_a_stream_of_an_asyncio_client_raises_what_its_chunks_raise(address: str) -> None:
    async def stream() -> None:
        async with AsyncWeightsClient(address) as client:
            await client.begin(BEGIN)
            await client.update_from_tensor("u", failing_chunks())

    with pytest.raises(LookupError, match="rank 3"):
        asyncio.run(stream())


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_call_of_a_closed_asyncio_client_fails_and_cancels_no_task(
    when: str, engine: FakeEngine, address: str
) -> None:
    async def ask() -> asyncio.Task[bool]:
        client = AsyncWeightsClient(address)
        asked = client.abort("u")
        if when == "before":
            await client.close()
        task = asyncio.ensure_future(asked)
        engine.slow.add("AbortUpdate")
        while when == "meanwhile" and not engine.events:
            await asyncio.sleep(0.01)
        await client.close()
        await asyncio.wait([task])
        return task

    task = asyncio.run(ask())
    assert not task.cancelled()
    with pytest.raises(RollsyncError, match="is closed") as closed:
        task.result()
    assert closed.value.reason == "CLOSED"


def test_cancelling_a_task_still_cancels_it(engine: FakeEngine, address: str) -> None:
    async def ask() -> bool:
        async with AsyncWeightsClient(address) as client:
            task = asyncio.ensure_future(client.abort("u"))
            engine.slow.add("AbortUpdate")
            while not engine.events:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])
            return task.cancelled()

    assert asyncio.run(ask())
