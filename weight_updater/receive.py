"""Four paths in, one sink: what a worker runs to bring the bytes of an update in."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from weight_updater import from_disk, from_distributed, from_ipc, from_tensor
from weight_updater.arena import WeightTarget
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.groups import GroupRegistry
from weight_updater.manifests import Manifests, check_files
from weight_updater.open_update import OpenUpdate, Request
from weight_updater.requests import FromDisk, FromDistributed, FromIpc, FromTensor, Path

PATH_OF: dict[type[Request], Path] = {
    FromDisk: Path.DISK,
    FromDistributed: Path.DISTRIBUTED,
    FromTensor: Path.TENSOR,
    FromIpc: Path.IPC,
}


class Receive:
    """One `update_weights_from_*` of an open update.

    writes_live: `run` writes into live slots; the loop lets no forward pass start until it returned.
    """

    def __init__(self, update: OpenUpdate, request: Request, work: Callable[[], None]) -> None:
        self.update = update
        self.request = request
        self.writes_live = update.writes_live
        self._work = work

    def run(self) -> None:
        """WORKER. Bring the bytes in; returns when they are there.

        Raises:
            UpdateError: what went wrong; hand it to `WeightUpdater.received`.
        """
        start = time.perf_counter()
        try:
            self._work()
            self.update.sink.catch_up()
        except UpdateError:
            raise
        except Exception as error:
            raise UpdateRefused(
                Reason.INTERNAL,
                f"receiving update {self.update.update_id} ({self.update.path}) failed: {error} "
                f"({type(error).__name__})",
            ) from error
        finally:
            self.update.transfer_s += time.perf_counter() - start


class Receivers:
    """Makes the work of each path. Holds what lives longer than an update.

    mappings: of trainers' memory. groups: process groups of the distributed path.
    """

    def __init__(self, target: WeightTarget, manifests: Manifests) -> None:
        self.mappings = from_ipc.Mappings()
        self.groups = GroupRegistry()
        self._target = target
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
            return lambda: from_tensor.receive(request, update.sink, chunks)
        self.mappings.pinned.update(region.allocation_id for region in request.regions)
        return lambda: self._ipc(update, request)

    def close(self) -> None:
        """Leave all groups, give back all mappings."""
        self.groups.close()
        self.mappings.close()

    def _disk(self, update: OpenUpdate, request: FromDisk) -> None:
        named = request.directory or update.request.directory
        if not named:
            raise UpdateRefused(Reason.INVALID_UPDATE, "the disk path needs a directory")
        directory = self._manifests.directory(named)
        headers = self._manifests.headers
        found = from_disk.read_manifest(directory, headers)
        check_files(update.plan.manifest, found, named)
        update.directory = named
        from_disk.receive(
            dataclasses.replace(request, directory=directory),
            found,
            update.sink,
            needed=update.plan.needed,
            pin=self._target.device.type == "cuda",
            headers=headers,
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
            adoption = self.mappings.open(request.regions[0])
            if not adoption.segment.owner_alive():
                raise UpdateRefused(
                    Reason.MEMORY_UNAVAILABLE,
                    f"nobody holds the owner's lock on segment {request.regions[0].name}; make it with "
                    f"owner_lock, so that its owner's death is noticed, and keep it open",
                )
            update.adoption = adoption
