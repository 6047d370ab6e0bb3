"""The trainer of the wire tests: how its model learns, and what an engine must answer with its weights."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from tests.engines import RunningEngine
from trainers_adapters import (
    BroadcastGroup,
    Completion,
    DiskDirectory,
    IpcArena,
    ModuleSource,
    TensorSegment,
    TensorStream,
    WeightsClient,
    push_weights,
)
from trainers_adapters.sending import Outgoing, Sender
from trainers_adapters.weights_calls import Chunk
from weight_updater.arena import DTYPE_NAMES
from weight_updater.checksum import checksum
from weight_updater.requests import BeginUpdate, Manifest, TensorSpec
from weight_updater.requests import Path as Way

PROMPT = [5, 9, 77, 31, 8, 120, 64, 3] * 5
"""40 tokens: two whole pages of 16 and a half."""

IN_FLIGHT_TOKENS = 1600
"""A completion of so many lasts a second and more: what a test does beside it comes before its end."""

PATHS = ["disk", "distributed", "tensor", "segment", "ipc"]
"""The four paths; `segment` is the tensor path through shared memory."""


SEEDS = itertools.count(1)
"""A seed for every training, so that no weights come twice."""


class Named:
    """A source of exactly these tensors, under exactly these names."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.named = list(named)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.named)

    def manifest(self, *, checksums: bool = True) -> Manifest:
        return Manifest(
            tuple(
                TensorSpec(
                    name,
                    DTYPE_NAMES[tensor.dtype],
                    tuple(tensor.shape),
                    checksum(tensor) if checksums else None,
                )
                for name, tensor in self.named
            )
        )


@contextlib.contextmanager
def all_senders(work_dir: Path) -> Iterator[dict[str, Sender]]:
    """A sender of each path, small enough in its pieces that there are many."""
    with contextlib.ExitStack() as stack:
        made: dict[str, Sender] = {
            "disk": DiskDirectory(work_dir / "disk"),
            "distributed": BroadcastGroup(bucket_bytes=8192, group_timeout_s=60.0),
            "tensor": TensorStream(chunk_bytes=4096),
            "segment": TensorSegment(),
            "ipc": IpcArena(),
        }
        yield {path: stack.enter_context(sender) for path, sender in made.items()}


class EarlyArena(IpcArena):
    """Begins while it stages, as an arena does whose tensors all lie on GPUs; what it sends can be spoilt."""

    spoil: Callable[[list[int]], list[int]] = staticmethod(lambda checksums: checksums)

    def begins_early(self, outgoing: Outgoing) -> bool:
        return True

    def stage(self, outgoing: Outgoing, clients: Sequence[WeightsClient]) -> dict[str, Any]:
        manifest = super().stage(outgoing, clients)["manifest"]
        return {"checksums": tuple(self.spoil(list(manifest.checksums)))}


def train(model, seed: int) -> None:
    """New weights, near enough to the old ones that the model still makes finite logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def snapshot(model) -> Named:
    """A copy of the weights as they are now."""
    return Named((name, tensor.clone()) for name, tensor in ModuleSource(model))


def checksums_of(source: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in source}


def chunks_of(source: Iterable[tuple[str, torch.Tensor]], chunk_bytes: int = 1 << 20) -> Iterator[Chunk]:
    """The bytes of a source as the tensor path sends them."""
    for index, (_, tensor) in enumerate(source):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for offset in range(0, len(data), chunk_bytes):
            yield index, offset, data[offset : offset + chunk_bytes]


def reference_tokens(model, prompt: Sequence[int], num_tokens: int = 8) -> list[int]:
    """Greedy tokens of the trainer's own model."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def assert_serves(engine: RunningEngine, model, version: int) -> None:
    """The engine has exactly the trainer's weights, and samples with them under their label."""
    live = engine.weights.checksums()
    assert (live.by_name, live.weight_version) == (checksums_of(ModuleSource(model)), version)
    completion = engine.greedy(PROMPT, ignore_eos=True)
    assert completion.token_ids == reference_tokens(model, PROMPT)
    assert completion.weight_versions == [version] * 8


def until(holds: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Wait until something holds that another process is about to do."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def until_closed(engine: RunningEngine) -> None:
    until(lambda: not engine.rollout.info().state.open_update_id, "the open update ends")


def beside(function: Callable, *args, **kwargs) -> Future:
    """Run a call in a thread of its own, so that the test can look at what it does meanwhile."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class InFlight:
    """A long greedy completion that has begun, and goes on while the test does something else."""

    def __init__(
        self,
        engine: RunningEngine,
        num_tokens: int = IN_FLIGHT_TOKENS,
        prompt: Sequence[int] = PROMPT,
        **request,
    ) -> None:
        self.num_tokens = num_tokens
        self._stream = engine.rollout.generate_stream(
            list(prompt), max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **request
        )
        self._parts: list[Completion] = [next(self._stream)]

    def end(self) -> InFlight:
        """Wait for the rest of it."""
        self._parts += self._stream
        return self

    @property
    def token_ids(self) -> list[int]:
        return [token for part in self._parts for token in part.token_ids]

    @property
    def labels(self) -> list[int]:
        """The weight version of each token."""
        return [version for part in self._parts for version in part.weight_versions]

    @property
    def commit_sequences(self) -> list[int]:
        """Those that sampled it, in order, each once."""
        seen = [span.commit_sequence for part in self._parts for span in part.spans]
        return list(dict.fromkeys(seen))

    @property
    def finish_reason(self) -> str:
        return self._parts[-1].finish_reason

    @property
    def error(self) -> str:
        return self._parts[-1].error


def push(source, engine: RunningEngine, **options):
    return push_weights(source, engine.weights, **options)


def begin(engine: RunningEngine, source, **fields):
    return engine.weights.begin(BeginUpdate(path=Way.TENSOR, manifest=source.manifest(), **fields))
