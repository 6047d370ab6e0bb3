"""An update costs its bytes: neither the number of tensors nor the number of updates before it."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from tests.benchmarks.table import Row
from tests.engines import serve
from tests.tiny import make_tiny
from trainers_adapters import (
    BroadcastGroup,
    DiskDirectory,
    IpcArena,
    ModuleSource,
    TensorStream,
    push_weights,
)
from trainers_adapters.send_tensor import TensorSegment
from trainers_adapters.sending import Sender

NUM_LAYERS = 2048
NUM_TENSORS = 9 * NUM_LAYERS  # of a plain Llama, without embedding, norm and head
REPEATS = 7
NUM_UPDATES = 1000
WARM_UP = 100  # allocators, caches and pools fill up before anything is counted
GROWTH_KB = 4096  # over 1,000 updates: what noise of the allocator is allowed to be


def _senders(folder: str) -> dict[str, Sender]:
    return {
        "disk": DiskDirectory(folder),
        "distributed": BroadcastGroup(),
        "tensor stream": TensorStream(),
        "tensor shared memory": TensorSegment(),
        "ipc": IpcArena(),
    }


def tensors(_: Path) -> list[Row]:
    """Seconds that 18,432 small tensors add to an update, against a model of as many bytes in 12 tensors."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        many = _llama(Path(folder) / "many", NUM_LAYERS, 16)
        # Each layer of the other has 9 x 16 x 16 weights in matrices, but for two of its norms' 16.
        few = _llama(Path(folder) / "few", 1, NUM_LAYERS * (7 * 16 * 16 + 2 * 16) // (3 * 16))
        slow, fast = _push_seconds(many), _push_seconds(few)
    rows = []
    for path, (first, later) in slow.items():
        baseline = fast[path][1]
        added = later - baseline
        note = f"the first update: {first - fast[path][0]:.2f} s"
        what = f"{NUM_TENSORS:,} tensors by {path}, time added"
        rows.append(
            Row(what, added, "s", baseline, "12 tensors", later / baseline, "< 0.5 s", added < 0.5, note)
        )
    return rows


def _llama(directory: Path, num_layers: int, intermediate_size: int) -> Path:
    """A Llama with narrow layers."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def _push_seconds(model_dir: Path) -> dict[str, tuple[float, float]]:
    """Path -> seconds of push_weights: of the first with its sender and client, and the median later.

    The first sends the whole manifest; the engine has not seen it before. A group's rendezvous does not
    count: it comes before.
    """
    source = ModuleSource(transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
    flags = ("--weights-root", str(model_dir.parent), "--num-pages", "8")
    seconds = {}
    for path in _senders(""):
        with (
            serve(model_dir, *flags, num_threads=torch.get_num_threads()) as running,
            tempfile.TemporaryDirectory(dir=model_dir.parent) as folder,
            _senders(folder)[path] as sender,
        ):
            taken = [push_weights(source, running.weights, via=sender).seconds for _ in range(REPEATS + 1)]
        seconds[path] = taken[0], statistics.median(taken[1:])
    return seconds


def flat(_: Path) -> list[Row]:
    """What 1,000 updates of a tiny model, by all paths in turn, leave behind on both sides: nothing."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        model_dir = make_tiny(Path(folder) / "model")
        source = ModuleSource(transformers.AutoModelForCausalLM.from_pretrained(model_dir))
        running = stack.enter_context(serve(model_dir, "--weights-root", folder, "--num-pages", "64"))
        senders = _senders(f"{folder}/weights")
        for sender in senders.values():
            stack.enter_context(sender)

        def push(times: int) -> dict[str, float]:
            taken: dict[str, list[float]] = {path: [] for path in senders}
            for path in itertools.islice(itertools.cycle(senders), times):
                taken[path].append(push_weights(source, running.weights, via=senders[path]).seconds)
            time.sleep(0.5)  # threads of the last call end
            return {path: statistics.median(seconds[-20:]) for path, seconds in taken.items()}

        first = push(WARM_UP)
        before = dict(_holdings(running.pid))
        last = push(NUM_UPDATES)
        after = dict(_holdings(running.pid))
    rows = []
    for (who, what), value in after.items():
        allowed, unit = (GROWTH_KB, "kB") if what == "RSS" else (0, "")
        was = before[who, what]
        name, ratio = f"{NUM_UPDATES:,} updates: {what} of {who}", value / was if was else 1.0
        goal = f"+{allowed} {unit}".strip()
        rows.append(Row(name, value, unit, was, "before", ratio, goal, value - was <= allowed))
    for path, seconds in last.items():
        name, was = f"{NUM_UPDATES:,} updates: the last ones by {path}", first[path]
        rows.append(Row(name, seconds, "s", was, "the first", seconds / was, "<= 1.5x", seconds <= 1.5 * was))
    return rows


def _holdings(front: int) -> Iterator[tuple[tuple[str, str], int]]:
    """((process, what), how much): memory in kB, file handles, threads; files in /dev/shm for all."""
    processes = {"trainer": os.getpid(), "front": front}
    for pid in map(int, Path(f"/proc/{front}/task/{front}/children").read_text().split()):
        command = Path(f"/proc/{pid}/cmdline").read_text()
        processes["receiver" if "server.receiver" in command else "engine"] = pid
    for who, pid in processes.items():
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        yield (who, "RSS"), int(status["VmRSS"].split()[0])
        yield (who, "threads"), int(status["Threads"])
        yield (who, "file handles"), len(os.listdir(f"/proc/{pid}/fd"))
    yield ("all", "files in /dev/shm"), sum(name.startswith("rollsync-") for name in os.listdir("/dev/shm"))
