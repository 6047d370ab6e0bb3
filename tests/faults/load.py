"""Load: clients generate, cancel and abort while updates cycle through paths, stagings and policies.

python -m tests.faults.load [--updates 1000] [--clients 64]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.faults.nursery import Forked, Nursery, nursery
from tests.faults.stand import RECEIVERS, Stand
from tests.faults.weights import base_of, load_model, weights_of
from tests.tiny import make_tiny
from tests.wire.trainer import Named, checksums_of
from trainers_adapters import (
    BroadcastGroup,
    DiskDirectory,
    IpcArena,
    TensorSegment,
    TensorStream,
    push_weights,
)
from trainers_adapters.sending import Sender

STAGINGS = ("host", "device", "none")
INFLIGHTS = ("keep", "recompute", "wait", "abort")
NUM_PROCESSES = 4
GROWTH_BYTES = 16 << 20
"""How much larger each process may be at the end than after the first quarter of the updates."""


@dataclass
class Load:
    """What a run saw. pauses: seconds, by path. memory: resident bytes by process, over time."""

    updates: Counter[str] = field(default_factory=Counter)
    pauses: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    num_aborted: int = 0
    memory: list[dict[str, int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Rows of text."""
        mib = 1 << 20
        first, last = self.memory[len(self.memory) // 4], self.memory[-1]
        streams = ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()) if what != "tokens")
        rows = [
            f"{self.updates.total()} updates in {self.seconds:.0f} s; {self.counts['tokens']} tokens",
            f"streams: {streams}",
            f"errors that were not asked for: {len(self.errors)}",
            "MiB after a quarter and at the end: "
            + ", ".join(f"{who} {first[who] / mib:.0f}, {last[who] / mib:.0f}" for who in last),
            f"{'path':12} {'updates':>8} {'pause ms, median':>18} {'most':>8}",
        ]
        for path, pauses in self.pauses.items():
            middle = sorted(pauses)[len(pauses) // 2]
            rows.append(f"{path:12} {len(pauses):8} {middle * 1e3:18.1f} {max(pauses) * 1e3:8.1f}")
        return "\n".join(rows)


def run(stand: Stand, model_dir: Path, num_updates: int, num_clients: int, seed: int) -> Load:
    """Put the load on a stand that serves and has been quiet.

    Raises:
        AssertionError: what did not hold.
    """
    base, load = base_of(load_model(model_dir)), Load()
    rng = random.Random(seed)
    per_process = num_clients // NUM_PROCESSES
    crowds = [
        stand.nursery.fork(
            "crowd", address=stand.address, num_clients=per_process, seed=rng.randrange(1 << 30)
        )
        for _ in range(NUM_PROCESSES)
    ]
    commits = {stand.state().commit_sequence: stand.state().weight_version}
    started = time.monotonic()
    try:
        with _senders(stand.work_dir) as senders:
            _update(stand, base, senders, num_updates, load, commits, rng)
        load.seconds = time.monotonic() - started
        _gather(crowds, load, commits)
    finally:
        for crowd in crowds:
            crowd.close()
    assert not load.errors, load.errors
    assert load.counts["abort by an update"] <= load.num_aborted, (load.counts, load.num_aborted)
    early = load.memory[len(load.memory) // 4]
    for who, after in load.memory[-1].items():
        before = early[who]
        assert after - before < GROWTH_BYTES, f"the {who} grew from {before} to {after} bytes: {load.memory}"
    return load


def _update(
    stand: Stand,
    base: dict[str, torch.Tensor],
    senders: dict[str, Sender],
    num_updates: int,
    load: Load,
    commits: dict[int, int],
    rng: random.Random,
) -> None:
    kinds = list(itertools.product(INFLIGHTS, STAGINGS, senders))
    rng.shuffle(kinds)
    kinds.insert(0, kinds.pop([path for *_, path in kinds].index("tensor")))  # it starts the receivers
    ways = itertools.cycle(kinds)
    for number, (inflight, staging, path) in zip(range(num_updates), ways, strict=False):
        weights = weights_of(base, rng.randrange(1, 1 << 30))
        report = push_weights(
            Named(weights.items()),
            stand.weights,
            via=senders[path],
            staging=staging,
            inflight=inflight,
            timeout_s=120.0,
        )
        (reply,) = report.replies.values()
        assert reply.commit_sequence not in commits
        commits[reply.commit_sequence] = reply.version
        load.updates[path] += 1
        load.pauses.setdefault(path, []).append(reply.seconds.pause)
        load.num_aborted += reply.num_aborted
        if number % max(1, num_updates // 40) == 0:
            load.memory.append(_memory(stand))
            live = stand.weights.checksums()
            assert live.by_name == checksums_of(weights.items())
            assert (live.weight_version, live.commit_sequence) == (reply.version, reply.commit_sequence)


def _gather(crowds: list[Forked], load: Load, commits: dict[int, int]) -> None:
    for crowd in crowds:
        crowd.say("stop")
    for crowd in crowds:
        report = crowd.hear(120.0)
        assert report is not None, "a process of clients does not end"
        load.counts += Counter(report["counts"])
        load.errors += report["errors"]
        wrong = [pair for pair in report["commits"] if commits.get(pair[0]) != pair[1]]
        assert not wrong, f"(commit, version) that no update made: {wrong}"
        assert crowd.wait(20) == 0


@contextlib.contextmanager
def _senders(work_dir: Path) -> Iterator[dict[str, Sender]]:
    with contextlib.ExitStack() as stack:
        made: dict[str, Sender] = {
            "disk": DiskDirectory(work_dir / "load"),
            "distributed": BroadcastGroup(bucket_bytes=65536),
            "tensor": TensorStream(chunk_bytes=16384),
            "segment": TensorSegment(),
            "ipc": IpcArena(),
        }
        yield {path: stack.enter_context(sender) for path, sender in made.items()}


def _memory(stand: Stand) -> dict[str, int]:
    """Of the engine, its front and its receivers, whom the stream of every update needs."""
    receivers = stand.nursery.children()["receiver"]
    assert len(receivers) == RECEIVERS
    pids = {"engine": stand.engine_pid, "front": stand.front.pid}
    pids |= {f"receiver {number}": pid for number, pid in enumerate(sorted(receivers), start=1)}
    return {who: _resident(pid) for who, pid in pids.items()}


def _resident(pid: int) -> int:
    """Anonymous memory of a process that is resident, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def on_new_stand(
    parent: Nursery, model_dir: Path, work_dir: Path, num_updates: int, num_clients: int
) -> Load:
    """Load on an engine of its own, which must give back what it took."""
    seed = int(os.environ.get("FAULTS_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"seed {seed}", flush=True)
    stand = Stand(parent, model_dir, work_dir, num_pages=384)
    stand.start()
    run(stand, model_dir, 15, NUM_PROCESSES, seed)
    stand.until_quiet(20.0)
    stand.take_baseline()
    load = run(stand, model_dir, num_updates, num_clients, seed)
    stand.until_quiet(20.0)
    stand.check_given_back()
    stand.stop()
    return load


def main() -> int:
    parser = argparse.ArgumentParser(description="Clients generate while updates cycle through the paths.")
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        work_dir = Path(folder)
        model_dir = make_tiny(work_dir / "model", "llama", tied=True)
        with nursery(work_dir, model_dir) as parent:
            print(on_new_stand(parent, model_dir, work_dir, chosen.updates, chosen.clients).table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
