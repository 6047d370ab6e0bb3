"""Any message, and bytes that are no message, to every call of a real engine.

Nothing may crash, hang, grow without bound, or end in an error that does not say what was wrong.
"""

from __future__ import annotations

import os

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.calls import METHODS, call_and_check, tidy
from tests.fuzz.strategies import messages, mutated
from tests.tiny import load_reference
from tests.wire.trainer import Named, chunks_of
from trainers_adapters import ModuleSource, push_weights, rollout_calls, weights_calls
from weight_updater.requests import BeginUpdate
from weight_updater.requests import Path as Way

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "15"))
"""Of each call, for each kind of input."""
WORDS = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "float32",
    "fuzz",
    "127.0.0.1",
    "/",
    "../..",
    "\0",
    "rollsync-none",
    "weights",
    "kv_cache",
]
TUNED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)


@pytest.mark.usefixtures("flat")
@pytest.mark.parametrize("name", list(METHODS))
def test_any_message(name, engine, channel):
    @TUNED
    @given(st.lists(messages(METHODS[name].input_type, WORDS), min_size=1, max_size=3))
    def run(requests):
        call_and_check(channel, name, [request.SerializeToString() for request in requests])
        tidy(engine)

    run()


@pytest.mark.usefixtures("flat")
@pytest.mark.parametrize("name", list(METHODS))
def test_bytes_that_are_nearly_a_message(name, engine, channel):
    kind = METHODS[name].input_type

    @TUNED
    @given(messages(kind, WORDS).flatmap(lambda message: mutated(message.SerializeToString())))
    def run(data):
        outcome = call_and_check(channel, name, [data])
        if not _is_message(kind, data):
            assert (outcome.code, outcome.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        tidy(engine)

    run()


@pytest.mark.usefixtures("flat")
@pytest.mark.parametrize(
    "name", ["Generate", "GenerateBatch", "Score", "BeginUpdate", "UpdateWeightsFromTensor"]
)
def test_requests_that_were_right_before_some_bytes_changed(name, engine, channel, model_dir):
    model = load_reference(model_dir)
    source = Named(ModuleSource(model))
    push_weights(source, engine.weights, path="tensor")  # what came before may have torn them
    begin = BeginUpdate(path=Way.TENSOR, manifest=source.manifest(), update_id="fuzz")
    prompts = [[5, 6, 7], [8, 9]]
    call = {
        "Generate": lambda: rollout_calls.generate(prompts[0], max_tokens=3, top_k=5, seed=3),
        "GenerateBatch": lambda: rollout_calls.generate_batch(prompts, max_tokens=3, temperature=0.5),
        "Score": lambda: rollout_calls.score(prompts),
        "BeginUpdate": lambda: weights_calls.begin(begin),
        "UpdateWeightsFromTensor": lambda: weights_calls.update_from_tensor(begin, chunks_of(source, 4096)),
    }[name]()
    whole = call.request if METHODS[name].client_streaming else [call.request]
    valid = [request if isinstance(request, bytes) else request.SerializeToString() for request in whole]
    assert call_and_check(channel, name, valid, may_wait=False).code == "OK"
    tidy(engine)

    @TUNED
    @given(st.integers(0, len(valid) - 1), st.data())
    def run(at, data):
        changed = [*valid[:at], data.draw(mutated(valid[at])), *valid[at + 1 :]]
        call_and_check(channel, name, changed)
        tidy(engine)

    run()


def _is_message(kind: Descriptor, data: bytes) -> bool:
    try:
        GetMessageClass(kind).FromString(data)
    except DecodeError:
        return False
    return True
