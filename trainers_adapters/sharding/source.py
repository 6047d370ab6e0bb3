"""ShardedSource: a source on rank 0 whose tensors are gathered, one bucket at a time, from all ranks.

Rank 0 decides which bucket comes next; the others follow. Collectives are issued by the thread that every
rank called with, whichever thread of rank 0 (a gRPC stream's, a broadcast's) wants the tensors.

    rank 0   work -> asks for bucket k ->|                       |-> tensors -> work ... -> END
                                         | GATHER k, all ready?  | gather
    others   wait ---------------------->|                       |-> dropped ->  wait ... -> END
"""

from __future__ import annotations

import hashlib
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from trainers_adapters.errors import PushError, RollsyncError
from trainers_adapters.parts import Part, check_dtypes, plain_parts
from trainers_adapters.sharding.gather import Gatherer, device_of, gatherer_of
from trainers_adapters.sharding.ranks import Kind, RankFailed, Ranks, Word, first_line
from trainers_adapters.sources import has_adapters, manifest_of, one_by_one
from weight_updater.requests import DEFAULT_BUCKET_BYTES, Manifest

R = TypeVar("R")
Named = list[tuple[str, torch.Tensor]]

BEAT_S = 1.0
"""Seconds after which rank 0, if it needs no bucket, tells the others that it is still there."""


@dataclass(slots=True)
class _Asked:
    """What a thread of rank 0 wants: a bucket's tensors, or (None) to know that all ranks are well."""

    bucket: int | None
    reply: Future[Named] = field(default_factory=Future)


