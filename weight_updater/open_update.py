"""The update that is open: what was agreed, what has come, and all that can still refuse it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import ne
from typing import Protocol

import torch

from weight_updater.adapter_bank import Fitted
from weight_updater.adapters import HeldAdapter
from weight_updater.arena import WeightTarget
from weight_updater.cast import same_bytes
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.mappings import MappedRegion, Region
from weight_updater.plan import Plan, conflict
from weight_updater.requests import (
    MAX_STREAMS,
    BeginReply,
    BeginUpdate,
    FromDisk,
    FromDistributed,
    FromIpc,
    FromTensor,
    Path,
    Staging,
    UpdateState,
)
from weight_updater.safetensors_header import FileIdentity
from weight_updater.sink import Sink
from weight_updater.staging import StagingBuffers

Request = FromDisk | FromDistributed | FromTensor | FromIpc


class Transfer:
    """What the workers of one update's streams share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before_writes = threading.Lock()
        self._done: set[Callable[[], None]] = set()
        self._num_running = 0
        self._since = 0.0
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """How long at least one worker was at work."""
        with self._lock:
            running = time.perf_counter() - self._since if self._num_running else 0.0
            return self._seconds + running

    @contextmanager
    def running(self) -> Iterator[None]:
        """A worker is at work while the block runs."""
        with self._lock:
            if not self._num_running:
                self._since = time.perf_counter()
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    self._seconds += time.perf_counter() - self._since

    def once(self, work: Callable[[], None]) -> None:
        """Run `work` unless a worker did; one that comes meanwhile waits for its end."""
        with self._before_writes:
            if work not in self._done:
                work()
                self._done.add(work)


@dataclass(frozen=True, slots=True)
class OpenAdapter:
    """What an update of an adapter will write. previous: what is held under its name, if anything."""

    name: str
    fitted: Fitted
    previous: HeldAdapter | None

    @property
    def previous_version(self) -> int:
        """0: nothing is held under this name."""
        return 0 if self.previous is None else self.previous.version


