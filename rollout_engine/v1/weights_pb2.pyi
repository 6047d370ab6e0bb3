from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]

class WeightsPath(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHTS_PATH_UNSPECIFIED: _ClassVar[WeightsPath]
    WEIGHTS_PATH_DISK: _ClassVar[WeightsPath]
    WEIGHTS_PATH_DISTRIBUTED: _ClassVar[WeightsPath]
    WEIGHTS_PATH_TENSOR: _ClassVar[WeightsPath]
    WEIGHTS_PATH_IPC: _ClassVar[WeightsPath]

class Staging(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGING_UNSPECIFIED: _ClassVar[Staging]
    STAGING_DEVICE: _ClassVar[Staging]
    STAGING_HOST: _ClassVar[Staging]
    STAGING_NONE: _ClassVar[Staging]

class Inflight(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INFLIGHT_UNSPECIFIED: _ClassVar[Inflight]
    INFLIGHT_WAIT: _ClassVar[Inflight]
    INFLIGHT_ABORT: _ClassVar[Inflight]
    INFLIGHT_KEEP: _ClassVar[Inflight]
    INFLIGHT_RECOMPUTE: _ClassVar[Inflight]

class Recapture(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECAPTURE_UNSPECIFIED: _ClassVar[Recapture]
    RECAPTURE_AUTO: _ClassVar[Recapture]
    RECAPTURE_ALWAYS: _ClassVar[Recapture]
    RECAPTURE_NEVER: _ClassVar[Recapture]

class UpdateState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_STATE_UNSPECIFIED: _ClassVar[UpdateState]
    UPDATE_STATE_RECEIVING: _ClassVar[UpdateState]
    UPDATE_STATE_RECEIVED: _ClassVar[UpdateState]
    UPDATE_STATE_PREPARED: _ClassVar[UpdateState]
    UPDATE_STATE_COMMITTED: _ClassVar[UpdateState]
    UPDATE_STATE_ROLLED_BACK: _ClassVar[UpdateState]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_BFLOAT16: DType
DTYPE_FLOAT16: DType
DTYPE_FLOAT64: DType
WEIGHTS_PATH_UNSPECIFIED: WeightsPath
WEIGHTS_PATH_DISK: WeightsPath
WEIGHTS_PATH_DISTRIBUTED: WeightsPath
WEIGHTS_PATH_TENSOR: WeightsPath
WEIGHTS_PATH_IPC: WeightsPath
STAGING_UNSPECIFIED: Staging
STAGING_DEVICE: Staging
STAGING_HOST: Staging
STAGING_NONE: Staging
INFLIGHT_UNSPECIFIED: Inflight
INFLIGHT_WAIT: Inflight
INFLIGHT_ABORT: Inflight
INFLIGHT_KEEP: Inflight
INFLIGHT_RECOMPUTE: Inflight
RECAPTURE_UNSPECIFIED: Recapture
RECAPTURE_AUTO: Recapture
RECAPTURE_ALWAYS: Recapture
RECAPTURE_NEVER: Recapture
UPDATE_STATE_UNSPECIFIED: UpdateState
UPDATE_STATE_RECEIVING: UpdateState
UPDATE_STATE_RECEIVED: UpdateState
UPDATE_STATE_PREPARED: UpdateState
UPDATE_STATE_COMMITTED: UpdateState
UPDATE_STATE_ROLLED_BACK: UpdateState

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    checksum: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., checksum: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ...) -> None: ...

class AdapterModule(_message.Message):
    __slots__ = ("name", "rank", "scaling")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    scaling: float
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., scaling: _Optional[float] = ...) -> None: ...

class AdapterSpec(_message.Message):
    __slots__ = ("name", "rank", "scaling", "modules", "base_checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    BASE_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    scaling: float
    modules: _containers.RepeatedCompositeFieldContainer[AdapterModule]
    base_checksum: int
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., scaling: _Optional[float] = ..., modules: _Optional[_Iterable[_Union[AdapterModule, _Mapping]]] = ..., base_checksum: _Optional[int] = ...) -> None: ...

class BeginUpdateRequest(_message.Message):
    __slots__ = ("update_id", "path", "weight_version", "manifest", "manifest_digest", "staging", "inflight", "partial", "keep_previous", "adopt", "recapture", "allow_nonfinite", "skip_checksums", "lease_ms", "bucket_bytes", "merged", "num_engines", "directory", "checksums", "num_streams", "adapter")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    KEEP_PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    RECAPTURE_FIELD_NUMBER: _ClassVar[int]
    ALLOW_NONFINITE_FIELD_NUMBER: _ClassVar[int]
    SKIP_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    path: WeightsPath
    weight_version: int
    manifest: Manifest
    manifest_digest: str
    staging: Staging
    inflight: Inflight
    partial: bool
    keep_previous: bool
    adopt: bool
    recapture: Recapture
    allow_nonfinite: bool
    skip_checksums: bool
    lease_ms: int
    bucket_bytes: int
    merged: bool
    num_engines: int
    directory: str
    checksums: _containers.RepeatedScalarFieldContainer[int]
    num_streams: int
    adapter: AdapterSpec
    def __init__(self, update_id: _Optional[str] = ..., path: _Optional[_Union[WeightsPath, str]] = ..., weight_version: _Optional[int] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., manifest_digest: _Optional[str] = ..., staging: _Optional[_Union[Staging, str]] = ..., inflight: _Optional[_Union[Inflight, str]] = ..., partial: bool = ..., keep_previous: bool = ..., adopt: bool = ..., recapture: _Optional[_Union[Recapture, str]] = ..., allow_nonfinite: bool = ..., skip_checksums: bool = ..., lease_ms: _Optional[int] = ..., bucket_bytes: _Optional[int] = ..., merged: bool = ..., num_engines: _Optional[int] = ..., directory: _Optional[str] = ..., checksums: _Optional[_Iterable[int]] = ..., num_streams: _Optional[int] = ..., adapter: _Optional[_Union[AdapterSpec, _Mapping]] = ...) -> None: ...

class TensorPlacement(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "alias_of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ALIAS_OF_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    alias_of: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., alias_of: _Optional[str] = ...) -> None: ...

class BeginUpdateResponse(_message.Message):
    __slots__ = ("update_id", "weight_version", "commit_sequence", "next_weight_version", "manifest_digest", "staging", "total_bytes", "num_buckets", "bucket_bytes", "unmatched", "arena_bytes", "lease_ms", "stream_ports")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNMATCHED_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    STREAM_PORTS_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    weight_version: int
    commit_sequence: int
    next_weight_version: int
    manifest_digest: str
    staging: Staging
    total_bytes: int
    num_buckets: int
    bucket_bytes: int
    unmatched: _containers.RepeatedScalarFieldContainer[str]
    arena_bytes: int
    lease_ms: int
    stream_ports: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, update_id: _Optional[str] = ..., weight_version: _Optional[int] = ..., commit_sequence: _Optional[int] = ..., next_weight_version: _Optional[int] = ..., manifest_digest: _Optional[str] = ..., staging: _Optional[_Union[Staging, str]] = ..., total_bytes: _Optional[int] = ..., num_buckets: _Optional[int] = ..., bucket_bytes: _Optional[int] = ..., unmatched: _Optional[_Iterable[str]] = ..., arena_bytes: _Optional[int] = ..., lease_ms: _Optional[int] = ..., stream_ports: _Optional[_Iterable[int]] = ...) -> None: ...

class UpdateWeightsFromDiskRequest(_message.Message):
    __slots__ = ("update_id", "begin", "directory")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    begin: BeginUpdateRequest
    directory: str
    def __init__(self, update_id: _Optional[str] = ..., begin: _Optional[_Union[BeginUpdateRequest, _Mapping]] = ..., directory: _Optional[str] = ...) -> None: ...

class UpdateWeightsFromDistributedRequest(_message.Message):
    __slots__ = ("update_id", "begin", "group_name", "timeout_ms")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    begin: BeginUpdateRequest
    group_name: str
    timeout_ms: int
    def __init__(self, update_id: _Optional[str] = ..., begin: _Optional[_Union[BeginUpdateRequest, _Mapping]] = ..., group_name: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class TensorChunk(_message.Message):
    __slots__ = ("tensor", "offset", "data", "packed")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    offset: int
    data: bytes
    packed: bool
    def __init__(self, tensor: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., packed: bool = ...) -> None: ...

class SharedMemorySegment(_message.Message):
    __slots__ = ("name", "size", "allocation_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    allocation_id: str
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., allocation_id: _Optional[str] = ...) -> None: ...

class UpdateWeightsFromTensorHeader(_message.Message):
    __slots__ = ("update_id", "begin", "segment")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    begin: BeginUpdateRequest
    segment: SharedMemorySegment
    def __init__(self, update_id: _Optional[str] = ..., begin: _Optional[_Union[BeginUpdateRequest, _Mapping]] = ..., segment: _Optional[_Union[SharedMemorySegment, _Mapping]] = ...) -> None: ...

class UpdateWeightsFromTensorEnd(_message.Message):
    __slots__ = ("num_chunks",)
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    num_chunks: int
    def __init__(self, num_chunks: _Optional[int] = ...) -> None: ...

class UpdateWeightsFromTensorRequest(_message.Message):
    __slots__ = ("header", "chunk", "end")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    header: UpdateWeightsFromTensorHeader
    chunk: TensorChunk
    end: UpdateWeightsFromTensorEnd
    def __init__(self, header: _Optional[_Union[UpdateWeightsFromTensorHeader, _Mapping]] = ..., chunk: _Optional[_Union[TensorChunk, _Mapping]] = ..., end: _Optional[_Union[UpdateWeightsFromTensorEnd, _Mapping]] = ...) -> None: ...

class CudaIpcHandle(_message.Message):
    __slots__ = ("device_uuid", "handle", "offset", "probe_bytes", "probe_checksum", "owner")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PROBE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBE_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    device_uuid: str
    handle: bytes
    offset: int
    probe_bytes: int
    probe_checksum: int
    owner: SharedMemorySegment
    def __init__(self, device_uuid: _Optional[str] = ..., handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., probe_bytes: _Optional[int] = ..., probe_checksum: _Optional[int] = ..., owner: _Optional[_Union[SharedMemorySegment, _Mapping]] = ...) -> None: ...

class MemoryHandle(_message.Message):
    __slots__ = ("allocation_id", "size", "posix_shm", "cuda_ipc")
    ALLOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    POSIX_SHM_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    allocation_id: str
    size: int
    posix_shm: SharedMemorySegment
    cuda_ipc: CudaIpcHandle
    def __init__(self, allocation_id: _Optional[str] = ..., size: _Optional[int] = ..., posix_shm: _Optional[_Union[SharedMemorySegment, _Mapping]] = ..., cuda_ipc: _Optional[_Union[CudaIpcHandle, _Mapping]] = ...) -> None: ...

class RegionPlacement(_message.Message):
    __slots__ = ("tensor", "handle", "offset")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    handle: int
    offset: int
    def __init__(self, tensor: _Optional[int] = ..., handle: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class UpdateWeightsFromIpcRequest(_message.Message):
    __slots__ = ("update_id", "begin", "handles", "placements", "lent", "scanned", "checksums", "commit")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    SCANNED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    begin: BeginUpdateRequest
    handles: _containers.RepeatedCompositeFieldContainer[MemoryHandle]
    placements: _containers.RepeatedCompositeFieldContainer[RegionPlacement]
    lent: str
    scanned: bool
    checksums: _containers.RepeatedScalarFieldContainer[int]
    commit: bool
    def __init__(self, update_id: _Optional[str] = ..., begin: _Optional[_Union[BeginUpdateRequest, _Mapping]] = ..., handles: _Optional[_Iterable[_Union[MemoryHandle, _Mapping]]] = ..., placements: _Optional[_Iterable[_Union[RegionPlacement, _Mapping]]] = ..., lent: _Optional[str] = ..., scanned: bool = ..., checksums: _Optional[_Iterable[int]] = ..., commit: bool = ...) -> None: ...

class PrepareUpdateRequest(_message.Message):
    __slots__ = ("update_id", "deadline_ms")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    deadline_ms: int
    def __init__(self, update_id: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class CommitUpdateRequest(_message.Message):
    __slots__ = ("update_id",)
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    def __init__(self, update_id: _Optional[str] = ...) -> None: ...

class AbortUpdateRequest(_message.Message):
    __slots__ = ("update_id",)
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    def __init__(self, update_id: _Optional[str] = ...) -> None: ...

class AbortUpdateResponse(_message.Message):
    __slots__ = ("found", "torn", "weight_version")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    TORN_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    found: bool
    torn: bool
    weight_version: int
    def __init__(self, found: bool = ..., torn: bool = ..., weight_version: _Optional[int] = ...) -> None: ...

class RollbackUpdateRequest(_message.Message):
    __slots__ = ("inflight",)
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    inflight: Inflight
    def __init__(self, inflight: _Optional[_Union[Inflight, str]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("update_id", "lease_ms")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    lease_ms: int
    def __init__(self, update_id: _Optional[str] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("lease_ms", "weight_version")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    weight_version: int
    def __init__(self, lease_ms: _Optional[int] = ..., weight_version: _Optional[int] = ...) -> None: ...

class StageSeconds(_message.Message):
    __slots__ = ("transfer", "verify", "pause", "write", "finalise", "recapture", "wait")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    FINALISE_FIELD_NUMBER: _ClassVar[int]
    RECAPTURE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    transfer: float
    verify: float
    pause: float
    write: float
    finalise: float
    recapture: float
    wait: float
    def __init__(self, transfer: _Optional[float] = ..., verify: _Optional[float] = ..., pause: _Optional[float] = ..., write: _Optional[float] = ..., finalise: _Optional[float] = ..., recapture: _Optional[float] = ..., wait: _Optional[float] = ...) -> None: ...

class GraphReport(_message.Message):
    __slots__ = ("kept", "recaptured", "reason")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    RECAPTURED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kept: int
    recaptured: int
    reason: str
    def __init__(self, kept: _Optional[int] = ..., recaptured: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("update_id", "state", "weight_version", "commit_sequence", "path", "staging", "num_tensors", "num_bytes", "num_changed", "unmatched", "seconds", "gb_per_s", "floor_seconds", "verified", "received_checksum", "live_checksum", "num_aborted", "num_recomputed", "num_kept", "graphs", "previous_weight_version", "warnings", "extra_bytes", "adapter", "adapter_version", "previous_adapter_version")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    NUM_TENSORS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHANGED_FIELD_NUMBER: _ClassVar[int]
    UNMATCHED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    FLOOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LIVE_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    state: UpdateState
    weight_version: int
    commit_sequence: int
    path: WeightsPath
    staging: Staging
    num_tensors: int
    num_bytes: int
    num_changed: int
    unmatched: _containers.RepeatedScalarFieldContainer[str]
    seconds: StageSeconds
    gb_per_s: float
    floor_seconds: float
    verified: bool
    received_checksum: int
    live_checksum: int
    num_aborted: int
    num_recomputed: int
    num_kept: int
    graphs: GraphReport
    previous_weight_version: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    extra_bytes: int
    adapter: str
    adapter_version: int
    previous_adapter_version: int
    def __init__(self, update_id: _Optional[str] = ..., state: _Optional[_Union[UpdateState, str]] = ..., weight_version: _Optional[int] = ..., commit_sequence: _Optional[int] = ..., path: _Optional[_Union[WeightsPath, str]] = ..., staging: _Optional[_Union[Staging, str]] = ..., num_tensors: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_changed: _Optional[int] = ..., unmatched: _Optional[_Iterable[str]] = ..., seconds: _Optional[_Union[StageSeconds, _Mapping]] = ..., gb_per_s: _Optional[float] = ..., floor_seconds: _Optional[float] = ..., verified: bool = ..., received_checksum: _Optional[int] = ..., live_checksum: _Optional[int] = ..., num_aborted: _Optional[int] = ..., num_recomputed: _Optional[int] = ..., num_kept: _Optional[int] = ..., graphs: _Optional[_Union[GraphReport, _Mapping]] = ..., previous_weight_version: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., extra_bytes: _Optional[int] = ..., adapter: _Optional[str] = ..., adapter_version: _Optional[int] = ..., previous_adapter_version: _Optional[int] = ...) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("name", "abort")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    name: str
    abort: bool
    def __init__(self, name: _Optional[str] = ..., abort: bool = ...) -> None: ...

class RemoveAdapterResponse(_message.Message):
    __slots__ = ("adapter_version", "num_aborted", "weight_version")
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    adapter_version: int
    num_aborted: int
    weight_version: int
    def __init__(self, adapter_version: _Optional[int] = ..., num_aborted: _Optional[int] = ..., weight_version: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("allocation_ids",)
    ALLOCATION_IDS_FIELD_NUMBER: _ClassVar[int]
    allocation_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, allocation_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("num_released", "weight_version")
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    num_released: int
    weight_version: int
    def __init__(self, num_released: _Optional[int] = ..., weight_version: _Optional[int] = ...) -> None: ...

class InitWeightsUpdateGroupRequest(_message.Message):
    __slots__ = ("group_name", "master_address", "master_port", "rank", "world_size", "backend", "timeout_ms")
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    group_name: str
    master_address: str
    master_port: int
    rank: int
    world_size: int
    backend: str
    timeout_ms: int
    def __init__(self, group_name: _Optional[str] = ..., master_address: _Optional[str] = ..., master_port: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class InitWeightsUpdateGroupResponse(_message.Message):
    __slots__ = ("backend", "weight_version")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    backend: str
    weight_version: int
    def __init__(self, backend: _Optional[str] = ..., weight_version: _Optional[int] = ...) -> None: ...

class DestroyWeightsUpdateGroupRequest(_message.Message):
    __slots__ = ("group_name",)
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    group_name: str
    def __init__(self, group_name: _Optional[str] = ...) -> None: ...

class DestroyWeightsUpdateGroupResponse(_message.Message):
    __slots__ = ("found", "weight_version")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    found: bool
    weight_version: int
    def __init__(self, found: bool = ..., weight_version: _Optional[int] = ...) -> None: ...

class GetWeightLayoutRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWeightLayoutResponse(_message.Message):
    __slots__ = ("placements", "arena_bytes", "weight_version")
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    placements: _containers.RepeatedCompositeFieldContainer[TensorPlacement]
    arena_bytes: int
    weight_version: int
    def __init__(self, placements: _Optional[_Iterable[_Union[TensorPlacement, _Mapping]]] = ..., arena_bytes: _Optional[int] = ..., weight_version: _Optional[int] = ...) -> None: ...

class GetWeightsByNameRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class GetWeightsByNameResponse(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "data", "weight_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    data: bytes
    weight_version: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., weight_version: _Optional[int] = ...) -> None: ...

class GetWeightChecksumsRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class NamedChecksum(_message.Message):
    __slots__ = ("name", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    checksum: int
    def __init__(self, name: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class GetWeightChecksumsResponse(_message.Message):
    __slots__ = ("checksums", "folded", "weight_version", "commit_sequence")
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    FOLDED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedCompositeFieldContainer[NamedChecksum]
    folded: int
    weight_version: int
    commit_sequence: int
    def __init__(self, checksums: _Optional[_Iterable[_Union[NamedChecksum, _Mapping]]] = ..., folded: _Optional[int] = ..., weight_version: _Optional[int] = ..., commit_sequence: _Optional[int] = ...) -> None: ...
