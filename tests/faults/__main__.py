"""Faults on request.

python -m tests.faults soak --minutes 10 [--seed N]    rounds at random; counts go to counts.json
python -m tests.faults repeat "disk / host / begun / kill trainer / 4711"
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.faults.nursery import Nursery, nursery
from tests.faults.play import Player
from tests.faults.rounds import Round, endless, parse
from tests.faults.stand import Stand
from tests.faults.verdict import Ledger
from tests.tiny import make_tiny
from trainers_adapters import RollsyncError

COUNTS = Path(__file__).with_name("counts.json")


@contextlib.contextmanager
def player_on(parent: Nursery, model_dir: Path, work_dir: Path) -> Iterator[Player]:
    """A player on a stand of its own, warmed up."""
    stand = Stand(parent, model_dir, work_dir)
    stand.start()
    player = Player(stand, Ledger(model_dir))
    player.warm_up()
    yield player
    stand.stop()


@contextlib.contextmanager
def playground() -> Iterator[Player]:
    """A nursery, and a player on it."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        work_dir = Path(folder)
        model_dir = make_tiny(work_dir / "model", "llama", tied=True)
        with nursery(work_dir, model_dir) as parent, player_on(parent, model_dir, work_dir) as player:
            yield player


def read_counts() -> Counter[str]:
    return Counter(json.loads(COUNTS.read_text())) if COUNTS.exists() else Counter()


def add_counts(more: Counter[str]) -> int:
    """Add rounds that were played and held; returns how many there are in all."""
    with COUNTS.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        counts = Counter(json.loads(text) if text else {}) + more
        file.truncate(0)
        file.write(json.dumps(dict(sorted(counts.items())), indent=0) + "\n")
    return counts.total()


def soak(minutes: float, seed: int) -> int:
    """Rounds until the time is over. A round that fails is told with its line; the others go on elsewhere."""
    deadline = time.monotonic() + minutes * 60
    rounds = endless(seed, read_counts())
    num_held = num_failed = 0
    print(f"seed {seed}", flush=True)
    while time.monotonic() < deadline:
        played: Counter[str] = Counter()
        try:
            with playground() as player:
                _soak(player, rounds, deadline, played)
        except (AssertionError, RollsyncError):
            traceback.print_exc()
            num_failed += 1
        finally:
            num_held += played.total()
            print(f"{num_held} rounds held, {num_failed} failed; {add_counts(played)} in all", flush=True)
    return min(1, num_failed)


def _soak(player: Player, rounds: Iterator[Round], deadline: float, played: Counter[str]) -> None:
    for round_ in rounds:
        if time.monotonic() > deadline:
            return
        started = time.monotonic()
        try:
            player.play(round_)
        except BaseException:
            print(
                f"FAILED after {time.monotonic() - started:.1f} s; repeat it by\n  {round_.line}", flush=True
            )
            raise
        played[round_.key] += 1
        if played.total() % 25 == 0:
            print(
                f"{played.total()} rounds, {(deadline - time.monotonic()) / 60:.1f} minutes left", flush=True
            )


def repeat(text: str, times: int) -> int:
    with playground() as player:
        for _ in range(times):
            started = time.monotonic()
            outcome = player.play(parse(text))
            print(f"{time.monotonic() - started:.2f} s: {outcome}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    soaking = commands.add_parser("soak")
    soaking.add_argument("--minutes", type=float, default=10.0)
    soaking.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    repeating = commands.add_parser("repeat")
    repeating.add_argument("round")
    repeating.add_argument("--times", type=int, default=1)
    chosen = parser.parse_args()
    try:
        if chosen.command == "soak":
            return soak(chosen.minutes, chosen.seed)
        return repeat(chosen.round, chosen.times)
    except (AssertionError, RollsyncError):
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