@dataclass(slots=True, eq=False)
class OpenUpdate:
    """An update between begin and its end.

    home: uint8 arena that the slots will point to, if they leave an adopted one at this commit.
    in_adopted: the trainer writes into the live arena from begin on, or once it is no longer held_back: told
        to wait until no forward pass runs.
    expected: slot -> checksum that it has after the commit; empty with skip_checksums.
    adapter: it brings this one, and leaves the base weights alone.
    """

    request: BeginUpdate
    plan: Plan
    staging: Staging
    next_version: int
    sink: Sink
    buffers: StagingBuffers
    reply: BeginReply
    lease_s: float
    deadline: float  # of the lease, time.monotonic()
    home: torch.Tensor | None
    in_adopted: bool
    held_back: bool = False
    adapter: OpenAdapter | None = None
    state: UpdateState = UpdateState.BEGUN
    num_receiving: int = 0
    receives_streams: bool = False  # what is on its way comes in chunk streams
    finished: list[Request] = field(default_factory=list)  # requests that were received whole
    regions: list[Region] = field(default_factory=list)  # of a trainer's memory, which it was lent
    adoption: MappedRegion | None = None  # what the commit adopts
    verifying: bool = False
    verified: bool = False
    num_changed: int = 0
    expected: dict[str, int] = field(default_factory=dict)
    transfer: Transfer = field(default_factory=Transfer)
    verify_s: float = 0.0
    directory: str = ""  # that the disk path read
    looked_at: dict[str, FileIdentity] | None = None  # its files, if they were read before they are written
    has_checksums: bool = field(init=False)  # of every tensor that must arrive, and they are compared

    def __post_init__(self) -> None:
        self._note_checksums()

    def _note_checksums(self) -> None:
        checksums = self.plan.manifest.checksums
        self.has_checksums = not self.request.skip_checksums and (
            None not in checksums or all([checksums[index] is not None for index in self.plan.needed])
        )

    @property
    def update_id(self) -> str:
        return self.reply.update_id

    @property
    def path(self) -> Path:
        return self.request.path

    @property
    def inflight(self) -> str:
        return self.request.inflight

    @property
    def adopt(self) -> bool:
        return self.request.adopt

    @property
    def received_bytes(self) -> int:
        return self.sink.received_bytes

    @property
    def total_bytes(self) -> int:
        return self.plan.total_bytes

    @property
    def extra_bytes(self) -> int:
        """Memory that this update needs beyond what was reserved at start (host staging never is)."""
        host = self.buffers.get(Staging.HOST).numel() if self.staging is Staging.HOST else 0
        home = 0 if self.home is None else self.home.numel()
        scratch = self.buffers.scratch().numel() if self.request.keep_previous else 0
        return host + home + scratch + self.sink.extra_bytes

    @property
    def writes_live(self) -> bool:
        """Bytes land in the live slots as they arrive, so that no forward pass may run meanwhile."""
        stored_live = self.staging is Staging.NONE and self.path is not Path.IPC and self.home is None
        return stored_live or self.in_adopted

    @property
    def written(self) -> bool:
        """Something may lie in the live slots that was not there at begin."""
        if self.in_adopted:
            return not self.held_back
        return self.writes_live and self.sink.received_bytes > 0

    @property
    def needs_live(self) -> bool:
        """It is of no use without what is live now: it writes there, replaces a part, or lies beside it."""
        return self.in_adopted or self.request.partial or self.adapter is not None

    @property
    def receiving(self) -> bool:
        """Bytes are on their way into the sink."""
        return self.num_receiving > 0

    def in_the_way(self) -> UpdateRefused:
        """The refusal of what cannot be while an update is open."""
        what = f"update {self.update_id} ({self.path}, {self.state}, version {self.next_version})"
        return UpdateRefused(Reason.UPDATE_IN_PROGRESS, f"{what} is open; commit or abort it first")

    def check_admits(self, request: Request) -> None:
        """Refuse to receive `request` now. Chunk streams may come side by side, anything else alone.

        Raises:
            UpdateRefused (WRONG_STATE): what the update is doing.
        """
        if self.state is UpdateState.PREPARED:
            raise UpdateRefused(Reason.WRONG_STATE, f"update {self.update_id} is prepared already")
        is_stream = isinstance(request, FromTensor) and request.segment is None
        if self.receiving and not (is_stream and self.receives_streams):
            raise UpdateRefused(Reason.WRONG_STATE, f"update {self.update_id} is receiving already")
        if self.num_receiving >= MAX_STREAMS:
            text = f"update {self.update_id} is receiving {MAX_STREAMS} streams already, which is the most"
            raise UpdateRefused(Reason.WRONG_STATE, text)
        self.receives_streams = is_stream

    def take_checksums(self, checksums: Sequence[int]) -> None:
        """What the manifest did not say yet: the checksums of its tensors, before any of them arrives.

        Raises:
            UpdateRefused: INVALID_UPDATE, MANIFEST_MISMATCH (tied names differ); WRONG_STATE if it has
                checksums already, leaves them out or has begun to receive. Then nothing has changed.
        """
        manifest, wrong = self.plan.manifest, ""
        if self.request.skip_checksums:
            wrong = "leaves checksums out (skip_checksums); bring none"
        elif manifest.checksums.count(None) < len(manifest):
            wrong = "has checksums already; bring them once, when it begins or with the bytes"
        elif self.state is not UpdateState.BEGUN:
            wrong = "has begun to receive; its checksums come with the first bytes"
        if wrong:
            raise UpdateRefused(Reason.WRONG_STATE, f"update {self.update_id} {wrong}")
        if len(checksums) != len(manifest):
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"{len(checksums)} checksums came for the {len(manifest)} tensors of update {self.update_id}",
            )
        self.plan = self.sink.plan = self.plan.with_checksums_of(manifest.with_checksums(checksums))
        self._note_checksums()

    @contextmanager
    def verification(self) -> Iterator[None]:
        """The block finds everything that can still refuse the update, or raises it."""
        start = time.perf_counter()
        self.verifying = True
        try:
            yield
            self.verified = True
        finally:
            self.verifying = False
            self.verify_s += time.perf_counter() - start

    def touch(self, lease_s: float = 0.0) -> None:
        """A call came: the lease starts anew."""
        self.deadline = time.monotonic() + (lease_s or self.lease_s)


