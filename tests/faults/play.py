"""Plays a round: sets the trainer going, strikes where it stops, and looks at what is left."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field

from tests.faults.nursery import Forked
from tests.faults.rounds import Round
from tests.faults.stand import LEASE_S, Stand, until
from tests.faults.verdict import Ledger, allowed, check_records
from tests.faults.weights import NUM_GREEDY, PROMPT
from tests.wire.trainer import Named
from trainers_adapters import TensorStream, push_weights

STALL_S = 1.5 * LEASE_S
SILENCED = ("kill trainer", "stop trainer", "close channel", "stop engine")
"""After these the lease ends the update, or may; in other rounds it is too long to end one by accident."""


@dataclass
class Outcome:
    """What was seen in a round.

    stopped: the trainer came to the stage where it was to be struck. ended: what it reported last, if it
    lived to do so.
    """

    stopped: bool = False
    ended: dict = field(default_factory=dict)
    engine_lost: bool = False
    rolled_back: bool = False
    trainer_lost: bool = False


class Player:
    """Plays rounds on one stand, and knows which weights each version stands for."""

    def __init__(self, stand: Stand, ledger: Ledger) -> None:
        self._stand, self._ledger = stand, ledger

    def warm_up(self) -> None:
        """Serve, update by every path once, and take the baseline of what may be held."""
        for path in ("distributed", "disk", "tensor", "segment", "ipc"):
            self.play(Round(path, "host", "committed", "none", 7), check=False)
        self._stand.take_baseline()

    def log(self) -> str:
        """The end of what the processes have logged."""
        return self._stand.nursery.log.read_text()[-4000:]

    def play(self, round_: Round, *, check: bool = True) -> Outcome:
        """One round.

        Raises:
            AssertionError: what did not hold.
        """
        rng = random.Random(round_.seed)
        plan = self._plan(round_, rng)
        old = self._ledger.live
        new = self._ledger.expect(plan["version"], plan["seed"])
        outcome = Outcome()
        if round_.path == "disk" and round_.stage == "transfer":
            slow = round_.strike != "read error"
            self._stand.nursery.arm("slow" if slow else "error", rng.randint(1, 3), 60)
        client = self._stand.nursery.fork("client", address=self._stand.address, seed=round_.seed)
        trainer = self._stand.nursery.fork("trainer", **plan)
        try:
            moved = self._watch(round_, trainer, client, outcome, rng)
            if moved:
                old = self._ledger.expect(moved, plan["seed"] + 1)
            self._end(round_, plan, trainer, client, outcome, old, new, moved)
        finally:
            trainer.close()
            client.close()
            self._stand.nursery.arm("", 0, 0)
        if outcome.engine_lost:
            self._replace(round_)
        if check:
            self._stand.check_given_back()
        return outcome

    # ------------------------------------------------------------ before and during the strike

    def _plan(self, round_: Round, rng: random.Random) -> dict:
        forms = ["steps"] * 3
        if round_.stage != "prepared":
            forms += ["push"]
        if round_.stage in ("start", "staging", "transfer", "committed") and round_.path != "distributed":
            forms += ["one call"]
        full = {"disk": ["file", "fsync"]}.get(round_.path, ["memory"])
        return {
            "address": self._stand.address,
            "path": round_.path,
            "staging": round_.staging,
            "form": "steps" if round_.path == "adopt" else rng.choice(forms),
            "stage": round_.stage,
            "at": rng.randrange(20),
            "seed": round_.seed,
            "inflight": rng.choice(["wait", "abort", "keep", "recompute"]),
            "keep_previous": round_.strike == "roll back",
            "second": round_.path == "adopt" and rng.random() < 0.5,
            "full": rng.choice(full) if round_.strike == "full" else "",
            "directory": str(self._stand.work_dir / "disk"),
            "version": self._ledger.highest + rng.randint(2, 4),
            "lease_s": LEASE_S if round_.strike in SILENCED else 20.0,
        }

    def _watch(
        self, round_: Round, trainer: Forked, client: Forked, outcome: Outcome, rng: random.Random
    ) -> int:
        """Until the trainer has ended or was struck; returns the version of its first adoption."""
        moved = 0
        delay = rng.random() * 0.005
        while (message := trainer.hear(30.0)) is not None:
            if "moved" in message:
                moved = message["moved"]
            elif "at" in message:
                outcome.stopped = True
                if round_.passes:
                    time.sleep(delay + (0.02 if round_.path == "disk" and round_.stage != "commit" else 0))
                self._strike(round_, trainer, client, outcome)
                if outcome.trainer_lost or outcome.engine_lost:
                    break
            else:
                outcome.ended = message
                break
        assert outcome.ended or outcome.trainer_lost or outcome.engine_lost, (
            f"the trainer said nothing more:\n{self._stand.nursery.log.read_text()[-3000:]}"
        )
        return moved

    def _strike(self, round_: Round, trainer: Forked, client: Forked, outcome: Outcome) -> None:
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
                os.kill(pid, signal.SIGKILL)
        elif strike == "kill receivers":
            for pid in stand.nursery.children().get("receiver", ()):
                os.kill(pid, signal.SIGKILL)
        elif strike == "roll back":
            reply = stand.weights.rollback()
            self._ledger.rolled_back(reply)
            outcome.rolled_back = True
        if not round_.passes and strike != "close channel":
            trainer.say("go")

    # ------------------------------------------------------------ after it

    def _end(self, round_, plan, trainer, client, outcome, old, new, moved) -> None:
        records = self._records(client)
        if outcome.engine_lost:
            self._check_lost(round_)
            check_records(round_, plan, outcome, records, self._ledger)
            return
        stand = self._stand
        if outcome.trainer_lost:
            trainer.close()
        stand.until_quiet(20.0)
        if round_.path == "adopt" and outcome.trainer_lost:
            time.sleep(0.3)  # the owner is looked after now and then
        state = stand.state()
        verdict = "torn"
        if state.status == "serving":
            verdict = self._check_serves(old, new)
        else:
            assert state.status == "not_serving"
            assert state.not_serving_reason
            refusal = self._stand.refusal()
            assert refusal == "NOT_SERVING", f"{refusal!r} after {state}"
        permitted = allowed(round_, plan, outcome, bool(moved))
        assert verdict in permitted, (
            f"the engine is {verdict}, may be {permitted}: {state.not_serving_reason!r}; {outcome}; {plan}"
        )
        self._ledger.observe(state)
        check_records(round_, plan, outcome, records, self._ledger)
        if verdict == "torn" or round_.path == "adopt":
            self._recover()
        trainer.say("leave")
        if not outcome.trainer_lost:
            code = trainer.wait(15)
            if code is None:
                trainer.signal(signal.SIGUSR1)
                time.sleep(0.3)
            assert code == 0, f"the trainer ended with {code}:\n{stand.nursery.log.read_text()[-3000:]}"

    def _records(self, client: Forked) -> list[dict]:
        client.say("stop")
        records = []
        while (record := client.hear(25.0)) is not None:
            records.append(record)
        return records

    def _check_serves(self, old: int, new: int) -> str:
        """Exactly one version's weights under its label, and its tokens; says which."""
        live = self._stand.weights.checksums()
        if live.weight_version == new:
            verdict = "new"
        else:
            assert live.weight_version == old, f"version {live.weight_version}, not {old} or {new}"
            verdict = "old"
        expected = self._ledger.checksums(live.weight_version)
        wrong = [name for name, value in expected.items() if live.by_name.get(name) != value]
        assert not wrong, f"{wrong} are not version {live.weight_version}'s"
        assert set(live.by_name) == set(expected)
        (completion,) = self._stand.rollout.generate(
            PROMPT, max_tokens=NUM_GREEDY, temperature=0.0, ignore_eos=True, timeout_s=20.0
        )
        assert completion.token_ids == self._ledger.tokens(live.weight_version)
        assert completion.weight_versions == [live.weight_version] * NUM_GREEDY
        return verdict

    def _recover(self) -> None:
        """A full update makes the engine serve again."""
        version = self._ledger.highest + 1
        self._ledger.expect(version, version)
        source = Named(self._ledger.weights(version).items())
        stream = TensorStream(chunk_bytes=16384)
        report = push_weights(
            source, self._stand.weights, version, via=stream, inflight="abort", lease_s=20.0
        )
        assert report.version == version
        assert self._check_serves(version, version) == "new"
        self._ledger.observe(self._stand.state())

    def _check_lost(self, round_: Round) -> None:
        """A front without its engine says so; an engine without its front ends."""
        stand = self._stand
        if round_.strike == "kill engine":
            until(lambda: stand.state().status == "not_serving", "the front notices that its engine died")
            assert "SIGKILL" in stand.state().not_serving_reason
            assert stand.refusal() == "ENGINE_DEAD"
        else:
            stand.until_engine_ended()

    def _replace(self, round_: Round) -> None:
        """Another engine takes the place; it keeps requests out until it has what was committed."""
        stand = self._stand
        if round_.strike == "kill engine":
            stand.stop()
        else:
            stand.rollout.close()
            stand.weights.close()
            stand.front.close()
        until(
            lambda: "gloo_child" not in stand.nursery.children(), "the group children end with their engine"
        )
        lost = self._ledger.highest
        stand.start(version=lost, min_version=lost + 1)
        self._ledger.restart(lost)
        assert stand.rollout.info().weight_version == lost
        assert stand.refusal() == "VERSION_TOO_OLD"
        self._recover()
