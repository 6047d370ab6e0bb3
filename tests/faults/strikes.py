"""Strikes: what is done to a trainer, an engine, a client or an update where a round has stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field

from tests.faults.adapters import STRUCK, Adapters
from tests.faults.nursery import Forked
from tests.faults.rounds import OTHERS, Round
from tests.faults.stand import LEASE_S, Stand, until
from tests.faults.verdict import Ledger
from tests.wire.trainer import Named
from trainers_adapters import IpcArena, PushError, push_weights

STALL_S = 1.5 * LEASE_S


@dataclass
class Outcome:
    """What was seen in a round.

    stopped: the trainer came to the stage where it was to be struck. ended: what it reported last, if it
    lived to do so. removed: the version of the adapter that was removed. base_moved: other base weights
    committed. owner_lost: the trainer whose memory the engine lived on is dead.
    """

    stopped: bool = False
    ended: dict = field(default_factory=dict)
    engine_lost: bool = False
    rolled_back: bool = False
    trainer_lost: bool = False
    removed: int = 0
    base_moved: bool = False
    owner_lost: bool = False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended since it was seen
        os.kill(pid, signal.SIGKILL)


class Striker:
    """Strikes on one stand."""

    def __init__(self, stand: Stand, ledger: Ledger, adapters: Adapters) -> None:
        self._stand, self._ledger, self._adapters = stand, ledger, adapters
        self.owner: Forked
        """Of the memory that the engine lives on, once it was lent some."""

    def lend(self) -> None:
        """Another trainer's memory becomes the engine's base weights, and an adapter is pushed over them."""
        version = self._ledger.highest + 1
        self._ledger.expect(version, version)
        plan = {"path": "adopt", "staging": "none", "form": "steps", "stage": "", "at": 0, "second": False}
        plan |= {
            "adapter": "",
            "base_seed": 0,
            "shard_bytes": 0,
            "full": "",
            "full_bytes": 0,
            "directory": "",
        }
        plan |= {
            "seed": version,
            "version": version,
            "inflight": "abort",
            "keep_previous": False,
            "lease_s": 20,
            "receive_timeout_s": 20.0,
        }
        self.owner = self._stand.nursery.fork("trainer", address=self._stand.address, **plan)
        ended = self.owner.hear(30.0)
        assert ended == {"ended": "committed", "reason": "", "version": version}
        self._ledger.observe(self._stand.state())
        self._adapters.push()
        self._adapters.check()

    def until_owner_is_missed(self) -> None:
        until(lambda: self._stand.state().status == "not_serving", "the engine misses its memory's owner")

    def strike(self, round_: Round, plan: dict, trainer: Forked, client: Forked, outcome: Outcome) -> None:
        """Do it, and let the trainer go on."""
        stand, strike = self._stand, round_.strike
        if strike == "kill trainer":
            trainer.kill()
            outcome.trainer_lost = True
        elif strike == "stop trainer":
            trainer.signal(signal.SIGSTOP)
            time.sleep(STALL_S)
            trainer.signal(signal.SIGCONT)
        elif strike == "close channel":
            trainer.say("close")
            outcome.trainer_lost = round_.path == "adopt"
        elif strike == "abort update":
            update = stand.state().open_update_id
            if update:
                stand.weights.abort(update)
        elif strike == "kill engine":
            os.kill(stand.engine_pid, signal.SIGKILL)
            outcome.engine_lost = True
        elif strike == "stop engine":
            os.kill(stand.engine_pid, signal.SIGSTOP)
            time.sleep(STALL_S)
            os.kill(stand.engine_pid, signal.SIGCONT)
        elif strike == "kill front":
            stand.front.kill()
            outcome.engine_lost = True
        elif strike == "kill client":
            client.kill()
        elif strike == "kill group":
            for pid in stand.nursery.children().get("gloo_child", ()):
                _kill(pid)
        elif strike == "kill receivers":
            for pid in stand.nursery.children().get("receiver", ()):
                _kill(pid)
        elif strike == "roll back":
            reply = stand.weights.rollback()
            self._ledger.rolled_back(reply)
            outcome.rolled_back = True
        elif strike == "kill owner":
            self.owner.kill()
            outcome.owner_lost = True
            if not round_.passes:
                self.until_owner_is_missed()
        elif strike in OTHERS:
            self._call(round_, plan, outcome)
        if not round_.passes and strike != "close channel":
            trainer.say("go")

    def _call(self, round_: Round, plan: dict, outcome: Outcome) -> None:
        """Somebody else's call beside an adapter's update; refused where an open update excludes it."""
        if round_.strike == "remove adapter":
            outcome.removed = done = self._adapters.remove()
            if done:
                self._adapters.live[STRUCK] = 0
        else:
            done = self._push_base(self._ledger.live if round_.strike == "same base" else 0)
            outcome.base_moved = done and round_.strike == "new base"
        if round_.stage in ("begun", "sent", "prepared"):
            assert not done, f"{round_.strike} went through while an update is open"
        elif not round_.passes and round_.stage != "transfer":
            assert done or (round_.strike == "remove adapter" and not plan["held"])

    def _push_base(self, like: int) -> bool:
        """Base weights of another label: with the bytes of version `like`, or others (0). False: refused, as
        an update is open.
        """
        version = self._ledger.highest + 1
        self._ledger.expect(version, self._ledger.seed(like) if like else version)
        try:
            self.push(version, "keep")
        except PushError as error:
            if error.reason != "UPDATE_IN_PROGRESS":
                raise
            return False
        self._ledger.live = version
        return True

    def push(self, version: int, inflight: str) -> None:
        """A version's base weights, in one piece."""
        source = Named(self._ledger.weights(version).items())
        weights = self._stand.weights
        with IpcArena() as arena:
            report = push_weights(source, weights, version, via=arena, inflight=inflight, lease_s=20.0)
        assert report.version == version
