"""An NCCL group: buckets go from the trainer's GPU to the engines' at the speed of the link between them.

    1, 2  as for any group; see meeting.py. The first collective, which makes the communicator, belongs to
          the rendezvous: all ranks are known to be there
    3     per update: headers are compared through the store, before any collective
    4     per bucket: one broadcast from rank 0; several are queued
    5     every rank tells through the store that it has all bytes

A collective that waits for a dead peer occupies the GPU until its communicator is aborted. So nothing here
waits inside NCCL or CUDA: operations are asked whether they have ended, up to a deadline, and after any
error but a refused header the communicator is aborted first.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore

from weight_updater.buckets import BucketPlan
from weight_updater.device_memory import device_uuid
from weight_updater.errors import UpdateRefused
from weight_updater.lingering import let_go_later
from weight_updater.meeting import (
    LOOK_S,
    Facts,
    HeaderRefused,
    Member,
    Party,
    compare_headers,
    connect,
    header_of,
    left_s,
    refusal,
    say_hello,
    take_back_hello,
)
from weight_updater.store import within

NCCL_BUCKET_BYTES = 1 << 30
"""Size of a bucket where the sender names none: fewer, larger broadcasts come nearer to the link's speed."""

COMPARED_SETTINGS = ("NCCL_CUMEM", "NCCL_P2P_")
"""Starts of the variables that say how NCCL moves bytes; ranks that differ in one fail, or lack memory."""

_ASK_S = 0.1  # the least that the store is given for an answer
_ABORT_S = 5.0  # an abort that takes longer goes on by itself
_ENVIRONMENT = threading.Lock()


class Work(Protocol):
    """A collective under way."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Any:
        """Once it has completed: raise RuntimeError if it failed, else order the current stream behind."""
        ...


class ProcessGroup(Protocol):
    """What is used of torch's ProcessGroupNCCL."""

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work: ...

    def abort(self) -> None:
        """End all operations under way, with errors. ANY THREAD."""
        ...


Build = Callable[[Any, Member, torch.device], ProcessGroup]
"""Makes the process group over a store; may block until all ranks do the same."""


def is_available() -> bool:
    """Whether torch was built with NCCL."""
    from torch._C import _distributed_c10d

    return hasattr(_distributed_c10d, "ProcessGroupNCCL")


def build_nccl(store: Any, member: Member, device: torch.device) -> ProcessGroup:
    """Torch's ProcessGroupNCCL, with its communicator made."""
    from torch._C import _distributed_c10d

    nccl: Any = _distributed_c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=member.timeout_s)
    options.group_name = f"rollsync-{member.group_name}"
    with _no_watchdog():
        group: ProcessGroup = nccl(
            PrefixStore(f"rollsync/{member.group_name}", store), member.rank, member.world_size, options
        )
    with torch.cuda.device(device):
        work = group.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)], from_rank_0())
        deadline = time.monotonic() + member.timeout_s
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        work.wait()
    return group


def facts_of(device: torch.device) -> Facts:
    """What a rank says of itself, so that what NCCL would only fail at is refused before NCCL is asked."""
    same = {name: value for name, value in os.environ.items() if name.startswith(COMPARED_SETTINGS)}
    if device.type != "cuda":
        return Facts(same)
    same["NCCL's version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return Facts(
        same,
        device_uuid(index),
        "NCCL needs a GPU for each rank: use the ipc path on one GPU, or the backend gloo",
    )


