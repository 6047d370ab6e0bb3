"""Rollouts for a trainer of one or many ranks: rank 0 pushes and samples for all, all go on together.

Whatever rank 0 meets, every rank learns before it goes on: nobody samples before the commit, nobody waits
for a rank that failed, and if the engine was lost all take part in pushing again.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainers_adapters.frameworks.live_engine import LiveEngine, WeightsLost
from trainers_adapters.frameworks.ranks import Ranks
from trainers_adapters.rollout_calls import Request, Sampling
from trainers_adapters.sharding.source import ShardedSource
from trainers_adapters.sources import Source

log = logging.getLogger(__name__)

MAX_SAMPLES = 1024
"""Completions that one request may ask for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion. logprobs: of each of token_ids, which include the EOS that ended it."""

    token_ids: list[int]
    logprobs: list[float]


class Rollouts:
    """What a trainer does with an engine, on all of its ranks at once: every method is a collective.

    Args:
        engine: used on rank 0 only.
        source: gives the source of a push, on every rank: the trainer's weights as they are then. Of one that
            is not sharded, rank 0's is sent.

    Attributes:
        version: of the weights that sampled last.
        seconds, num_tokens: of the last generation over all ranks, waiting for a lost engine included.
    """

    def __init__(
        self, engine: LiveEngine, ranks: Ranks, source: Callable[[], Source | ShardedSource]
    ) -> None:
        self.engine = engine
        self._ranks = ranks
        self._source = source
        self.version = 0
        self.seconds = 0.0
        self.num_tokens = 0

    def sync(self) -> None:
        """Push the trainer's weights; on return they are live, and known to be on every rank.

        Raises:
            RollsyncError: on every rank; EngineLost (on rank 0) if the engine did not come back in time.
        """
        source = self._source()
        if isinstance(source, ShardedSource):
            _, self.version = source.run(lambda: self.engine.push(source), lambda report: report.version)
        else:
            self.version = self._ranks.from_main(lambda: self.engine.push(source).version)

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, seed: str) -> list[Sample]:
        """One completion for each of this rank's prompts, in order, sampled by the weights pushed last.

        Equal prompts that follow each other, on this rank or from one to the next, are one request.

        Args:
            prompts: token ids; how many may differ from rank to rank.
            sampling: without n and seed, the same on every rank.
            seed: with the prompt's place it decides each draw: asked again after a restart, the engine
                gives the same tokens again.
        """
        started = time.monotonic()
        everyone: list[list[list[int]]] = self._ranks.gather([list(prompt) for prompt in prompts])
        requests = _requests(list(itertools.chain(*everyone)), sampling, seed)
        while True:
            said = self._ranks.from_main(lambda: self._attempt(requests, started))
            if not said["lost"]:
                break
            self.sync()
        samples = [Sample(ids, logprobs) for ids, logprobs in said["samples"]]
        self.seconds = time.monotonic() - started
        self.num_tokens = sum(len(sample.token_ids) for sample in samples)
        first = sum(map(len, everyone[: self._ranks.index]))
        return samples[first : first + len(prompts)]

    def _attempt(self, requests: list[Request], started: float) -> dict[str, Any]:
        """On rank 0: all completions as (ids, logprobs), or what happened to the engine."""
        left = started + self.engine.timeout_s - time.monotonic()
        try:
            batch = self.engine.sample(requests, timeout_s=max(0.001, left))
        except WeightsLost as error:
            if left <= 0:
                raise
            self.engine.resyncs += 1
            log.warning("%s was lost (%s); pushing again", self.engine.address, error)
            return {"lost": str(error), "samples": []}
        samples = [(c.token_ids, c.logprobs) for completions in batch for c in completions]
        return {"lost": "", "samples": samples}

    def close(self) -> None:
        self.engine.close()


def _requests(prompts: Sequence[list[int]], sampling: Sampling, seed: str) -> list[Request]:
    """One request for each run of equal prompts."""
    return [
        Request(prompt, Sampling(**{**sampling, "n": count, "seed": seed_of(seed, number)}))
        for number, (prompt, count) in enumerate(_runs(prompts))
    ]


def _runs(prompts: Sequence[list[int]]) -> Iterator[tuple[list[int], int]]:
    for prompt, equal in itertools.groupby(prompts):
        count = len(list(equal))
        while count > 0:
            yield prompt, min(count, MAX_SAMPLES)
            count -= MAX_SAMPLES


def seed_of(text: str, number: int) -> int:
    """63 bits that differ for each request."""
    digest = hashlib.blake2b(f"{text}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
