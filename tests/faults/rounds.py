"""What a round is: one update by one path, struck at one stage; and which rounds a run consists of.

Rounds are drawn pairwise: every two of kind, path, staging and stage that can meet do so at least once, and
of strikes those come first whose pairs have not been seen. All that is left open (which chunk, what form of
call, what becomes of sequences) follows from the round's seed.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("base", "adapter")
"""What the update brings: the base weights, or an adapter that the engine holds beside them."""
PATHS = ("disk", "distributed", "tensor", "segment", "ipc", "adopt")
FETCHED = ("disk", "segment", "ipc")
"""Paths whose bytes the engine gets by itself, in one call."""
OWN = "own"
"""Where adapters wait, whatever is asked for: memory of the bank."""
STAGINGS = ("none", "host", "device", OWN)
STAGES = ("start", "staging", "begun", "transfer", "sent", "prepared", "commit", "committed")
STRIKES = (
    "none",
    "kill trainer",
    "stop trainer",
    "close channel",
    "abort update",
    "kill engine",
    "stop engine",
    "kill front",
    "kill client",
    "kill group",
    "kill receivers",
    "slow read",
    "read error",
    "full",
    "roll back",
    "new base",
    "same base",
    "remove adapter",
    "kill owner",
)
OTHERS = ("new base", "same base", "remove adapter")
"""Strikes on an adapter's update that are other calls: base weights that come meanwhile, of other bytes or of
the same ones under a new label, and the removal of what is about to be replaced."""
OF_ADAPTERS = (*OTHERS, "kill owner")
"""The last one kills the trainer whose memory the base weights lie in, while another pushes the adapter."""
WITHOUT_STAGES = ("none", "slow read", "read error", "full")
"""Strikes that come by themselves: they have one stage only."""


@dataclass(frozen=True)
class Round:
    """One round; `line` repeats it."""

    kind: str
    path: str
    staging: str
    stage: str
    strike: str
    seed: int

    @property
    def key(self) -> str:
        return " / ".join((self.kind, self.path, self.staging, self.stage, self.strike))

    @property
    def passes(self) -> bool:
        """Whether the trainer does not wait to be struck: a call is under way, and goes on meanwhile."""
        return self.stage == "commit" or (self.stage == "transfer" and self.path in FETCHED)

    @property
    def line(self) -> str:
        return f'python -m tests.faults repeat "{self.key} / {self.seed}"'


def parse(text: str) -> Round:
    """The round of a `key / seed`."""
    *kind, seed = text.split(" / ")
    made = Round(*kind, int(seed))
    if not can_be(*kind):
        raise ValueError(f"there is no round {made.key!r}")
    return made


def can_be(kind: str, path: str, staging: str, stage: str, strike: str) -> bool:
    """Whether these five meet."""
    if (kind == "adapter") != (staging == OWN) or (kind == "base" and strike in OF_ADAPTERS):
        return False
    if kind == "adapter" and (path == "adopt" or strike == "roll back"):
        return False
    if path == "adopt" and (staging != "none" or stage == "prepared"):
        return False
    if stage == "staging" and path in ("tensor", "distributed"):
        return False  # nothing is put anywhere before the update begins
    if strike == "kill group":
        return path == "distributed" and stage in ("begun", "transfer", "sent", "prepared", "commit")
    if strike == "kill receivers":
        return path == "tensor" and stage in ("begun", "transfer", "sent", "prepared", "commit")
    if strike in ("slow read", "read error"):
        return path == "disk" and stage == "transfer"
    if strike == "full":
        return path in (*FETCHED, "adopt") and stage == "staging"
    if strike == "roll back":
        return stage == "committed" and path != "adopt" and staging != "none"
    if strike == "none":
        return stage == "committed"
    if strike == "abort update":
        return stage not in ("start", "staging")
    return True


Five = tuple[str, str, str, str, str]


def all_kinds() -> list[Five]:
    """Every (kind, path, staging, stage, strike) that can be."""
    return [five for five in itertools.product(KINDS, PATHS, STAGINGS, STAGES, STRIKES) if can_be(*five)]


def pairwise(seed: int, at_least: int) -> list[Round]:
    """Rounds that cover the pairs of kind, path, staging and stage, and as many with strikes as fit in."""
    rng = random.Random(seed)
    kinds = all_kinds()
    needed = {pair for five in kinds for pair in _pairs(five[:4])}
    seen: set[tuple] = set()
    chosen: list[Round] = []
    while needed - seen or len(chosen) < at_least:
        rng.shuffle(kinds)
        best = max(kinds, key=lambda k: 10 * len(_pairs(k[:4]) - seen) + len(_pairs(k) - seen))
        seen |= _pairs(best)
        chosen.append(Round(*best, rng.randrange(1, 1_000_000)))
    rng.shuffle(chosen)
    return chosen


def endless(seed: int, counts: Counter[str], kind: str = "") -> Iterator[Round]:
    """Rounds at random, those first that were run least; of one kind, or of any."""
    rng = random.Random(seed)
    kinds = [five for five in all_kinds() if kind in ("", five[0])]
    ran = Counter(counts)
    while True:
        rng.shuffle(kinds)
        five = min(kinds[: len(kinds) // 3], key=lambda k: ran[" / ".join(k)])
        made = Round(*five, rng.randrange(1, 1_000_000))
        ran[made.key] += 1
        yield made


def _pairs(kind: tuple[str, ...]) -> set[tuple]:
    return set(itertools.combinations(enumerate(kind), 2))
