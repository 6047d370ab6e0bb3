"""push_sharded: one push of weights that are spread over the trainer's ranks. Every rank calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainers_adapters.clients import WeightsClient
from trainers_adapters.push import PushReport, push_weights
from trainers_adapters.sharding.source import ShardedSource


@dataclass(frozen=True, slots=True)
class ShardedPush:
    """A push that committed on every engine.

    version: from the engines' replies, on every rank. report: on rank 0; None on the others.
    """

    version: int
    report: PushReport | None


def push_sharded(
    source: ShardedSource,
    clients: WeightsClient | Sequence[WeightsClient] | None = None,
    version: int = 0,
    **options: Any,
) -> ShardedPush:
    """ALL RANKS. Push the whole weights of a sharded module, and make them live on every engine.

    Rank 0 pushes as push_weights does; the others gather along, and return when it has committed. An error on
    any rank ends the push on all of them, before the commit if it comes before.

    Args:
        clients: on rank 0; the others need none.
        version, options: push_weights' on rank 0; the others' are not looked at.

    Raises:
        PushError: on every rank; rank 0's is push_weights' own.
        RankFailed: on every rank: one of them failed or is gone, or their modules are not the same.
        ValueError: on rank 0 (the others raise PushError): arguments that cannot be right.
    """

    def push() -> PushReport:
        if clients is None:
            raise ValueError("push_sharded needs the engines' clients on rank 0")
        return push_weights(source, clients, version, **options)

    report, number = source.run(push, lambda report: report.version)
    return ShardedPush(number, report)
