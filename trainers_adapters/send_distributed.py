"""The distributed path, sending side: rank 0 of a process group broadcasts while the engines receive.

One engine alone begins, receives and commits in one call, beside which the broadcast starts at once. Several
engines take a call for each step, so that none commits before all have voted.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, ClassVar

import torch

from trainers_adapters import push_ends
from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import RollsyncError
from trainers_adapters.push_ends import fail, is_unknown, tell_all
from trainers_adapters.sending import Outgoing, Sender, settle_stream
from weight_updater.errors import Reason, UpdateError
from weight_updater.groups import SenderGroup
from weight_updater.meeting import listen
from weight_updater.nccl import NCCL_BUCKET_BYTES
from weight_updater.packing import PackedBytes
from weight_updater.requests import BeginReply, BeginUpdate, InitGroup, Path, UpdateReply

CPU = torch.device("cpu")
LOST = (Reason.PEER_LOST, Reason.TIMEOUT)
"""What a rank says that waited for another one."""


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
        self._thread: ThreadPoolExecutor | None = None  # lives as long as the group
        self._sending: tuple[Outgoing, Future[None]] | None = None  # beside the one call of a push

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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
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

    def in_one_call(
        self, client: WeightsClient, update: BeginUpdate, outgoing: Outgoing
    ) -> UpdateReply | None:
        """An engine that refuses to begin costs the group, since the broadcast waits for it already."""
        sending = self._broadcast_of(outgoing, update.bucket_bytes)
        try:
            reply = client.update_from_distributed(update, self._name, timeout_s=outgoing.seconds_left)
        except RollsyncError as error:
            if is_unknown(error) or error.reason == "MANIFEST_UNKNOWN":
                raise  # and called again, perhaps
            self._leave()
            if error.reason in LOST and (own := _own_fault(sending)) is not None:
                fail("UpdateWeightsFromDistributed on the trainer", own)
            raise
        if sending.exception() is not None:  # the engine has all bytes, and made them live
            self._leave()
        return reply

    def _broadcast_of(self, outgoing: Outgoing, bucket_bytes: int) -> Future[None]:
        """The one of this push, however often its call is repeated."""
        if self._sending is None or self._sending[0] is not outgoing:
            settle_stream()  # before another thread reads the source
            assert self._thread is not None
            self._sending = outgoing, self._thread.submit(self._broadcast_alone, outgoing, bucket_bytes)
        return self._sending[1]

    def _broadcast_alone(self, outgoing: Outgoing, bucket_bytes: int) -> None:
        """THREAD. Nobody looks at it while the engine's call lasts, so the engine must hear of a failure."""
        group = self._group
        assert group is not None
        try:
            self._broadcast(outgoing, bucket_bytes)
        except BaseException:
            group.close()
            raise

    def beside(self, begun: BeginReply, outgoing: Outgoing) -> None:
        self._broadcast(outgoing, begun.bucket_bytes)

    def _broadcast(self, outgoing: Outgoing, bucket_bytes: int) -> None:
        assert self._group is not None
        tensors: Iterable[torch.Tensor] | PackedBytes = (tensor for _, tensor in outgoing.source)
        if outgoing.resident is not None and self._backend == "gloo":
            tensors = outgoing.resident
        self._group.broadcast(outgoing.manifest, tensors, bucket_bytes)

    def cancel(self) -> None:
        self._leave()

    def close(self) -> None:
        self._leave()

    def _leave(self) -> None:
        """Tear down both ends; an engine that is gone, or whose group is, has nothing to leave."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
        thread, self._thread, self._sending = self._thread, None, None
        if thread is not None:
            thread.shutdown()  # a broadcast ends with its group; from here on nothing reads the source
        members, self._members = self._members, ()
        tell_all(
            members, lambda client: client.destroy_group(self._name, timeout_s=push_ends.ABORT_TIMEOUT_S)
        )


def _own_fault(sending: Future[None]) -> BaseException | None:
    """What ended a broadcast, if that was not what became of an engine."""
    error = sending.exception()
    return None if isinstance(error, UpdateError) and error.reason in LOST else error


def _free_port(address: str) -> int:
    """Raises UpdateRefused (INVALID_UPDATE): the address is not one of this host."""
    with closing(listen(address, 0)) as probe:
        return int(probe.getsockname()[1])
