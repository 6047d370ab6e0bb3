"""The engine's end of `gloo_child`: starts it, talks to it, and never waits longer than it may."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from weight_updater.buckets import BucketPlan
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.meeting import HeaderRefused, Member
from weight_updater.requests import InitGroup
from weight_updater.shm import SharedSegment

CHILD_COMMAND = (sys.executable, "-P", "-m", "weight_updater.gloo_child")

START_S = 60.0
"""Seconds that a child may take to load torch; the rendezvous has its own timeout after that."""

_GRACE_S = 2.0  # the child reports its own timeouts; ours comes a little later, for a child that hangs
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")


class ChildGroup:
    """One group, joined by a child process. One thread at a time; `kill` by any.

    Args:
        request: checked already.

    Raises:
        UpdateRefused: TIMEOUT, PEER_LOST or INVALID_UPDATE if the rendezvous fails; the child is gone then.
    """

    def __init__(self, request: InitGroup) -> None:
        self.request = request
        self.member = Member(
            request.group_name,
            request.master_address,
            request.master_port,
            request.rank,
            request.world_size,
            request.timeout_s,
        )
        self._pending = b""
        self._segment: SharedSegment | None = None
        self._halves: list[torch.Tensor] = []
        self._stderr = os.memfd_create("gloo-child-stderr", os.MFD_CLOEXEC)
        self._process = self._start()

    def join(self) -> None:
        """Rendezvous; blocks. The child is gone after an error."""
        try:
            self._hear("ready", START_S)
            self._say({"do": "join", "member": {f: getattr(self.member, f) for f in Member.__slots__}})
            self._hear("joined", self.request.timeout_s + _GRACE_S)
        except UpdateError:
            self.close()
            raise

    def alive(self) -> bool:
        """Whether the child and rank 0 are still there. Asks both; takes a few seconds at most."""
        try:
            self._say({"do": "probe"})
            return bool(self._hear("alive", 10.0)["alive"])
        except UpdateError:
            return False

    def ended(self) -> bool:
        """Whether the child is gone, which it is soon after the trainer. Asks nobody."""
        return self._process.poll() is not None

    def receive_header(self, plan: BucketPlan, timeout_s: float, limit: float | None) -> None:
        """Lend the child its two halves and let it agree with rank 0.

        Args:
            timeout_s: seconds for each wait. limit: `time.monotonic()` at which all must be done, or None.

        Raises:
            HeaderRefused (MANIFEST_MISMATCH), which leaves the group usable.
            UpdateRefused: TIMEOUT or PEER_LOST.
        """
        fresh = self._make_segment(plan)
        self._say(
            {
                "do": "receive",
                "cut": dataclasses.asdict(plan.cut),
                "timeout_s": timeout_s,
                "segment": fresh,
            }
        )
        self._hear("opened", self._wait_s(timeout_s, limit))
        if self._segment is not None:
            self._segment.unlink()  # both have it mapped; so nothing is left, whoever dies
        self._hear("agreed", self._wait_s(timeout_s, limit))

    def next_bucket(self, bucket: int, timeout_s: float, limit: float | None) -> torch.Tensor:
        """Bucket `bucket` as [n] uint8, valid until `free`; n is a whole half."""
        message = self._hear("bucket", self._wait_s(timeout_s, limit))
        assert message["bucket"] == bucket, "buckets come in order"
        return self._halves[bucket % 2]

    def free(self) -> None:
        """The bucket that came was put away."""
        self._say({"do": "free"})

    def receive_end(self, timeout_s: float, limit: float | None) -> None:
        """Until every rank of the group has all bytes."""
        self._hear("received", self._wait_s(timeout_s, limit))

    def give_up(self, text: str) -> None:
        """End the child after it told the other ranks why."""
        with contextlib.suppress(UpdateError):
            self._say({"do": "give_up", "text": text})
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        self.close()

    def kill(self) -> None:
        """End the child now. ANY THREAD; whoever waits for it gets PEER_LOST."""
        self._process.kill()

    def close(self) -> None:
        """End the child and give everything back; harmless twice."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1
        self._drop_segment()

    def _start(self) -> subprocess.Popen[bytes]:
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        root = str(Path(__file__).resolve().parent.parent)
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [kept.get("PYTHONPATH"), root]))
        kept |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            CHILD_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=kept,
            bufsize=0,
        )

    def _make_segment(self, plan: BucketPlan) -> tuple[str, int, str] | None:
        """Two halves of a bucket each; None if the ones that are there will do."""
        half = min(plan.bucket_bytes, plan.total_bytes)
        if not half or (self._halves and self._halves[0].numel() == half):
            return None
        self._drop_segment()
        self._segment = SharedSegment.create(2 * half)
        self._halves = list(torch.frombuffer(self._segment.buf, dtype=torch.uint8).view(2, half))
        descriptor = self._segment.descriptor
        return descriptor.name, descriptor.size, descriptor.allocation_id

    def _drop_segment(self) -> None:
        self._halves = []
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
            segment.unlink()

    @staticmethod
    def _wait_s(timeout_s: float, limit: float | None) -> float:
        remaining = timeout_s if limit is None else min(timeout_s, limit - time.monotonic())
        return max(0.0, remaining) + _GRACE_S

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        line = json.dumps(message).encode() + b"\n"
        try:
            while line:
                line = line[self._process.stdin.write(line) or 0 :]
        except (OSError, ValueError) as error:
            raise self._lost() from error

    def _hear(self, expected: str, wait_s: float) -> dict[str, Any]:
        message = self._read_line(time.monotonic() + wait_s, expected)
        if message["is"] == "error":
            kind = HeaderRefused if message["usable"] else UpdateRefused
            raise kind(Reason(message["reason"]), message["text"])
        assert message["is"] == expected, f"the child said {message['is']}, not {expected}"
        return message

    def _read_line(self, deadline: float, expected: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self._process.stdout, selectors.EVENT_READ)
            except ValueError as error:  # closed by another thread
                raise self._lost() from error
            while b"\n" not in self._pending:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    raise UpdateRefused(
                        Reason.TIMEOUT,
                        f"{self.member}: the receiving process did not get to {expected!r} in time",
                    )
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise self._lost()
                self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _lost(self) -> UpdateRefused:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        said = b""
        if self._stderr >= 0:
            size = os.fstat(self._stderr).st_size
            said = os.pread(self._stderr, 400, max(0, size - 400))
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        return UpdateRefused(
            Reason.PEER_LOST,
            f"{self.member}: the receiving process died (exit status {self._process.returncode}"
            f"{': ' + last[0] if last else ''}); did the sender send what the manifest says? "
            f"make the group anew",
        )
