"""Each byte exactly once, whatever the pieces."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.weight_updater.tiny_target import (
    EMBED,
    NORM,
    SHAPES,
    UP,
    K,
    Q,
    TinyTarget,
    manifest_of,
    raw,
    weights,
)
from weight_updater.cast import cast_into
from weight_updater.checksum import checksum
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.plan import plan_update
from weight_updater.requests import Manifest
from weight_updater.sink import Sink

NAMES = list(SHAPES)


def make_sink(
    target: TinyTarget, manifest: Manifest, *, hashing: bool = True, find_nonfinite: bool = True
) -> Sink:
    plan = plan_update(target, manifest, partial=True, merged=False)
    destination = target.arena.allocate(target.device)
    return Sink(plan, target.arena, destination, hashing=hashing, find_nonfinite=find_nonfinite)


@st.composite
def chunkings(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(tensor, start, end) over all tensors in float32, cut at multiples of 8, in any order."""
    pieces = []
    for index, shape in enumerate(SHAPES.values()):
        nbytes = 4 * torch.Size(shape).numel()
        inner = st.integers(1, max(1, (nbytes - 1) // 8)).map(lambda word: 8 * word)
        cuts = sorted(cut for cut in draw(st.sets(inner, max_size=6)) if cut < nbytes)
        edges = [0, *cuts, nbytes]
        pieces += [(index, a, b) for a, b in itertools.pairwise(edges)]
    return draw(st.permutations(pieces))


@settings(max_examples=60, deadline=None)
@given(chunkings(), st.booleans())
def test_any_chunking_gives_the_same_bytes_and_checksums(
    pieces: list[tuple[int, int, int]], cast: bool
) -> None:
    target = TinyTarget()
    sent = weights(1, torch.float32)
    if not cast:  # the one slot that is float32 itself
        sent = {NORM: sent[NORM]}
        pieces = [(0, a, b) for index, a, b in pieces if index == NAMES.index(NORM)]
    sink = make_sink(target, manifest_of(sent))
    data = [raw(value) for value in sent.values()]
    for index, start, end in pieces:
        sink.write(index, start, data[index][start:end])
    assert sink.incomplete() == []
    for index, (name, value) in enumerate(sent.items()):
        stored = sink.slot_bytes(index)
        assert stored is not None
        assert torch.equal(stored, value.to(target.slot(name).dtype))
        assert sink.received_checksum(index) == checksum(value)
        assert sink.slot_checksum(index) == checksum(stored)


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(15)), st.integers(0, 2))
def test_bfloat16_in_words_of_eight_bytes(order: list[int], skipped: int) -> None:
    target = TinyTarget()
    new = {EMBED: weights(1)[EMBED]}  # 120 bytes
    sink = make_sink(target, manifest_of(new))
    for word in order[skipped:]:
        sink.write(0, 8 * word, raw(new[EMBED])[8 * word : 8 * word + 8])
    if skipped:
        assert sink.incomplete() == [(0, 120 - 8 * skipped)]
    else:
        assert sink.incomplete() == []
        assert sink.received_checksum(0) == checksum(new[EMBED])


BAD = {
    "unknown tensor": (6, 0, 8, "names tensor 6, the manifest has 6"),
    "negative tensor": (-1, 0, 8, "names tensor -1"),
    "past the end": (0, 112, 16, r"bytes \[112, 128\) lies outside of the tensor's 120 bytes"),
    "before the start": (0, -8, 16, "lies outside"),
    "odd offset": (0, 4, 8, "is misaligned"),
    "odd end": (0, 24, 4, "is misaligned"),
    "twice": (0, 8, 8, r"overlaps \[0, 16\), which arrived already"),
    "across": (0, 8, 24, "overlaps"),
    "around": (0, 0, 120, "overlaps"),
}


