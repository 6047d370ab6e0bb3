"""Typed messages between the front process and the engine process. msgspec, never pickle. No torch.

The front sends `Command`s, the engine answers with `Event`s. Every command with a `call_id` is answered
by exactly one `Reply` with the same id. Bulk bytes never travel here: they go through shared memory.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollout_engine.manifest_columns import manifest_from_message, manifest_to_message
from rollout_engine.outputs import SequenceOutput as SequenceOutput
from rollout_engine.outputs import Span as Span
from rollout_engine.records import AdapterState as AdapterState
from rollout_engine.records import KvArithmetic as KvArithmetic
from rollout_engine.records import UpdateRecord, WorkCounts
from rollout_engine.sampling import SamplingParams
from weight_updater.requests import (
    BeginUpdate,
    FromDisk,
    FromDistributed,
    FromIpc,
    FromTensor,
    Inflight,
    InitGroup,
)

FromAny = FromDisk | FromDistributed | FromTensor | FromIpc

# ---------------------------------------------------------------- commands


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base: the tag is the class name."""


class Call(Message, frozen=True, kw_only=True):
    """A command that is answered by one Reply."""

    call_id: int


class SubmitRequest(Message, frozen=True):
    """Run one prompt; answered by RequestOutput events (n of them have a finish_reason) or RequestRefused."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams  # seed is never None here
    priority: int = 0
    deadline_s: float = 0.0  # seconds from arrival; 0 means none
    min_version: int = 0
    return_hidden_states: bool = False
    stream: bool = True  # False: one event per completion, at its end
    adapter: str = ""  # "": the base weights alone
    min_adapter_version: int = 0


class AbortRequests(Message, frozen=True):
    """End these requests with what they have; unknown ids are ignored."""

    request_ids: list[str]


class FinishSequence(Message, frozen=True):
    """The front found a stop string in completion `index`: end it with reason stop, no more output."""

    request_id: str
    index: int


class Pause(Call, frozen=True):
    """Stop forward passes. mode: keep, abort, wait or retract. Result: {"num_running": int}."""

    mode: str = "keep"


class Continue(Call, frozen=True):
    """Undo Pause."""


class FlushCache(Call, frozen=True):
    """Drop the prefix cache. Result: {"num_pages": int}; refused with BUSY while requests run."""


class ReleaseMemory(Call, frozen=True):
    """Release tags among weights, kv_cache, graphs. Result: {"bytes": int}."""

    tags: list[str]


class ResumeMemory(Call, frozen=True):
    """Resume tags. Result: {"bytes": int, "needs_update": bool}."""

    tags: list[str]


class GetInfo(Call, frozen=True):
    """Result: EngineInfo as a dict."""


class Begin(Call, frozen=True):
    """Open an update. Result: BeginReply."""

    request: BeginUpdate


class Update(Call, frozen=True):
    """Receive bytes for an open update; or, with `begin`, begin, receive and commit. Result: UpdateReply.

    Exactly one of the four requests is set. commit: of an open update, as soon as its bytes are here.
    """

    disk: FromDisk | None = None
    distributed: FromDistributed | None = None
    tensor: FromTensor | None = None
    ipc: FromIpc | None = None
    begin: BeginUpdate | None = None
    commit: bool = False


class Chunk(Message, frozen=True):
    """Bytes for the tensor path wait in slot `slot` of the upload ring; answered by ChunkTaken."""

    call_id: int  # of the Update that is being fed
    tensor: int | None  # index in the manifest; None: the offset counts in all tensors packed
    offset: int  # bytes, in the tensor
    slot: int  # of the ring
    nbytes: int


class EndOfChunks(Message, frozen=True):
    """The client's stream ended (complete=True) or broke (False). reason: why, if it is known."""

    call_id: int
    complete: bool
    reason: str = ""


class Prepare(Call, frozen=True):
    """Vote. Result: UpdateReply."""

    update_id: str
    deadline_s: float = 0.0


class Commit(Call, frozen=True):
    """Make live. Result: UpdateReply."""

    update_id: str


class AbortUpdate(Call, frozen=True):
    """End an update. Result: {"found": bool, "torn": bool}."""

    update_id: str


class Rollback(Call, frozen=True):
    """Bring the previous version back. Result: UpdateReply."""

    inflight: Inflight = Inflight.WAIT


class RemoveAdapter(Call, frozen=True):
    """Let go of an adapter. abort: end the requests that use it; else they refuse the removal.

    Result: {"version": int, "num_aborted": int}.
    """

    name: str
    abort: bool = False


