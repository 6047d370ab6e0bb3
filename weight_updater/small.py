"""Many small tensors at the cost of their bytes: those of one size and dtype are moved and hashed together.

A model of experts has tens of thousands of tensors; a few lines of Python for each would take longer than
their bytes do. Here they are rows of arrays, and numpy does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from weight_updater.checksum import BLOCK_BYTES, is_small, row_totals, rows_nonfinite

Bytes = npt.NDArray[np.uint8]
Indexes = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

_OTHER = -1


class SmallTensors:
    """Tells the small ones of a list of tensors apart by kind: size and dtype. Nothing in it changes.

    Args:
        sizes: bytes of each tensor.
        dtypes: of each; None keeps a tensor from counting as small.
    """

    def __init__(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype | None]) -> None:
        numbers: dict[tuple[int, torch.dtype], int] = {}
        kind_of = [
            _OTHER
            if dtype is None or not is_small(nbytes)
            else numbers.setdefault((nbytes, dtype), len(numbers))
            for nbytes, dtype in zip(sizes, dtypes, strict=True)
        ]
        self._kinds = list(numbers)
        self._kind_of = np.array(kind_of, dtype=np.int64)

    def are_among(self, indexes: Indexes) -> Flags:
        """Which of the tensors `indexes` are small."""
        found: Flags = self._kind_of[indexes] != _OTHER
        return found

    def scan(
        self, data: Bytes, indexes: Indexes, offsets: Indexes, *, find_nonfinite: bool
    ) -> tuple[Words, Flags]:
        """Hash small tensors, and look for values that are not finite.

        Args:
            data: [n] in which `indexes[k]` starts at byte `offsets[k]`.

        Returns:
            per tensor of `indexes`, the sum of its mixed words, and whether a value is not finite (False if
            nobody looks).
        """
        totals = np.zeros(indexes.size, dtype=np.uint64)
        nonfinite = np.zeros(indexes.size, dtype=np.bool_)
        for nbytes, dtype, at in self.groups(indexes):
            totals[at], nonfinite[at] = scan_rows(
                data, offsets[at], nbytes, dtype if find_nonfinite else None
            )
        return totals, nonfinite

    def copy(self, into: Bytes, to: Indexes, data: Bytes, offsets: Indexes, indexes: Indexes) -> None:
        """Copy small tensors: `indexes[k]` from byte `offsets[k]` of `data` to byte `to[k]` of `into`."""
        for nbytes, _, at in self.groups(indexes):
            sources, places = _rows_of(data, nbytes), _rows_of(into, nbytes)
            step = max(1, BLOCK_BYTES // nbytes)
            for first in range(0, at.size, step):
                part = at[first : first + step]
                places[to[part]] = sources[offsets[part]]

    def groups(self, indexes: Indexes) -> Iterator[tuple[int, torch.dtype, Indexes]]:
        """(size, dtype, positions in `indexes`) of each kind; all must be small."""
        kinds = self._kind_of[indexes]
        order = np.argsort(kinds, kind="stable")
        cuts = np.flatnonzero(np.diff(kinds[order])) + 1
        for at in np.split(order, cuts):
            if at.size:
                nbytes, dtype = self._kinds[kinds[at[0]]]
                yield nbytes, dtype, at


def scan_rows(
    data: Bytes, offsets: Indexes, nbytes: int, dtype: torch.dtype | None = None
) -> tuple[Words, Flags]:
    """Scan small tensors of one size that lie in one buffer.

    Args:
        data: [n]. offsets: in bytes, of the tensors.
        nbytes: of each tensor, as `checksum.is_small` allows.
        dtype: floating dtype of the values for the non-finite test; None leaves it out.

    Returns:
        per tensor the sum of its mixed words, and whether a value is not finite.
    """
    step = max(1, BLOCK_BYTES // nbytes)
    totals = np.zeros(offsets.size, dtype=np.uint64)
    nonfinite = np.zeros(offsets.size, dtype=np.bool_)
    rows_at = _rows_of(data, nbytes)
    for first in range(0, offsets.size, step):
        part = slice(first, first + step)
        rows = rows_at[offsets[part]]  # a copy, so that it is aligned; it stays in the cache
        totals[part] = row_totals(rows.view(np.uint64))
        if dtype is not None:
            nonfinite[part] = rows_nonfinite(rows, dtype)
    return totals, nonfinite


def _rows_of(data: Bytes, nbytes: int) -> Bytes:
    """[n - nbytes + 1, nbytes] over the same memory: row k starts at byte k."""
    return as_strided(data, (data.size - nbytes + 1, nbytes), (1, 1))
