"""Text at the edge: encoding prompts, decoding completions as they grow, stop strings. No torch.

The engine knows token ids only. A completion's ids are what was sampled; its text ends before a stop string
and never shows a part of one, nor half a character.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rollout_engine.errors import EngineError, Reason
from rollout_engine.v1 import rollout_pb2 as pb

REPLACEMENT = "�"
LONG_TEXT = 4096
"""Characters; a longer prompt is encoded in a thread, so that other calls are answered meanwhile."""
MAX_UNDECODABLE = 64
"""Tokens held back in the hope that they become characters; a longer run is shown as it is."""


def load_tokenizer(model: Path) -> Tokenizer | None:
    """The tokenizer of a model directory, or None if it has none (ids work all the same).

    Raises:
        EngineError(MODEL_INVALID): tokenizer.json is there but cannot be read.
    """
    path = model / "tokenizer.json"
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EngineError(
            Reason.MODEL_INVALID, f"{path} cannot be read ({error.strerror}); is it a model directory?"
        ) from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise EngineError(Reason.MODEL_INVALID, f"{path} is not a tokenizer: {error}") from error


class TextCodec:
    """Encodes prompts and makes decoders. Without a tokenizer every use of text is refused."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def _need(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineError(
                Reason.NO_TOKENIZER,
                "text prompts, return_text and stop strings need tokenizer.json in the model directory; "
                "send token ids",
            )
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids with the model's special tokens added once.

        A template that already spells its BOS does not get a second one.
        """
        tokenizer = self._need()
        ids: list[int] = tokenizer.encode(text, add_special_tokens=True).ids
        spelled: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        for front in range(1, len(ids) - len(spelled) + 1):
            # ids = what was added in front, the text, what was added behind
            if ids[front : front + len(spelled)] == spelled and spelled[:front] == ids[:front]:
                return ids[front:]
        return ids

    async def prompt(self, wire: pb.GenerateRequest) -> list[int]:
        """The prompt's ids: those given, verbatim, or those of the text."""
        if wire.WhichOneof("prompt") != "text":
            return list(wire.token_ids.ids)
        if len(wire.text) <= LONG_TEXT:
            return self.encode(wire.text)
        return await asyncio.to_thread(self.encode, wire.text)

    def decoder(self, stop: Sequence[str], min_tokens: int) -> CompletionText:
        """For one completion."""
        return CompletionText(self._need(), stop, min_tokens)


class CompletionText:
    """The text of one completion, token by token."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def add(self, token_id: int) -> tuple[str, bool]:
        """Take one token; returns the text to show now, and whether a stop string is complete.

        Stop strings are not looked for before min_tokens tokens.
        """
        self._num_tokens += 1
        text = self._decoder.add((token_id,))
        if self._num_tokens < self._min_tokens:
            return text, False
        return self._matcher.add(text)

    def add_all(self, token_ids: Sequence[int]) -> str:
        """Take many tokens of a completion without stop strings; returns the text to show now."""
        return self._decoder.add(token_ids)

    def flush(self) -> str:
        """The completion ended without a stop string: what was held back."""
        text, matched = self._matcher.add(self._decoder.flush())
        return text if matched else text + self._matcher.flush()


class IncrementalDecoder:
    """Decodes a growing list of ids in pieces that add up to the decoded whole.

    Only a window of ids is decoded again for each token: [start, read) was shown and gives the context
    that a decoder needs (spaces between words), [read, end) is new.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0  # ids of the window whose text was shown whole
        self._shown = 0  # characters of the window's text that were shown

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def add(self, token_ids: Sequence[int]) -> str:
        """Take tokens; returns the text that is certain now."""
        self._window += token_ids
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        if len(certain) < len(text) and len(self._window) - self._read <= MAX_UNDECODABLE:
            piece = certain[self._shown :]
            self._shown = max(self._shown, len(certain))
            return piece
        piece = text[self._shown :]
        if piece:
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._shown = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """No more tokens: the rest, with replacement characters where it is no text."""
        piece = self._decode(self._window)[self._shown :]
        self._shown += len(piece)
        return piece


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces; holds back what may be the start of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Take text; returns (what may be shown, whether a stop string was found right after it)."""
        if not self._stop:
            return text, False
        text = self._held + text
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(self._overlap(text, stop) for stop in self._stop)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a proper start of `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0

    def flush(self) -> str:
        """No more text comes: what was held back."""
        held, self._held = self._held, ""
        return held
