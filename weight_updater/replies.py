"""What is told of an update: the same fields for every path."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from weight_updater.arena import Arena
from weight_updater.buckets import bucket_size
from weight_updater.checksum import fold
from weight_updater.commit import Done
from weight_updater.open_update import OpenUpdate
from weight_updater.plan import Plan
from weight_updater.requests import (
    BeginReply,
    BeginUpdate,
    Path,
    StageSeconds,
    Staging,
    UpdateReply,
    UpdateState,
)

if TYPE_CHECKING:
    from weight_updater.live import LiveWeights


def begun(
    request: BeginUpdate,
    plan: Plan,
    digest: str,
    staging: Staging,
    next_version: int,
    lease_s: float,
    live: LiveWeights,
    arena: Arena,
) -> BeginReply:
    """What was agreed.

    Raises:
        UpdateRefused (INVALID_UPDATE): an impossible size of buckets, on any path.
    """
    bucket_bytes = bucket_size(request.bucket_bytes)
    distributed = request.path is Path.DISTRIBUTED
    return BeginReply(
        update_id=request.update_id or secrets.token_hex(8),
        version=live.version,
        commit_sequence=live.commit_sequence,
        next_version=next_version,
        manifest_digest=digest,
        staging=staging,
        total_bytes=plan.total_bytes,
        num_buckets=-(-plan.packed_bytes // bucket_bytes) if distributed else 0,
        bucket_bytes=bucket_bytes if distributed else 0,
        unmatched=plan.unmatched,
        arena_bytes=arena.nbytes,
        lease_s=lease_s,
    )


def report(update: OpenUpdate, version: int, commit_sequence: int) -> UpdateReply:
    """An update that has not committed."""
    sink, plan = update.sink, update.plan
    num_needed, num_applied = sink.num_waiting()
    reply = UpdateReply(
        update_id=update.update_id,
        state=update.state,
        version=version,
        previous_version=version,
        commit_sequence=commit_sequence,
        path=update.path,
        staging=update.staging,
        num_tensors=len(plan.applied) - num_applied,
        num_bytes=sink.received_bytes,
        num_changed=update.num_changed,
        unmatched=plan.unmatched,
        seconds=StageSeconds(transfer=update.transfer.seconds, verify=update.verify_s),
        gb_per_s=_gb_per_s(sink.received_bytes, update.transfer.seconds),
        verified=update.verified and update.has_checksums,
        received_checksum=0 if num_needed else received_checksum(update),
        warnings=_warnings(update),
        extra_bytes=update.extra_bytes,
    )
    held = 0 if update.adapter is None else update.adapter.previous_version
    return _of_adapter(reply, update, held)


def committed(
    update: OpenUpdate,
    done: Done,
    *,
    version: int,
    previous_version: int,
    commit_sequence: int,
    received: int,
    live: int,
) -> UpdateReply:
    """An update that has committed. seconds.pause is the commit's own time; the engine knows more.

    received: its `received_checksum`. live: one checksum over all slots; 0 if it is not known.
    """
    sink, plan = update.sink, update.plan
    reply = UpdateReply(
        update_id=update.update_id,
        state=UpdateState.COMMITTED,
        version=version,
        previous_version=previous_version,
        commit_sequence=commit_sequence,
        path=update.path,
        staging=update.staging,
        num_tensors=len(plan.applied),
        num_bytes=sink.received_bytes,
        num_changed=update.num_changed,
        unmatched=plan.unmatched,
        seconds=_seconds(done, update.transfer.seconds, update.verify_s),
        gb_per_s=_gb_per_s(sink.received_bytes, update.transfer.seconds + done.seconds),
        verified=update.has_checksums,
        received_checksum=received,
        live_checksum=0 if update.request.skip_checksums else live,
        graphs_kept=done.graphs_kept,
        graphs_recaptured=done.graphs_recaptured,
        graphs_reason=done.graphs_reason,
        warnings=_warnings(update),
        extra_bytes=update.extra_bytes,
    )
    return _of_adapter(reply, update, update.next_version)


def _of_adapter(reply: UpdateReply, update: OpenUpdate, version: int) -> UpdateReply:
    """The reply with the adapter that the update is of, if it is of one, and its version that is live."""
    if update.adapter is None:
        return reply
    return replace(
        reply,
        adapter=update.adapter.name,
        adapter_version=version,
        previous_adapter_version=update.adapter.previous_version,
    )


def rolled_back(
    kept: UpdateReply, done: Done, *, version: int, previous_version: int, commit_sequence: int, live: int
) -> UpdateReply:
    """The update whose reply was `kept` was undone by an exchange."""
    return UpdateReply(
        update_id=kept.update_id,
        state=UpdateState.ROLLED_BACK,
        version=version,
        previous_version=previous_version,
        commit_sequence=commit_sequence,
        path=kept.path,
        staging=kept.staging,
        num_tensors=kept.num_tensors,
        num_bytes=0,
        num_changed=kept.num_changed,
        seconds=_seconds(done, 0.0, 0.0),
        live_checksum=live,
        graphs_kept=done.graphs_kept,
        graphs_recaptured=done.graphs_recaptured,
        graphs_reason=done.graphs_reason,
    )


def received_checksum(update: OpenUpdate) -> int:
    """One checksum over what arrived, by the names of the slots that it was written to (a tied name counts
    as its target's, once): of a full update without casts, the same as that of all that is live. 0 without
    checksums.
    """
    if update.request.skip_checksums:
        return 0
    values = update.sink.received_checksums(update.plan.applied)
    return fold([values[at] for at in update.plan.by_name])


def _seconds(done: Done, transfer_s: float, verify_s: float) -> StageSeconds:
    return StageSeconds(
        transfer=transfer_s,
        verify=verify_s + done.compare_s,
        pause=done.seconds,
        write=done.write_s,
        finalise=done.finalise_s,
        recapture=done.recapture_s,
    )


def _gb_per_s(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / 1e9 if seconds else 0.0


def _warnings(update: OpenUpdate) -> tuple[str, ...]:
    spec = update.request.adapter
    unproven = (
        (f"nothing says which base weights adapter {spec.name} was trained on, so they were not compared",)
        if spec is not None and spec.base_checksum is None
        else ()
    )
    return unproven + _about_checksums(update)


def _about_checksums(update: OpenUpdate) -> tuple[str, ...]:
    if update.request.skip_checksums or update.has_checksums:
        return ()
    source = "the files carry" if update.path is Path.DISK else "the manifest carries"
    return (f"{source} no checksum for some tensors, so nothing shows that they arrived as they were sent",)
