"""What may be true after a round, and the ledger of which version stood for which weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.faults.rounds import Round
from tests.faults.weights import base_of, greedy_tokens, load_model, weights_of, write_into
from weight_updater.checksum import checksum

if TYPE_CHECKING:
    from tests.faults.adapters import Adapters
    from tests.faults.strikes import Outcome


class Ledger:
    """Versions and their weights; commit sequences and their versions, in their order."""

    def __init__(self, model_dir: Path) -> None:
        self._model = load_model(model_dir)
        self._base = base_of(self._model)
        self._seeds: dict[int, int] = {}
        self._kept: dict[int, tuple[dict[str, int], list[int]]] = {}
        self._version_of: dict[int, int] = {}  # commit sequence -> version, of this engine's life
        self._logprobs: dict[int, list[float]] = {}  # version -> of its tokens
        self._sequence = -1
        self.highest = 0
        self.live = 0
        self.restart(0)

    def restart(self, version: int) -> None:
        """An engine starts with the base weights under `version`."""
        self._seeds[version] = 0
        self._kept.pop(version, None)
        self._logprobs.clear()
        self._version_of.clear()
        self._sequence = -1
        self.live = self.highest = version

    def expect(self, version: int, seed: int) -> int:
        """An update of this version would bring these weights."""
        self._seeds[version] = seed
        self.highest = max(self.highest, version)
        return version

    def observe(self, state) -> bool:
        """What the engine says about itself; its commit sequence never goes back. Whether it went on."""
        assert state.commit_sequence >= self._sequence, "the commit sequence went back"
        moved = state.commit_sequence != self._sequence
        self._sequence = state.commit_sequence
        self.note(state.commit_sequence, state.weight_version)
        assert state.weight_version >= self.live or self._rollback_asked, "the version went back by itself"
        self._rollback_asked = False
        self.live = state.weight_version
        return moved

    _rollback_asked = False

    def rolled_back(self, reply) -> None:
        self._rollback_asked = True
        self.note(reply.commit_sequence, reply.version)

    def note(self, sequence: int, version: int) -> None:
        """One commit sequence has one version, whoever says so."""
        known = self._version_of.setdefault(sequence, version)
        assert known == version, f"commit {sequence} was version {known} and is {version}"

    def seed(self, version: int) -> int:
        """Versions of one seed have the same bytes."""
        return self._seeds[version]

    def same_bits(self, version: int, logprobs: list[float]) -> None:
        """A version's log-probabilities of its greedy tokens, alone on the engine, never change by a bit."""
        known = self._logprobs.setdefault(version, logprobs)
        assert known == logprobs, f"version {version} computed {known} and computes {logprobs}"

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        return weights_of(self._base, self._seeds[version])

    def checksums(self, version: int) -> dict[str, int]:
        return self._look(version)[0]

    def tokens(self, version: int) -> list[int]:
        """The first greedy tokens of the reference model with this version's weights."""
        return self._look(version)[1]

    def _look(self, version: int) -> tuple[dict[str, int], list[int]]:
        if version not in self._kept:
            weights = self.weights(version)
            write_into(self._model, weights)
            sums = {name: checksum(tensor) for name, tensor in weights.items()}
            self._kept[version] = sums, greedy_tokens(self._model)
            while len(self._kept) > 8:
                del self._kept[next(iter(self._kept))]
        return self._kept[version]


