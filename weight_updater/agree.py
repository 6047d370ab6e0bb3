"""Begin: what can be agreed, or refused, before a byte moves. Nothing here changes any state."""

from __future__ import annotations

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.plan import Plan
from weight_updater.requests import BeginUpdate, Inflight, Path, Recapture, Staging

MAX_VERSION = (1 << 64) - 1


def check_fields(request: BeginUpdate, *, paused: bool) -> None:
    """Refuse fields that contradict each other or can never be right.

    Raises:
        UpdateRefused: INVALID_UPDATE, NO_STAGING, PAUSED_WAIT.
    """
    invalid = [
        (request.num_engines < 1, f"num_engines is {request.num_engines}; it counts from 1"),
        (request.lease_s < 0, f"lease_s is {request.lease_s}; a lease cannot be negative"),
        (
            not 0 <= request.version <= MAX_VERSION,
            f"version is {request.version}; weight versions are 64-bit and not negative",
        ),
        (
            request.adopt and request.path is not Path.IPC,
            f"adopt shares memory, which only the ipc path can; this update says {request.path}",
        ),
        (
            request.adopt and request.partial,
            "an adopted arena is whole; adopt and partial exclude each other",
        ),
        (
            request.adopt and request.keep_previous,
            "adopt copies nothing, so nothing can be kept; leave keep_previous out",
        ),
        (
            request.adopt and request.staging not in (Staging.AUTO, Staging.NONE),
            f"adopt copies nothing, so nothing waits in staging={request.staging}; leave staging out",
        ),
        (
            request.keep_previous and request.staging is Staging.NONE,
            "keep_previous exchanges with the staging buffer, staging=none has none; use device or host",
        ),
    ]
    for wrong, text in invalid:
        if wrong:
            raise UpdateRefused(Reason.INVALID_UPDATE, text)
    if request.num_engines > 1 and (request.staging is Staging.NONE or request.adopt):
        what = "adopt" if request.adopt else "staging=none"
        raise UpdateRefused(
            Reason.NO_STAGING,
            f"{what} cannot wait for {request.num_engines} engines to agree; use device or host staging",
        )
    if paused and request.inflight is Inflight.WAIT:
        raise UpdateRefused(
            Reason.PAUSED_WAIT,
            "inflight=wait would wait for sequences that a paused engine never finishes; "
            "continue generation first, or say inflight=abort, keep or recompute",
        )


def check_adapter(request: BeginUpdate) -> None:
    """Refuse what an update of an adapter cannot be asked for.

    Raises:
        UpdateRefused (INVALID_UPDATE).
    """
    wrong = {
        "adopt": request.adopt,
        "partial": request.partial,
        "merged": request.merged,
        "keep_previous": request.keep_previous,
        "allow_nonfinite": request.allow_nonfinite,
        "staging=none": request.staging is Staging.NONE,
    }
    if asked := [name for name, given in wrong.items() if given]:
        raise UpdateRefused(
            Reason.INVALID_UPDATE,
            f"an adapter is pushed whole, waits in memory of its own, and replaces the one of its name; "
            f"leave {asked[0]} out",
        )


def next_version(asked: int, highest: int) -> int:
    """The version that a commit would bring; 0 asks for the next one.

    Raises:
        UpdateRefused (STALE_VERSION): not larger than every version ever committed.
    """
    version = asked or highest + 1
    if version <= highest:
        raise UpdateRefused(
            Reason.STALE_VERSION,
            f"version {version} is not larger than {highest}, the largest ever committed here; send "
            f"{highest + 1} or more, or 0 for the next one",
        )
    if version > MAX_VERSION:
        raise UpdateRefused(Reason.STALE_VERSION, f"there is no 64-bit version after {highest}")
    return version


def check_adoptable(plan: Plan) -> None:
    """Refuse to adopt tensors that would need a cast."""
    wrong = sorted(plan.casts)
    if wrong:
        spec = plan.manifest.tensor(wrong[0])
        more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
        raise UpdateRefused(
            Reason.MANIFEST_MISMATCH,
            f"{spec.name} is {spec.dtype}, the model's {plan.slot(wrong[0]).name} "
            f"is {plan.slot(wrong[0]).dtype}{more}; adopt shares memory and cannot cast",
        )


def check_move(request: BeginUpdate, num_storages: int, *, leaves_adopted: bool) -> None:
    """Refuse to move the weights if that was forbidden, or would have to be undone by an exchange."""
    what = "leaving the adopted arena" if leaves_adopted else "adopting an arena"
    if request.recapture is Recapture.NEVER:
        raise UpdateRefused(
            Reason.WOULD_MOVE,
            f"{what} moves all {num_storages} weights, and recapture=never forbids that",
        )
    if leaves_adopted and request.keep_previous:
        raise UpdateRefused(
            Reason.INVALID_UPDATE,
            "the live weights are an adopted arena, which is the trainer's; keep_previous cannot keep it",
        )
