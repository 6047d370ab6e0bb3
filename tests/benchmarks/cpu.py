"""A batch and the updates of the two-core goals, on SmolLM2-135M in float32.

Each row stands beside a floor or a peer that was measured in the same run.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rollout_engine.sampling import SamplingParams
from tests.benchmarks.table import Row
from tests.engines import serve
from tests.local_engine import LocalEngine
from trainers_adapters import (
    BroadcastGroup,
    DiskDirectory,
    IpcArena,
    ModuleSource,
    Request,
    TensorStream,
    push_weights,
)
from trainers_adapters.send_tensor import TensorSegment

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "models"
NUM_REQUESTS = 16
REPEATS = 5
BATCH_REPEATS = 3
"""Of each side of the batch, in turn; a repeat takes about a minute."""


def workload(vocab_size: int) -> list[tuple[list[int], int]]:
    """16 (prompt, output length) pairs; both lengths log-uniform in [16, 256], seed 0."""
    rng = random.Random(0)

    def length() -> int:
        return round(math.exp(rng.uniform(math.log(16), math.log(256))))

    pairs = [(length(), length()) for _ in range(NUM_REQUESTS)]
    return [([rng.randrange(3, vocab_size) for _ in range(p)], o) for p, o in pairs]


def seconds_of(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def batch(model_dir: Path) -> list[Row]:
    """Tokens per second of a mixed batch: engine in process and through gRPC, against generate."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    work = workload(model.config.vocab_size)
    num_tokens = sum(length for _, length in work)
    longest = max(len(prompt) for prompt, _ in work)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in work])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in work])

    def peer(most: int) -> None:
        options = {"max_new_tokens": most, "min_new_tokens": most, "do_sample": True, "top_k": 0}
        out = model.generate(ids, attention_mask=mask, pad_token_id=0, **options)
        assert out.shape[1] == longest + most

    engine = LocalEngine(model_dir, num_pages=1024)

    def in_process(at_most: int) -> None:
        engine.restart()
        lengths = [min(length, at_most) for _, length in work]
        sequences = [
            engine.submit(prompt, SamplingParams(max_tokens=length, ignore_eos=True, seed=i))[0]
            for i, ((prompt, _), length) in enumerate(zip(work, lengths, strict=True))
        ]
        engine.run()
        assert [len(s.output_ids) for s in sequences] == lengths

    most = max(length for _, length in work)
    with serve(model_dir, "--num-pages", "1024", num_threads=torch.get_num_threads()) as running:

        def through_grpc(at_most: int) -> None:
            requests = [
                Request(prompt, {"max_tokens": min(length, at_most), "ignore_eos": True, "seed": i})
                for i, (prompt, length) in enumerate(work)
            ]
            running.rollout.generate_batch(requests)

        def quiet(run: Callable[[int], None]) -> float:
            run(4)  # weights that nobody touched for a minute may have left memory: a host may reclaim them
            running.rollout.flush_cache()  # each batch is new to the engine, as it is to the others
            time.sleep(0.5)  # threads of the one before stop looking for work
            return seconds_of(lambda: run(most))

        taken = [(quiet(in_process), quiet(peer), quiet(through_grpc)) for _ in range(BATCH_REPEATS)]
    local, reference, remote = (num_tokens / statistics.median(side) for side in zip(*taken, strict=True))
    peer_is = "transformers generate"
    return [
        Row("batch of 16, in process", local, "tok/s", reference, peer_is, local / reference, ">= 2x",
            local >= 2 * reference),
        Row("batch of 16, gRPC", remote, "tok/s", reference, peer_is, remote / reference, ">= 2x",
            remote >= 2 * reference),
    ]  # fmt: skip


def updates(model_dir: Path) -> list[Row]:
    """Seconds of push_weights, from its call to its return, for every path and two stagings."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    source = ModuleSource(model)
    num_bytes = source.manifest(checksums=False).nbytes
    here, there = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    floor = statistics.median(seconds_of(lambda: there.copy_(here)) for _ in range(REPEATS))
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        flags = ("--weights-root", folder, "--num-pages", "64")
        with serve(model_dir, *flags, num_threads=torch.get_num_threads()) as running:
            senders = {
                "disk": DiskDirectory(folder),
                "distributed": BroadcastGroup(),
                "tensor stream": TensorStream(),
                "tensor shared memory": TensorSegment(),
                "ipc": IpcArena(),
            }
            for path, sender in senders.items():
                with sender:
                    for staging, verify in (("host", True), ("none", True), ("host", False)):
                        rows.append(_update(source, running, path, sender, staging, verify, floor))
    return rows


def _update(source, running, path: str, sender, staging: str, verify: bool, floor: float) -> Row:
    taken, pauses = [], []
    for _ in range(REPEATS + 1):
        report = push_weights(source, running.weights, via=sender, staging=staging, verify=verify)
        taken.append(report.seconds)
        pauses.append(report.pause_seconds)
    value, pause = statistics.median(taken[1:]), statistics.median(pauses[1:])
    what = f"update by {path}, staging {staging}" + ("" if verify else ", no checksums")
    note = f"pause {pause:.2f} s"
    return Row(what, value, "s", floor, "one copy", value / floor, "< 1 s", value < 1.0, note)