def allowed(round_: Round, plan: dict, outcome: Outcome, moved: bool) -> set[str]:
    """old, new, torn: which of them the engine may be after this round. An adapter is never torn, and old
    where none is held.
    """
    if outcome.rolled_back or outcome.removed == plan["version"]:
        return {"old"}
    ended = outcome.ended.get("ended")
    if round_.path == "adopt":
        return _allowed_adopted(round_, outcome, moved, ended)
    at_once = plan["form"] == "one call" and round_.stage == "transfer"  # it may not have begun yet
    if round_.strike in ("new base", "same base"):
        if at_once:
            return {"new"} if ended == "committed" else {"old"}
        too_early = round_.strike == "new base" and round_.stage in ("start", "staging")
        return {"old"} if too_early else {"new"}
    if round_.strike == "kill owner" and round_.stage != "committed":
        in_time = ended == "committed" and (round_.passes or at_once)
        return {"new"} if in_time else {"old"}
    if round_.strike == "full":
        return {"old"}
    if ended == "committed":
        return {"new"}
    if round_.strike in ("none", "kill client", "slow read", "remove adapter"):
        return {"new"}  # nothing that an update would notice
    may_be = {"old"}
    if round_.stage == "committed":
        return {"new"}
    if round_.stage == "commit" or (at_once and round_.strike != "read error"):
        may_be |= {"new"}
    if round_.passes and round_.strike in ("close channel", "kill trainer"):
        may_be |= {"new"}  # it came late, when the commit was asked for already, and nobody heard the reply
    if round_.strike == "stop engine":
        may_be |= {"new"}
    if round_.path == "tensor" and round_.strike == "close channel" and round_.stage == "begun":
        may_be |= {"torn"} if round_.staging == "none" else set()  # its streams have channels of their own
    writes = round_.staging == "none" and round_.stage in ("transfer", "sent", "prepared", "commit")
    stalled = round_.strike in ("stop trainer", "stop engine") and ended == "refused"  # later, by its lease
    if writes or (round_.staging == "none" and stalled):
        may_be |= {"torn"}
    return may_be


def _allowed_adopted(round_: Round, outcome: Outcome, moved: bool, ended: str | None) -> set[str]:
    """The engine lives on the trainer's memory: what the trainer loses, it loses."""
    committed = ended == "committed" or round_.stage == "committed"
    if outcome.trainer_lost:
        if moved or committed:
            return {"torn"}
        return {"old", "torn"} if round_.stage == "commit" else {"old"}
    if ended == "committed":
        return {"new"}
    return {"old", "torn"} if moved else {"old"}


def check_records(
    round_: Round,
    plan: dict,
    outcome: Outcome,
    records: list[dict[str, Any]],
    ledger: Ledger,
    adapters: Adapters,
) -> None:
    """Every token's versions were live, in the order of the commits; every error was asked for."""
    last, last_of_adapter = -1, 0
    for record in records:
        for _, version, sequence, adapter, adapter_version in record["spans"]:
            ledger.note(sequence, version)
            assert sequence >= last, f"a token of commit {sequence} came after one of {last}: {record}"
            last = sequence
            assert adapter == record["adapter"], record
            if adapter:
                assert adapter_version >= last_of_adapter, f"after version {last_of_adapter}: {record}"
                last_of_adapter = adapter_version
        seen = {(version, adapter_version) for _, version, _, _, adapter_version in record["spans"]}
        if len(seen) == 1 and record["tokens"]:
            ((version, adapter_version),) = seen
            expected = (
                adapters.tokens(adapter_version, version) if adapter_version else ledger.tokens(version)
            )
            assert record["tokens"][: len(expected)] == expected[: len(record["tokens"])], record
        problem = record["error"] or (record["finish"] if record["finish"] in ("error", "abort") else "")
        assert not problem or _asked_for(problem, record["adapter"], round_, plan, outcome), (
            f"{problem}: {record} {plan} {outcome}"
        )


def _asked_for(problem: str, adapter: str, round_: Round, plan: dict, outcome: Outcome) -> bool:
    if outcome.engine_lost or outcome.owner_lost:
        return True
    if adapter and "ADAPTER_STALE" in problem:
        return outcome.base_moved
    if round_.kind == "adapter":
        if not adapter:
            return False  # an adapter's update concerns those that use it
        if "UNKNOWN_ADAPTER" in problem:
            return bool(outcome.removed) or not plan["held"]
        return problem == "abort" and (plan["inflight"] == "abort" or bool(outcome.removed))
    if problem == "abort":
        return plan["inflight"] == "abort"
    return round_.staging == "none"
