"""Updates between the wire and the dataclasses of weight_updater.requests, field by field.

Enum numbers that this version does not know, and unspecified paths and dtypes, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, TypeVar

from rollout_engine.v1 import weights_pb2 as pb
from weight_updater import requests as r
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.manifest import Columns

Value = TypeVar("Value")

CUDA_HANDLE_BYTES = 64

PATHS: dict[int, r.Path] = {
    pb.WEIGHTS_PATH_DISK: r.Path.DISK,
    pb.WEIGHTS_PATH_DISTRIBUTED: r.Path.DISTRIBUTED,
    pb.WEIGHTS_PATH_TENSOR: r.Path.TENSOR,
    pb.WEIGHTS_PATH_IPC: r.Path.IPC,
}
STAGINGS: dict[int, r.Staging] = {
    pb.STAGING_UNSPECIFIED: r.Staging.AUTO,
    pb.STAGING_DEVICE: r.Staging.DEVICE,
    pb.STAGING_HOST: r.Staging.HOST,
    pb.STAGING_NONE: r.Staging.NONE,
}
INFLIGHTS: dict[int, r.Inflight] = {
    pb.INFLIGHT_UNSPECIFIED: r.Inflight.WAIT,
    pb.INFLIGHT_WAIT: r.Inflight.WAIT,
    pb.INFLIGHT_ABORT: r.Inflight.ABORT,
    pb.INFLIGHT_KEEP: r.Inflight.KEEP,
    pb.INFLIGHT_RECOMPUTE: r.Inflight.RECOMPUTE,
}
RECAPTURES: dict[int, r.Recapture] = {
    pb.RECAPTURE_UNSPECIFIED: r.Recapture.AUTO,
    pb.RECAPTURE_AUTO: r.Recapture.AUTO,
    pb.RECAPTURE_ALWAYS: r.Recapture.ALWAYS,
    pb.RECAPTURE_NEVER: r.Recapture.NEVER,
}
DTYPES: dict[int, str] = {
    pb.DTYPE_FLOAT32: "float32",
    pb.DTYPE_BFLOAT16: "bfloat16",
    pb.DTYPE_FLOAT16: "float16",
    pb.DTYPE_FLOAT64: "float64",
}

PATH_TO_WIRE = {path: pb.WeightsPath.Name(number) for number, path in PATHS.items()}
STAGING_TO_WIRE = {staging: pb.Staging.Name(number) for number, staging in STAGINGS.items()}
DTYPE_TO_WIRE = {dtype: pb.DType.Name(number) for number, dtype in DTYPES.items()}
STATE_TO_WIRE = {
    r.UpdateState.BEGUN: "UPDATE_STATE_RECEIVING",
    r.UpdateState.RECEIVING: "UPDATE_STATE_RECEIVING",
    r.UpdateState.RECEIVED: "UPDATE_STATE_RECEIVED",
    r.UpdateState.PREPARED: "UPDATE_STATE_PREPARED",
    r.UpdateState.COMMITTED: "UPDATE_STATE_COMMITTED",
    r.UpdateState.ROLLED_BACK: "UPDATE_STATE_ROLLED_BACK",
}


def invalid(field: str, problem: str) -> NoReturn:
    """Refuse an update because of one field."""
    raise UpdateRefused(Reason.INVALID_UPDATE, f"{field} {problem}")


def known(table: Mapping[int, Value], number: int, field: str) -> Value:
    """Look an enum's number up; refuse unspecified (where it has no meaning) and unknown numbers."""
    value = table.get(number)
    if value is None:
        what = "is unspecified" if number == 0 else f"is {number}, which this engine does not know"
        invalid(
            field, f"{what}; it must be one of {', '.join(str(v) for v in dict.fromkeys(table.values()))}"
        )
    return value


