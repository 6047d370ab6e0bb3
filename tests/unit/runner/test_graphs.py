"""One capture: it begins and ends, whatever fails in it, for torch's allocator too."""

from __future__ import annotations

import pytest
import torch

from rollout_engine.runner.graphs import capture_graph

SPOILED = "cudaErrorStreamCaptureInvalidated"


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What torch is told, by stand-ins. Append "spoil" for the captures that end from then on to fail, and
    "known" for an allocator that knows that already.
    """
    log: list[str] = []

    class FakeGraph:
        def capture_begin(self, pool, capture_error_mode):
            log.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self):
            log.append("end")
            if "spoil" in log:
                raise RuntimeError(SPOILED)

    def end_allocate(index, pool):
        log.append(f"allocator ends {pool} of {index}")
        if "known" in log:
            raise RuntimeError("not currently recording to mempool_id")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocate, raising=False)
    monkeypatch.setattr(
        torch._C,
        "_cuda_releasePool",
        lambda index, pool: log.append(f"allocator releases {pool} of {index}"),
        raising=False,
    )
    return log


def no_memory() -> None:
    raise torch.OutOfMemoryError("no memory")


def test_a_capture_ends_and_tells_what_failed_in_it(log):
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        capture_graph(no_memory, "pool")
    assert log == ["begin pool thread_local", "end"]
    capture_graph(lambda: log.append("work"), "pool")
    assert log[2:] == ["begin pool thread_local", "work", "end"]


@pytest.mark.parametrize("work", [no_memory, lambda: None])
def test_a_spoiled_capture_ends_for_the_allocator_too(work, log):
    """Torch 2.11 leaves it in the capture: each `empty_cache` after that failed, and so each capture."""
    log.append("spoil")
    with pytest.raises(RuntimeError, match="no memory" if work is no_memory else SPOILED):
        capture_graph(work, "pool")
    assert log[2:] == ["end", "allocator ends pool of 1", "allocator releases pool of 1"]


def test_an_allocator_that_knows_is_told_no_more(log):
    log += ["spoil", "known"]
    with pytest.raises(RuntimeError, match=SPOILED):
        capture_graph(lambda: None, "pool")
    assert log[3:] == ["end", "allocator ends pool of 1"]