class RenewLease(Call, frozen=True):
    """Result: {"lease_s": float}."""

    update_id: str
    lease_s: float = 0.0


class ReleaseIpc(Call, frozen=True):
    """Unmap a trainer's memory. Result: {"num_released": int}."""

    allocation_ids: list[str]


class InitWeightsGroup(Call, frozen=True):
    """Join a process group, off the loop. Result: {"backend": str}."""

    request: InitGroup


class DestroyWeightsGroup(Call, frozen=True):
    """Leave a process group. Result: {"found": bool}."""

    group_name: str


class GetLayout(Call, frozen=True):
    """Result: Layout."""


class GetChecksums(Call, frozen=True):
    """Result: {"names": [...], "checksums": [...], "folded": int}."""

    names: list[str]


class ReadWeight(Call, frozen=True):
    """Copy bytes [offset, offset + nbytes) of a live tensor into ring slot `slot`. Result: WeightPiece."""

    name: str
    offset: int
    nbytes: int
    slot: int


class Shutdown(Message, frozen=True):
    """Finish running requests for up to `grace_s` seconds, then exit."""

    grace_s: float = 0.0


Command = (
    SubmitRequest
    | AbortRequests
    | FinishSequence
    | Pause
    | Continue
    | FlushCache
    | ReleaseMemory
    | ResumeMemory
    | GetInfo
    | Begin
    | Update
    | Chunk
    | EndOfChunks
    | Prepare
    | Commit
    | AbortUpdate
    | Rollback
    | RemoveAdapter
    | RenewLease
    | ReleaseIpc
    | InitWeightsGroup
    | DestroyWeightsGroup
    | GetLayout
    | GetChecksums
    | ReadWeight
    | Shutdown
)

# ---------------------------------------------------------------- events


class ErrorInfo(msgspec.Struct, frozen=True):
    """A domain error. kind: engine, refused, torn; reason: errors.Reason or weight_updater.errors.Reason."""

    kind: str
    reason: str
    message: str


class Reply(Message, frozen=True):
    """The answer to a Call. result is builtins (dataclasses as dicts); msgspec.convert makes it typed."""

    call_id: int
    result: Any = None
    error: ErrorInfo | None = None
    # Every reply carries the live version.
    weight_version: int = 0
    commit_sequence: int = 0


class Outputs(Message, frozen=True):
    """All outputs of one step, in one message."""

    outputs: list[SequenceOutput]


class RequestRefused(Message, frozen=True):
    """A SubmitRequest that was not taken; or taken, and of which nothing was sampled yet."""

    request_id: str
    error: ErrorInfo


class ChunkTaken(Message, frozen=True):
    """The ring slot may be written again."""

    call_id: int
    slot: int


class Snapshot(Message, frozen=True):
    """The engine's state. status: serving, paused or not_serving."""

    status: str
    reason: str
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
    received_bytes: int = 0
    total_bytes: int = 0
    paused_by: str = ""
    released_tags: list[str] = []
    open_update_version: int = 0  # what it will bring
    work: WorkCounts = msgspec.field(default_factory=WorkCounts)
    adapters: list[AdapterState] = []


class UpdateEnded(Message, frozen=True):
    """An update has ended, however it did; comes before the reply that says so."""

    record: UpdateRecord


class EngineInfo(msgspec.Struct, frozen=True):
    """What GetEngineInfo reports beside the snapshot."""

    instance_id: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    eos_token_ids: list[int]
    num_weight_tensors: int
    weight_bytes: int
    page_size: int
    attention_backend: str
    kv: KvArithmetic
    forward_counts: dict[str, int]
    model_path: str
    weights_path: str
    max_running_requests: int
    weights_address: int
    max_adapters: int = 0
    max_adapter_rank: int = 0
    adapter_bytes: int = 0


class Ready(Message, frozen=True):
    """The engine has loaded and serves; the front opens its port now."""

    info: EngineInfo
    ring_name: str  # shared-memory segment of the upload ring
    ring_slots: int
    ring_slot_bytes: int


class UploadRing(Message, frozen=True):
    """To a receiver of chunks, once and first: where it puts them."""

    ring_name: str
    ring_slots: int
    ring_slot_bytes: int


class Failed(Message, frozen=True):
    """The engine could not start, or died; the front reports NOT_SERVING with this reason."""

    error: ErrorInfo


Event = Reply | Outputs | RequestRefused | ChunkTaken | Snapshot | UpdateEnded | Ready | UploadRing | Failed

encoder = msgspec.msgpack.Encoder(enc_hook=manifest_to_message)
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(
    Command, dec_hook=manifest_from_message
)
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