def manifest(wire: pb.Manifest) -> r.Manifest:
    """A manifest in the order of the wire."""
    specs = list(wire.tensors)
    names, dtypes = [spec.name for spec in specs], [DTYPES.get(spec.dtype, "") for spec in specs]
    if "" in names:
        invalid(f"manifest.tensors[{names.index('')}].name", "is empty")
    if "" in dtypes:
        at = dtypes.index("")
        known(DTYPES, specs[at].dtype, f"dtype of manifest.tensors[{at}] ({names[at]})")
    columns = Columns(names, dtypes, [tuple(spec.shape) for spec in specs])
    return r.Manifest.of(columns, [spec.checksum if spec.HasField("checksum") else None for spec in specs])


MAX_NAME = 256
"""Characters of what an update is called by; GetEngineInfo tells it of the last updates."""


def adapter_spec(wire: pb.AdapterSpec) -> r.AdapterSpec:
    if not wire.name:
        invalid("adapter.name", "is empty; requests choose the adapter by it")
    return r.AdapterSpec(
        name=wire.name,
        rank=wire.rank,
        scaling=wire.scaling,
        modules=tuple(r.AdapterModule(m.name, m.rank, m.scaling) for m in wire.modules),
        base_checksum=wire.base_checksum if wire.HasField("base_checksum") else None,
    )


def begin_update(wire: pb.BeginUpdateRequest) -> r.BeginUpdate:
    """A BeginUpdateRequest; what needs the model to be judged is the engine's to refuse."""
    path = known(PATHS, wire.path, "path")
    source = wire.WhichOneof("source_manifest")
    if source is None and path is not r.Path.DISK:
        invalid("manifest", f"is missing: the {path} path needs manifest or manifest_digest")
    if source == "manifest" and not wire.manifest.tensors:
        invalid("manifest", "has no tensors")
    if source == "manifest_digest" and not wire.manifest_digest:
        invalid("manifest_digest", "is empty")
    if wire.adopt and path is not r.Path.IPC:
        invalid("adopt", f"goes with the ipc path only, not with {path}")
    for field, text in (("update_id", wire.update_id), ("adapter.name", wire.adapter.name)):
        if len(text) > MAX_NAME:
            invalid(field, f"has {len(text)} characters, more than {MAX_NAME}")
    return r.BeginUpdate(
        path=path,
        update_id=wire.update_id,
        version=wire.weight_version,
        manifest=manifest(wire.manifest) if source == "manifest" else None,
        manifest_digest=wire.manifest_digest,
        checksums=tuple(wire.checksums),
        staging=known(STAGINGS, wire.staging, "staging"),
        inflight=known(INFLIGHTS, wire.inflight, "inflight"),
        partial=wire.partial,
        keep_previous=wire.keep_previous,
        adopt=wire.adopt,
        recapture=known(RECAPTURES, wire.recapture, "recapture"),
        allow_nonfinite=wire.allow_nonfinite,
        skip_checksums=wire.skip_checksums,
        lease_s=wire.lease_ms / 1000,
        bucket_bytes=wire.bucket_bytes,
        merged=wire.merged,
        num_engines=wire.num_engines or 1,
        directory=wire.directory,
        num_streams=wire.num_streams,
        adapter=adapter_spec(wire.adapter) if wire.HasField("adapter") else None,
    )


Targeted = (
    pb.UpdateWeightsFromDiskRequest
    | pb.UpdateWeightsFromDistributedRequest
    | pb.UpdateWeightsFromTensorHeader
    | pb.UpdateWeightsFromIpcRequest
)


def target(wire: Targeted, path: r.Path) -> tuple[str, r.BeginUpdate | None]:
    """(update id, None) of an open update, or (id or "", the BeginUpdate) of a one-call form."""
    which = wire.WhichOneof("target")
    if which == "begin":
        begin = begin_update(wire.begin)
        if begin.path is not path:
            invalid("begin.path", f"is {begin.path}, but the call is that of the {path} path")
        return begin.update_id, begin
    if not wire.update_id:
        invalid("update_id", "is empty; give an open update's id, or begin")
    return wire.update_id, None


def from_disk(wire: pb.UpdateWeightsFromDiskRequest, update_id: str) -> r.FromDisk:
    if "\0" in wire.directory:
        invalid("directory", "contains a NUL character")
    return r.FromDisk(update_id=update_id, directory=wire.directory)


