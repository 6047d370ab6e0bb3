"""Requests of the Weights service, and how their answers are read. No torch.

Updates are described by the dataclasses of weight_updater.requests, the same on both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollout_engine.v1 import weights_pb2 as pb
from trainers_adapters.calls import (
    DEFAULT_TIMEOUT_S,
    WORK_TIMEOUT_S,
    Gathered,
    Unary,
    as_list,
    enum_words,
    number_of,
)
from trainers_adapters.chunk_wire import Chunk, Messages, stream_messages
from trainers_adapters.results import Checksums, LiveWeight, RemovedAdapter
from weight_updater.requests import (
    AdapterSpec,
    BeginReply,
    BeginUpdate,
    CudaIpcRegion,
    InitGroup,
    Layout,
    Manifest,
    Path,
    Placement,
    RegionPlacement,
    ShmSegment,
    StageSeconds,
    Staging,
    UpdateReply,
    UpdateState,
)

DTYPES, DTYPE_WORDS = enum_words(pb.DType, "DTYPE_", "")
PATHS, PATH_WORDS = enum_words(pb.WeightsPath, "WEIGHTS_PATH_", "")
STAGINGS, STAGING_WORDS = enum_words(pb.Staging, "STAGING_", "auto")
INFLIGHTS = enum_words(pb.Inflight, "INFLIGHT_", "")[0]
RECAPTURES = enum_words(pb.Recapture, "RECAPTURE_", "")[0]
UPDATE_STATES = enum_words(pb.UpdateState, "UPDATE_STATE_", "begun")[1]


def manifest_message(manifest: Manifest) -> pb.Manifest:
    columns = manifest.columns
    rows = zip(columns.names, columns.dtypes, columns.shapes, manifest.checksums, strict=True)
    return pb.Manifest(
        tensors=[
            pb.TensorSpec(
                name=name,
                dtype=number_of(dtype, DTYPES, f"dtype of {name}"),  # type: ignore[arg-type]
                shape=shape,
                checksum=checksum,
            )
            for name, dtype, shape, checksum in rows
        ]
    )


def adapter_message(spec: AdapterSpec) -> pb.AdapterSpec:
    return pb.AdapterSpec(
        name=spec.name,
        rank=spec.rank,
        scaling=spec.scaling,
        modules=[pb.AdapterModule(name=m.name, rank=m.rank, scaling=m.scaling) for m in spec.modules],
        base_checksum=spec.base_checksum,
    )


def begin_message(request: BeginUpdate) -> pb.BeginUpdateRequest:
    message = pb.BeginUpdateRequest(
        update_id=request.update_id,
        path=number_of(request.path, PATHS, "path"),  # type: ignore[arg-type]
        weight_version=request.version,
        staging=number_of(request.staging, STAGINGS, "staging"),  # type: ignore[arg-type]
        inflight=number_of(request.inflight, INFLIGHTS, "inflight"),  # type: ignore[arg-type]
        partial=request.partial,
        keep_previous=request.keep_previous,
        adopt=request.adopt,
        recapture=number_of(request.recapture, RECAPTURES, "recapture"),  # type: ignore[arg-type]
        allow_nonfinite=request.allow_nonfinite,
        skip_checksums=request.skip_checksums,
        lease_ms=_ms(request.lease_s),
        bucket_bytes=request.bucket_bytes,
        merged=request.merged,
        num_engines=request.num_engines,
        directory=request.directory,
        checksums=request.checksums,
        num_streams=request.num_streams,
        adapter=None if request.adapter is None else adapter_message(request.adapter),
    )
    if request.manifest is not None:
        message.manifest.CopyFrom(manifest_message(request.manifest))
    elif request.manifest_digest:
        message.manifest_digest = request.manifest_digest
    return message


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _target(update: str | BeginUpdate) -> dict[str, Any]:
    """The oneof of every update call: the id of an open update, or a whole update in one call."""
    return {"update_id": update} if isinstance(update, str) else {"begin": begin_message(update)}


def _segment(segment: ShmSegment) -> pb.SharedMemorySegment:
    return pb.SharedMemorySegment(name=segment.name, size=segment.size, allocation_id=segment.allocation_id)


def parse_update(message: pb.UpdateWeightsResponse) -> UpdateReply:
    seconds = message.seconds
    return UpdateReply(
        update_id=message.update_id,
        state=UpdateState(UPDATE_STATES[message.state]),
        version=message.weight_version,
        previous_version=message.previous_weight_version,
        commit_sequence=message.commit_sequence,
        path=Path(PATH_WORDS[message.path]),
        staging=Staging(STAGING_WORDS[message.staging]),
        num_tensors=message.num_tensors,
        num_bytes=message.num_bytes,
        num_changed=message.num_changed,
        unmatched=tuple(message.unmatched),
        seconds=StageSeconds(**{name: getattr(seconds, name) for name in StageSeconds.__slots__}),
        gb_per_s=message.gb_per_s,
        floor_seconds=message.floor_seconds,
        verified=message.verified,
        received_checksum=message.received_checksum,
        live_checksum=message.live_checksum,
        num_aborted=message.num_aborted,
        num_recomputed=message.num_recomputed,
        num_kept=message.num_kept,
        graphs_kept=message.graphs.kept,
        graphs_recaptured=message.graphs.recaptured,
        graphs_reason=message.graphs.reason,
        warnings=tuple(message.warnings),
        extra_bytes=message.extra_bytes,
        adapter=message.adapter,
        adapter_version=message.adapter_version,
        previous_adapter_version=message.previous_adapter_version,
    )


# ---------------------------------------------------------------- the life of an update


def begin(request: BeginUpdate, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[BeginReply]:
    """Open an update; everything that does not fit the engine is refused here, before a byte moves."""

    def parse(r: pb.BeginUpdateResponse) -> BeginReply:
        return BeginReply(
            update_id=r.update_id,
            version=r.weight_version,
            commit_sequence=r.commit_sequence,
            next_version=r.next_weight_version,
            manifest_digest=r.manifest_digest,
            staging=Staging(STAGING_WORDS[r.staging]),
            total_bytes=r.total_bytes,
            num_buckets=r.num_buckets,
            bucket_bytes=r.bucket_bytes,
            unmatched=tuple(r.unmatched),
            arena_bytes=r.arena_bytes,
            lease_s=r.lease_ms / 1000,
            stream_ports=tuple(r.stream_ports),
        )

    idempotent = bool(request.update_id)
    return Unary("BeginUpdate", begin_message(request), parse, timeout_s, idempotent)


def update_from_disk(
    update: str | BeginUpdate, directory: str, *, timeout_s: float = WORK_TIMEOUT_S
) -> Unary[UpdateReply]:
    """Let the engine read a safetensors directory below one of its weights roots.

    update: the id of an open update; or a BeginUpdate, to begin, receive and commit in one call.
    """
    request = pb.UpdateWeightsFromDiskRequest(directory=directory, **_target(update))
    return Unary("UpdateWeightsFromDisk", request, parse_update, timeout_s)


def update_from_distributed(
    update: str | BeginUpdate,
    group_name: str,
    *,
    receive_timeout_s: float = 0.0,
    timeout_s: float = WORK_TIMEOUT_S,
) -> Unary[UpdateReply]:
    """Let the engine receive the manifest's buckets by broadcast; receive_timeout_s 0: the group's."""
    request = pb.UpdateWeightsFromDistributedRequest(
        group_name=group_name, timeout_ms=_ms(receive_timeout_s), **_target(update)
    )
    return Unary("UpdateWeightsFromDistributed", request, parse_update, timeout_s)


def update_from_tensor(
    update: str | BeginUpdate,
    chunks: Iterable[Chunk | bytes] = (),
    *,
    segment: ShmSegment | None = None,
    says_end: bool = False,
    timeout_s: float = WORK_TIMEOUT_S,
) -> Unary[UpdateReply]:
    """Send bytes in the call, as chunks in any order; or name a shared-memory segment that holds them.

    chunks: as they are, or as messages (chunk_wire.chunk_message).
    says_end: tell the engine when all chunks of this stream have come (a receiver wants to hear that).

    The call raises what `chunks` raises.
    """
    header = pb.UpdateWeightsFromTensorHeader(**_target(update))
    if segment is not None:
        header.segment.CopyFrom(_segment(segment))

    messages = Messages(stream_messages(header, chunks, says_end=says_end))
    return Unary("UpdateWeightsFromTensor", messages, parse_update, timeout_s)


def update_from_ipc(
    update: str | BeginUpdate,
    regions: Sequence[ShmSegment | CudaIpcRegion],
    placements: Sequence[RegionPlacement] = (),
    *,
    lent: str = "",
    scanned: bool = False,
    checksums: Sequence[int] = (),
    commit: bool = False,
    timeout_s: float = WORK_TIMEOUT_S,
) -> Unary[UpdateReply]:
    """Lend memory until the reply, which means: copied, synchronised, the memory is yours again.

    No placements: one region, the manifest's tensors in order, each 256-byte aligned.
    lent: digest of the regions and placements of an earlier call, instead of them.
    scanned: the manifest's checksums are of the bytes as they lie there, and all values are finite (CUDA).
    checksums: of the manifest's tensors, for an open update that began without any.
    commit: an open update, in the same call; a failure ends it.
    """
    request = pb.UpdateWeightsFromIpcRequest(
        handles=[_memory_handle(region) for region in regions],
        placements=[
            pb.RegionPlacement(tensor=p.tensor, handle=p.handle, offset=p.offset) for p in placements
        ],
        lent=lent,
        scanned=scanned,
        checksums=checksums,
        commit=commit,
        **_target(update),
    )
    return Unary("UpdateWeightsFromIpc", request, parse_update, timeout_s)


def _memory_handle(region: ShmSegment | CudaIpcRegion) -> pb.MemoryHandle:
    handle = pb.MemoryHandle(allocation_id=region.allocation_id, size=region.size)
    if isinstance(region, ShmSegment):
        handle.posix_shm.CopyFrom(_segment(region))
    else:
        handle.cuda_ipc.CopyFrom(
            pb.CudaIpcHandle(
                device_uuid=region.device_uuid,
                handle=region.handle,
                offset=region.offset,
                probe_bytes=region.probe_bytes,
                probe_checksum=region.probe_checksum,
                owner=None if region.owner is None else _segment(region.owner),
            )
        )
    return handle


def prepare(
    update_id: str, *, deadline_s: float = 0.0, timeout_s: float = WORK_TIMEOUT_S
) -> Unary[UpdateReply]:
    """Vote: do all that can still refuse. deadline_s becomes the lease; 0 keeps it."""
    request = pb.PrepareUpdateRequest(update_id=update_id, deadline_ms=_ms(deadline_s))
    return Unary("PrepareUpdate", request, parse_update, timeout_s, idempotent=True)


def commit(update_id: str, *, timeout_s: float = WORK_TIMEOUT_S) -> Unary[UpdateReply]:
    """Make the received weights live. Committing a committed update gives the same answer again."""
    request = pb.CommitUpdateRequest(update_id=update_id)
    return Unary("CommitUpdate", request, parse_update, timeout_s, idempotent=True)


def abort(update_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[bool]:
    """End an update; False when none of that id was open."""
    request = pb.AbortUpdateRequest(update_id=update_id)
    return Unary("AbortUpdate", request, lambda r: bool(r.found), timeout_s, idempotent=True)


def rollback(*, inflight: str = "wait", timeout_s: float = WORK_TIMEOUT_S) -> Unary[UpdateReply]:
    """Bring the previous version back; needs an update that was pushed with keep_previous."""
    request = pb.RollbackUpdateRequest(
        inflight=number_of(inflight, INFLIGHTS, "inflight")  # type: ignore[arg-type]
    )
    return Unary("RollbackUpdate", request, parse_update, timeout_s)


def remove_adapter(
    name: str, *, abort: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Unary[RemovedAdapter]:
    """Let go of an adapter; abort ends the requests that use it, which else refuse the removal (BUSY)."""
    request = pb.RemoveAdapterRequest(name=name, abort=abort)
    return Unary(
        "RemoveAdapter",
        request,
        lambda r: RemovedAdapter(r.adapter_version, r.num_aborted),
        timeout_s,
    )


def renew(update_id: str, *, lease_s: float = 0.0, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[float]:
    """Push an open update's lease out; gives the lease in seconds."""
    request = pb.RenewLeaseRequest(update_id=update_id, lease_ms=_ms(lease_s))
    return Unary("RenewLease", request, lambda r: r.lease_ms / 1000, timeout_s, idempotent=True)


