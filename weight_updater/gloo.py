"""What both ends of a gloo group do alike: meet, agree on a header, move buckets, part.

    1  rank 0 hosts a TCPStore; every rank claims its number and says hello: group, world size, protocol
    2  all hellos agree, so ProcessGroupGloo is built; never torch's default group
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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    TCPStore,
    Work,
)

from weight_updater.buckets import BucketPlan
from weight_updater.errors import Reason, UpdateRefused

PROTOCOL = 1
_HEADER_BYTES = 1024
_FAILED = "rollsync/failed"
_POLL_S = 0.02
_LOOK_S = 0.25  # how often who waits in an operation looks whether another rank gave up


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group. address, port: of rank 0's store. timeout_s: for the rendezvous and each wait."""

    group_name: str
    address: str
    port: int
    rank: int
    world_size: int
    timeout_s: float

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return (
            f"group {self.group_name!r}, rank {self.rank} of world size {self.world_size}, "
            f"rank 0 at {host}:{self.port}"
        )


class GlooGroup:
    """A joined group. One thread uses it; any may `abort`.

    Args:
        member: this rank.
        listener: rank 0 only: the socket that the store listens on; it is taken over.

    Raises:
        UpdateRefused: TIMEOUT or PEER_LOST if the others do not come; INVALID_UPDATE if they disagree about
            name, world size or ranks.
    """

    def __init__(self, member: Member, listener: socket.socket | None = None) -> None:
        self.member = member
        self._stopped = threading.Event()
        self._failed = False
        self._store: Any = None  # torch's stubs leave out half of the methods
        self._group: Any = None
        deadline = time.monotonic() + member.timeout_s
        try:
            self._store = _connect(member, listener)
            self._group = _meet(member, self._store, deadline)
        except RuntimeError as error:  # all errors of torch.distributed are RuntimeErrors
            raise refusal(error, f"{member}: the rendezvous failed") from error

    def agree(self, plan: BucketPlan, timeout_s: float) -> None:
        """Compare headers with all ranks before the first bucket.

        Raises:
            UpdateRefused: MANIFEST_MISMATCH on all ranks, which leaves the group usable; else TIMEOUT or
                PEER_LOST.
        """
        ours = _header(plan)
        data = json.dumps(ours).encode().ljust(_HEADER_BYTES)
        gathered = [torch.zeros(_HEADER_BYTES, dtype=torch.uint8) for _ in range(self.member.world_size)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s)
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self._errors("agreeing on the buckets", timeout_s):
            self._finish(self._group.allgather([gathered], [own], options))
        headers = [json.loads(bytes(header.numpy())) for header in gathered]
        for rank, theirs in enumerate(headers):
            for field, value in headers[0].items():
                if theirs.get(field) != value:
                    raise UpdateRefused(
                        Reason.MANIFEST_MISMATCH,
                        f"group {self.member.group_name!r}: rank 0 would send {field} {value}, rank {rank} "
                        f"would receive {theirs.get(field)}; both ends must use one manifest and one "
                        f"bucket_bytes. Rank 0: {_show(headers[0])}. Rank {rank}: {_show(theirs)}",
                    )

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
            self._finish(work)

    def finish(self, timeout_s: float) -> None:
        """Until all ranks have put away all bytes. Raises UpdateRefused: TIMEOUT or PEER_LOST."""
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=timeout_s)
        with self._errors("waiting for all ranks to finish", timeout_s):
            self._finish(self._group.allreduce([torch.ones(1, dtype=torch.int64)], options))

    def tell_failure(self, text: str) -> None:
        """Leave word of why this rank gives up, for the error of the others."""
        store = self._store  # another thread may be closing
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(_FAILED, f"rank {self.member.rank}: {text}")

    def rank_0_lives(self) -> bool:
        """Whether rank 0 still answers and no rank gave up; within a few seconds."""
        try:
            self._store.set_timeout(timedelta(seconds=3))
            return not self._store.check([_FAILED])
        except RuntimeError:
            return False

    def abort(self, text: str) -> None:
        """Give up: whoever waits, here or at another rank, gets an error with `text` soon. ANY THREAD."""
        self._stopped.set()
        self.tell_failure(text)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Drop the group, and at rank 0 the store with its port; harmless twice.

        gloo cannot be interrupted. After an error one of its operations may still run: it ends at its own
        timeout, and a thread of ours waits for that instead of the caller. No daemon: an interpreter that
        ends meanwhile would have C++ threads under way.

        linger_s: after an error, keep the store that long, for the others to read why.
        """
        group, store, self._group, self._store = self._group, self._store, None, None
        if group is not None:
            held = [group, store]
            del group, store
            if self._failed:
                threading.Thread(target=_let_go, args=(held, linger_s), name="close-gloo").start()
            else:
                _let_go(held, 0.0)

    def _finish(self, work: Work) -> None:
        """Wait for an operation, but notice meanwhile that this or another rank gave up."""
        next_look = time.monotonic() + _LOOK_S
        pause = 0.0
        while not work.is_completed():
            if self._stopped.is_set():
                raise RuntimeError("the group was closed meanwhile")
            if time.monotonic() >= next_look:
                if self._store.check([_FAILED]):  # raises if rank 0 is gone
                    raise RuntimeError("a rank gave up")
                next_look = time.monotonic() + _LOOK_S
            time.sleep(pause)
            pause = min(pause + 0.0001, 0.001)
        work.wait()

    @contextlib.contextmanager
    def _errors(self, doing: str, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._failed = True
            raise refusal(
                error, f"{self.member}: {doing} (at most {timeout_s:g} s) failed", self._told()
            ) from error

    def _told(self) -> str:
        """What a rank that gave up left, or nothing."""
        with contextlib.suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=1))
            if self._store.check([_FAILED]):
                told: str = self._store.get(_FAILED).decode()
                return told
        return ""


def _let_go(held: list[Any], linger_s: float) -> None:
    time.sleep(linger_s)
    held.clear()  # the group's destructor waits for its operations, the store's frees the port


def refusal(error: RuntimeError, context: str, told: str = "") -> UpdateRefused:
    """An error of torch.distributed as ours: TIMEOUT or PEER_LOST."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    late = "timed out" in text.lower() or "timeout" in text.lower()
    reason = Reason.TIMEOUT if late and not told else Reason.PEER_LOST
    return UpdateRefused(reason, f"{context}: {told or text}; make the group anew")


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on `address` only; port 0 takes a free one.

    Raises:
        UpdateRefused (INVALID_UPDATE): the address is not one of this host, or the port is taken.
    """
    try:
        family, kind, proto, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UpdateRefused(
            Reason.INVALID_UPDATE,
            f"rank 0 cannot listen on {address} port {port} ({error.strerror or error}); give a "
            f"free port and an address of this host that the engines can reach",
        ) from error
    return listener


def _connect(member: Member, listener: socket.socket | None) -> TCPStore:
    limit = timedelta(seconds=member.timeout_s)
    if listener is None:
        return TCPStore(member.address, member.port, None, False, limit, wait_for_workers=False)
    return TCPStore(
        member.address,
        member.port,
        None,
        True,
        limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _meet(member: Member, store: TCPStore, deadline: float) -> Any:
    """Say hello, hear all hellos, build the group."""
    claim, hello = f"rollsync/claim/{member.rank}", f"rollsync/hello/{member.rank}"
    if store.add(claim, 1) > 1:
        text = f"rank {member.rank} of {member.world_size} is taken already"
        store.set(_FAILED, text)
        raise UpdateRefused(
            Reason.INVALID_UPDATE, f"{member}: {text}; give every engine a rank of its own in [1, world size)"
        )
    try:
        ours = {"group": member.group_name, "world_size": member.world_size, "protocol": PROTOCOL}
        store.set(hello, json.dumps(ours))
        # Rank 0 first: it is the one whose word counts.
        for rank in range(member.world_size):
            _await_hello(member, store, rank, deadline)
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_own_address(member))]
        options._timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        return gloo(
            PrefixStore(f"rollsync/{member.group_name}", store), member.rank, member.world_size, options
        )
    except BaseException:
        with contextlib.suppress(RuntimeError):  # so that this rank may come again
            store.delete_key(hello)
            store.add(claim, -1)
        raise


def _await_hello(member: Member, store: TCPStore, rank: int, deadline: float) -> None:
    key = f"rollsync/hello/{rank}"
    _poll(lambda: store.check([key]) or store.check([_FAILED]), deadline)
    if store.check([_FAILED]):
        raise UpdateRefused(Reason.INVALID_UPDATE, f"{member}: {store.get(_FAILED).decode()}")
    if not store.check([key]):
        raise UpdateRefused(
            Reason.TIMEOUT,
            f"{member}: rank {rank} did not come within {member.timeout_s:g} s; has it the same address and "
            f"port, and does it join as a rollsync group?",
        )
    theirs = json.loads(store.get(key))
    for field, ours in (
        ("group", member.group_name),
        ("world_size", member.world_size),
        ("protocol", PROTOCOL),
    ):
        if theirs.get(field) != ours:
            text = f"{field} is {ours!r} at rank {member.rank}, {theirs.get(field)!r} at rank {rank}"
            store.set(_FAILED, text)
            raise UpdateRefused(Reason.INVALID_UPDATE, f"{member}: {text}")


def _poll(ready: Callable[[], bool], deadline: float) -> None:
    while not ready() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _own_address(member: Member) -> str:
    """The address of this host from which rank 0 is reached; rank 0's own is where it listens."""
    if member.rank == 0:
        return member.address
    family, kind, proto, _, where = socket.getaddrinfo(member.address, member.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(where)  # sends nothing: the kernel only picks a route
        return str(probe.getsockname()[0])


def _header(plan: BucketPlan) -> dict[str, str | int]:
    return {
        "num_tensors": len(plan.manifest.tensors),
        "bucket_bytes": plan.bucket_bytes,
        "num_buckets": len(plan),
        "total_bytes": plan.total_bytes,
        "digest": plan.digest(),
    }


def _show(header: dict[str, str | int]) -> str:
    return ", ".join(f"{field} {value}" for field, value in header.items())