def from_distributed(wire: pb.UpdateWeightsFromDistributedRequest, update_id: str) -> r.FromDistributed:
    if not wire.group_name:
        invalid("group_name", "is empty")
    return r.FromDistributed(update_id, wire.group_name, wire.timeout_ms / 1000)


def from_tensor(wire: pb.UpdateWeightsFromTensorHeader, update_id: str) -> r.FromTensor:
    if not wire.HasField("segment"):
        return r.FromTensor(update_id)
    shm = wire.segment
    return r.FromTensor(update_id, segment(shm, shm.allocation_id, shm.size, "segment"))


def segment(wire: pb.SharedMemorySegment, allocation_id: str, size: int, field: str) -> r.ShmSegment:
    """A segment; where it and the handle around it both say a size or an id, they must agree."""
    if not wire.name:
        invalid(f"{field}.name", "is empty")
    if wire.allocation_id and allocation_id and wire.allocation_id != allocation_id:
        invalid(f"{field}.allocation_id", f"is {wire.allocation_id!r}, but the handle's is {allocation_id!r}")
    if wire.size and size and wire.size != size:
        invalid(f"{field}.size", f"is {wire.size}, but the handle's is {size}")
    if not (wire.size or size):
        invalid(f"{field}.size", "is 0")
    allocation_id = wire.allocation_id or allocation_id
    if not allocation_id:
        invalid(f"{field}.allocation_id", "is empty; it must be new for every allocation")
    return r.ShmSegment(name=wire.name, size=wire.size or size, allocation_id=allocation_id)


def _cuda_region(wire: pb.MemoryHandle, field: str) -> r.CudaIpcRegion:
    cuda = wire.cuda_ipc
    if len(cuda.handle) != CUDA_HANDLE_BYTES:
        invalid(f"{field}.handle", f"has {len(cuda.handle)} bytes; a CUDA IPC handle has {CUDA_HANDLE_BYTES}")
    if not cuda.device_uuid:
        invalid(f"{field}.device_uuid", "is empty")
    if not wire.allocation_id:
        invalid(f"{field}.allocation_id", "is empty; it must be new for every allocation")
    return r.CudaIpcRegion(
        allocation_id=wire.allocation_id,
        device_uuid=cuda.device_uuid,
        handle=cuda.handle,
        offset=cuda.offset,
        size=wire.size,
        probe_bytes=cuda.probe_bytes,
        probe_checksum=cuda.probe_checksum if cuda.HasField("probe_checksum") else None,
        owner=segment(cuda.owner, "", 0, f"{field}.owner") if cuda.HasField("owner") else None,
    )


def from_ipc(wire: pb.UpdateWeightsFromIpcRequest, update_id: str) -> r.FromIpc:
    """Regions in the order of the handles, which are all of one kind, so that placements' indices hold."""
    for field in ("checksums", "commit"):
        if wire.HasField("begin") and getattr(wire, field):
            invalid(field, "goes with update_id only; begin brings checksums of its own, and commits anyway")
    kinds = [handle.WhichOneof("memory") for handle in wire.handles]
    for i, kind in enumerate(kinds):
        if kind is None:
            invalid(f"handles[{i}]", "has neither posix_shm nor cuda_ipc")
        if kind != kinds[0]:
            invalid(f"handles[{i}]", f"is {kind}, but handles[0] is {kinds[0]}; all must be of one kind")
    for i, placement in enumerate(wire.placements):
        if placement.handle >= len(kinds):
            invalid(f"placements[{i}].handle", f"is {placement.handle}, but there are {len(kinds)} handles")
    shm = bool(kinds) and kinds[0] == "posix_shm"
    return r.FromIpc(
        update_id=update_id,
        regions=tuple(
            segment(h.posix_shm, h.allocation_id, h.size, f"handles[{i}].posix_shm")
            for i, h in enumerate(wire.handles)
            if shm
        ),
        cuda_regions=tuple(_cuda_region(h, f"handles[{i}]") for i, h in enumerate(wire.handles) if not shm),
        placements=tuple(r.RegionPlacement(p.tensor, p.handle, p.offset) for p in wire.placements),
        lent=wire.lent,
        scanned=wire.scanned,
        checksums=tuple(wire.checksums),
    )


