"""Rows of the disk, tensor and distributed paths, and of graphs."""

from __future__ import annotations

import shutil
import statistics

import torch

from tests import children
from tests.benchmarks.gpu import floors
from tests.benchmarks.gpu.bench import REPEATS, Bench, NotHereError, median_pause_ms, stages
from tests.benchmarks.gpu.engines import CAPTURE_SIZES
from tests.benchmarks.gpu.model import Part
from tests.benchmarks.gpu.results import Line
from trainers_adapters import BroadcastGroup, TensorStream
from weight_updater.requests import MAX_STREAMS, BeginUpdate, Manifest, Path, Recapture

BROADCAST_BYTES = 1 << 30
FLOOR_BYTES = 1 << 30
"""Of each stream that measures what grpcio can do."""


def tensor_shm(bench: Bench) -> Line:
    """The weights lie in a registered segment already; the call names it."""
    host, client = bench.host_weights, bench.engine.weights

    def update(checksums: bool):
        begin = begins[checksums]()
        return client.update_from_tensor(begin, segment=host.descriptor)

    # Those that a trainer keeps with its segment: hashed outside the clock, compared within.
    sums = tuple(bench.weights.checksums())

    def with_checksums() -> BeginUpdate:
        return BeginUpdate(path=Path.TENSOR, manifest_digest=bench.weights.digest, checksums=sums)

    begins = {False: lambda: bench.begin(Path.TENSOR, checksums=False), True: with_checksums}
    value, replies = bench.repeat(lambda: update(False))
    bench.say("the same with checksums")
    checked, checked_replies = bench.repeat(lambda: update(True))
    if not all(reply.verified for reply in checked_replies):
        raise AssertionError("the engine did not compare the checksums")
    note = (
        f"staging {replies[-1].staging}, pause {median_pause_ms(replies):.1f} ms; with checksums "
        f"{checked:.3f} s; {stages(replies[-1])}"
    )
    return bench.line("tensor_shm", value, bench.floors.pinned_seconds, note=note)


def tensor_stream(bench: Bench) -> Line:
    """push_weights over gRPC: the rate of as many tensors as sizes.stream_bytes asks for, without hashes."""
    host, manifest = bench.host_weights, bench.weights.manifest(checksums=False)
    part = Part(host.named, manifest, bench.sizes.stream_bytes)
    names = [name for name, _ in part]
    num_receivers = _num_receivers(bench)
    bench.say(f"floor: grpcio streams; the engine names {num_receivers} receivers")
    rates = floors.stream_rates(min(part.nbytes, FLOOR_BYTES), num_receivers)
    floor = rates["raw"]
    told = ", ".join(f"{kind} {rate / 1e9:.2f}" for kind, rate in rates.items())
    bench.say(f"floors: {told} GB/s")

    def change_one() -> None:
        _disturb_first(bench, part)

    found = {}
    for streams, sender in senders_of_streams(num_receivers).items():
        bench.say(f"by {streams}")
        with sender:
            seconds, replies = bench.repeat(
                lambda sender=sender: bench.push(sender, source=part, partial=True, verify=False),
                before=change_one,
                check=lambda: bench.check_live(names),
            )
        found[streams] = part.nbytes / seconds
        pause = median_pause_ms(replies)
    one, best = found["one stream"], max(found.values())
    several = [rate for streams, rate in found.items() if streams not in ("one stream", "the front")]
    note = (
        f"{part.nbytes / 1e9:.1f} GB; one stream has {one / floor:.0%} of the floor; "
        f"floors {told} GB/s; pause {pause:.1f} ms; "
        + ", ".join(f"{streams} {rate / 1e9:.2f} GB/s" for streams, rate in found.items())
    )
    also = one >= 0.8 * floor and bool(several)
    return bench.line("tensor_stream", best / 1e9, floor / 1e9, also=also, note=note)


def senders_of_streams(num_receivers: int) -> dict[str, TensorStream]:
    """One stream, as many as the engine names receivers, and one to the front."""
    senders = {"one stream": TensorStream(max_streams=1)}
    if num_receivers > 1:
        senders[f"{num_receivers} receivers"] = TensorStream()
    return senders | {"the front": TensorStream(max_streams=0)}


def _num_receivers(bench: Bench) -> int:
    """How many the engine names; they run from then on."""
    manifest = Manifest(bench.weights.manifest(checksums=False).tensors[:1])
    update = BeginUpdate(path=Path.TENSOR, manifest=manifest, partial=True, num_streams=MAX_STREAMS)
    begun = bench.engine.weights.begin(update)
    bench.engine.weights.abort(begun.update_id)
    return len(begun.stream_ports)


def _disturb_first(bench: Bench, part: Part) -> None:
    """Write zeros over the start of the part's smallest tensor, so that the next push changes something."""
    specs = part.manifest(checksums=False).tensors
    spec = min(specs, key=lambda spec: spec.nbytes)
    begin = BeginUpdate(path=Path.TENSOR, manifest=Manifest((spec,)), partial=True, skip_checksums=True)
    step = 1 << 20
    chunks = ((0, at, bytes(min(step, spec.nbytes - at))) for at in range(0, spec.nbytes, step))
    bench.engine.weights.update_from_tensor(begin, chunks)


