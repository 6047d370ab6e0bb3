"""Path "distributed": the trainer broadcasts buckets in a named process group, and they come in here.

The manifest and the size of a bucket were agreed when the update began; both ends compare them once more,
with each other, before the first collective of the update.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from weight_updater.buckets import BucketPlan, plan_buckets
from weight_updater.groups import GroupRegistry
from weight_updater.nccl_receiver import NcclReceiver
from weight_updater.requests import FromDistributed, Manifest


class ByteSink(Protocol):
    """What `receive` writes to; bytes are overwritten later, in the order of a device's copies."""

    def write(self, tensor_index: int, byte_offset: int, data: torch.Tensor) -> None: ...

    def write_whole(self, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor) -> None: ...

    def write_packed(self, position: int, data: torch.Tensor) -> None: ...

    def flush(self) -> None:
        """Until all that was written lies in its place, and what it came from may change."""
        ...


def receive(
    request: FromDistributed,
    manifest: Manifest,
    sink: ByteSink,
    groups: GroupRegistry,
    *,
    bucket_bytes: int = 0,
    needed: Collection[int] | None = None,
) -> None:
    """Receive every bucket of `manifest` into `sink`; blocks. WORKER.

    Args:
        request: timeout_s bounds the whole receive; 0 bounds each wait by the group's timeout instead.
        groups: where the engine joined `request.group_name`.
        bucket_bytes: as in BeginUpdate; 0 means 64 MiB.
        needed: indexes of the tensors to write to the sink (`Plan.needed`); None means all.

    Raises:
        UpdateRefused: GROUP_UNKNOWN; MANIFEST_MISMATCH if the sender would send something else (the group
            stays); TIMEOUT or PEER_LOST, or whatever the sink raises: then the sender is told, and the group
            is torn down.
    """
    plan = plan_buckets(manifest, bucket_bytes)
    wanted = set(range(len(manifest)) if needed is None else needed)
    with groups.use(request.group_name) as group:
        timeout_s = request.timeout_s or group.request.timeout_s
        limit = time.monotonic() + request.timeout_s if request.timeout_s else None
        if isinstance(group, NcclReceiver):
            group.receive(plan, sink, wanted, timeout_s, limit)
            return
        group.receive_header(plan, timeout_s, limit)
        for bucket in range(len(plan)):
            data = group.next_bucket(bucket, timeout_s, limit)[: plan.size(bucket)]
            if len(wanted) == len(manifest):
                sink.write_packed(bucket * plan.bucket_bytes, data)
            else:
                _write_wanted(plan, bucket, data, sink, wanted)
            sink.flush()  # the bytes have left the bucket
            group.free()
        group.receive_end(timeout_s, limit)


def _write_wanted(
    plan: BucketPlan, bucket: int, data: torch.Tensor, sink: ByteSink, wanted: Collection[int]
) -> None:
    pieces = [piece for piece in plan.pieces(bucket) if piece.tensor in wanted]
    whole = [piece for piece in pieces if plan.is_whole(piece)]
    sink.write_whole([piece.tensor for piece in whole], [piece.position for piece in whole], data)
    for piece in pieces:
        if not plan.is_whole(piece):
            sink.write(piece.tensor, piece.start, data[piece.position : piece.position + piece.size])
