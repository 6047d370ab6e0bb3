"""Whole tensors in GPU memory that are copied into an arena, in as few copies as they can be."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weight_updater.arena import Arena
from weight_updater.device_scan import Launch, is_fast
from weight_updater.plan import slot_nbytes

FEW_COPIES = 4
"""Up to so many copies are queued one by one; more are faster in one launch, where there is a kernel."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(destination, source), each [n] uint8."""


class Moves:
    """Copies that come again and again, at the same addresses.

    Args:
        device: that makes them.
        pairs: kept, with the memory that they lie in.
    """

    def __init__(self, device: torch.device, pairs: Pairs) -> None:
        self._pairs = pairs
        many = is_fast(device) and len(pairs) > FEW_COPIES
        self._launch = Launch(device, pairs, None) if many else None

    def start(self) -> None:
        """Queue them behind the current stream; what it gets next comes behind them. Elsewhere than on a GPU
        they have been made when this returns.
        """
        if self._launch is not None:
            self._launch.start().follow()
            return
        for destination, source in self._pairs:
            destination.copy_(source)


def joined(arena: Arena, sources: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> Pairs:
    """What brings tensors to their slots in `buffer`; those that are neighbours on both sides become one.

    Neighbours in the arena have only padding between them. Padding of the trainer's may come along.

    Args:
        sources: slot (no alias) -> its bytes, [n] uint8.
    """
    runs: list[list[int]] = []  # [offset in the arena, size]
    firsts: list[torch.Tensor] = []
    previous: torch.Tensor | None = None
    for name in arena.slot_names:
        source = sources.get(name)
        if source is not None:
            place = arena.placements[name]
            end = place.offset + slot_nbytes(place)
            joins = previous is not None and (
                _same_memory(previous, source)
                and source.storage_offset() - firsts[-1].storage_offset() == place.offset - runs[-1][0]
            )
            if joins:
                runs[-1][1] = end - runs[-1][0]
            else:
                runs.append([place.offset, end - place.offset])
                firsts.append(source)
        previous = source
    return [
        (buffer[start : start + size], first.as_strided((size,), (1,), first.storage_offset()))
        for (start, size), first in zip(runs, firsts, strict=True)
    ]


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
