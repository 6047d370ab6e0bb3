"""Faults on request.

python -m tests.faults soak --minutes 10 [--seed N] [--players N] [--kind base|adapter]
                                    rounds at random, several side by side; counts go to counts.json
python -m tests.faults repeat "base / disk / host / begun / kill trainer / 4711"
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.faults.adapters import MAX_ADAPTERS, Adapters
from tests.faults.nursery import Nursery, nursery
from tests.faults.play import Player
from tests.faults.rounds import KINDS, Round, endless, parse
from tests.faults.stand import Stand
from tests.faults.strikes import Outcome
from tests.faults.verdict import Ledger
from tests.tiny import make_tiny
from trainers_adapters import RollsyncError

COUNTS = Path(__file__).with_name("counts.json")
SAVE_EVERY = 5
"""Rounds; no more of them are lost when a soak is killed."""


@contextlib.contextmanager
def player_on(parent: Nursery, model_dir: Path, work_dir: Path) -> Iterator[Player]:
    """A player on a stand of its own, warmed up."""
    stand = Stand(parent, model_dir, work_dir, max_adapters=MAX_ADAPTERS)
    stand.start()
    ledger = Ledger(model_dir)
    player = Player(stand, ledger, Adapters(stand, ledger, model_dir))
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


def read_counts(path: Path = COUNTS) -> Counter[str]:
    return Counter(json.loads(path.read_text())) if path.exists() else Counter()


def add_counts(more: Counter[str], path: Path = COUNTS) -> int:
    """Add rounds that were played and held; returns how many there are in all.

    Several processes may do so at once, and any may be killed at any moment: the file is the old one or the
    new one.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        counts = read_counts(path) + more
        written = path.with_suffix(".new")
        written.write_text(json.dumps(dict(sorted(counts.items())), indent=0) + "\n")
        written.replace(path)
    finally:
        os.close(folder)
    return counts.total()


def side_by_side(minutes: float, seed: int, num_players: int, kind: str) -> int:
    """Soaks at the same time, each with processes, files and ports of its own. 1 if any saw a round fail."""
    command = [sys.executable, "-m", "tests.faults", "soak", "--minutes", str(minutes), "--players", "1"]
    command += ["--kind", kind] if kind else []
    seeds = [str(seed + number) for number in range(num_players)]
    players = [subprocess.Popen([*command, "--seed", one]) for one in seeds]
    return max(min(1, abs(player.wait())) for player in players)


def soak(minutes: float, seed: int, kind: str) -> int:
    """Rounds until the time is over. A round that fails is told with its line; the others go on elsewhere."""
    deadline = time.monotonic() + minutes * 60
    rounds = endless(seed, read_counts(), kind)
    num_held = num_failed = 0
    print(f"seed {seed}", flush=True)
    while time.monotonic() < deadline:
        held: Counter[str] = Counter()
        try:
            with playground() as player:
                _soak(player, rounds, deadline, held)
        except (AssertionError, RollsyncError, OSError):
            traceback.print_exc()
            num_failed += 1
        num_held += held.total()
        print(f"seed {seed}: {num_held} rounds held, {num_failed} failed", flush=True)
    return min(1, num_failed)


def _soak(player: Player, rounds: Iterator[Round], deadline: float, held: Counter[str]) -> None:
    """Play until the deadline or a failure; `held` gets what held, and so does the file, a few at a time."""
    unsaved: Counter[str] = Counter()
    try:
        for round_ in rounds:
            if time.monotonic() > deadline:
                return
            if not _play(player, round_).stopped and round_.strike != "full":
                print(f"not counted, the strike found nobody: {round_.line}", flush=True)
                continue
            held[round_.key] += 1
            unsaved[round_.key] += 1
            if unsaved.total() == SAVE_EVERY:
                total = add_counts(unsaved)
                unsaved.clear()
                print(
                    f"{total} rounds in all, {(deadline - time.monotonic()) / 60:.1f} minutes left",
                    flush=True,
                )
    finally:
        if unsaved:
            add_counts(unsaved)


def _play(player: Player, round_: Round) -> Outcome:
    started = time.monotonic()
    try:
        return player.play(round_)
    except BaseException:
        seconds = time.monotonic() - started
        print(f"FAILED after {seconds:.1f} s; repeat it by\n  {round_.line}\n{player.log()}", flush=True)
        raise


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
    soaking.add_argument("--players", type=int, default=3, help="mostly they wait, and need half a core each")
    soaking.add_argument("--kind", choices=KINDS, default="", help="of what is updated; any if left out")
    repeating = commands.add_parser("repeat")
    repeating.add_argument("round")
    repeating.add_argument("--times", type=int, default=1)
    chosen = parser.parse_args()
    try:
        if chosen.command == "soak" and chosen.players > 1:
            return side_by_side(chosen.minutes, chosen.seed, chosen.players, chosen.kind)
        if chosen.command == "soak":
            return soak(chosen.minutes, chosen.seed, chosen.kind)
        return repeat(chosen.round, chosen.times)
    except (AssertionError, RollsyncError):
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
