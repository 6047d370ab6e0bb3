"""The ipc path, sending side: memory that is lent to engines on this host until their reply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from trainers_adapters import push_ends
from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import RollsyncError
from trainers_adapters.push_ends import tell_all
from trainers_adapters.segments import PackedSegment
from trainers_adapters.sending import Outgoing, Sender
from trainers_adapters.sources import Source, is_gathered
from weight_updater.requests import BeginReply, BeginUpdate, Path, ShmSegment, UpdateReply

if TYPE_CHECKING:
    from trainers_adapters.cuda_lending import CudaLending, Lent

log = logging.getLogger(__name__)


class IpcArena(Sender):
    """Memory for all tensors that the engines open once and both sides keep.

    CUDA tensors are lent where they lie, by handle; others are copied into one POSIX shared-memory
    allocation. Memory that engines have mapped may be freed only after they have acknowledged Release; so
    close the arena (or leave its `with` block) before the clients, and before a module on a GPU goes. What an
    engine does not let go of on a GPU is left as it is, for as long as this process lives.
    """

    path: ClassVar[Path] = Path.IPC
    hashes_bytes: ClassVar[bool] = True

    def __init__(self) -> None:
        self._segment = PackedSegment()
        self._lending: CudaLending | None = None
        self._lent: Lent | None = None  # what this push lends, if it lies on GPUs
        self._scanned = False  # here, for checksums and values that are not finite
        self._found: tuple[Outgoing, list[tuple[str, torch.Tensor]]] | None = None  # see `_on_gpus`
        self._borrowers: dict[str, WeightsClient] = {}
        self._told: dict[str, str] = {}  # engine -> digest of what was lent to it in full

    @property
    def descriptor(self) -> ShmSegment:
        """Of the POSIX allocation; its allocation_id stays the same as long as its memory does."""
        return self._segment.descriptor

    @property
    def allocation_ids(self) -> set[str]:
        """Of all memory that engines may have mapped."""
        shared = {self._segment.descriptor.allocation_id} if self._segment.holds_memory else set()
        return shared | (self._lending.allocation_ids if self._lending is not None else set())

    def begins_early(self, outgoing: Outgoing) -> bool:
        return outgoing.verify and bool(self._on_gpus(outgoing))

    def stage(self, outgoing: Outgoing, clients: Sequence[WeightsClient]) -> dict[str, Any]:
        named, self._found = self._on_gpus(outgoing), None
        if named:
            return self._lend(named, outgoing)
        self._lent = None
        if not self._segment.fits(outgoing):
            self.close()
        self._segment.fill(outgoing)
        if not outgoing.verify:
            return {}
        if is_gathered(outgoing.source):  # gathering everything once more would take as long as the push
            return {"manifest": outgoing.manifest.with_checksums(self._segment.checksums())}
        described = outgoing.source if outgoing.resident is None else outgoing.resident
        return {"manifest": described.manifest(checksums=True)}

    def _on_gpus(self, outgoing: Outgoing) -> list[tuple[str, torch.Tensor]]:
        """What is lent of a source, nothing if it goes through the segment; asked of it once for a push.
        If it lies where it lay, the GPUs hash from here on.
        """
        if self._found is None or self._found[0] is not outgoing:
            self._found = None
            named = _parameters_on_gpus(outgoing.source)
            if named is None:
                if self._lending is not None:
                    self._lending.let_go()
                named = [] if outgoing.resident is not None else _all_on_gpus(outgoing.source)
            if named and outgoing.verify and self._lending is not None:
                self._lending.start_scan(named)
            self._found = outgoing, named
        return self._found[1]

    def _lend(self, named: Sequence[tuple[str, torch.Tensor]], outgoing: Outgoing) -> dict[str, Any]:
        from trainers_adapters.cuda_lending import CudaLending

        if self._lending is None:
            self._lending = CudaLending()
        before = self._lending.allocation_ids
        self._lent = self._lending.lend(named, outgoing.manifest)
        gone = sorted(before - self._lending.allocation_ids)
        free = not gone or release_everywhere(gone, list(self._borrowers.values()))
        self._lending.forget(free=free)
        self._scanned = False
        if not outgoing.verify:
            return {}
        checksums, nonfinite = self._lending.scan()
        self._scanned = not nonfinite  # else the engine looks itself, and decides
        return {"checksums": tuple(checksums)}

    def send(self, client: WeightsClient, begun: BeginReply, outgoing: Outgoing) -> UpdateReply:
        return self._update(client, begun.update_id, outgoing)

    def in_one_call(
        self, client: WeightsClient, update: BeginUpdate, outgoing: Outgoing
    ) -> UpdateReply | None:
        return None if self._lent is None else self._update(client, update, outgoing)

    def send_and_commit(
        self, client: WeightsClient, update_id: str, outgoing: Outgoing, checksums: Sequence[int]
    ) -> UpdateReply:
        return self._update(client, update_id, outgoing, checksums=checksums, commit=True)

    def _update(
        self, client: WeightsClient, update: str | BeginUpdate, outgoing: Outgoing, **fields: Any
    ) -> UpdateReply:
        self._borrowers[client.address] = client
        lent, fields["timeout_s"] = self._lent, outgoing.seconds_left
        if lent is None:
            return client.update_from_ipc(update, [self._segment.descriptor], **fields)
        fields["scanned"] = self._scanned
        if self._told.get(client.address) == lent.digest:
            try:
                return client.update_from_ipc(update, [], lent=lent.digest, **fields)
            except RollsyncError as error:
                if error.reason != "MANIFEST_UNKNOWN":  # another engine process listens there now
                    raise
                del self._told[client.address]
        reply = client.update_from_ipc(update, lent.probed(), lent.placements, **fields)
        self._told[client.address] = lent.digest
        return reply

    def close(self) -> None:
        lent = sorted(self.allocation_ids)
        free = not lent or release_everywhere(lent, list(self._borrowers.values()))
        self._borrowers.clear()
        self._told.clear()
        self._segment.close()
        self._lent = None
        if self._lending is not None:
            self._lending.close(free=free)


def _parameters_on_gpus(source: Source) -> list[tuple[str, torch.Tensor]] | None:
    """What a source yields, if it is what a module holds on GPUs and nothing has to be made for it."""
    look: Callable[[], list[tuple[str, torch.Tensor]] | None] = getattr(source, "on_gpus", lambda: None)
    return look()


def _all_on_gpus(source: Source) -> list[tuple[str, torch.Tensor]]:
    """What a source yields if all of it lies on GPUs, else nothing: one that makes its tensors on a CPU is
    asked for no more than one of them here, and one that gathers them for none.
    """
    named: list[tuple[str, torch.Tensor]] = []
    if is_gathered(source):
        return named
    for name, tensor in source:
        if not tensor.is_cuda:
            return []
        named.append((name, tensor))
    return named


def release_everywhere(allocation_ids: Sequence[str], clients: Sequence[WeightsClient]) -> bool:
    """Make every engine unmap allocations; one that is gone has no mapping any more.

    Returns:
        Whether none has them mapped. If one says otherwise or nothing, which is logged, memory of a GPU must
        not be freed; shared memory may be, and an engine's mapping of it lives on by itself.
    """
    failures = tell_all(
        clients, lambda client: client.release(allocation_ids, timeout_s=push_ends.ABORT_TIMEOUT_S)
    )
    mapped = {where: error for where, error in failures.items() if not error.unreachable}
    for where, error in mapped.items():
        log.warning("%s may keep %d allocations mapped: %s", where, len(allocation_ids), error)
    return not mapped
