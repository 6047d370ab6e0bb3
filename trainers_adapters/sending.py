"""What the four paths have in common on the trainer's side.

A sender knows how the bytes of one path leave; push.py knows the order of the calls. A sender lives in
a `with` block, and what it allocates (a segment, a process group) is kept and used again by later pushes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from trainers_adapters.clients import WeightsClient
from trainers_adapters.sources import Source
from weight_updater.requests import BeginReply, Manifest, Path, UpdateReply


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One push: what is sent, until when (time.monotonic()), and whether with checksums.

    digest: the manifest's.
    """

    source: Source
    manifest: Manifest
    deadline: float
    verify: bool = True
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

    def stage(self, outgoing: Outgoing, clients: Sequence[WeightsClient]) -> dict[str, Any]:
        """Once, before BeginUpdate: put the bytes where they will be fetched. Gives BeginUpdate fields."""
        return {}

    def send(self, client: WeightsClient, begun: BeginReply, outgoing: Outgoing) -> UpdateReply:
        """Once for each engine, each in a thread of its own: the UpdateWeightsFrom... call."""
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


def byte_view(tensor: torch.Tensor) -> memoryview:
    """A tensor's logical row-major bytes: borrowed if it is contiguous on a CPU, else a copy."""
    flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
