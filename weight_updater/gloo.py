"""What both ends of a gloo group do alike: agree on a header, move buckets, part.

    1, 2  as for any group; see meeting.py
    3  per update: an allgather of headers of fixed size; they agree, or all ranks refuse alike
    4  per bucket: one broadcast from rank 0
    5  an allreduce of one number: every rank has put its bytes where they belong

A peer that dies closes its connections, so whoever waits for it in 3 to 5 hears of it at once. After any
error but a refused header the group is poisoned: it must be closed and made anew.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

# torch.distributed itself exports only some of these; its typed home has all of them.
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Work,
)
from torch.distributed import DistNetworkError

from weight_updater.buckets import BucketPlan, Cut
from weight_updater.lingering import let_go_later
from weight_updater.meeting import (
    FAILED,
    LOOK_S,
    Member,
    Party,
    compare_headers,
    connect,
    refusal,
    say_hello,
    take_back_hello,
)
from weight_updater.store import Store

_HEADER_BYTES = 1024


class GlooGroup(Party):
    """A joined group. One thread uses it; any may `abort`.

    Args:
        member: this rank.
        listener: rank 0 only: the socket that the store listens on; it is taken over.

    Raises:
        UpdateRefused: TIMEOUT or PEER_LOST if the others do not come; INVALID_UPDATE if they disagree about
            name, world size or ranks.
    """

    in_flight = 1
    """Broadcasts that may be under way at once."""

    def __init__(self, member: Member, listener: socket.socket | None = None) -> None:
        super().__init__(member)
        self.device = torch.device("cpu")
        self._failed = False
        self._group: Any = None
        deadline = time.monotonic() + member.timeout_s
        try:
            self._store = connect(member, listener)
            self._group = _meet(member, self._store, deadline)
        except RuntimeError as error:  # all errors of torch.distributed are RuntimeErrors
            raise refusal(error, f"{member}: the rendezvous failed") from error

    def on_device(self) -> AbstractContextManager[object]:
        """A block in which this rank's device is the calling thread's: nothing to do on a CPU."""
        return contextlib.nullcontext()

    def agree(self, plan: BucketPlan | Cut, timeout_s: float) -> None:
        """Compare headers with all ranks before the first bucket.

        Raises:
            UpdateRefused: MANIFEST_MISMATCH on all ranks, which leaves the group usable; else TIMEOUT or
                PEER_LOST.
        """
        ours = (plan.cut if isinstance(plan, BucketPlan) else plan).header()
        data = json.dumps(ours).encode().ljust(_HEADER_BYTES)
        gathered = [torch.zeros(_HEADER_BYTES, dtype=torch.uint8) for _ in range(self.member.world_size)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s)
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self._errors("agreeing on the buckets", timeout_s):
            self._finish(self._group.allgather([gathered], [own], options))
        headers = [json.loads(bytes(header.numpy())) for header in gathered]
        compare_headers(self.member, headers)

    def broadcast(self, bucket: torch.Tensor, timeout_s: float) -> Work:
        """Start one broadcast from rank 0 into or out of `bucket` ([n] uint8); wait with `wait`."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        with self._errors("broadcasting", timeout_s):
            work: Work = self._group.broadcast([bucket], options)
            return work

    def wait(self, work: Work, bucket: int, timeout_s: float) -> None:
        """Until a broadcast has ended. Raises UpdateRefused: TIMEOUT or PEER_LOST."""
        with self._errors(f"broadcasting bucket {bucket}", timeout_s):
            try:
                self._finish(work)
            finally:
                del work  # see `_finish`

    def finish(self, timeout_s: float) -> None:
        """Until all ranks have put away all bytes. Raises UpdateRefused: TIMEOUT or PEER_LOST."""
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=timeout_s)
        with self._errors("waiting for all ranks to finish", timeout_s):
            self._finish(self._group.allreduce([torch.ones(1, dtype=torch.int64)], options))

    def rank_0_gone(self) -> bool:
        """Whether rank 0 has left or died. One that is slow to answer is not gone."""
        try:
            self._store_now().check([FAILED])
        except DistNetworkError:
            return True
        except RuntimeError:
            return False
        return False

    def close(self, *, linger_s: float = 0.0) -> None:
        """Drop the group, and at rank 0 the store with its port; harmless twice.

        gloo cannot be interrupted. After an error one of its operations may still run: it ends at its own
        timeout, and a thread of ours waits for that instead of the caller.

        linger_s: after an error, keep the store that long, for the others to read why.
        """
        group, store, self._group, self._store = self._group, self._store, None, None
        if group is not None:
            held = [group, store]
            del group, store
            if self._failed or linger_s:  # what went wrong may have been no operation of the group
                port = self.member.port if self.member.rank == 0 else 0
                let_go_later(held, linger_s, name="close-gloo", port=port)
            else:
                held.clear()  # the group's destructor waits for its operations, the store's frees the port

    def _finish(self, work: Work) -> None:
        """Wait for an operation, but notice meanwhile that this or another rank gave up.

        An error's frames do not keep the operation: it holds the store, and with it rank 0's port.
        """
        next_look = time.monotonic() + LOOK_S
        pause = 0.0
        try:
            while not work.is_completed():
                if self._stopped.is_set():
                    raise RuntimeError("the group was closed meanwhile")
                if time.monotonic() >= next_look:
                    self._look(self.member.timeout_s)
                    next_look = time.monotonic() + LOOK_S
                time.sleep(pause)
                pause = min(pause + 0.0001, 0.001)
            work.wait()
        finally:
            del work

    @contextlib.contextmanager
    def _errors(self, doing: str, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._failed = True
            raise refusal(
                error, f"{self.member}: {doing} (at most {timeout_s:g} s) failed", self._told()
            ) from error


def _meet(member: Member, store: Store, deadline: float) -> Any:
    """Say hello, hear all hellos, build the group."""
    say_hello(member, store, deadline)
    try:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_own_address(member))]
        options._timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        return gloo(
            PrefixStore(f"rollsync/{member.group_name}", store.raw), member.rank, member.world_size, options
        )
    except BaseException:
        take_back_hello(member, store)
        raise


def _own_address(member: Member) -> str:
    """The address of this host from which rank 0 is reached; rank 0's own is where it listens."""
    if member.rank == 0:
        return member.address
    family, kind, proto, _, where = socket.getaddrinfo(member.address, member.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(where)  # sends nothing: the kernel only picks a route
        return str(probe.getsockname()[0])
