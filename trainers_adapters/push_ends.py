"""How a push ends: what it raises, and what an engine's last reply must say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import PushError, RollsyncError
from weight_updater.errors import UpdateError
from weight_updater.requests import UpdateReply, UpdateState

COMMIT_RETRY_S = 10.0
"""Seconds for which a commit is sent again to an engine that does not answer."""
RETRY_PAUSE_S = 0.2
"""Between two attempts."""
ABORT_TIMEOUT_S = 10.0
"""Seconds that an engine may take to end the update of a push that failed, or to let go of what it shared."""


def is_unknown(error: RollsyncError) -> bool:
    """Whether the engine may have acted although the call failed."""
    return error.unreachable or error.reason == "DEADLINE"


def tell_all(
    clients: Sequence[WeightsClient], call: Callable[[WeightsClient], object]
) -> dict[str, RollsyncError]:
    """Make a call to every engine at once, each to its end.

    Returns:
        What failed, by address.
    """

    def failure(client: WeightsClient) -> RollsyncError | None:
        try:
            call(client)
        except RollsyncError as error:
            return error
        return None

    if len(clients) < 2:
        found = [failure(client) for client in clients]
    else:
        with ThreadPoolExecutor(len(clients), thread_name_prefix="ending") as threads:
            found = list(threads.map(failure, clients))
    return {client.address: error for client, error in zip(clients, found, strict=True) if error is not None}


def abort(clients: Sequence[WeightsClient], update_id: str) -> set[str]:
    """Best effort, on all at once; harmless where nothing is open.

    Returns:
        Addresses of engines that answered nothing. Such a one ends the update itself when its lease runs out.
    """
    failures = tell_all(clients, lambda client: client.abort(update_id, timeout_s=ABORT_TIMEOUT_S))
    return {where for where, error in failures.items() if is_unknown(error)}


def let_go(clients: Sequence[WeightsClient], update_id: str, errors: Mapping[str, RollsyncError]) -> None:
    """End the update on engines that did not take their commit, or it would keep them from the next push for
    as long as this one might have lasted. One that has not answered yet may be committing: it goes on.

    Args:
        errors: of the commits, by address.
    """
    behind = [client for client in clients if client.address in errors]
    abort([client for client in behind if errors[client.address].reason != "DEADLINE"], update_id)


def stop(
    clients: Sequence[WeightsClient],
    update_id: str,
    calls: Sequence[Future[Any]],
    running: set[Future[Any]],
    cancel: Callable[[], None] = lambda: None,
) -> set[Future[Any]]:
    """End an update everywhere, of which a step failed while others of its calls were under way.

    Args:
        calls: one to each of `clients`, in their order, and perhaps others, which `cancel` ends.
        running: those that had not ended when that step failed.
        cancel: what the trainer does itself.

    Returns:
        Calls to engines that answer nothing, not even an abort, which are not waited for: each ends at its
        deadline, or when its client is closed.
    """
    silent = abort(clients, update_id)  # ends the engines' side of what is still running
    cancel()  # and ours
    left = {
        call
        for client, call in zip(clients, calls, strict=False)
        if client.address in silent and not call.done()
    }
    wait(running - left)
    answering = [client for client in clients if client.address not in silent]
    if running and answering:
        abort(answering, update_id)  # a BeginUpdate may have come through meanwhile
    return left


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
