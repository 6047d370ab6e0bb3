"""Which bytes travel in which bucket: both ends of the distributed path compute it from the manifest.

All tensors are thought of as packed in the manifest's order, each at a multiple of 256 bytes, and this
stream is cut every `bucket_bytes`. So a bucket bounds the memory of both ends, however large a tensor is.

    stream   | a ........ |pad| b .. |pad| c ................................ |
    buckets  |<-- bucket 0 -->|<-- bucket 1 -->|<-- bucket 2 -->|<-- bucket 3 |
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import DEFAULT_BUCKET_BYTES, Manifest, align

MAX_BUCKET_BYTES = 4 << 30


class Piece(NamedTuple):
    """Bytes [start, start + size) of tensor `tensor`; they lie at byte `position` of their bucket.

    start and position are multiples of 256.
    """

    tensor: int
    start: int
    size: int
    position: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How a packed stream is cut, which is all that ends must agree on; `len()` counts the buckets.

    bucket_bytes: size of every bucket but the last, a multiple of 256.
    total_bytes: of the packed stream, padding included.
    manifest_digest: of the tensors in it.
    """

    num_tensors: int
    bucket_bytes: int
    total_bytes: int
    manifest_digest: str

    def __len__(self) -> int:
        return -(-self.total_bytes // self.bucket_bytes)

    def size(self, bucket: int) -> int:
        """Bytes that bucket `bucket` sends."""
        return min(self.bucket_bytes, self.total_bytes - bucket * self.bucket_bytes)

    def digest(self) -> str:
        """32 hex digits over the manifest's names, dtypes and shapes, and over how it is cut."""
        text = f"{self.manifest_digest} {self.bucket_bytes} {self.total_bytes} {len(self)}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def header(self) -> dict[str, str | int]:
        """What the ends of a group compare before the first bucket."""
        return {
            "num_tensors": self.num_tensors,
            "bucket_bytes": self.bucket_bytes,
            "num_buckets": len(self),
            "total_bytes": self.total_bytes,
            "digest": self.digest(),
        }


class BucketPlan:
    """The buckets of one manifest; `len()` counts them. Use `plan_buckets`.

    cut: how the manifest's packed stream is cut; what it says can be asked of the plan as well.
    """

    def __init__(self, manifest: Manifest, bucket_bytes: int) -> None:
        self.manifest = manifest
        self._offsets, total_bytes = manifest.packed_offsets()
        self._sizes = manifest.columns.sizes
        self.cut = Cut(len(manifest), bucket_bytes, total_bytes, manifest.digest())
        self.bucket_bytes, self.total_bytes = bucket_bytes, total_bytes

    def __len__(self) -> int:
        return len(self.cut)

    def size(self, bucket: int) -> int:
        """Bytes that bucket `bucket` sends."""
        return self.cut.size(bucket)

    def pieces(self, bucket: int) -> list[Piece]:
        """What lies in bucket `bucket`, by position. Empty tensors are nowhere."""
        begin = bucket * self.bucket_bytes
        end = begin + self.size(bucket)
        found = []
        for tensor in range(bisect_right(self._offsets, begin) - 1, len(self._offsets)):
            offset = self._offsets[tensor]
            if offset >= end:
                break
            first, last = max(begin, offset), min(end, offset + self._sizes[tensor])
            if first < last:
                found.append(Piece(tensor, first - offset, last - first, first - begin))
        return found

    def is_whole(self, piece: Piece) -> bool:
        """Whether a piece is a whole tensor."""
        return piece.size == self._sizes[piece.tensor]

    def digest(self) -> str:
        """As `Cut.digest`."""
        return self.cut.digest()


def plan_buckets(manifest: Manifest, bucket_bytes: int = 0) -> BucketPlan:
    """The buckets of `manifest`; `bucket_bytes` and errors as for `bucket_size`."""
    return BucketPlan(manifest, bucket_size(bucket_bytes))


def bucket_size(bucket_bytes: int) -> int:
    """The size of a bucket in bytes.

    Args:
        bucket_bytes: rounded up to a multiple of 256; 0 means 64 MiB.

    Raises:
        UpdateRefused (INVALID_UPDATE): a negative size, or one above 4 GiB.
    """
    if not 0 <= bucket_bytes <= MAX_BUCKET_BYTES:
        raise UpdateRefused(
            Reason.INVALID_UPDATE,
            f"bucket_bytes is {bucket_bytes}; it must lie in [0, {MAX_BUCKET_BYTES}] (0 means "
            f"{DEFAULT_BUCKET_BYTES})",
        )
    return align(bucket_bytes or DEFAULT_BUCKET_BYTES)
