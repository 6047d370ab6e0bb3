"""What has come of one tensor, and the refusal of what should not have."""

from __future__ import annotations

from bisect import bisect_left

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import TensorSpec


class Arrival:
    """What has come of one tensor. spans: sorted, disjoint, merged [start, end) in bytes."""

    __slots__ = ("spans",)

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

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
