"""The ipc path, sending side: memory that is lent to engines on this host until their reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import RollsyncError
from trainers_adapters.segments import PackedSegment
from trainers_adapters.sending import Outgoing, Sender
from weight_updater.requests import BeginReply, Path, ShmSegment, UpdateReply


class IpcArena(Sender):
    """One POSIX shared-memory allocation for all tensors, opened by the engines once and kept by both.

    Its memory is freed only after every engine that mapped it has acknowledged Release; so close it (or
    leave its `with` block) before the clients.
    """

    path: ClassVar[Path] = Path.IPC

    def __init__(self) -> None:
        self._segment = PackedSegment()
        self._borrowers: dict[str, WeightsClient] = {}

    @property
    def descriptor(self) -> ShmSegment:
        """Of the allocation; its allocation_id stays the same as long as its memory does."""
        return self._segment.descriptor

    def stage(self, outgoing: Outgoing, clients: Sequence[WeightsClient]) -> dict[str, Any]:
        if not self._segment.fits(outgoing):
            self.close()
        self._segment.fill(outgoing)
        return {}

    def send(self, client: WeightsClient, begun: BeginReply, outgoing: Outgoing) -> UpdateReply:
        self._borrowers[client.address] = client
        return client.update_from_ipc(
            begun.update_id, [self._segment.descriptor], timeout_s=outgoing.seconds_left
        )

    def close(self) -> None:
        if self._segment.holds_memory:
            release_everywhere(self._segment.descriptor.allocation_id, list(self._borrowers.values()))
        self._borrowers.clear()
        self._segment.close()


def release_everywhere(allocation_id: str, clients: Sequence[WeightsClient]) -> None:
    """Make every engine unmap an allocation; one that is gone has no mapping any more."""
    for client in clients:
        try:
            client.release(allocation_id)
        except RollsyncError as error:
            if not error.unreachable:
                raise
