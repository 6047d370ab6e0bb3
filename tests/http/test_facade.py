"""The HTTP facade before a real engine, called as trainers call it."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from tests.engines import serve
from tests.http.facade import Answer, facade, fetch
from tests.programs import run_program
from tests.tiny import make_tiny
from tests.wire.trainer import PROMPT, InFlight, checksums_of, reference_tokens, snapshot, train
from trainers_adapters import ModuleSource
from weight_updater.groups import SenderGroup
from weight_updater.safetensors_io import save_weights

ASYNC = {"model_path": "/x", "is_async": True}
WITH_STOP = {"prompt": [1], "stop": "x", "include_stop_str_in_output": True}
TOP_OF_PROMPT = {"input_ids": [1], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
TOP_TWO = {"token_ids": [1], "sampling_params": {"prompt_logprobs": 2}}


def write(root: Path, name: str, model) -> str:
    directory = root / name
    save_weights(str(directory), ModuleSource(model))
    return str(directory)


# ---------------------------------------------------------------- SGLang's


def test_sglang_generate_gives_ids_logprobs_and_the_version_of_each_token(call, engine):
    expected = engine.greedy(PROMPT, max_tokens=6, ignore_eos=True)
    status, answer = call(
        "/generate",
        {
            "input_ids": PROMPT,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True, "top_k": -1},
            "return_logprob": True,
            "rid": "mine",
        },
    )
    meta = answer["meta_info"]
    assert status == 200
    assert answer["output_ids"] == expected.token_ids
    assert [row[1] for row in meta["output_token_logprobs"]] == expected.token_ids
    assert [row[0] for row in meta["output_token_logprobs"]] == pytest.approx(expected.logprobs, abs=1e-5)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 6)
    assert meta["weight_version"] == str(expected.weight_version)
    assert meta["weight_versions"] == [expected.weight_version] * 6
    assert meta["id"] == "mine"


def test_sglang_generate_of_many_prompts_keeps_their_order(call, engine):
    prompts = [[5, 6, 7], [8, 9], [10]]
    sampling = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    status, answers = call("/generate", {"input_ids": prompts, "sampling_params": sampling | {"n": 2}})
    assert status == 200
    assert len(answers) == 6
    for prompt, pair in zip(prompts, zip(answers[::2], answers[1::2], strict=True), strict=True):
        for answer in pair:
            assert answer["output_ids"] == engine.greedy(prompt, max_tokens=3, ignore_eos=True).token_ids


def test_sglang_prompt_logprobs_start_where_they_should(call, engine):
    status, answer = call(
        "/generate",
        {
            "input_ids": PROMPT[:6],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 2,
        },
    )
    (score,) = engine.rollout.score([PROMPT[:6]])
    rows = answer["meta_info"]["input_token_logprobs"]
    assert status == 200
    assert [row[1] for row in rows] == PROMPT[2:6]
    assert [row[0] for row in rows] == pytest.approx(score.logprobs[1:], abs=1e-5)


def test_sglang_stream_ends_with_the_whole(call, engine):
    status, text = call(
        "/generate",
        {
            "input_ids": PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True},
            "stream": True,
        },
    )
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert (status, events[-1]) == (200, "[DONE]")
    assert (
        json.loads(events[-2])["output_ids"] == engine.greedy(PROMPT, max_tokens=5, ignore_eos=True).token_ids
    )


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/update_weights"])
def test_weights_from_a_directory(path, call, engine, root, trained):
    name = {"/update_weights_from_disk": "model_path", "/update_weights": "weight_dir"}[path]
    train(trained, len(path))
    before = engine.rollout.info().weight_version
    directory = write(root, path.strip("/"), trained)
    status, answer = call(path, {name: directory, "weight_version": str(before + 7)})
    assert (status, answer["success"], answer["weight_version"]) == (200, True, str(before + 7))
    assert answer["verified"]
    assert call("/get_weight_version") == (200, {"weight_version": str(before + 7)})
    status, answer = call(
        "/inference/v1/generate",
        {"token_ids": PROMPT, "sampling_params": {"temperature": 0, "max_tokens": 8, "ignore_eos": True}},
    )
    (choice,) = answer["choices"]
    assert choice["token_ids"] == reference_tokens(trained, PROMPT)
    assert choice["weight_versions"] == [before + 7] * 8
    status, stale = call(path, {name: directory, "weight_version": before + 7})
    assert (status, stale["error"]["type"]) == (409, "STALE_VERSION")


def test_weights_by_broadcast(call, engine, trained):
    source = snapshot(trained)
    manifest = source.manifest(checksums=False)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    where = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "group_name": "wu"}
    joined: list[Answer] = []
    joiner = threading.Thread(target=lambda: joined.append(call("/init_weights_update_group", where)))
    joiner.start()
    with SenderGroup("wu", "127.0.0.1", port, world_size=2, timeout_s=20.0) as group:
        joiner.join()
        assert joined[0][0] == 200
        answers: list[Answer] = []
        body = {
            "names": [spec.name for spec in manifest.tensors],
            "dtypes": ["torch.float32"] * len(manifest.tensors),
            "shapes": [list(spec.shape) for spec in manifest.tensors],
            "group_name": "wu",
        }
        receiver = threading.Thread(
            target=lambda: answers.append(call("/update_weights_from_distributed", body))
        )
        receiver.start()
        group.broadcast(manifest, [tensor for _, tensor in source], 1 << 26)
        receiver.join()
        assert answers[0][0] == 200, answers
        assert engine.weights.checksums().by_name == checksums_of(source)
        assert call("/destroy_weights_update_group", {"group_name": "wu"})[1]["success"]
    assert not call("/destroy_weights_update_group", {"group_name": "wu"})[1]["success"]


def test_an_update_of_a_paused_engine_keeps_what_is_frozen(call, engine, root, trained):
    assert call("/pause_generation", {"mode": "in_place"})[0] == 200
    assert call("/is_paused") == (200, {"is_paused": True})
    directory = write(root, "paused", trained)
    status, answer = call("/update_weights_from_disk", {"model_path": directory})
    assert (status, answer["success"]) == (200, True)
    assert call("/continue_generation", {})[0] == 200
    assert call("/is_paused") == (200, {"is_paused": False})


def test_the_checker_sees_that_weights_changed(call, engine, root, trained):
    assert call("/weights_checker", {"action": "snapshot"})[0] == 200
    assert call("/weights_checker", {"action": "compare"})[0] == 200
    train(trained, 99)
    call("/update_weights_from_disk", {"model_path": write(root, "checked", trained)})
    status, answer = call("/weights_checker", {"action": "compare"})
    assert status == 400
    assert set(answer["differing"]) == set(engine.weights.checksums().by_name)
    checksums = call("/weights_checker", {"action": "checksum"})[1]["checksums"]
    assert checksums == {name: f"{v:016x}" for name, v in engine.weights.checksums().by_name.items()}


def test_an_adapter_by_its_directory_and_its_name(call, engine, root, trained, adapter_dir):
    from peft import PeftModel

    assert call("/update_weights_from_disk", {"model_path": write(root, "adapted", trained)})[0] == 200
    base = reference_tokens(trained, PROMPT)
    expected = reference_tokens(PeftModel.from_pretrained(trained, str(adapter_dir)), PROMPT)
    assert expected != base
    status, answer = call("/v1/load_lora_adapter", {"lora_name": "math", "lora_path": str(adapter_dir)})
    assert (status, answer["lora_name"]) == (200, "math"), answer
    greedy = {"temperature": 0.0, "ignore_eos": True}
    sampled = {"input_ids": PROMPT, "sampling_params": greedy | {"max_new_tokens": 8}}
    asked = {"token_ids": PROMPT, "sampling_params": greedy | {"max_tokens": 8}}
    with_adapter = call("/generate", sampled | {"lora_path": "math"})[1]
    assert with_adapter["output_ids"] == expected
    assert with_adapter["meta_info"]["adapter_versions"] == [answer["adapter_version"]] * 8
    assert call("/generate", sampled)[1]["output_ids"] == base
    assert call("/inference/v1/generate", asked | {"model": "math"})[1]["choices"][0]["token_ids"] == expected
    assert call("/inference/v1/generate", asked | {"model": "policy"})[1]["choices"][0]["token_ids"] == base
    by_prompt = {"prompt": PROMPT, "model": "math", "return_token_ids": True, "max_tokens": 8} | greedy
    assert call("/v1/completions", by_prompt)[1]["choices"][0]["token_ids"] == expected
    assert "math" in [model["id"] for model in call("/v1/models")[1]["data"]]
    assert call("/unload_lora_adapter", {"lora_name": "math"})[0] == 200
    status, answer = call("/inference/v1/generate", asked | {"model": "math"})
    assert (status, answer["error"]["type"]) == (404, "UNKNOWN_MODEL")
    status, answer = call("/generate", sampled | {"lora_path": "math"})
    assert (status, answer["error"]["type"]) == (404, "UNKNOWN_ADAPTER")


# ---------------------------------------------------------------- vLLM's


def test_vllm_completions_by_token_ids(call, engine):
    prompts = [[5, 6, 7], [8, 9]]
    status, answer = call(
        "/v1/completions",
        {
            "prompt": prompts,
            "max_tokens": 4,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        },
    )
    assert status == 200
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        expected = engine.greedy(prompt, max_tokens=4, ignore_eos=True)
        assert choice["token_ids"] == expected.token_ids
        assert choice["prompt_token_ids"] == prompt
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-5)
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}


def test_vllm_pause_resume_sleep_and_wake(call, engine, root, trained):
    assert call("/pause?mode=keep", {})[0] == 200
    assert engine.rollout.info().state.status == "paused"
    assert call("/resume", {})[0] == 200
    status, answer = call("/sleep?level=2", {})
    assert status == 200, answer
    assert answer["released_bytes"] > 0
    assert call("/is_sleeping") == (200, {"is_sleeping": True})
    assert call("/health")[0] == 503
    assert call("/wake_up", {})[1]["needs_update"]
    directory = write(root, "woken", trained)
    assert call("/update_weights", {"weight_dir": directory})[0] == 200
    assert call("/health") == (200, {"status": "serving"})
    assert call("/is_sleeping") == (200, {"is_sleeping": False})


@pytest.mark.parametrize("paused", [True, False])
def test_vllm_resets_what_runs_with_the_cache(paused, call, engine):
    """As SkyRL asks for after an update: what is frozen, or runs, is computed anew."""
    stream = InFlight(engine)
    if paused:
        assert call("/pause?mode=keep", {})[0] == 200
    before = engine.rollout.info().state.num_free_pages
    assert call("/reset_prefix_cache", {"reset_running_requests": True})[0] == 200
    if paused:
        state = engine.rollout.info().state
        assert (state.status, state.num_free_pages) == ("paused", state.num_total_pages)
        assert before < state.num_total_pages
        assert call("/resume", {})[0] == 200
    expected = engine.greedy(PROMPT, max_tokens=stream.num_tokens, ignore_eos=True).token_ids
    assert stream.end().token_ids == expected


def test_state_in_both_dialects(call, engine, model_dir):
    info = engine.rollout.info()
    assert call("/server_info")[1]["instance_id"] == info.instance_id
    assert call("/get_model_info")[1]["tokenizer_path"] == str(model_dir)
    assert call("/v1/models")[1]["data"][0]["max_model_len"] == info.context_length
    assert call("/get_world_size") == (200, {"world_size": 1})
    assert call("/weight_info")[1]["num_tensors"] == info.num_weight_tensors
    assert call("/v1/loads")[1][0]["num_reqs"] == 0
    assert call("/health_generate")[0] == 200
    assert call("/flush_cache")[1]["success"]


def test_the_program_of_the_documentation(engine, model_dir, root, tmp_path):
    before = engine.rollout.info().weight_version
    with facade(engine.address) as url:
        printed = run_program(
            "http.md", tmp_path, MODEL=str(model_dir), WEIGHTS_ROOT=str(root), ROLLSYNC_HTTP=url
        )
    versions = [line.split(":")[0] for line in printed.splitlines()]
    assert versions == [f"weight version {before + step}" for step in (1, 2, 3)]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/update_weights_from_tensor", "pickled"),
        ("/load_lora_adapter_from_tensors", "pickled"),
        ("/collective_rpc", "pickled"),
        ("/start_weight_update", "push_weights"),
        ("/update_weight_version", "commit"),
        ("/load_lora_adapter_from_distributed", "AdapterSource"),
    ],
)
def test_calls_that_have_another_way_here_name_it(path, text, call):
    status, answer = call(path, b"\x80\x04\x95 no JSON at all")
    assert (status, answer["error"]["type"]) == (501, "NOT_SERVED_HERE")
    assert text in answer["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "reason", "text"),
    [
        ("/generate", {"input_ids": [1], "sampling_params": {"regex": "a"}}, 400, "INVALID_REQUEST", "regex"),
        ("/generate", {"input_ids": [1], "text": "a"}, 400, "INVALID_REQUEST", "either"),
        ("/generate", {"input_ids": []}, 400, "EMPTY_PROMPT", "no tokens"),
        ("/generate", {"input_ids": [[1], [2]], "rid": ["a"]}, 400, "INVALID_REQUEST", "rid"),
        ("/generate", {"input_ids": [1 << 30]}, 400, "TOKEN_OUT_OF_RANGE", "1073741824"),
        ("/generate", b"{", 400, "INVALID_REQUEST", ""),
        ("/update_weights_from_disk", {"model_path": "/etc"}, 403, "PATH_FORBIDDEN", "root"),
        (
            "/update_weights_from_disk",
            {"model_path": "/x", "weight_version": "v2"},
            400,
            "INVALID_REQUEST",
            "v2",
        ),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": [], "shapes": []},
            400,
            "INVALID_REQUEST",
            "1 names",
        ),
        ("/update_weights_from_disk", ASYNC, 400, "INVALID_REQUEST", "is_async"),
        ("/v1/completions", WITH_STOP, 400, "INVALID_REQUEST", "include_stop_str_in_output"),
        ("/weights_checker", {"action": "compress"}, 400, "INVALID_REQUEST", "snapshot"),
        ("/pause?mode=gently", {}, 400, "INVALID_REQUEST", "mode"),
        (
            "/pause?clear=1",
            {},
            400,
            "INVALID_REQUEST",
            "no query parameter 'clear'",
        ),
        ("/generate", {"input_ids": [1], "image_data": ["x"]}, 400, "INVALID_REQUEST", "image_data"),
        ("/generate", {"input_ids": [1], "return_routed_experts": True}, 400, "INVALID_REQUEST", "routed"),
        ("/generate", TOP_OF_PROMPT, 400, "INVALID_REQUEST", "top_logprobs_num is of sampled tokens"),
        ("/inference/v1/generate", TOP_TWO, 400, "INVALID_REQUEST", "prompt_logprobs"),
    ],
)
def test_bad_input_is_named_and_the_facade_goes_on(path, body, status, reason, text, call):
    found, answer = call(path, body)
    assert (found, answer["error"]["type"]) == (status, reason), answer
    assert text in answer["message"]
    assert call("/health")[0] == 200


def test_an_engine_with_a_token_and_no_tokenizer(tmp_path):
    """The token is wanted of HTTP callers, too; ids are served without their text."""
    model_dir = make_tiny(tmp_path / "qwen3", "qwen3")
    with (
        serve(model_dir, "--num-pages", "16", token="secret", forked=True) as engine,
        facade(engine.address, "secret") as url,
    ):
        assert fetch(url, "/server_info")[0] == 401
        assert fetch(url, "/server_info", token="other")[0] == 401
        assert fetch(url, "/generate", {"input_ids": [1]})[0] == 401
        assert fetch(url, "/server_info", token="secret")[0] == 200
        assert fetch(url, "/health")[0] == 200
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        for stream in (True, False):
            status, answer = fetch(url, "/generate", body | {"stream": stream}, token="secret")
            assert status == 200
            answer = json.loads(answer.split("\n\n")[-3].removeprefix("data: ")) if stream else answer
            assert (len(answer["output_ids"]), answer["text"]) == (3, "")
        status, answer = fetch(url, "/generate", {"text": "a"}, token="secret")
        assert (status, answer["error"]["type"]) == (409, "NO_TOKENIZER")


def test_an_engine_that_is_gone_is_503(model_dir):
    with facade("127.0.0.1:1") as url:
        status, answer = fetch(url, "/server_info")
    assert (status, answer["error"]["type"]) == (503, "UNREACHABLE")
