"""Rows of generation: tokens per second, the way through gRPC, start, and log-probabilities."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tests import children
from tests.benchmarks.gpu.bench import REPEATS, Bench
from tests.benchmarks.gpu.floors import decode_rate
from tests.benchmarks.gpu.model import Part
from tests.benchmarks.gpu.results import Line
from trainers_adapters import TensorStream
from trainers_adapters.errors import RollsyncError
from trainers_adapters.sending import Outgoing
from weight_updater.requests import BeginUpdate, Path


def decode_1(bench: Bench) -> Line:
    return _decode(bench, "decode_1", 1, 128)


def decode_32(bench: Bench) -> Line:
    return _decode(bench, "decode_32", 32, 256)


def decode_256(bench: Bench) -> Line:
    return _decode(bench, "decode_256", 256, 256)


def _size(bench: Bench, batch: int, num_out: int) -> tuple[int, int, int]:
    """Batch, prompt length and output length, smaller in a tiny run."""
    return (min(batch, 16), 16, num_out // 8) if bench.tiny else (batch, 128, num_out)


def _decode(bench: Bench, name: str, batch: int, num_out: int) -> Line:
    """Generated tokens per second over the whole call, prefill included."""
    batch, num_in, num_out = _size(bench, batch, num_out)
    before = bench.engine.rollout.info().forward_counts
    seconds = _generate_seconds(bench, batch, num_in, num_out)
    after = bench.engine.rollout.info().forward_counts
    passes = ", ".join(f"{kind} {after[kind] - n}" for kind, n in before.items() if after[kind] > n)
    value = batch * num_out / statistics.median(seconds)
    bench.tokens_per_second[name] = value
    floor = decode_rate(
        bench.shape, batch, num_in, num_out, bench.floors.copy_bytes_per_s, bench.floors.flops
    )
    spread = f"{batch * num_out / max(seconds):,.0f} to {batch * num_out / min(seconds):,.0f}"
    return bench.line(name, value, floor, note=f"{spread} tok/s; passes: {passes}")


def _generate_seconds(bench: Bench, batch: int, num_in: int, num_out: int) -> list[float]:
    """Of REPEATS batches of random prompts after a warm-up."""
    taken = []
    for index in range(REPEATS + 1):
        prompts = bench.prompts(index, batch, num_in)
        start = time.perf_counter()
        groups = bench.engine.rollout.generate_batch(
            prompts, max_tokens=num_out, temperature=1.0, ignore_eos=True
        )
        seconds = time.perf_counter() - start
        completions = [completion for group in groups for completion in group]
        lengths = {(len(c.token_ids), len(c.logprobs)) for c in completions}
        if len(completions) != batch or lengths != {(num_out, num_out)}:
            raise AssertionError(f"{len(completions)} completions of lengths {lengths}")
        bench.say(f"{'warm-up ' if not index else ''}{batch * num_out / seconds:,.0f} tok/s")
        if index:
            taken.append(seconds)
    return taken


def grpc_share(bench: Bench) -> Line:
    """Of the rate in the engine's own process, what is left behind gRPC. Leaves no engine running."""
    batch, num_in, num_out = _size(bench, 256, 256)
    outside = bench.tokens_per_second.get("decode_256")
    if outside is None:
        outside = batch * num_out / statistics.median(_generate_seconds(bench, batch, num_in, num_out))
    directory = str(bench.engines.config_only)
    bench.engines.stop()
    config = bench.engines.config | {"model": directory, "load_format": "random"}
    if not bench.tiny:
        config["num_pages"] = batch * (num_in + num_out + 64) // 16
    threads = {"OMP_NUM_THREADS": "1" if bench.tiny else "8"}
    bench.say("starting the engine in one process")
    with children.start("tests.benchmarks.gpu.inside", json.dumps(config), env=threads) as child:
        child.ask("ready", vocab_size=bench.shape["vocab_size"])
        taken = []
        for _ in range(REPEATS + 1):
            taken.append(child.ask("generate", batch=batch, num_in=num_in, num_out=num_out))
            bench.say(f"{batch * num_out / taken[-1]:,.0f} tok/s")
    inside = batch * num_out / statistics.median(taken[1:])
    note = f"{outside:,.0f} against {inside:,.0f} tok/s"
    return bench.line("grpc_share", 100 * outside / inside, 100.0, note=note)


