"""Messages of the chunk stream as they come off the wire, read without a copy of the bytes they carry.

The protobuf library copies a chunk's data twice before anybody can have it. A chunk that is written the plain
way (one field, nothing unknown in it) is read here by hand, and its data handed on as a view of the
message; whatever else may stand in a message is left to the library, so that both always agree.
"""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError

from rollout_engine.server.convert import invalid
from rollout_engine.server.unreadable import cannot_be_parsed
from rollout_engine.v1 import weights_pb2 as pb

_CHUNK_TAG = 0x12  # field 2 of UpdateWeightsFromTensorRequest, length-delimited
_TENSOR_TAG, _OFFSET_TAG, _DATA_TAG, _PACKED_TAG = 0x08, 0x10, 0x1A, 0x20  # fields 1 to 4 of TensorChunk
_MAX_PLAIN_VARINT_BYTES = 9  # up to 63 bits; what is longer is left to the library


class WireChunk(NamedTuple):
    """A TensorChunk. Its data are `size` bytes of `source` from byte `start` on; `source` is the message
    itself, if that was read by hand.
    """

    tensor: int
    offset: int
    packed: bool
    source: bytes
    start: int
    size: int

    @property
    def data(self) -> memoryview:
        """The data, borrowed from `source`."""
        return memoryview(self.source)[self.start : self.start + self.size]


WireMessage = WireChunk | pb.UpdateWeightsFromTensorRequest
"""A chunk, or a message that is none."""


def parse(message: bytes) -> WireMessage:
    """Read a serialised UpdateWeightsFromTensorRequest.

    Raises:
        EngineError (INVALID_REQUEST): it is none.
    """
    chunk = _plain_chunk(message)
    if chunk is not None:
        return chunk
    try:
        return unpacked(pb.UpdateWeightsFromTensorRequest.FromString(message))
    except DecodeError as error:
        raise cannot_be_parsed(str(error)) from error


def unpacked(message: pb.UpdateWeightsFromTensorRequest) -> WireMessage:
    """A message that the library has read."""
    if message.WhichOneof("message") != "chunk":
        return message
    chunk = message.chunk
    data = chunk.data
    return WireChunk(chunk.tensor, chunk.offset, chunk.packed, data, 0, len(data))


def _plain_chunk(message: bytes) -> WireChunk | None:
    """The chunk of a message that is written the plain way; None for any other message, also a broken one."""
    size = len(message)
    if size < 2 or message[0] != _CHUNK_TAG:
        return None
    found = _varint(message, 1)
    if found is None or found[0] + found[1] != size:
        return None
    tensor = offset = packed = start = nbytes = 0
    at = found[1]
    while at < size:
        tag = message[at]
        found = _varint(message, at + 1)
        if found is None:
            return None
        value, at = found
        if tag == _DATA_TAG:
            if at + value > size:
                return None
            start, nbytes = at, value
            at += value
        elif tag == _OFFSET_TAG:
            offset = value
        elif tag == _TENSOR_TAG and value < 1 << 32:
            tensor = value
        elif tag == _PACKED_TAG:
            packed = value
        else:
            return None
    return WireChunk(tensor, offset, bool(packed), message, start, nbytes)


def _varint(message: bytes, at: int) -> tuple[int, int] | None:
    """(value, where it ends) of the varint at byte `at`; None if it is cut off or longer than plain."""
    value = shift = 0
    for byte in message[at : at + _MAX_PLAIN_VARINT_BYTES]:
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    return None


class ChunkReader:
    """What may follow the header of a stream: chunks, and then an end, if the client says one."""

    def __init__(self) -> None:
        self._number = 0  # of the message; the header was 0
        self.is_whole = False
        """The client has said that nothing follows."""

    def parse(self, message: bytes) -> WireChunk | None:
        """As `take`, of a message off the wire; raises what `parse` does."""
        return self.take(parse(message))

    def take(self, message: WireMessage) -> WireChunk | None:
        """The chunk that a message brings; None for the end.

        Raises:
            UpdateRefused (INVALID_UPDATE): a message that may not come here, or contradicts itself.
        """
        self._number += 1
        name = f"message {self._number} of the stream"
        if self.is_whole:
            invalid(name, "comes after the end")
        if isinstance(message, WireChunk):
            if message.packed and message.tensor:
                invalid(name, f"is packed, but names tensor {message.tensor}")
            return message
        if message.WhichOneof("message") != "end":
            invalid(name, "is no chunk; the header comes first and once")
        if message.end.num_chunks != self._number - 1:
            invalid(name, f"ends {message.end.num_chunks} chunks, but {self._number - 1} came")
        self.is_whole = True
        return None
