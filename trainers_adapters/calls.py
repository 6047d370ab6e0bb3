"""A call as a value: what to send, how to read the answer, how long to wait. No torch.

Requests are built once, here and in rollout_calls.py and weights_calls.py; clients.py sends them with
grpc, aio.py with grpc.aio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trainers_adapters.chunk_wire import Messages

R = TypeVar("R")

DEFAULT_TIMEOUT_S = 60.0
"""Seconds that a call without work on weights or tokens may take."""
WORK_TIMEOUT_S = 600.0
"""Seconds that generating, or receiving and committing weights, may take."""
RETRY_PAUSES_S = (0.1, 0.4)
"""Pauses before the second and third attempt of an idempotent call that found no engine."""


@dataclass(frozen=True, slots=True)
class Unary(Generic[R]):
    """One request (or, `requests` being iterable, a client stream) and one answer.

    idempotent: sending it twice does no more than sending it once, so it is retried when no engine
    answered.
    """

    method: str
    request: Any
    parse: Callable[[Any], R]
    timeout_s: float
    idempotent: bool = False

    @property
    def failure(self) -> BaseException | None:
        """Why the trainer's own side of a client stream ended it."""
        return self.request.failure if isinstance(self.request, Messages) else None


@dataclass(frozen=True, slots=True)
class Stream(Generic[R]):
    """One request and a stream of answers; timeout_s None means that it may last for ever."""

    method: str
    request: Any
    parse: Callable[[Any], R]
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Gathered(Generic[R]):
    """One request and a stream of answers that are gathered into one result."""

    method: str
    request: Any
    gather: Callable[[], tuple[Callable[[Any], None], Callable[[], R]]]
    """Makes (add an answer, give the result)."""
    timeout_s: float


def enum_words(enum: Any, prefix: str, unspecified: str) -> tuple[dict[str, int], dict[int, str]]:
    """Lower-case words of a protobuf enum without their prefix, and the words by number."""
    by_number = {
        number: name.removeprefix(prefix).lower() if number else unspecified for name, number in enum.items()
    }
    return {word: number for number, word in by_number.items()}, by_number


def number_of(word: str, words: dict[str, int], what: str) -> int:
    """The number of an enum's word.

    Raises:
        ValueError: naming the words that exist.
    """
    if word not in words:
        raise ValueError(f"{what} is {word!r}; it must be one of {', '.join(filter(None, words))}")
    return words[word]


def as_list(values: Iterable[Any] | str) -> list[Any]:
    """A list of one string, or of the values."""
    return [values] if isinstance(values, str) else list(values)