def start(bench: Bench) -> Line:
    """From the start of the process to the first token of a request: the second start in a row."""
    directory = bench.disk_weights
    if not bench.greedy_after_updates:
        bench.engine  # noqa: B018 - somebody has to have been updated
        bench.note_greedy()
    bench.engines.stop()
    begin = time.perf_counter()
    ready = bench.engines.start(directory)
    prompt = bench.prompts(0, 1, 16)[0]
    stream = bench.engine.rollout.generate_stream(prompt, max_tokens=8, ignore_eos=True)
    next(stream)
    value = time.perf_counter() - begin
    list(stream)
    bench.weights.restore()
    bench.check_live()
    tokens = bench.greedy()
    if tokens != bench.greedy_after_updates:
        raise AssertionError(
            f"greedy tokens of a fresh engine {tokens} are not those of the updated one "
            f"{bench.greedy_after_updates}"
        )
    return bench.line("start", value, None, note=f"ready after {ready:.1f} s; greedy tokens as after updates")


# ---------------------------------------------------------------- beside an update


def decode_during_update(bench: Bench) -> Line:
    """Tokens per second while bytes arrive in staging, over those of windows right before and after."""
    shares = {}
    host = bench.host_weights
    part = Part(host.named, bench.weights.manifest(checksums=False), bench.sizes.stream_bytes // 4)
    receivers = {
        "tensor, shared memory": lambda: _received(bench, _begin_tensor(bench), "segment"),
        "disk": lambda: _received(bench, _begin_disk(bench), "disk"),
        "tensor, gRPC stream": lambda: _received(bench, _begin_part(part), "stream", part),
    }
    bench.disk_weights  # noqa: B018 - written before any load
    live = bench.engine.weights.checksums().folded
    for way, receive in receivers.items():
        with _load(bench):
            ratios = []
            for index in range(REPEATS + 1):
                quiet = _rate(bench, lambda: time.sleep(bench.sizes.window_s))
                busy = _rate(bench, receive)
                bench.say(f"{way}: {busy:,.0f} tok/s, undisturbed {quiet:,.0f}")
                if index:
                    ratios.append(busy / quiet)
        shares[way] = 100 * statistics.median(ratios)
    if bench.engine.weights.checksums().folded != live:
        raise AssertionError("updates that were dropped changed the weights")
    note = "; ".join(f"{way} {share:.0f}%" for way, share in shares.items())
    return bench.line("decode_during_update", min(shares.values()), 100.0, note=note)


def _begin_tensor(bench: Bench) -> BeginUpdate:
    return bench.begin(Path.TENSOR, checksums=False, staging="device")


def _begin_disk(bench: Bench) -> BeginUpdate:
    return BeginUpdate(path=Path.DISK, directory=str(bench.disk_weights), staging="device")


def _begin_part(part: Part) -> BeginUpdate:
    return BeginUpdate(
        path=Path.TENSOR,
        manifest=part.manifest(checksums=False),
        partial=True,
        skip_checksums=True,
        staging="device",
    )


def _received(bench: Bench, begin: BeginUpdate, way: str, part: Part | None = None) -> None:
    """Receive one update into staging, and drop it."""
    client = bench.engine.weights
    begun = client.begin(begin)
    try:
        if way == "segment":
            client.update_from_tensor(begun.update_id, segment=bench.host_weights.descriptor)
        elif way == "disk":
            client.update_from_disk(begun.update_id, str(bench.disk_weights))
        else:
            assert part is not None
            outgoing = Outgoing(part, part.manifest(checksums=False), time.monotonic() + 60, verify=False)
            with TensorStream() as sender:
                sender.send(client, begun, outgoing)
    finally:
        client.abort(begun.update_id)


@contextmanager
def _load(bench: Bench) -> Iterator[None]:
    """Sequences that decode without end, again and again."""
    batch, num_out = bench.sizes.load
    stopping = threading.Event()
    errors: list[RollsyncError] = []

    def run() -> None:
        seed = 0
        while not stopping.is_set():
            seed += 1
            try:
                bench.engine.rollout.generate_batch(
                    bench.prompts(seed, batch, 64), max_tokens=num_out, ignore_eos=True
                )
            except RollsyncError as error:
                errors.append(error)
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        stopping.set()
        bench.engine.rollout.abort(all=True)
        thread.join(60)
    if errors:
        raise errors[0]


def _rate(bench: Bench, during: Callable[[], object]) -> float:
    """Tokens per second from before to after `during`, which is repeated until the window is full."""
    first = bench.engine.rollout.info().state.num_generated_tokens
    start = time.perf_counter()
    while time.perf_counter() - start < bench.sizes.window_s:
        during()
    last = bench.engine.rollout.info().state.num_generated_tokens
    return (last - first) / (time.perf_counter() - start)


# ---------------------------------------------------------------- against transformers


def logprobs(bench: Bench) -> Line:
    """Log-probabilities of sampled tokens, against the Hugging Face model over the same weights.

    It sees all tokens of all sequences at once. The floor: the same model in the shape in which tokens are
    sampled, one token of each sequence at a time over its cache.
    """
    num_prompts, num_in, num_out = bench.sizes.prompts
    bench.ensure_live()
    prompts = bench.prompts(11, num_prompts, num_in)
    groups = bench.engine.rollout.generate_batch(
        prompts, max_tokens=num_out, temperature=1.0, ignore_eos=True
    )
    completions = [group[0] for group in groups]
    ids = [prompt + completion.token_ids for prompt, completion in zip(prompts, completions, strict=True)]
    bench.say("the same sequences through transformers")
    model = reference(bench)
    together = _reference_logprobs(model, ids, num_in)
    alone = torch.cat([_reference_logprobs(model, [one], num_in) for one in ids])
    one_by_one = _reference_logprobs_one_by_one(model, ids, num_in)
    ours = torch.tensor([completion.logprobs for completion in completions])
    del model
    value, floor = (ours - together).abs(), (one_by_one - together).abs()
    limit = min(0.059, 1.2 * floor.mean().item())
    note = (
        f"max {value.max():.4f}, of the floor {floor.max():.4f}; {ours.numel()} tokens; to the Hugging Face "
        f"model token by token {(ours - one_by_one).abs().mean():.4f}; that model sequence by sequence "
        f"differs from all at once by {(alone - together).abs().mean():.4f}"
    )
    return bench.line("logprobs", value.mean().item(), floor.mean().item(), limit=limit, note=note)


def reference(bench: Bench):
    """The transformers model with the trainer's tensors as its parameters: no second copy."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(bench.engines.config_only)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(dict(bench.weights), strict=True, assign=True)
    rotary = model.model.rotary_emb
    with bench.device:  # its tables are buffers that no checkpoint holds
        model.model.rotary_emb = type(rotary)(config)
    return model.eval()


@torch.no_grad()
def _reference_logprobs(model, ids: list[list[int]], num_in: int) -> torch.Tensor:
    """[sequences, sampled tokens] float32, on the CPU."""
    tokens = torch.tensor(ids, device=model.lm_head.weight.device)
    logits = model(tokens).logits[:, num_in - 1 : -1]
    found = torch.log_softmax(logits.float(), dim=-1)
    return found.gather(-1, tokens[:, num_in:, None]).squeeze(-1).cpu()


@torch.no_grad()
def _reference_logprobs_one_by_one(model, ids: list[list[int]], num_in: int) -> torch.Tensor:
    """As _reference_logprobs, each token after the prompt in a pass of its own."""
    tokens = torch.tensor(ids, device=model.lm_head.weight.device)
    answer = model(tokens[:, :num_in], use_cache=True)
    logits = [answer.logits[:, -1]]
    for at in range(num_in, tokens.shape[1] - 1):
        answer = model(tokens[:, at : at + 1], past_key_values=answer.past_key_values, use_cache=True)
        logits.append(answer.logits[:, -1])
    found = torch.log_softmax(torch.stack(logits, dim=1).float(), dim=-1)
    return found.gather(-1, tokens[:, num_in:, None]).squeeze(-1).cpu()
