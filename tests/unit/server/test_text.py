"""Prompts get their special tokens once; completions show whole characters and no part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.errors import EngineError, Reason
from rollout_engine.server.text import IncrementalDecoder, StopMatcher, TextCodec, load_tokenizer
from tests.unit.server.tokenizers_for_tests import BOS, EOS, byte_tokenizer, ids_of

TOKENIZER = byte_tokenizer()
WORDS = st.text(alphabet="aé€😀 ﬀ中", max_size=30)


@pytest.mark.case("B135")
def test_special_tokens_are_added_once():
    codec = TextCodec(TOKENIZER)
    assert codec.encode("hi") == [BOS, *ids_of(TOKENIZER, "hi")]
    assert codec.encode("<s>hi") == [BOS, *ids_of(TOKENIZER, "hi")]


@pytest.mark.case("B135")
def test_special_tokens_are_added_once_with_one_behind():
    codec = TextCodec(byte_tokenizer(eos=True))
    assert codec.encode("<s>hi") == [BOS, *ids_of(TOKENIZER, "hi"), EOS]


@pytest.mark.case("B143")
def test_empty_text_is_the_bos_or_nothing():
    assert TextCodec(TOKENIZER).encode("") == [BOS]
    assert TextCodec(byte_tokenizer(bos=False)).encode("") == []


def test_a_text_of_repeated_bos_keeps_its_own():
    assert TextCodec(TOKENIZER).encode("<s><s>x")[:3] == [BOS, BOS, ids_of(TOKENIZER, "x")[0]]


def test_without_a_tokenizer_text_is_refused():
    with pytest.raises(EngineError) as caught:
        TextCodec(None).encode("hi")
    assert caught.value.reason is Reason.NO_TOKENIZER


def test_a_broken_tokenizer_file_is_named(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_half_a_character_is_held_back():
    decoder = IncrementalDecoder(TOKENIZER)
    pieces = [decoder.add([i]) for i in ids_of(TOKENIZER, "a😀b")]
    assert pieces == ["a", "", "", "", "😀", "b"]
    assert decoder.flush() == ""


def test_half_a_character_at_the_end_is_shown_as_a_replacement():
    decoder = IncrementalDecoder(TOKENIZER)
    pieces = [decoder.add([i]) for i in ids_of(TOKENIZER, "é😀")[:-1]]
    assert "".join(pieces) == "é"
    assert decoder.flush() == "\N{REPLACEMENT CHARACTER}"
    assert decoder.flush() == ""


def test_an_endless_run_of_bytes_that_are_no_text_does_not_grow_the_window():
    decoder = IncrementalDecoder(TOKENIZER)
    lead = ids_of(TOKENIZER, "é")[0]
    shown = "".join(decoder.add([lead]) for _ in range(500))
    assert len(shown) > 400
    assert len(decoder._window) < 200


@settings(max_examples=100, deadline=None)
@given(text=WORDS, cuts=st.lists(st.integers(1, 5), max_size=40), tail=st.integers(0, 3))
def test_pieces_add_up_to_the_decoded_whole(text, cuts, tail):
    ids = ids_of(TOKENIZER, text)
    ids = ids[: max(0, len(ids) - tail)]
    decoder, shown, at = IncrementalDecoder(TOKENIZER), "", 0
    for size in [*cuts, *[1] * len(ids)]:
        if at < len(ids):
            piece = decoder.add(ids[at : at + size])
            assert "\N{REPLACEMENT CHARACTER}" not in piece
            shown += piece
            at += size
    assert shown + decoder.flush() == TOKENIZER.decode(ids)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), max_size=20),
)
def test_stop_strings_cut_where_the_first_one_starts(text, stops, sizes):
    matcher, shown, at, matched = StopMatcher(stops), "", 0, False
    for size in [*sizes, *[1] * 20]:
        if matched or at >= len(text):
            break
        piece, matched = matcher.add(text[at : at + size])
        at += size
        shown += piece
    if not matched:
        shown += matcher.flush()
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown)
        assert any(text.startswith(stop, len(shown)) for stop in stops)
        assert not any(stop in shown for stop in stops)


def test_what_may_become_a_stop_string_is_held_back():
    matcher = StopMatcher(["END", "\n\n"])
    assert matcher.add("one E") == ("one ", False)
    assert matcher.add("N") == ("", False)
    assert matcher.add("Q\n") == ("ENQ", False)
    assert matcher.add("\nmore") == ("", True)


def test_stop_strings_wait_for_min_tokens():
    text = TextCodec(TOKENIZER).decoder(["b"], min_tokens=3)
    assert [text.add(i) for i in ids_of(TOKENIZER, "abab")] == [
        ("a", False),
        ("b", False),
        ("a", False),
        ("", True),
    ]
