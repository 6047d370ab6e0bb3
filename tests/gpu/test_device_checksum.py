"""Checksums and copies on a GPU: the same 64 bits as on the CPU, whatever the size, dtype and address."""

from __future__ import annotations

import random

import pytest
import torch

from weight_updater.checksum import Scan, checksum, checksums, scan
from weight_updater.device_scan import CHUNK_BYTES, Launch, copy_many, is_fast, scan_many, side_stream

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SIZES = [0, 8, 16, 24, 4096, 2048 * 8 * 3, CHUNK_BYTES, CHUNK_BYTES + 8, 3 * CHUNK_BYTES - 16]
STARTS = [0, 16, 8, 2, 13]


def some_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    """[nbytes] uint8 below 120, so that no value of any dtype is infinite or NaN."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randint(0, 120, (nbytes,), dtype=torch.uint8, device=DEVICE, generator=generator)


def test_the_kernels_are_used():
    assert is_fast(DEVICE), "triton is missing"


@pytest.mark.parametrize("dtype", [*DTYPES, None])
def test_ranges_of_every_size_at_every_address(dtype):
    data = some_bytes(sum(SIZES) * len(STARTS) + 64 * len(SIZES) * len(STARTS))
    parts, at = [], 0
    for size in SIZES:
        for start in STARTS:
            at = -(-at // 16) * 16 + start
            parts.append(data[at : at + size])
            at += size
    offsets = [8 * number for number in range(len(parts))]
    expected = [scan(part.cpu(), offset, dtype) for part, offset in zip(parts, offsets, strict=True)]
    assert scan_many(parts, DEVICE, [dtype] * len(parts), offsets) == expected
    assert not any(found.nonfinite for found in expected)


@pytest.mark.parametrize("size", [1, 7, 9, 4095, CHUNK_BYTES + 5])
@pytest.mark.parametrize("start", STARTS)
def test_bytes_that_fill_no_word(size, start):
    data = some_bytes(size + 16)[start : start + size]
    assert scan_many([data], DEVICE, [None]) == [scan(data.cpu())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite(dtype, bad):
    for count in (1, 3, 8, 1000, CHUNK_BYTES):
        values = torch.full((count,), torch.finfo(dtype).max, dtype=dtype, device=DEVICE)
        raw = values.view(torch.uint8)
        for at in {0, count // 2, count - 1}:
            assert not scan_many([raw], DEVICE, [dtype])[0].nonfinite
            values[at] = bad
            assert scan_many([raw], DEVICE, [dtype]) == [scan(raw.cpu(), 0, dtype)]
            assert scan_many([raw], DEVICE, [dtype])[0].nonfinite
            assert not scan_many([raw], DEVICE, [None])[0].nonfinite
            values[at] = torch.finfo(dtype).tiny


def test_tensors_of_any_strides_and_shape():
    base = torch.randn(300, 70, device=DEVICE)
    tensors = [
        base,
        base.t(),
        base[::3, 1:],
        base[:, 0],
        base.bfloat16(),
        base[:0],
        base[0, 0],
        base.half().t(),
    ]
    assert checksums(tensors) == [checksum(tensor.cpu()) for tensor in tensors]
    assert [checksum(tensor) for tensor in tensors] == [checksum(tensor.cpu()) for tensor in tensors]


@pytest.mark.parametrize("hashed", [False, True])
def test_copies_reach_their_places_and_nothing_else(hashed):
    choose = random.Random(1)
    source = some_bytes(40 << 20)
    destination = torch.full_like(source, 255)
    expected = destination.clone()
    pairs, at = [], 0
    for number in range(60):
        size = choose.choice([0, 1, 7, 16, 1000, 4096, CHUNK_BYTES, CHUNK_BYTES + 24, 2 * CHUNK_BYTES - 2])
        at = -(-at // 16) * 16 + choose.choice(STARTS)
        shift = choose.choice([0, 0, 8, 16, 1])
        pairs.append((destination[at + shift : at + shift + size], source[at : at + size]))
        expected[at + shift : at + shift + size] = source[at : at + size]
        at += size + 17
        assert at < source.numel(), number
    found = copy_many(pairs, DEVICE, [None] * len(pairs) if hashed else None)
    assert torch.equal(destination, expected)
    assert found == ([scan(part.cpu()) for _, part in pairs] if hashed else [])


def test_offsets_beyond_four_gigabytes():
    data = some_bytes((4 << 30) + (1 << 20) + 6)
    half = 2 << 30
    parts = [data[:half], data[half : 2 * half], data[2 * half :]]
    found = scan_many(parts, DEVICE, [None] * 3, [0, half, 2 * half])
    total = sum(part.total for part in found) & ((1 << 64) - 1)
    assert scan_many([data], DEVICE, [None]) == [Scan(total, nonfinite=False)]
    assert scan(parts[2].cpu(), 2 * half) == found[2]
    copied = torch.zeros_like(data)
    assert copy_many([(copied, data)], DEVICE, [None])[0].total == total
    assert torch.equal(copied, data)


def test_it_waits_for_the_callers_stream_and_for_no_other():
    data = some_bytes(64 << 20)
    before = scan(data.cpu())
    busy, caller = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(4_000_000_000)  # about two seconds
        later = torch.cuda.Event()
        later.record()
    assert scan_many([data], DEVICE, [None]) == [before]
    assert not later.query(), "work on another stream was waited for"
    with torch.cuda.stream(caller):
        torch.cuda._sleep(50_000_000)
        data.add_(1)
        assert scan_many([data], DEVICE, [None]) == [scan(data.cpu())] != [before]
    with side_stream(DEVICE):
        assert torch.cuda.current_stream() != torch.cuda.default_stream()


def test_a_launch_that_was_started_goes_on_by_itself():
    data = some_bytes(64 << 20)
    launch, caller = Launch(DEVICE, [data], [None]), torch.cuda.Stream()
    launch.run()  # its table is on the device then, which is waited for
    for _ in range(2):
        with torch.cuda.stream(caller):
            torch.cuda._sleep(1_000_000_000)  # about half a second
            data.add_(1)
            started = launch.start()
            assert not caller.query(), "it waited for what was written before it"
        found = started.result()
        assert caller.query()
        assert Scan(int(found.totals[0]), bool(found.nonfinite[0])) == scan(data.cpu())
    dropped = launch.start()
    del dropped
    assert int(launch.run().totals[0]) == scan(data.cpu()).total


def test_what_follows_a_launch_comes_behind_it():
    source = some_bytes(64 << 20)
    destination, copied = torch.zeros_like(source), torch.zeros_like(source)
    launch = Launch(DEVICE, [(destination, source)], None)
    launch.run()  # its table is on the device then, which is waited for
    destination.zero_()
    torch.cuda._sleep(1_000_000_000)  # about half a second, and the launch comes behind it
    launch.start().follow()
    copied.copy_(destination)  # into memory that is there: to take some may wait for the device
    assert not torch.cuda.current_stream().query(), "the launch was waited for"
    assert torch.equal(copied, source)
