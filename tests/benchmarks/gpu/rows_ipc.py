"""Rows of the ipc path, and the pause that running sequences see."""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests import children
from tests.benchmarks.gpu.bench import REPEATS, Bench, median_pause_ms, pause_ms, stages
from tests.benchmarks.gpu.floors import synchronise
from tests.benchmarks.gpu.model import as_module
from tests.benchmarks.gpu.results import Line
from trainers_adapters import AdoptedArena, IpcArena, WeightsClient
from weight_updater.requests import BeginUpdate, Path, UpdateReply

NUM_STREAMS = 8


def ipc_none(bench: Bench) -> Line:
    return _ipc(bench, "ipc_none", "none", checksums=False, floor=bench.floors.copy_seconds)


def ipc_device(bench: Bench) -> Line:
    return _ipc(bench, "ipc_device", "device", checksums=False, floor=2 * bench.floors.copy_seconds)


def ipc_checksums(bench: Bench) -> Line:
    return _ipc(bench, "ipc_checksums", "none", checksums=True, floor=2 * bench.floors.copy_seconds)


def _ipc(bench: Bench, name: str, staging: str, *, checksums: bool, floor: float) -> Line:
    """push_weights of weights that lie on the GPU; every one of them has changed before each push.

    Without checksums nobody looks at the values either (allow_nonfinite); the note says what looking costs.
    """
    weights, looking = bench.weights, ""
    with IpcArena() as sender:
        value, replies = bench.repeat(
            lambda: bench.push(sender, staging=staging, verify=checksums, allow_nonfinite=not checksums),
            before=weights.change,
        )
        if not checksums:
            finite, _ = bench.repeat(
                lambda: bench.push(sender, staging=staging, verify=False), before=weights.change
            )
            looking = f"; {finite * 1e3:.1f} ms if values are looked at"
    if checksums and not all(reply.verified for reply in replies):
        raise AssertionError("the engine did not compare the checksums")
    return bench.line(name, value * 1e3, floor * 1e3, note=f"in ms: {stages(replies[-1])}{looking}")


def ipc_adopt(bench: Bench) -> Line:
    """The engine's slots point at the trainer's memory. Leaves the engine stopped.

    Nothing is copied, and for the value nothing is read either; the note says what reading takes: one pass
    that hashes all bytes and looks for values that are not finite.
    """
    module = as_module(bench.weights.named)
    # A client of its own: that of the engine is closed with it, and could not tell that it is gone.
    client = WeightsClient(bench.engine.address)
    arena = AdoptedArena(client, module)
    free_before = _free_bytes(bench)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    first = ""
    try:
        for verify in (True, False):
            for _ in range(REPEATS + 1):
                taken, reply = _adopted_once(arena, module, bench.device, verify=verify)
                bench.say(f"{taken * 1e3:.1f} ms (recapture {reply.seconds.recapture * 1e3:.1f})")
                seconds[verify].append(taken - reply.seconds.recapture)
                first = first or (
                    f"the first took {taken * 1e3:.1f} ms with {reply.seconds.recapture * 1e3:.1f} ms for "
                    f"{reply.graphs_recaptured} graphs"
                )
        new_bytes = free_before - _free_bytes(bench)
        bench.check_live()  # the signs have changed an even number of times
    finally:
        bench.engines.stop()
        arena.close()
        client.close()
    value, verified = (statistics.median(seconds[verify][1:]) for verify in (False, True))
    note = (
        f"without recapture; {verified * 1e3:.1f} ms if the bytes are hashed; {first}; free memory fell by "
        f"{new_bytes / 1e6:.1f} MB; {stages(reply)}"
    )
    # Graphs captured anew may take a little more or less than before; weights would be gigabytes.
    return bench.line("ipc_adopt", value * 1e3, None, also=new_bytes <= 64 << 20, note=note)


