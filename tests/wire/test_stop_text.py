"""Stop strings with a real model and its tokenizer, whose tokens are several characters long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from tests.engines import RunningEngine, serve
from trainers_adapters import Completion

PROMPT = "The capital of France is"
OPTIONS = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "return_text": True}


@pytest.fixture(scope="module")
def engine(smollm2_dir) -> Iterator[RunningEngine]:
    with serve(smollm2_dir, "--num-pages", "64", forked=True) as running:
        yield running


@pytest.fixture(scope="module")
def whole(engine) -> Completion:
    """What the model says where nothing stops it."""
    (completion,) = engine.rollout.generate(PROMPT, **OPTIONS)
    assert len(completion.token_ids) == 24
    return completion


@pytest.fixture(scope="module")
def ends(smollm2_dir, whole) -> list[int]:
    """Length of the text after each token."""
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    ids = whole.token_ids
    assert tokenizer.decode(ids) == whole.text
    return [len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))]


@pytest.fixture(scope="module")
def seam(whole, ends) -> tuple[str, int, int]:
    """(a string over the seam of two tokens in the middle, where it starts, the token that completes it)."""
    text = whole.text
    for i in range(6, 18):
        start, end = ends[i - 1] - 2, ends[i - 1] + 2
        if ends[i - 1] - ends[i - 2] > 2 and ends[i] > end and text.find(text[start:end]) == start:
            return text[start:end], start, i
    raise AssertionError(f"no two long tokens follow each other in {text!r}")


def test_a_stop_string_over_two_tokens_ends_the_text_right_before_it(engine, whole, seam):
    stop, start, last = seam
    (cut,) = engine.rollout.generate(PROMPT, stop=[stop], **OPTIONS)
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[:start]
    assert cut.token_ids == whole.token_ids[: last + 1]
    assert cut.logprobs == pytest.approx(whole.logprobs[: last + 1], abs=1e-4)
    assert len(cut.weight_versions) == last + 1


def test_a_stream_shows_no_part_of_the_stop_string(engine, whole, seam):
    stop, start, last = seam
    parts = list(engine.rollout.generate_stream(PROMPT, stop=[stop], **OPTIONS))
    shown = ""
    for part in parts:
        shown += part.text
        assert whole.text[:start].startswith(shown)
    assert shown == whole.text[:start]
    assert [i for part in parts for i in part.token_ids] == whole.token_ids[: last + 1]
    assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
    assert len(parts) > 3, "it came in pieces"


def test_the_start_of_a_stop_string_that_does_not_come_is_shown_after_all(engine, whole, seam):
    stop, _, _ = seam
    parts = list(engine.rollout.generate_stream(PROMPT, stop=[stop + "\x00"], **OPTIONS))
    assert "".join(part.text for part in parts) == whole.text
    assert [i for part in parts for i in part.token_ids] == whole.token_ids
    assert parts[-1].finish_reason == "length"


def test_the_first_of_several_stop_strings_ends_it(engine, whole, seam, ends):
    stop, start, last = seam
    later = whole.text[ends[last + 2] :][:6]
    (cut,) = engine.rollout.generate(PROMPT, stop=[later, "never said", stop], **OPTIONS)
    assert (cut.text, cut.token_ids) == (whole.text[:start], whole.token_ids[: last + 1])
