"""What has come of one tensor, and the refusal of what should not have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import TensorSpec


class Arrival:
    """What has come of one tensor. spans: sorted, disjoint, merged [start, end) in bytes."""

    __slots__ = ("nonfinite", "spans", "total")

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.total = 0  # sum of the chunks' mixed words
        self.nonfinite = False

    @property
    def nbytes(self) -> int:
        """Bytes that have come."""
        return sum(end - start for start, end in self.spans)

    def claim(self, start: int, end: int) -> tuple[int, int] | None:
        """Add [start, end); returns the span that it overlaps, if any, and then adds nothing."""
        at = bisect_left(self.spans, (start, start))
        for span in self.spans[max(0, at - 1) : at + 1]:
            if start < span[1] and span[0] < end:
                return span
        if at < len(self.spans) and self.spans[at][0] == end:
            end = self.spans.pop(at)[1]
        if at and self.spans[at - 1][1] == start:
            at -= 1
            start = self.spans.pop(at)[0]
        self.spans.insert(at, (start, end))
        return None


class Arrivals:
    """What has come of every tensor of a manifest. What is still to come is counted as bytes arrive: a sender
    may make a call for every few of many thousand tensors, and each of them asks.

    Args:
        sizes: bytes of each tensor. needed: the tensors that must come.

    Attributes:
        waiting: those of `needed` that have not come whole.
    """

    def __init__(self, sizes: Sequence[int], needed: Iterable[int]) -> None:
        self._sizes = sizes
        self._all = [Arrival() for _ in sizes]
        self.waiting = {index for index in needed if sizes[index]}

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Arrival:
        return self._all[index]

    def claim(self, index: int, start: int, end: int) -> tuple[int, int] | None:
        """As `Arrival.claim` of one tensor."""
        arrival = self._all[index]
        taken = arrival.claim(start, end)
        if taken is None and arrival.spans == [(0, self._sizes[index])]:
            self.waiting.discard(index)
        return taken

    def claim_whole(self, indexes: Sequence[int]) -> tuple[int, tuple[int, int]] | None:
        """Claim whole tensors; returns the first of which something came already, and what, and then claims
        none of them.
        """
        for claimed, index in enumerate(indexes):
            if spans := self._all[index].spans:
                taken = index, spans[0]
                for other in indexes[:claimed]:
                    self._all[other].spans.clear()
                return taken
            if self._sizes[index]:
                spans.append((0, self._sizes[index]))
        self.waiting.difference_update(indexes)
        return None


def bad_chunk(spec: TensorSpec, offset: int, end: int, what: str) -> UpdateRefused:
    """The refusal of bytes [offset, end) of a tensor."""
    return UpdateRefused(Reason.BAD_CHUNK, f"a chunk of {spec.name} with bytes [{offset}, {end}) {what}")


def check_chunk(spec: TensorSpec, nbytes: int, offset: int, end: int, *, whole: bool) -> None:
    """Refuse bytes [offset, end) that cannot be a chunk of a tensor of `nbytes`.

    Args:
        whole: only a whole tensor will do.

    Raises:
        UpdateRefused (BAD_CHUNK): says which bytes of which tensor, and why.
    """
    if offset < 0 or end > nbytes:
        raise bad_chunk(spec, offset, end, f"lies outside of the tensor's {nbytes} bytes")
    if offset % 8 or (end % 8 and end != nbytes):
        text = "is misaligned; chunks start and end at multiples of 8, but for a tensor's end"
        raise bad_chunk(spec, offset, end, text)
    if whole and end - offset != nbytes:
        raise bad_chunk(spec, offset, end, "is a part; this path brings whole tensors")


def overlap_text(span: tuple[int, int]) -> str:
    """What is wrong with bytes that arrived already, in `span`."""
    return f"overlaps [{span[0]}, {span[1]}), which arrived already"