def _adopted_once(
    arena: AdoptedArena, module: nn.Module, device: torch.device, *, verify: bool
) -> tuple[float, UpdateReply]:
    """Seconds of one update without what the trainer does within it, and the reply."""
    start = time.perf_counter()
    with arena.update(verify=verify, allow_nonfinite=not verify):
        begun = time.perf_counter()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.neg_()
        synchronise(device)
        written = time.perf_counter()
    ended = time.perf_counter()
    assert arena.report is not None
    return ended - start - (written - begun), arena.report


def _free_bytes(bench: Bench) -> int:
    """On the whole device, whoever took it; on a CPU nothing is counted."""
    if not bench.is_cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(bench.device)[0]


def pause(bench: Bench) -> Line:
    """The longest gap between two tokens of running streams around updates with staging device.

    Nobody asks for checksums, as in the other rows that do not say so; the note tells what the disk path's
    gap is when what lies in the slots is read once more and compared.
    """
    client = bench.engine.weights
    segment, directory = bench.host_weights.descriptor, str(bench.disk_weights)
    kept: dict[str, Any] = {"staging": "device", "inflight": "keep"}

    def by_tensor() -> UpdateReply:
        begin = bench.begin(Path.TENSOR, checksums=False, **kept)
        return client.update_from_tensor(begin, segment=segment)

    def by_disk(*, checksums: bool = False) -> UpdateReply:
        begin = BeginUpdate(path=Path.DISK, directory=directory, skip_checksums=not checksums, **kept)
        return client.update_from_disk(begin, directory)

    compared = "disk with checksums compared"
    with IpcArena() as sender:
        ways = {
            "ipc": (bench.weights.change, lambda: bench.push(sender, verify=False, **kept)),
            "tensor": (bench.disturb, by_tensor),
            "disk": (bench.disturb, by_disk),
            compared: (bench.disturb, lambda: by_disk(checksums=True)),
        }
        seen = {way: _seen(bench, way, before, update) for way, (before, update) in ways.items()}
    told = "; ".join(f"{way} {gap:.1f} (step {step:.1f}, {said})" for way, (gap, step, said) in seen.items())
    del seen[compared]
    gap, step, _ = max(seen.values())
    met = all(gap <= 12 + step for gap, step, _ in seen.values())
    note = f"{NUM_STREAMS} streams; {told}"
    return bench.line("pause", gap, bench.floors.copy_seconds * 1e3, limit=12 + step, also=met, note=note)


def _seen(
    bench: Bench, way: str, before: Callable[[], object], update: Callable[[], UpdateReply]
) -> tuple[float, float, str]:
    """Milliseconds of the median largest gap and of the usual step; what the replies say of the pause."""
    spans, replies = [], []
    num_out, vocab_size = 3500 if not bench.tiny else 2000, bench.shape["vocab_size"]
    with children.start("tests.benchmarks.gpu.listener", bench.engine.address) as listener:
        listener.ask("start", num_streams=NUM_STREAMS, num_in=64, num_out=num_out, vocab_size=vocab_size)
        for index in range(REPEATS + 1):
            before()
            time.sleep(0.3)
            begin = time.monotonic()
            reply = update()
            if index:
                spans.append((begin, time.monotonic()))
                replies.append(reply)
            time.sleep(0.3)
        arrivals = listener.ask("stop")
    bench.check_live()
    if not all(reply.num_kept for reply in replies):
        raise AssertionError("no sequence was running at a commit; nothing was seen")
    gap = statistics.median(largest_gap(arrivals, span) for span in spans)
    usual = statistics.median(gap for times in arrivals for gap in _gaps(times))
    said = f"pause {median_pause_ms(replies):.1f}, at most {max(map(pause_ms, replies)):.1f}"
    bench.say(f"{way}: gap {gap * 1e3:.1f} ms, step {usual * 1e3:.1f} ms, {said}")
    return gap * 1e3, usual * 1e3, said


def _gaps(times: Sequence[float]) -> list[float]:
    return [late - early for early, late in itertools.pairwise(times)]


def largest_gap(arrivals: Sequence[Sequence[float]], span: tuple[float, float]) -> float:
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
