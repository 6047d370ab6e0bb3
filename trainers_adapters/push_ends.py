"""How a push ends: what it raises, and what an engine's last reply must say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NoReturn

from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import PushError, RollsyncError
from weight_updater.errors import UpdateError
from weight_updater.requests import UpdateReply, UpdateState

COMMIT_RETRY_S = 10.0
"""Seconds for which a commit is sent again to an engine that does not answer."""
RETRY_PAUSE_S = 0.2
"""Between two attempts."""
ABORT_TIMEOUT_S = 10.0
"""Seconds that an engine may take to end the update of a push that failed."""


def is_unknown(error: RollsyncError) -> bool:
    """Whether the engine may have acted although the call failed."""
    return error.unreachable or error.reason == "DEADLINE"


def abort(clients: Iterable[WeightsClient], update_id: str) -> None:
    """Best effort: an engine that does not answer ends the update itself when its lease runs out."""
    for client in clients:
        with suppress(RollsyncError):
            client.abort(update_id, timeout_s=ABORT_TIMEOUT_S)


def fail(where: str, error: BaseException) -> NoReturn:
    """Raise a PushError for what failed before anything was committed; errors of other kinds as they are."""
    if isinstance(error, RollsyncError):
        code, reason, message = error.code, error.reason, error.message
    elif isinstance(error, UpdateError):
        code, reason, message = "ABORTED", str(error.reason), error.message
    else:
        raise error
    raise PushError(
        code, reason, f"{where}: {message} (nothing was committed; every engine keeps its version)"
    ) from error


def incomplete(
    version: int, replies: Mapping[str, UpdateReply], errors: Mapping[str, RollsyncError]
) -> NoReturn:
    """Raise a PushError that names the engines (addresses) that have surely committed, and the others."""
    laggards = ", ".join(f"{where} ({error})" for where, error in errors.items())
    error = next(iter(errors.values()))
    done = f"{len(replies)} of {len(replies) + len(errors)} engines"
    raise PushError(
        error.code,
        error.reason,
        f"version {version} is live on {done}, but not surely on {laggards}; keep those out "
        f"with min_version={version} and push again once they answer",
        version=version,
        committed=tuple(replies),
        laggards=tuple(errors),
    ) from error


def check_committed(where: str, reply: UpdateReply, next_version: int, *, verify: bool) -> None:
    """An engine that says it committed must say what.

    Args:
        next_version: that was to become live.
        verify: the bytes were to be compared with checksums.

    Raises:
        PushError (NOT_APPLIED): it says something else.
    """
    wrong = ""
    version = reply.brought_version
    if reply.state != UpdateState.COMMITTED or version != next_version:
        wrong = f"answered {reply.state} at version {version}, not committed at {next_version}"
    elif reply.num_tensors == 0:
        wrong = f"says that version {version} is live although it applied no tensor"
    elif verify and not reply.verified:
        wrong = f"committed version {version} without comparing checksums"
    if wrong:
        raise PushError("INTERNAL", "NOT_APPLIED", f"{where} {wrong}; do not trust its samples")
