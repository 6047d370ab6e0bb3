"""What has come of the tensors of an update, and the refusal of what should not have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import TensorSpec


class Arrivals:
    """What has come of each tensor of a manifest. Not thread-safe.

    Args:
        sizes: bytes of each tensor.
        needed: the tensors that must come. applied: those of them that are written.
    """

    def __init__(
        self, sizes: npt.NDArray[np.int64], needed: Sequence[int] = (), applied: Sequence[int] = ()
    ) -> None:
        self._sizes = sizes
        self._needed = np.array(needed, dtype=np.int64)
        self._applied = np.array(applied, dtype=np.int64)
        self._whole = np.zeros(sizes.size, dtype=np.bool_)
        # Of tensors that came in parts so far: sorted, disjoint, merged [start, end) in bytes.
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> Arrival:
        return Arrival(self.spans(index))

    def spans(self, index: int) -> list[tuple[int, int]]:
        """The bytes of a tensor that came: sorted, disjoint, merged [start, end)."""
        return [(0, int(self._sizes[index]))] if self._whole[index] else self._spans.get(index, [])

    def claim(self, index: int, start: int, end: int) -> tuple[int, int] | None:
        """Add [start, end), which is not empty, to a tensor's bytes; returns the span that it overlaps, if
        any, and then adds nothing.
        """
        spans = self.spans(index)
        at = bisect_left(spans, (start, start))
        for span in spans[max(0, at - 1) : at + 1]:
            if start < span[1] and span[0] < end:
                return span
        if at < len(spans) and spans[at][0] == end:
            end = spans.pop(at)[1]
        if at and spans[at - 1][1] == start:
            at -= 1
            start = spans.pop(at)[0]
        if start == 0 and end == self._sizes[index]:
            self._whole[index] = True
            self._spans.pop(index, None)
        else:
            spans.insert(at, (start, end))
            self._spans[index] = spans
        return None

    def claim_whole(self, indexes: npt.NDArray[np.int64]) -> int | None:
        """Add all bytes of some tensors; returns one that came before or comes twice, if any, and then adds
        nothing.
        """
        if not indexes.size:
            return None
        taken = self._whole[indexes]
        if taken.any():
            return int(indexes[taken][0])
        if (np.diff(indexes) <= 0).any():  # not in order: then one may be there twice
            found, counts = np.unique(indexes, return_counts=True)
            if (counts > 1).any():
                return int(found[counts > 1][0])
        for index in self._spans.keys() & set(indexes.tolist()) if self._spans else ():
            return index
        self._whole[indexes] = self._sizes[indexes] > 0
        return None

    def num_waiting(self) -> tuple[int, int]:
        """How many of `needed`, and how many of `applied`, have not come whole. Cheap: a sender may make a
        call for every few of many thousand tensors, and each of them asks.
        """
        waiting = ~self._whole & (self._sizes > 0)
        return int(np.count_nonzero(waiting[self._needed])), int(np.count_nonzero(waiting[self._applied]))

    def missing(self, tensors: Sequence[int]) -> list[int]:
        """Those of `tensors` that have not come whole."""
        indexes = np.asarray(tensors, dtype=np.int64)
        found: list[int] = indexes[~self._whole[indexes] & (self._sizes[indexes] > 0)].tolist()
        return found


class Arrival(NamedTuple):
    """What has come of one tensor. spans: sorted, disjoint, merged [start, end) in bytes."""

    spans: list[tuple[int, int]]


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
