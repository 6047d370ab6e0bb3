"""Values that no message to the engine can hold are refused like all others: 400, by name, as JSON."""

from __future__ import annotations

import pytest

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
