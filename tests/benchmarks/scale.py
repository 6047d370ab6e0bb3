"""An update costs its bytes: neither the number of tensors nor the number of updates before it."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from tests.benchmarks.table import Row
from tests.engines import RunningEngine, serve
from tests.tiny import make_tiny
from trainers_adapters import DiskDirectory, IpcArena, ModuleSource, TensorStream, push_weights
from trainers_adapters.send_tensor import TensorSegment

NUM_LAYERS = 2048
NUM_TENSORS = 9 * NUM_LAYERS  # of a plain Llama, without embedding, norm and head
NUM_UPDATES = 1000  # by each path
WARM_UP = 100  # allocators, caches and pools fill up before anything is counted
REPEATS = 5
GROWTH_KB = 4096  # over 1,000 updates: what noise of the allocator is allowed to be


def tensors(_: Path) -> list[Row]:
    """Seconds that 18,432 small tensors add to an update, against a model of the same bytes in 11 tensors."""
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        many, few = _deep(Path(folder) / "many", NUM_LAYERS), _deep(Path(folder) / "few", 1)
        slow = _push_seconds(many, Path(folder) / "weights-many")
        fast = _push_seconds(few, Path(folder) / "weights-few")
    for path, seconds in slow.items():
        added = seconds - fast[path]
        note = f"{added / NUM_TENSORS * 1e6:.0f} us a tensor"
        what = f"{NUM_TENSORS:,} tensors by {path}, time added"
        rows.append(
            Row(
                what, added, "s", fast[path], "11 tensors", seconds / fast[path], "< 0.5 s", added < 0.5, note
            )
        )  # fmt: skip
    return rows


def _deep(directory: Path, num_layers: int) -> Path:
    """A Llama of many layers with next to no bytes in each."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def _push_seconds(model_dir: Path, folder: Path) -> dict[str, float]:
    """Path -> median seconds of push_weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    source = ModuleSource(model)
    folder.mkdir()
    seconds = {}
    with serve(
        model_dir, "--weights-root", str(folder), "--num-pages", "8", num_threads=torch.get_num_threads()
    ) as running:
        senders = {
            "disk": DiskDirectory(folder),
            "tensor stream": TensorStream(),
            "tensor shared memory": TensorSegment(),
            "ipc": IpcArena(),
        }
        for path, sender in senders.items():
            with sender:
                taken = [
                    push_weights(source, running.weights, via=sender).seconds for _ in range(REPEATS + 1)
                ]
            seconds[path] = statistics.median(taken[1:])
    return seconds


def flat(_: Path) -> list[Row]:
    """What 1,000 updates of a tiny model leave behind in the trainer, the front and the engine: nothing."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_tiny(Path(folder) / "model")
        source = ModuleSource(transformers.AutoModelForCausalLM.from_pretrained(model_dir))
        for path, make in (
            ("ipc", IpcArena),
            ("tensor shared memory", TensorSegment),
            ("tensor stream", TensorStream),
        ):
            with serve(model_dir, "--num-pages", "64") as running, make() as sender:
                rows += _flatness(path, source, running, sender)
    return rows


def _flatness(path: str, source: ModuleSource, running: RunningEngine, sender) -> list[Row]:
    def push(times: int) -> float:
        taken = []
        for _ in range(times):
            taken.append(push_weights(source, running.weights, via=sender).seconds)
        return statistics.median(taken[-WARM_UP:])

    first = push(WARM_UP)
    before = dict(_holdings(running.pid))
    last = push(NUM_UPDATES)
    time.sleep(0.2)  # threads of the last call end
    after = dict(_holdings(running.pid))
    rows = []
    for (who, what), value in after.items():
        allowed = GROWTH_KB if what == "RSS" else 0
        was, unit = before[who, what], "kB" if what == "RSS" else ""
        goal = f"+{allowed} {unit}".strip()
        rows.append(
            Row(f"{NUM_UPDATES} updates by {path}: {what} of {who}", value, unit, was, "before",
                value / was if was else 1.0, goal, value - was <= allowed)
        )  # fmt: skip
    rows.append(
        Row(f"{NUM_UPDATES} updates by {path}: seconds of one", last, "s", first, "before", last / first,
            "<= 1.5x", last <= 1.5 * first)
    )  # fmt: skip
    return rows


def _holdings(front: int) -> Iterator[tuple[tuple[str, str], int]]:
    """((process, what), how much): memory in kB, file handles, threads; files in /dev/shm for all."""
    children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    for who, pid in {"trainer": os.getpid(), "front": front, "engine": int(children[0])}.items():
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        yield (who, "RSS"), int(status["VmRSS"].split()[0])
        yield (who, "threads"), int(status["Threads"])
        yield (who, "file handles"), len(os.listdir(f"/proc/{pid}/fd"))
    yield ("all", "files in /dev/shm"), sum(name.startswith("rollsync-") for name in os.listdir("/dev/shm"))
