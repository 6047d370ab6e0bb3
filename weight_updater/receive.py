"""Four paths in, one sink: what a worker runs to bring the bytes of an update in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum

from weight_updater import from_disk, from_distributed, from_ipc, from_tensor
from weight_updater.arena import WeightTarget
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.groups import GroupRegistry
from weight_updater.lent_tensors import reads_lent, takes_together
from weight_updater.look import Look
from weight_updater.manifests import Manifests, check_files
from weight_updater.mappings import Mappings
from weight_updater.open_update import OpenUpdate, Request, check_received
from weight_updater.pinned import PinnedSegments
from weight_updater.requests import FromDisk, FromDistributed, FromIpc, FromTensor, Path
from weight_updater.safetensors_header import FileIdentity

PATH_OF: dict[type[Request], Path] = {
    FromDisk: Path.DISK,
    FromDistributed: Path.DISTRIBUTED,
    FromTensor: Path.TENSOR,
    FromIpc: Path.IPC,
}


LOOK_S = 1.0
"""How often to look whether trainers removed segments that are kept."""


class Pace(IntEnum):
    """How long `Receive.run` keeps the thread that calls it."""

    INSTANT = 0
    """It reads nothing: the loop may call it itself."""
    BRIEF = 1
    """It reads memory of GPUs that was lent before, for milliseconds: so may a loop with nothing to run."""
    LONG = 2
    """It is work for a worker."""


class Receive:
    """One `update_weights_from_*` of an open update.

    writes_live: `run` writes into live slots; the loop lets no forward pass start until it returned.
    counted: it is one of the update's `num_receiving`.
    """

    def __init__(
        self,
        update: OpenUpdate,
        request: Request,
        work: Callable[[], None],
        look: Callable[[], None] | None = None,
        *,
        counted: bool = False,
        pace: Pace = Pace.LONG,
    ) -> None:
        self.update = update
        self.request = request
        self.writes_live = update.writes_live
        self.counted = counted
        self.pace = pace
        self._work = work
        self._look = look

    def look(self) -> None:
        """WORKER. Refuse what can be seen to be wrong before a live slot is written; `run` does it if
        nobody did. Nothing is written yet, so generation may go on meanwhile.

        Raises:
            UpdateError: what is wrong; hand it to `WeightUpdater.received`.
        """
        look, self._look = self._look, None
        if look is not None:
            self._timed(look)

    def run(self) -> None:
        """WORKER. Bring the bytes in; returns when they are there.

        Raises:
            UpdateError: what went wrong; hand it to `WeightUpdater.received`.
        """
        self.look()
        self._timed(self._bring)

    def _bring(self) -> None:
        self._work()
        self.update.sink.catch_up()

    def _timed(self, work: Callable[[], None]) -> None:
        try:
            with self.update.transfer.running():
                work()
        except UpdateError:
            raise
        except Exception as error:
            raise UpdateRefused(
                Reason.INTERNAL,
                f"receiving update {self.update.update_id} ({self.update.path}) failed: {error} "
                f"({type(error).__name__})",
            ) from error


class Receivers:
    """Makes the work of each path. Holds what lives longer than an update.

    mappings: of trainers' memory. groups: process groups of the distributed path.
    """

    def __init__(self, target: WeightTarget, manifests: Manifests, mappings: Mappings) -> None:
        self.mappings = mappings
        self.groups = GroupRegistry(target.device)
        self._target = target
        on_gpu = target.device.type == "cuda"
        self._segments = PinnedSegments(target.device) if on_gpu else None
        self._next_look = 0.0
        self._manifests = manifests

    def work(
        self, update: OpenUpdate, request: Request, chunks: from_tensor.Chunks | None
    ) -> Callable[[], None]:
        """What the worker does for `request`.

        Raises:
            UpdateRefused (INVALID_UPDATE): the request is of another path than the update.
        """
        if PATH_OF[type(request)] is not update.path:
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"update {update.update_id} began with path {update.path}, not {PATH_OF[type(request)]}",
            )
        if isinstance(request, FromDisk):
            return lambda: self._disk(update, request)
        if isinstance(request, FromDistributed):
            return lambda: self._distributed(update, request)
        if isinstance(request, FromTensor):
            return lambda: from_tensor.receive(request, update.sink, chunks, self._segments)
        lent = self.mappings.recall(request)
        self.mappings.pinned.update(region.allocation_id for region in lent.all_regions)
        update.regions += lent.all_regions
        return lambda: self._ipc(update, lent)

    def pace(self, update: OpenUpdate, request: Request) -> Pace:
        """How long the work for `request` takes, if what it lends was lent before; else it may take long."""
        if not isinstance(request, FromIpc) or not request.lent or update.adopt or update.adapter is not None:
            return Pace.LONG
        lent = self.mappings.arranged(request.lent, update.plan, adopt=False)
        device = self.mappings.device
        if lent is None or not takes_together(update.sink, lent, device):
            return Pace.LONG
        return Pace.BRIEF if reads_lent(update.sink, lent, device, scanned=request.scanned) else Pace.INSTANT

    def reading(self, update: OpenUpdate) -> AbstractContextManager[None]:
        """A block in which nothing is unmapped that the update was lent, also if it ends meanwhile."""
        return self.mappings.using(tuple(update.regions))

    def release(self, allocation_ids: Sequence[str]) -> int:
        """Unmap trainers' memory; returns how many mappings went.

        Raises:
            UpdateRefused (WRONG_STATE): one is in use.
        """
        kept = self._segments.release(allocation_ids) if self._segments is not None else 0
        return kept + self.mappings.release(allocation_ids)

    def tick(self, now: float) -> None:
        """LOOP. Let go, once a second, of memory and groups whose trainer left without a word."""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        self.groups.drop_ended()
        self.mappings.drop_unlinked()
        if self._segments is not None:
            self._segments.drop_unlinked()

    def look(self, update: OpenUpdate, request: Request) -> Callable[[], None] | None:
        """What the worker does before `request` writes to a live slot; None where it writes elsewhere, or
        where bytes come but once (a stream, a broadcast), so that nothing can be seen beforehand. Nor does a
        GPU's engine look: the CPU would hash for seconds what the device checks in milliseconds, once it has
        it.
        """
        if not update.writes_live or update.in_adopted or self._target.device.type != "cpu":
            return None
        if isinstance(request, FromDisk) or (isinstance(request, FromTensor) and request.segment is not None):
            return lambda: self._look(update, request)
        return None

    def _look(self, update: OpenUpdate, request: FromDisk | FromTensor) -> None:
        asked = update.request
        look = Look(update.plan, hashing=not asked.skip_checksums, find_nonfinite=not asked.allow_nonfinite)
        if isinstance(request, FromDisk):
            update.looked_at = self._read_disk(update, request, look)
        else:
            assert request.segment is not None
            from_tensor.read_segment(request.segment, update.plan, look, self._segments)
        check_received(update, look)
        update.sink.trust(look)

    def close(self) -> None:
        """Leave all groups, give back all mappings."""
        self.groups.close()
        self.mappings.close()
        if self._segments is not None:
            self._segments.close()

    def _disk(self, update: OpenUpdate, request: FromDisk) -> None:
        self._read_disk(update, request, update.sink)
        update.directory = request.directory or update.request.directory

    def _read_disk(
        self, update: OpenUpdate, request: FromDisk, sink: from_disk.ByteSink
    ) -> dict[str, FileIdentity]:
        named = request.directory or update.request.directory
        if not named:
            raise UpdateRefused(Reason.INVALID_UPDATE, "the disk path needs a directory")
        directory = self._manifests.directory(named)
        headers = self._manifests.headers
        found = from_disk.read_manifest(directory, headers)
        check_files(update.plan.manifest, found, named)
        return from_disk.receive(
            dataclasses.replace(request, directory=directory),
            found,
            sink,
            needed=update.plan.needed,
            headers=headers,
            seen=update.looked_at,
        )

    def _distributed(self, update: OpenUpdate, request: FromDistributed) -> None:
        from_distributed.receive(
            request,
            update.plan.manifest,
            update.sink,
            self.groups,
            bucket_bytes=update.request.bucket_bytes,
            needed=update.plan.needed,
        )

    def _ipc(self, update: OpenUpdate, request: FromIpc) -> None:
        arena = self._target.arena
        from_ipc.receive(request, update.sink, self.mappings, arena, adopt=update.adopt)
        if update.adopt:
            adoption = self.mappings.open(request.all_regions[0])
            if not adoption.owner_alive():
                raise UpdateRefused(
                    Reason.MEMORY_UNAVAILABLE,
                    f"nobody holds the owner's lock on allocation {adoption.allocation_id}; make its segment "
                    f"(on a GPU: the one named as owner) with owner_lock, so that its owner's death is "
                    f"noticed, and keep it open",
                )
            update.adoption = adoption


def skip(chunks: from_tensor.Chunks | None) -> None:
    """WORKER. Let a stream run to its end; its sender waits for that."""
    for _ in chunks or ():
        pass


def after(update: OpenUpdate, first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    """One function that calls both, `first` once for all receivers of an update."""

    def both() -> None:
        update.transfer.once(first)
        then()

    return both
