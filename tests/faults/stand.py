"""What is struck: a front with its engine, how it is replaced, and what it must give back after a round."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rollout_engine.flows import NUM_WORKERS
from tests.faults.adapted import MAX_RANK
from tests.faults.bank import Held, look_into
from tests.faults.nursery import Forked, Nursery
from tests.faults.weights import PROMPT
from trainers_adapters import RolloutClient, RollsyncError, WeightsClient
from weight_updater.requests import MAX_STREAMS
from weight_updater.shm import sweep

LEASE_S = 0.8
UPLOAD_LEASE_S = 1.5
"""How long the engine waits for the next chunk of a stream: its own lease, not an update's."""
RECEIVERS = 2
"""Processes that take chunk streams, at ports of their own."""
WORKERS = NUM_WORKERS + MAX_STREAMS
"""Threads of the engine's pool, at most: one starts where no other is idle at that moment, and stays. A round
that leaked a thread would be seen after so many.
"""
GIVEN_BACK_S = 6.0
"""How long a round's things may take to be given back."""

_SEGMENT = re.compile(r"rollsync-[0-9a-f]{32}")


class Stand:
    """A front and an engine that serve; `replace` starts others in their place."""

    def __init__(
        self, nursery: Nursery, model_dir: Path, work_dir: Path, num_pages: int = 96, max_adapters: int = 0
    ) -> None:
        self.nursery, self.work_dir = nursery, work_dir
        self._num_pages, self._max_adapters = num_pages, max_adapters
        self._model_dir = model_dir
        self._num_started = 0
        self._baseline: dict[str, int] = {}
        self.front: Forked
        self.address = ""
        self.rollout: RolloutClient
        self.weights: WeightsClient
        self.engine_pid = 0
        self.shm_before = _ownerless()

    def start(self, version: int = 0, min_version: int = 0) -> None:
        """Serve the model's own weights as `version`."""
        ready = self.work_dir / f"ready-{self._num_started}"
        self._num_started += 1
        config = {
            "model": str(self._model_dir),
            "port": 0,
            "dtype": "float32",
            "num_threads": 1,
            "num_pages": self._num_pages,
            "upload_slots": 4,
            "stream_receivers": RECEIVERS,
            "max_message_bytes": 64 << 10,
            "weights_roots": [str(self.work_dir)],
            "reserve_device_staging": True,
            "lease_seconds": UPLOAD_LEASE_S,
            "initial_version": version,
            "min_version": min_version,
            "max_adapters": self._max_adapters,
            "max_adapter_rank": MAX_RANK,
        }
        others = set(self.nursery.children().get("engine_main", ()))
        self.front = self.nursery.fork("front", config=config, ready_file=str(ready))
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert self.front.wait(0.002) is None, f"no front:\n{self.nursery.log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, "the front is not ready"
        self.address = json.loads(ready.read_text())["address"]
        ready.unlink()
        self.rollout, self.weights = RolloutClient(self.address), WeightsClient(self.address)
        (self.engine_pid,) = set(self.nursery.children()["engine_main"]) - others

    def stop(self) -> None:
        """SIGTERM, as an operator would."""
        self.rollout.close()
        self.weights.close()
        self.front.signal(signal.SIGTERM)
        assert self.front.wait(20) is not None, "the front did not stop on SIGTERM"
        self.front.close()
        self.until_engine_ended()

    def until_engine_ended(self) -> None:
        until(
            lambda: self.engine_pid not in self.nursery.children().get("engine_main", ()),
            "the engine ends with its front",
        )

    def state(self):
        return self.rollout.info(timeout_s=10.0).state

    def refusal(self, adapter: str = "") -> str:
        """Why generation is refused; empty if it is not."""
        try:
            self.rollout.generate(PROMPT, max_tokens=1, adapter=adapter, timeout_s=20.0)
        except RollsyncError as error:
            return error.reason
        return ""

    def bank(self) -> dict[str, Held]:
        """What lies in the slots of the adapters that the engine holds."""
        return look_into(self.engine_pid, self.work_dir)

    def until_quiet(self, seconds: float) -> None:
        """Wait until no update is open and no sequence lives."""
        until(lambda: self._is_quiet(self.state()), "updates and sequences end", seconds)

    @staticmethod
    def _is_quiet(state) -> bool:
        return not (state.open_update_id or state.num_running or state.num_waiting or state.paused_by)

    # ------------------------------------------------------------ what must be given back

    def holdings(self) -> dict[str, int]:
        """What engine and front hold now."""
        state = self.state()
        return {
            "pages": state.num_total_pages - state.num_free_pages - state.num_cached_pages,
            "engine threads": len(os.listdir(f"/proc/{self.engine_pid}/task")),
            "engine descriptors": len(_descriptors(self.engine_pid)),
            "engine mappings": _segments_of(self.engine_pid),
            "front descriptors": len(_descriptors(self.front.pid)),
            "front mappings": _segments_of(self.front.pid),
            "ports": _listening(self.engine_pid) + _listening(self.front.pid),
        } | {f"{role} processes": len(pids) for role, pids in self.nursery.children().items()}

    def take_baseline(self) -> None:
        """After a warm-up: later rounds must come back to this."""
        until(lambda: self.holdings() == self.holdings(), "the warm-up has settled")
        time.sleep(0.3)
        self._baseline = self.holdings()
        self._baseline["engine threads"] += WORKERS  # of its pool, some have not been needed yet

    def check_given_back(self) -> None:
        """Everything that the round took is there again, and shared memory is as it was."""
        sweep()  # what the next creation of a segment does; the engine lets go of what that removed
        deadline = time.monotonic() + GIVEN_BACK_S
        while excess := self._excess():
            if time.monotonic() > deadline:
                raise AssertionError(f"not given back: {excess}\n{_open_files(self.engine_pid)}")
            time.sleep(0.05)
        # Others on this machine may have lost a segment this very moment; what stays was lost by us.
        until(self._nothing_left, "/dev/shm is as it was")

    def _nothing_left(self) -> bool:
        sweep()
        return _ownerless() <= self.shm_before

    def _excess(self) -> dict[str, tuple[int, int]]:
        """What is held beyond the baseline. Less is no fault: a killed receiver is replaced when missed."""
        return {
            what: (self._baseline.get(what, 0), now)
            for what, now in self.holdings().items()
            if self._baseline and now > self._baseline.get(what, 0)
        }


