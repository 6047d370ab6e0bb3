"""AdapterBook: which adapters are held, in which version, and over which base weights. No torch.

Adapters lie in slots of stacked matrices (adapter_bank.py). Slot 0 is all zeros and stands for the base
model. There is one slot more than adapters, so that the next version of an adapter is written beside the one
that is live, proven there, and made live by nothing but a change of this book:

    slots   | 0 zeros | 1 math v3 | 2 spare | 3 code v1 |      math v4 goes to 2; then 1 is the spare one
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

BASE_SLOT = 0
"""Of rows without an adapter."""
BASE_NUMBER = 0
"""Stands for the base model where adapters are told apart by their numbers."""

MAX_REMOVED = 1024
"""Adapters that were removed and whose versions are remembered, so that a label never means two things."""


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """An adapter in one version. It never changes: a commit puts another one in its place.

    number: of its commit, counted over all adapters from 1.
    rank: the largest of its modules.
    base_version, base_sequence, base_checksum: of the base weights that were live at its commit; the checksum
        is 0 if it was not known.
    """

    name: str
    version: int
    number: int
    slot: int
    rank: int
    base_version: int
    base_sequence: int
    base_checksum: int


class AdapterBook:
    """Belongs to the engine's loop. `max_adapters` 0: none can be held."""

    def __init__(self, max_adapters: int = 0) -> None:
        self.max_adapters = max_adapters
        self.held: dict[str, HeldAdapter] = {}
        self._highest: OrderedDict[str, int] = OrderedDict()  # by name, those of removed ones first
        self._num_commits = 0
        self._base = (0, 0)  # commit sequence and checksum of the base weights

    def get(self, name: str) -> HeldAdapter | None:
        """The adapter of this name; None for the base model and for one that is not held."""
        return self.held.get(name)

    def number(self, name: str) -> int:
        """Of a held adapter's commit; BASE_NUMBER for ""."""
        return self.held[name].number if name else BASE_NUMBER

    def highest(self, name: str) -> int:
        """The largest version of this name that ever committed; 0: none did."""
        return self._highest.get(name, 0)

    def has_room(self, name: str) -> bool:
        """Whether an adapter of this name can be committed."""
        return name in self.held or len(self.held) < self.max_adapters

    def spare_slot(self) -> int:
        """A slot that no adapter lives in."""
        taken = {adapter.slot for adapter in self.held.values()}
        return next(slot for slot in range(1, self.max_adapters + 2) if slot not in taken)

    def commit(
        self, name: str, version: int, slot: int, rank: int, base_version: int, base: tuple[int, int]
    ) -> HeldAdapter:
        """The one place in which an adapter's version changes.

        Args:
            base: commit sequence and checksum of the base weights that are live.
        """
        self._num_commits += 1
        held = HeldAdapter(name, version, self._num_commits, slot, rank, base_version, *base)
        self.held[name] = held
        self._base = base
        self._highest[name] = version
        self._highest.move_to_end(name)
        removed = [known for known in self._highest if known not in self.held]
        for known in removed[:-MAX_REMOVED]:
            del self._highest[known]
        return held

    def remove(self, name: str) -> HeldAdapter:
        """Forget an adapter that is held; its slot is free."""
        return self.held.pop(name)

    def base_changed(self, base: tuple[int, int]) -> None:
        """Other base weights are live. base: their commit sequence and checksum (0 if it is not known)."""
        self._base = base

    def is_stale(self, adapter: HeldAdapter) -> bool:
        """Whether other base weights are live than those that an adapter was committed over."""
        sequence, checksum = self._base
        same_bytes = checksum != 0 and adapter.base_checksum == checksum
        return adapter.base_sequence != sequence and not same_bytes

    def names(self) -> str:
        """What is held, for messages."""
        if not self.max_adapters:
            return "this engine holds none; start it with --max-adapters"
        shown = ", ".join(f"{held.name} (version {held.version})" for held in self.held.values())
        return f"held are {shown}" if shown else "none is held yet"
