"""Plays a round: sets the trainer going, has it struck where it stops, and looks at what is left."""

from __future__ import annotations

import random
import signal
import time

from tests.faults.adapters import STRUCK, Adapters
from tests.faults.nursery import Forked
from tests.faults.rounds import OTHERS, OWN, Round
from tests.faults.stand import LEASE_S, Stand, until
from tests.faults.strikes import Outcome, Striker
from tests.faults.verdict import Ledger, allowed, check_records
from tests.faults.weights import NUM_GREEDY, PROMPT

SILENCED = ("kill trainer", "stop trainer", "close channel", "stop engine")
"""After these the lease ends the update, or may, if it is open. In other rounds it is too long to end one by
accident, as a busy machine would.
"""

NOT_OPEN = ("start", "staging", "committed")
"""Stages at which no update is open that a lease could end."""
UNNOTICED = ("none", "kill client", *OTHERS)
"""These may take as long as they like while the engine waits for its trainer's next broadcast, and the update
commits all the same.
"""


class Player:
    """Plays rounds on one stand, and knows which weights each version stands for."""

    def __init__(self, stand: Stand, ledger: Ledger, adapters: Adapters) -> None:
        self._stand, self._ledger, self._adapters = stand, ledger, adapters
        self._striker = Striker(stand, ledger, adapters)

    def warm_up(self) -> None:
        """Serve, update by every path once, and take the baseline of what may be held."""
        self._adapters.begin()
        for path in ("distributed", "disk", "tensor", "segment", "ipc"):
            self.play(Round("base", path, "host", "committed", "none", 7), check=False)
        self.play(Round("adapter", "disk", OWN, "committed", "none", 7), check=False)
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
        if round_.strike == "kill owner":
            self._striker.lend()
        plan = self._plan(round_, rng)
        old, outcome = self._ledger.live, Outcome()
        read = rng.randint(1, 3) if round_.path == "disk" and round_.stage == "transfer" else 0
        if read:
            slow = round_.strike != "read error"
            self._stand.nursery.arm("slow" if slow else "error", read, 60)
        fork = self._stand.nursery.fork
        client = fork("client", address=self._stand.address, seed=round_.seed, adapter=STRUCK)
        trainer = fork("trainer", **{name: value for name, value in plan.items() if name != "held"})
        try:
            moved = self._watch(round_, plan, trainer, client, outcome, rng)
            if moved:
                old = self._ledger.expect(moved, plan["seed"] + 1)
            if round_.strike in ("slow read", "read error"):
                outcome.stopped = self._stand.nursery.num_reads() >= read
            self._end(round_, plan, trainer, client, outcome, old, moved)
        finally:
            trainer.close()
            client.close()
            if round_.strike == "kill owner":
                self._striker.owner.close()
            self._stand.nursery.arm("", 0, 0)
        if outcome.engine_lost:
            self._replace(round_)
        elif round_.kind == "adapter" or self._adapters.is_stale(STRUCK):
            self._adapters.push()
            self._adapters.check()
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
        plan = {
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
            "full_bytes": 100_000,
            "shard_bytes": 60_000 if "read" in round_.strike else 150_000 if round_.seed % 2 else 1 << 30,
            "directory": str(self._stand.work_dir / "disk"),
            "version": self._ledger.highest + rng.randint(2, 4),
            "lease_s": LEASE_S if round_.strike in SILENCED and round_.stage not in NOT_OPEN else 20.0,
            "receive_timeout_s": 20.0 if round_.strike in UNNOTICED else 1.5,
            "adapter": "",
            "base_seed": 0,
            "held": True,
        }
        if round_.kind == "base":
            self._ledger.expect(plan["version"], plan["seed"])
            return plan
        return plan | self._plan_of_adapter(plan, rng)

    def _plan_of_adapter(self, plan: dict, rng: random.Random) -> dict:
        """What is different for an adapter; now and then none is held that could be replaced."""
        if rng.random() < 0.25:
            assert self._adapters.remove() == self._adapters.live[STRUCK]
            self._adapters.live[STRUCK] = 0
        return {
            "staging": rng.choice(["auto", "host", "device"]),  # all of them mean its own
            "full_bytes": 3_000,
            "shard_bytes": plan["shard_bytes"] // 40,
            "version": self._adapters.expect(plan["seed"]),
            "adapter": STRUCK,
            "base_seed": self._ledger.seed(self._ledger.live),
            "held": bool(self._adapters.live[STRUCK]),
        }

    def _watch(
        self,
        round_: Round,
        plan: dict,
        trainer: Forked,
        client: Forked,
        outcome: Outcome,
        rng: random.Random,
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
                self._striker.strike(round_, plan, trainer, client, outcome)
                if outcome.trainer_lost or outcome.engine_lost:
                    break
            else:
                outcome.ended = message
                break
        assert outcome.ended or outcome.trainer_lost or outcome.engine_lost, (
            f"the trainer said nothing more:\n{self._stand.nursery.log.read_text()[-3000:]}"
        )
        return moved

    # ------------------------------------------------------------ after it

    def _end(self, round_, plan, trainer, client, outcome, old, moved) -> None:
        records = self._records(client)
        if outcome.engine_lost:
            self._check_lost(round_)
            check_records(round_, plan, outcome, records, self._ledger, self._adapters)
            return
        stand = self._stand
        if outcome.trainer_lost:
            trainer.close()
        stand.until_quiet(20.0)
        permitted = allowed(round_, plan, outcome, bool(moved))
        if outcome.owner_lost or self._lives_on_lost_memory(round_, plan, outcome, permitted):
            self._striker.until_owner_is_missed()
        state = stand.state()
        verdict = self._verdict(round_, plan, outcome, old, state)
        assert verdict in permitted, (
            f"the engine is {verdict}, may be {permitted}: {state.not_serving_reason!r}; {outcome}; {plan}"
        )
        if round_.strike == "new base" and verdict == "old":
            assert outcome.ended["reason"] in ("BASE_MISMATCH", "UPDATE_IN_PROGRESS"), outcome
        check_records(round_, plan, outcome, records, self._ledger, self._adapters)
        if verdict == "torn" or round_.path == "adopt" or outcome.owner_lost:
            self._recover(like=state.weight_version if outcome.owner_lost else 0)
            self._adapters.check()
        trainer.say("leave")
        if not outcome.trainer_lost:
            code = trainer.wait(15)
            if code is None:
                trainer.signal(signal.SIGUSR1)
                time.sleep(0.3)
            assert code == 0, f"the trainer ended with {code}:\n{stand.nursery.log.read_text()[-3000:]}"

    def _lives_on_lost_memory(self, round_: Round, plan: dict, outcome: Outcome, permitted: set[str]) -> bool:
        """Whether the engine adopted memory whose trainer is gone, as it notices now and then. No update is
        open any more: what has not committed by now never will.
        """
        if round_.path != "adopt" or not outcome.trainer_lost:
            return False
        return permitted == {"torn"} or self._stand.state().weight_version == plan["version"]

    def _verdict(self, round_: Round, plan: dict, outcome: Outcome, old: int, state) -> str:
        """old, new or torn, of what the round was to update. All else is checked to be as it was."""
        serves = state.status == "serving"
        if not serves:
            assert state.status == "not_serving"
            assert state.not_serving_reason
            refusal = self._stand.refusal()
            assert refusal == "NOT_SERVING", f"{refusal!r} after {state}"
        if round_.kind == "adapter":
            assert serves == (not outcome.owner_lost), state
            live = self._ledger.live  # what was pushed meanwhile, if anything
            if serves:
                self._check_serves(live, live)
            assert self._ledger.observe(state) == (live != old), "commits of base weights alone are counted"
            return self._adapters.observe(plan["version"], serves)
        verdict = self._check_serves(old, plan["version"]) if serves else "torn"
        outcome.base_moved = self._ledger.observe(state)
        assert self._adapters.observe(0, serves) == "old"
        return verdict

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
        self._stand.rollout.flush_cache()  # products of other heights round in other places
        (completion,) = self._stand.rollout.generate(
            PROMPT, max_tokens=NUM_GREEDY, temperature=0.0, ignore_eos=True, timeout_s=20.0
        )
        assert completion.token_ids == self._ledger.tokens(live.weight_version)
        assert completion.weight_versions == [live.weight_version] * NUM_GREEDY
        self._ledger.same_bits(live.weight_version, completion.logprobs)
        return verdict

    def _recover(self, like: int = 0) -> None:
        """A full update makes the engine serve again: of version `like`'s bytes, or of new ones."""
        version = self._ledger.highest + 1
        self._ledger.expect(version, self._ledger.seed(like) if like else version)
        self._striker.push(version, "abort")
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
        self._adapters.begin()
