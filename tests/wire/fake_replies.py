"""What the fake engine is told to do, and what it answers about weights. No torch."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rollout_engine import messages as m
from rollout_engine.records import SequenceRecord, UpdateRecord
from weight_updater.requests import (
    BeginReply,
    BeginUpdate,
    Layout,
    Manifest,
    Path,
    Placement,
    StageSeconds,
    Staging,
    UpdateReply,
    UpdateState,
)

FIRST_VERSION = 5
VOCAB_SIZE, CONTEXT_LENGTH, EOS = 512, 1024, 3
LAYOUT = Layout(
    (
        Placement("embed.weight", "bfloat16", (1024, 1280), 0),
        Placement("norm.weight", "float32", (10,), 2621440),
        Placement("lm_head.weight", "bfloat16", (1024, 1280), 0, "embed.weight"),
    ),
    2621696,
)


@dataclass
class Script:
    """What the fake does."""

    log: str = ""
    tokens: list[int] = field(default_factory=lambda: list(range(10, 20)))
    step_s: float = 0.0
    fail_start: str = ""  # answer Failed with this text
    exit_at_start: int | None = None
    die_on: str = ""  # name of a command: die by SIGKILL when it comes
    silent_on: str = ""  # name of a command: from then on say nothing, but read on
    delay_on: dict[str, float] = field(default_factory=dict)  # command -> seconds before its reply
    error_on: dict[str, list[str]] = field(default_factory=dict)  # command -> [kind, reason, message]
    bad_result_on: str = ""  # command: reply with a result that no one expects
    fail_after_chunks: int = 0
    chunk_s: float = 0.0  # between taking chunks
    version_step: int = 0  # the weight version grows by one after so many tokens
    nan_at: int = -1  # this completion token has a logprob of NaN
    status: str = "serving"
    reason: str = ""
    ring_slots: int = 4
    ring_slot_bytes: int = 1 << 20


@dataclass
class Running:
    """One completion."""

    request: m.SubmitRequest
    index: int
    sent: int = 0
    kept: list[tuple[int, float]] = field(default_factory=list)


def listed(manifest: Manifest) -> dict[str, Any]:
    """A manifest for the log."""
    return {"tensors": [asdict(tensor) for tensor in manifest.tensors]}


def weight_bytes(name: str, offset: int, nbytes: int) -> bytes:
    """Bytes [offset, offset + nbytes) of a fake weight: a pattern that depends on name and position."""
    period = bytes((i * 7 + len(name)) % 251 for i in range(251))
    start = offset % 251
    return (period * (nbytes // 251 + 2))[start : start + nbytes]


def begin_reply(request: BeginUpdate, version: int, commits: int) -> BeginReply:
    manifest = request.manifest
    return BeginReply(
        update_id=request.update_id or "chosen",
        version=version,
        commit_sequence=commits,
        next_version=request.version or version + 1,
        manifest_digest=manifest.digest() if manifest else request.manifest_digest,
        staging=Staging.HOST if request.staging is Staging.AUTO else request.staging,
        total_bytes=manifest.nbytes if manifest else 0,
        num_buckets=1,
        bucket_bytes=request.bucket_bytes or 1 << 26,
        unmatched=("extra.weight",),
        arena_bytes=LAYOUT.arena_bytes,
        lease_s=request.lease_s or 60.0,
    )


def update_reply(
    update_id: str, state: UpdateState, version: int, previous: int, commits: int
) -> UpdateReply:
    return UpdateReply(
        update_id=update_id,
        state=state,
        version=version,
        previous_version=previous,
        commit_sequence=commits,
        path=Path.TENSOR,
        staging=Staging.HOST,
        num_tensors=3,
        num_bytes=12,
        num_changed=2,
        unmatched=("a", "b"),
        seconds=StageSeconds(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
        gb_per_s=8.0,
        floor_seconds=9.0,
        verified=True,
        received_checksum=2**64 - 1,
        live_checksum=2**63,
        num_aborted=10,
        num_recomputed=11,
        num_kept=12,
        graphs_kept=13,
        graphs_recaptured=14,
        graphs_reason="moved",
        warnings=("slow",),
        extra_bytes=15,
    )


def engine_info(num_steps: int) -> m.EngineInfo:
    return m.EngineInfo(
        instance_id=f"fake-{os.getpid()}",
        architecture="FakeForCausalLM",
        dtype="bfloat16",
        device="cpu",
        vocab_size=VOCAB_SIZE,
        context_length=CONTEXT_LENGTH,
        eos_token_ids=[EOS],
        num_weight_tensors=3,
        weight_bytes=LAYOUT.arena_bytes,
        page_size=16,
        attention_backend="torch",
        kv=m.KvArithmetic(1000, 900, 10, 0, 800, 8),
        forward_counts={"eager": num_steps},
        model_path="/models/fake",
        weights_path="/models/fake",
        max_running_requests=64,
        weights_address=4096,
        max_adapters=4,
        max_adapter_rank=16,
        adapter_bytes=4096,
    )


def sequence_record(versions: list[int]) -> SequenceRecord:
    """Of a sequence whose tokens were sampled by `versions`, the first one just now."""
    counts = {version: versions.count(version) for version in versions}
    return SequenceRecord(time.monotonic() if versions else 0.0, list(counts.items()))


def update_record(reply: UpdateReply) -> UpdateRecord:
    """Of an update that ended as `reply` says."""
    return UpdateRecord(
        update_id=reply.update_id,
        path=str(reply.path),
        staging=str(reply.staging),
        end=str(reply.state),
        version=reply.version,
        previous_version=reply.previous_version,
        commit_sequence=reply.commit_sequence,
        ended_at=1000.5,
        seconds=asdict(reply.seconds) | {"whole": 8.0},
        next_version=reply.version,
        num_tensors=reply.num_tensors,
        num_bytes=reply.num_bytes,
        num_aborted=reply.num_aborted,
    )
