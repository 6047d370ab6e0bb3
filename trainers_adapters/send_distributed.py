"""The distributed path, sending side: rank 0 of a process group broadcasts while the engines receive."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, ClassVar

import torch

from trainers_adapters import push_ends
from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import RollsyncError
from trainers_adapters.push_ends import tell_all
from trainers_adapters.sending import Outgoing, Sender
from weight_updater.groups import SenderGroup
from weight_updater.meeting import listen
from weight_updater.nccl import NCCL_BUCKET_BYTES
from weight_updater.packing import PackedBytes
from weight_updater.requests import BeginReply, InitGroup, Path, UpdateReply

CPU = torch.device("cpu")


class BroadcastGroup(Sender):
    """A process group of this trainer (rank 0) and its engines (ranks 1 and up, in the clients' order).

    It is made at the first push and kept. After a failed push it is gone on both ends; the next push
    makes a new one.

    Args:
        master_address: an address of this host that the engines can reach.
        bucket_bytes: of one broadcast; 0 means 64 MiB with gloo, 1 GiB with NCCL (of which the trainer's GPU
            holds two).
        group_timeout_s: seconds for the rendezvous, and for each wait of the engines.
        backend: "gloo" or "nccl"; "" takes nccl if the weights lie on a GPU. NCCL needs the engines on other
            GPUs than the trainer's; it writes straight into their memory.
    """

    path: ClassVar[Path] = Path.DISTRIBUTED

    def __init__(
        self,
        *,
        master_address: str = "127.0.0.1",
        bucket_bytes: int = 0,
        group_timeout_s: float = 30.0,
        backend: str = "",
    ) -> None:
        if backend not in ("", "gloo", "nccl"):
            raise ValueError(f"backend is {backend!r}; it must be gloo, nccl or empty")
        self._master_address = master_address
        self._bucket_bytes = bucket_bytes
        self._timeout_s = group_timeout_s
        self._asked_backend = backend
        self._backend = backend
        self._group: SenderGroup | None = None
        self._name = ""
        self._members: tuple[WeightsClient, ...] = ()

    def stage(self, outgoing: Outgoing, clients: Sequence[WeightsClient]) -> dict[str, Any]:
        if self._group is None or self._members != tuple(clients):
            self.close()
            device = CPU if outgoing.resident is not None else next(iter(outgoing.source))[1].device
            self._backend = self._asked_backend or ("nccl" if device.type == "cuda" else "gloo")
            self._open(tuple(clients), device if device.type == "cuda" else None)
        default = NCCL_BUCKET_BYTES if self._backend == "nccl" else 0
        return {"bucket_bytes": self._bucket_bytes or default}

    def _open(self, clients: tuple[WeightsClient, ...], device: torch.device | None) -> None:
        """Rendezvous: both ends must be at it at once, so each engine's call runs in its own thread."""
        self._name = f"rollsync-{secrets.token_hex(8)}"
        port = _free_port(self._master_address)
        world_size = len(clients) + 1

        def join(rank: int, client: WeightsClient) -> str:
            request = InitGroup(
                self._name, self._master_address, port, rank, world_size, self._backend, self._timeout_s
            )
            return client.init_group(request, timeout_s=self._timeout_s + 5)

        self._members = clients
        with ThreadPoolExecutor(len(clients)) as pool:
            joining = [pool.submit(join, rank, client) for rank, client in enumerate(clients, start=1)]
            try:
                self._group = SenderGroup(
                    self._name,
                    self._master_address,
                    port,
                    world_size,
                    self._timeout_s,
                    backend=self._backend,
                    device=device,
                )
                for future in joining:
                    future.result()
            except BaseException as error:
                refused = next((f.exception() for f in joining if f.done() and f.exception()), None)
                self._leave()
                if isinstance(refused, RollsyncError):
                    raise refused from error  # why the rendezvous failed, rather than that it did
                raise

    def send(self, client: WeightsClient, begun: BeginReply, outgoing: Outgoing) -> UpdateReply:
        return client.update_from_distributed(begun.update_id, self._name, timeout_s=outgoing.seconds_left)

    def beside(self, begun: BeginReply, outgoing: Outgoing) -> None:
        assert self._group is not None
        tensors: Iterable[torch.Tensor] | PackedBytes = (tensor for _, tensor in outgoing.source)
        if outgoing.resident is not None and self._backend == "gloo":
            tensors = outgoing.resident
        self._group.broadcast(outgoing.manifest, tensors, begun.bucket_bytes)

    def cancel(self) -> None:
        self._leave()

    def close(self) -> None:
        self._leave()

    def _leave(self) -> None:
        """Tear down both ends; an engine that is gone, or whose group is, has nothing to leave."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
        members, self._members = self._members, ()
        tell_all(
            members, lambda client: client.destroy_group(self._name, timeout_s=push_ends.ABORT_TIMEOUT_S)
        )


def _free_port(address: str) -> int:
    """Raises UpdateRefused (INVALID_UPDATE): the address is not one of this host."""
    with closing(listen(address, 0)) as probe:
        return int(probe.getsockname()[1])
