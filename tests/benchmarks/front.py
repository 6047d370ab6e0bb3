"""What the way through gRPC and two processes costs for each token, where the model costs next to nothing."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from rollout_engine.sampling import SamplingParams
from tests.benchmarks.table import Row
from tests.engines import serve
from tests.local_engine import LocalEngine
from tests.tiny import make_tiny
from trainers_adapters import Request

BATCH = 64
TOKENS = 256
REPEATS = 5


def front(_: Path) -> list[Row]:
    """Microseconds a token of GenerateBatch through gRPC, against scheduler and runner in one process."""
    prompts = [[3 + i % 100, 5, 7, 11] for i in range(BATCH)]
    settings = {"max_tokens": TOKENS, "ignore_eos": True}
    num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_tiny(Path(folder) / "model")
        engine = LocalEngine(model_dir, num_pages=2048, num_threads=1)

        def here() -> float:
            engine.restart()
            start = time.perf_counter()
            for i, prompt in enumerate(prompts):
                engine.submit(prompt, SamplingParams(**settings, seed=i))
            engine.run()
            return time.perf_counter() - start

        # One thread on both sides: two gain nothing on a model this small.
        inside = statistics.median([here() for _ in range(REPEATS + 1)][1:])
        requests = [Request(prompt, {**settings, "seed": i}) for i, prompt in enumerate(prompts)]
        with serve(model_dir, "--num-pages", "2048") as running:

            def there() -> float:
                start = time.perf_counter()
                completions = running.rollout.generate_batch(requests)
                assert sum(len(c.token_ids) for group in completions for c in group) == BATCH * TOKENS
                return time.perf_counter() - start

            outside = statistics.median([there() for _ in range(REPEATS + 1)][1:])
    torch.set_num_threads(num_threads)  # LocalEngine set it for this process
    scale = 1e6 / (BATCH * TOKENS)
    note = f"{(outside - inside) * scale:.1f} us a token on top"
    return [
        Row(f"GenerateBatch of {BATCH}, tiny model, a token", outside * scale, "us", inside * scale,
            "in process", outside / inside, "none", True, note)
    ]  # fmt: skip
