"""What the rows share: engines, the trainer's weights, floors, and the checks outside the clock."""

from __future__ import annotations

import contextlib
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu import floors
from tests.benchmarks.gpu.engines import Engines, Sizes, say
from tests.benchmarks.gpu.goals import BY_NAME
from tests.benchmarks.gpu.model import HostWeights, Weights, write_config
from tests.benchmarks.gpu.results import Line, line
from tests.engines import RunningEngine
from trainers_adapters import push_weights
from trainers_adapters.errors import RollsyncError
from trainers_adapters.sending import Sender
from weight_updater.requests import BeginUpdate, Inflight, Manifest, UpdateReply
from weight_updater.requests import Path as Way
from weight_updater.safetensors_io import save_weights

REPEATS = 5
DISTURBED = "model.norm.weight"


class NotHereError(Exception):
    """This machine cannot measure the row (it needs a GPU, or two); not a failure."""


@dataclass
class Bench:
    """One run. Things are made when a row first asks for them, and kept for the others."""

    device: torch.device
    tiny: bool
    folder: Path
    stack: contextlib.ExitStack
    engines: Engines
    greedy_after_updates: list[int] = field(default_factory=list)
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    _known_digests: set[tuple[int, str]] = field(default_factory=set)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def shape(self) -> dict:
        return self.engines.shape

    @property
    def sizes(self) -> Sizes:
        return self.engines.sizes

    def say(self, what: str) -> None:
        say(what)

    @cached_property
    def floors(self) -> Floors:
        return Floors(self)

    @property
    def engine(self) -> RunningEngine:
        """The engine that runs; if none does, one with random weights."""
        return self.engines.running or self.engines.start_random()

    def greedy(self) -> list[int]:
        """Greedy tokens of a fixed prompt."""
        completion = self.engine.greedy(list(range(3, 67)), max_tokens=16, ignore_eos=True)
        return list(completion.token_ids)

    def note_greedy(self) -> None:
        """Keep what an engine answers whose weights came by updates, to compare with a fresh engine's; the
        next one whose did must answer the same.
        """
        if self.engines.running is None:
            return
        self.ensure_live()
        tokens = self.greedy()
        if self.greedy_after_updates not in ([], tokens):
            raise AssertionError(
                f"greedy tokens after updates are {tokens}; those of an engine before, whose weights came by "
                f"others, were {self.greedy_after_updates}"
            )
        self.greedy_after_updates = tokens

    def tidy(self, *, failed: bool) -> None:
        """After a row: the weights as drawn. After one that failed: no update left open, and no engine
        left that does not serve, so that the next row finds what it would find anyway.
        """
        if "weights" in self.__dict__:
            self.weights.restore()
        if not failed or self.engines.running is None:
            return
        try:
            state = self.engines.running.rollout.info(timeout_s=10).state
            if state.open_update_id:
                self.engines.running.weights.abort(state.open_update_id)
            self.engines.running.rollout.abort(all=True)
            problem = "" if state.status == "serving" else f"{state.status}: {state.not_serving_reason}"
        except RollsyncError as error:
            problem = str(error)
        if problem:
            self.say(f"the engine does not serve any more ({problem}); the next row starts another")
            self.engines.stop()

    # ------------------------------------------------------------ weights

    @cached_property
    def weights(self) -> Weights:
        """The trainer's, in the layout of the engine, which has others."""
        layout = self.engine.weights.layout()
        self.say(f"drawing the trainer's weights ({layout.arena_bytes / 1e9:.2f} GB)")
        return Weights(layout, self.device, seed=1)

    @cached_property
    def host_weights(self) -> HostWeights:
        """A copy in a registered segment, which is where the tensor path starts."""
        self.weights.restore()
        self.say("copying the weights into a shared-memory segment")
        made = HostWeights(self.weights)
        self.stack.callback(made.close)
        return made

    @cached_property
    def disk_weights(self) -> Path:
        """A model directory with checksums in its files, as DiskDirectory writes it."""
        return self.write_weights("with-checksums", checksums=True)

    def write_weights(self, name: str, *, checksums: bool) -> Path:
        self.weights.restore()
        directory = write_config(self.folder / name, self.shape)
        self.say(f"writing {name} into {directory}")
        held = self.__dict__.get("host_weights")  # writes faster, if nothing is to be hashed
        source = held.named.items() if held is not None and not checksums else self.weights
        save_weights(str(directory), source, checksums=checksums)
        return directory

    # ------------------------------------------------------------ updates

    def begin(self, path: Way, *, checksums: bool, **fields: Any) -> BeginUpdate:
        """BeginUpdate as a trainer sends it: by digest once the engine knows the manifest."""
        manifest = self.weights.manifest(checksums=checksums)
        known = (self.engines.num_started, self.weights.digest)
        if known in self._known_digests:
            sums = tuple(spec.checksum for spec in manifest.tensors if spec.checksum is not None)
            fields |= {"manifest_digest": self.weights.digest, "checksums": sums}
        else:
            fields["manifest"] = manifest
            self._known_digests.add(known)
        return BeginUpdate(path=path, skip_checksums=not checksums, **fields)

    def repeat(
        self,
        call: Callable[[], UpdateReply],
        *,
        before: Callable[[], object] | None = None,
        check: Callable[[], None] | None = None,
    ) -> tuple[float, list[UpdateReply]]:
        """Median seconds of REPEATS calls after a warm-up, and their replies.

        Args:
            before: outside the clock, before each call; the default writes something else into one tensor
                of the engine, so that no call finds its own bytes there already.
            check: outside the clock, after each call; the default is check_live.
        """
        seconds, replies = [], []
        for index in range(REPEATS + 1):
            (before or self.disturb)()
            floors.synchronise(self.device)
            start = time.perf_counter()
            reply = call()
            taken = time.perf_counter() - start
            (check or self.check_live)()
            if index:
                seconds.append(taken)
                replies.append(reply)
            self.say(f"{'warm-up ' if not index else ''}{taken * 1e3:.1f} ms (pause {pause_ms(reply):.1f})")
        return statistics.median(seconds), replies

    def disturb(self, **options: Any) -> UpdateReply:
        """Write other values into one small tensor of the engine, by the plainest way there is."""
        manifest = self.weights.manifest(checksums=False)
        spec = next(spec for spec in manifest.tensors if spec.name == DISTURBED)
        other = torch.full(spec.shape, random.uniform(1.5, 2.5)).to(self.weights.dtype)
        begin = BeginUpdate(
            path=Way.TENSOR,
            manifest=Manifest((spec,)),
            partial=True,
            skip_checksums=True,
            inflight=Inflight.KEEP,
            **options,
        )
        data = other.view(torch.uint8).numpy().tobytes()
        return self.engine.weights.update_from_tensor(begin, [(0, 0, data)])

    def push(self, sender: Sender, *, source: Any = None, **options: Any) -> UpdateReply:
        """push_weights to the engine; gives its reply."""
        report = push_weights(source or self.weights, self.engine.weights, via=sender, **options)
        return report.replies[self.engine.address]

    def check_live(self, names: Sequence[str] = (), *, source: Weights | None = None) -> None:
        """Compare what lies in the engine's slots with the trainer's own checksums of its weights."""
        weights = source or self.weights
        expected = dict(zip(weights.named, weights.checksums(), strict=True))
        if names:
            expected = {name: expected[name] for name in names}
        live = self.engine.weights.checksums(names).by_name
        wrong = [name for name, value in expected.items() if live.get(name) != value]
        if wrong or (not names and live.keys() - expected.keys()):
            raise AssertionError(f"{len(wrong)} of {len(expected)} tensors differ, the first is {wrong[:1]}")

    def ensure_live(self) -> None:
        """Make the engine serve the trainer's weights as they were drawn."""
        self.weights.restore()
        try:
            self.check_live()
        except AssertionError:
            begin = self.begin(Way.TENSOR, checksums=False)
            self.engine.weights.update_from_tensor(begin, segment=self.host_weights.descriptor)
            self.check_live()

    def line(self, name: str, value: float, floor: float | None, **more: Any) -> Line:
        return line(BY_NAME[name], value, floor, **more)

    def prompts(self, seed: int, batch: int, length: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(3, self.shape["vocab_size"]) for _ in range(length)] for _ in range(batch)]


