"""The manifest: names, shapes, dtypes and checksums of the tensors that an update brings. No torch.

A model of experts has tens of thousands of tensors, and a trainer pushes them after every step. So what does
not change from push to push is worked out once: manifests that differ in their checksums only share it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 256
"""Bytes; every tensor in a bucket, a segment or an arena starts at a multiple of this."""

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the dtypes that an update may bring."""


def align(nbytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that an update brings.

    name: Hugging Face name. dtype: key of `ITEMSIZE`. shape: of the whole tensor.
    checksum: of the bytes that will arrive (see checksum.py), or None if none came with them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


class Columns:
    """What manifests of the same tensors share. One entry for each tensor, in the order of the wire."""

    def __init__(
        self, names: Iterable[str], dtypes: Iterable[str], shapes: Iterable[tuple[int, ...]]
    ) -> None:
        self.names = tuple(names)
        self.dtypes = tuple(dtypes)
        self.shapes = tuple(shapes)
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError("a manifest has as many names as dtypes and shapes")

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each tensor. Raises KeyError for a dtype that no update may bring."""
        prod = math.prod
        return [prod(shape) * ITEMSIZE[dtype] for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    @cached_property
    def packed(self) -> tuple[list[int], int]:
        """See `Manifest.packed_offsets`."""
        offsets, end = [], 0
        for nbytes in self.sizes:
            offsets.append(end)
            end += align(nbytes)
        return offsets, end

    @cached_property
    def digest(self) -> str:
        """See `Manifest.digest`."""
        hasher = hashlib.blake2b(digest_size=16)
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            # repr: no name can look like the end of its entry and the start of another
            hasher.update(f"{name!r} {dtype!r} {shape}\n".encode())
        return hasher.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        mine, theirs = (self.names, self.dtypes, self.shapes), (other.names, other.dtypes, other.shapes)
        return self is other or mine == theirs

    def __hash__(self) -> int:
        return hash(self.digest)


class Manifest:
    """The tensors of an update in the order of the wire. It never changes.

    Args:
        tensors: what each is.

    Attributes:
        columns: names, dtypes and shapes; one object for all manifests made by `with_checksums`.
        checksums: of the bytes that will arrive; None where none came with them.
    """

    __slots__ = ("_tensors", "checksums", "columns")

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        specs = tuple(tensors)
        self.columns = Columns(
            [spec.name for spec in specs], [spec.dtype for spec in specs], [spec.shape for spec in specs]
        )
        self.checksums: tuple[int | None, ...] = tuple([spec.checksum for spec in specs])
        self._tensors: tuple[TensorSpec, ...] | None = specs

    @classmethod
    def of(cls, columns: Columns, checksums: Sequence[int | None] = ()) -> Manifest:
        """The manifest of these tensors; no checksums: none came with any of them.

        Raises:
            ValueError: another number of checksums.
        """
        made = cls.__new__(cls)
        made.columns = columns
        made.checksums = tuple(checksums) or (None,) * len(columns.names)
        made._tensors = None
        if len(made.checksums) != len(columns.names):
            raise ValueError(f"{len(checksums)} checksums for {len(columns.names)} tensors")
        return made

    def __len__(self) -> int:
        return len(self.columns.names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Manifest):
            return NotImplemented
        return self.checksums == other.checksums and self.columns == other.columns

    def __hash__(self) -> int:
        return hash((self.columns, self.checksums))

    def __repr__(self) -> str:
        return f"Manifest({self.tensors!r})"

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The same by tensor; made when somebody asks, which costs more than many an update may."""
        if self._tensors is None:
            columns = self.columns
            rows = zip(columns.names, columns.dtypes, columns.shapes, self.checksums, strict=True)
            self._tensors = tuple([TensorSpec(*row) for row in rows])
        return self._tensors

    def tensor(self, index: int) -> TensorSpec:
        """One of `tensors`."""
        if self._tensors is not None:
            return self._tensors[index]
        columns = self.columns
        return TensorSpec(
            columns.names[index], columns.dtypes[index], columns.shapes[index], self.checksums[index]
        )

    @property
    def nbytes(self) -> int:
        return sum(self.columns.sizes)

    def packed_offsets(self) -> tuple[list[int], int]:
        """Offsets in bytes of all tensors packed in order, 256-byte aligned, and the total size.

        The list is the manifest's own; it is not to be changed.
        """
        return self.columns.packed

    def with_checksums(self, checksums: Sequence[int | None]) -> Manifest:
        """The same tensors with other checksums, one for each."""
        if not checksums and len(self):
            raise ValueError(f"no checksums for {len(self)} tensors")
        return Manifest.of(self.columns, checksums)

    def digest(self) -> str:
        """A name for this manifest: 32 hex digits over names, dtypes and shapes; not over checksums."""
        return self.columns.digest