class Arrived(Protocol):
    """What `check_received` asks; a Sink answers for bytes that came, a Look for those that would."""

    def incomplete(self) -> list[tuple[int, int]]: ...
    def received_checksum(self, index: int) -> int: ...
    def received_checksums(self, indexes: Sequence[int]) -> list[int]: ...
    def slot_checksum(self, index: int) -> int: ...
    def nonfinite(self, indexes: Sequence[int]) -> list[int]: ...


def check_received(update: OpenUpdate, source: Arrived | None = None) -> None:
    """Raise whatever can still refuse the update: missing bytes, wrong checksums, non-finite values.

    Args:
        source: what to check; None checks the update's sink.

    Raises:
        UpdateRefused: INCOMPLETE, CHECKSUM_MISMATCH, MANIFEST_MISMATCH, NONFINITE.
    """
    sink, plan = source or update.sink, update.plan
    tensor = plan.manifest.tensor
    incomplete = sink.incomplete()
    if incomplete:
        index, arrived = incomplete[0]
        raise UpdateRefused(
            Reason.INCOMPLETE,
            f"{len(incomplete)} of {len(plan.needed)} tensors have not arrived whole; the first is "
            f"{tensor(index).name} with {arrived} of {tensor(index).nbytes} bytes",
        )
    if not update.request.skip_checksums:
        _check_checksums(update, sink)
    for twin, writer in plan.twins.items():
        same = tensor(twin).dtype == tensor(writer).dtype
        read = sink.received_checksum if same else sink.slot_checksum
        if read(twin) != read(writer):
            raise UpdateRefused(
                Reason.MANIFEST_MISMATCH,
                conflict(tensor(twin), tensor(writer), read(twin), read(writer)),
            )
    if not update.request.allow_nonfinite:
        bad = sink.nonfinite(plan.applied)
        if bad:
            more = f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
            raise UpdateRefused(
                Reason.NONFINITE,
                f"{tensor(bad[0]).name} has NaN or infinite values in {plan.slot(bad[0]).dtype}, the "
                f"model's dtype{more}; fix the trainer, or say allow_nonfinite=true",
            )


def _check_checksums(update: OpenUpdate, sink: Arrived) -> None:
    manifest, needed = update.plan.manifest, update.plan.needed
    received = sink.received_checksums(needed)
    promised = [manifest.checksums[index] for index in needed]
    if received == promised:
        return
    wrong = [
        (manifest.tensor(index), value)
        for index, value in zip(needed, received, strict=True)
        if manifest.checksums[index] is not None and manifest.checksums[index] != value
    ]
    if wrong:
        spec, value = wrong[0]
        more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
        raise UpdateRefused(
            Reason.CHECKSUM_MISMATCH,
            f"{spec.name} arrived with checksum {value:016x}, the manifest promised {spec.checksum:016x}"
            f"{more}; the bytes changed on the way, send them again",
        )


def expect(update: OpenUpdate, target: WeightTarget, live: Mapping[str, int]) -> None:
    """Work out what the slots will hold, and how many of them that changes.

    With checksums: by comparing them with `live` (slot -> checksum now). With skip_checksums values are
    compared where that is cheap (everything on one CPU, not written yet); else each tensor counts.
    """
    sink, plan = update.sink, update.plan
    if not update.request.skip_checksums:
        update.expected = dict(zip(plan.written, sink.slot_checksums(plan.applied), strict=True))
        update.num_changed = sum(map(ne, map(live.get, update.expected), update.expected.values()))
        return
    update.num_changed = len(plan.applied)
    if target.device.type == "cpu" and not update.writes_live:
        for index in plan.applied:
            new = sink.slot_bytes(index)
            old = target.slot(plan.slot(index).name)
            if new is not None and same_bytes(new, old):
                update.num_changed -= 1
