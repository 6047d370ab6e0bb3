"""What the ranks of a trainer tell each other about rollouts: rank 0 talks to the engine, all hear of it.

Messages are msgpack in byte tensors over the default process group; a single process needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from trainers_adapters.errors import RollsyncError

T = TypeVar("T")


class _Said(msgspec.Struct):
    """What rank 0 did: its result, or the error that all ranks end with."""

    result: Any = None
    failed: bool = False
    code: str = ""
    reason: str = ""
    message: str = ""


class Ranks:
    """The ranks of the default process group.

    Args:
        count: how many there are. index: which this is. device: where the group's tensors lie.
    """

    def __init__(self, count: int = 1, index: int = 0, device: torch.device | str = "cpu") -> None:
        self.count = count
        self.index = index
        self._device = torch.device(device)

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank, on every rank. Plain lists, dicts, strings and numbers."""
        if self.count == 1:
            return [value]
        data = _tensor(msgspec.msgpack.encode(value), self._device)
        size = torch.tensor([data.numel()], device=self._device)
        sizes = [torch.empty_like(size) for _ in range(self.count)]
        dist.all_gather(sizes, size)
        longest = max(int(one) for one in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: data.numel()] = data
        pieces = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(pieces, padded)
        return [
            msgspec.msgpack.decode(_bytes(piece[: int(one)]))
            for piece, one in zip(pieces, sizes, strict=True)
        ]

    def from_main(self, act: Callable[[], T]) -> T:
        """Run `act` on rank 0 alone; every rank waits for it and gets its result.

        Raises:
            Exception: on rank 0 what `act` raised; on the others RollsyncError with the same text.
        """
        if self.count == 1:
            return act()
        if not self.is_main:
            said = msgspec.msgpack.decode(self._heard(), type=_Said)
            if said.failed:
                raise RollsyncError(said.code, said.reason, f"rank 0 failed: {said.message}")
            return said.result  # type: ignore[no-any-return]
        try:
            result = act()
            message = msgspec.msgpack.encode(_Said(result))
        except Exception as error:
            self._say(msgspec.msgpack.encode(_failure(error)))
            raise
        self._say(message)
        return result

    def _say(self, message: bytes) -> None:
        dist.broadcast(torch.tensor([len(message)], device=self._device), src=0)
        dist.broadcast(_tensor(message, self._device), src=0)

    def _heard(self) -> bytes:
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.broadcast(size, src=0)
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.broadcast(data, src=0)
        return _bytes(data)


def _failure(error: Exception) -> _Said:
    if isinstance(error, RollsyncError):
        return _Said(failed=True, code=error.code, reason=error.reason, message=error.message)
    return _Said(failed=True, code="INTERNAL", message=f"{type(error).__name__}: {error}")


def _tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _bytes(data: torch.Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
