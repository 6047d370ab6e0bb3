"""What a trainer's ranks tell each other while weights are gathered: a word each, all at once.

A gather is a collective of the trainer's own groups: a rank that fails before it leaves the others waiting
there. So every rank says how it stands before each, over a gloo group of their own (which has its own
timeout, and needs no GPU), and one rank's error ends it on all.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
from torch import distributed as dist

from trainers_adapters.errors import PushError

_HEADER = struct.Struct("<qqq")  # kind, number, bytes of text
_WORD_BYTES = 2048

ERROR_GRACE_S = 20.0
"""Seconds for which a rank that failed waits for the others, which may be stuck in what it left."""


class Kind(IntEnum):
    """What a word says. Rank 0 commands; the others say OK or FAILED."""

    OK = 0
    FAILED = 1
    GATHER = 2
    IDLE = 3
    END = 4
    GIVEN_UP = 5


@dataclass(frozen=True, slots=True)
class Word:
    """number: a bucket with GATHER, the version with END. text: of an error, or a digest."""

    kind: Kind
    number: int = 0
    text: str = ""

    def encoded(self) -> torch.Tensor:
        text = self.text.encode()[: _WORD_BYTES - _HEADER.size]  # what an error says last may be cut off
        data = _HEADER.pack(self.kind, self.number, len(text)) + text
        return torch.frombuffer(bytearray(data.ljust(_WORD_BYTES, b"\0")), dtype=torch.uint8)

    @classmethod
    def decoded(cls, data: torch.Tensor) -> Word:
        raw = data.numpy().tobytes()
        kind, number, size = _HEADER.unpack_from(raw)
        return cls(Kind(kind), number, raw[_HEADER.size : _HEADER.size + size].decode(errors="ignore"))


class RankFailed(PushError):
    """A rank of the trainer failed, or is gone; every rank of the push raises this.

    Args:
        rank: the first that failed, or None if only the loss is known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__("ABORTED", "RANK_FAILED", message)
        self.rank = rank

    def after(self, version: int) -> RankFailed:
        """The same, where the engines had committed `version` before a rank was lost; 0: they had not."""
        if not version:
            return self
        failed = RankFailed(f"{self.message}; the engines had committed version {version} by then", self.rank)
        failed.version = version
        return failed


class Ranks:
    """ALL RANKS of a group, in step.

    Args:
        group: the trainer's; None is the default group, or this process alone if there is none.
        timeout_s: seconds that a rank waits for the slowest one.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._control: dist.ProcessGroup | None = None
        self._lost = ""
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
            self._control = dist.new_group(
                ranks,
                backend="gloo",
                timeout=timedelta(seconds=timeout_s),
                use_local_synchronization=group is not None,
            )

    def agree(self, word: Word) -> Word:
        """ALL RANKS. Say how this rank stands, and get rank 0's word.

        Raises:
            RankFailed: a rank said FAILED (on that one, too), is gone, or is later than the timeout.
        """
        return self._all_well(word)[0]

    def agree_on(self, digest: str, what: str) -> None:
        """ALL RANKS. As `agree`, and every rank's digest is the same."""
        words = self._all_well(Word(Kind.OK, text=digest))
        for rank, said in enumerate(words):
            if said.text != digest:
                raise RankFailed(
                    f"rank {rank} has other {what} than rank {self.rank}; they must be the same", rank
                )

    def _all_well(self, word: Word) -> list[Word]:
        words = self._exchange(word)
        for rank, said in enumerate(words):
            if said.kind == Kind.FAILED:
                raise RankFailed(f"rank {rank}: {said.text} (no rank went on)", rank)
        return words

    def fail(self, text: str) -> None:
        """Tell the others that this rank failed; it raises its own error afterwards."""
        with suppress(RankFailed):
            self.agree(Word(Kind.FAILED, text=text))

    def _exchange(self, word: Word) -> list[Word]:
        if self._control is None:
            return [word]
        if self._lost:
            raise RankFailed(f"an earlier push lost a rank ({self._lost}); make a new ShardedSource")
        words = [torch.empty(_WORD_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        try:
            work = dist.all_gather(words, word.encoded(), group=self._control, async_op=True)
            if word.kind == Kind.FAILED and not _completes(work, ERROR_GRACE_S):
                self._lost = "the others were in a collective that this rank had left"
                raise RankFailed(f"rank {self.rank}: {word.text} ({self._lost})", self.rank)
            work.wait()
        except RuntimeError as error:  # gloo's: a closed connection or its timeout
            self._lost = str(error).splitlines()[0]
            raise RankFailed(
                f"a rank is gone or did not come within {self._timeout_s:g} s, which rank {self.rank} of "
                f"{self.size} noticed: {self._lost}"
            ) from error
        return [Word.decoded(data) for data in words]


def _completes(work: dist.Work, seconds: float) -> bool:
    give_up = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


def first_line(error: BaseException) -> str:
    """An error in one line, for a word."""
    lines: Sequence[str] = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