class Floors:
    """Measured when a row first asks for them, once for a run."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    @cached_property
    def copy_seconds(self) -> float:
        """Of all weights, flat, on the device."""
        say("floor: one device copy")
        return floors.device_copy(self._bench.weights)

    @cached_property
    def pinned_seconds(self) -> float:
        """Of all weights from page-locked host memory to the device."""
        say("floor: pinned host-to-device copy")
        return floors.pinned_copy(self._bench.weights.nbytes, self._bench.device)

    @cached_property
    def flops(self) -> float:
        """Of large products, a second."""
        say("floor: large products")
        shape, rows = self._bench.shape, self._bench.sizes.max_prefill_tokens
        return floors.product_rate(
            shape["hidden_size"], shape["intermediate_size"], rows, torch.bfloat16, self._bench.device
        )

    @property
    def copy_bytes_per_s(self) -> float:
        """Read and written."""
        return 2 * self._bench.weights.arena.nbytes / self.copy_seconds


def pause_ms(reply: UpdateReply) -> float:
    return reply.seconds.pause * 1e3


def median_pause_ms(replies: Sequence[UpdateReply]) -> float:
    return statistics.median(pause_ms(reply) for reply in replies)


def stages(reply: UpdateReply) -> str:
    """The stages of a reply that took time, in ms."""
    seconds = reply.seconds
    names = ("transfer", "verify", "pause", "write", "finalise", "recapture", "wait")
    found = {name: getattr(seconds, name) * 1e3 for name in names}
    return ", ".join(f"{name} {value:.1f}" for name, value in found.items() if value >= 0.05)


@contextlib.contextmanager
def bench(device: torch.device, *, tiny: bool, directory: Path | None = None) -> Iterator[Bench]:
    """A run in a folder of its own (in `directory`); engines, segments and files are gone at its end."""
    with contextlib.ExitStack() as stack:
        where = directory or roomy(tiny)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=where)))
        engines = Engines(device, tiny, folder)
        stack.callback(engines.stop)
        yield Bench(device, tiny, folder, stack, engines)


def roomy(tiny: bool) -> str:
    """The temporary directory (a file system's page cache) if two checkpoints fit there. Else /dev/shm, whose
    pages are small and read more slowly, if a segment fits beside them.
    """
    checkpoint = (1 << 20) if tiny else 17 * 10**9
    temporary, shared = tempfile.gettempdir(), Path("/dev/shm")
    if shutil.disk_usage(temporary).free > 2 * checkpoint or not shared.is_dir():
        return temporary
    return str(shared) if shutil.disk_usage(shared).free > 3 * checkpoint else temporary
