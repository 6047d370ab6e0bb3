"""The processes of a trainer of two ranks, from the side of the test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests import children


@contextmanager
def two_ranks(directory: Path, addresses: Sequence[str]) -> Iterator[list[children.Child]]:
    """Two processes of sharded_rank.py; rank 0 knows the engines at `addresses`."""
    store = str(directory / "store")
    with ExitStack() as stack:
        module = "tests.unit.adapters.sharded_rank"
        ranks = [
            stack.enter_context(children.start(module, str(rank), "2", store, forked=True))
            for rank in range(2)
        ]
        ask_all(ranks, "connect", addresses=list(addresses))
        yield ranks


def ask_all(ranks: Sequence[children.Child], command: str, **arguments: Any) -> list[Any]:
    """Every rank's answer to one command, which all of them are told before the first has to answer."""
    for rank in ranks:
        rank.tell(command, **arguments)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: rank.answer(), ranks))