class ShardedSource:
    """ALL RANKS. The whole weights of a module that is sharded over the trainer's ranks.

    For FSDP2 and tensor parallelism (DTensor), FSDP1, DeepSpeed ZeRO-3, DDP, and modules that are not
    sharded; with LoRA adapters or without (they are merged as PeftSource merges them). Names are those of
    ModuleSource. Push it with push_sharded, which every rank calls; it cannot be iterated otherwise.

    Memory beyond the trainer's: on each rank one bucket of whole tensors; on rank 0 twice that (ZeRO-3, FSDP1
    and merged adapters need a copy).

    Args:
        module: as the ranks train it. Its parameters are never written to.
        dtype: cast on the way out, or None.
        group: the ranks that hold shards; None is the default group.
        bucket_bytes: how much is gathered at once; at least a tensor, and with FSDP1 at least a unit.
        timeout_s: seconds that a rank waits for the slowest one, whenever they meet.

    Raises:
        ValueError: as ModuleSource and PeftSource.
        RankFailed: another rank raised, or its module is not the same.
    """

    gathered = True
    """Senders hold no more than the tensor that they were given last: all of them may not fit anywhere."""

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 300.0,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be positive")
        self._module = module
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._ranks = Ranks(group, timeout_s)
        self._gatherer: Gatherer | None = None
        self._parts: list[Part] = []
        self._buckets: list[range] = []
        self._lock = threading.Lock()  # of the next two
        self._asked: queue.SimpleQueue[_Asked | None] | None = None  # RANK 0: `run` is under way
        self._lost: RankFailed | None = None
        self._plan()

    @property
    def rank(self) -> int:
        """In the group; rank 0 pushes."""
        return self._ranks.rank

    @property
    def names(self) -> list[str]:
        return [part.name for part in self._parts]

    def manifest(self, *, checksums: bool = True) -> Manifest:
        """RANK 0, and with checksums only within `together`: everything is gathered once."""
        sums = one_by_one(self) if checksums else None
        return manifest_of(self._parts, self._dtype, sums)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """RANK 0, within `together`, by any of its threads, any number at once."""
        for bucket in range(len(self._buckets)):
            tensors = self._ask(bucket)
            while tensors:
                yield tensors.pop(0)
        self._ask(None)  # another rank's error at the last bucket ends this one, too

    def together(self, work: Callable[[], R]) -> R | None:
        """ALL RANKS. Run `work` on rank 0, where it may iterate this source; the others gather along.

        `work` runs in a thread of its own. All ranks return once it has ended.

        Returns:
            On rank 0 what `work` returned, on the others None.

        Raises:
            RankFailed: on every rank, if one of them failed.
            PushError: on the others, if `work` raised; with its code, reason and message. Rank 0 raises what
                `work` raised.
        """
        return self.run(work, lambda _: 0)[0]

    def run(self, work: Callable[[], R], number_of: Callable[[Any], int]) -> tuple[R | None, int]:
        """ALL RANKS. As `together`; also gives, on every rank, a number of what `work` returned."""
        self._plan()
        if self.rank:
            return None, self._follow()
        return self._lead(work, number_of)

    # ------------------------------------------------------------ the plan

    def _plan(self) -> None:
        """ALL RANKS. What will be sent now, the same on all of them."""
        try:
            if self._gatherer is None:
                self._gatherer = gatherer_of(self._module)
            self._gatherer.ready()
            self._parts = self._parts_now(self._gatherer)
            check_dtypes(self._parts, self._dtype)
            self._buckets = _buckets(self._parts, self._gatherer, self._bucket_bytes)
        except Exception as error:
            self._ranks.fail(first_line(error))
            raise
        self._ranks.agree_on(self._digest(), "weights to send (names, shapes, dtypes or bucket_bytes)")

    def _parts_now(self, gatherer: Gatherer) -> list[Part]:
        if has_adapters(self._module):
            from trainers_adapters.peft_source import merged_parts

            return merged_parts(self._module, gatherer.leaves)
        return plain_parts(self._module, gatherer.leaves)

    def _digest(self) -> str:
        said = [(p.name, p.leaf.shape, str(p.leaf.dtype), len(p.refs)) for p in self._parts]
        text = repr((said, self._buckets, self._dtype))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    # ------------------------------------------------------------ others

    def _follow(self) -> int:
        """OTHERS. Do what rank 0 says until it ends."""
        word = Word(Kind.OK)
        while True:
            command = self._ranks.agree(word)
            word = Word(Kind.OK)
            if command.kind == Kind.END:
                return command.number
            if command.kind == Kind.GIVEN_UP:
                code, reason, message = command.text.split("\0", 2)
                raise PushError(code, reason, f"on rank 0: {message}")
            if command.kind == Kind.GATHER:
                _, word = self._gather(command.number)

    # ------------------------------------------------------------ rank 0

    def _lead(self, work: Callable[[], R], number_of: Callable[[Any], int]) -> tuple[R, int]:
        """RANK 0. Gather what `work` asks for until it ends, and end together."""
        asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        with self._lock:
            self._asked, self._lost = asked, None
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run() -> R:
            if device is not None:
                torch.cuda.set_device(device)
            return work()

        with ThreadPoolExecutor(1, thread_name_prefix="rank-0") as pool:
            future = pool.submit(run)
            future.add_done_callback(lambda _: asked.put(None))
            try:
                self._answer(asked)
            except RankFailed as error:
                self._lost = error
            finally:
                self._refuse(asked)
        failure = future.exception()
        number = number_of(future.result()) if failure is None else 0
        try:
            if self._lost is not None:
                raise self._lost
            self._ranks.agree(Word(Kind.END, number) if failure is None else _given_up(failure))
        except RankFailed as error:
            raise error.after(number) from failure
        if failure is not None:
            raise failure
        return future.result(), number

    def _answer(self, queued: queue.SimpleQueue[_Asked | None]) -> None:
        """RANK 0. Until `work` has ended."""
        while True:
            try:
                asked = queued.get(timeout=BEAT_S)
            except queue.Empty:
                self._ranks.agree(Word(Kind.IDLE))
                continue
            if asked is None:
                return
            try:
                asked.reply.set_result(self._gathered(asked.bucket))
            except BaseException as error:  # nobody else answers the thread that waits for it
                asked.reply.set_exception(error)
                raise

    def _gathered(self, bucket: int | None) -> Named:
        if bucket is None:
            self._ranks.agree(Word(Kind.IDLE))
            return []
        self._ranks.agree(Word(Kind.GATHER, bucket))
        tensors, word = self._gather(bucket)
        if word.kind == Kind.FAILED:
            self._ranks.agree(word)
        return tensors

    def _ask(self, bucket: int | None) -> Named:
        asked = _Asked(bucket)
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if self._asked is None:
                raise ValueError(
                    "a ShardedSource is gathered from all ranks at once: call push_sharded, or iterate it in "
                    "what `together` runs"
                )
            self._asked.put(asked)
        return asked.reply.result()

    def _refuse(self, queued: queue.SimpleQueue[_Asked | None]) -> None:
        """RANK 0. Threads of `work` may still ask for tensors, or later: nothing is gathered any more."""
        with self._lock:
            self._asked = None
        while not queued.empty():
            asked = queued.get()
            if asked is not None:
                asked.reply.set_exception(self._lost or RankFailed("the push has ended on rank 0"))

    # ------------------------------------------------------------ a bucket

    def _gather(self, bucket: int) -> tuple[Named, Word]:
        """ALL RANKS. The bucket's tensors on rank 0, none on the others; and how it went, to be said next.

        Raises:
            RankFailed: a rank said that it cannot, before any began.
        """
        parts = [self._parts[index] for index in self._buckets[bucket]]
        where = f"bucket {bucket} ({parts[0].name} and {len(parts) - 1} more)"
        try:
            self._reserve(parts)
        except Exception as error:  # noqa: BLE001 - every rank raises it
            self._ranks.agree(Word(Kind.FAILED, text=f"no room for {where}: {first_line(error)}"))
        self._ranks.agree(Word(Kind.OK))
        try:
            return self._made(parts), Word(Kind.OK)
        except Exception as error:  # noqa: BLE001 - every rank raises it
            return [], Word(Kind.FAILED, text=f"could not gather {where}: {first_line(error)}")

    def _reserve(self, parts: Sequence[Part]) -> None:
        """Run out of memory before the collective, where it can be said, rather than within it."""
        device = device_of(parts[0].refs[0].get())
        if device.type == "cuda":  # threads that sent the bucket before did so on their default stream
            torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        torch.empty(sum(map(_nbytes, parts)), dtype=torch.uint8, device=device)

    def _made(self, parts: Sequence[Part]) -> Named:
        assert self._gatherer is not None
        made: Named = []
        with self._gatherer.whole([ref for part in parts for ref in part.refs]) as tensors:
            if self.rank:
                return []
            for part in parts:
                own = tensors[: len(part.refs)]
                del tensors[: len(part.refs)]
                tensor = part.make(own, self._dtype)
                if self._gatherer.frees and tensor.data_ptr() == own[0].data_ptr():
                    tensor = tensor.clone()
                made.append((part.name, tensor))
        for device in {tensor.device for _, tensor in made if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # they are read in other threads
        return made


def _buckets(parts: Sequence[Part], gatherer: Gatherer, bucket_bytes: int) -> list[range]:
    """Consecutive parts: of one group, or together no more than `bucket_bytes` (or one that is larger)."""
    buckets: list[range] = []
    start, size = 0, 0
    for index, part in enumerate(parts):
        group = gatherer.group_of(part)
        full = size + _nbytes(part) > bucket_bytes if group is None else False
        if index > start and (full or group != gatherer.group_of(parts[start])):
            buckets.append(range(start, index))
            start, size = index, 0
        size += _nbytes(part)
    return [*buckets, range(start, len(parts))]


def _nbytes(part: Part) -> int:
    return math.prod(part.leaf.shape) * part.leaf.dtype.itemsize


def _given_up(error: BaseException) -> Word:
    """An error of `work` as code, reason and message; the message may be cut off."""
    said = ("UNKNOWN", type(error).__name__, first_line(error))
    if isinstance(error, RollsyncError):
        said = (error.code, error.reason, error.message)
    return Word(Kind.GIVEN_UP, text="\0".join(said))
