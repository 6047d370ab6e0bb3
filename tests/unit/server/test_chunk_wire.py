"""Messages of the chunk stream are read by hand as the protobuf library reads them, or refused as by it."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.errors import EngineError
from rollout_engine.server.chunk_wire import ChunkReader, WireChunk, parse
from rollout_engine.v1 import weights_pb2 as pb
from weight_updater.errors import UpdateRefused

Request = pb.UpdateWeightsFromTensorRequest
MANY = settings(max_examples=400, deadline=None)

chunks = st.builds(
    pb.TensorChunk,
    tensor=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**64 - 1) | st.integers(0, 300),
    data=st.binary(max_size=300),
    packed=st.booleans(),
)
varints = st.builds(
    lambda value, longer: _varint(value) if not longer else _varint(value | 1 << 63 << longer)[:10],
    st.integers(0, 2**70),
    st.integers(0, 3),
)


def _varint(value: int) -> bytes:
    found = bytearray()
    while True:
        found.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(found)


def fields(tag: bytes, payload: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return payload.map(lambda data: tag + data)


# Bodies of a chunk with fields in any order, repeated, of the wrong type, with odd numbers, or cut off.
bodies = st.lists(
    st.one_of(
        fields(b"\x08", varints),
        fields(b"\x10", varints),
        fields(b"\x20", varints),
        st.binary(max_size=20).map(lambda data: b"\x1a" + _varint(len(data)) + data),
        fields(b"\x1a", varints),
        fields(b"\x0d", st.binary(min_size=4, max_size=4)),
        fields(b"\x28", varints),
        fields(b"\x88\x00", varints),
        st.binary(max_size=6),
    ),
    max_size=6,
).map(b"".join)
messages = st.one_of(
    bodies.map(lambda body: b"\x12" + _varint(len(body)) + body),
    st.tuples(bodies, st.integers(-3, 3)).map(lambda x: b"\x12" + _varint(max(0, len(x[0]) + x[1])) + x[0]),
    st.tuples(bodies, bodies).map(
        lambda pair: b"".join(b"\x12" + _varint(len(body)) + body for body in pair)
    ),
    bodies.map(lambda body: b"\x0a" + _varint(len(body)) + body),
    st.binary(max_size=30),
)


def read(message: bytes) -> Request | None:
    """What `parse` makes of a message, as the library's own class; None if it refuses."""
    try:
        found = parse(message)
    except EngineError:
        return None
    if not isinstance(found, WireChunk):
        assert found.WhichOneof("message") != "chunk"
        return found
    assert 0 <= found.start <= found.start + found.size <= len(found.source)
    return Request(
        chunk=pb.TensorChunk(
            tensor=found.tensor, offset=found.offset, data=bytes(found.data), packed=found.packed
        )
    )


def read_by_library(message: bytes) -> Request | None:
    try:
        found = Request.FromString(message)
    except DecodeError:
        return None
    if found.WhichOneof("message") == "chunk":  # without fields that it does not know
        found.chunk.DiscardUnknownFields()
        return Request(chunk=found.chunk)
    return found


@MANY
@given(chunks)
def test_a_chunk_is_read_as_it_was_written_and_not_copied(chunk):
    message = Request(chunk=chunk).SerializeToString()
    assert read(message) == Request(chunk=chunk)
    found = parse(message)
    if chunk.data and chunk.offset < 1 << 63:
        assert found.source is message
        assert found.data.obj is message


@MANY
@given(messages)
def test_any_message_is_read_or_refused_as_by_the_library(message):
    assert read(message) == read_by_library(message)


@MANY
@given(chunks, st.data())
def test_a_damaged_message_is_read_or_refused_as_by_the_library(chunk, data):
    message = bytearray(Request(chunk=chunk).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(message) - 1, 20)))
        message[at] = data.draw(st.integers(0, 255))
    message = message[: data.draw(st.integers(max(0, len(message) - 4), len(message)))]
    assert read(bytes(message)) == read_by_library(bytes(message))


def test_what_may_follow_the_header():
    one = Request(chunk={"data": b"12345678"}).SerializeToString()
    end = Request(end={"num_chunks": 2}).SerializeToString()
    reader = ChunkReader()
    assert bytes(reader.parse(one).data) == b"12345678"
    assert not reader.is_whole
    reader.parse(one)
    assert reader.parse(end) is None
    assert reader.is_whole
    with pytest.raises(UpdateRefused, match="message 4 of the stream comes after the end"):
        reader.parse(one)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Request(header={"update_id": "u"}), "message 1 of the stream is no chunk"),
        (Request(), "message 1 of the stream is no chunk"),
        (Request(end={"num_chunks": 1}), "message 1 of the stream ends 1 chunks, but 0 came"),
        (
            Request(chunk={"packed": True, "tensor": 2}),
            "message 1 of the stream is packed, but names tensor 2",
        ),
    ],
)
def test_what_may_not_follow_the_header(message, text):
    with pytest.raises(UpdateRefused, match=text) as refused:
        ChunkReader().parse(message.SerializeToString())
    assert refused.value.reason == "INVALID_UPDATE"


def test_bytes_that_are_no_message():
    with pytest.raises(EngineError, match="cannot be parsed"):
        ChunkReader().parse(b"\x12\x7f")
