"""push_weights: a source's weights to one engine or many, by any of the four paths, all or none.

    1 stage     put the bytes where they will be fetched (a file, a segment), hash them
    2 begin     on every engine; whatever does not fit is refused here, before a byte moves
    3 send      to every engine at once
    4 prepare   (several engines) every engine votes; one failed vote aborts the update on all
    5 commit    one engine first; once it has committed, the push only goes forward

One engine alone takes fewer calls where the path allows it: push_one.py.

The version that a push reports is the one in the engines' replies, and nothing else.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from trainers_adapters.adapter_source import AdapterSource
from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import PushError, RollsyncError
from trainers_adapters.push_ends import (
    COMMIT_RETRY_S,
    RETRY_PAUSE_S,
    abort,
    check_committed,
    fail,
    incomplete,
    is_unknown,
    let_go,
    stop,
)
from trainers_adapters.push_one import OneEngine
from trainers_adapters.resident import resident_bytes
from trainers_adapters.send_distributed import BroadcastGroup
from trainers_adapters.send_ipc import IpcArena
from trainers_adapters.send_tensor import TensorStream
from trainers_adapters.sending import Outgoing, Sender, named_by_digest, settle_stream
from trainers_adapters.sources import Source
from weight_updater.errors import UpdateError
from weight_updater.requests import (
    AdapterSpec,
    BeginReply,
    BeginUpdate,
    Inflight,
    Staging,
    UpdateReply,
)

R = TypeVar("R")

DEFAULT_SENDERS: dict[str, Callable[[], Sender]] = {
    "tensor": TensorStream,
    "ipc": IpcArena,
    "distributed": BroadcastGroup,
}
"""What a path means when no sender is given; the disk path needs to be told a directory."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """A push that committed on every engine.

    version: from the engines' replies. replies: by engine address. seconds: of the whole call;
    stage_seconds, send_seconds and commit_seconds (prepare included) are its parts.
    """

    version: int
    path: str
    replies: dict[str, UpdateReply]
    seconds: float
    stage_seconds: float
    send_seconds: float
    commit_seconds: float

    @property
    def num_changed(self) -> int:
        """Tensors that differ from what was live, on the engine where fewest do; 0: the push did nothing."""
        return min(reply.num_changed for reply in self.replies.values())

    @property
    def num_bytes(self) -> int:
        return max(reply.num_bytes for reply in self.replies.values())

    @property
    def pause_seconds(self) -> float:
        """The longest time during which an engine could not start a forward pass."""
        return max(reply.seconds.pause for reply in self.replies.values())


def push_weights(
    source: Source,
    clients: WeightsClient | Sequence[WeightsClient],
    version: int = 0,
    *,
    path: str = "tensor",
    via: Sender | None = None,
    staging: str = "auto",
    inflight: str = "wait",
    keep_previous: bool = False,
    verify: bool = True,
    partial: bool = False,
    allow_nonfinite: bool = False,
    lease_s: float = 0.0,
    timeout_s: float = 600.0,
) -> PushReport:
    """Push all weights of `source` and make them live as `version` on every engine.

    An AdapterSource brings an adapter, and leaves the base weights alone; `version` is the adapter's then,
    `inflight` is about the sequences that use it, and it waits in memory of its own.

    Args:
        version: larger than any that the engines ever committed; 0 means the next one.
        path: disk, distributed, tensor or ipc; the sender is made for this push alone.
        via: a sender that outlives the push (DiskDirectory, TensorSegment, IpcArena, BroadcastGroup ...)
            and says the path itself; saves allocations and rendezvous from the second push on.
        staging: auto, device, host or none (one engine only). inflight: wait, abort, keep or recompute.
        keep_previous: keep the version being replaced for WeightsClient.rollback.
        verify: hash here and compare there.
        timeout_s: seconds for the whole push.

    Raises:
        PushError: refused, failed or incomplete; it names the engine and says who committed.
        ValueError: arguments that cannot be right.
    """
    engines = [clients] if isinstance(clients, WeightsClient) else list(clients)
    if not engines or len({client.address for client in engines}) != len(engines):
        raise ValueError("push_weights needs at least one engine, and each engine once")
    sender = via or _sender_for(path)
    update = BeginUpdate(
        path=sender.path,
        update_id=f"push-{secrets.token_hex(8)}",
        version=version,
        staging=Staging(staging),
        inflight=Inflight(inflight),
        partial=partial,
        keep_previous=keep_previous,
        allow_nonfinite=allow_nonfinite,
        skip_checksums=not verify,
        lease_s=lease_s,
        num_engines=len(engines),
    )
    try:
        return _Push(source, engines, sender, update, timeout_s).run()
    finally:
        if via is None:
            sender.close()


def _sender_for(path: str) -> Sender:
    if path in DEFAULT_SENDERS:
        return DEFAULT_SENDERS[path]()
    raise ValueError(
        "path='disk' needs via=DiskDirectory(a directory that the engines can read)"
        if path == "disk"
        else f"path is {path!r}; it must be disk, distributed, tensor or ipc"
    )


class _Push:
    """One push under way; its methods are the steps of the module's docstring."""

    def __init__(
        self,
        source: Source,
        clients: list[WeightsClient],
        sender: Sender,
        update: BeginUpdate,
        timeout_s: float,
    ) -> None:
        self._started = time.monotonic()
        self._clients = clients
        self._sender = sender
        self._update = update
        verify = not update.skip_checksums
        resident = resident_bytes(source)
        described = source if resident is None else resident
        manifest = described.manifest(checksums=verify and not sender.hashes_bytes)
        self._outgoing = Outgoing(source, manifest, self._started + timeout_s, verify, resident)
        self._pool = ThreadPoolExecutor(len(clients) + 1, thread_name_prefix="push")
        self._alone: OneEngine | None = None
        self._is_open = False  # an update may be, on an engine
        self._left: set[Future[Any]] = set()  # calls to engines that answer nothing

    def run(self) -> PushReport:
        try:
            return self._run()
        except Exception:
            raise  # whoever raised it has ended what was open
        except BaseException:  # an interrupt, wherever it came
            if self._is_open:
                self._abort_all()
            raise
        finally:
            waits = self._left or (self._alone is not None and self._alone.is_beginning)
            self._pool.shutdown(wait=not waits)

    def _run(self) -> PushReport:
        self._update = replace(self._update, adapter=self._adapter())
        if len(self._clients) == 1:
            self._alone = OneEngine(self._clients[0], self._sender, self._update, self._outgoing)
        fields = self._staged()
        staged = time.monotonic()
        self._is_open = True
        reply = self._alone.make_live(replace(self._update, **fields)) if self._alone else None
        if reply is not None:
            return self._report({self._clients[0].address: reply}, staged, staged)
        begun = self._begin_all(fields)
        self._send_all(begun)
        sent = time.monotonic()
        if len(self._clients) > 1:
            self._prepare_all()
        replies = self._commit_all(begun[0])
        return self._report(replies, staged, sent)

    def _report(self, replies: dict[str, UpdateReply], staged: float, sent: float) -> PushReport:
        now = time.monotonic()
        (version,) = {reply.brought_version for reply in replies.values()}
        return PushReport(
            version=version,
            path=str(self._sender.path),
            replies=replies,
            seconds=now - self._started,
            stage_seconds=staged - self._started,
            send_seconds=sent - staged,
            commit_seconds=now - sent,
        )

    def _staged(self) -> dict[str, Any]:
        """BeginUpdate fields that say what will come, and where it waits."""
        try:
            with self._alone.begun_meanwhile(self._pool) if self._alone else nullcontext():
                fields = self._sender.stage(self._outgoing, self._clients)
        except (RollsyncError, UpdateError) as error:
            fail("staging the bytes", error)
        return {"manifest": self._outgoing.manifest} | fields

    def _adapter(self) -> AdapterSpec | None:
        """What an update of an adapter says of it; the base weights are compared in the engines' dtypes."""
        source, client = self._outgoing.source, self._clients[0]
        if not isinstance(source, AdapterSource):
            return None
        try:
            layout = client.layout(timeout_s=self._outgoing.seconds_left)
        except RollsyncError as error:
            fail(f"GetWeightLayout on {client.address}", error)
        return source.spec(layout)

    def _begin_all(self, fields: dict[str, Any]) -> list[BeginReply]:
        def begin(client: WeightsClient) -> BeginReply:
            update, outgoing = replace(self._update, **fields), self._outgoing
            left = outgoing.seconds_left
            return named_by_digest(
                client, update, outgoing.digest, lambda asked: client.begin(asked, timeout_s=left)
            )

        replies = self._on_all(begin, "BeginUpdate")
        agreed = {(reply.next_version, reply.bucket_bytes, reply.total_bytes) for reply in replies}
        if len(agreed) > 1:
            self._abort_all()
            said = ", ".join(
                f"{client.address}: version {reply.next_version}, {reply.total_bytes} bytes"
                for client, reply in zip(self._clients, replies, strict=True)
            )
            raise PushError(
                "FAILED_PRECONDITION",
                "ENGINES_DISAGREE",
                f"the engines would commit different things ({said}); pass a version larger than all",
            )
        return replies

    def _send_all(self, begun: list[BeginReply]) -> None:
        replies = {client.address: reply for client, reply in zip(self._clients, begun, strict=True)}
        settle_stream()  # before other threads read the source

        def send(client: WeightsClient) -> UpdateReply:
            return self._sender.send(client, replies[client.address], self._outgoing)

        self._on_all(send, f"UpdateWeightsFrom{self._sender.path.capitalize()}", beside=begun[0])

    def _prepare_all(self) -> None:
        def prepare(client: WeightsClient) -> UpdateReply:
            left = self._outgoing.seconds_left
            return client.prepare(self._update.update_id, deadline_s=left, timeout_s=left)

        self._on_all(prepare, "PrepareUpdate")

    def _on_all(
        self, call: Callable[[WeightsClient], R], what: str, *, beside: BeginReply | None = None
    ) -> list[R]:
        """Run one call on every engine at once; the first failure ends the update everywhere."""
        futures: list[Future[R]] = [self._pool.submit(call, client) for client in self._clients]
        pending: list[Future[Any]] = list(futures)
        if beside is not None:
            pending.append(self._pool.submit(self._sender.beside, beside, self._outgoing))
        try:
            done, running = wait(pending, return_when=FIRST_EXCEPTION)
        except BaseException:  # an interrupt
            self._stop(pending, set(pending))
            raise
        if any(future.exception() is not None for future in done):
            self._end(pending, done, running, what)
        return [future.result() for future in futures]

    def _end(
        self, pending: list[Future[Any]], done: set[Future[Any]], running: set[Future[Any]], what: str
    ) -> NoReturn:
        """One call failed: stop the others on both ends, then say which was first and why.

        An engine's refusal counts before the broadcast's failure, which it is the likely cause of.
        """
        at, error = next((i, f.exception()) for i, f in enumerate(pending) if f in done and f.exception())
        self._stop(pending, running)
        assert error is not None
        here = at == len(self._clients)
        fail(f"{what} on {'the trainer' if here else self._clients[at].address}", error)

    def _stop(self, pending: list[Future[Any]], running: set[Future[Any]]) -> None:
        self._is_open = False
        self._left |= stop(self._clients, self._update.update_id, pending, running, self._sender.cancel)

    def _abort_all(self) -> None:
        abort(self._clients, self._update.update_id)

    def _commit_all(self, begun: BeginReply) -> dict[str, UpdateReply]:
        """The first engine alone: only if it surely did not commit may the push still go back."""
        first, *rest = self._clients
        outcomes: dict[str, UpdateReply | RollsyncError] = {first.address: self._commit(first)}
        outcome = outcomes[first.address]
        if isinstance(outcome, RollsyncError) and not is_unknown(outcome):
            self._abort_all()
            fail(f"CommitUpdate on {first.address}", outcome)
        outcomes |= dict(zip((c.address for c in rest), self._pool.map(self._commit, rest), strict=True))
        replies = {where: o for where, o in outcomes.items() if not isinstance(o, RollsyncError)}
        errors = {where: o for where, o in outcomes.items() if isinstance(o, RollsyncError)}
        if errors:
            let_go(self._clients, self._update.update_id, errors)
            incomplete(begun.next_version, replies, errors)
        for where, reply in replies.items():
            check_committed(where, reply, begun.next_version, verify=not self._update.skip_checksums)
        return replies

    def _commit(self, client: WeightsClient) -> UpdateReply | RollsyncError:
        give_up = time.monotonic() + COMMIT_RETRY_S
        while True:
            try:
                return client.commit(self._update.update_id, timeout_s=self._outgoing.seconds_left)
            except RollsyncError as error:
                if not error.unreachable or time.monotonic() > give_up:
                    return error
                time.sleep(RETRY_PAUSE_S)
