"""Scheduler and ModelRunner in one process, without gRPC: for parity tests and as a benchmark's peer."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path

from rollout_engine.config import ServeConfig
from rollout_engine.engine_main import scheduler_limits
from rollout_engine.request_table import RequestTable
from rollout_engine.runner.model_runner import ModelRunner
from rollout_engine.sampling import SamplingParams
from rollout_engine.scheduler import Scheduler
from rollout_engine.sequence import Sequence


class LocalEngine:
    """Runs requests to their end, step by step."""

    def __init__(self, model: Path, *, num_pages: int = 256, dtype: str = "float32", **config) -> None:
        self.config = ServeConfig(model=model, dtype=dtype, num_pages=num_pages, **config)
        self.runner = ModelRunner(self.config)
        self.runner.initialize()
        self.runner.alloc_memory_pool(num_pages)
        self.runner.init_attention_backends()
        self.runner.init_cuda_graphs()
        self.modes: list[str] = []
        self.restart()

    def restart(self, **changes) -> None:
        """A fresh scheduler, with other switches, over the same model and pool."""
        config = self.config.model_copy(update=changes)
        self.overlap = self.runner.overlap if config.overlap is None else config.overlap
        num_pages = changes.get("num_pages", self.config.num_pages)
        self.scheduler = Scheduler(scheduler_limits(config, self.runner, num_pages))
        self.requests = RequestTable(self.scheduler, max_waiting=4096)
        self.modes.clear()
        self._num_submitted = 0

    def submit(self, prompt: list[int], params: SamplingParams) -> list[Sequence]:
        """Queue one request; returns its n sequences, which fill up as `run` goes on."""
        from rollout_engine.messages import SubmitRequest

        name = f"r{self._num_submitted}"
        self._num_submitted += 1
        known = {sequence.id for sequence in self.scheduler.live}
        self.requests.submit(SubmitRequest(name, prompt, params, stream=False), weight_version=1)
        return [sequence for sequence in self.scheduler.live if sequence.id not in known]

    def run(self, commit_sequence: int = 1) -> int:
        """Run until nothing is live; returns the number of steps."""
        num_steps = 0
        in_flight = None
        while not self.scheduler.is_idle or in_flight is not None:
            batch = self.scheduler.schedule(1, commit_sequence)
            launched = None
            if batch is not None:
                self.modes.append(batch.forward_mode.name)
                launched = (batch, self.runner.launch(batch))
                num_steps += 1
            assert launched or in_flight, "live sequences, and nothing can run"
            if not self.overlap:
                in_flight, launched = launched, None
            if in_flight is not None:
                for sequence in self.scheduler.process(in_flight[0], in_flight[1].result()):
                    self.requests.tell(sequence, 1)
            in_flight = launched
        self.scheduler.check()
        return num_steps

    def generate(self, prompts: Many[list[int]], params: SamplingParams) -> list[Sequence]:
        """Run all prompts together; one sequence for each (n must be 1)."""
        sequences = [self.submit(prompt, params)[0] for prompt in prompts]
        self.run()
        return sequences