@contextlib.contextmanager
def _no_watchdog() -> Iterator[None]:
    """Torch's watchdog ends the whole process when a peer dies; in this mode a group has none.

    The mode is read when a group is made, so that groups of others are not affected.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _ENVIRONMENT:
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


class NcclGroup(Party):
    """A joined group. One thread uses it; any may `abort`.

    Args:
        member: this rank.
        device: CUDA device of this rank; no two ranks may share one.
        listener: rank 0 only: the socket that the store listens on; it is taken over.
        build: makes the process group.

    Raises:
        UpdateRefused: TIMEOUT or PEER_LOST if the others do not come; INVALID_UPDATE if they disagree about
            name, world size, backend or ranks.
    """

    in_flight = 2
    """Broadcasts that may be queued at once, each from a buffer of its own."""

    def __init__(
        self,
        member: Member,
        device: torch.device,
        listener: socket.socket | None = None,
        *,
        build: Build = build_nccl,
    ) -> None:
        super().__init__(member)
        self.device = device
        self._aborting = threading.Lock()
        self._sequence = 0
        self._group: ProcessGroup | None = None
        deadline = time.monotonic() + member.timeout_s
        try:
            self._store = connect(member, listener)
            say_hello(member, self._store, deadline, facts_of(device))
            try:
                self._group = within(
                    lambda: build(self._store_now().raw, member, device), left_s(deadline), name="nccl"
                )
            except BaseException:
                take_back_hello(member, self._store)
                raise
        except RuntimeError as error:  # all errors of torch.distributed are RuntimeErrors
            raise refusal(error, f"{member}: the rendezvous failed") from error

    def on_device(self) -> AbstractContextManager[object]:
        """A block in which this rank's device is the calling thread's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def agree(self, plan: BucketPlan, timeout_s: float) -> None:
        """Compare headers with all ranks before the first bucket.

        Raises:
            HeaderRefused (MANIFEST_MISMATCH): on all ranks, which leaves the group usable.
            UpdateRefused: TIMEOUT or PEER_LOST.
        """
        self._sequence += 1
        with self._errors("agreeing on the buckets", timeout_s):
            self._tell_all("header", json.dumps(header_of(plan)), timeout_s)
            headers = [json.loads(self._store_now().read(key) or b"{}") for key in self._keys("header")]
        try:
            compare_headers(self.member, headers)
        except UpdateRefused as error:
            raise HeaderRefused(error.reason, error.message) from None

    def broadcast(self, bucket: torch.Tensor, timeout_s: float) -> Work:
        """Queue one broadcast from rank 0 into or out of `bucket` ([n] uint8), behind what the current
        stream holds. The bucket must stay until `wait`.
        """
        with self._errors("broadcasting", timeout_s):
            group = self._group
            if group is None:
                raise RuntimeError("the group was closed meanwhile")
            return group.broadcast([bucket], from_rank_0())

    def wait(self, work: Work, bucket: int, timeout_s: float) -> None:
        """Until a broadcast has ended on the device. Raises UpdateRefused: TIMEOUT or PEER_LOST."""
        with self._errors(f"broadcasting bucket {bucket}", timeout_s):
            self._until(work.is_completed, time.monotonic() + timeout_s, longest_pause_s=0.0002)
            work.wait()

    def finish(self, timeout_s: float) -> None:
        """Until all ranks have put away all bytes. Raises UpdateRefused: TIMEOUT or PEER_LOST."""
        with self._errors("waiting for all ranks to finish", timeout_s):
            self._tell_all("done", "1", timeout_s)

    def abort(self, text: str) -> None:
        """Give up: whoever waits, here or at another rank, gets an error with `text` soon, and the device is
        free of the group's operations. ANY THREAD.
        """
        super().abort(text)
        self._abort_communicator()

    def close(self, *, linger_s: float = 0.0) -> None:
        """Drop the group, and at rank 0 the store with its port; harmless twice.

        linger_s: after an error, keep the store that long, for the others to read why.
        """
        self._stopped.set()
        self._abort_communicator()
        store, self._store = self._store, None
        if store is not None and linger_s:
            held = [store]
            del store
            let_go_later(held, linger_s, name="close-nccl", port=self.member.port)

    def _abort_communicator(self) -> None:
        """End its operations on the device; a communicator that cannot be aborted in time is left behind."""
        with self._aborting:
            group, self._group = self._group, None
            if group is not None:
                with contextlib.suppress(RuntimeError):
                    within(group.abort, _ABORT_S, name="nccl")

    def _key(self, what: str, rank: int, sequence: int = 0) -> str:
        return f"rollsync/{what}/{sequence or self._sequence}/{rank}"

    def _keys(self, what: str) -> list[str]:
        return [self._key(what, rank) for rank in range(self.member.world_size)]

    def _tell_all(self, what: str, value: str, timeout_s: float) -> None:
        """Tell the others this rank's value, and wait until all have told theirs."""
        # No local holds the store: an error's frames would keep rank 0's port.
        deadline = time.monotonic() + timeout_s
        keys = self._keys(what)
        self._store_now().limit_s = max(_ASK_S, timeout_s)
        if self._sequence > 2:  # all ranks are done with the update before the last
            self._store_now().delete_key(self._key(what, self.member.rank, self._sequence - 2))
        self._store_now().set(self._key(what, self.member.rank), value)

        def told() -> bool:
            return self._store_now().check(keys, limit_s=max(_ASK_S, left_s(deadline)))

        self._until(told, deadline, longest_pause_s=0.005)

    def _until(self, ended: Callable[[], bool], deadline: float, *, longest_pause_s: float) -> None:
        """Ask until it has, and notice meanwhile that this or another rank gave up.

        Raises:
            RuntimeError: it has not by `deadline`, or never will.
        """
        next_look = time.monotonic() + LOOK_S
        pause = 0.0
        while not ended():
            now = time.monotonic()
            if self._stopped.is_set():
                raise RuntimeError("the group was closed meanwhile")
            if now >= deadline:
                raise RuntimeError("it timed out; a peer may be dead or late")
            if now >= next_look:
                self._look(max(_ASK_S, deadline - now))
                next_look = now + LOOK_S
            time.sleep(pause)
            pause = min(pause + 0.00002, longest_pause_s)

    @contextlib.contextmanager
    def _errors(self, doing: str, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            told = self._told()
            self._stopped.set()
            self._abort_communicator()
            raise refusal(error, f"{self.member}: {doing} (at most {timeout_s:g} s) failed", told) from error


def from_rank_0() -> Any:
    """Options of a broadcast."""
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options
