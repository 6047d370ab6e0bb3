"""Messages of the chunk stream are written by hand as the protobuf library writes them."""

from __future__ import annotations

import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.v1 import weights_pb2 as pb
from trainers_adapters.chunk_wire import LARGE_BYTES, chunk_message, stream_messages

Request = pb.UpdateWeightsFromTensorRequest


@settings(max_examples=300, deadline=None)
@given(
    st.none() | st.integers(0, 2**32 - 1) | st.integers(0, 300),
    st.integers(0, 2**64 - 1) | st.integers(0, 300),
    st.lists(st.binary(max_size=200), max_size=4),
)
def test_a_chunk_is_written_as_the_library_writes_it(tensor, offset, parts):
    data = b"".join(parts)
    chunk = pb.TensorChunk(tensor=tensor or 0, offset=offset, data=data, packed=tensor is None)
    written = Request(chunk=chunk).SerializeToString()
    assert chunk_message((tensor, offset, data)) == written
    assert chunk_message((tensor, offset, [memoryview(part) for part in parts])) == written


def test_a_large_chunk_in_pieces_is_written_as_the_library_writes_it():
    wide = memoryview(array.array("H", range(60000)))
    parts = [bytes(range(256)) * 700, b"", bytearray(96), wide, memoryview(b"the end")]
    data = b"".join([bytes(part) for part in parts])
    assert len(data) > 2 * LARGE_BYTES
    written = Request(chunk=pb.TensorChunk(tensor=7, offset=1 << 40, data=data)).SerializeToString()
    assert chunk_message((7, 1 << 40, parts)) == written
    assert chunk_message((7, 1 << 40, data)) == written


def test_views_of_wider_elements_count_in_bytes():
    view = memoryview(bytes(range(16))).cast("I")
    assert Request.FromString(chunk_message((0, 8, view))).chunk.data == bytes(range(16))


@pytest.mark.parametrize(("tensor", "offset"), [(-1, 0), (1 << 32, 0), (0, -8), (0, 1 << 64)])
def test_numbers_that_no_field_holds(tensor, offset):
    with pytest.raises(ValueError, match="which no message can carry"):
        chunk_message((tensor, offset, b""))


def test_a_stream_says_that_it_is_whole_if_it_is_told_to():
    header = pb.UpdateWeightsFromTensorHeader(update_id="u")
    chunks = [(0, 0, b"12345678"), chunk_message((0, 8, b"12345678"))]
    silent = [Request.FromString(message) for message in stream_messages(header, chunks, says_end=False)]
    assert [message.WhichOneof("message") for message in silent] == ["header", "chunk", "chunk"]
    assert [message.chunk.offset for message in silent[1:]] == [0, 8]
    whole = [Request.FromString(message) for message in stream_messages(header, chunks, says_end=True)]
    assert whole[:3] == silent
    assert whole[3].end.num_chunks == 2
