"""Process groups of the distributed path, by name: the engine's registry, and the trainer's rank 0.

The engine's side of a gloo group lives in a child process (gloo_child.py): what a wrong or dying sender
does to it cannot reach the engine. That of an NCCL group writes to this process's GPU itself (nccl.py). A
group that failed is torn down at once, and may be made anew under the same name.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from weight_updater import nccl
from weight_updater.bucket_source import Buckets
from weight_updater.buckets import plan_buckets
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.gloo import GlooGroup
from weight_updater.gloo_parent import ChildGroup
from weight_updater.lingering import await_port
from weight_updater.meeting import HeaderRefused, Member, listen
from weight_updater.nccl import NcclGroup
from weight_updater.nccl_receiver import NcclReceiver
from weight_updater.packing import PackedBytes
from weight_updater.requests import InitGroup, Manifest

CPU = torch.device("cpu")

Joined = ChildGroup | NcclReceiver


class GroupRegistry:
    """The groups that an engine has joined. Safe to use by any thread.

    Args:
        device: of the weights.
        make_nccl: makes the engine's side of an NCCL group.
    """

    def __init__(
        self,
        device: torch.device = CPU,
        make_nccl: Callable[[InitGroup, torch.device], NcclReceiver] = NcclReceiver,
    ) -> None:
        self._device = device
        self._make_nccl = make_nccl
        self._lock = threading.Lock()
        self._groups: dict[str, tuple[Joined, threading.Lock]] = {}

    @property
    def backends(self) -> tuple[str, ...]:
        """What groups may use here; the first one is the default."""
        return ("nccl", "gloo") if self._device.type == "cuda" and nccl.is_available() else ("gloo",)

    def init(self, request: InitGroup) -> str:
        """WORKER. Join a group; blocks up to its timeout (and the second or two that a process takes to
        start). A group of that name whose trainer is dead is replaced.

        Returns:
            the backend.

        Raises:
            UpdateRefused: INVALID_UPDATE; GROUP_EXISTS; TIMEOUT or PEER_LOST naming group, rank, world size
                and address.
        """
        _check(request, self.backends)
        backend = request.backend or self.backends[0]
        self._remove_dead(request.group_name)
        busy = threading.Lock()
        with busy:
            with self._lock:
                if request.group_name in self._groups:
                    raise _exists(request.group_name)
                group = self._make(request, backend)
                self._groups[request.group_name] = group, busy
            try:
                group.join()
            except UpdateError:
                self._forget(group)
                raise
        return backend

    def destroy(self, name: str) -> bool:
        """WORKER. Leave a group, also while it is joined or used; False if there is none of that name."""
        with self._lock:
            found = self._groups.pop(name, None)
        if found is None:
            return False
        group, busy = found
        group.kill()  # whoever waits for it gets an error and lets go
        with busy:
            group.close()
        return True

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[Joined]:
        """WORKER. A group, for one receive. After an error it is torn down, unless it is HeaderRefused.

        Raises:
            UpdateRefused: GROUP_UNKNOWN; UPDATE_IN_PROGRESS if another thread uses it.
        """
        with self._lock:
            found = self._groups.get(name)
            known = sorted(self._groups)
        if found is None:
            raise UpdateRefused(
                Reason.GROUP_UNKNOWN,
                f"no process group {name!r} here (there are: {', '.join(known) or 'none'}); init it first, "
                f"also after a failed update",
            )
        group, busy = found
        if not busy.acquire(blocking=False):
            raise UpdateRefused(Reason.UPDATE_IN_PROGRESS, f"process group {name!r} is in use")
        try:
            yield group
        except HeaderRefused:
            raise
        except BaseException as error:
            self._forget(group)
            group.give_up(str(error) or type(error).__name__)
            raise
        finally:
            busy.release()

    @property
    def names(self) -> list[str]:
        """Names of the groups that are there, joined or being joined."""
        with self._lock:
            return sorted(self._groups)

    def drop_ended(self) -> None:
        """LOOP. Forget the groups that nobody uses and whose trainer died without a word."""
        with self._lock:
            groups = list(self._groups.values())
        for group, busy in groups:
            if isinstance(group, ChildGroup) and group.ended() and busy.acquire(blocking=False):
                self._forget(group)
                group.close()
                busy.release()

    def close(self) -> None:
        """Leave all groups."""
        for name in self.names:
            self.destroy(name)

    def _make(self, request: InitGroup, backend: str) -> Joined:
        return self._make_nccl(request, self._device) if backend == "nccl" else ChildGroup(request)

    def _remove_dead(self, name: str) -> None:
        with self._lock:
            found = self._groups.get(name)
        if found is None:
            return
        group, busy = found
        if not busy.acquire(blocking=False):
            raise _exists(name)
        try:
            alive = group.alive()
        finally:
            busy.release()
        if alive:
            raise _exists(name)
        self._forget(group)
        group.close()

    def _forget(self, group: Joined) -> None:
        """Take a group out, unless its name belongs to another one by now."""
        name = group.request.group_name
        with self._lock:
            if name in self._groups and self._groups[name][0] is group:
                del self._groups[name]


class SenderGroup:
    """Rank 0 of a group, in the trainer's process: hosts the store, broadcasts buckets. Use `with`.

    Args:
        master_address: an address of this host that the engines can reach; the store listens on it alone.
        master_port: 0 takes a free one; see `port`.
        world_size: this rank and all engines.
        timeout_s: for the rendezvous, and for each wait of a broadcast.
        backend: "gloo", or "nccl" for engines on GPUs.
        device: with nccl: the GPU that broadcasts, which no engine may use; None is the current one.

    Raises:
        UpdateRefused: INVALID_UPDATE; TIMEOUT or PEER_LOST if not all engines come.
    """

    def __init__(
        self,
        group_name: str,
        master_address: str,
        master_port: int,
        world_size: int,
        timeout_s: float = 30.0,
        *,
        backend: str = "gloo",
        device: torch.device | None = None,
    ) -> None:
        if world_size < 2:
            raise UpdateRefused(
                Reason.INVALID_UPDATE, f"world_size is {world_size}; it counts rank 0 as well"
            )
        if master_port:
            await_port(master_port, timeout_s)  # of a group that failed a moment ago
        listener = listen(master_address, master_port)
        self.port: int = listener.getsockname()[1]
        self._timeout_s = timeout_s
        self._ended_by = ""
        self._lock = threading.Lock()  # held by the one thread that uses the group
        member = Member(group_name, master_address, self.port, 0, world_size, timeout_s, backend)
        self._group = _join(member, device, listener)

    def broadcast(
        self, manifest: Manifest, tensors: Iterable[torch.Tensor] | PackedBytes, bucket_bytes: int = 0
    ) -> None:
        """Send one update to all engines; returns when every one of them has put all bytes away.

        Args:
            tensors: in the manifest's order, any device and strides; each is used when its turn comes, in
                the order of the calling thread's current stream. Or (gloo) their bytes, where they lie.
            bucket_bytes: as in BeginUpdate; 0 means 64 MiB.

        Raises:
            UpdateRefused: MANIFEST_MISMATCH if an engine expects something else (the group stays usable), or
                if `tensors` are not what the manifest says; TIMEOUT or PEER_LOST with what a lost engine
                said. After all but the first of these the group is closed.
        """
        with self._lock:
            if self._ended_by:
                raise UpdateRefused(
                    Reason.GROUP_UNKNOWN,
                    f"group {self._group.member.group_name!r} was closed ({self._ended_by}); make it anew",
                )
            plan = plan_buckets(manifest, bucket_bytes)
            with self._ending_on_failure(), self._group.on_device():
                buckets = Buckets(plan, tensors, self._group.device)
            try:
                self._group.agree(plan, self._timeout_s)
            except UpdateRefused as error:
                if error.reason is not Reason.MANIFEST_MISMATCH:
                    self._end(error)
                raise
            with self._ending_on_failure():
                with self._group.on_device():
                    self._send(buckets)
                self._group.finish(self._timeout_s)

    def close(self) -> None:
        """Leave the group; harmless twice. ANY THREAD: a running broadcast, and engines that wait for it,
        end with an error soon.
        """
        self._group.abort("the sender closed the group")
        with self._lock:
            self._ended_by = self._ended_by or "by close()"
            self._group.close()

    def __enter__(self) -> SenderGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end(self, error: BaseException) -> None:
        self._ended_by = f"after: {error}"
        self._group.abort(str(error) or type(error).__name__)
        self._group.close(linger_s=1.0)  # time for the engines to read why

    @contextlib.contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise

    def _send(self, buckets: Buckets) -> None:
        """Fill one half while the other travels."""
        group, timeout_s = self._group, self._timeout_s
        travelling: deque[tuple[int, Any]] = deque()

        def arrive(num_left: int) -> None:
            while len(travelling) > num_left:
                bucket, work = travelling.popleft()
                try:
                    group.wait(work, bucket, timeout_s)
                finally:
                    del work  # it holds the store: its port would be taken as long as an error lives

        try:
            for bucket in range(len(buckets)):
                arrive(1)  # the other half's; this one is free
                data = buckets.filled(bucket)
                arrive(group.in_flight - 1)
                travelling.append((bucket, group.broadcast(data, timeout_s)))
            buckets.finish()
            arrive(0)
        finally:
            travelling.clear()


def _join(member: Member, device: torch.device | None, listener: socket.socket) -> GlooGroup | NcclGroup:
    if member.backend == "gloo":
        return GlooGroup(member, listener)
    if member.backend != "nccl" or not (nccl.is_available() and torch.cuda.is_available()):
        listener.close()
        raise UpdateRefused(
            Reason.INVALID_UPDATE,
            f"backend is {member.backend!r}; a sender has gloo, and nccl where there is a GPU",
        )
    return NcclGroup(member, device or torch.device("cuda", torch.cuda.current_device()), listener)


def _exists(name: str) -> UpdateRefused:
    return UpdateRefused(
        Reason.GROUP_EXISTS,
        f"there is a process group {name!r} already, and its rank 0 lives; destroy it first",
    )


def _check(request: InitGroup, backends: Sequence[str]) -> None:
    """Refuse what can never be right."""
    wrong = [
        (not request.group_name, "group_name is empty"),
        (not request.master_address or "\0" in request.master_address, "master_address is empty"),
        (not 1 <= request.master_port <= 65535, f"master_port is {request.master_port}"),
        (request.world_size < 2, f"world_size is {request.world_size}; it counts rank 0 as well"),
        (
            not 1 <= request.rank < max(2, request.world_size),
            f"rank is {request.rank}, must lie in [1, {request.world_size}); the trainer is rank 0",
        ),
        (not 0 < request.timeout_s <= 86400, f"timeout_s is {request.timeout_s}, must lie in (0, 86400]"),
        (
            request.backend not in ("", *backends),
            f"backend is {request.backend!r}; this engine has {', '.join(backends)}",
        ),
    ]
    for is_wrong, text in wrong:
        if is_wrong:
            raise UpdateRefused(Reason.INVALID_UPDATE, f"group {request.group_name!r}: {text}")
