"""Messages of any kind from their descriptors, and bytes that are nearly messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MAX_DEPTH = 4

_BITS = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_SINT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_SFIXED32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_SINT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_SFIXED64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_FIXED32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.TYPE_FIXED64: (0, (1 << 64) - 1),
}
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-30, 1e30, math.inf, -math.inf, math.nan)


def messages(descriptor: Descriptor, words: Sequence[str], depth: int = 0) -> st.SearchStrategy[Message]:
    """Any message of a type: every field may be left out, be likely, or be at an end of its range.

    Args:
        words: strings that mean something to an engine, from which half of all strings are taken.
    """

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if not draw(st.booleans()):
                continue
            many = field.is_repeated
            if field.message_type is not None:
                if depth >= MAX_DEPTH:
                    continue
                assert not field.message_type.GetOptions().map_entry, "no message of ours has a map"
                parts = messages(field.message_type, words, depth + 1)
                for part in draw(st.lists(parts, max_size=3)) if many else [draw(parts)]:
                    target = getattr(message, field.name)
                    (target.add() if many else target).CopyFrom(part)
            elif many:
                getattr(message, field.name).extend(draw(st.lists(_scalar(field, words), max_size=5)))
            else:
                setattr(message, field.name, draw(_scalar(field, words)))
        return message

    return build()


def _scalar(field: FieldDescriptor, words: Sequence[str]) -> st.SearchStrategy[Any]:
    if field.type in _BITS:
        low, high = _BITS[field.type]
        ends = st.sampled_from(sorted({low, high, low // 2, high // 2, high - 1, max(low, -1)}))
        return st.integers(0, 300) | ends
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return st.sampled_from(_FLOATS) | st.floats(width=32)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.sampled_from([value.number for value in field.enum_type.values] + [99])
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.sampled_from(list(words)) | st.text(max_size=12)
    assert field.type == FieldDescriptor.TYPE_BYTES, f"{field.full_name} has a type without a strategy"
    return st.binary(max_size=64) | st.just(bytes(64 << 10))


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes of a message with some of them changed, removed, doubled, or put in."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(("flip", "remove", "double", "insert", "cut")))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "remove":
            del data[at : at + draw(st.integers(1, 8))]
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 32))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "cut":
            del data[at:]
    return bytes(data)
