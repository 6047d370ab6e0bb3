"""Begin: everything that can be agreed, or refused, before a byte moves."""

from __future__ import annotations

import time

import torch

from weight_updater import agree, replies
from weight_updater.arena import WeightTarget
from weight_updater.device_sink import make_sink
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.graphs import GraphHooks
from weight_updater.live import LiveWeights
from weight_updater.manifests import Manifests, digest_of
from weight_updater.open_update import OpenUpdate
from weight_updater.plan import Plan, Planner
from weight_updater.requests import BeginUpdate, Manifest, Path, Staging
from weight_updater.sink import Sink
from weight_updater.staging import StagingBuffers, allocate


class Opener:
    """Opens updates of one target; changes nothing that is live.

    Args:
        lease_s: of updates that ask for none.
    """

    def __init__(
        self,
        target: WeightTarget,
        live: LiveWeights,
        buffers: StagingBuffers,
        manifests: Manifests,
        graphs: GraphHooks,
        lease_s: float,
    ) -> None:
        self._target = target
        self._live = live
        self._buffers = buffers
        self._manifests = manifests
        self._graphs = graphs
        self._lease_s = lease_s
        self._planner = Planner(target)

    def open(self, request: BeginUpdate, manifest: Manifest, *, paused: bool) -> OpenUpdate:
        """LOOP. Agree on an update.

        Raises:
            UpdateRefused: INVALID_UPDATE, PAUSED_WAIT, STALE_VERSION, WRONG_STATE (partial while torn, or
                the model is not where updates write), NO_STAGING, MANIFEST_MISMATCH, WOULD_MOVE, NO_MEMORY.
        """
        agree.check_fields(request, paused=paused)
        version = agree.next_version(request.version, self._live.highest)
        if self._live.torn_reason and request.partial:
            raise UpdateRefused(
                Reason.WRONG_STATE,
                f"the weights are torn ({self._live.torn_reason}); only a full update makes them whole",
            )
        if strays := self._target.strays():
            raise UpdateRefused(
                Reason.WRONG_STATE,
                f"{len(strays)} parameters of the model do not lie where updates write, {strays[0]} first: "
                f"somebody rebound them, so an update would not reach them; restart the engine",
            )
        staging = Staging.NONE if request.adopt else self._buffers.choose(request.staging)
        digest = digest_of(manifest, request)
        plan = self._planner.plan(manifest, digest, partial=request.partial, merged=request.merged)
        adopted = self._live.adopted
        in_adopted = request.adopt and adopted is not None and adopted.owner_alive()
        leaves_adopted = adopted is not None and not request.adopt
        if request.adopt:
            agree.check_adoptable(plan)
        if leaves_adopted or (request.adopt and not in_adopted):
            num_storages = len(self._target.arena.storages)
            agree.check_move(request, num_storages, leaves_adopted=leaves_adopted)
            self._graphs.check_recapture()
        home = self._new_home() if leaves_adopted else None
        lease_s = request.lease_s or self._lease_s
        self._manifests.remember(plan.manifest, digest)
        return OpenUpdate(
            request=request,
            plan=plan,
            staging=staging,
            next_version=version,
            sink=self._sink(request, plan, staging, home),
            buffers=self._buffers,
            reply=replies.begun(
                request, plan, digest, staging, version, lease_s, self._live, self._target.arena
            ),
            lease_s=lease_s,
            deadline=time.monotonic() + lease_s,
            home=home,
            in_adopted=in_adopted,
        )

    def _new_home(self) -> torch.Tensor:
        """A copy of what is live, outside of the adopted arena, in which only the trainer may write. Like the
        engine's first arena it can be released and resumed.
        """
        arena, device = self._target.arena, self._target.device
        home = allocate(
            arena.nbytes, device, "weights that leave the adopted arena", lambda: arena.allocate(device)
        )
        return home.copy_(self._target.buffer)

    def _sink(self, request: BeginUpdate, plan: Plan, staging: Staging, home: torch.Tensor | None) -> Sink:
        destination: torch.Tensor | None
        if staging is not Staging.NONE:
            destination = self._buffers.get(staging)
        elif request.path is Path.IPC:
            destination = None  # the trainer's memory is the staging area
        else:
            destination = self._target.buffer if home is None else home
        return make_sink(
            plan,
            self._target.arena,
            destination,
            hashing=not request.skip_checksums,
            find_nonfinite=not request.allow_nonfinite,
        )
