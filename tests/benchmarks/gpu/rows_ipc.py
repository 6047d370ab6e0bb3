"""Rows of the ipc path, and the pause that running sequences see."""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from tests import children
from tests.benchmarks.gpu.bench import REPEATS, Bench, median_pause_ms, pause_ms, stages
from tests.benchmarks.gpu.model import Weights
from tests.benchmarks.gpu.results import Line
from trainers_adapters.clients import WeightsClient
from trainers_adapters.sending import Outgoing, Sender
from weight_updater.requests import BeginReply, Path, UpdateReply

NUM_STREAMS = 8


class Lent(Sender):
    """push_weights by ipc without a copy on the trainer's side: the weights are lent as they lie."""

    path: ClassVar[Path] = Path.IPC

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def send(self, client: WeightsClient, begun: BeginReply, outgoing: Outgoing) -> UpdateReply:
        regions, placements = [self._weights.region], self._weights.placements
        return client.update_from_ipc(begun.update_id, regions, placements)


def ipc_none(bench: Bench) -> Line:
    return _ipc(bench, "ipc_none", "none", checksums=False, floor=bench.copy_seconds)


def ipc_device(bench: Bench) -> Line:
    return _ipc(bench, "ipc_device", "device", checksums=False, floor=2 * bench.copy_seconds)


def ipc_checksums(bench: Bench) -> Line:
    return _ipc(bench, "ipc_checksums", "none", checksums=True, floor=2 * bench.copy_seconds)


def _ipc(bench: Bench, name: str, staging: str, *, checksums: bool, floor: float) -> Line:
    """One call of WeightsClient; push_weights, which makes three, stands in the note."""
    weights = bench.weights
    changes: dict[str, Any] = {"before": weights.change, "num_changed": len(weights.named)}
    value, replies = bench.repeat(lambda: bench.from_ipc(checksums=checksums, staging=staging), **changes)
    bench.check_live()
    if checksums and not all(reply.verified for reply in replies):
        raise AssertionError("the engine did not compare the checksums")
    bench.say("the same by push_weights")
    sender = Lent(weights)
    pushed, _ = bench.repeat(lambda: bench.push(sender, staging=staging, verify=checksums), **changes)
    bench.check_live()
    note = f"push_weights {pushed * 1e3:.1f} ms; {stages(replies[-1])}"
    return bench.line(name, value * 1e3, floor * 1e3, note=note)


def ipc_adopt(bench: Bench) -> Line:
    """The engine's slots point at the trainer's memory. Leaves the engine stopped."""
    weights = bench.weights
    free_before = _free_bytes(bench)
    seconds, recaptures, first = [], [], None
    try:
        for index in range(REPEATS + 1):
            weights.change()
            start = time.perf_counter()
            reply = bench.from_ipc(checksums=False, adopt=True)
            taken = time.perf_counter() - start
            bench.say(f"{taken * 1e3:.1f} ms (recapture {reply.seconds.recapture * 1e3:.1f})")
            if index:
                seconds.append(taken)
                recaptures.append(reply.seconds.recapture)
            else:
                first = (taken, reply.seconds.recapture, reply.graphs_recaptured)
        new_bytes = free_before - _free_bytes(bench)
        bench.check_live()
    finally:
        bench.stop_engine()
    value = statistics.median(t - r for t, r in zip(seconds, recaptures, strict=True))
    assert first is not None
    whole, recapture, num_graphs = first
    note = (
        f"without recapture; the first took {whole * 1e3:.1f} ms with {recapture * 1e3:.1f} ms for "
        f"{num_graphs} graphs; free memory fell by {new_bytes / 1e6:.1f} MB"
    )
    # Graphs captured anew may take a little more or less than before; weights would be gigabytes.
    return bench.line("ipc_adopt", value * 1e3, None, also=new_bytes <= 64 << 20, note=note)


def _free_bytes(bench: Bench) -> int:
    """On the whole device, whoever took it; on a CPU nothing is counted."""
    if not bench.is_cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(bench.device)[0]


def pause(bench: Bench) -> Line:
    """The longest gap between two tokens of a running stream around an update with staging device."""
    weights, vocab_size = bench.weights, bench.shape["vocab_size"]
    num_out = 3500 if not bench.tiny else 2000
    spans, replies = [], []
    with children.start("tests.benchmarks.gpu.listener", bench.engine.address) as listener:
        listener.ask("start", num_streams=NUM_STREAMS, num_in=64, num_out=num_out, vocab_size=vocab_size)
        for index in range(REPEATS + 1):
            weights.change()
            time.sleep(0.3)
            begin = time.monotonic()
            reply = bench.from_ipc(checksums=False, staging="device", inflight="keep")
            if index:
                spans.append((begin, time.monotonic()))
                replies.append(reply)
            time.sleep(0.3)
        arrivals = listener.ask("stop")
    bench.check_live()
    if not all(reply.num_kept for reply in replies):
        raise AssertionError("no sequence was running at a commit; nothing was seen")
    gaps = [_largest_gap(arrivals, span) for span in spans]
    usual = statistics.median(gap for times in arrivals for gap in _gaps(times))
    value = statistics.median(gaps)
    note = (
        f"{NUM_STREAMS} streams, usual step {usual * 1e3:.1f} ms; the reply's pause "
        f"{median_pause_ms(replies):.1f} ms, at most {max(map(pause_ms, replies)):.1f}"
    )
    limit = 12 + usual * 1e3
    return bench.line("pause", value * 1e3, bench.copy_seconds * 1e3, limit=limit, note=note)


def _gaps(times: Sequence[float]) -> list[float]:
    return [late - early for early, late in zip(times, times[1:], strict=False)]


def _largest_gap(arrivals: Sequence[Sequence[float]], span: tuple[float, float]) -> float:
    """Seconds of the longest gap that overlaps the span, over all streams."""
    largest = 0.0
    for times in arrivals:
        first = max(0, bisect.bisect_left(times, span[0]) - 1)
        last = bisect.bisect_right(times, span[1]) + 1
        if gaps := _gaps(times[first:last]):
            largest = max(largest, *gaps)
    if not largest:
        raise AssertionError("no stream was running during an update; nothing was seen")
    return largest
