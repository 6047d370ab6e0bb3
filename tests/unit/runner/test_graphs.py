"""One capture: it begins and ends, whatever fails in it."""

from __future__ import annotations

import pytest
import torch

from rollout_engine.runner.graphs import capture_graph


@pytest.mark.parametrize("is_spoiled", [False, True])
def test_a_capture_ends_and_tells_what_failed_in_it(is_spoiled, monkeypatch):
    log = []

    class FakeGraph:
        def capture_begin(self, pool, capture_error_mode):
            log.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self):
            log.append("end")
            if is_spoiled:
                raise RuntimeError("cudaErrorStreamCaptureInvalidated")

    def work():
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        capture_graph(work, "pool")
    assert log == ["begin pool thread_local", "end"]
    if not is_spoiled:
        assert isinstance(capture_graph(lambda: log.append("work"), "pool"), FakeGraph)
        assert log[3:] == ["work", "end"]
