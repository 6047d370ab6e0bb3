"""What can go wrong with a request, named for the caller.

Errors of weight updates are in weight_updater/errors.py; both kinds carry a `reason`, and only
server/status.py turns reasons into status codes.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a request was refused."""

    INVALID_REQUEST = "INVALID_REQUEST"  # a field that can never be right
    EMPTY_PROMPT = "EMPTY_PROMPT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"  # prompt (or prompt + max_tokens) beyond the context length
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE"
    EXCEEDS_KV_POOL = "EXCEEDS_KV_POOL"  # would need more pages than the whole pool has
    DUPLICATE_REQUEST = "DUPLICATE_REQUEST"  # request_id of a live request
    VERSION_TOO_OLD = "VERSION_TOO_OLD"  # min_version is above the live version
    UNKNOWN_ADAPTER = "UNKNOWN_ADAPTER"  # no adapter of this name is held
    ADAPTER_STALE = "ADAPTER_STALE"  # it was pushed over other base weights than those that are live
    NOT_SERVING = "NOT_SERVING"  # torn weights, or the trainer's memory is gone
    ASLEEP = "ASLEEP"  # released memory
    BUSY = "BUSY"  # needs an idle engine
    QUEUE_FULL = "QUEUE_FULL"
    TOO_MANY_STREAMS = "TOO_MANY_STREAMS"  # as many calls of this kind are open as may be
    NO_TOKENIZER = "NO_TOKENIZER"  # text asked for, but the model directory has no tokenizer.json
    UNKNOWN_NAME = "UNKNOWN_NAME"  # no such weight
    MODEL_INVALID = "MODEL_INVALID"  # a model directory that cannot be served
    UNAUTHENTICATED = "UNAUTHENTICATED"
    ENGINE_DEAD = "ENGINE_DEAD"
    DEADLINE = "DEADLINE"
    INTERNAL = "INTERNAL"  # a bug of ours


class EngineError(Exception):
    """A refused request.

    Args:
        reason: a stable, machine-readable word.
        message: what happened, to which input, and what to do.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        # Names of files may hold halves of surrogate pairs, which no message can.
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.reason = reason
        self.message = message


class ConfigError(Exception):
    """A configuration that cannot be used; the message names the key and what it may be."""