def release(allocation_ids: str | Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[int]:
    """Make the engine unmap lent memory; once this returns, it may be freed. Gives the count."""
    request = pb.ReleaseRequest(allocation_ids=as_list(allocation_ids))
    return Unary("Release", request, lambda r: int(r.num_released), timeout_s, idempotent=True)


# ---------------------------------------------------------------- groups, and what is live


def init_group(request: InitGroup, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[str]:
    """Let the engine join a process group as request.rank; gives the backend in use."""
    message = pb.InitWeightsUpdateGroupRequest(
        group_name=request.group_name,
        master_address=request.master_address,
        master_port=request.master_port,
        rank=request.rank,
        world_size=request.world_size,
        backend=request.backend,
        timeout_ms=_ms(request.timeout_s),
    )
    return Unary("InitWeightsUpdateGroup", message, lambda r: str(r.backend), timeout_s)


def destroy_group(group_name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[bool]:
    """Let the engine leave a group; False when it knew none of that name."""
    request = pb.DestroyWeightsUpdateGroupRequest(group_name=group_name)
    return Unary("DestroyWeightsUpdateGroup", request, lambda r: bool(r.found), timeout_s, idempotent=True)


def layout(*, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[Layout]:
    """Names, dtypes, shapes and arena offsets of the live weights."""

    def parse(r: pb.GetWeightLayoutResponse) -> Layout:
        placements = tuple(
            Placement(p.name, DTYPE_WORDS[p.dtype], tuple(p.shape), p.offset, p.alias_of)
            for p in r.placements
        )
        return Layout(placements, r.arena_bytes)

    return Unary("GetWeightLayout", pb.GetWeightLayoutRequest(), parse, timeout_s, idempotent=True)


def checksums(names: str | Sequence[str] = (), *, timeout_s: float = WORK_TIMEOUT_S) -> Unary[Checksums]:
    """Checksums of what lies in the slots now; no names means all slots."""

    def parse(r: pb.GetWeightChecksumsResponse) -> Checksums:
        by_name = {c.name: c.checksum for c in r.checksums}
        return Checksums(by_name, r.folded, r.weight_version, r.commit_sequence)

    request = pb.GetWeightChecksumsRequest(names=as_list(names))
    return Unary("GetWeightChecksums", request, parse, timeout_s, idempotent=True)


def get_weights(
    names: str | Sequence[str], *, timeout_s: float = WORK_TIMEOUT_S
) -> Gathered[dict[str, LiveWeight]]:
    """The bytes of live tensors, by name."""

    def gather() -> tuple[Callable[[Any], None], Callable[[], dict[str, LiveWeight]]]:
        weights: dict[str, LiveWeight] = {}

        def add(piece: pb.GetWeightsByNameResponse) -> None:
            if piece.name not in weights:
                weights[piece.name] = LiveWeight(
                    piece.name,
                    DTYPE_WORDS[piece.dtype],
                    tuple(piece.shape),
                    bytearray(),
                    piece.weight_version,
                )
            data = weights[piece.name].data
            assert piece.offset == len(data), f"{piece.name} came out of order"
            data += piece.data

        return add, lambda: weights

    return Gathered("GetWeightsByName", pb.GetWeightsByNameRequest(names=as_list(names)), gather, timeout_s)
