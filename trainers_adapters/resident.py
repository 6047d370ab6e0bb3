"""Parameters that lie in CPU memory as they are sent: pushed from there, with no tensor made for any of them.

A model of experts has tens of thousands of parameters. A tensor for each, in each push, would keep the
interpreter and its garbage collector busy for longer than their bytes take to travel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from operator import attrgetter, eq
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from weight_updater.arena import DTYPE_NAMES
from weight_updater.manifest import Columns
from weight_updater.packing import PackedBytes
from weight_updater.small import Bytes

PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""Subclasses may lie elsewhere than their data pointer says, or in several places."""

_IS_CPU, _SHAPE, _DTYPE = attrgetter("is_cpu"), attrgetter("shape"), attrgetter("dtype")


@runtime_checkable
class ResidentSource(Protocol):
    """A source that may be able to say where its tensors lie."""

    def resident(self) -> PackedBytes | None:
        """The bytes of everything that it yields, where they lie; None if it has to make some of them.

        Whoever asks reads them at once: they are good until a parameter is moved or replaced.
        """


def resident_bytes(source: Any) -> PackedBytes | None:
    """Where a source's bytes lie, if it can say so."""
    return source.resident() if isinstance(source, ResidentSource) else None


class ResidentParameters:
    """Remembers where parameters lie, and looks each time whether they still do.

    Args:
        names: that they are sent under.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._addresses: list[int] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []
        self._packed: PackedBytes | None = None

    def look(self, parameters: Sequence[torch.Tensor]) -> PackedBytes | None:
        """The bytes of `parameters`; None if one of them is not contiguous, or not in CPU memory.

        It keeps no parameter's memory: what was freed is at another address, or is not looked at again.
        """
        if not (
            PLAIN.issuperset(map(type, parameters))
            and all(map(_IS_CPU, parameters))
            and all(map(torch.Tensor.is_contiguous, parameters))
        ):
            return None
        if not self._are_known(parameters):
            self._addresses = list(map(torch.Tensor.data_ptr, parameters))
            self._shapes, self._dtypes = list(map(_SHAPE, parameters)), list(map(_DTYPE, parameters))
            columns = Columns(
                self._names, map(DTYPE_NAMES.__getitem__, self._dtypes), map(tuple, self._shapes)
            )
            if self._packed is not None and columns == self._packed.columns:
                columns = self._packed.columns  # whose digest, and more, is known
            arrays = [bytes_at(*place) for place in zip(self._addresses, columns.sizes, strict=True)]
            self._packed = PackedBytes(columns, arrays)
        return self._packed

    def _are_known(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether they lie where they lay. No list: the garbage collector would go through it."""
        return (
            len(parameters) == len(self._addresses)
            and all(map(eq, map(torch.Tensor.data_ptr, parameters), self._addresses))
            and all(map(eq, map(_SHAPE, parameters), self._shapes))
            and all(map(eq, map(_DTYPE, parameters), self._dtypes))
        )


def bytes_at(address: int, nbytes: int) -> Bytes:
    """[nbytes] over memory of this process, which it does not keep."""
    if not nbytes:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), dtype=np.uint8)
