"""Running sequences, as a process of their own that notes when each token arrives.

python -m tests.benchmarks.gpu.listener ADDRESS
"""

from __future__ import annotations

import random
import sys
import threading
import time

from tests.children import obey
from trainers_adapters import RolloutClient


class Listener:
    """Streams of one engine. Times are those of time.monotonic(), which all processes share."""

    def __init__(self, address: str) -> None:
        self._client = RolloutClient(address)
        self._arrivals: list[list[float]] = []
        self._threads: list[threading.Thread] = []
        self._errors: list[str] = []

    def start(self, num_streams: int, num_in: int, num_out: int, vocab_size: int) -> int:
        """Begin the streams; returns once each has had its first token."""
        rng = random.Random(7)
        began = [threading.Event() for _ in range(num_streams)]
        for event in began:
            prompt = [rng.randrange(3, vocab_size) for _ in range(num_in)]
            times: list[float] = []
            self._arrivals.append(times)
            thread = threading.Thread(target=self._listen, args=(prompt, num_out, times, event), daemon=True)
            thread.start()
            self._threads.append(thread)
        for event in began:
            event.wait(120)
        if self._errors:
            raise RuntimeError(self._errors[0])
        return num_streams

    def _listen(self, prompt: list[int], num_out: int, times: list[float], began: threading.Event) -> None:
        try:
            for _ in self._client.generate_stream(prompt, max_tokens=num_out, ignore_eos=True):
                times.append(time.monotonic())
                began.set()
        except Exception as error:  # noqa: BLE001 - told by stop()
            self._errors.append(f"{type(error).__name__}: {error}")
        began.set()

    def stop(self) -> list[list[float]]:
        """End the streams; gives the arrival times of each."""
        self._client.abort(all=True)
        for thread in self._threads:
            thread.join(30)
        if self._errors:
            raise RuntimeError(self._errors[0])
        return self._arrivals


if __name__ == "__main__":
    listener = Listener(sys.argv[1])
    obey({"start": listener.start, "stop": listener.stop})
