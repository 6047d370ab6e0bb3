"""Generation over a real channel, against scripted tokens."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time

import grpc
import pytest

from rollout_engine.v1 import rollout_pb2 as pb
from tests.unit.server.tokenizers_for_tests import BOS, ids_of, save_tokenizer
from tests.wire.front import prompt, reason_of, serving, wait_until

STOP, LENGTH, ABORT, ERROR = (
    pb.FINISH_REASON_STOP,
    pb.FINISH_REASON_LENGTH,
    pb.FINISH_REASON_ABORT,
    pb.FINISH_REASON_ERROR,
)


def whole(messages) -> dict[int, tuple[list[int], str, int]]:
    """(ids, text, finish reason) of each completion of a stream."""
    found: dict[int, tuple[list[int], str, int]] = {}
    for message in messages:
        ids, text, _ = found.get(message.index, ([], "", 0))
        assert len(message.logprobs) == len(message.token_ids)
        found[message.index] = ids + list(message.token_ids), text + message.text, message.finish_reason
    return found


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(directory)
    with serving(directory) as made:
        yield made


def test_generate_streams_every_completion(front):
    messages = list(front.rollout.Generate(prompt(1, 2, n=3, max_tokens=4, seed=5), timeout=10))
    assert whole(messages) == {
        0: ([10, 11, 12, 13], "", LENGTH),
        1: ([11, 12, 13, 14], "", LENGTH),
        2: ([12, 13, 14, 15], "", LENGTH),
    }
    assert {message.num_prompt_tokens for message in messages} == {2}
    assert {message.weight_version for message in messages} == {5}
    assert {message.logprob_mode for message in messages} == {pb.LOGPROB_MODE_PROCESSED}
    assert all(message.version_spans for message in messages if message.token_ids)
    assert front.commands("SubmitRequest")[-1]["seed"] == 5


@pytest.mark.case("B137")
@pytest.mark.case("B138")
def test_eos_is_kept_unless_it_is_ignored(tmp_path):
    with serving(tmp_path, tokens=[7, 8, 3, 9]) as front:
        ended = whole(front.rollout.Generate(prompt(1, max_tokens=16), timeout=10))
        assert ended == {0: ([7, 8, 3], "", STOP)}
        ignored = whole(front.rollout.Generate(prompt(1, max_tokens=16, ignore_eos=True), timeout=10))
        assert ignored == {0: ([7, 8, 3, 9] * 4, "", LENGTH)}
        request = prompt(1, max_tokens=16, ignore_eos=True, stop_token_ids=[9])
        assert whole(front.rollout.Generate(request, timeout=10)) == {0: ([7, 8, 3, 9], "", STOP)}


@pytest.mark.case("B144")
def test_max_tokens_of_zero_negative_and_unset(front):
    request = prompt(1, 7, 9, max_tokens=0, prompt_logprobs=True)
    (message,) = front.rollout.Generate(request, timeout=10)
    assert (list(message.token_ids), message.finish_reason) == ([], LENGTH)
    assert list(message.prompt_logprobs) == [-7.0, -9.0]
    with pytest.raises(grpc.RpcError) as caught:
        list(front.rollout.Generate(prompt(1, max_tokens=-1), timeout=10))
    assert reason_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "engine")
    assert "sampling.max_tokens" in caught.value.details()
    unset = whole(front.rollout.Generate(prompt(*[1] * 1020), timeout=10))
    assert unset == {0: ([10, 11, 12, 13], "", LENGTH)}


@pytest.mark.case("B143")
@pytest.mark.parametrize(
    ("request_", "code", "reason", "text"),
    [
        (prompt(), "INVALID_ARGUMENT", "EMPTY_PROMPT", "no tokens"),
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "EMPTY_PROMPT", "no tokens"),
        (prompt(1, 512), "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE", "prompt token 1 is 512"),
        (prompt(*[1] * 1024), "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "1024"),
        (prompt(1, max_tokens=1024), "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "max_tokens 1024"),
        (
            prompt(1, min_tokens=3, max_tokens=2),
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "min_tokens is 3, above max",
        ),
        (prompt(1, top_p=2.0), "INVALID_ARGUMENT", "INVALID_REQUEST", "sampling.top_p"),
        (prompt(1, logprobs=9), "INVALID_ARGUMENT", "INVALID_REQUEST", "sampling.logprobs is 9"),
        (prompt(99), "RESOURCE_EXHAUSTED", "EXCEEDS_KV_POOL", "20 pages"),
        (prompt(1, min_version=6), "FAILED_PRECONDITION", "VERSION_TOO_OLD", "live version is 5"),
    ],
)
def test_refused_requests_say_why(front, request_, code, reason, text):
    with pytest.raises(grpc.RpcError) as caught:
        list(front.rollout.Generate(request_, timeout=10))
    assert reason_of(caught.value) == (grpc.StatusCode[code], reason, "engine")
    assert text in caught.value.details()


@pytest.mark.case("B143")
def test_items_of_a_batch_fail_alone(front):
    items = [
        prompt(),
        prompt(1, 2, max_tokens=2),
        prompt(99),
        prompt(98, max_tokens=9),
        prompt(1, max_tokens=0),
    ]
    items += [prompt(1, request_id="twin", max_tokens=1), prompt(1, request_id="twin", max_tokens=1)]
    answers = {}
    for answer in front.rollout.GenerateBatch(pb.GenerateBatchRequest(requests=items), timeout=10):
        answers.setdefault(answer.request_index, answer)
    assert [answers[i].WhichOneof("result") for i in range(7)] == [
        "error", "completion", "error", "completion", "completion", "completion", "error",
    ]  # fmt: skip
    assert (answers[0].error.status, answers[0].error.reason) == (3, "EMPTY_PROMPT")
    assert list(answers[1].completion.token_ids) == [10, 11]
    assert answers[2].error.reason == "EXCEEDS_KV_POOL"
    assert (answers[3].completion.finish_reason, answers[3].completion.error) == (ERROR, "non-finite logits")
    assert answers[6].error.reason == "DUPLICATE_REQUEST"
    empty = pb.GenerateBatchRequest(requests=[prompt(), prompt()])
    assert {a.error.reason for a in front.rollout.GenerateBatch(empty, timeout=10)} == {"EMPTY_PROMPT"}
    assert list(front.rollout.GenerateBatch(pb.GenerateBatchRequest(), timeout=10)) == []


def test_a_batch_streams_completions_as_they_finish(tmp_path):
    with serving(tmp_path, step_s=0.005) as front:
        items = [prompt(1, max_tokens=200, n=2), prompt(1, max_tokens=2)]
        answers = front.rollout.GenerateBatch(pb.GenerateBatchRequest(requests=items), timeout=20)
        order = [(answer.request_index, len(answer.completion.token_ids)) for answer in answers]
        assert order == [(1, 2), (0, 200), (0, 200)]
        assert [entry["stream"] for entry in front.commands("SubmitRequest")] == [False, False]


def test_a_completion_too_large_for_a_message_is_an_error_of_its_item(tmp_path):
    with serving(tmp_path, config={"max_message_bytes": 65536}) as front:
        items = [prompt(1, max_tokens=1000, top_logprobs=20), prompt(1, max_tokens=2)]
        answers = list(front.rollout.GenerateBatch(pb.GenerateBatchRequest(requests=items), timeout=10))
        by_index = {answer.request_index: answer for answer in answers}
        assert "use Generate" in by_index[0].error.message
        assert len(by_index[1].completion.token_ids) == 2
        streamed = front.rollout.Generate(items[0], timeout=20)
        assert sum(len(message.top_logprobs) for message in streamed) == 1000


@pytest.mark.case("B127")
def test_non_finite_numbers_cross_as_they_are(tmp_path):
    with serving(tmp_path, nan_at=1) as front:
        messages = list(front.rollout.Generate(prompt(1, 0, max_tokens=3, prompt_logprobs=True), timeout=10))
        logprobs = [value for message in messages for value in message.logprobs]
        assert math.isnan(logprobs[1])
        assert [logprobs[0], logprobs[2]] == [-0.5, -0.5]


def test_every_token_is_labelled_with_the_version_that_sampled_it(tmp_path):
    with serving(tmp_path, version_step=3, step_s=0.002) as front:
        messages = list(front.rollout.Generate(prompt(1, max_tokens=8), timeout=10))
        labels: dict[int, int] = {}
        position = 0
        for message in messages:
            assert message.version_spans[0].start == position
            starts = [*(s.start for s in message.version_spans), position + len(message.token_ids)]
            for span, end in zip(message.version_spans, starts[1:], strict=True):
                labels |= dict.fromkeys(range(span.start, end), span.weight_version)
            position += len(message.token_ids)
        assert labels == {i: 5 + i // 3 for i in range(8)}


@pytest.mark.case("B135")
def test_text_prompts_get_one_bos_and_ids_are_used_verbatim(front):
    for text in ("hello", "<s>hello"):
        request = pb.GenerateRequest(text=text, sampling=pb.SamplingParams(max_tokens=1))
        list(front.rollout.Generate(request, timeout=10))
        sent = front.commands("SubmitRequest")[-1]["token_ids"]
        assert sent.count(BOS) == 1
        assert sent[0] == BOS
    list(front.rollout.Generate(prompt(1, 1, 5, max_tokens=1), timeout=10))
    assert front.commands("SubmitRequest")[-1]["token_ids"] == [1, 1, 5]


def test_text_needs_a_tokenizer(tmp_path):
    with serving(tmp_path) as front:
        for request in (pb.GenerateRequest(text="hi"), prompt(1, stop=["x"]), prompt(1, return_text=True)):
            with pytest.raises(grpc.RpcError) as caught:
                list(front.rollout.Generate(request, timeout=10))
            assert reason_of(caught.value)[1] == "NO_TOKENIZER"


@pytest.mark.parametrize("batch", [False, True])
def test_stop_strings_end_a_completion(tmp_path, batch):
    tokenizer = save_tokenizer(tmp_path)
    script = ids_of(tokenizer, "née 😀 STOP and more ")
    with serving(tmp_path, tokens=script, step_s=0.002) as front:
        request = prompt(1, max_tokens=500, stop=["zzz", "STOP"], return_text=True, n=2)
        if batch:
            answers = front.rollout.GenerateBatch(pb.GenerateBatchRequest(requests=[request]), timeout=10)
            messages = [answer.completion for answer in answers]
        else:
            messages = list(front.rollout.Generate(request, timeout=10))
        assert all("S" not in message.text for message in messages)
        completions = whole(messages)
        end = len(ids_of(tokenizer, "née 😀 STOP"))
        assert completions[0] == (script[:end], "née 😀 ", STOP)
        assert completions[1] == (script[1:end], "ée 😀 ", STOP)
        assert len(front.wait_for("FinishSequence", 2)) == 2
        wait_until(
            lambda: front.on_loop(lambda: len(front.running.engine.requests)) == 0, 20, "no live request"
        )
        assert front.commands("AbortRequests") == []


def test_score_answers_in_order(front):
    sequences = [pb.TokenIds(ids=[1, 4, 6]), pb.TokenIds(ids=[9]), pb.TokenIds(ids=[1] * 1024)]
    answer = front.rollout.Score(pb.ScoreRequest(sequences=sequences), timeout=10)
    assert [list(score.logprobs) for score in answer.scores[:2]] == [[-4.0, -6.0], []]
    assert len(answer.scores[2].logprobs) == 1023
    assert {score.version_spans[0].weight_version for score in answer.scores} == {5}
    assert answer.weight_version == 5
    assert front.rollout.Score(pb.ScoreRequest(), timeout=10).scores == []


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({"sequences": [pb.TokenIds(ids=[1]), pb.TokenIds()]}, "EMPTY_PROMPT", "sequences[1]"),
        ({"sequences": [pb.TokenIds(ids=[1])], "temperature": 0.0}, "INVALID_REQUEST", "temperature"),
        ({"sequences": [pb.TokenIds(ids=[1])], "min_version": 6}, "VERSION_TOO_OLD", "live version"),
        ({"sequences": [pb.TokenIds(ids=[1, 2]), pb.TokenIds(ids=[99])]}, "EXCEEDS_KV_POOL", "pages"),
    ],
)
def test_score_refuses_what_cannot_be_scored(front, fields, reason, text):
    with pytest.raises(grpc.RpcError) as caught:
        front.rollout.Score(pb.ScoreRequest(**fields), timeout=10)
    assert reason_of(caught.value)[1] == reason
    assert text in caught.value.details()


# -------------------------------------------------------------------- clients that go away


@pytest.mark.case("B121")
@pytest.mark.case("B122")
def test_a_cancelled_stream_is_aborted_at_once_and_aborts_are_honest(tmp_path):
    with serving(tmp_path, step_s=0.03) as front:
        stream = front.rollout.Generate(prompt(1, max_tokens=1000, request_id="long"), timeout=60)
        for _ in range(5):
            next(stream)
        wait_until(lambda: front.running.engine.state.num_running == 1, 20, "num_running 1")
        start = time.monotonic()
        stream.cancel()
        front.wait_for("AbortRequests")
        wait_until(lambda: front.running.engine.state.num_running == 0, 20, "num_running 0")
        assert time.monotonic() - start < 20, "by itself it would end after 30 s"
        answer = front.rollout.Abort(pb.AbortRequest(request_ids=["long", "unknown"]), timeout=5)
        assert (list(answer.aborted_request_ids), list(answer.unknown_request_ids)) == (
            [],
            ["long", "unknown"],
        )


@pytest.mark.case("B122")
@pytest.mark.parametrize("call", ["GenerateBatch", "Score"])
def test_a_cancelled_call_of_many_requests_aborts_all(tmp_path, call):
    with serving(tmp_path, step_s=0.05) as front:
        if call == "Score":
            future = front.rollout.Score.future(
                pb.ScoreRequest(sequences=[pb.TokenIds(ids=[1])] * 3), timeout=60
            )
        else:
            items = [prompt(1, max_tokens=1000, n=2) for _ in range(3)]
            future = front.rollout.GenerateBatch(pb.GenerateBatchRequest(requests=items), timeout=60)
        front.wait_for("SubmitRequest", 3)
        future.cancel()
        wait_until(lambda: front.running.engine.state.num_running == 0, 10, "num_running 0")
        front.wait_idle()


@pytest.mark.case("B122")
def test_abort_works_without_the_requests_client(tmp_path):
    """The engine says nothing more once the abort came: the id stays live, and Abort finds it."""
    with serving(tmp_path, step_s=0.01, silent_on="AbortRequests") as front:
        stream = front.rollout.Generate(prompt(1, max_tokens=1000, request_id="orphan"), timeout=60)
        next(stream)
        stream.cancel()
        front.wait_for("AbortRequests")
        answer = front.rollout.Abort(pb.AbortRequest(request_ids=["orphan"]), timeout=5)
        assert list(answer.aborted_request_ids) == ["orphan"]
        assert front.wait_for("AbortRequests", 2)[1]["request_ids"] == ["orphan"]


def test_abort_returns_what_was_sampled_to_the_requests_own_caller(tmp_path):
    with serving(tmp_path, step_s=0.01) as front:
        streams = [
            front.rollout.Generate(prompt(1, max_tokens=900, request_id=f"r{i}"), timeout=60) for i in "ab"
        ]
        first = [next(stream) for stream in streams]
        answer = front.rollout.Abort(pb.AbortRequest(request_ids=["ra", "ra"]), timeout=5)
        assert list(answer.aborted_request_ids) == ["ra"]
        assert answer.weight_version == 5
        ids, _, reason = whole([first[0], *streams[0]])[0]
        assert reason == ABORT
        assert ids == (list(range(10, 20)) * 90)[: len(ids)]
        assert list(front.rollout.Abort(pb.AbortRequest(all=True), timeout=5).aborted_request_ids) == ["rb"]
        assert whole([first[1], *streams[1]])[0][2] == ABORT


def test_an_id_is_live_once(tmp_path):
    with serving(tmp_path, step_s=0.01) as front:
        stream = front.rollout.Generate(prompt(1, max_tokens=900, request_id="one"), timeout=60)
        next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            list(front.rollout.Generate(prompt(1, request_id="one"), timeout=5))
        assert reason_of(caught.value) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST", "engine")
        stream.cancel()
        front.wait_for("AbortRequests")


def num_aborted(front) -> int:
    """Requests that the front told the engine to abort."""
    return sum(len(command["request_ids"]) for command in front.commands("AbortRequests"))


@pytest.mark.case("B121")
def test_200_cancelled_streams_leave_nothing_running(tmp_path):
    with serving(tmp_path, step_s=0.005) as front:
        for _ in range(200):
            stream = front.rollout.Generate(prompt(1, max_tokens=1000), timeout=60)
            next(stream)
            stream.cancel()
        wait_until(lambda: num_aborted(front) == 200, 20, "200 aborts")
        wait_until(lambda: front.running.engine.state.num_running == 0, 20, "num_running 0")
        wait_until(lambda: front.running.engine.state.num_free_pages == 100, 20, "all pages free")
        front.wait_idle()


@pytest.mark.case("B121")
def test_a_killed_client_frees_what_it_ran(tmp_path):
    with serving(tmp_path, step_s=0.01) as front:
        program = (
            "import sys, grpc\n"
            "from rollout_engine.v1 import rollout_pb2 as pb, rollout_pb2_grpc\n"
            f"stub = rollout_pb2_grpc.RolloutStub(grpc.insecure_channel({front.address!r}))\n"
            "request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]),"
            " sampling=pb.SamplingParams(max_tokens=1000))\n"
            "for message in stub.Generate(request): print('got', flush=True)\n"
        )
        client = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert client.stdout.readline() == b"got\n"
        os.kill(client.pid, signal.SIGKILL)
        front.wait_for("AbortRequests")
        client.wait()
        client.stdout.close()


def test_a_deadline_of_the_call_ends_the_request(tmp_path):
    with serving(tmp_path, step_s=0.02) as front:
        grpc.channel_ready_future(front.channel).result(20)
        for timeout_s in (1.0, 3.0, 9.0):  # longer where the front was too busy to take it up
            with pytest.raises(grpc.RpcError) as caught:
                list(front.rollout.Generate(prompt(1, max_tokens=1000), timeout=timeout_s))
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if front.commands("SubmitRequest"):
                break
        front.wait_for("AbortRequests")