def disk(bench: Bench) -> Line:
    """A directory in the page cache, with the checksums of our writer; without them in the note."""
    directory, client = str(bench.disk_weights), bench.engine.weights

    def update(directory: str, checksums: bool):
        begin = BeginUpdate(path=Path.DISK, directory=directory, skip_checksums=not checksums)
        return client.update_from_disk(begin, directory)

    value, replies = bench.repeat(lambda: update(directory, True))
    if not all(reply.verified for reply in replies):
        raise AssertionError("the engine did not compare the checksums")
    plain = bench.write_weights("without-checksums", checksums=False)
    try:
        unchecked, _ = bench.repeat(lambda: update(str(plain), False))
    finally:
        shutil.rmtree(plain)
    note = (
        f"staging {replies[-1].staging}, pause {median_pause_ms(replies):.1f} ms; checksums compared; "
        f"plain files {unchecked:.3f} s; {stages(replies[-1])}"
    )
    return bench.line("disk", value, bench.floors.pinned_seconds, note=note)


def distributed(bench: Bench) -> Line:
    """The trainer's weights on a second GPU, broadcast to the engine's by NCCL; on CPUs by gloo."""
    if bench.is_cuda and torch.cuda.device_count() < 2:
        raise NotHereError("needs two GPUs")
    floor = _broadcast_floor(bench) if bench.is_cuda else None
    source = _on_second_gpu(bench) if bench.is_cuda else bench.weights
    values, told = {}, []
    ways = {"staging none": True, "staging device": True, "staging none, values looked at": False}
    with BroadcastGroup(bucket_bytes=BROADCAST_BYTES if bench.is_cuda else 1 << 16) as sender:
        for way, unseen in ways.items():
            bench.say(way)
            options = {"staging": way.split(",")[0].split()[1], "verify": False, "allow_nonfinite": unseen}
            seconds, replies = bench.repeat(
                lambda options=options: bench.push(sender, source=source, **options)
            )
            values[way] = seconds
            told.append(
                f"{way} {seconds * 1e3:.1f} ms, pause {median_pause_ms(replies):.1f} ({stages(replies[-1])})"
            )
    note = f"checksums off; {'; '.join(told)}"
    return bench.line("distributed", values["staging none"] * 1e3, floor and floor * 1e3, note=note)


def _on_second_gpu(bench: Bench) -> Part:
    named = {name: tensor.to("cuda:1") for name, tensor in bench.weights}
    torch.cuda.synchronize("cuda:1")
    return Part(named, bench.weights.manifest(checksums=False), bench.weights.nbytes)


def _broadcast_floor(bench: Bench) -> float:
    """Seconds of broadcasting the same bytes, 1 GiB at a time, between two processes of two GPUs."""
    bench.say("floor: broadcasts of 1 GiB")
    module = "tests.benchmarks.gpu.broadcaster"
    with children.start(module, "1") as sender, children.start(module, "0") as receiver:
        port = sender.ask("port")
        for rank, child in enumerate((sender, receiver)):
            child.tell("join", rank=rank, port=port)
        for child in (sender, receiver):
            child.answer()
        for child in (sender, receiver):
            child.tell("broadcast", nbytes=bench.weights.nbytes, piece=BROADCAST_BYTES, repeats=REPEATS + 1)
        taken = [child.answer() for child in (sender, receiver)]
        for child in (sender, receiver):
            child.tell("leave")
        for child in (sender, receiver):
            child.answer()
    return statistics.median(max(pair) for pair in list(zip(*taken, strict=True))[1:])


def graphs(bench: Bench) -> Line:
    """Capturing all graphs again on demand; none of it when no address moved."""
    if not bench.is_cuda:
        raise NotHereError("a CPU captures no graphs")
    recaptured, kept = [], []
    for index in range(REPEATS + 1):
        always = bench.disturb(recapture=Recapture.ALWAYS)
        auto = bench.disturb()
        seconds = always.seconds.recapture
        bench.say(f"{seconds:.3f} s for {always.graphs_recaptured} graphs, then {auto.graphs_kept} kept")
        if always.graphs_recaptured < len(CAPTURE_SIZES):
            raise AssertionError(f"{always.graphs_recaptured} graphs were recaptured")
        if auto.graphs_recaptured or not auto.graphs_kept:
            raise AssertionError(f"auto recaptured {auto.graphs_recaptured}, kept {auto.graphs_kept}")
        if index:
            recaptured.append(seconds)
            kept.append(auto.seconds.recapture)
    value, nothing = statistics.median(recaptured), max(kept)
    note = f"{always.graphs_recaptured} graphs; {nothing * 1e3:.2f} ms when no address moved"
    return bench.line("graphs", value, None, also=nothing < 0.001, note=note)