def until(holds: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Wait for what other processes are about to do."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


def _descriptors(pid: int) -> list[str]:
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue  # closed meanwhile
    return names


def _open_files(pid: int) -> str:
    return " ".join(sorted(_descriptors(pid)))


def _segments_of(pid: int) -> int:
    """Mappings of shared memory, by name."""
    return len(set(_SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text())))


def _listening(pid: int) -> int:
    """TCP sockets that a process listens on."""
    inodes = {name[8:-1] for name in _descriptors(pid) if name.startswith("socket:[")}
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    lines += Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]
    return sum(fields[3] == "0A" and fields[9] in inodes for fields in map(str.split, lines))


def _ownerless() -> set[str]:
    """Segments in /dev/shm that no living process has mapped or open."""
    there = {name for name in map(str, os.listdir("/dev/shm")) if _SEGMENT.match(name)}
    # To look through all processes takes long, and the lock on a file says the same of most.
    there = {_SEGMENT.findall(name)[0] for name in there if not _is_locked_or_gone(f"/dev/shm/{name}")}
    for pid in filter(str.isdigit, os.listdir("/proc")) if there else ():
        try:
            there -= set(_SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text()))
            there -= set(_SEGMENT.findall(_open_files(int(pid))))
        except OSError:
            continue  # it ended, or is another user's
    return there


def _is_locked_or_gone(path: str) -> bool:
    """Whether a living process holds a lock on a file, or there is no such file any more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
