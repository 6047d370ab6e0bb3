"""Many clients in one process: they generate, cancel and abort until told to stop. Forked by the nursery."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections import Counter

from tests.faults.weights import PROMPT
from trainers_adapters import RolloutClient, RollsyncError


class Crowd:
    """What its clients saw, together."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.commits: dict[int, int] = {}  # commit sequence -> weight version, from the spans of tokens
        self.errors: list[str] = []

    def client(self, number: int, seed: int) -> None:
        """One client with a channel of its own; its streams come one after another."""
        rng = random.Random(seed)
        last = -1
        with RolloutClient(self.address) as rollout:
            while not self.stop.is_set():
                try:
                    last = self._stream(rollout, f"{number}-{rng.randrange(1 << 60)}", rng, last)
                except (RollsyncError, AssertionError) as error:
                    with self.lock:
                        self.errors.append(f"{type(error).__name__}: {error}")

    def _stream(self, rollout: RolloutClient, name: str, rng: random.Random, last: int) -> int:
        how = rng.choice(["whole", "whole", "cancelled", "aborted"])
        leave_at = rng.randint(1, 12)
        prompt = [*PROMPT[: rng.randint(4, 40)], rng.randrange(3, 120)]
        num_tokens, finish = 0, ""
        stream = rollout.generate_stream(
            prompt,
            request_id=name,
            max_tokens=rng.randint(4, 32),
            temperature=rng.choice([0.0, 1.0]),
            ignore_eos=True,
            timeout_s=60.0,
        )
        for part in stream:
            num_tokens += len(part.token_ids)
            finish = part.finish_reason
            assert finish != "error", part.error
            for span in part.spans:
                assert span.commit_sequence >= last, f"commit {span.commit_sequence} after {last} in {name}"
                last = span.commit_sequence
                with self.lock:
                    known = self.commits.setdefault(last, span.weight_version)
                assert known == span.weight_version, f"commit {last} is {known} and {span.weight_version}"
            if num_tokens >= leave_at and not finish:
                if how == "cancelled":
                    finish = how
                    break
                if how == "aborted":
                    rollout.abort(name)
                    how = "was aborted"
        stream.close()
        if finish == "abort":
            finish = "abort asked for" if how == "was aborted" else "abort by an update"
        with self.lock:
            self.counts[finish] += 1
            self.counts["tokens"] += num_tokens
        return last


def main(talk: socket.socket, *, address: str, num_clients: int, seed: int) -> int:
    """Run until a word comes; then report {"counts", "commits", "errors"}."""
    crowd = Crowd(address)
    threads = [threading.Thread(target=crowd.client, args=(n, seed + n)) for n in range(num_clients)]
    for thread in threads:
        thread.start()
    talk.recv(64)
    crowd.stop.set()
    for thread in threads:
        thread.join()
    report = {"counts": crowd.counts, "commits": list(crowd.commits.items()), "errors": crowd.errors[:20]}
    talk.sendall(json.dumps(report).encode() + b"\n")
    return 0
