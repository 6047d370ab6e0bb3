"""Whole tensors in the host's memory that the CPU copies and hashes: dealt out to a thread for each core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from weight_updater.checksum import even_shares
from weight_updater.plan import Plan

MAX_THREADS = 16
BYTES_PER_THREAD = 64 << 20
"""There is a thread for each so many bytes, up to one per core."""


class TakesWhole(Protocol):
    """A sink or a look, which many threads may call at once."""

    plan: Plan

    def write_whole(self, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor) -> None: ...


def write_by_cores(
    sink: TakesWhole, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor
) -> None:
    """`sink.write_whole` of tensors that lie in `data` ([n] uint8 on the CPU), by as many threads as the
    bytes are worth. Raises what the first share that fails raises, once all have ended.
    """
    sizes = [sink.plan.sizes[index] for index in indexes]
    most = min(MAX_THREADS, os.cpu_count() or 1)
    num_threads = max(1, min(most, sum(sizes) // BYTES_PER_THREAD))
    if num_threads == 1:
        sink.write_whole(indexes, positions, data)
        return

    def write(share: Sequence[int]) -> None:
        sink.write_whole([indexes[at] for at in share], [positions[at] for at in share], data)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="take-whole") as pool:
        shares = [pool.submit(write, sorted(share)) for share in even_shares(sizes, num_threads)]
    for share in shares:
        share.result()
