"""What both ends of a process group do alike, whatever its backend: meet, agree on a header, part.

    1  rank 0 hosts a TCPStore; every rank claims its number and says hello: group, world size, protocol,
       backend, and facts of its own that may rule a group out
    2  all hellos agree, so the group is built over a PrefixStore of it; never torch's default group
    3  whoever gives up leaves word in the store, for the errors of the others

A group that failed is closed and made anew.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

from torch._C._distributed_c10d import TCPStore

from weight_updater.buckets import BucketPlan
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.store import Aside, Store

PROTOCOL = 2
FAILED = "rollsync/failed"
_MET = "rollsync/met"  # how many ranks have heard all hellos
_ALL_MET = "rollsync/all met"
LOOK_S = 0.25
"""How often who waits in an operation looks whether another rank gave up."""

_POLL_S = 0.02
_WORD_S = 2.0  # to leave or hear word of a failure: rank 0 may be what failed
_LEAVING_S = 3.0  # a trainer keeps the store of a group that failed for a second


class HeaderRefused(UpdateRefused):
    """The ranks disagree about what would be sent. All of them know, so the group stays usable."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group. address, port: of rank 0's store. timeout_s: for the rendezvous and each wait."""

    group_name: str
    address: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
    backend: str = "gloo"

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return (
            f"group {self.group_name!r}, rank {self.rank} of world size {self.world_size}, "
            f"rank 0 at {host}:{self.port}"
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank says of itself beside what it is to join.

    same: settings that all ranks must have alike, such as a library's version; one that is absent is unset.
    place: where the rank computes, which no two ranks may share; "" is not compared.
    advice: what to do if two share one.
    """

    same: Mapping[str, str] = field(default_factory=dict)
    place: str = ""
    advice: str = ""


class Party:
    """What a joined group of any backend has: its store, and how this rank gives up or hears of others.

    One thread uses it; any may `abort`.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self._store: Store | None = None
        self._stopped = threading.Event()
        self._why = ""  # this rank gave up; the first word counts

    def tell_failure(self, text: str) -> None:
        """Leave word of why this rank gives up, for the error of the others; the group's first word stays."""
        with contextlib.suppress(RuntimeError):
            self._store_now().set_once(FAILED, f"rank {self.member.rank}: {text}", limit_s=_WORD_S)

    def rank_0_lives(self) -> bool:
        """Whether rank 0 still answers and no rank gave up; within a few seconds."""
        try:
            return not self._store_now().check([FAILED], limit_s=3.0)
        except RuntimeError:
            return False

    def abort(self, text: str) -> None:
        """Give up: whoever waits, here or at another rank, gets an error with `text` soon. ANY THREAD."""
        self._why = self._why or text  # before anyone sees that it has stopped
        self._stopped.set()
        self.tell_failure(self._why)

    def _store_now(self) -> Store:
        """The store; another thread may be closing."""
        store = self._store
        if store is None:
            raise RuntimeError("the group was closed meanwhile")
        return store

    def _look(self, limit_s: float) -> None:
        """Raise RuntimeError if another rank gave up, or if rank 0 is gone or does not answer in time."""
        if self._store_now().check([FAILED], limit_s=limit_s):
            raise RuntimeError("a rank gave up")

    def _told(self) -> str:
        """Why this rank was made to give up, or what another one that did left; "" if neither."""
        if self._why:
            return self._why
        with contextlib.suppress(RuntimeError):
            return (self._store_now().read(FAILED, limit_s=_WORD_S) or b"").decode()
        return ""


def left_s(deadline: float) -> float:
    """Seconds until a `time.monotonic()`, not below 0."""
    return max(0.0, deadline - time.monotonic())


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


def connect(member: Member, listener: socket.socket | None) -> Store:
    """The store of a group; rank 0 hosts it on `listener`.

    Raises:
        RuntimeError: rank 0 does not answer in time.
    """
    if listener is None:
        return _join_store(member)
    raw = TCPStore(
        member.address,
        member.port,
        None,
        True,
        timedelta(seconds=member.timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return Store(raw, None, member.timeout_s)


def _join_store(member: Member) -> Store:
    """The store that listens at rank 0's port; not that of a group which met, failed, and is about to leave
    the port to the next one.
    """
    deadline = time.monotonic() + member.timeout_s
    patience = time.monotonic() + _LEAVING_S
    aside = Aside("store")

    def join() -> TCPStore:
        limit = timedelta(seconds=max(0.1, left_s(deadline)))
        return TCPStore(member.address, member.port, None, False, limit, wait_for_workers=False)

    while True:
        # A second more: TCPStore's own error says where nobody listened.
        store = Store(aside.call(join, left_s(deadline) + 1.0), aside, member.timeout_s)
        if time.monotonic() >= min(patience, deadline) or not store.check([FAILED, _ALL_MET]):
            return store
        del store
        time.sleep(0.1)


def say_hello(member: Member, store: Store, deadline: float, facts: Facts | None = None) -> None:
    """Say hello and hear all hellos.

    Raises:
        UpdateRefused: TIMEOUT if the others do not come; INVALID_UPDATE if they disagree, or if what they
            say of themselves rules the group out.
        RuntimeError: from the store.
    """
    facts = facts or Facts()
    claim, hello = f"rollsync/claim/{member.rank}", f"rollsync/hello/{member.rank}"
    if store.add(claim, 1) > 1:
        text = f"rank {member.rank} of {member.world_size} is taken already"
        _leave_word(store, text)
        raise UpdateRefused(
            Reason.INVALID_UPDATE, f"{member}: {text}; give every engine a rank of its own in [1, world size)"
        )
    try:
        ours = {
            "group": member.group_name,
            "world_size": member.world_size,
            "protocol": PROTOCOL,
            "backend": member.backend,
            "same": dict(facts.same),
            "place": facts.place,
        }
        store.set(hello, json.dumps(ours))
        # Rank 0 first: it is the one whose word counts.
        for rank in range(member.world_size):
            _await_hello(member, store, rank, deadline, facts)
        if store.add(_MET, 1) == member.world_size:
            store.set(_ALL_MET, "yes")
    except BaseException:
        take_back_hello(member, store)
        raise


def take_back_hello(member: Member, store: Store) -> None:
    """So that this rank may come again."""
    with contextlib.suppress(RuntimeError):
        store.delete_key(f"rollsync/hello/{member.rank}")
        store.add(f"rollsync/claim/{member.rank}", -1)


def _await_hello(member: Member, store: Store, rank: int, deadline: float, facts: Facts) -> None:
    key = f"rollsync/hello/{rank}"
    while (told := store.read(key)) is None and not store.check([FAILED]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    # After the reading: who rules the group out says so first, and takes its hello back then.
    if failed := store.read(FAILED):
        raise UpdateRefused(Reason.INVALID_UPDATE, f"{member}: {failed.decode()}")
    if told is None:
        raise UpdateRefused(
            Reason.TIMEOUT,
            f"{member}: rank {rank} did not come within {member.timeout_s:g} s; has it the same address and "
            f"port, and does it join as a rollsync group?",
        )
    theirs = _parsed(told)
    for name, ours in (
        ("group", member.group_name),
        ("world_size", member.world_size),
        ("protocol", PROTOCOL),
        ("backend", member.backend),
    ):
        if theirs.get(name) != ours:
            _rule_out(member, store, f"{name} is {_both(member, rank, ours, theirs.get(name))}")
    for name in sorted({*facts.same, *theirs["same"]}):
        own, other = facts.same.get(name), theirs["same"].get(name)
        if own != other:
            _rule_out(member, store, f"{name} is {_both(member, rank, own, other)}; make them alike")
    if facts.place and rank != member.rank and theirs["place"] == facts.place:
        _rule_out(member, store, f"ranks {member.rank} and {rank} are both on {facts.place}; {facts.advice}")


def _both(member: Member, rank: int, ours: object, theirs: object) -> str:
    def shown(value: object) -> str:
        return "not set" if value is None else repr(value)

    return f"{shown(ours)} at rank {member.rank}, {shown(theirs)} at rank {rank}"


def _rule_out(member: Member, store: Store, text: str) -> NoReturn:
    """Refuse the group here, and leave word for the others."""
    _leave_word(store, text)
    raise UpdateRefused(Reason.INVALID_UPDATE, f"{member}: {text}")


def _leave_word(store: Store, text: str) -> None:
    """Tell the others why they will not meet; not those of a group that has met, which a stranger came to."""
    if not store.check([_ALL_MET]):
        store.set(FAILED, text)


def _parsed(told: bytes) -> dict[str, Any]:
    """What a hello says; nothing if it is none of ours."""
    try:
        found = json.loads(told)
    except (ValueError, RecursionError):
        return {}
    whole = isinstance(found, dict) and isinstance(found.get("same"), dict) and "place" in found
    return found if whole else {}


def compare_headers(member: Member, headers: Sequence[dict[str, str | int]]) -> None:
    """Whether all ranks would move the same bytes in the same pieces; all come to the same end.

    Args:
        headers: of every rank, in order.

    Raises:
        UpdateRefused (MANIFEST_MISMATCH): naming the first difference.
    """
    for rank, theirs in enumerate(headers):
        for name, value in headers[0].items():
            if theirs.get(name) != value:
                raise UpdateRefused(
                    Reason.MANIFEST_MISMATCH,
                    f"group {member.group_name!r}: rank 0 would send {name} {value}, rank {rank} "
                    f"would receive {theirs.get(name)}; both ends must use one manifest and one "
                    f"bucket_bytes. Rank 0: {_show(headers[0])}. Rank {rank}: {_show(theirs)}",
                )


def header_of(plan: BucketPlan) -> dict[str, str | int]:
    """What this rank would move."""
    return plan.cut.header()


def _show(header: dict[str, str | int]) -> str:
    return ", ".join(f"{field} {value}" for field, value in header.items())
