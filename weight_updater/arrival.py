"""What has come of one tensor, and the refusal of what should not have."""

from __future__ import annotations

from bisect import bisect_left

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import TensorSpec


class Arrival:
    """What has come of one tensor. spans: sorted, disjoint, merged [start, end) in bytes."""

    __slots__ = ("nonfinite", "spans", "total")

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.total = 0  # sum of the chunks' mixed words
        self.nonfinite = False

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


def bad_chunk(spec: TensorSpec, offset: int, end: int, what: str) -> UpdateRefused:
    """The refusal of bytes [offset, end) of a tensor."""
    return UpdateRefused(Reason.BAD_CHUNK, f"a chunk of {spec.name} with bytes [{offset}, {end}) {what}")


def overlap_text(span: tuple[int, int]) -> str:
    """What is wrong with bytes that arrived already, in `span`."""
    return f"overlaps [{span[0]}, {span[1]}), which arrived already"
