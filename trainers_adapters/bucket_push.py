"""Push tensors that come once, one after the other, and are gone then: a sharded model as it is gathered.

push_weights asks its source what will come, and may read it twice. Whoever is only given a generator can say
neither, so here the engine's own layout is the manifest, and each tensor is cast to its slot's dtype:

    begin     on every engine
    add       copies a tensor into a bucket; when it says that the bucket is full,
    send      lends or streams it to every engine, while the next one is filled
    prepare   every engine votes, and what arrived there must have the checksums that were taken here
    commit    on every engine; or abort, and every engine keeps its weights

By the ipc path engines of this host read the buckets where they lie (on a GPU too); by the tensor path their
bytes go in calls. Either way the sender holds two buckets, and each engine stages what came.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from trainers_adapters.buckets import Bucket, two_buckets
from trainers_adapters.clients import WeightsClient
from trainers_adapters.engine_layout import EngineLayout, is_computed, misfit, refusal
from trainers_adapters.errors import PushError, RollsyncError
from trainers_adapters.push import PushReport
from trainers_adapters.push_ends import COMMIT_RETRY_S, abort, incomplete, let_go, stop
from trainers_adapters.send_ipc import release_everywhere
from trainers_adapters.sending import named_by_digest
from weight_updater.arena import TORCH_DTYPES
from weight_updater.checksum import checksums, fold_by_name
from weight_updater.errors import UpdateError
from weight_updater.names import clean_name
from weight_updater.requests import (
    DEFAULT_BUCKET_BYTES,
    BeginReply,
    BeginUpdate,
    Inflight,
    Path,
    Staging,
    UpdateReply,
    UpdateState,
    align,
)

R = TypeVar("R")

LEASE_S = 120.0
"""An engine gives up an update that nothing came for during so long."""
RENEW_S = 20.0
"""After so long without a call the lease is renewed, if tensors go on coming."""


class BucketPush:
    """One push after the other to the same engines; the buckets are kept between them. No method but `close`
    may be called from two threads at once.

    Args:
        clients: of the engines; the caller closes them, after this.
        path: ipc (engines of this host) or tensor.
        staging: auto, device or host. inflight: what becomes of sequences in flight at the commit.
        bucket_bytes: of one bucket; no more than all tensors need, and no less than the largest does.
        timeout_s: seconds that one call may take.
    """

    def __init__(
        self,
        clients: Sequence[WeightsClient],
        *,
        path: str = "tensor",
        staging: str = "auto",
        inflight: str = "wait",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 600.0,
    ) -> None:
        if not clients or len({client.address for client in clients}) != len(clients):
            raise ValueError("a push needs at least one engine, and each engine once")
        if path not in (Path.IPC, Path.TENSOR) or staging == Staging.NONE:
            raise ValueError(f"path={path}, staging={staging}: path is ipc or tensor, and staging not none")
        self._clients = list(clients)
        self._path = Path(path)
        self._options: dict[str, Any] = {"staging": Staging(staging), "inflight": Inflight(inflight)}
        self._bucket_bytes = align(bucket_bytes)
        self._timeout_s = timeout_s
        self._pool = self._new_pool()
        self._left = False  # a thread waits for an engine that answers nothing; it ends with its call
        self._layout: EngineLayout | None = None
        self._buckets: list[Bucket] = []
        self._sending: Future[None] | None = None
        self._update_id = ""
        self._open = False
        self._begin_state()

    def _new_pool(self) -> ThreadPoolExecutor:
        """Threads for a bucket that is given to every engine, and for another call to each of them."""
        return ThreadPoolExecutor(2 * len(self._clients) + 1, thread_name_prefix="buckets")

    def _begin_state(self) -> None:
        self._sums: dict[str, int] = {}  # of what came, by slot
        self._alias_sums: dict[str, int] = {}
        self._begun: list[BeginReply] = []
        self._touched = self._started = self._sent_at = time.monotonic()
        for bucket in self._buckets:
            bucket.clear()  # of a push that was given up

    @property
    def update_id(self) -> str:
        """Of the update that is open, or was last."""
        return self._update_id

    # ------------------------------------------------------------ the steps

    def begin(self, version: int = 0, update_id: str = "") -> None:
        """Open an update on every engine.

        Args:
            version: larger than any that the engines ever committed; 0 means the next one.
            update_id: under which the engines will report it.

        Raises:
            PushError: refused; nothing is open then.
        """
        if self._left:  # who is left there reads the old buckets, and clears them in the end
            self._pool.shutdown(wait=False)
            self._pool, self._left = self._new_pool(), False
            self._drop_buckets()
        self._begin_state()
        self._open = True
        self._update_id = update_id or f"push-{secrets.token_hex(8)}"
        layouts = self._on_all(lambda client: client.layout(timeout_s=self._timeout_s), "GetWeightLayout")
        self._layout = layout = EngineLayout([client.address for client in self._clients], layouts)
        digest = layout.manifest.digest()
        update = BeginUpdate(
            path=self._path,
            update_id=self._update_id,
            version=version,
            manifest=layout.manifest,
            lease_s=LEASE_S,
            num_engines=len(self._clients),
            **self._options,
        )

        def begin(client: WeightsClient) -> BeginReply:
            return named_by_digest(
                client, update, digest, lambda asked: client.begin(asked, timeout_s=self._timeout_s)
            )

        self._begun = self._on_all(begin, "BeginUpdate")
        if len(versions := {reply.next_version for reply in self._begun}) > 1:
            raise misfit(
                "ENGINES_DISAGREE", f"the engines would commit versions {sorted(versions)}; give one"
            )

    def add(self, name: str, tensor: torch.Tensor) -> bool:
        """Take a copy of a tensor, which may be written to or freed then.

        Returns:
            Whether `send` must be called before the next `add`.

        Raises:
            PushError: the engines know no such tensor, or another of that name; nothing was committed.
        """
        layout = self._open_layout()
        if self._sending is not None and self._sending.done():
            self._sent()  # tells a refusal now, rather than when the next bucket is full
        name = clean_name(name)
        if is_computed(name):
            return False
        slot = layout.slot(name)
        if tuple(tensor.shape) != tuple(slot.shape):
            raise misfit(
                "MANIFEST_MISMATCH",
                f"{name} has shape {tuple(tensor.shape)}, but the engine's has {tuple(slot.shape)}",
            )
        if name in self._sums or name in self._alias_sums:
            raise misfit("INVALID_UPDATE", f"{name} came twice")
        dtype = TORCH_DTYPES[slot.dtype]
        if slot.alias_of:
            self._alias_sums[name] = checksums([tensor.detach().to(dtype)])[0]
            return False
        self._sums[name] = 0  # known when its bucket is sealed
        bucket = self._bucket(tensor)
        bucket.put(layout.index[name], tensor, dtype)
        self._keep_lease()
        return not bucket.has_room(layout.largest)

    def send(self) -> None:
        """Give the filled bucket to every engine; returns when the one before has been taken.

        Raises:
            PushError: an engine refused a bucket or is gone; nothing was committed.
        """
        if not self._buckets or not self._buckets[0].placed:
            return
        layout, bucket = self._open_layout(), self._buckets[0]
        for place, value in zip(bucket.placed, bucket.sealed(), strict=True):
            self._sums[layout.slots[place.index].name] = value
        self._sent()
        self._sending = self._pool.submit(self._give, bucket)
        self._buckets.reverse()

    def prepare(self) -> None:
        """All has come: make every engine do what can still refuse, and compare checksums with it.

        Raises:
            PushError: something is missing or came out different; nothing was committed.
        """
        layout = self._open_layout()
        if missing := [slot.name for slot in layout.slots if slot.name not in self._sums]:
            raise misfit(
                "INCOMPLETE",
                f"{len(missing)} of the engine's {len(layout.slots)} tensors did not come: {missing[0]}"
                + " and others" * (len(missing) > 1),
            )
        self.send()
        self._sent()
        for alias, value in self._alias_sums.items():
            target = layout.aliases[alias].alias_of
            if value != self._sums[target]:
                raise misfit(
                    "MANIFEST_MISMATCH",
                    f"the engine ties {alias} to {target}, but they came with other values",
                )
        expected = fold_by_name(self._sums)
        self._sent_at = time.monotonic()
        replies = self._on_all(self._prepared, "PrepareUpdate")
        for client, reply in zip(self._clients, replies, strict=True):
            if reply.received_checksum != expected:
                raise misfit(
                    "CHECKSUM_MISMATCH",
                    f"what arrived at {client.address} has checksum {reply.received_checksum:016x}, what was "
                    f"sent {expected:016x}",
                )

    def commit(self) -> PushReport:
        """Make it live on every engine.

        Raises:
            PushError: not every engine has surely committed; it names them.
        """
        expected = fold_by_name(self._sums)
        outcomes = dict(
            zip(
                [c.address for c in self._clients],
                self._pool.map(self._committed, self._clients),
                strict=True,
            )
        )
        version = self._begun[0].next_version
        replies = {where: one for where, one in outcomes.items() if not isinstance(one, RollsyncError)}
        errors = {where: one for where, one in outcomes.items() if isinstance(one, RollsyncError)}
        for where, reply in replies.items():
            if (reply.state, reply.version) != (UpdateState.COMMITTED, version):
                errors[where] = RollsyncError("INTERNAL", "NOT_APPLIED", f"it answered {reply.state}")
            elif reply.live_checksum != expected:
                found = f"its live weights have checksum {reply.live_checksum:016x}, not {expected:016x}"
                errors[where] = RollsyncError("INTERNAL", "NOT_APPLIED", found)
        self._open = False
        if errors:
            let_go(self._clients, self._update_id, errors)
            incomplete(version, {where: one for where, one in replies.items() if where not in errors}, errors)
        now = time.monotonic()
        return PushReport(
            version=version,
            path=str(self._path),
            replies=replies,
            seconds=now - self._started,
            stage_seconds=0.0,
            send_seconds=self._sent_at - self._started,
            commit_seconds=now - self._sent_at,
        )

    def abort(self) -> None:
        """End the update, if one is open: every engine keeps what it has. Best effort; harmless twice."""
        was_open, self._open = self._open, False
        if was_open and abort(self._clients, self._update_id):  # which ends what is on its way, too
            self._left = True
        sending, self._sending = self._sending, None
        if sending is not None and not self._left:
            wait([sending])

    def free(self, *, on_gpu_only: bool = False) -> None:
        """Between two pushes: give the buckets back, once the engines have let go of them."""
        if not on_gpu_only or any(bucket.on_gpu for bucket in self._buckets):
            self._drop_buckets()

    def close(self) -> None:
        """Free everything; an update that is open is aborted."""
        self.abort()
        self._pool.shutdown(wait=not self._left)
        self._drop_buckets()

    # ------------------------------------------------------------ how

    def _open_layout(self) -> EngineLayout:
        assert self._layout is not None, "begin comes first"
        return self._layout

    def _bucket(self, tensor: torch.Tensor) -> Bucket:
        """The one that is being filled, in memory of the kind that the tensor's path asks for."""
        on_gpu = tensor.is_cuda and self._path is Path.IPC
        layout = self._open_layout()
        size = max(min(self._bucket_bytes, layout.nbytes), layout.largest)
        if self._buckets and (self._buckets[0].size, self._buckets[0].on_gpu) != (size, on_gpu):
            self.send()
            self._sent()
            self._drop_buckets()
        if not self._buckets:
            try:
                self._buckets = two_buckets(size, tensor.device if on_gpu else None)
            except UpdateError as error:
                raise refusal("the trainer's buckets", error) from error
        return self._buckets[0]

    def _drop_buckets(self) -> None:
        free = True
        if self._buckets and self._path is Path.IPC:
            held = [bucket.region().allocation_id for bucket in self._buckets]
            free = release_everywhere(held, self._clients)
        for bucket in self._buckets:
            bucket.close(free=free)
        self._buckets = []

    def _sent(self) -> None:
        """Wait until the bucket that is on its way has been taken by all."""
        if self._sending is None:
            return
        try:
            self._sending.result()
        finally:
            if self._sending.done():  # and not an interrupt
                self._sending = None

    def _give(self, bucket: Bucket) -> None:
        """POOL."""
        region, placements = bucket.region(), bucket.placements()

        def give(client: WeightsClient) -> None:
            if self._path is Path.IPC:
                client.update_from_ipc(self._update_id, [region], placements, timeout_s=self._timeout_s)
            else:
                client.update_from_tensor(self._update_id, bucket.chunks(), timeout_s=self._timeout_s)

        self._on_all(give, f"UpdateWeightsFrom{self._path.capitalize()}")
        bucket.clear()

    def _prepared(self, client: WeightsClient) -> UpdateReply:
        return client.prepare(self._update_id, deadline_s=self._timeout_s, timeout_s=self._timeout_s)

    def _committed(self, client: WeightsClient) -> UpdateReply | RollsyncError:
        """A commit may be asked for again: an engine that has committed gives the same answer."""
        give_up = time.monotonic() + COMMIT_RETRY_S
        while True:
            try:
                return client.commit(self._update_id, timeout_s=self._timeout_s)
            except RollsyncError as error:
                if not error.unreachable or time.monotonic() > give_up:
                    return error
                time.sleep(0.2)

    def _keep_lease(self) -> None:
        """Tensors come slowly, so that a bucket fills more slowly than a lease lasts."""
        if time.monotonic() - self._touched < RENEW_S:
            return
        try:
            self._on_all(
                lambda client: client.renew(self._update_id, timeout_s=self._timeout_s), "RenewLease"
            )
        except PushError:
            self._sent()  # a bucket's refusal, which ended the update, is why
            raise

    def _on_all(self, call: Callable[[WeightsClient], R], what: str) -> list[R]:
        """Run one call on every engine at once; the first failure ends the update everywhere."""
        update_id = self._update_id  # another may be open by the time that a call ends
        futures = [self._pool.submit(call, client) for client in self._clients]
        try:
            done, running = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # an interrupt
            self._stop(update_id, futures, set(futures))
            raise
        for client, future in zip(self._clients, futures, strict=True):
            if future in done and (error := future.exception()) is not None:
                self._stop(update_id, futures, running)
                raise refusal(f"{what} on {client.address}", error) from error
        self._touched = time.monotonic()
        return [future.result() for future in futures]

    def _stop(self, update_id: str, calls: list[Future[R]], running: set[Future[R]]) -> None:
        left = stop(self._clients, update_id, calls, running)
        if update_id == self._update_id:
            self._left = self._left or bool(left)
            self._open = False
