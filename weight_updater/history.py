"""How past updates ended, for calls that come late or twice."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.requests import UpdateReply

MAX_UPDATES = 64
"""Updates of each kind of end that are remembered; the oldest goes first."""

T = TypeVar("T")


class History:
    """Ends of updates by id."""

    def __init__(self) -> None:
        self._committed: OrderedDict[str, UpdateReply] = OrderedDict()
        self._ended: OrderedDict[str, UpdateError] = OrderedDict()

    def committed(self, update_id: str) -> UpdateReply | None:
        """The reply of a committed update."""
        return self._committed.get(update_id)

    def add_committed(self, update_id: str, reply: UpdateReply) -> None:
        _remember(self._committed, update_id, reply)

    def add_ended(self, update_id: str, error: UpdateError) -> None:
        _remember(self._ended, update_id, error.again())

    def begins_again(self, update_id: str) -> None:
        """An id that ended without a commit is in use again."""
        self._ended.pop(update_id, None)

    def end_of(self, update_id: str) -> UpdateError:
        """What ended an update that is not open any more."""
        ended = self._ended.get(update_id)
        return self.not_open(update_id) if ended is None else ended.again()

    def not_open(self, update_id: str) -> UpdateRefused:
        """The refusal of a call for an update that is not open."""
        reply, error = self._committed.get(update_id), self._ended.get(update_id)
        if reply is not None:
            return UpdateRefused(
                Reason.WRONG_STATE, f"update {update_id} has committed already, as version {reply.version}"
            )
        if error is not None:
            return UpdateRefused(Reason.UNKNOWN_UPDATE, f"update {update_id} has ended: {error.message}")
        return UpdateRefused(Reason.UNKNOWN_UPDATE, f"no update {update_id!r} is open; begin one first")


def _remember(ends: OrderedDict[str, T], update_id: str, end: T) -> None:
    ends[update_id] = end
    ends.move_to_end(update_id)
    while len(ends) > MAX_UPDATES:
        ends.popitem(last=False)
