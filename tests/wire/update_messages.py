"""Messages of the weight calls, as short as tests want them."""

from __future__ import annotations

from rollout_engine.v1 import weights_pb2 as pb


def header(**fields) -> pb.UpdateWeightsFromTensorRequest:
    target = fields or {"update_id": "open"}
    return pb.UpdateWeightsFromTensorRequest(header=pb.UpdateWeightsFromTensorHeader(**target))


def chunk(tensor: int, offset: int, data: bytes) -> pb.UpdateWeightsFromTensorRequest:
    return pb.UpdateWeightsFromTensorRequest(chunk=pb.TensorChunk(tensor=tensor, offset=offset, data=data))


def chunks(data: bytes, size: int, tensor: int = 0) -> list[pb.UpdateWeightsFromTensorRequest]:
    return [chunk(tensor, at, data[at : at + size]) for at in range(0, len(data), size)]


def packed_chunk(offset: int, data: bytes, tensor: int = 0) -> pb.UpdateWeightsFromTensorRequest:
    part = pb.TensorChunk(tensor=tensor, offset=offset, data=data, packed=True)
    return pb.UpdateWeightsFromTensorRequest(chunk=part)


def read(*names: str) -> pb.GetWeightsByNameRequest:
    return pb.GetWeightsByNameRequest(names=names)
