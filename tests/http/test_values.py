"""Values that no message to the engine can hold are refused like all others: 400, by name, as JSON."""

from __future__ import annotations

import json
import math

import pytest

from trainers_adapters.http_facade.engine import written

HALF = "\ud800"  # of a surrogate pair, which JSON can escape and UTF-8 cannot hold
BIG = 1 << 70


def sampled(**sampling):
    return {"input_ids": [1], "sampling_params": sampling}


SENT = {
    "negative id": ("/generate", {"input_ids": [-1]}, "input_ids"),
    "large id": ("/v1/completions", {"prompt": [BIG]}, "prompt"),
    "priority": ("/generate", {"input_ids": [1], "priority": BIG}, "priority"),
    "negative seed": ("/generate", sampled(sampling_seed=-1), "sampling_seed"),
    "length": ("/generate", sampled(max_new_tokens=BIG), "max_new_tokens"),
    "top_k": ("/generate", sampled(top_k=BIG), "top_k"),
    "n": ("/generate", sampled(n=BIG), "n"),
    "bias": ("/generate", sampled(logit_bias={str(BIG): 1.0}), "logit_bias"),
    "logprobs": (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"logprobs": -1}},
        "logprobs",
    ),
    "version": ("/update_weights_from_disk", {"model_path": "/x", "weight_version": BIG}, "weight_version"),
    "port": (
        "/init_weights_update_group",
        {"master_address": "x", "master_port": -1, "world_size": 2},
        "master_port",
    ),
    "half a pair, text": ("/generate", {"text": HALF}, "surrogates"),
    "half a pair, id": ("/generate", {"input_ids": [1], "rid": HALF}, "surrogates"),
    "half a pair, adapter": ("/load_lora_adapter", {"lora_name": HALF, "lora_path": "/x"}, "surrogates"),
    "dtype": (
        "/update_weights_from_distributed",
        {"names": ["a"], "dtypes": ["complex"], "shapes": [[1]]},
        "dtype of a is 'complex'",
    ),
}


@pytest.mark.parametrize("name", SENT)
def test_values_that_cannot_be_sent(name, call):
    path, body, word = SENT[name]
    status, answer = call(path, body)
    assert (status, answer["success"], answer["error"]["type"]) == (400, False, "INVALID_REQUEST")
    assert word in answer["message"]


def test_a_stream_says_so_too(call):
    status, text = call("/generate", {"input_ids": [1], "rid": HALF, "stream": True})
    assert status == 200
    assert text.startswith('data: {"error": {"type": "INVALID_REQUEST"')
    assert text.rstrip().endswith("data: [DONE]")


def test_what_is_a_bug_of_ours_has_the_same_shape(call, monkeypatch):
    async def broken(*_: object, **__: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("trainers_adapters.aio.AsyncRolloutClient.info", broken)
    status, answer = call("/version")
    assert (status, answer["error"]["type"]) == (500, "INTERNAL")
    assert "KeyError" in answer["message"]
    assert "secret" not in answer["message"]


SAMPLED = {"max_tokens": 2, "top_k": 1, "ignore_eos": True, "logprobs": 3}


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_top_k_left_out_have_a_number_that_json_knows(stream, call):
    """The log-probability of each is -inf."""
    sampling = {"max_new_tokens": 2, "top_k": 1, "ignore_eos": True}
    body = {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 3}
    status, answer = call("/generate", body | {"stream": stream})
    if stream:
        answer = json.loads(answer.split("\n\n")[-3].removeprefix("data: "), parse_constant=pytest.fail)
    assert status == 200, answer
    for row in answer["meta_info"]["output_top_logprobs"]:
        assert [entry[0] for entry in row] == [0.0, -9999.0, -9999.0]


def test_so_they_have_in_the_other_dialect(call):
    status, answer = call("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": SAMPLED})
    assert status == 200, answer
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert [top["logprob"] for top in entry["top_logprobs"]] == [0.0, -9999.0, -9999.0]


def test_no_number_at_all_is_null():
    assert written(math.nan) is None
    assert (written(-math.inf), written(-1.5)) == (-9999.0, -1.5)


@pytest.mark.parametrize(
    ("path", "body", "method", "status", "reason"),
    [
        ("/generat", {}, "", 404, "NOT_FOUND"),
        ("/generate", None, "GET", 405, "INVALID_REQUEST"),
        ("/generate", b"[" * 100_000, "", 400, "INVALID_REQUEST"),
        ("/generate", b'{"input_ids": [' + b"9" * 5000 + b"]}", "", 400, "INVALID_REQUEST"),
        ("/generate", b'"\xff"', "", 400, "INVALID_REQUEST"),
    ],
)
def test_what_no_route_ever_sees_is_refused_in_the_same_shape(path, body, method, status, reason, call):
    found, answer = call(path, body, method=method)
    assert (found, answer["success"], answer["error"]["type"]) == (status, False, reason)
    assert answer["message"]
