"""The Weights service: updates by four paths, and what lies in the slots."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
import msgspec

from rollout_engine import messages as m
from rollout_engine.errors import EngineError, Reason
from rollout_engine.server import convert
from rollout_engine.server.engine_client import EngineClient
from rollout_engine.server.receivers import Receivers
from rollout_engine.server.ring import READER
from rollout_engine.server.status import guarded
from rollout_engine.server.uploads import Upload
from rollout_engine.v1 import weights_pb2 as pb
from rollout_engine.v1 import weights_pb2_grpc
from weight_updater.requests import ITEMSIZE, BeginReply, Layout, Path, Placement, UpdateReply

Context: TypeAlias = grpc.aio.ServicerContext

PIECE_BYTES = 1 << 20
"""Of a tensor in one message of GetWeightsByName; well within a default client's 4 MiB."""
PIECE_OVERHEAD_BYTES = 16 << 10
"""Room for a piece's name and shape in a message."""


def _update(reply: m.Reply) -> pb.UpdateWeightsResponse:
    return convert.update_response(msgspec.convert(reply.result, UpdateReply))


@guarded(pb.DESCRIPTOR.services_by_name["Weights"])
class WeightsService(weights_pb2_grpc.WeightsServicer):
    """A call whose client goes away is finished by the engine; an update left open ends by its lease."""

    def __init__(self, engine: EngineClient, receivers: Receivers, max_message_bytes: int) -> None:
        self.tally = engine.tally
        self._engine = engine
        self._receivers = receivers
        self._max_message_bytes = max_message_bytes

    # -------------------------------------------------------- the life of an update

    async def BeginUpdate(self, request: pb.BeginUpdateRequest, context: Context) -> pb.BeginUpdateResponse:
        begin = convert.begin_update(request)
        reply = await self._engine.call(m.Begin, request=begin)
        begun = msgspec.convert(reply.result, BeginReply)
        if begin.num_streams and begin.path is Path.TENSOR:
            ports = await self._receivers.ports(begin.num_streams)
            begun = dataclasses.replace(begun, stream_ports=tuple(ports))
        return convert.begin_response(begun)

    async def UpdateWeightsFromDisk(
        self, request: pb.UpdateWeightsFromDiskRequest, context: Context
    ) -> pb.UpdateWeightsResponse:
        update_id, begin = convert.target(request, Path.DISK)
        disk = convert.from_disk(request, update_id)
        if begin is not None:
            if begin.directory and disk.directory and begin.directory != disk.directory:
                convert.invalid("begin.directory", f"is {begin.directory}, but directory is {disk.directory}")
            directory = disk.directory or begin.directory
            begin = dataclasses.replace(begin, directory=directory)
            disk = dataclasses.replace(disk, directory=directory)
        return _update(await self._engine.call(m.Update, disk=disk, begin=begin))

    async def UpdateWeightsFromDistributed(
        self, request: pb.UpdateWeightsFromDistributedRequest, context: Context
    ) -> pb.UpdateWeightsResponse:
        update_id, begin = convert.target(request, Path.DISTRIBUTED)
        distributed = convert.from_distributed(request, update_id)
        return _update(await self._engine.call(m.Update, distributed=distributed, begin=begin))

    async def UpdateWeightsFromTensor(
        self, request_iterator: AsyncIterator[pb.UpdateWeightsFromTensorRequest], context: Context
    ) -> pb.UpdateWeightsResponse:
        messages = aiter(request_iterator)
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "header":
            convert.invalid("the first message of the stream", "must be the header")
        update_id, begin = convert.target(first.header, Path.TENSOR)
        tensor = convert.from_tensor(first.header, update_id)
        if tensor.segment is not None:
            return _update(await self._engine.call(m.Update, tensor=tensor, begin=begin))

        async def confirm_end() -> None:
            # Headers reach a client that is there. They pass through the same queue as the news that it is
            # not, which cancels this handler, and come out behind it.
            await context.send_initial_metadata(())
            await asyncio.sleep(0)

        return _update(await Upload(self._engine, tensor, begin).run(messages, confirm_end))

    async def UpdateWeightsFromIpc(
        self, request: pb.UpdateWeightsFromIpcRequest, context: Context
    ) -> pb.UpdateWeightsResponse:
        update_id, begin = convert.target(request, Path.IPC)
        ipc = convert.from_ipc(request, update_id)
        return _update(await self._engine.call(m.Update, ipc=ipc, begin=begin, commit=request.commit))

    async def PrepareUpdate(
        self, request: pb.PrepareUpdateRequest, context: Context
    ) -> pb.UpdateWeightsResponse:
        deadline_s = request.deadline_ms / 1000
        return _update(
            await self._engine.call(m.Prepare, update_id=_update_id(request.update_id), deadline_s=deadline_s)
        )

    async def CommitUpdate(
        self, request: pb.CommitUpdateRequest, context: Context
    ) -> pb.UpdateWeightsResponse:
        return _update(await self._engine.call(m.Commit, update_id=_update_id(request.update_id)))

    async def AbortUpdate(self, request: pb.AbortUpdateRequest, context: Context) -> pb.AbortUpdateResponse:
        reply = await self._engine.call(m.AbortUpdate, update_id=_update_id(request.update_id))
        return pb.AbortUpdateResponse(
            found=reply.result["found"], torn=reply.result["torn"], weight_version=reply.weight_version
        )

    async def RollbackUpdate(
        self, request: pb.RollbackUpdateRequest, context: Context
    ) -> pb.UpdateWeightsResponse:
        inflight = convert.known(convert.INFLIGHTS, request.inflight, "inflight")
        return _update(await self._engine.call(m.Rollback, inflight=inflight))

    async def RemoveAdapter(
        self, request: pb.RemoveAdapterRequest, context: Context
    ) -> pb.RemoveAdapterResponse:
        reply = await self._engine.call(m.RemoveAdapter, name=request.name, abort=request.abort)
        return pb.RemoveAdapterResponse(
            adapter_version=reply.result["version"],
            num_aborted=reply.result["num_aborted"],
            weight_version=reply.weight_version,
        )

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        reply = await self._engine.call(
            m.RenewLease, update_id=_update_id(request.update_id), lease_s=request.lease_ms / 1000
        )
        return pb.RenewLeaseResponse(
            lease_ms=round(reply.result["lease_s"] * 1000), weight_version=reply.weight_version
        )

    # -------------------------------------------------------- memory and groups

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        reply = await self._engine.call(m.ReleaseIpc, allocation_ids=list(request.allocation_ids))
        return pb.ReleaseResponse(
            num_released=reply.result["num_released"], weight_version=reply.weight_version
        )

    async def InitWeightsUpdateGroup(
        self, request: pb.InitWeightsUpdateGroupRequest, context: Context
    ) -> pb.InitWeightsUpdateGroupResponse:
        reply = await self._engine.call(m.InitWeightsGroup, request=convert.init_group(request))
        return pb.InitWeightsUpdateGroupResponse(
            backend=reply.result["backend"], weight_version=reply.weight_version
        )

    async def DestroyWeightsUpdateGroup(
        self, request: pb.DestroyWeightsUpdateGroupRequest, context: Context
    ) -> pb.DestroyWeightsUpdateGroupResponse:
        reply = await self._engine.call(m.DestroyWeightsGroup, group_name=request.group_name)
        return pb.DestroyWeightsUpdateGroupResponse(
            found=reply.result["found"], weight_version=reply.weight_version
        )

    # -------------------------------------------------------- reading

    async def _layout(self) -> tuple[m.Reply, Layout]:
        reply = await self._engine.call(m.GetLayout)
        return reply, msgspec.convert(reply.result, Layout)

    async def GetWeightLayout(
        self, request: pb.GetWeightLayoutRequest, context: Context
    ) -> pb.GetWeightLayoutResponse:
        reply, layout = await self._layout()
        return pb.GetWeightLayoutResponse(
            placements=[convert.placement(slot) for slot in layout.placements],
            arena_bytes=layout.arena_bytes,
            weight_version=reply.weight_version,
        )

    async def GetWeightsByName(self, request: pb.GetWeightsByNameRequest, context: Context) -> None:
        reply, layout = await self._layout()
        slots = {slot.name: slot for slot in layout.placements}
        for name in request.names:
            if name not in slots:
                raise EngineError(
                    Reason.UNKNOWN_NAME, f"no weight is called {name!r}; GetWeightLayout lists all"
                )
        for name in request.names:
            await self._send_weight(slots[name], reply.commit_sequence, context)

    async def _send_weight(self, slot: Placement, commit_sequence: int, context: Context) -> None:
        """Stream one tensor in pieces, all of one commit."""
        step = min(PIECE_BYTES, self._engine.ring.slot_bytes, self._max_message_bytes - PIECE_OVERHEAD_BYTES)
        step -= step % 256
        total = math.prod(slot.shape) * ITEMSIZE[slot.dtype]
        for offset in range(0, total or 1, step):
            reply, data = await self._read(slot.name, offset, min(step, total - offset))
            if reply.commit_sequence != commit_sequence:
                raise EngineError(
                    Reason.BUSY,
                    f"the weights changed to version {reply.weight_version} while {slot.name} was read; "
                    "call again",
                )
            await context.write(
                pb.GetWeightsByNameResponse(
                    name=slot.name,
                    dtype=convert.DTYPE_TO_WIRE[slot.dtype],
                    shape=slot.shape,
                    offset=offset,
                    data=data,
                    weight_version=reply.weight_version,
                )
            )

    async def _read(self, name: str, offset: int, nbytes: int) -> tuple[m.Reply, bytes]:
        """Bytes of a live tensor by way of a slot lent to the engine for this call."""
        ring = self._engine.ring
        slot = await ring.acquire(READER)
        try:
            _, reply = self._engine.begin_call(
                m.ReadWeight, name=name, offset=offset, nbytes=nbytes, slot=slot
            )
        except BaseException:  # the engine died; whoever waits for the slot must hear it, too
            ring.release(slot, READER)
            raise
        try:
            await asyncio.wait({reply})
            return reply.result(), ring.read(slot, nbytes)
        finally:
            # A reader that goes away leaves the slot to the engine until its reply.
            if reply.done():
                ring.release(slot, READER)
            else:
                reply.add_done_callback(lambda _: ring.release(slot, READER))

    async def GetWeightChecksums(
        self, request: pb.GetWeightChecksumsRequest, context: Context
    ) -> pb.GetWeightChecksumsResponse:
        reply = await self._engine.call(m.GetChecksums, names=list(request.names))
        named = zip(reply.result["names"], reply.result["checksums"], strict=True)
        return pb.GetWeightChecksumsResponse(
            checksums=[pb.NamedChecksum(name=name, checksum=checksum) for name, checksum in named],
            folded=reply.result["folded"],
            weight_version=reply.weight_version,
            commit_sequence=reply.commit_sequence,
        )


def _update_id(update_id: str) -> str:
    if not update_id:
        convert.invalid("update_id", "is empty; give the id that BeginUpdate returned")
    return update_id
