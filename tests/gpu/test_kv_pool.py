"""The KV pool of an engine that starts on its trainer's arena: its size, to the byte, and its last page."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout_engine.config import ServeConfig
from rollout_engine.kv.capacity import KvCapacity
from rollout_engine.models.weights import model_layout
from rollout_engine.runner.model_runner import ModelRunner
from tests.engines import RunningEngine
from tests.tiny import make_tiny
from weight_updater.requests import DEFAULT_BUCKET_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

DEVICE = "cuda:0"
VOCAB_SIZE = 32768
POOL_BYTES = 128 << 20
"""What the pool should have, about."""
CONTEXT_BYTES = 500 << 20
"""What CUDA takes in the engine's process before it looks at its memory, about."""
MAX_RUNNING = 256
PAGE_SIZE = 16
PAGES_EACH = 20
NUM_TOKENS = 33
MARGIN_BYTES = 64 << 20
"""Of what takes its memory in pieces of megabytes: torch's allocator, kernels that are loaded late."""


@pytest.fixture(scope="module")
def wide_bf16_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights (some 200 MB) show in what memory is left. Read only."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
    directory = tmp_path_factory.mktemp("wide-bf16")
    return make_tiny(directory, "qwen3", head_dim=128, dtype=torch.bfloat16, num_attention_heads=8, **sizes)


def fraction_for(model_dir: Path, weight_bytes: int) -> float:
    """mem_fraction_static that leaves about POOL_BYTES for the pool."""
    config = ServeConfig(model=model_dir, dtype="bfloat16", device=DEVICE, max_running_requests=MAX_RUNNING)
    reserved = 2 * DEFAULT_BUCKET_BYTES + ModelRunner(config).working_bytes()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(torch.device(DEVICE))
    return round((weight_bytes + reserved + POOL_BYTES) / (free - CONTEXT_BYTES + weight_bytes), 9)


def assert_counts_preloaded(kv: dict[str, int], weight_bytes: int, fraction: float) -> None:
    """The pool is as large as if the engine had loaded the weights itself; not counting them, it would be
    larger, by the share of them that is to be kept free.
    """

    def pool_bytes(preloaded_bytes: int) -> int:
        capacity = KvCapacity(kv["pre_model_load_bytes"], fraction, kv["reserved_bytes"])
        capacity.account_preloaded_weights(preloaded_bytes, owner="adopted")
        return capacity.num_pages(kv["available_bytes"], kv["bytes_per_page"]) * kv["bytes_per_page"]

    counted, not_counted = pool_bytes(weight_bytes), pool_bytes(0)
    assert kv["preloaded_weights_bytes"] == weight_bytes
    assert kv["kv_bytes"] == counted
    assert abs(not_counted - counted - weight_bytes * (1 - fraction)) < kv["bytes_per_page"]
    assert not_counted > counted + POOL_BYTES
    # The formula, in full: what is available, less what is kept free, less what is reserved.
    kept_free = round((kv["pre_model_load_bytes"] + weight_bytes) * (1 - fraction))
    pages = (kv["available_bytes"] - kept_free - kv["reserved_bytes"]) // kv["bytes_per_page"]
    assert abs(kv["kv_bytes"] // kv["bytes_per_page"] - pages) <= 1  # of the fraction's rounding


def prompts_for(num_pages: int) -> list[list[int]]:
    """Prompts that, with NUM_TOKENS each, need exactly so many pages: the last sampled token needs none."""
    each = [PAGES_EACH] * (num_pages // PAGES_EACH)
    left = num_pages % PAGES_EACH
    if left > 2:
        each.append(left)
    else:
        each[-1] += left
    rng = random.Random(0)
    lengths = [pages * PAGE_SIZE + 1 - NUM_TOKENS for pages in each]
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


class FewestPages:
    """The fewest free pages that an engine tells of while the block runs."""

    def __init__(self, engine: RunningEngine) -> None:
        self.fewest = engine.rollout.info().state.num_free_pages
        self._engine = engine
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._stopping.is_set():
            self.fewest = min(self.fewest, self._engine.rollout.info().state.num_free_pages)

    def __enter__(self) -> FewestPages:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()


@pytest.fixture
def engine_and_trainer(wide_bf16_dir: Path, serve_on_gpu, start_trainer, tmp_path) -> Iterator[tuple]:
    descriptor = tmp_path / "arena.json"
    weight_bytes = model_layout(wide_bf16_dir, "bfloat16").arena_bytes
    with start_trainer("tests.gpu.trainer", str(wide_bf16_dir)) as child:
        child.ask("adopt", descriptor=str(descriptor))
        fraction = fraction_for(wide_bf16_dir, weight_bytes)
        sized = ("--num-pages", "0", "--mem-fraction-static", f"{fraction:.9f}")
        flags = (*sized, "--max-running-requests", str(MAX_RUNNING), "--no-prefix-cache")
        with serve_on_gpu(wide_bf16_dir, "--weights", f"ipc:{descriptor}", *flags) as engine:
            yield engine, child, fraction


def test_the_pool_beside_an_adopted_model_holds_what_it_says(engine_and_trainer):
    engine, child, fraction = engine_and_trainer
    info = engine.rollout.info()
    assert_counts_preloaded(info.kv_capacity, info.weight_bytes, fraction)
    num_pages = info.state.num_total_pages
    assert num_pages == info.kv_capacity["kv_bytes"] // info.kv_capacity["bytes_per_page"]
    assert abs(info.kv_capacity["kv_bytes"] - POOL_BYTES) < POOL_BYTES // 2, "as asked for"

    prompts = prompts_for(num_pages)
    # Of the device no more is left than what the pool's arithmetic keeps for passes.
    torch.cuda.empty_cache()
    left = info.kv_capacity["reserved_bytes"] + MARGIN_BYTES
    free, _ = torch.cuda.mem_get_info(torch.device(DEVICE))
    assert free > left
    ballast = torch.empty(free - left, dtype=torch.uint8, device=DEVICE)
    try:
        with FewestPages(engine) as pages:
            completions = engine.together(
                prompts, max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True, seed=1
            )
    finally:
        del ballast
        torch.cuda.empty_cache()
    assert pages.fewest == 0, "the pool was not full"
    assert [completion.num_preemptions for completion in completions] == [0] * len(prompts)
    # What lay in the pages was right: the same tokens, scored in one pass each.
    differences = []
    for prompt, completion in list(zip(prompts, completions, strict=True))[::10]:
        assert len(completion.token_ids) == NUM_TOKENS
        (scored,) = engine.rollout.score([[*prompt, *completion.token_ids]])
        own = scored.logprobs[len(prompt) - 1 :]
        differences += [abs(a - b) for a, b in zip(own, completion.logprobs, strict=True)]
    assert sum(differences) / len(differences) < 0.5
    assert engine.weights.checksums().by_name == child.ask("checksums")
    child.ask("connect", address=engine.address)
    updated = child.ask("update", seed=2)
    assert engine.weights.checksums().by_name == child.ask("checksums")
    assert engine.rollout.info().state.num_free_pages == num_pages
    assert (updated["extra_bytes"], updated["graphs_recaptured"]) == (0, 0)
