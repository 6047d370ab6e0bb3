"""Bad input over a real process: each fault has its own status and reason; the next request is answered."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from rollout_engine.v1 import rollout_pb2 as pb
from rollout_engine.v1 import weights_pb2 as wpb
from rollout_engine.v1.rollout_pb2_grpc import RolloutStub
from rollout_engine.v1.weights_pb2_grpc import WeightsStub
from tests.engines import RunningEngine, serve
from tests.tiny import CONTEXT_LENGTH, VOCAB_SIZE, load_reference, make_tiny
from tests.wire.bad_input import INVALID, assert_serves_on, refusal
from tests.wire.trainer import PROMPT, chunks_of, train
from trainers_adapters import ModuleSource, Request, push_weights
from weight_updater.requests import BeginUpdate, InitGroup, ShmSegment
from weight_updater.requests import Path as Way
from weight_updater.safetensors_io import save_weights
from weight_updater.shm import SharedSegment

NUM_PAGES = 24
"""Of 16 tokens: less than one whole context."""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "mistral", "mistral")


@pytest.fixture(scope="module")
def engine(model_dir, root) -> Iterator[RunningEngine]:
    flags = ["--weights-root", str(root), "--num-pages", str(NUM_PAGES), "--max-waiting-requests", "8"]
    with serve(model_dir, *flags, forked=True) as running:
        yield running


@pytest.fixture(scope="module")
def model(model_dir):
    model = load_reference(model_dir)
    train(model, 1)
    return model


@pytest.fixture(autouse=True)
def _serves_on(engine, model):
    """Whatever a test throws at the engine, it has the weights it had and answers the next request."""
    push_weights(ModuleSource(model), engine.weights)
    yield
    assert_serves_on(engine, model)


# ---------------------------------------------------------------- requests

BAD_REQUESTS = {
    "empty": ({"prompt": []}, (INVALID, "EMPTY_PROMPT")),
    "longer than the context": ({"prompt": [1] * (CONTEXT_LENGTH + 1)}, (INVALID, "PROMPT_TOO_LONG")),
    "of the context, and one more": ({"prompt": [1] * CONTEXT_LENGTH}, (INVALID, "PROMPT_TOO_LONG")),
    "more than the pool": ({"prompt": [1] * (NUM_PAGES * 16)}, ("RESOURCE_EXHAUSTED", "EXCEEDS_KV_POOL")),
    "more than may wait": ({"prompt": [1], "n": 9}, ("RESOURCE_EXHAUSTED", "QUEUE_FULL")),
    "no such token": ({"prompt": [VOCAB_SIZE]}, (INVALID, "TOKEN_OUT_OF_RANGE")),
    "negative max_tokens": ({"prompt": [1], "max_tokens": -1}, (INVALID, "INVALID_REQUEST")),
    "too many completions": ({"prompt": [1], "n": 1025}, (INVALID, "INVALID_REQUEST")),
    "no such stop id": ({"prompt": [1], "stop_token_ids": [VOCAB_SIZE]}, (INVALID, "INVALID_REQUEST")),
    "temperature NaN": ({"prompt": [1], "temperature": float("nan")}, (INVALID, "INVALID_REQUEST")),
    "top_p 0": ({"prompt": [1], "top_p": 0.0}, (INVALID, "INVALID_REQUEST")),
    "negative temperature": ({"prompt": [1], "temperature": -0.1}, (INVALID, "INVALID_REQUEST")),
    "infinite bias": ({"prompt": [1], "logit_bias": {1: float("inf")}}, (INVALID, "INVALID_REQUEST")),
    "text, but no tokenizer": ({"prompt": "hello"}, ("FAILED_PRECONDITION", "NO_TOKENIZER")),
    "stop text, but no tokenizer": ({"prompt": [1], "stop": ["x"]}, ("FAILED_PRECONDITION", "NO_TOKENIZER")),
    "weights to come": ({"prompt": [1], "min_version": 1 << 50}, ("FAILED_PRECONDITION", "VERSION_TOO_OLD")),
}


@pytest.mark.case("B143")
@pytest.mark.case("B144")
@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_request_that_cannot_run(name, engine):
    arguments, expected = BAD_REQUESTS[name]
    assert refusal(engine.rollout.generate, **({"max_tokens": 4} | arguments)) == expected


@pytest.mark.case("B143")
def test_the_bad_items_of_a_batch_fail_alone(engine):
    prompts = [[], PROMPT, [VOCAB_SIZE], Request([1], {"top_p": 0.0}), PROMPT, [1] * (CONTEXT_LENGTH + 1)]
    items = list(engine.rollout.generate_batch_stream(prompts, max_tokens=4, ignore_eos=True))
    reasons = {item.request_index: item.error.reason for item in items if item.error}
    assert reasons == {
        0: "EMPTY_PROMPT",
        2: "TOKEN_OUT_OF_RANGE",
        3: "INVALID_REQUEST",
        5: "PROMPT_TOO_LONG",
    }
    whole = {item.request_index: len(item.completion.token_ids) for item in items if item.completion}
    assert whole == {1: 4, 4: 4}
    alone = list(engine.rollout.generate_batch_stream([[], []], max_tokens=4))
    assert [item.error.reason for item in alone] == ["EMPTY_PROMPT"] * 2


@pytest.mark.case("B144")
def test_no_tokens_and_all_tokens(engine):
    (none,) = engine.rollout.generate(PROMPT, max_tokens=0, prompt_logprobs=True)
    assert (none.finish_reason, none.token_ids) == ("length", [])
    assert len(none.prompt_logprobs) == len(PROMPT) - 1
    (all_that_fits,) = engine.rollout.generate(PROMPT, ignore_eos=True)  # max_tokens not given
    assert len(all_that_fits.token_ids) == NUM_PAGES * 16 - len(PROMPT)
    assert all_that_fits.finish_reason == "length"


@pytest.mark.case("B147")
def test_a_prompt_that_fills_the_pool_to_the_last_token(engine):
    full = engine.greedy([1] * (NUM_PAGES * 16 - 1), 1, ignore_eos=True)
    assert (len(full.token_ids), full.finish_reason) == (1, "length")


def test_options_that_do_not_exist(engine):
    with pytest.raises(TypeError, match="beam_width"):
        engine.rollout.generate(PROMPT, beam_width=4)
    with pytest.raises(ValueError, match="mode is 'sleep'"):
        engine.rollout.pause("sleep")
    with grpc.insecure_channel(engine.address) as channel:
        request = pb.PauseGenerationRequest(mode=77)
        with pytest.raises(grpc.RpcError) as unknown:
            RolloutStub(channel).PauseGeneration(request)
        assert unknown.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for begin in (
            wpb.BeginUpdateRequest(),
            wpb.BeginUpdateRequest(path=wpb.WEIGHTS_PATH_TENSOR),
            wpb.BeginUpdateRequest(path=99),
            wpb.BeginUpdateRequest(
                path=wpb.WEIGHTS_PATH_TENSOR, manifest={"tensors": [{"name": "x", "shape": [1]}]}
            ),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                WeightsStub(channel).BeginUpdate(begin)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_call_without_its_token(model_dir):
    from trainers_adapters import RolloutClient, WeightsClient

    with serve(model_dir, "--num-pages", "16", token="a-long-secret", forked=True) as guarded:
        for token in (None, "guessed", ""):
            with RolloutClient(guarded.address, token=token) as rollout:
                assert refusal(rollout.generate, [1]) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
            with WeightsClient(guarded.address, token=token) as weights:
                assert refusal(weights.checksums) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        assert len(guarded.greedy(PROMPT, ignore_eos=True).token_ids) == 8


# ---------------------------------------------------------------- the command


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "rollout_engine.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_model_that_cannot_be_served_ends_the_command(tmp_path, model_dir):
    missing = run("serve", "--model", str(tmp_path / "none"), "--port", "0", "--json")
    assert missing.returncode == 1
    assert str(tmp_path / "none") in missing.stderr
    assert "Traceback" not in missing.stderr
    typo = run("serve", "--model", str(model_dir), "--attention-backend", "flashy")
    assert typo.returncode == 2
    assert "attention_backend" in typo.stderr
    config = tmp_path / "serve.toml"
    config.write_text("page_sise = 32\n")
    unknown = run("serve", "--model", str(model_dir), "--config", str(config), "--json")
    assert unknown.returncode == 2
    assert "page_sise" in json.loads(unknown.stdout)["error"]["message"]


def test_reload_says_what_was_wrong(engine, root):
    failed = run("reload", str(root / "nowhere"), "--address", engine.address, "--json")
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["error"]["reason"] == "FILE_NOT_FOUND"
    forbidden = run("reload", "/etc", "--address", engine.address, "--json")
    assert (forbidden.returncode, "PATH_FORBIDDEN" in forbidden.stderr) == (1, True)


# ---------------------------------------------------------------- bytes of an update


def begun(engine: RunningEngine, model, **fields):
    manifest = ModuleSource(model).manifest()
    return engine.weights.begin(BeginUpdate(path=Way.TENSOR, manifest=manifest, **fields))


CHUNKS = {
    "twice": lambda first: [first, first],
    "no such tensor": lambda first: [(10_000, 0, first[2])],
    "odd offset": lambda first: [(first[0], 4, first[2][:8])],
    "beyond the end": lambda first: [(first[0], 1 << 30, first[2][:8])],
    "longer than the tensor": lambda first: [(first[0], 8, first[2])],
}


@pytest.mark.case("B119")
@pytest.mark.parametrize("fault", CHUNKS)
def test_chunks_that_fit_nowhere(fault, engine, model):
    first = next(chunks_of(ModuleSource(model)))
    update_id = begun(engine, model).update_id
    bad = CHUNKS[fault](first)
    assert refusal(engine.weights.update_from_tensor, update_id, bad) == (INVALID, "BAD_CHUNK")
    assert refusal(engine.weights.commit, update_id) == ("NOT_FOUND", "UNKNOWN_UPDATE")


@pytest.mark.case("B118")
def test_a_message_above_the_limit(engine, model):
    first = next(chunks_of(ModuleSource(model)))
    update_id = begun(engine, model).update_id
    large = [(first[0], 0, bytes(5 << 20))]
    code, _ = refusal(engine.weights.update_from_tensor, update_id, large)
    assert code == "RESOURCE_EXHAUSTED"
    engine.weights.abort(update_id)
    assert refusal(engine.rollout.generate, [1] * (5 << 20))[0] == "RESOURCE_EXHAUSTED"


def test_bytes_that_are_not_those_that_were_promised(engine, model):
    update_id = begun(engine, model).update_id
    chunks = list(chunks_of(ModuleSource(model)))
    index, offset, data = chunks[5]
    chunks[5] = index, offset, bytes(data[8:]) + bytes(data[:8])
    engine.weights.update_from_tensor(update_id, chunks)
    assert refusal(engine.weights.commit, update_id) == ("DATA_LOSS", "CHECKSUM_MISMATCH")


def test_memory_that_is_not_there(engine, model):
    manifest = ModuleSource(model).manifest()
    with SharedSegment.create(4096) as small:
        named = small.descriptor
        segments = [
            ShmSegment("rollsync-" + "0" * 32, manifest.nbytes, "a"),
            ShmSegment("../../etc/passwd", 4096, "b"),
            ShmSegment(named.name, 8192, "c"),
            named,  # too small for what it should hold
        ]
        for segment in segments:
            ipc = BeginUpdate(path=Way.IPC, manifest=manifest)
            code, reason = refusal(engine.weights.update_from_ipc, ipc, [segment])
            assert (code, reason) == ("FAILED_PRECONDITION", "MEMORY_UNAVAILABLE")
            tensor = BeginUpdate(path=Way.TENSOR, manifest=manifest)
            code, reason = refusal(engine.weights.update_from_tensor, tensor, segment=segment)
            assert (code, reason) == ("FAILED_PRECONDITION", "MEMORY_UNAVAILABLE")
        engine.weights.release(named.allocation_id)


def test_calls_for_what_does_not_exist(engine, model):
    weights = engine.weights
    for _ in range(20):  # the refusal meets the end of the stream
        refused = refusal(weights.update_from_tensor, "nothing", [], timeout_s=10)
        assert refused == ("NOT_FOUND", "UNKNOWN_UPDATE")
    assert refusal(weights.prepare, "nothing") == ("NOT_FOUND", "UNKNOWN_UPDATE")
    assert refusal(weights.renew, "nothing") == ("NOT_FOUND", "UNKNOWN_UPDATE")
    assert refusal(weights.rollback) == ("FAILED_PRECONDITION", "NO_PREVIOUS")
    assert weights.release("nothing") == 0
    assert weights.destroy_group("nothing") is False
    distributed = BeginUpdate(path=Way.DISTRIBUTED, manifest=ModuleSource(model).manifest())
    assert refusal(weights.update_from_distributed, distributed, "g") == ("NOT_FOUND", "GROUP_UNKNOWN")
    nobody = InitGroup("lonely", "127.0.0.1", 9, 1, 2, timeout_s=0.5)
    code, reason = refusal(weights.init_group, nobody)
    assert (code, reason) in (("DEADLINE_EXCEEDED", "TIMEOUT"), ("UNAVAILABLE", "PEER_LOST"))


def test_a_call_of_another_path_than_was_agreed(engine, model, root):
    update_id = begun(engine, model).update_id
    save_weights(str(root / "other"), ModuleSource(model))
    code, reason = refusal(engine.weights.update_from_disk, update_id, str(root / "other"))
    assert reason in ("WRONG_STATE", "INVALID_UPDATE")
    assert code in (INVALID, "FAILED_PRECONDITION")
    engine.weights.abort(update_id)


@pytest.mark.parametrize("path", ["disk", "tensor", "ipc"])
def test_a_second_update_finds_the_first_open(path, engine, model, root):
    update_id = begun(engine, model).update_id
    manifest = ModuleSource(model).manifest()
    save_weights(str(root / "second"), ModuleSource(model))
    fields = {"directory": str(root / "second")} if path == "disk" else {"manifest": manifest}
    second = BeginUpdate(path=Way(path), **fields)
    assert refusal(engine.weights.begin, second) == ("ABORTED", "UPDATE_IN_PROGRESS")
    assert engine.weights.abort(update_id)
