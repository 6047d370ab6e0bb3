"""What crosses between the parts of an update: plain frozen dataclasses, no torch.

They are the same on both ends: a trainer makes them, the gRPC edge carries them field by field, the
engine's loop hands them to `WeightUpdater`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum

from weight_updater.manifest import ALIGNMENT as ALIGNMENT
from weight_updater.manifest import ITEMSIZE as ITEMSIZE
from weight_updater.manifest import Manifest as Manifest
from weight_updater.manifest import TensorSpec as TensorSpec
from weight_updater.manifest import align as align

MAX_STREAMS = 16
"""Streams that may bring the chunks of one update at once."""

DEFAULT_BUCKET_BYTES = 64 << 20
"""Size of a bucket on the distributed path when the sender names none."""


class Path(StrEnum):
    """One of the four ways in."""

    DISK = "disk"
    DISTRIBUTED = "distributed"
    TENSOR = "tensor"
    IPC = "ipc"


class Staging(StrEnum):
    """Where arriving bytes wait for the commit. AUTO: device if it was reserved, else host."""

    AUTO = "auto"
    DEVICE = "device"
    HOST = "host"
    NONE = "none"


class Inflight(StrEnum):
    """What becomes of sequences in flight at the commit."""

    WAIT = "wait"
    ABORT = "abort"
    KEEP = "keep"
    RECOMPUTE = "recompute"


class Recapture(StrEnum):
    """When graphs are captured again."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class UpdateState(StrEnum):
    """Where an update stands."""

    BEGUN = "begun"
    RECEIVING = "receiving"
    RECEIVED = "received"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """What is different for one module of an adapter. name: of the linear layer, as in the base model."""

    name: str
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter: y = W x + scaling * B (A x) for each of its modules; A is [rank, in], B [out, rank].

    rank, scaling: of every module but `modules`. Rank 0 (disk only): adapter_config.json says them.
    base_checksum: of the base weights it was trained on (UpdateReply.live_checksum); None: not compared.
    """

    name: str
    rank: int = 0
    scaling: float = 0.0
    modules: tuple[AdapterModule, ...] = ()
    base_checksum: int | None = None


@dataclass(frozen=True, slots=True)
class BeginUpdate:
    """Open an update. Either `manifest`, `manifest_digest`, or (disk only) `directory` must be given.

    version: becomes live at commit; 0 means one more than the largest ever committed.
    adapter: the update brings this adapter; version is then the adapter's.
    num_streams: of chunks that the sender would open at once at ports named for them; 0: names none.
    lease_s: seconds without a call after which the update ends; 0 means the engine's default.
    """

    path: Path
    update_id: str = ""
    version: int = 0
    manifest: Manifest | None = None
    manifest_digest: str = ""
    checksums: tuple[int, ...] = ()  # with manifest_digest: one per tensor, or empty
    staging: Staging = Staging.AUTO
    inflight: Inflight = Inflight.WAIT
    partial: bool = False
    keep_previous: bool = False
    adopt: bool = False
    recapture: Recapture = Recapture.AUTO
    allow_nonfinite: bool = False
    skip_checksums: bool = False
    lease_s: float = 0.0
    bucket_bytes: int = 0
    merged: bool = False
    num_engines: int = 1
    directory: str = ""
    num_streams: int = 0
    adapter: AdapterSpec | None = None

    @property
    def is_known_by_name(self) -> bool:
        """Whether resolving reads no file and allocates nothing, so that the loop can do it at once."""
        by_digest = bool(self.manifest_digest) and self.path is not Path.DISK
        return by_digest and self.staging in (Staging.NONE, Staging.DEVICE)


@dataclass(frozen=True, slots=True)
class BeginReply:
    """What was agreed."""

    update_id: str
    version: int  # live now
    commit_sequence: int
    next_version: int  # live after the commit; the adapter's, in an update of one
    manifest_digest: str
    staging: Staging
    total_bytes: int
    num_buckets: int
    bucket_bytes: int
    unmatched: tuple[str, ...]
    arena_bytes: int
    lease_s: float
    stream_ports: tuple[int, ...] = ()  # of the host; each takes chunk streams


@dataclass(frozen=True, slots=True)
class ShmSegment:
    """A POSIX shared-memory segment: name without a slash, size in bytes, id new per allocation."""

    name: str
    size: int
    allocation_id: str


@dataclass(frozen=True, slots=True)
class CudaIpcRegion:
    """Memory of another process on a GPU, as typed fields.

    offset, size: of the region in its allocation, in bytes. The checksum of the region's first
    `probe_bytes`, if one is given, is compared when the allocation is first mapped.
    owner: a segment that the trainer holds an owner's lock on as long as it lives (`adopt` needs it).
    """

    allocation_id: str
    device_uuid: str
    handle: bytes
    offset: int
    size: int
    probe_bytes: int = 0
    probe_checksum: int | None = None
    owner: ShmSegment | None = None


@dataclass(frozen=True, slots=True)
class RegionPlacement:
    """Tensor `tensor` of the manifest lies at `offset` bytes in region `handle`."""

    tensor: int
    handle: int
    offset: int


@dataclass(frozen=True, slots=True)
class FromDisk:
    """Read a safetensors directory."""

    update_id: str
    directory: str


@dataclass(frozen=True, slots=True)
class FromDistributed:
    """Receive the manifest's buckets by broadcast from rank 0 of a group. timeout_s 0: the group's."""

    update_id: str
    group_name: str
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FromTensor:
    """Read a shared-memory segment, or (segment None) chunks that the caller feeds to the receiver."""

    update_id: str
    segment: ShmSegment | None = None


@dataclass(frozen=True, slots=True)
class FromIpc:
    """Copy from memory that a trainer lends until the reply. No placements: one region, packed in order.

    lent: digest of the regions and placements of an earlier call, which need not be sent again.
    scanned: the trainer has hashed the bytes where they lie, after its last write, and found all values
        finite. With staging none the engine then reads them for the first time when it copies them, and a
        difference from the manifest's checksums tears the weights instead of refusing the update.
    checksums: one for each of the manifest's tensors, of an update that began without; or empty.
    """

    update_id: str
    regions: tuple[ShmSegment, ...] = ()
    cuda_regions: tuple[CudaIpcRegion, ...] = ()
    placements: tuple[RegionPlacement, ...] = ()
    lent: str = ""
    scanned: bool = False
    checksums: tuple[int, ...] = ()

    @property
    def all_regions(self) -> tuple[ShmSegment, ...] | tuple[CudaIpcRegion, ...]:
        """The regions, which are all of one kind, as placements count them."""
        return self.regions or self.cuda_regions

    def digest(self) -> str:
        """A name for regions and placements: 32 hex digits; probes leave it as it is."""
        hasher = hashlib.blake2b(digest_size=16)
        for shm in self.regions:
            hasher.update(f"{shm.allocation_id}\0{shm.name}\0{shm.size}\n".encode())
        for gpu in self.cuda_regions:
            where = f"{gpu.allocation_id}\0{gpu.device_uuid}\0{gpu.handle.hex()}\0{gpu.offset}\0{gpu.size}"
            hasher.update(f"{where}\0{gpu.owner}\n".encode())
        for place in self.placements:
            hasher.update(f"{place.tensor}\0{place.handle}\0{place.offset}\n".encode())
        return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class InitGroup:
    """Join a process group as `rank` (the trainer is rank 0). Times in seconds."""

    group_name: str
    master_address: str
    master_port: int
    rank: int
    world_size: int
    backend: str = ""
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds per stage of an update; see weights.proto for what each covers."""

    transfer: float = 0.0
    verify: float = 0.0
    pause: float = 0.0
    write: float = 0.0
    finalise: float = 0.0
    recapture: float = 0.0
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class UpdateReply:
    """What became of an update so far; every path gives the same fields.

    received_checksum: over what arrived; live_checksum: over all slots. Both in the order of the slots'
        names, tied ones once, so that they are equal after a full update that cast nothing. 0: not hashed.
    adapter: that the update is of; counts and checksums are then the adapter's, `version` stays the base's.
    """

    update_id: str
    state: UpdateState
    version: int
    previous_version: int
    commit_sequence: int
    path: Path
    staging: Staging
    num_tensors: int
    num_bytes: int
    num_changed: int = 0
    unmatched: tuple[str, ...] = ()
    seconds: StageSeconds = field(default_factory=StageSeconds)
    gb_per_s: float = 0.0
    floor_seconds: float = 0.0
    verified: bool = False
    received_checksum: int = 0
    live_checksum: int = 0
    num_aborted: int = 0
    num_recomputed: int = 0
    num_kept: int = 0
    graphs_kept: int = 0
    graphs_recaptured: int = 0
    graphs_reason: str = ""
    warnings: tuple[str, ...] = ()
    extra_bytes: int = 0
    adapter: str = ""
    adapter_version: int = 0  # live; 0: none is
    previous_adapter_version: int = 0

    @property
    def brought_version(self) -> int:
        """The version that a committed update made live: of the adapter, if it is of one."""
        return self.adapter_version if self.adapter else self.version


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot's place in the arena: offset in bytes; alias_of names the slot whose storage it shares."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    alias_of: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Every slot of a model and the size of its arena in bytes."""

    placements: tuple[Placement, ...]
    arena_bytes: int

    def digest(self) -> str:
        """A name for this layout: 32 hex digits over all of it, whatever the order of the placements."""
        hasher = hashlib.blake2b(f"{self.arena_bytes}\n".encode(), digest_size=16)
        for place in sorted(self.placements, key=lambda place: place.name):
            what = f"{place.name}\0{place.dtype}\0{tuple(place.shape)}"
            hasher.update(f"{what}\0{place.offset}\0{place.alias_of}\n".encode())
        return hasher.hexdigest()
