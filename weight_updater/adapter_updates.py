"""Updates of adapters: the same life as an update of the base weights, with two ends instead of three.

Bytes wait in staging memory of their own, and are written to a slot that no row of any pass points to. So
until the book changes nothing is live, and an adapter is refused or committed, never torn.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, replace

from weight_updater import agree, replies
from weight_updater.adapter_bank import AdapterBank, Fitted, check_spec
from weight_updater.adapter_config import read_spec
from weight_updater.adapters import AdapterBook
from weight_updater.checksum import fold_by_name
from weight_updater.commit import Done
from weight_updater.device_sink import make_sink
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.live import LiveWeights
from weight_updater.manifests import Manifests, digest_of
from weight_updater.open_update import OpenAdapter, OpenUpdate
from weight_updater.requests import AdapterSpec, BeginUpdate, Manifest, Path, Staging, UpdateReply
from weight_updater.staging import StagingBuffers, synchronise

MAX_FITTED = 4
"""Manifests of which it is remembered how they fit; the least recently used goes first."""


@dataclass(frozen=True, slots=True)
class _Known:
    """Of a held adapter: tensor -> its checksum and scaling, to tell what a push changes."""

    tensors: dict[str, tuple[int, float]]


class AdapterUpdates:
    """LOOP, but for `complete`. The part of a WeightUpdater that is about adapters.

    Args:
        bank: None: the engine holds no adapters.
        lease_s: of updates that ask for none.
    """

    def __init__(
        self,
        bank: AdapterBank | None,
        live: LiveWeights,
        buffers: StagingBuffers,
        manifests: Manifests,
        lease_s: float,
    ) -> None:
        self.book = AdapterBook(0 if bank is None else bank.max_adapters)
        self._bank = bank
        self._live = live
        self._buffers = buffers
        self._manifests = manifests
        self._lease_s = lease_s
        self._fitted: OrderedDict[tuple[str, AdapterSpec], Fitted] = OrderedDict()
        self._known: dict[str, _Known] = {}

    def complete(self, request: BeginUpdate) -> BeginUpdate:
        """ANY THREAD. The request with rank and scaling from its directory, if it leaves them to that.

        Raises:
            UpdateRefused: PATH_FORBIDDEN, FILE_NOT_FOUND, FILE_CORRUPT, or INVALID_UPDATE for a kind of
                adapter that cannot be held.
        """
        spec = request.adapter
        if spec is None or spec.rank or request.path is not Path.DISK or not request.directory:
            return request
        found = read_spec(self._manifests.directory(request.directory), spec)
        return replace(request, adapter=found)

    def open(self, request: BeginUpdate, manifest: Manifest, *, paused: bool) -> OpenUpdate:
        """Agree on an update of an adapter.

        Raises:
            UpdateRefused: INVALID_UPDATE, PAUSED_WAIT, NO_ADAPTER_SLOT, STALE_VERSION, MANIFEST_MISMATCH,
                WRONG_STATE (the base weights are torn).
        """
        spec = request.adapter
        assert spec is not None, "an update of the base weights is the Opener's"
        agree.check_fields(request, paused=paused)
        agree.check_adapter(request)
        check_spec(spec)
        if self._live.torn_reason:
            raise UpdateRefused(
                Reason.WRONG_STATE,
                f"the base weights are torn ({self._live.torn_reason}); commit a full update of them first",
            )
        if self._bank is None or not self.book.has_room(spec.name):
            raise UpdateRefused(
                Reason.NO_ADAPTER_SLOT,
                f"there is no room for adapter {spec.name}: {self.book.names()}"
                + ("" if self._bank is None else "; remove one, or start with a larger --max-adapters"),
            )
        version = agree.next_version(request.version, self.book.highest(spec.name))
        digest = digest_of(manifest, request)
        fitted = self._fit(manifest, digest, spec)
        lease_s = request.lease_s or self._lease_s
        self._manifests.remember(manifest, digest)
        return OpenUpdate(
            request=request,
            plan=fitted.plan,
            staging=Staging.DEVICE,
            next_version=version,
            sink=make_sink(
                fitted.plan,
                fitted.arena,
                self._bank.staged(fitted),
                hashing=not request.skip_checksums,
                find_nonfinite=True,
            ),
            buffers=self._buffers,
            reply=replies.begun(
                request, fitted.plan, digest, Staging.DEVICE, version, lease_s, self._live, fitted.arena
            ),
            lease_s=lease_s,
            deadline=time.monotonic() + lease_s,
            home=None,
            in_adopted=False,
            adapter=OpenAdapter(spec.name, fitted, self.book.get(spec.name)),
        )

    def _fit(self, manifest: Manifest, digest: str, spec: AdapterSpec) -> Fitted:
        assert self._bank is not None
        key = (digest, replace(spec, base_checksum=None))
        known = self._fitted.get(key)
        if known is None:
            known = self._bank.fit(manifest, spec)
        fitted = Fitted(known.arena, known.plan.with_checksums_of(manifest), known.modules)
        self._fitted[key] = fitted
        self._fitted.move_to_end(key)
        if len(self._fitted) > MAX_FITTED:
            self._fitted.popitem(last=False)
        return fitted

    def check_base(self, update: OpenUpdate) -> None:
        """WORKER. Compare the base weights that the adapter was trained on with those that are live.

        Nothing writes to them while the update is open.

        Raises:
            UpdateRefused: BASE_MISMATCH; WRONG_STATE if the live weights went away meanwhile.
        """
        assert update.request.adapter is not None
        if not update.request.skip_checksums or update.request.adapter.base_checksum is not None:
            self._live.know()
        wanted, live = update.request.adapter.base_checksum, self._live.checksum()
        if wanted is None or wanted == live:
            return
        if not live:
            raise UpdateRefused(
                Reason.WRONG_STATE, f"the base weights are not whole: {self._live.torn_reason}"
            )
        raise UpdateRefused(
            Reason.BASE_MISMATCH,
            f"adapter {update.request.adapter.name} was trained on base weights with checksum {wanted:016x}, "
            f"live are others with {live:016x} (version {self._live.version}); push the base weights first, "
            f"or the adapter merged",
        )

    def expect(self, update: OpenUpdate) -> None:
        """WORKER. Work out what the slot will hold, and how many tensors that changes."""
        opened, plan = update.adapter, update.plan
        assert opened is not None
        update.num_changed = len(plan.applied)
        if update.request.skip_checksums:
            return
        update.expected = dict(zip(plan.written, update.sink.slot_checksums(plan.applied), strict=True))
        before = self._known.get(opened.name)
        after = _known(opened.fitted, update.expected)
        if before is not None and opened.previous is not None:
            update.num_changed = sum(before.tensors.get(name) != now for name, now in after.tensors.items())

    def commit(self, update: OpenUpdate) -> UpdateReply:
        """While no forward pass runs. Write the adapter into a spare slot, prove it there, make it live.

        Raises:
            UpdateRefused: a fault; what was live before is live still.
        """
        opened, bank = update.adapter, self._bank
        assert opened is not None
        assert bank is not None
        slot, done = self.book.spare_slot(), Done()
        start = time.perf_counter()
        try:
            bank.install(slot, opened.fitted)
            synchronise(bank.device)
            done.write_s = time.perf_counter() - start
            live = bank.checksums(slot, opened.fitted) if update.expected else {}
            done.compare_s = time.perf_counter() - start - done.write_s
        except Exception as error:
            reason = error.reason if isinstance(error, UpdateError) else Reason.WRITE_FAILED
            text = f"a fault while adapter {opened.name} was written: {error!s} ({type(error).__name__})"
            raise UpdateRefused(reason, f"{text}; what was live before is") from error
        if wrong := [name for name, value in update.expected.items() if live[name] != value]:
            raise UpdateRefused(
                Reason.CHECKSUM_MISMATCH,
                f"{wrong[0]} of adapter {opened.name} holds bytes with checksum {live[wrong[0]]:016x} after "
                f"the write, {update.expected[wrong[0]]:016x} was staged; what was live before is",
            )
        self._known[opened.name] = _known(opened.fitted, update.expected)
        self.book.commit(
            opened.name,
            update.next_version,
            slot,
            opened.fitted.rank,
            self._live.version,
            (self._live.commit_sequence, self._live.checksum()),
        )
        return replies.committed(
            update,
            done,
            version=self._live.version,
            previous_version=self._live.version,
            commit_sequence=self._live.commit_sequence,
            received=replies.received_checksum(update),
            live=fold_by_name(live) if live else 0,
        )

    def base_changed(self) -> None:
        """Other base weights are live."""
        self.book.base_changed((self._live.commit_sequence, self._live.checksum()))

    def remove(self, name: str) -> int:
        """Let go of an adapter that is held; gives the version that it had."""
        self._known.pop(name, None)
        return self.book.remove(name).version


def _known(fitted: Fitted, checksums: dict[str, int]) -> _Known:
    scaling = {name: module.scaling for name, module in fitted.modules.items()}
    return _Known({name: (value, scaling[name.rpartition(".lora_")[0]]) for name, value in checksums.items()})
