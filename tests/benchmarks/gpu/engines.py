"""The engines of a run, one at a time, all with the same configuration; and what a tiny run makes smaller."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.model import QWEN3_8B, TINY, write_config
from tests.engines import RunningEngine, serve

START_SECONDS = 420.0
"""Of an engine whose kernels have to be compiled first."""
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def say(what: str) -> None:
    """A line of progress."""
    print(f"  {time.strftime('%H:%M:%S')} {what}", flush=True)


@dataclass(frozen=True)
class Sizes:
    """What a tiny run makes smaller."""

    num_pages: int
    stream_bytes: int  # of an update by the gRPC stream, for each repeat
    window_s: float  # of counting tokens
    load: tuple[int, int]  # batch and length of the load beside an update
    prompts: tuple[int, int, int]  # prompts, their length and sampled tokens for log-probabilities
    max_prefill_tokens: int
    under_load: tuple[int, int]  # layers of the model, and updates


FULL = Sizes(16384, 2 << 30, 0.8, (64, 3000), (8, 128, 64), 8192, (4, 1000))
SMALL = Sizes(2048, 64 << 10, 0.3, (4, 1500), (2, 16, 8), 512, (2, 100))


class Engines:
    """Starts and stops them. running: the one that runs. num_started: all that ever came up."""

    def __init__(self, device: torch.device, tiny: bool, folder: Path) -> None:
        self.running: RunningEngine | None = None
        self.num_started = 0
        self._device = device
        self._tiny = tiny
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._failed_in_a_row = 0

    @property
    def shape(self) -> dict:
        return TINY if self._tiny else QWEN3_8B

    @property
    def sizes(self) -> Sizes:
        return SMALL if self._tiny else FULL

    @property
    def config_only(self) -> Path:
        """A model directory without weights, for random ones."""
        return write_config(self._folder / "config-only", self.shape)

    @property
    def config(self) -> dict[str, Any]:
        """ServeConfig fields of every engine of the run, but for the weights."""
        fields: dict[str, Any] = {
            "dtype": "bfloat16",
            "device": str(self._device),
            "num_pages": self.sizes.num_pages,
            "max_running_requests": 256,
            "max_prefill_tokens": self.sizes.max_prefill_tokens,
            "prefix_cache": False,
        }
        if self._device.type == "cuda":
            fields |= {
                "cuda_graphs": True,
                "capture_batch_sizes": ",".join(map(str, CAPTURE_SIZES)),
                "overlap": True,
                "attention_backend": "flashinfer",
            }
        return fields

    def flags(self) -> list[str]:
        """`config` as options of `rollsync serve`, with staging on the device."""
        options = ["--reserve-device-staging", "--weights-root", str(self._folder)]
        for name, value in self.config.items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                options.append(f"--{option}" if value else f"--no-{option}")
            else:
                options += [f"--{option}", str(value)]
        return options

    def start_random(self) -> RunningEngine:
        """An engine with random weights."""
        self.start(self.config_only, "--load-format", "random")
        assert self.running is not None
        return self.running

    def start(self, model: Path, *flags: str) -> float:
        """Start an engine in the place of the one that runs; gives the seconds until it was ready."""
        self.stop()
        if self._failed_in_a_row >= 2:
            raise AssertionError("no engine is started any more: two in a row did not come up")
        self._failed_in_a_row += 1
        say(f"starting an engine ({' '.join(flags) or model.name})")
        start = time.perf_counter()
        threads = 1 if self._tiny else 8
        running = serve(
            model, *self.flags(), *flags, dtype="bfloat16", num_threads=threads, start_seconds=START_SECONDS
        )
        self.running = self._stack.enter_context(running)
        self._failed_in_a_row = 0
        self.num_started += 1
        seconds = time.perf_counter() - start
        say(f"ready after {seconds:.1f} s")
        return seconds

    def stop(self) -> None:
        if self.running is not None:
            say("stopping the engine")
            self.running = None
            self._stack.close()
