from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogprobMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGPROB_MODE_UNSPECIFIED: _ClassVar[LogprobMode]
    LOGPROB_MODE_PROCESSED: _ClassVar[LogprobMode]
    LOGPROB_MODE_RAW: _ClassVar[LogprobMode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_RETRACT: _ClassVar[PauseMode]

class MemoryTag(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_TAG_UNSPECIFIED: _ClassVar[MemoryTag]
    MEMORY_TAG_WEIGHTS: _ClassVar[MemoryTag]
    MEMORY_TAG_KV_CACHE: _ClassVar[MemoryTag]
    MEMORY_TAG_GRAPHS: _ClassVar[MemoryTag]

class ServingStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVING_STATUS_UNSPECIFIED: _ClassVar[ServingStatus]
    SERVING_STATUS_SERVING: _ClassVar[ServingStatus]
    SERVING_STATUS_NOT_SERVING: _ClassVar[ServingStatus]
    SERVING_STATUS_PAUSED: _ClassVar[ServingStatus]
LOGPROB_MODE_UNSPECIFIED: LogprobMode
LOGPROB_MODE_PROCESSED: LogprobMode
LOGPROB_MODE_RAW: LogprobMode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ERROR: FinishReason
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_KEEP: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_RETRACT: PauseMode
MEMORY_TAG_UNSPECIFIED: MemoryTag
MEMORY_TAG_WEIGHTS: MemoryTag
MEMORY_TAG_KV_CACHE: MemoryTag
MEMORY_TAG_GRAPHS: MemoryTag
SERVING_STATUS_UNSPECIFIED: ServingStatus
SERVING_STATUS_SERVING: ServingStatus
SERVING_STATUS_NOT_SERVING: ServingStatus
SERVING_STATUS_PAUSED: ServingStatus

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop_token_ids", "stop", "ignore_eos", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs")
    N_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    logprobs: LogprobMode
    top_logprobs: int
    prompt_logprobs: bool
    def __init__(self, n: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: bool = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., logprobs: _Optional[_Union[LogprobMode, str]] = ..., top_logprobs: _Optional[int] = ..., prompt_logprobs: bool = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "text", "sampling", "priority", "deadline_ms", "min_version", "return_text", "return_hidden_states", "adapter", "min_adapter_version")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    RETURN_TEXT_FIELD_NUMBER: _ClassVar[int]
    RETURN_HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    MIN_ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: TokenIds
    text: str
    sampling: SamplingParams
    priority: int
    deadline_ms: int
    min_version: int
    return_text: bool
    return_hidden_states: bool
    adapter: str
    min_adapter_version: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., text: _Optional[str] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., min_version: _Optional[int] = ..., return_text: bool = ..., return_hidden_states: bool = ..., adapter: _Optional[str] = ..., min_adapter_version: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("start", "weight_version", "commit_sequence", "adapter", "adapter_version")
    START_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    weight_version: int
    commit_sequence: int
    adapter: str
    adapter_version: int
    def __init__(self, start: _Optional[int] = ..., weight_version: _Optional[int] = ..., commit_sequence: _Optional[int] = ..., adapter: _Optional[str] = ..., adapter_version: _Optional[int] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Hidden(_message.Message):
    __slots__ = ("num_rows", "hidden_size", "data")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    hidden_size: int
    data: bytes
    def __init__(self, num_rows: _Optional[int] = ..., hidden_size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "token_ids", "logprobs", "top_logprobs", "text", "version_spans", "finish_reason", "error", "prompt_logprobs", "num_prompt_tokens", "num_cached_tokens", "logprob_mode", "weight_version", "hidden_states", "num_preemptions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_MODE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    text: str
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: FinishReason
    error: str
    prompt_logprobs: _containers.RepeatedScalarFieldContainer[float]
    num_prompt_tokens: int
    num_cached_tokens: int
    logprob_mode: LogprobMode
    weight_version: int
    hidden_states: Hidden
    num_preemptions: int
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ..., text: _Optional[str] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[str] = ..., prompt_logprobs: _Optional[_Iterable[float]] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., logprob_mode: _Optional[_Union[LogprobMode, str]] = ..., weight_version: _Optional[int] = ..., hidden_states: _Optional[_Union[Hidden, _Mapping]] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class GenerateBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("status", "reason", "message")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status: int
    reason: str
    message: str
    def __init__(self, status: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class GenerateBatchResponse(_message.Message):
    __slots__ = ("request_index", "completion", "error")
    REQUEST_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_index: int
    completion: GenerateResponse
    error: RequestError
    def __init__(self, request_index: _Optional[int] = ..., completion: _Optional[_Union[GenerateResponse, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("sequences", "temperature", "min_version", "adapter", "min_adapter_version")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    MIN_ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[TokenIds]
    temperature: float
    min_version: int
    adapter: str
    min_adapter_version: int
    def __init__(self, sequences: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., temperature: _Optional[float] = ..., min_version: _Optional[int] = ..., adapter: _Optional[str] = ..., min_adapter_version: _Optional[int] = ...) -> None: ...

class SequenceScore(_message.Message):
    __slots__ = ("logprobs", "version_spans")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "weight_version")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[SequenceScore]
    weight_version: int
    def __init__(self, scores: _Optional[_Iterable[_Union[SequenceScore, _Mapping]]] = ..., weight_version: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids", "all")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., all: bool = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted_request_ids", "unknown_request_ids", "weight_version")
    ABORTED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    aborted_request_ids: _containers.RepeatedScalarFieldContainer[str]
    unknown_request_ids: _containers.RepeatedScalarFieldContainer[str]
    weight_version: int
    def __init__(self, aborted_request_ids: _Optional[_Iterable[str]] = ..., unknown_request_ids: _Optional[_Iterable[str]] = ..., weight_version: _Optional[int] = ...) -> None: ...

class PauseGenerationRequest(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class PauseGenerationResponse(_message.Message):
    __slots__ = ("num_running", "weight_version")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    weight_version: int
    def __init__(self, num_running: _Optional[int] = ..., weight_version: _Optional[int] = ...) -> None: ...

class ContinueGenerationRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ContinueGenerationResponse(_message.Message):
    __slots__ = ("weight_version",)
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    weight_version: int
    def __init__(self, weight_version: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("num_pages", "weight_version")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    weight_version: int
    def __init__(self, num_pages: _Optional[int] = ..., weight_version: _Optional[int] = ...) -> None: ...

class ReleaseMemoryOccupationRequest(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[MemoryTag]
    def __init__(self, tags: _Optional[_Iterable[_Union[MemoryTag, str]]] = ...) -> None: ...

class ReleaseMemoryOccupationResponse(_message.Message):
    __slots__ = ("released_bytes", "weight_version")
    RELEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    released_bytes: int
    weight_version: int
    def __init__(self, released_bytes: _Optional[int] = ..., weight_version: _Optional[int] = ...) -> None: ...

class ResumeMemoryOccupationRequest(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[MemoryTag]
    def __init__(self, tags: _Optional[_Iterable[_Union[MemoryTag, str]]] = ...) -> None: ...

class ResumeMemoryOccupationResponse(_message.Message):
    __slots__ = ("resumed_bytes", "needs_update", "weight_version")
    RESUMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEEDS_UPDATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    resumed_bytes: int
    needs_update: bool
    weight_version: int
    def __init__(self, resumed_bytes: _Optional[int] = ..., needs_update: bool = ..., weight_version: _Optional[int] = ...) -> None: ...

class GetEngineInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvCapacity(_message.Message):
    __slots__ = ("pre_model_load_bytes", "available_bytes", "reserved_bytes", "preloaded_weights_bytes", "kv_bytes", "bytes_per_page")
    PRE_MODEL_LOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRELOADED_WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    pre_model_load_bytes: int
    available_bytes: int
    reserved_bytes: int
    preloaded_weights_bytes: int
    kv_bytes: int
    bytes_per_page: int
    def __init__(self, pre_model_load_bytes: _Optional[int] = ..., available_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., preloaded_weights_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., bytes_per_page: _Optional[int] = ...) -> None: ...

class ForwardCounts(_message.Message):
    __slots__ = ("eager", "decode_graph", "prefill_graph", "split_prefill", "idle")
    EAGER_FIELD_NUMBER: _ClassVar[int]
    DECODE_GRAPH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_GRAPH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_PREFILL_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    eager: int
    decode_graph: int
    prefill_graph: int
    split_prefill: int
    idle: int
    def __init__(self, eager: _Optional[int] = ..., decode_graph: _Optional[int] = ..., prefill_graph: _Optional[int] = ..., split_prefill: _Optional[int] = ..., idle: _Optional[int] = ...) -> None: ...

class UpdateSummary(_message.Message):
    __slots__ = ("update_id", "path", "staging", "end", "reason", "message", "weight_version", "num_bytes", "seconds", "ended_at", "adapter", "adapter_version")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    path: str
    staging: str
    end: str
    reason: str
    message: str
    weight_version: int
    num_bytes: int
    seconds: _containers.ScalarMap[str, float]
    ended_at: float
    adapter: str
    adapter_version: int
    def __init__(self, update_id: _Optional[str] = ..., path: _Optional[str] = ..., staging: _Optional[str] = ..., end: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., weight_version: _Optional[int] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[_Mapping[str, float]] = ..., ended_at: _Optional[float] = ..., adapter: _Optional[str] = ..., adapter_version: _Optional[int] = ...) -> None: ...

class GetEngineInfoResponse(_message.Message):
    __slots__ = ("instance_id", "rollsync_version", "architecture", "dtype", "device", "vocab_size", "context_length", "eos_token_ids", "num_weight_tensors", "weight_bytes", "page_size", "attention_backend", "kv_capacity", "forward_counts", "state", "model_path", "weight_version", "weights_path", "max_running_requests", "weights_address", "recent_updates", "max_adapters", "max_adapter_rank", "adapter_bytes")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLSYNC_VERSION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_WEIGHT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    FORWARD_COUNTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_PATH_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECENT_UPDATES_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    rollsync_version: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_weight_tensors: int
    weight_bytes: int
    page_size: int
    attention_backend: str
    kv_capacity: KvCapacity
    forward_counts: ForwardCounts
    state: EngineState
    model_path: str
    weight_version: int
    weights_path: str
    max_running_requests: int
    weights_address: int
    recent_updates: _containers.RepeatedCompositeFieldContainer[UpdateSummary]
    max_adapters: int
    max_adapter_rank: int
    adapter_bytes: int
    def __init__(self, instance_id: _Optional[str] = ..., rollsync_version: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_weight_tensors: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., page_size: _Optional[int] = ..., attention_backend: _Optional[str] = ..., kv_capacity: _Optional[_Union[KvCapacity, _Mapping]] = ..., forward_counts: _Optional[_Union[ForwardCounts, _Mapping]] = ..., state: _Optional[_Union[EngineState, _Mapping]] = ..., model_path: _Optional[str] = ..., weight_version: _Optional[int] = ..., weights_path: _Optional[str] = ..., max_running_requests: _Optional[int] = ..., weights_address: _Optional[int] = ..., recent_updates: _Optional[_Iterable[_Union[UpdateSummary, _Mapping]]] = ..., max_adapters: _Optional[int] = ..., max_adapter_rank: _Optional[int] = ..., adapter_bytes: _Optional[int] = ...) -> None: ...

class WatchEngineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterState(_message.Message):
    __slots__ = ("name", "version", "rank", "base_weight_version", "stale", "num_sequences")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BASE_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    rank: int
    base_weight_version: int
    stale: bool
    num_sequences: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., rank: _Optional[int] = ..., base_weight_version: _Optional[int] = ..., stale: bool = ..., num_sequences: _Optional[int] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("status", "not_serving_reason", "weight_version", "commit_sequence", "num_running", "num_waiting", "num_free_pages", "num_cached_pages", "num_total_pages", "open_update_id", "open_update_state", "num_steps", "num_generated_tokens", "open_update_received_bytes", "open_update_total_bytes", "paused_by", "released_tags", "num_prompt_tokens", "num_cached_tokens", "adapters")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NOT_SERVING_REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    OPEN_UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_UPDATE_STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPEN_UPDATE_RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_UPDATE_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAUSED_BY_FIELD_NUMBER: _ClassVar[int]
    RELEASED_TAGS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    status: ServingStatus
    not_serving_reason: str
    weight_version: int
    commit_sequence: int
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_cached_pages: int
    num_total_pages: int
    open_update_id: str
    open_update_state: str
    num_steps: int
    num_generated_tokens: int
    open_update_received_bytes: int
    open_update_total_bytes: int
    paused_by: str
    released_tags: _containers.RepeatedScalarFieldContainer[MemoryTag]
    num_prompt_tokens: int
    num_cached_tokens: int
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterState]
    def __init__(self, status: _Optional[_Union[ServingStatus, str]] = ..., not_serving_reason: _Optional[str] = ..., weight_version: _Optional[int] = ..., commit_sequence: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., num_cached_pages: _Optional[int] = ..., num_total_pages: _Optional[int] = ..., open_update_id: _Optional[str] = ..., open_update_state: _Optional[str] = ..., num_steps: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., open_update_received_bytes: _Optional[int] = ..., open_update_total_bytes: _Optional[int] = ..., paused_by: _Optional[str] = ..., released_tags: _Optional[_Iterable[_Union[MemoryTag, str]]] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[AdapterState, _Mapping]]] = ...) -> None: ...
