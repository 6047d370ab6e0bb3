"""Calls at their edges: ids twice, answers larger than a message, readers of a dead engine."""

from __future__ import annotations

import os
import signal

import grpc
import pytest

from rollout_engine.v1 import rollout_pb2 as pb
from rollout_engine.v1 import weights_pb2 as wpb
from tests.unit.server.tokenizers_for_tests import save_tokenizer
from tests.wire.front import prompt, reason_of, serving


def test_an_id_stands_once_in_a_batch_even_if_its_first_request_ends_at_once(tmp_path):
    """Between the two stand prompts that take a while to encode, in which the engine answers the first."""
    save_tokenizer(tmp_path)
    with serving(tmp_path) as front:
        long = pb.GenerateRequest(text="word " * 30_000)
        twin = prompt(1, request_id="quick twin", max_tokens=1)
        items = [twin, long, long, twin]
        answers = {}
        for answer in front.rollout.GenerateBatch(pb.GenerateBatchRequest(requests=items), timeout=30):
            answers.setdefault(answer.request_index, []).append(answer)
        assert sorted(answers) == [0, 1, 2, 3]
        assert [list(answer.completion.token_ids) for answer in answers[0]] == [[10]]
        assert [answer.error.reason for answer in answers[3]] == ["DUPLICATE_REQUEST"]


def test_scores_that_no_message_can_carry_are_refused_before_they_are_computed(tmp_path):
    """A small token id takes one byte on the way in, and its log-probability four on the way out."""
    limit = 64 << 10
    with serving(tmp_path, config={"max_message_bytes": limit}) as front:

        def score(num_sequences: int) -> pb.ScoreResponse:
            sequences = [pb.TokenIds(ids=[1] * 900)] * num_sequences
            return front.rollout.Score(pb.ScoreRequest(sequences=sequences), timeout=20)

        most = limit // (4 * 900 + 64)
        assert [len(one.logprobs) for one in score(most).scores] == [899] * most
        num_computed = len(front.commands("SubmitRequest"))
        with pytest.raises(grpc.RpcError) as refused:
            score(most + 1)
        assert reason_of(refused.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "engine")
        assert "score fewer in a call" in refused.value.details()
        assert len(front.commands("SubmitRequest")) == num_computed


def test_readers_that_wait_for_a_slot_hear_that_the_engine_died(tmp_path):
    """Two slots, so most of them hold none when it happens."""
    with serving(tmp_path, ring_slots=2, delay_on={"ReadWeight": 60.0}) as front:
        streams = [
            front.weights.GetWeightsByName(wpb.GetWeightsByNameRequest(names=["embed.weight"]), timeout=20)
            for _ in range(7)
        ]
        front.wait_for("ReadWeight", 2)
        os.kill(front.running.engine.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(grpc.RpcError) as ended:
                next(stream)
            assert reason_of(ended.value) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", "engine")
