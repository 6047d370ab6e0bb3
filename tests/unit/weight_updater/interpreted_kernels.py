"""Runs the kernels in triton's interpreter, against the CPU's checksums; see test_device_kernels.py."""

from __future__ import annotations

import random

import torch

from weight_updater import device_scan
from weight_updater.checksum import Scan, scan

CPU = torch.device("cpu")
RANGES = [
    (0, None),
    (16, torch.bfloat16),
    (8192, torch.float32),
    (8192 * 3 + 24, torch.float64),
    (20002, torch.float16),
    (7, None),
    (50000, torch.bfloat16),
    (1, None),
] * 2


def main() -> None:
    # Several chunks, of several parts, of several steps, in few bytes.
    device_scan.CHUNK_BYTES = 32768
    device_scan._SCANNING = device_scan._Shape(parts=4, words=256, num_warps=4)
    device_scan._COPYING = device_scan._Shape(parts=2, words=512, num_warps=4)
    choose = random.Random(0)
    for seed in range(3):
        data = torch.randint(0, 120, (400_000,), dtype=torch.uint8)
        copied, expected = torch.zeros_like(data), torch.zeros_like(data)
        pairs, dtypes, at = [], [], seed
        for size, dtype in RANGES:
            at += choose.choice([0, 1, 2, 5, 8, 16])
            to = at + choose.choice([0, 8])
            pairs.append((copied[to : to + size], data[at : at + size]))
            expected[to : to + size] = data[at : at + size]
            dtypes.append(dtype)
            at += size + 16
        found = device_scan.copy_many(pairs, CPU, dtypes)
        assert found == [scan(source, 0, dtype) for (_, source), dtype in zip(pairs, dtypes, strict=True)]
        assert torch.equal(copied, expected)
        copied.zero_()
        assert device_scan.copy_many(pairs, CPU) == []
        assert torch.equal(copied, expected)
        copied.zero_()
        launch = device_scan.Launch(CPU, pairs, dtypes)
        for again in (launch.start().result(), launch.run()):
            assert again.totals.tolist() == [one.total for one in found]
            assert again.nonfinite.tolist() == [one.nonfinite for one in found]
        assert torch.equal(copied, expected)
        sources, offsets = [source for _, source in pairs], [8 * number for number in range(len(pairs))]
        assert device_scan.scan_many(sources, CPU, dtypes, offsets) == [
            scan(*arguments) for arguments in zip(sources, offsets, dtypes, strict=True)
        ]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for bad in (float("inf"), float("-inf"), float("nan")):
            values = torch.full((3000,), torch.finfo(dtype).max, dtype=dtype)
            raw = values.view(torch.uint8)
            assert not device_scan.scan_many([raw], CPU, [dtype])[0].nonfinite
            values[2999] = bad
            assert device_scan.scan_many([raw], CPU, [dtype]) == [Scan(scan(raw).total, nonfinite=True)]


if __name__ == "__main__":
    main()
