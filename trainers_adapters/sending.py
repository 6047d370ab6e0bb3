"""What the four paths have in common on the trainer's side.

A sender knows how the bytes of one path leave; push.py knows the order of the calls. A sender lives in
a `with` block, and what it allocates (a segment, a process group) is kept and used again by later pushes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch

from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import RollsyncError
from trainers_adapters.sources import Source
from weight_updater.packing import PackedBytes
from weight_updater.requests import BeginReply, BeginUpdate, Manifest, Path, UpdateReply

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One push: what is sent, until when (time.monotonic()), and whether with checksums.

    digest: the manifest's.
    resident: where the source's bytes lie, if it can say so.
    """

    source: Source
    manifest: Manifest
    deadline: float
    verify: bool = True
    resident: PackedBytes | None = None
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.manifest.digest())

    @property
    def seconds_left(self) -> float:
        """At least a little, so that a call made too late ends with DEADLINE and not with no limit."""
        return max(0.001, self.deadline - time.monotonic())


class Sender:
    """One path. Methods in the order in which push_weights calls them."""

    path: ClassVar[Path]
    hashes_bytes: ClassVar[bool] = False
    """The sender hashes what it sends while it passes by, so the manifest need not."""

    def begins_early(self, outgoing: Outgoing) -> bool:
        """With one engine only: whether the update may begin, by its manifest alone, while `stage` hashes.

        The checksums that `stage` gives then go with `send_and_commit`, which is called instead of `send`.
        """
        return False

    def stage(self, outgoing: Outgoing, clients: Sequence[WeightsClient]) -> dict[str, Any]:
        """Once, before BeginUpdate: put the bytes where they will be fetched. Gives BeginUpdate fields."""
        return {}

    def send(self, client: WeightsClient, begun: BeginReply, outgoing: Outgoing) -> UpdateReply:
        """Once for each engine, each in a thread of its own: the UpdateWeightsFrom... call."""
        raise NotImplementedError

    def in_one_call(
        self, client: WeightsClient, update: BeginUpdate, outgoing: Outgoing
    ) -> UpdateReply | None:
        """With one engine only: begin, send and commit in one call; None if this path takes several.

        Refused with MANIFEST_UNKNOWN, it is called again with the whole manifest.
        """
        return None

    def send_and_commit(
        self, client: WeightsClient, update_id: str, outgoing: Outgoing, checksums: Sequence[int]
    ) -> UpdateReply:
        """In one call, for a sender that `begins_early`; called again, it gives the same reply."""
        raise NotImplementedError

    def beside(self, begun: BeginReply, outgoing: Outgoing) -> None:
        """Once, in a thread of its own, while all `send`s run: what they have in common."""

    def cancel(self) -> None:
        """From the thread of push_weights when a send failed: end `beside` soon."""

    def close(self) -> None:
        """Give back what was allocated."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def named_by_digest(
    client: WeightsClient, update: BeginUpdate, digest: str, call: Callable[[BeginUpdate], R]
) -> R:
    """Call with the manifest's digest where this client's engine has seen it, else with all of it.

    An update without a manifest (a directory's own headers are one) is called as it is.

    Args:
        update: its checksums, if it has any, are those of the manifest's tensors.
        digest: of the update's manifest.
    """
    if update.manifest is None:
        return call(update)
    if digest in client.manifest_digests:
        sums = update.checksums or tuple([sum_ for sum_ in update.manifest.checksums if sum_ is not None])
        short = replace(update, manifest=None, manifest_digest=digest, checksums=sums)
        try:
            return call(short)
        except RollsyncError as error:
            if error.reason != "MANIFEST_UNKNOWN":  # another engine process listens there now
                raise
            client.manifest_digests.discard(digest)
    if update.checksums:
        update = replace(update, manifest=update.manifest.with_checksums(update.checksums), checksums=())
    reply = call(update)
    if reply is not None:
        client.manifest_digests.add(digest)
    return reply


def settle_stream() -> None:
    """Wait for what the calling thread has queued on its GPU's current stream. Threads that read what it has
    written have other current streams, unless it is the default one.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


def byte_view(tensor: torch.Tensor) -> memoryview:
    """A tensor's logical row-major bytes: borrowed if it is contiguous on a CPU, else a copy."""
    flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
