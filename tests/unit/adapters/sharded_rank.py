"""One rank of a trainer whose model is sharded, as a process that tests tell what to do.

    python -m tests.unit.adapters.sharded_rank RANK WORLD_SIZE STORE

Every rank builds the same model from a seed and shards it as it is told; what its parameters were before that
is what has to arrive.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from tests.children import obey
from tests.unit.adapters.sharded_nets import (
    IDS,
    WAYS,
    WIDTH,
    Net,
    expected_of,
    fsdp2,
    moved_model,
    shard_under_adapters,
    tensor_parallel_transformer,
    with_adapters,
)
from trainers_adapters import (
    BroadcastGroup,
    DiskDirectory,
    IpcArena,
    ModuleSource,
    PushError,
    ShardedSource,
    TensorSegment,
    TensorStream,
    WeightsClient,
    push_sharded,
)
from trainers_adapters.sending import Sender
from trainers_adapters.sharding import ranks as ranks_module
from weight_updater.checksum import checksum

SENDERS: dict[str, Callable[[], Sender]] = {
    "stream": lambda: TensorStream(chunk_bytes=64),
    "segment": TensorSegment,
    "ipc": IpcArena,
    "distributed": lambda: BroadcastGroup(bucket_bytes=8192, group_timeout_s=60.0),
}


class Rank:
    """A sharded model and its source, and on rank 0 clients; its methods are the commands."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._clients: list[WeightsClient] = []

    def connect(self, addresses: Sequence[str]) -> None:
        if self._rank == 0:
            self._clients = [WeightsClient(address) for address in addresses]

    def shard(
        self, way: str, lora: bool = False, tied: bool = False, other: str = "", bucket_bytes: int = 400
    ) -> Any:
        """Gives what has to arrive, and the names in the order of the source.

        other: what rank 1 does differently.
        """
        torch.manual_seed(0)
        net: nn.Module = Net(tied=tied)
        if other == "model" and self._rank:
            net.norm = nn.LayerNorm(WIDTH, bias=False)
        if lora:
            net = with_adapters(net)
        expected = {name: checksum(tensor) for name, tensor in expected_of(net, lora)}
        self._module = shard_under_adapters(net, way) if lora else WAYS[way](net)
        if other == "dtype" and self._rank:
            self._module.odd = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
        try:
            self._source = ShardedSource(self._module, bucket_bytes=bucket_bytes, timeout_s=20.0)
        except (ValueError, PushError) as error:
            return _said(error)
        return {"expected": expected, "names": self._source.names}

    def load(self, directory: str, way: str = "fsdp2", seed: int = 1) -> dict[str, int]:
        """A model that an engine serves, moved by a seed and sharded; gives what has to arrive.

        way: fsdp2 or tensor_parallel.
        """
        model = moved_model(Path(directory), seed)
        expected = {name: checksum(tensor) for name, tensor in ModuleSource(model)}
        if way == "fsdp2":
            fsdp2(model.model)
            self._module = fsdp2(model)
        else:
            self._module = tensor_parallel_transformer(model)
        self._source = ShardedSource(self._module, bucket_bytes=30_000, timeout_s=20.0)
        return expected

    def forward(self) -> None:
        """As a trainer does between pushes, without a backward."""
        with torch.no_grad():
            self._module(IDS)

    def step(self) -> None:
        optimizer = torch.optim.SGD((p for p in self._module.parameters() if p.requires_grad), lr=0.5)
        self._module(IDS).square().sum().backward()
        optimizer.step()

    def push(self, via: str = "stream", to: int = 1, directory: str = "", **options: Any) -> Any:
        """Gives the version on every rank; or what was raised, and after how long.

        via: one of SENDERS, or disk into `directory`.
        """
        before = self._bits()
        started = time.monotonic()
        sender = None
        if self._rank == 0:
            sender = DiskDirectory(directory) if via == "disk" else SENDERS[via]()
        try:
            pushed = push_sharded(self._source, self._clients[:to], via=sender, **options)
        except (PushError, ValueError) as error:
            return _said(error) | {"seconds": time.monotonic() - started}
        finally:
            if sender is not None:
                sender.close()
        after = self._bits()
        alike = before.keys() & after.keys()  # FSDP2 may have put back the shards of what was whole
        assert alike
        assert all(before[key] == after[key] for key in alike), "the push wrote to the trainer's parameters"
        assert (pushed.report is not None) == (self._rank == 0)
        return {"version": pushed.version, "changed": pushed.report.num_changed if pushed.report else None}

    def _bits(self) -> dict[Any, int]:
        """Of what this rank holds. Copies are hashed: numpy's views keep a storage from being resized."""
        held = {
            name: p.to_local() if hasattr(p, "to_local") else p for name, p in self._module.named_parameters()
        }
        return {(name, p.shape): checksum(p.detach().clone()) for name, p in held.items()}

    def watch(self) -> None:
        """From here on count the bytes of whole parameters in each gather."""
        self._gathered: list[int] = []
        whole = self._source._gatherer.whole

        def counted(refs: Any) -> Any:
            leaves = [self._source._gatherer.leaves(ref.owner)[ref.leaf] for ref in refs]
            self._gathered.append(
                sum(leaf.dtype.itemsize * torch.Size(leaf.shape).numel() for leaf in leaves)
            )
            return whole(refs)

        self._source._gatherer.whole = counted

    def gathered(self) -> list[int]:
        return self._gathered

    def break_at(self, where: str, bucket: int) -> None:
        """Make this rank fail at a bucket: before its collective, instead of it, after it, or by dying."""
        ranks_module.ERROR_GRACE_S = 1.0
        name = "_reserve" if where == "before" else "_made"
        original, first = getattr(self._source, name), self._source._buckets[bucket].start

        def broken(parts: Any) -> Any:
            if parts[0] is not self._source._parts[first]:
                return original(parts)
            if where == "dies":
                os._exit(9)
            if where == "after":
                original(parts)
            setattr(self._source, name, original)
            raise MemoryError(f"rank {self._rank} has none")

        setattr(self._source, name, broken)

    def leave(self) -> None:
        os._exit(9)

    def together(self) -> dict[str, int] | None:
        return self._source.together(lambda: {name: checksum(tensor) for name, tensor in self._source})

    def interrupted(self) -> Any:
        """Rank 0's work fails on its own, with an error that is no push's."""

        def work() -> None:
            next(iter(self._source))
            raise KeyError("lost")

        try:
            self._source.together(work)
        except (KeyError, PushError) as error:
            return _said(error)
        return None

    def iterate_alone(self) -> Any:
        try:
            list(self._source)
        except ValueError as error:
            return _said(error)
        return None

    def module_source(self) -> Any:
        try:
            return {"names": ModuleSource(self._module).names}
        except ValueError as error:
            return _said(error)


def _said(error: BaseException) -> dict[str, Any]:
    return {"kind": type(error).__name__, "error": str(error), "rank": getattr(error, "rank", None)}


def main(rank: str, world_size: str, store: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, int(world_size)),
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=60),
    )
    this = Rank(int(rank))
    commands = [name for name, value in vars(Rank).items() if callable(value) and name[0] != "_"]
    obey({name: getattr(this, name) for name in commands})


if __name__ == "__main__":
    main(*sys.argv[1:])
