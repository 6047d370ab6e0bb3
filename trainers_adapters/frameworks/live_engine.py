"""One engine, and the weights that a trainer last pushed to it.

A trainer may only learn from tokens that were sampled by the weights it pushed last. LiveEngine holds to
that: it asks for at least that version, and looks at the version and commit of every token that comes back.
An engine that died, was replaced or rolled back shows as WeightsLost: push again, then ask again. Every
method ends by its deadline.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypedDict

from typing_extensions import Unpack

from trainers_adapters.clients import RolloutClient, WeightsClient
from trainers_adapters.connection import Tls
from trainers_adapters.errors import RollsyncError
from trainers_adapters.push import DEFAULT_SENDERS, PushReport, push_weights
from trainers_adapters.results import Completion, EngineInfo
from trainers_adapters.rollout_calls import Request
from trainers_adapters.sending import Sender
from trainers_adapters.sources import Source

GONE_REASONS = frozenset(
    {
        "UNREACHABLE",
        "ENGINE_DEAD",
        "NOT_SERVING",  # torn weights; a full update mends it
        "VERSION_TOO_OLD",
        "UPDATE_IN_PROGRESS",  # of a trainer that died; its lease runs out
        "PEER_LOST",
        "GROUP_UNKNOWN",
    }
)
"""Reasons that waiting and pushing again may cure."""
RETRY_S = 0.25
"""Seconds between two looks for an engine that does not answer."""
LOOK_S = 5.0
"""Seconds that one look may take."""


class EngineOptions(TypedDict, total=False):
    """How an engine is reached, how weights get there, and how long anything may take.

    token, tls: as the clients take them.
    path: distributed, tensor or ipc; "auto" (the default) takes ipc where the address is this host's, else
        tensor. via: a sender to use instead; it stays the caller's to close.
    staging, verify: as push_weights takes them.
    timeout_s: seconds that one sync or one generation may take, everything included (600).
    restart_s: seconds of them to wait for an engine that is gone (120); 0 gives up at once.
    """

    token: str | None
    tls: Tls | None
    path: str
    via: Sender | None
    staging: str
    inflight: str
    verify: bool
    timeout_s: float
    restart_s: float


class WeightsLost(RollsyncError):
    """The engine does not serve what was pushed last (any more): push again, then ask again."""


class EngineLost(RollsyncError):
    """The engine went away and did not come back in time."""


def gone(error: RollsyncError) -> bool:
    """Whether a failed call may work after a pause and another push."""
    return error.reason in GONE_REASONS or (error.code == "CANCELLED" and error.reason != "CLOSED")


class LiveEngine:
    """Args: the engine's address (host:port), and EngineOptions.

    version, commit_sequence: of the last push; 0 before the first. report: that push's.
    resyncs: how often lost weights were pushed again.
    """

    def __init__(self, address: str, **options: Unpack[EngineOptions]) -> None:
        if unknown := options.keys() - EngineOptions.__annotations__.keys():
            known = ", ".join(EngineOptions.__annotations__)
            raise TypeError(f"unknown option {sorted(unknown)[0]!r}; the options are {known}")
        self.address = address
        self.timeout_s = options.get("timeout_s", 600.0)
        self.restart_s = options.get("restart_s", 120.0)
        self._push_options: dict[str, Any] = {
            "staging": options.get("staging", "auto"),
            "inflight": options.get("inflight", "wait"),
            "verify": options.get("verify", True),
        }
        via = options.get("via")
        self._own_sender = via is None
        self._sender = via if via is not None else _sender(options.get("path", "auto"), address)
        where = {"token": options.get("token"), "tls": options.get("tls")}
        self._rollout = RolloutClient(address, **where)  # type: ignore[arg-type]
        self._weights = WeightsClient(address, **where)  # type: ignore[arg-type]
        self._pushing = threading.Lock()
        self._pushed: set[tuple[int, int]] = set()  # (version, commit) of every push
        self.version = 0
        self.commit_sequence = 0
        self.instance_id = ""
        self.report: PushReport | None = None
        self.resyncs = 0

    def close(self) -> None:
        """Give back what pushes allocated, and the channels."""
        if self._own_sender:
            self._sender.close()
        self._weights.close()
        self._rollout.close()

    def wait(self) -> EngineInfo:
        """The engine's info, waiting up to restart_s for one that answers.

        Raises:
            EngineLost: none did.
        """
        give_up = time.monotonic() + self.restart_s
        while True:
            try:
                return self._rollout.info(timeout_s=LOOK_S)
            except RollsyncError as error:
                self._pause(error, give_up)

    def push(self, source: Source, *, partial: bool = False) -> PushReport:
        """Make the source's weights live, as a version above all that this object pushed before.

        An engine that is gone is waited for. Each attempt sends everything again, under a new version.

        Args:
            partial: the source holds only some of the engine's tensors; the others stay.

        Raises:
            EngineLost: the engine did not come back within restart_s.
            RollsyncError: refused, or out of time; the message says what and on which engine.
        """
        with self._pushing:
            return self._push(source, partial)

    def _push(self, source: Source, partial: bool) -> PushReport:
        started = time.monotonic()
        while True:
            left = started + self.timeout_s - time.monotonic()
            try:
                info = self._rollout.info(timeout_s=LOOK_S)
                # An engine that was restarted counts from its own start; the trainer's versions only grow.
                version = 0 if info.weight_version >= self.version else self.version + 1
                report = push_weights(
                    source,
                    self._weights,
                    version,
                    via=self._sender,
                    partial=partial,
                    timeout_s=max(0.001, left),
                    **self._push_options,
                )
            except RollsyncError as error:
                self._pause(error, min(started + self.restart_s, started + self.timeout_s))
                continue
            if report.version > self.version:  # else it was restarted between the two calls
                break
        (reply,) = report.replies.values()
        self.version, self.commit_sequence = report.version, reply.commit_sequence
        self.instance_id, self.report = info.instance_id, report
        self._pushed.add((self.version, self.commit_sequence))
        return report

    def sample(
        self, requests: Sequence[Request], *, timeout_s: float, mixed: bool = False
    ) -> list[list[Completion]]:
        """All completions of all requests, each sampled by the weights pushed last and by no others.

        Args:
            mixed: pushes go on meanwhile, so any weights from those live now on may have sampled.

        Raises:
            WeightsLost: the engine is gone or serves other weights; nothing of what it said is given.
            RollsyncError: refused, out of time, or someone else pushes to this engine.
        """
        if self.report is None:
            raise ValueError(f"nothing was pushed to {self.address} yet; push before sampling")
        try:
            batch = self._rollout.generate_batch(requests, min_version=self.version, timeout_s=timeout_s)
        except RollsyncError as error:
            if not gone(error):
                raise
            raise WeightsLost(error.code, error.reason, error.message) from error
        for position, completions in enumerate(batch):
            for completion in completions:
                if what := self._wrong(completion, mixed):
                    self._explain(f"prompt {position}, completion {completion.index} {what}")
        return batch

    def _wrong(self, completion: Completion, mixed: bool) -> str:
        """What makes a completion no sample of the weights pushed last; "" if nothing does."""
        if completion.finish_reason not in ("stop", "length") or not completion.token_ids:
            return (
                f"ended with {completion.finish_reason} after {len(completion.token_ids)} tokens"
                + f" ({completion.error})" * bool(completion.error)
            )
        for span in completion.spans:
            label = (span.weight_version, span.commit_sequence)
            if mixed and label not in self._pushed:
                with self._pushing:  # a commit shows in tokens before its push returns
                    pass
            if label not in self._pushed if mixed else label != (self.version, self.commit_sequence):
                return (
                    f"was sampled by weight version {span.weight_version} (commit {span.commit_sequence}), "
                    f"but version {self.version} (commit {self.commit_sequence}) was pushed last"
                )
        return ""

    def _explain(self, what: str) -> NoReturn:
        """Raise WeightsLost if the engine is another one by now, else say that someone interferes."""
        try:
            same = self._rollout.info(timeout_s=LOOK_S).instance_id == self.instance_id
        except RollsyncError as error:
            raise WeightsLost(error.code, error.reason, f"{what}; {error.message}") from error
        if not same:
            raise WeightsLost("UNAVAILABLE", "RESTARTED", f"{what}; another engine answers at {self.address}")
        raise RollsyncError(
            "FAILED_PRECONDITION",
            "INTERFERENCE",
            f"{what}: something else updates or aborts on the engine at {self.address}; "
            f"give each trainer an engine of its own",
        )

    def missing(self, names: Iterable[str]) -> list[str]:
        """The engine's tensors (a tied one once) that are not among `names`."""
        given = set(names)
        placements = self._weights.layout(timeout_s=LOOK_S).placements
        return [p.name for p in placements if not p.alias_of and p.name not in given]

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests of ours with what they have."""
        self._rollout.abort(request_ids, timeout_s=LOOK_S)

    def _pause(self, error: RollsyncError, give_up: float) -> None:
        """Wait a little before the next look, or say that it was the last."""
        if not gone(error) and error.reason != "DEADLINE":
            raise error
        if time.monotonic() + RETRY_S > give_up:
            since = "was lost and is not back after" if self.version else "has not answered for"
            version = f"; weight version {self.version} was the last pushed to it" if self.version else ""
            raise EngineLost(
                error.code,
                error.reason,
                f"the engine at {self.address} {since} {self.restart_s:g} s: {error.message}{version}. Start "
                f"it on that address and resume from a checkpoint, or raise restart_s",
            ) from error
        time.sleep(RETRY_S)


def _sender(path: str, address: str) -> Sender:
    """A sender of `path` that lives as long as the engine object."""
    if path == "auto":
        path = "ipc" if _is_loopback(address) else "tensor"
    if path not in DEFAULT_SENDERS:
        known = ", ".join(DEFAULT_SENDERS)
        raise ValueError(f"path is {path!r}; it must be auto, {known}, or give via= a sender")
    return DEFAULT_SENDERS[path]()


def _is_loopback(address: str) -> bool:
    host = address.rsplit(":", 1)[0].removeprefix("ipv4:").removeprefix("ipv6:").strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
