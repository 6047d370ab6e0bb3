"""What a request asks of the engine, and the messages made of what the engine says."""

from __future__ import annotations

import pytest

from rollout_engine import messages as m
from rollout_engine.errors import EngineError, Reason
from rollout_engine.sampling import SamplingParams
from rollout_engine.server import generation as g
from rollout_engine.server.live import Inbox, LiveRequests
from rollout_engine.server.tally import Tally
from rollout_engine.server.text import TextCodec
from rollout_engine.v1 import rollout_pb2 as pb
from tests.unit.server.tokenizers_for_tests import EOS, byte_tokenizer, ids_of

TOKENIZER = byte_tokenizer()
KV = m.KvArithmetic(0, 0, 0, 0, 0, 0)
# vocabulary of 300, context of 16
INFO = m.EngineInfo("i", "A", "float32", "cpu", 300, 16, [EOS], 1, 1, 16, "torch", KV, {}, "", "", 4, 0)


def make(sampling: dict | None = None, *, whole: bool = False, ids=(1, 2), **fields) -> g.Generation:
    wire = pb.GenerateRequest(sampling=pb.SamplingParams(**(sampling or {})), **fields)
    return g.Generation(wire, list(ids), INFO, TextCodec(TOKENIZER), whole=whole)


def output(ids, *, start=0, reason="", index=0, version=1, **fields) -> m.SequenceOutput:
    spans = [m.Span(start, version, version)] if ids else []
    return m.SequenceOutput("r", index, list(ids), [-1.0] * len(ids), spans, reason, **fields)


@pytest.mark.parametrize(
    ("ids", "max_tokens", "reason"),
    [
        ([], None, Reason.EMPTY_PROMPT),
        ([1, 300], None, Reason.TOKEN_OUT_OF_RANGE),
        ([1] * 16, None, Reason.PROMPT_TOO_LONG),
        ([1] * 15, None, None),
        ([1] * 16, 0, None),
        ([1] * 17, 0, Reason.PROMPT_TOO_LONG),
        ([1] * 10, 6, None),
        ([1] * 10, 7, Reason.PROMPT_TOO_LONG),
    ],
)
@pytest.mark.case("B143")
@pytest.mark.case("B144")
def test_prompts_are_checked_against_the_context(ids, max_tokens, reason):
    params = SamplingParams(max_tokens=max_tokens)
    if reason is None:
        assert g.complete_params(params, ids, INFO).max_tokens == max_tokens
        return
    with pytest.raises(EngineError) as caught:
        g.complete_params(params, ids, INFO)
    assert caught.value.reason is reason


def test_a_request_without_a_seed_gets_a_fresh_one():
    seeds = {make().request.params.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert make({"seed": 0}).request.params.seed == 0


def test_a_request_without_an_id_gets_a_fresh_one():
    assert len({make().request.request_id for _ in range(20)}) == 20
    assert make(request_id="mine").request.request_id == "mine"


def test_a_batch_asks_for_whole_completions_unless_stop_strings_must_be_found():
    assert make().request.stream
    assert not make(whole=True).request.stream
    assert make({"stop": ["x"]}, whole=True).request.stream


def test_outputs_that_wait_are_merged_and_spans_joined():
    made = make({"max_tokens": 4})
    outputs = [output([5], num_prompt_tokens=2, prompt_logprobs=[-3.0]), output([6], start=1)]
    outputs += [output([7], start=2, version=2), output([8], start=3, version=2, reason="length")]
    (message,) = made.take(outputs)
    assert list(message.token_ids) == [5, 6, 7, 8]
    assert [(s.start, s.weight_version) for s in message.version_spans] == [(0, 1), (2, 2)]
    assert list(message.prompt_logprobs) == [-3.0]
    assert message.finish_reason == pb.FINISH_REASON_LENGTH
    assert made.done


def test_messages_stay_small_for_slow_clients():
    made = make()
    messages = made.take([output([5], start=i) for i in range(600)])
    assert [len(message.token_ids) for message in messages] == [256, 256, 88]
    wide = [output([5], start=i, top_logprobs=[[(1, -1.0)]]) for i in range(3)]
    assert [len(message.token_ids) for message in make().take(wide)] == [1, 1, 1]


@pytest.mark.case("B138")
def test_text_does_not_show_the_id_that_ended_it():
    ids = [*ids_of(TOKENIZER, "hi"), EOS]
    (message,) = make(return_text=True).take([output(ids, reason="stop")])
    assert (list(message.token_ids), message.text) == (ids, "hi")
    stop = ids_of(TOKENIZER, "!")[0]
    (message,) = make({"stop_token_ids": [stop]}, return_text=True).take([output([5, stop], reason="stop")])
    assert message.text == TOKENIZER.decode([5])
    (message,) = make(return_text=True).take([output([5, stop], reason="length")])
    assert message.text == TOKENIZER.decode([5, stop])


def test_a_stop_string_ends_the_completion_at_the_token_that_completed_it():
    sent: list[m.Command] = []
    made = make({"stop": ["END"], "n": 2}, return_text=True, request_id="r")
    made.attach(LiveRequests(sent.append, Tally()).submit(made.request, Inbox()))
    ids = ids_of(TOKENIZER, "a END and more")
    (first,) = made.take([output(ids[:4])])
    assert (list(first.token_ids), first.text, first.finish_reason) == (ids[:4], "a ", 0)
    (last,) = made.take([output(ids[4:], start=4)])
    assert (list(last.token_ids), last.text) == (ids[4:5], "")
    assert last.finish_reason == pb.FINISH_REASON_STOP
    assert len(last.logprobs) == 1
    assert sent[1:] == [m.FinishSequence("r", 0)]
    assert made.take([output(ids, start=9, reason="stop")]) == []
    assert not made.done  # the other completion runs on
    made.leave()
    assert sent[2:] == [m.AbortRequests(["r"])]


def test_a_completion_that_ends_before_a_stop_string_shows_what_was_held_back():
    ids = ids_of(TOKENIZER, "a EN")
    made = make({"stop": ["END"]}, return_text=True, whole=True)
    assert made.take([output(ids[:3])]) == []
    (message,) = made.take([output(ids[3:], start=3, reason="length")])
    assert (list(message.token_ids), message.text) == (ids, "a EN")


def test_stop_strings_work_without_return_text():
    made = make({"stop": ["b"]}, whole=True)
    (message,) = made.take([output(ids_of(TOKENIZER, "abc"))])
    assert (len(message.token_ids), message.text, message.finish_reason) == (2, "", pb.FINISH_REASON_STOP)


def test_text_needs_a_tokenizer():
    wire = pb.GenerateRequest(return_text=True)
    with pytest.raises(EngineError) as caught:
        g.Generation(wire, [1], INFO, TextCodec(None), whole=False)
    assert caught.value.reason is Reason.NO_TOKENIZER