@pytest.mark.case("B119")
@pytest.mark.parametrize(("index", "offset", "size", "match"), BAD.values(), ids=BAD.keys())
def test_bad_chunks(index: int, offset: int, size: int, match: str) -> None:
    target = TinyTarget()
    sink = make_sink(target, manifest_of(weights(1)))
    sink.write(0, 0, torch.ones(16, dtype=torch.uint8))
    with pytest.raises(UpdateRefused, match=match) as caught:
        sink.write(index, offset, torch.zeros(size, dtype=torch.uint8))
    assert caught.value.reason is Reason.BAD_CHUNK
    assert sink.received_bytes == 16


def packed(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """All tensors in order, each at a multiple of 256 bytes, with 0xFF between them."""
    offsets, size = manifest_of(tensors).packed_offsets()
    data = torch.full((size,), 255, dtype=torch.uint8)
    for offset, value in zip(offsets, tensors.values(), strict=True):
        data[offset : offset + value.nbytes] = raw(value)
    return data


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans())
def test_any_cutting_of_the_packed_tensors_gives_the_same(draw: st.DataObject, cast: bool) -> None:
    target = TinyTarget()
    sent = weights(1, torch.float32) if cast else weights(1)
    data = packed(sent)
    words = st.sets(st.integers(1, data.numel() // 8 - 1), max_size=12)
    edges = [0, *sorted(8 * word for word in draw.draw(words)), data.numel()]
    sink = make_sink(target, manifest_of(sent))
    for start, end in draw.draw(st.permutations(list(itertools.pairwise(edges)))):
        sink.write_packed(start, data[start:end])
    assert sink.incomplete() == []
    assert sink.received_bytes == manifest_of(sent).nbytes
    everything = range(len(sent))
    assert sink.received_checksums(everything) == [checksum(value) for value in sent.values()]
    for index, value in enumerate(sent.values()):
        stored = sink.slot_bytes(index)
        assert stored is not None
        assert torch.equal(stored, value.to(stored.dtype))
        assert sink.slot_checksums(everything)[index] == checksum(stored)


@pytest.mark.parametrize(
    ("position", "size", "match"),
    [
        (-8, 16, "lie in the 1536 bytes of all tensors"),
        (4, 8, "start at a multiple of 8"),
        (1528, 16, "lie in the 1536 bytes"),
        (0, 12, r"\[0, 12\) is misaligned"),
        (96, 16, r"embed_tokens.weight with bytes \[96, 112\) overlaps \[0, 120\)"),
        (0, 1536, "overlaps"),
        (232, 128, r"q_proj.weight with bytes \[0, 72\) overlaps \[0, 72\)"),
    ],
)
def test_bad_packed_chunks(position: int, size: int, match: str) -> None:
    new = weights(1)
    sink = make_sink(TinyTarget(), manifest_of(new))
    sink.write_whole([0, 1], [0, 256], packed(new))
    with pytest.raises(UpdateRefused, match=match) as caught:
        sink.write_packed(position, torch.zeros(size, dtype=torch.uint8))
    assert caught.value.reason is Reason.BAD_CHUNK
    assert sink.received_checksums([0, 1]) == [checksum(new[EMBED]), checksum(new[Q])]


def test_whole_tensors_from_anywhere_in_a_buffer() -> None:
    target = TinyTarget()
    new = weights(1)
    sink = make_sink(target, manifest_of(new))
    data = torch.cat([torch.zeros(3, dtype=torch.uint8), *map(raw, reversed(new.values()))])
    sizes = [value.nbytes for value in new.values()]
    positions = [3 + sum(sizes[index + 1 :]) for index in range(len(sizes))]
    sink.write_whole([5, 0, 3], [positions[5], positions[0], positions[3]], data)
    assert [index for index, _ in sink.incomplete()] == [1, 2, 4]
    sink.write_whole([1, 2, 4], [positions[1], positions[2], positions[4]], data)
    assert sink.incomplete() == []
    for index, value in enumerate(new.values()):
        assert torch.equal(sink.slot_bytes(index), value)  # type: ignore[arg-type]
        assert sink.slot_checksum(index) == checksum(value)


def test_a_tensor_that_comes_twice_in_one_call_is_refused() -> None:
    new = weights(1)
    sink = make_sink(TinyTarget(), manifest_of(new))
    for twice in ([0, 1, 0], [2, 2]):
        with pytest.raises(UpdateRefused, match="overlaps"):
            sink.write_whole(twice, [0] * len(twice), packed(new))
    assert {index for index, _ in sink.incomplete()} >= {0, 1}


@pytest.mark.case("B024")
def test_round_to_nearest_even() -> None:
    target = TinyTarget()
    values = torch.zeros(2, 6)
    values[0, :3] = torch.tensor([1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8])
    values[1, 0] = 3.4e38
    sink = make_sink(target, manifest_of({K: values}))
    sink.write(0, 0, raw(values))
    stored = sink.slot_bytes(0)
    assert stored is not None
    assert stored[0, :3].tolist() == [1.0, 1.0, 1.015625]
    assert stored[1, 0] == float("inf")
    assert sink.nonfinite([0]) == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float64_is_rounded_once(dtype: torch.dtype) -> None:
    half = 2.0 ** -(8 if dtype is torch.bfloat16 else 11)
    above, below = 1 + half + 2**-40, 1 + half - 2**-40
    infinity = float("inf")
    source = torch.tensor(
        [above, below, 1 + half, -above, 1e300, infinity, -infinity, 0.0], dtype=torch.float64
    )
    found = torch.empty(8, dtype=dtype)
    cast_into(found, source)
    assert found.tolist() == [1 + 2 * half, 1.0, 1.0, -1 - 2 * half, infinity, infinity, -infinity, 0.0]
    cast_into(found[:1], torch.tensor([float("nan")], dtype=torch.float64))
    assert found[0].isnan()


def test_nonfinite_is_found_in_the_chunk_that_has_it() -> None:
    target = TinyTarget()
    new = weights(1)
    new[UP][4, 5] = float("nan")
    for hashing in (True, False):
        sink = make_sink(target, manifest_of(new, checksums=False), hashing=hashing)
        for index, value in enumerate(new.values()):
            sink.write(index, 0, raw(value)[:8])
            sink.write(index, 8, raw(value)[8:])
        assert sink.nonfinite(range(6)) == [index for index, name in enumerate(new) if name == UP]


def test_unaligned_memory_is_read_right() -> None:
    target = TinyTarget()
    value = weights(1, torch.float32)[UP]
    shifted = torch.zeros(value.nbytes + 1, dtype=torch.uint8)
    shifted[1:] = raw(value)
    sink = make_sink(target, manifest_of({UP: value}))
    sink.write(0, 0, shifted[1:])
    stored = sink.slot_bytes(0)
    assert stored is not None
    assert torch.equal(stored, value.bfloat16())
    assert sink.received_checksum(0) == checksum(value)


def test_many_threads_write_at_once() -> None:
    target = TinyTarget()
    new = weights(1)
    sink = make_sink(target, manifest_of(new))

    def work(index: int, value: torch.Tensor) -> None:
        for start in range(0, value.nbytes, 8):
            sink.write(index, start, raw(value)[start : start + 8])

    threads = [threading.Thread(target=work, args=item) for item in enumerate(new.values())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sink.incomplete() == []
    assert [sink.received_checksum(i) for i in range(6)] == [checksum(value) for value in new.values()]


def test_end_turns_writers_away() -> None:
    target = TinyTarget()
    sink = make_sink(target, manifest_of(weights(1)))
    sink.end(UpdateRefused(Reason.TIMEOUT, "too late"))
    with pytest.raises(UpdateRefused, match="too late"):
        sink.write(0, 0, raw(weights(1)[EMBED]))
