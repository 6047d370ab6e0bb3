"""Buckets on a GPU, whose streams are stand-ins: filled by one thread, sealed by another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch

from trainers_adapters.buckets import Bucket
from weight_updater.checksum import checksum
from weight_updater.requests import ShmSegment


class Memory:
    def __init__(self) -> None:
        self.data = torch.zeros(1024, dtype=torch.uint8)

    def region(self) -> ShmSegment:
        raise AssertionError("nothing is lent here")

    def close(self, *, free: bool) -> None:
        pass


class Stream:
    """The current one of the thread that asks for it. waited: for which of them somebody has."""

    waited: ClassVar[list[str]] = []

    def __init__(self, device: torch.device) -> None:
        self._name = threading.current_thread().name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other._name == self._name

    __hash__ = None  # type: ignore[assignment]

    def synchronize(self) -> None:
        self.waited.append(self._name)


def test_it_is_sealed_once_the_streams_that_fill_it_have_come_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's loop adds the tensors, and another thread sends them: its own stream says nothing of them."""
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(Bucket, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(Stream, "waited", [])
    bucket, tensors = Bucket(Memory()), [torch.arange(8.0), torch.arange(5.0)]
    with ThreadPoolExecutor(1, thread_name_prefix="filling") as filling:
        for index, tensor in enumerate(tensors):
            filling.submit(bucket.put, index, tensor, torch.bfloat16).result()
        assert Stream.waited == []
        assert bucket.sealed() == [checksum(tensor.bfloat16()) for tensor in tensors]
        assert Stream.waited == ["filling_0"]
        bucket.clear()
        filling.submit(bucket.put, 0, tensors[0], torch.float32).result()
        bucket.put(1, tensors[1], torch.float32)
        bucket.sealed()
    assert Stream.waited[1:] == ["filling_0", threading.current_thread().name]
