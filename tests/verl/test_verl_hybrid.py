"""Trainer and rollout in the same workers: verl's server manager and clients, over two engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

from tests.verl.settings import compose
from tests.verl.workers import make_trainers
from trainers_adapters import RollsyncError, WeightsClient

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]

PROMPT = [256, 93, 198, 180, 14, 216, 34, 27, 35, 47]
SAMPLING = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
HELD = "model.norm.weight"


@pytest.fixture(scope="module")
def hybrid(cluster: None, chat_model_dir) -> Iterator[Any]:
    """Two ranks and two engines, after a first update."""
    config = compose(chat_model_dir)
    trainers = make_trainers(config, 2, with_rollout=True)
    manager = LLMServerManager.create(config=config, worker_group=trainers)
    servers = [replica.server_handle for replica in manager.get_replicas()]
    asyncio.run(sleep(manager))
    ray.get(trainers.update_weights(global_steps=0))
    yield SimpleNamespace(config=config, trainers=trainers, manager=manager, servers=servers)
    for replica in manager.get_replicas():
        asyncio.run(replica.shutdown())
    for worker in trainers.workers:
        ray.kill(worker)


async def sleep(manager: LLMServerManager) -> None:
    await asyncio.gather(*[replica.sleep() for replica in manager.get_replicas()])


def infos(hybrid: Any) -> list[dict[str, Any]]:
    return ray.get([server.get_info.remote() for server in hybrid.servers])


def live(hybrid: Any) -> list[dict[str, int]]:
    """What lies in the engines, asked of themselves."""
    found = []
    for where in ray.get([server.get_engine.remote() for server in hybrid.servers]):
        with WeightsClient(where.address, token=where.token or None) as client:
            found.append(client.checksums().by_name)
    return found


def sample(hybrid: Any, number: int, client_class: Any = None, **sampling: Any) -> list[Any]:
    """TokenOutputs of `number` requests at once, by verl's client."""
    client = hybrid.manager.get_client(client_class)

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(
            *[
                client.generate(f"request-{i}", prompt_ids=PROMPT, sampling_params=SAMPLING | sampling)
                for i in range(number)
            ]
        )

    return asyncio.run(all_of_them())


def test_samples_are_of_the_pushed_weights_with_their_logprobs(hybrid):
    for step in (1, 2):
        before = infos(hybrid)
        sums = hybrid.trainers.learn(0.01 * step)
        asyncio.run(sleep(hybrid.manager))
        assert [info["released_tags"] for info in infos(hybrid)] == [["weights", "kv_cache"]] * 2
        ray.get(hybrid.trainers.update_weights(global_steps=10 * step))
        after = infos(hybrid)
        assert [info["released_tags"] for info in after] == [[], []]
        assert [one["weight_version"] for one in after] == [one["weight_version"] + 1 for one in before]
        assert [sums_of[HELD] for sums_of in live(hybrid)] == sums
        assert live(hybrid) == hybrid.trainers.checksums()
        for output in sample(hybrid, 4, max_tokens=12):
            assert 1 <= len(output.token_ids) <= 12
            assert output.stop_reason == "completed"
            assert output.num_preempted == 0
            fields = output.extra_fields
            assert {fields[f"{kind}global_steps"] for kind in ("", "min_", "max_")} == {10 * step}
            assert fields["weight_version"] == after[0]["weight_version"]
            own = hybrid.trainers.logprobs(PROMPT, output.token_ids, SAMPLING["temperature"])
            assert output.log_probs == pytest.approx(own[0], abs=1e-4)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [("nan@1", "NONFINITE"), ("inf@0", "NONFINITE"), ("raise@1", "the shards cannot be gathered")],
)
def test_one_rank_that_cannot_keeps_all_engines_as_they_were(hybrid, spoil, said):
    sums, before = live(hybrid), infos(hybrid)
    hybrid.trainers.learn(0.01)
    updates = hybrid.trainers.update_weights(global_steps=77, spoil=spoil)
    failures = []
    for update in updates:
        with pytest.raises(Exception, match=said) as failed:
            ray.get(update)
        failures.append(str(failed.value))
    other = 1 - int(spoil[-1])
    assert f"rank {1 - other} could not push" in failures[other]
    assert hybrid.trainers.num_yielded()[other] == len(hybrid.trainers.checksums()[0]) + 1  # the tied head
    assert (live(hybrid), infos(hybrid)) == (sums, before)
    for output in sample(hybrid, 2, max_tokens=4):
        assert output.extra_fields["weight_version"] == before[0]["weight_version"]


