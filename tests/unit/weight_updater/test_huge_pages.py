"""Weights lie in huge pages where the system has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weight_updater.arena import aligned_zeros
from weight_updater.huge_pages import HUGE_PAGE, prefer_huge_pages

CPU = torch.device("cpu")
NUM_BYTES = 9 * HUGE_PAGE
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
has_huge_pages = pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="the system has no huge pages to give"
)


def flags_at(address: int) -> list[str]:
    """What the system was asked for behind an address: the VmFlags of its mapping."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        start, dash, rest = line.split()[0].partition("-")
        if dash:
            inside = int(start, 16) <= address < int(rest, 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise LookupError(f"nothing is mapped at {address:#x}")


@has_huge_pages
def test_an_arena_asks_for_huge_pages() -> None:
    memory = aligned_zeros(NUM_BYTES, CPU)
    assert "hg" in flags_at(memory.data_ptr() + NUM_BYTES // 2)
    assert not memory.any()
    memory.fill_(1)
    assert bool((memory == 1).all())


def test_memory_that_holds_no_whole_huge_page_is_left_alone() -> None:
    memory = torch.ones(HUGE_PAGE // 8)
    prefer_huge_pages(memory)
    assert bool((memory == 1).all())
