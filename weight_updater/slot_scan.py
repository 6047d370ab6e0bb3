"""Checksums of many small slots at the cost of their bytes: neighbours of equal size are hashed as rows.

A model of experts has tens of thousands of slots; hashing each by itself would cost more than their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from weight_updater.arena import TORCH_DTYPES, WeightTarget
from weight_updater.checksum import _EXPONENTS, _MULTIPLIER, _POSITION, Scan, checksums, finish
from weight_updater.device_scan import is_fast
from weight_updater.plan import slot_nbytes
from weight_updater.requests import Placement

SMALL_BYTES = 16 << 10
"""Slots up to this size are worth hashing together."""

_BLOCK_BYTES = 128 << 10  # rows that are hashed at once; with their scratch they stay in a core's cache


def is_small(place: Placement) -> bool:
    """Whether a slot can be hashed as a row: small, and of whole words."""
    nbytes = slot_nbytes(place)
    return 0 < nbytes <= SMALL_BYTES and nbytes % 8 == 0


def scan_slots(
    buffer: torch.Tensor, places: Sequence[Placement], *, find_nonfinite: bool = False
) -> Iterator[tuple[Placement, Scan]]:
    """Scan small slots of a CPU buffer in the arena's layout.

    Args:
        places: as `is_small` allows, in the arena's order; fastest where they are neighbours of one size.
    """
    data = buffer.numpy()
    for run in _runs(places):
        nbytes = slot_nbytes(run[0])
        step = max(1, _BLOCK_BYTES // nbytes)
        for first in range(0, len(run), step):
            part = run[first : first + step]
            start = part[0].offset
            rows = data[start : start + nbytes * len(part)].reshape(len(part), nbytes)
            totals = _totals(rows.view(np.uint64))
            dtype = TORCH_DTYPES[part[0].dtype]
            bad = _nonfinite(rows, dtype) if find_nonfinite else [False] * len(part)
            for place, total, nonfinite in zip(part, totals, bad, strict=True):
                yield place, Scan(total, nonfinite)


def slot_checksums(target: WeightTarget, names: Sequence[str]) -> dict[str, int]:
    """Slot -> checksum of what lies in it now, in the order of `names` (which is the arena's)."""
    places = [target.arena.placements[name] for name in names]
    if is_fast(target.device):
        return dict(zip(names, checksums([target.slot(name) for name in names]), strict=True))
    small = [place for place in places if is_small(place)] if target.device.type == "cpu" else []
    together = {
        place.name: finish(found.total, slot_nbytes(place))
        for place, found in scan_slots(target.buffer, small)
    }
    others = [name for name in names if name not in together]
    single = dict(zip(others, checksums([target.slot(name) for name in others]), strict=True))
    return {name: together[name] if name in together else single[name] for name in names}


def _runs(places: Sequence[Placement]) -> Iterator[list[Placement]]:
    """Cut into runs of slots of equal size and dtype that lie one right behind the other."""
    run: list[Placement] = []
    for place in places:
        if run:
            last, nbytes = run[-1], slot_nbytes(run[-1])
            follows = place.offset == last.offset + nbytes
            if not (follows and place.dtype == last.dtype and slot_nbytes(place) == nbytes):
                yield run
                run = []
        run.append(place)
    if run:
        yield run


def _totals(rows: npt.NDArray[np.uint64]) -> list[int]:
    """The sum of mixed words of each row ([rows, words]); see checksum.py for the mix."""
    steps = np.arange(1, rows.shape[1] + 1, dtype=np.uint64) * np.uint64(_POSITION)
    x = rows ^ steps
    x ^= x >> np.uint64(32)
    x *= np.uint64(_MULTIPLIER)
    x ^= x >> np.uint64(32)
    totals: list[int] = x.sum(axis=1, dtype=np.uint64).tolist()
    return totals


def _nonfinite(rows: npt.NDArray[np.uint8], dtype: torch.dtype) -> list[bool]:
    unsigned, magnitude, infinity = _EXPONENTS[dtype]
    largest = (rows.view(unsigned) & unsigned(magnitude)).max(axis=1)
    found: list[bool] = (largest >= infinity).tolist()
    return found
