"""Messages of the chunk stream, written so that the bytes they carry are copied once. No torch.

The protobuf library would copy a chunk's bytes three times on their way into a message. What is written here
is what the library writes, byte for byte, so that it can read it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rollout_engine.v1 import weights_pb2 as pb
from rollout_engine.v1.weights_pb2_grpc import WeightsStub

Bytes = bytes | bytearray | memoryview
Chunk = tuple[int | None, int, Bytes | list[Bytes]]
"""(index in the manifest, offset in bytes within the tensor, bytes in one piece or several). No index: the
offset counts in all tensors packed in the manifest's order, each at a multiple of 256 bytes, of which a chunk
may hold several.
"""

LARGE_BYTES = 128 << 10
"""From this size on a message is put together without keeping other threads from the interpreter: several
streams send at once.
"""

_CHUNK_TAG = b"\x12"  # field 2 of UpdateWeightsFromTensorRequest, length-delimited
_TENSOR_TAG, _OFFSET_TAG, _DATA_TAG, _PACKED = b"\x08", b"\x10", b"\x1a", b"\x20\x01"  # of TensorChunk


class ChunkStreamStub(WeightsStub):
    """The Weights service; UpdateWeightsFromTensor takes messages that are serialised already."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)  # type: ignore[no-untyped-call]
        self.UpdateWeightsFromTensor = channel.stream_unary(
            "/rollout_engine.v1.Weights/UpdateWeightsFromTensor",
            response_deserializer=pb.UpdateWeightsResponse.FromString,
        )


class Messages:
    """Messages of a client stream, and why making them failed: gRPC only says that it did.

    failure: what `messages` raised.
    """

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self.failure: BaseException | None = None

    def __iter__(self) -> Messages:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except BaseException as error:
            self.failure = error
            raise


def stream_messages(
    header: pb.UpdateWeightsFromTensorHeader, chunks: Iterable[Chunk | bytes], *, says_end: bool
) -> Iterator[bytes]:
    """A whole stream, serialised.

    Args:
        chunks: as they are, or as messages.
        says_end: tell the engine how many chunks there were, so that it need not wait for news of a break.
    """
    yield pb.UpdateWeightsFromTensorRequest(header=header).SerializeToString()
    num_chunks = 0
    for chunk in chunks:
        yield chunk if isinstance(chunk, bytes) else chunk_message(chunk)
        num_chunks += 1
    if says_end:
        end = pb.UpdateWeightsFromTensorEnd(num_chunks=num_chunks)
        yield pb.UpdateWeightsFromTensorRequest(end=end).SerializeToString()


def chunk_message(chunk: Chunk) -> bytes:
    """One chunk as a message.

    Raises:
        ValueError: a tensor index or an offset that cannot be sent.
    """
    tensor, offset, data = chunk
    if not 0 <= (tensor or 0) < 1 << 32 or not 0 <= offset < 1 << 64:
        raise ValueError(f"a chunk names tensor {tensor} and byte {offset}, which no message can carry")
    parts = data if isinstance(data, list) else [data]
    size = sum([memoryview(part).nbytes for part in parts])
    # Fields that hold zero are left out, as the library does.
    fields = [_TENSOR_TAG + _varint(tensor)] if tensor else []
    if offset:
        fields.append(_OFFSET_TAG + _varint(offset))
    if size:
        fields.append(_DATA_TAG + _varint(size))
    head, tail = b"".join(fields), _PACKED if tensor is None else b""
    return _joined([_CHUNK_TAG, _varint(len(head) + size + len(tail)), head, *parts, tail], size)


def _joined(parts: Sequence[Bytes], size: int) -> bytes:
    """`parts`, of `size` bytes or a little more, as one bytes object."""
    if size < LARGE_BYTES:
        return b"".join(parts)
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in parts if len(part)]
    message, memory = _new_bytes(sum([array.size for array in arrays]))
    end = 0
    for array in arrays:
        memory[end : end + array.size] = array
        end += array.size
    return message


def _new_bytes(size: int) -> tuple[bytes, np.ndarray[Any, np.dtype[np.uint8]]]:
    """A bytes object that nobody has seen, with undefined contents, and [size] uint8 to write them by.

    Python allows this as long as the object has one owner. numpy copies without holding the interpreter.
    """
    made: bytes = _bytes_of_size(None, size)
    address = ctypes.cast(ctypes.c_char_p(made), ctypes.c_void_p).value
    assert address is not None
    memory = (ctypes.c_uint8 * size).from_address(address)
    return made, np.frombuffer(memoryview(memory), dtype=np.uint8)


_bytes_of_size = ctypes.pythonapi.PyBytes_FromStringAndSize
_bytes_of_size.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_bytes_of_size.restype = ctypes.py_object


def _varint(value: int) -> bytes:
    """A number in [0, 2**64) as protobuf has it: seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
