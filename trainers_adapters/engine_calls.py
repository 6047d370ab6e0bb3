"""Requests about the engine itself (Rollout service), and how their answers are read. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_engine.v1 import rollout_pb2 as pb
from trainers_adapters.calls import (
    DEFAULT_TIMEOUT_S,
    WORK_TIMEOUT_S,
    Stream,
    Unary,
    as_list,
    enum_words,
    number_of,
)
from trainers_adapters.results import AdapterState, EngineInfo, EngineState, Resumed, UpdateSummary

PAUSE_MODES = enum_words(pb.PauseMode, "PAUSE_MODE_", "")[0]
MEMORY_TAGS, MEMORY_TAG_WORDS = enum_words(pb.MemoryTag, "MEMORY_TAG_", "")
SERVING_STATUSES = enum_words(pb.ServingStatus, "SERVING_STATUS_", "unknown")[1]


def pause(mode: str = "keep", *, timeout_s: float = WORK_TIMEOUT_S) -> Unary[int]:
    """Stop forward passes until resume(); gives the number of frozen sequences.

    mode: keep, abort, wait (let running sequences finish) or retract (free their pages).
    """
    request = pb.PauseGenerationRequest(mode=number_of(mode, PAUSE_MODES, "mode"))  # type: ignore[arg-type]
    return Unary("PauseGeneration", request, lambda response: int(response.num_running), timeout_s)


def resume(*, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[int]:
    """Undo pause(); gives the live weight version. On a running engine it changes nothing."""
    return Unary("ContinueGeneration", pb.ContinueGenerationRequest(), _version, timeout_s, idempotent=True)


def flush_cache(*, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[int]:
    """Drop the prefix cache; gives the number of pages. BUSY while requests run."""
    request = pb.FlushCacheRequest()
    return Unary("FlushCache", request, lambda r: int(r.num_pages), timeout_s, idempotent=True)


def release_memory(tags: str | Sequence[str] = (), *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[int]:
    """Give memory back by tag (weights, kv_cache, graphs; none means all); gives the bytes."""
    request = pb.ReleaseMemoryOccupationRequest(tags=_tags(tags))  # type: ignore[arg-type]
    return Unary("ReleaseMemoryOccupation", request, lambda r: int(r.released_bytes), timeout_s)


def resume_memory(tags: str | Sequence[str] = (), *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[Resumed]:
    """Take released memory again, at the same addresses."""
    request = pb.ResumeMemoryOccupationRequest(tags=_tags(tags))  # type: ignore[arg-type]
    return Unary(
        "ResumeMemoryOccupation", request, lambda r: Resumed(r.resumed_bytes, r.needs_update), timeout_s
    )


def info(*, timeout_s: float = DEFAULT_TIMEOUT_S) -> Unary[EngineInfo]:
    """What the engine is: its model, configuration and memory."""
    return Unary("GetEngineInfo", pb.GetEngineInfoRequest(), _parse_info, timeout_s, idempotent=True)


def watch(*, timeout_s: float | None = None) -> Stream[EngineState]:
    """The engine's state: once at once, then on each change."""
    return Stream("WatchEngine", pb.WatchEngineRequest(), _parse_state, timeout_s)


def _version(response: Any) -> int:
    return int(response.weight_version)


def _tags(tags: str | Sequence[str]) -> list[int]:
    return [number_of(tag, MEMORY_TAGS, "memory tag") for tag in as_list(tags)]


def _parse_state(message: pb.EngineState) -> EngineState:
    return EngineState(
        status=SERVING_STATUSES[message.status],
        released_tags=[MEMORY_TAG_WORDS[tag] for tag in message.released_tags],
        adapters=[AdapterState(**_same_fields(held, AdapterState, set())) for held in message.adapters],
        **_same_fields(message, EngineState, {"status", "released_tags", "adapters"}),
    )


def _parse_info(message: pb.GetEngineInfoResponse) -> EngineInfo:
    nested = {"eos_token_ids", "kv_capacity", "forward_counts", "state", "recent_updates"}
    return EngineInfo(
        eos_token_ids=list(message.eos_token_ids),
        kv_capacity=_numbers(message.kv_capacity),
        forward_counts=_numbers(message.forward_counts),
        state=_parse_state(message.state),
        recent_updates=tuple(_parse_update(update) for update in message.recent_updates),
        **_same_fields(message, EngineInfo, nested),
    )


def _parse_update(message: pb.UpdateSummary) -> UpdateSummary:
    return UpdateSummary(seconds=dict(message.seconds), **_same_fields(message, UpdateSummary, {"seconds"}))


def _same_fields(message: Any, result: Any, without: set[str]) -> dict[str, Any]:
    """Fields that the message and the dataclass call the same."""
    return {name: getattr(message, name) for name in result.__slots__ if name not in without}


def _numbers(message: Any) -> dict[str, int]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
