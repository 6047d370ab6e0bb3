"""A push to one engine alone, in as few calls as its sender can do with.

one call    begin, send and commit
two calls   BeginUpdate goes out while the trainer still hashes; then send and commit
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from trainers_adapters import push_ends
from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import RollsyncError
from trainers_adapters.push_ends import (
    COMMIT_RETRY_S,
    RETRY_PAUSE_S,
    abort,
    check_committed,
    fail,
    incomplete,
    is_unknown,
)
from trainers_adapters.sending import Outgoing, Sender, named_by_digest
from weight_updater.requests import BeginReply, BeginUpdate, UpdateReply


class OneEngine:
    """The calls of one push to `client`.

    Args:
        update: what is asked for, without what will come (its manifest, its checksums).
    """

    def __init__(
        self, client: WeightsClient, sender: Sender, update: BeginUpdate, outgoing: Outgoing
    ) -> None:
        self._client = client
        self._sender = sender
        self._update = update
        self._outgoing = outgoing
        self._beginning: Future[BeginReply] | None = None

    @contextmanager
    def begun_meanwhile(self, pool: Executor) -> Iterator[None]:
        """Let the update begin on a thread of `pool` while the block stages, if the sender can do with that;
        if the block fails, nothing stays open.
        """
        if not self._sender.begins_early(self._outgoing):
            yield
            return
        self._beginning = beginning = pool.submit(self._begin)
        with ExitStack() as on_failure:
            on_failure.callback(self._abort)
            on_failure.callback(wait, [beginning], push_ends.ABORT_TIMEOUT_S)
            yield
            on_failure.pop_all()

    @property
    def is_beginning(self) -> bool:
        """A thread waits for an engine that does not answer; it ends with its call."""
        return self._beginning is not None and not self._beginning.done()

    def make_live(self, update: BeginUpdate) -> UpdateReply | None:
        """Begin, send and commit what is staged. An engine that has committed it says so again when asked
        again, so a call whose answer was lost is repeated.

        Args:
            update: with what will come.

        Returns:
            None if the sender takes a call for each step.
        """
        give_up = time.monotonic() + COMMIT_RETRY_S
        begun = self._begun()
        with ExitStack() as on_failure:
            on_failure.callback(self._sender.cancel)
            while True:
                try:
                    reply = self._whole(update) if begun is None else self._rest(begun, update)
                    break
                except RollsyncError as error:
                    self._check_may_retry(error, give_up, begun)
                    time.sleep(RETRY_PAUSE_S)
                    begun = None
            on_failure.pop_all()
        if reply is not None:
            next_version = self._next_version(begun) or reply.brought_version
            verify = not self._update.skip_checksums
            check_committed(self._client.address, reply, next_version, verify=verify)
        return reply

    def _begin(self) -> BeginReply:
        """THREAD."""
        outgoing = self._outgoing
        update, left = replace(self._update, manifest=outgoing.manifest), outgoing.seconds_left
        return named_by_digest(
            self._client, update, outgoing.digest, lambda asked: self._client.begin(asked, timeout_s=left)
        )

    def _begun(self) -> BeginReply | None:
        """The answer of an early BeginUpdate; None: there was none, or nobody answered."""
        if self._beginning is None:
            return None
        try:
            return self._beginning.result()
        except RollsyncError as error:
            if error.unreachable:
                return None
            self._abort()
            fail(f"BeginUpdate on {self._client.address}", error)

    def _rest(self, begun: BeginReply, update: BeginUpdate) -> UpdateReply:
        return self._sender.send_and_commit(self._client, begun.update_id, self._outgoing, update.checksums)

    def _whole(self, update: BeginUpdate) -> UpdateReply | None:
        if self._beginning is not None:
            self._abort()  # it may be open, as a request without checksums, which is another than this one
        return named_by_digest(
            self._client,
            update,
            self._outgoing.digest,
            lambda asked: self._sender.in_one_call(self._client, asked, self._outgoing),
        )

    def _check_may_retry(self, error: RollsyncError, give_up: float, begun: BeginReply | None) -> None:
        """Raise PushError, unless nobody answered and it is not yet time to `give_up`."""
        if error.unreachable and time.monotonic() <= give_up:
            return
        if is_unknown(error) or self._beginning is not None:
            self._abort()
        if not is_unknown(error):
            fail(f"UpdateWeightsFrom{self._sender.path.capitalize()} on {self._client.address}", error)
        incomplete(self._next_version(begun), {}, {self._client.address: error})

    def _next_version(self, begun: BeginReply | None) -> int:
        """That is to become live; 0: the engine chooses it."""
        return self._update.version if begun is None else begun.next_version

    def _abort(self) -> None:
        abort([self._client], self._update.update_id)
