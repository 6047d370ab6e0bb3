"""What the front logs about its engine: how updates end, and when it stops or starts to serve."""

from __future__ import annotations

from rollout_engine import messages as m
from rollout_engine.logs import get_log
from rollout_engine.records import UpdateRecord

log = get_log(__name__)


def log_update(record: UpdateRecord) -> None:
    """One line for an update that has ended."""
    fields = {
        "update_id": record.update_id,
        "path": record.path,
        "staging": record.staging,
        "version": record.version,
    }
    if record.adapter:
        fields |= {"adapter": record.adapter, "adapter_version": record.adapter_version}
    if record.end in ("committed", "rolled_back"):
        seconds = {f"{stage}_s": round(value, 6) for stage, value in record.seconds.items()}
        log.info(
            f"update_{record.end}",
            **fields,
            previous_version=record.previous_version,
            commit_sequence=record.commit_sequence,
            num_tensors=record.num_tensors,
            num_bytes=record.num_bytes,
            **seconds,
        )
        return
    fields |= {"next_version": record.next_version, "reason": record.reason, "error": record.message}
    if record.end == "torn":
        log.error("update_torn", **fields)
    else:
        log.warning("update_refused", **fields)


class StateJournal:
    """Logs changes of the engine's state. Pauses by an update are its own business, and no change."""

    def __init__(self) -> None:
        self._known = "serving"

    def see(self, snapshot: m.Snapshot) -> None:
        """Look at a snapshot; those of a state that is known say nothing."""
        state = snapshot.status
        if state == "paused" and snapshot.paused_by == "update":
            return
        if state == self._known:
            return
        self._known = state
        fields = {"version": snapshot.weight_version, "commit_sequence": snapshot.commit_sequence}
        if state == "not_serving":
            log.warning("not_serving", **fields, reason=snapshot.reason)
        else:
            log.info("generation_paused" if state == "paused" else "serving_again", **fields)
