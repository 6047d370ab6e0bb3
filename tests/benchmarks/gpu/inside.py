"""The engine called in its own process: its real loop, fed from a queue instead of a socket.

python -m tests.benchmarks.gpu.inside CONFIG_JSON
"""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from rollout_engine import messages
from rollout_engine.config import ServeConfig
from rollout_engine.engine_main import build
from rollout_engine.sampling import SamplingParams
from tests.children import obey


class QueueChannel:
    """What Channel does, between threads: commands go in by `put`, and outputs of sequences are counted."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[messages.Command | None] = queue.SimpleQueue()
        self.ready = threading.Event()
        self.finished: queue.SimpleQueue[messages.SequenceOutput] = queue.SimpleQueue()
        self.failure = ""

    def put(self, command: messages.Command | None) -> None:
        self._commands.put(command)

    def commands(self) -> Iterator[messages.Command]:
        while (command := self._commands.get()) is not None:
            yield command

    def send(self, *events: messages.Event) -> None:
        for event in events:
            match event:
                case messages.Ready():
                    self.ready.set()
                case messages.Outputs():
                    for output in event.outputs:
                        if output.finish_reason:
                            self.finished.put(output)
                case messages.RequestRefused() | messages.Failed():
                    self.failure = event.error.message


class Inside:
    """The engine's loop in a thread of its own, and batches for it."""

    def __init__(self, config: ServeConfig) -> None:
        self._channel = QueueChannel()
        self._config = config
        self._vocab_size = 0
        self._num_batches = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        channel: Any = self._channel
        try:
            engine = build(self._config, channel)
            engine.run()
        except Exception as error:  # told by `ready`
            self._channel.failure = f"{type(error).__name__}: {error}"
            self._channel.ready.set()
            raise

    def ready(self, vocab_size: int) -> bool:
        self._channel.ready.wait()
        self._check()
        self._vocab_size = vocab_size
        return True

    def generate(self, batch: int, num_in: int, num_out: int) -> float:
        """Seconds from submitting a batch to its last completion."""
        rng = random.Random(self._num_batches)
        self._num_batches += 1
        prompts = [[rng.randrange(3, self._vocab_size) for _ in range(num_in)] for _ in range(batch)]
        start = time.perf_counter()
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=num_out, ignore_eos=True, seed=rng.randrange(1 << 40))
            self._channel.put(
                messages.SubmitRequest(f"{self._num_batches}-{i}", prompt, params, stream=False)
            )
        outputs = [self._next() for _ in range(batch)]
        seconds = time.perf_counter() - start
        if any((len(o.token_ids), len(o.logprobs)) != (num_out, num_out) for o in outputs):
            raise RuntimeError("a completion is not whole")
        return seconds

    def _next(self) -> messages.SequenceOutput:
        while True:
            try:
                return self._channel.finished.get(timeout=5)
            except queue.Empty:
                self._check()
                if not self._thread.is_alive():
                    raise RuntimeError("the engine's loop has ended") from None

    def _check(self) -> None:
        if self._channel.failure:
            raise RuntimeError(self._channel.failure)


if __name__ == "__main__":
    inside = Inside(ServeConfig(**json.loads(sys.argv[1])))
    obey({"ready": inside.ready, "generate": inside.generate})
