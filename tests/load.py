"""Sequences that run beside updates, as a process of their own; and what their tokens' labels must be.

python -m tests.load ADDRESS
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Sequence

from tests.children import obey
from trainers_adapters import RolloutClient
from trainers_adapters.results import Completion
from trainers_adapters.rollout_calls import joined

Label = tuple[int, int]
"""Weight version and commit sequence."""
Spans = list[tuple[int, int, int]]
"""(first token, weight version, commit sequence) in order."""
Labelled = tuple[int, Spans]
"""How many tokens a completion has, and its labels."""

FIRST_TOKEN_S = 120.0
END_S = 30.0


class Load:
    """Streams that begin anew whenever they end, until `stop`."""

    def __init__(self, address: str) -> None:
        self._client = RolloutClient(address)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._completions: list[Completion] = []
        self._errors: list[str] = []

    def start(self, num_streams: int, num_in: int, num_out: int, vocab_size: int) -> int:
        """Begin; returns once each stream has had its first token."""
        began = [threading.Event() for _ in range(num_streams)]
        for number, event in enumerate(began):
            rng = random.Random(number)
            arguments = (rng, num_in, num_out, vocab_size, event)
            thread = threading.Thread(target=self._run, args=arguments, daemon=True)
            thread.start()
            self._threads.append(thread)
        for event in began:
            if not event.wait(FIRST_TOKEN_S):
                raise RuntimeError("a stream has no first token")
        self._check()
        return num_streams

    def stop(self) -> list[Labelled]:
        """End the streams; gives the labels of all their completions."""
        self._stopping.set()
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            while thread.is_alive():
                if time.monotonic() > deadline:
                    raise RuntimeError("a stream does not end")
                self._client.abort(all=True)  # again, for one that has begun just now
                thread.join(0.2)
        self._check()
        return [
            (len(one.token_ids), [(s.start, s.weight_version, s.commit_sequence) for s in one.spans])
            for one in self._completions
        ]

    def _run(
        self, rng: random.Random, num_in: int, num_out: int, vocab_size: int, began: threading.Event
    ) -> None:
        try:
            while not self._stopping.is_set():
                prompt = [rng.randrange(3, vocab_size) for _ in range(num_in)]
                parts = []
                for part in self._client.generate_stream(prompt, max_tokens=num_out, ignore_eos=True):
                    parts.append(part)
                    began.set()
                self._completions.append(joined(parts))
        except Exception as error:  # noqa: BLE001 - told by the next command
            self._errors.append(f"{type(error).__name__}: {error}")
        began.set()

    def _check(self) -> None:
        if self._errors:
            raise RuntimeError(self._errors[0])


def check_labels(completions: Sequence[Labelled], commits: Sequence[Label]) -> int:
    """Each token has one label, that of a commit, and none has an earlier one than the token before it.

    Args:
        commits: what was live, in order, from the first completion's start on.

    Returns:
        how many different labels there were in the completion that has most of them.
    """
    place = {label: at for at, label in enumerate(commits)}
    most = 0
    for num_tokens, spans in completions:
        starts = [start for start, _, _ in spans]
        if (
            starts[:1] != [0] * bool(num_tokens)
            or sorted(set(starts)) != starts
            or starts[-1:] >= [num_tokens]
        ):
            raise AssertionError(f"labels of {num_tokens} tokens start at {starts}")
        if unknown := [label for _, *label in spans if tuple(label) not in place]:
            raise AssertionError(f"nothing was committed as {unknown[0]} (version, commit sequence)")
        order = [place[version, sequence] for _, version, sequence in spans]
        if sorted(set(order)) != order:
            raise AssertionError(f"labels go back: commits {order} of {len(commits)}")
        most = max(most, len(order))
    return most


if __name__ == "__main__":
    load = Load(sys.argv[1])
    obey({"start": load.start, "stop": load.stop})