def init_group(wire: pb.InitWeightsUpdateGroupRequest) -> r.InitGroup:
    if not wire.group_name:
        invalid("group_name", "is empty")
    if not wire.master_address:
        invalid("master_address", "is empty")
    if not 0 < wire.master_port < 65536:
        invalid("master_port", f"is {wire.master_port}; it must be in [1, 65535]")
    if wire.world_size < 2:
        invalid("world_size", f"is {wire.world_size}; it must be >= 2 (the trainer and the engines)")
    if not 0 < wire.rank < wire.world_size:
        invalid("rank", f"is {wire.rank}; it must be in [1, {wire.world_size}), rank 0 is the trainer")
    if wire.backend not in ("", "gloo", "nccl"):
        invalid("backend", f"is {wire.backend!r}; it must be gloo, nccl or empty")
    return r.InitGroup(
        group_name=wire.group_name,
        master_address=wire.master_address,
        master_port=wire.master_port,
        rank=wire.rank,
        world_size=wire.world_size,
        backend=wire.backend,
        timeout_s=wire.timeout_ms / 1000 or 30.0,
    )


def begin_response(reply: r.BeginReply) -> pb.BeginUpdateResponse:
    return pb.BeginUpdateResponse(
        update_id=reply.update_id,
        weight_version=reply.version,
        commit_sequence=reply.commit_sequence,
        next_weight_version=reply.next_version,
        manifest_digest=reply.manifest_digest,
        staging=STAGING_TO_WIRE[reply.staging],
        total_bytes=reply.total_bytes,
        num_buckets=reply.num_buckets,
        bucket_bytes=reply.bucket_bytes,
        unmatched=reply.unmatched,
        arena_bytes=reply.arena_bytes,
        lease_ms=round(reply.lease_s * 1000),
        stream_ports=reply.stream_ports,
    )


def update_response(reply: r.UpdateReply) -> pb.UpdateWeightsResponse:
    seconds = reply.seconds
    return pb.UpdateWeightsResponse(
        update_id=reply.update_id,
        state=STATE_TO_WIRE[reply.state],
        weight_version=reply.version,
        commit_sequence=reply.commit_sequence,
        path=PATH_TO_WIRE[reply.path],
        staging=STAGING_TO_WIRE[reply.staging],
        num_tensors=reply.num_tensors,
        num_bytes=reply.num_bytes,
        num_changed=reply.num_changed,
        unmatched=reply.unmatched,
        seconds=pb.StageSeconds(
            transfer=seconds.transfer,
            verify=seconds.verify,
            pause=seconds.pause,
            write=seconds.write,
            finalise=seconds.finalise,
            recapture=seconds.recapture,
            wait=seconds.wait,
        ),
        gb_per_s=reply.gb_per_s,
        floor_seconds=reply.floor_seconds,
        verified=reply.verified,
        received_checksum=reply.received_checksum,
        live_checksum=reply.live_checksum,
        num_aborted=reply.num_aborted,
        num_recomputed=reply.num_recomputed,
        num_kept=reply.num_kept,
        graphs=pb.GraphReport(
            kept=reply.graphs_kept, recaptured=reply.graphs_recaptured, reason=reply.graphs_reason
        ),
        previous_weight_version=reply.previous_version,
        warnings=reply.warnings,
        extra_bytes=reply.extra_bytes,
        adapter=reply.adapter,
        adapter_version=reply.adapter_version,
        previous_adapter_version=reply.previous_adapter_version,
    )


def placement(slot: r.Placement) -> pb.TensorPlacement:
    return pb.TensorPlacement(
        name=slot.name,
        dtype=DTYPE_TO_WIRE[slot.dtype],
        shape=slot.shape,
        offset=slot.offset,
        alias_of=slot.alias_of,
    )
