"""Parameters in CPU memory: found where they lie now, also when they were moved, replaced or reshaped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainers_adapters import segments
from trainers_adapters.resident import resident_bytes
from trainers_adapters.segments import PackedSegment
from trainers_adapters.sending import Outgoing
from trainers_adapters.sources import ModuleSource
from weight_updater.checksum import checksum


def module() -> nn.Module:
    made = nn.Module()
    for i in range(5):
        setattr(made, f"w{i}", nn.Parameter(torch.randn(4, 6)))
    made.norm = nn.LayerNorm(6)
    return made


def bytes_of(source: ModuleSource) -> bytes | None:
    packed = resident_bytes(source)
    if packed is None:
        return None
    into = np.zeros(packed.columns.packed[1], dtype=np.uint8)
    packed.read_into(into)
    return into.tobytes()


def expected(source: ModuleSource) -> bytes:
    parts = [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, tensor in source]
    return b"".join(part + bytes(-len(part) % 256) for part in parts)


def shrink(model: nn.Module) -> None:
    model.w1.data = model.w1.data[:2].clone()


def other_values(model: nn.Module) -> None:
    with torch.no_grad():
        model.w1.add_(1)


def reshape(model: nn.Module) -> None:
    model.w1.data = model.w1.data.view(6, 4)  # at the same address


def another_dtype(model: nn.Module) -> None:
    model.w1.data = model.w1.data.bfloat16()


def replaced(model: nn.Module) -> None:
    old = model.w1.data
    model.w1.data = torch.zeros(4, 6)
    old.fill_(7)


@pytest.mark.parametrize("change", [other_values, shrink, reshape, another_dtype, replaced])
def test_bytes_and_manifest_are_those_of_now(change) -> None:
    model = module()
    source = ModuleSource(model)
    before = source.manifest()
    assert bytes_of(source) == expected(source)
    change(model)
    assert bytes_of(source) == expected(source)
    after = source.manifest()
    assert [spec.shape for spec in after.tensors] == [tuple(tensor.shape) for _, tensor in source]
    assert list(after.checksums) == [checksum(tensor) for _, tensor in source]
    assert (after.columns is before.columns) == (change in (other_values, replaced))


def test_what_is_not_there_as_it_is_sent_has_no_place() -> None:
    model = module()
    assert resident_bytes(ModuleSource(model, dtype=torch.bfloat16)) is None
    source = ModuleSource(model)
    assert resident_bytes(source) is not None
    model.w2.data = torch.randn(6, 4).t()
    assert resident_bytes(source) is None
    assert list(source.manifest().checksums) == [checksum(tensor) for _, tensor in source]
    model.w2.data = model.w2.data.contiguous()
    assert bytes_of(source) == expected(source)
    assert resident_bytes(list(source)) is None  # a source that cannot tell


class Odd(nn.Parameter):
    """May lie anywhere."""


def test_a_subclass_of_parameters_is_asked_for_its_values() -> None:
    model = module()
    model.w3 = Odd(torch.ones(2))
    assert resident_bytes(ModuleSource(model)) is None


def test_no_memory_is_kept() -> None:
    model = module()
    source = ModuleSource(model)
    assert resident_bytes(source) is not None
    storage = StorageWeakRef(model.w0.data.untyped_storage())
    assert not storage.expired()
    model.w0.data = torch.zeros(4, 6)
    assert storage.expired()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_a_segment_is_filled_alike_from_memory_and_from_tensors(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "BYTES_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    source = ModuleSource(module())
    segment = PackedSegment()
    try:
        filled = []
        for resident in (None, source.resident(), None):
            with torch.no_grad():
                dict(source)["w0"].add_(1)
            segment.fill(Outgoing(source, source.manifest(), 0.0, True, resident))
            assert segment._segment is not None
            filled.append(bytes(segment._segment.buf))
            assert filled[-1] == expected(source)
        assert len(set(filled)) == 3
    finally:
        segment.close()