def test_weights_that_sleep_took_are_never_sampled_from(hybrid):
    asyncio.run(sleep(hybrid.manager))
    ray.get([server.wake_up.remote() for server in hybrid.servers])
    with pytest.raises(RollsyncError, match=r"NOT_SERVING: .*commit a full update"):
        sample(hybrid, 1, max_tokens=4)
    ray.get(hybrid.trainers.update_weights(global_steps=30))
    assert sample(hybrid, 1, max_tokens=4)[0].extra_fields["global_steps"] == 30


def test_an_abort_gives_the_tokens_so_far_and_a_partial_rollout_goes_on(hybrid):
    replicas = hybrid.manager.get_replicas()
    client = hybrid.manager.get_client(FullyAsyncLLMServerClient)

    async def interrupted() -> list[Any]:
        long = SAMPLING | {"max_tokens": 400, "ignore_eos": True}
        asked = [client.generate(f"long-{i}", prompt_ids=PROMPT, sampling_params=long) for i in range(4)]
        tasks = [asyncio.create_task(one) for one in asked]
        await asyncio.sleep(0.5)
        await asyncio.gather(*[replica.abort_all_requests() for replica in replicas])
        refs = hybrid.trainers.update_weights(global_steps=31)
        await asyncio.gather(*refs)
        late = asyncio.create_task(
            client.generate("late", prompt_ids=PROMPT, sampling_params=SAMPLING | {"max_tokens": 2})
        )
        await asyncio.sleep(0.5)
        assert not late.done()
        await asyncio.gather(*[replica.resume_generation() for replica in replicas])
        return await asyncio.gather(*tasks, late)

    ray.get(hybrid.trainers.update_weights(global_steps=30))
    hybrid.trainers.learn(0.01)
    *outputs, late = asyncio.run(interrupted())
    assert [len(output.token_ids) for output in outputs] == [400] * 4
    assert [len(output.log_probs) for output in outputs] == [400] * 4
    spans = [(o.extra_fields["min_global_steps"], o.extra_fields["max_global_steps"]) for o in outputs]
    assert (30, 31) in spans
    assert late.extra_fields["global_steps"] == 31


def test_a_server_that_leaves_rejects_at_once_and_one_request_can_be_ended(hybrid):
    server = hybrid.servers[0]
    ray.get(server.abort_all_requests.remote(reject_request=True))
    rejected = ray.get(server.generate.remote(PROMPT, SAMPLING, "r-1"), timeout=30)
    assert (rejected.token_ids, rejected.stop_reason) == ([], "aborted")
    fields = rejected.extra_fields
    assert fields["min_global_steps"] == fields["max_global_steps"] == fields["global_steps"]
    ray.get(server.resume_generation.remote())
    running = server.generate.remote(PROMPT, SAMPLING | {"max_tokens": 900, "ignore_eos": True}, "r-2")
    give_up = 200
    while not ray.get(server.abort_request.remote("r-2"))["aborted"]:
        give_up -= 1
        assert give_up, "the request never ran"
    ended = ray.get(running)
    assert ended.stop_reason == "aborted"
    assert len(ended.token_ids) == len(ended.log_probs) < 900


def test_what_the_engine_cannot_do_is_named_through_ray(hybrid):
    for sampling, said in (({"best_of": 2}, "best_of"), ({"prompt_logprobs": 1}, "prompt_logprobs")):
        with pytest.raises(ValueError, match=said):
            sample(hybrid, 1, **sampling)
    with pytest.raises(ValueError, match="samples from text"):
        ray.get(hybrid.servers[0].generate.remote(PROMPT, SAMPLING, "r", image_data=["picture"]))
    with pytest.raises(RollsyncError, match="TOKEN_OUT_OF_RANGE: prompt token 0 is 1000000"):
        ray.get(hybrid.servers[0].generate.remote([10**6], SAMPLING, "r"))
