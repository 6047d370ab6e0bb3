"""The adapters of a stand: what each version stood for, and what must be true of them after a round.

One is struck: pushed, replaced, removed. Another lies beside it, and nothing that happens to the first may
touch it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.faults.adapted import Adapted, Lies
from tests.faults.stand import Stand
from tests.faults.verdict import Ledger
from tests.faults.weights import NUM_GREEDY, PROMPT
from trainers_adapters import IpcArena, RollsyncError, push_weights

STRUCK, BESIDE = "struck", "beside"
MAX_ADAPTERS = 2
"""As many as there are: the version that comes next has the one spare slot."""


@dataclass(frozen=True)
class Meant:
    """A version of an adapter. base_seed: of the base weights that it was pushed over."""

    seed: int
    base_seed: int


class Adapters:
    """Which adapters an engine must hold, and in which version."""

    def __init__(self, stand: Stand, ledger: Ledger, model_dir: Path) -> None:
        self._stand, self._ledger = stand, ledger
        self._adapted = Adapted(model_dir)
        self._meant: dict[int, Meant] = {}  # by version; they differ between names too
        self._kept: dict[Meant, tuple[Lies, list[int]]] = {}
        self._highest = 0
        self.live = {STRUCK: 0, BESIDE: 0}
        """Version by name; 0: not held."""

    def begin(self) -> None:
        """On an engine that holds none: push both."""
        self.live = dict.fromkeys(self.live, 0)
        assert self._stand.bank() == {}
        for name in self.live:
            assert self._stand.refusal(name) == "UNKNOWN_ADAPTER"
            self.push(name)
        self.check()

    def expect(self, seed: int) -> int:
        """The version that an adapter of this seed over the live base weights would get."""
        self._highest += 2
        self._meant[self._highest] = Meant(seed, self._ledger.seed(self._ledger.live))
        for version in sorted(self._meant)[:-64]:
            if version not in self.live.values():
                del self._meant[version]
        return self._highest

    def push(self, name: str = STRUCK) -> None:
        """The next version, in a push that has to work whatever came before it."""
        version = self.expect(self._highest + 1)
        meant = self._meant[version]
        self._adapted.become(meant.base_seed, meant.seed)
        source, weights = self._adapted.source(name), self._stand.weights
        with IpcArena() as arena:
            report = push_weights(source, weights, version, via=arena, inflight="abort", lease_s=20.0)
        (reply,) = report.replies.values()
        assert (report.version, reply.previous_adapter_version) == (version, self.live[name])
        self.live[name] = version

    def remove(self) -> int:
        """Remove the struck one, as another client would; gives the version that went, 0 for none."""
        try:
            return self._stand.weights.remove_adapter(STRUCK, abort=True).version
        except RollsyncError as error:
            if error.reason not in ("BUSY", "UNKNOWN_ADAPTER"):
                raise
            return 0

    def is_stale(self, name: str) -> bool:
        """Whether other base weights are live than those that an adapter was pushed over."""
        return self._meant[self.live[name]].base_seed != self._ledger.seed(self._ledger.live)

    def tokens(self, adapter_version: int, weight_version: int) -> list[int]:
        """The first greedy tokens of a version; it may have sampled over its own base weights only."""
        meant = self._meant[adapter_version]
        over = self._ledger.seed(weight_version)
        assert over == meant.base_seed, (
            f"adapter version {adapter_version} sampled over weights {weight_version}"
        )
        return self._look(meant)[1]

    def observe(self, new: int = 0, serves: bool = True) -> str:
        """Which version of the struck one is live: the old, the new one, or none where one was.

        Everything about all adapters must fit that.
        """
        held = {adapter.name: adapter.version for adapter in self._stand.state().adapters}
        version = held.get(STRUCK, 0)
        verdict = {self.live[STRUCK]: "old", new or -1: "new"}.get(version, "none")
        assert verdict != "none" or not version, f"version {version}, not {self.live[STRUCK]} or {new}"
        self.live[STRUCK] = version
        self.check(serves)
        return verdict

    def check(self, serves: bool = True) -> None:
        """What the engine says of its adapters, what lies in their slots, and what the struck one samples.

        Args:
            serves: False: the base weights are torn. They may be live again later, so nothing goes stale.
        """
        live = {name: version for name, version in self.live.items() if version}
        state = self._stand.state()
        told = {
            adapter.name: (adapter.version, adapter.stale, adapter.num_sequences)
            for adapter in state.adapters
        }
        assert told == {name: (version, self.is_stale(name), 0) for name, version in live.items()}
        bank = self._stand.bank()
        assert {name: held.version for name, held in bank.items()} == live
        for name, held in bank.items():
            lies = self._look(self._meant[live[name]])[0]
            wrong = [layer for layer, lying in lies.items() if held.lies[layer] != lying]
            assert not wrong, f"{wrong} of {name} are not version {live[name]}'s"
            assert held.lies.keys() == lies.keys()
        if not serves:
            assert self._stand.refusal(STRUCK) == "NOT_SERVING"
        elif STRUCK not in live:
            assert self._stand.refusal(STRUCK) == "UNKNOWN_ADAPTER"
        elif self.is_stale(STRUCK):
            assert self._stand.refusal(STRUCK) == "ADAPTER_STALE"
        else:
            self._check_samples(live[STRUCK])

    def _check_samples(self, version: int) -> None:
        (completion,) = self._stand.rollout.generate(
            PROMPT,
            adapter=STRUCK,
            min_adapter_version=version,
            max_tokens=NUM_GREEDY,
            temperature=0.0,
            ignore_eos=True,
            timeout_s=20.0,
        )
        assert completion.adapter_versions == [version] * NUM_GREEDY
        assert completion.weight_versions == [self._ledger.live] * NUM_GREEDY
        assert completion.token_ids == self.tokens(version, self._ledger.live)

    def _look(self, meant: Meant) -> tuple[Lies, list[int]]:
        if meant not in self._kept:
            self._adapted.become(meant.base_seed, meant.seed)
            self._kept[meant] = self._adapted.lies(), self._adapted.tokens()
            while len(self._kept) > 8:
                del self._kept[next(iter(self._kept))]
        return self._kept[meant]
