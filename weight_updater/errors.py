"""What can go wrong with an update, named for the caller.

`reason` is a stable word that crosses processes and the wire; the edge (rollout_engine/server/status.py)
turns it into a status code. An update has exactly three ends: refused (nothing was written), torn
(something was), committed. `UpdateRefused` is the first, `WeightsTorn` the second.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Reason(StrEnum):
    """Why an update was refused or torn."""

    INVALID_UPDATE = "INVALID_UPDATE"  # a field that can never be right
    MANIFEST_MISMATCH = "MANIFEST_MISMATCH"  # names, shapes or dtypes do not fit the model
    MANIFEST_UNKNOWN = "MANIFEST_UNKNOWN"  # a digest that this engine has not seen
    STALE_VERSION = "STALE_VERSION"  # not larger than every version ever committed
    UPDATE_IN_PROGRESS = "UPDATE_IN_PROGRESS"  # another update is open
    UNKNOWN_UPDATE = "UNKNOWN_UPDATE"  # no such update is open (never was, ended, or its lease ran out)
    WRONG_STATE = "WRONG_STATE"  # the call does not fit the update's state
    INCOMPLETE = "INCOMPLETE"  # commit or prepare before every byte arrived
    BAD_CHUNK = "BAD_CHUNK"  # a chunk that overlaps, is misaligned or out of range
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"  # bytes that are not those the manifest promised
    NONFINITE = "NONFINITE"  # NaN or infinity in the new weights
    FILE_NOT_FOUND = "FILE_NOT_FOUND"  # a file that the index names, or the directory itself
    FILE_CORRUPT = "FILE_CORRUPT"  # a safetensors file that cannot be right
    PATH_FORBIDDEN = "PATH_FORBIDDEN"  # outside the configured roots
    MEMORY_UNAVAILABLE = "MEMORY_UNAVAILABLE"  # a segment or handle that cannot be opened, or is too small
    PEER_LOST = "PEER_LOST"  # the sender died or closed the connection
    TIMEOUT = "TIMEOUT"  # a deadline or a lease ran out
    GROUP_UNKNOWN = "GROUP_UNKNOWN"  # no process group of that name
    GROUP_EXISTS = "GROUP_EXISTS"  # a group of that name is already there
    NO_STAGING = "NO_STAGING"  # the staging asked for was not reserved, or does not fit the update
    NO_PREVIOUS = "NO_PREVIOUS"  # rollback without a kept version
    BASE_MISMATCH = "BASE_MISMATCH"  # an adapter was trained on other base weights than those that are live
    NO_ADAPTER_SLOT = "NO_ADAPTER_SLOT"  # as many adapters are held as the engine was started for
    NO_MEMORY = "NO_MEMORY"  # would need more memory than is there
    WOULD_MOVE = "WOULD_MOVE"  # recapture=never and an address would move
    PAUSED_WAIT = "PAUSED_WAIT"  # inflight=wait on a paused engine would never end
    ASLEEP = "ASLEEP"  # the weights' memory is released
    WRITE_FAILED = "WRITE_FAILED"  # a fault after the first write
    INTERNAL = "INTERNAL"  # a bug of ours


MAX_MESSAGE = 4000
"""Characters of an error's text. It is kept with the update's record, and may name what a file says."""


def _sendable(text: str) -> str:
    """Names of files, and of tensors in them, may be of any length, and hold halves of surrogate pairs, which
    no message can.
    """
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE - 3]}..."
    return text.encode(errors="backslashreplace").decode()


class UpdateError(Exception):
    """Base of all errors of an update.

    Args:
        reason: a stable, machine-readable word.
        message: what happened, to which tensor or file, and what to do.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        message = _sendable(message)
        super().__init__(message)
        self.reason = reason
        self.message = message

    def again(self) -> Self:
        """The same error, never raised. An error that was raised refers to the frames that it passed, and so
        to the memory they worked on: one that is kept for later must be kept like this.
        """
        return type(self)(self.reason, self.message)


class UpdateRefused(UpdateError):
    """Nothing was written; the old version serves on."""


class WeightsTorn(UpdateError):
    """Something was written; nothing may be generated until a full update commits."""
