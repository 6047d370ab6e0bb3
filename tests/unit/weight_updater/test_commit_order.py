"""What a commit on a GPU queues, what it does meanwhile, and what it waits for; streams are stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.weight_updater.fake_gpu import fake_gpu
from tests.unit.weight_updater.test_from_cuda import lay_out, receive
from tests.unit.weight_updater.tiny_target import TinyTarget, begin, make_updater, weights
from weight_updater import commit as commit_module
from weight_updater import device_scan, lent_tensors
from weight_updater.commit import make_live
from weight_updater.device_scan import Found, Started
from weight_updater.errors import WeightsTorn
from weight_updater.graphs import NoGraphs
from weight_updater.requests import Path, Recapture, Staging


class Stream:
    """Notes what it is asked for."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self._name} comes behind {other._name}")

    def synchronize(self) -> None:
        self._log.append(f"waited for {self._name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of what torch.cuda is asked for."""
    noted: list[str] = []

    class Event:
        def record(self, stream: Stream) -> None:
            noted.append("event recorded")

        def synchronize(self) -> None:
            noted.append("waited for the event")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("the loop's", noted))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: noted.append("waited for the device"))
    return noted


class Graphs(NoGraphs):
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def moved(self) -> list[str]:
        self._log.append("compared addresses")
        return []


class Write:
    """A launch on the updater's own stream. fails: once it is queued."""

    def __init__(self, log: list[str], *, fails: bool = False) -> None:
        self._log, self._fails = log, fails

    def run(self) -> None:
        self._log.append("launched")
        Started(torch.zeros(1, 2), scan=False, stream=Stream("the updater's", self._log)).follow()  # type: ignore[arg-type]
        if self._fails:
            raise RuntimeError("the next launch failed")

    def undo(self) -> bool:
        self._log.append("nothing to undo")
        return False


def target_of(log: list[str]) -> Any:
    return SimpleNamespace(device=torch.device("cuda", 0), finalise=lambda: log.append("finalise queued"))


def test_addresses_are_compared_while_the_device_copies_and_what_it_wrote_is_read_right_behind(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(target: Any, names: list[str]) -> Callable[[], dict[str, int]]:
        log.append(f"reading of {names} queued")

        def wait() -> dict[str, int]:
            log.append("waited for what was read")
            return {"slot": 7}

        return wait

    monkeypatch.setattr(commit_module, "start_checksums", start)
    note = partial(log.append, "worked out what to tell")
    make_live(target_of(log), Write(log), {"slot": 7}, {}, Graphs(log), Recapture.AUTO, note)
    assert log == [
        "waited for the device",  # passes under the old weights
        "launched",
        "the loop's comes behind the updater's",
        "event recorded",
        "finalise queued",
        "event recorded",
        "reading of ['slot'] queued",
        "compared addresses",
        "worked out what to tell",
        "waited for the event",
        "waited for the event",
        "waited for what was read",
    ]


def test_what_was_launched_before_a_fault_has_ended_when_the_fault_is_told(log: list[str]) -> None:
    """The trainer may free then what it had lent."""
    with pytest.raises(WeightsTorn, match="the next launch failed"):
        make_live(target_of(log), Write(log, fails=True), {}, {}, Graphs(log), Recapture.AUTO)
    assert log[-2:] == ["waited for the device", "nothing to undo"]
    assert log.count("waited for the device") == 2


@pytest.mark.parametrize("staging", [Staging.NONE, Staging.DEVICE])
def test_many_tensors_are_copied_without_waiting_at_the_commit_alone(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []

    class Noting(Started):
        def result(self) -> Found:
            waits.append("result")
            return super().result()

        def follow(self) -> None:
            waits.append("follow")

    @contextmanager
    def stream(device: torch.device) -> Iterator[None]:
        yield
        waits.append("stream")

    with fake_gpu(monkeypatch) as gpu:
        monkeypatch.setattr(device_scan, "Started", Noting)
        monkeypatch.setattr(lent_tensors, "side_stream", stream)
        updater = make_updater(TinyTarget(), device_staging=True)
        request = lay_out(gpu, weights(1), [gpu.allocate(1, 4096), gpu.allocate(2, 4096)])
        fields = {"skip_checksums": True, "allow_nonfinite": True}
        update_id = begin(updater, weights(1), path=Path.IPC, staging=staging, **fields)
        receive(updater, request, update_id)
        updater.commit(update_id)
        assert gpu.launches == ["copy"]
    assert waits == (["follow"] if staging is Staging.NONE else ["follow", "stream"])
