"""The row of many updates while sequences run: what they leave behind, which should be nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch

from tests import children
from tests.benchmarks.gpu.bench import Bench
from tests.benchmarks.gpu.floors import synchronise
from tests.benchmarks.gpu.model import Weights, write_config
from tests.benchmarks.gpu.results import Line
from tests.holdings import Holdings, grown, held
from tests.load import check_labels
from trainers_adapters import IpcArena
from weight_updater.requests import UpdateReply

NUM_STREAMS = 8
NUM_IN, NUM_OUT = 64, 448
PROMPT_TOKENS = 1024
CHECKED_EACH = 50
"""Of so many updates one comes with checksums, and is looked at afterwards."""
NOISE = {"RSS": 4096}
"""kB that an allocator may take more or less from one moment to the next. Nothing else may grow at all."""
WARM_UP = 50
"""Updates after which allocators have taken what they keep; everything else is flat after the second."""
MOST_SECONDS = 150.0


def updates_under_load(bench: Bench) -> Line:
    """Updates by ipc, by two stagings in turn, beside streams that never end. Leaves no engine running."""
    num_layers, num_updates = bench.sizes.under_load
    shape = bench.shape | {"num_hidden_layers": num_layers}
    bench.engines.start(write_config(bench.folder / "few-layers", shape), "--load-format", "random")
    try:
        weights = Weights(bench.engine.weights.layout(), bench.device, seed=2)
        with IpcArena() as sender, children.start("tests.load", bench.engine.address) as load:
            first = bench.push(sender, source=weights)
            _touch_every_page(bench)
            load.ask(
                "start",
                num_streams=NUM_STREAMS,
                num_in=NUM_IN,
                num_out=NUM_OUT,
                vocab_size=shape["vocab_size"],
            )
            replies, samples, seconds = _push_many(bench, sender, weights, num_updates)
            completions = load.ask("stop")
        commits = [(reply.version, reply.commit_sequence) for reply in (first, *replies)]
        most_labels = check_labels(completions, commits)
        bench.check_live(source=weights)
    finally:
        bench.engines.stop()
    if sum(reply.num_kept > 0 for reply in replies) < 0.9 * num_updates or most_labels < 3:
        raise AssertionError("hardly a sequence was running at the commits; nothing was seen")
    found = _found(samples)
    note = (
        f"{num_updates:,} updates of {weights.nbytes / 1e9:.1f} GB in {seconds:.0f} s beside {NUM_STREAMS} "
        f"streams; up to {most_labels} versions in one completion, labels in the order of the commits; "
        f"{_told(samples)}" + "".join(f"; GREW: {what}" for what in found)
    )
    return bench.line("updates_under_load", len(found), None, note=note)


def _touch_every_page(bench: Bench) -> None:
    """A CPU gives the pool its memory as it is written, and allocators keep what the largest pass needs."""
    tokens = bench.sizes.num_pages * bench.engine.rollout.info().page_size
    prompts = bench.prompts(0, -(-tokens // PROMPT_TOKENS), PROMPT_TOKENS)
    bench.engine.rollout.generate_batch(prompts, max_tokens=1)


def _push_many(
    bench: Bench, sender: IpcArena, weights: Weights, num_updates: int
) -> tuple[list[UpdateReply], dict[int, Holdings], float]:
    """The replies; what was held after the second update, the warm-up and the last; the seconds of all."""
    replies: list[UpdateReply] = []
    samples: dict[int, Holdings] = {}
    started = time.perf_counter()
    for number in range(1, num_updates + 1):
        weights.change()
        checked = number % CHECKED_EACH == 0
        options = {"verify": checked, "allow_nonfinite": not checked, "inflight": "keep"}
        reply = bench.push(sender, source=weights, staging=("none", "device")[number % 2], **options)
        replies.append(reply)
        if checked:
            bench.check_live(source=weights)
        if number in (2, min(WARM_UP, num_updates // 2), num_updates):
            samples[number] = _held(bench)
        if time.perf_counter() - started > MOST_SECONDS:
            raise AssertionError(f"{number} of {num_updates} updates took {MOST_SECONDS:.0f} s")
    return replies, samples, time.perf_counter() - started


def _held(bench: Bench) -> Holdings:
    found = held(bench.engine.pid, os.getpid())
    if bench.is_cuda:
        synchronise(bench.device)
        free, total = torch.cuda.mem_get_info(bench.device)
        found["GPU memory of both"] = (total - free) >> 10
    return found


def _found(samples: Mapping[int, Holdings]) -> list[str]:
    """What has grown: host memory since the warm-up, everything else since the second update."""
    second, warm, last = (samples[number] for number in sorted(samples))
    memory = [what for what in last if what.endswith("RSS")]
    since = {what: (warm if what in memory else second)[what] for what in last}
    return list(grown(since, last, NOISE))


def _told(samples: Mapping[int, Holdings]) -> str:
    numbers = sorted(samples)
    figures = (
        f"{what} {' '.join(f'{samples[number][what]:,}' for number in numbers)}"
        for what in samples[numbers[0]]
    )
    return f"after {', '.join(map(str, numbers))} updates (memory in kB): {'; '.join(figures)}"
