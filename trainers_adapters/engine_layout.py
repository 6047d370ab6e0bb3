"""What engines take, by their own word: the manifest of a push whose sender cannot say what will come."""

from __future__ import annotations

from collections.abc import Sequence

from trainers_adapters.errors import PushError, RollsyncError
from weight_updater.errors import UpdateError
from weight_updater.names import is_adapter_name
from weight_updater.requests import Layout, Manifest, Placement, TensorSpec, align


def refusal(where: str, error: BaseException) -> PushError:
    """A push that ended before anything was committed: the error of a step as the push's own.

    Raises:
        BaseException: `error` itself, if it is none of an engine's or of an update's.
    """
    if isinstance(error, UpdateError):
        error = RollsyncError("ABORTED", str(error.reason), error.message)
    if not isinstance(error, RollsyncError):
        raise error
    text = f"{where}: {error.message} (nothing was committed; every engine keeps its version)"
    return PushError(error.code, error.reason, text)


def misfit(reason: str, message: str) -> PushError:
    """Weights that the engines cannot take."""
    return refusal("the weights to push", RollsyncError("FAILED_PRECONDITION", reason, message))


class EngineLayout:
    """What engines of one model take: names, shapes, dtypes; and which name is another's tensor.

    Args:
        addresses: of the engines. layouts: what each of them answered, in the same order.

    Raises:
        PushError: the engines serve different models.
    """

    def __init__(self, addresses: Sequence[str], layouts: Sequence[Layout]) -> None:
        for address, layout in zip(addresses, layouts, strict=True):
            if layout.digest() != layouts[0].digest():
                raise misfit(
                    "ENGINES_DISAGREE",
                    f"{address} and {addresses[0]} serve models of different layouts; start "
                    f"them with the same model and dtype",
                )
        self.slots: list[Placement] = [p for p in layouts[0].placements if not p.alias_of]
        self.index = {slot.name: number for number, slot in enumerate(self.slots)}
        self.aliases = {p.name: p for p in layouts[0].placements if p.alias_of}
        self.manifest = Manifest(tuple(TensorSpec(s.name, s.dtype, tuple(s.shape)) for s in self.slots))
        sizes = [align(spec.nbytes) for spec in self.manifest.tensors]
        self.largest, self.nbytes = max(sizes), sum(sizes)

    def slot(self, name: str) -> Placement:
        """The slot that a tensor of that (clean) name goes to; with alias_of, if another's tensor is there.

        Raises:
            PushError: the engines have none such.
        """
        if name in self.aliases:
            return self.aliases[name]
        if name not in self.index:
            hint = "; merge adapters before they are pushed" * is_adapter_name(name)
            raise misfit("MANIFEST_MISMATCH", f"the engine has no tensor {name}{hint}")
        return self.slots[self.index[name]]


def in_shares(placements: Sequence[Placement], max_bytes: int) -> list[list[str]]:
    """Names of the slots with storage of their own, as they follow each other in the arena, in lists of which
    each names no more than `max_bytes` bytes, or one slot.
    """
    shares: list[list[str]] = []
    room = 0
    for place in sorted((p for p in placements if not p.alias_of), key=lambda place: place.offset):
        nbytes = TensorSpec(place.name, place.dtype, tuple(place.shape)).nbytes
        if nbytes > room or not shares:
            shares.append([])
            room = max_bytes
        shares[-1].append(place.name)
        room -= nbytes
    return shares


def is_computed(name: str) -> bool:
    """Whether trainers may send a tensor of that name although the engine computes it itself."""
    return name.split(".")[-2:] == ["rotary_emb", "inv_freq"]
