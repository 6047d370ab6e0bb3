"""A trainer that stops at one stage of one update, so that it can be struck there. Forked by the nursery.

It says {"at": stage} when it gets to the stage of its plan. At most stages it then waits for a word: "go"
goes on, "close" closes its channel first. While a call is under way (the commit, and a transfer that the
engine fetches by itself) it cannot wait; there the word counts whenever it comes. At the end it says
{"ended": ..., "reason": ..., "version": ...}.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.faults.adapted import Adapted
from tests.faults.weights import base_of, weights_of, write_into
from tests.wire.trainer import Named
from trainers_adapters import (
    AdapterSource,
    AdoptedArena,
    BroadcastGroup,
    DiskDirectory,
    IpcArena,
    PushError,
    RollsyncError,
    TensorSegment,
    TensorStream,
    WeightsClient,
    push_weights,
)
from trainers_adapters.sending import Outgoing, Sender
from weight_updater.errors import UpdateError
from weight_updater.requests import BeginUpdate, Inflight, Manifest, Staging

MODEL = torch.nn.Module()
ADAPTED: list[Adapted] = []
"""Both are set by the nursery before it forks."""


@dataclass(frozen=True)
class Plan:
    """What a trainer is to do. stage, at: where it stops (the `at`-th tensor or chunk of a transfer).

    seed: of the weights, or of the adapter that is trained over the base weights of base_seed. adapter: its
    name; "": the update is of the base weights. receive_timeout_s: of one wait of the engine in a group.
    shard_bytes: of a file. full_bytes: then the disk is full.
    """

    address: str
    adapter: str
    base_seed: int
    shard_bytes: int
    full_bytes: int
    path: str
    staging: str
    form: str
    stage: str
    at: int
    seed: int
    inflight: str
    keep_previous: bool
    second: bool
    full: str
    directory: str
    version: int
    lease_s: float
    receive_timeout_s: float


class Script:
    """Where the trainer is, and what it was told."""

    def __init__(self, talk: socket.socket, plan: Plan) -> None:
        self._talk, self.plan = talk, plan
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.close: Callable[[], None] = lambda: None
        self.live = True  # the plan's stage may be reached
        self.finished = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._talk.makefile("r"):
            word = json.loads(line)
            if word == "close":
                self.close()
            self._words.put(word)
        os._exit(0)  # nobody is left to report to

    def say(self, **message: Any) -> None:
        self._talk.sendall(json.dumps(message).encode() + b"\n")

    def reach(self, stage: str) -> None:
        """Stop here if this is where the plan stops."""
        if self.passing(stage):
            self._words.get()

    def passing(self, stage: str) -> bool:
        """Say so if this is where the plan stops, but go on."""
        if not (self.live and stage == self.plan.stage):
            return False
        self.live = False
        self.say(at=stage)
        return True

    def finish(self, ended: str, reason: str = "", version: int = 0) -> None:
        """Report, and hold what the engine may live on until told to leave."""
        self.finished = True
        self.say(ended=ended, reason=reason, version=version)
        while self._words.get() != "leave":
            pass


class Stopping:
    """A source that is iterated for staging, for its manifest, and for sending; each can stop."""

    phase = "staging"
    script: Script
    num_tensors: int

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(super().__iter__()):  # type: ignore[misc]
            if index == self.script.plan.at % self.num_tensors and self.phase:
                self.script.reach(self.phase)
            yield item

    def manifest(self, *, checksums: bool = True) -> Manifest:
        phase, self.phase = self.phase, ""
        try:
            return super().manifest(checksums=checksums)  # type: ignore[misc]
        finally:
            self.phase = phase


class Source(Stopping, Named):
    """Base weights."""


class Adapter(Stopping, AdapterSource):
    """An adapter of a PEFT model."""


def _source(script: Script) -> Source | Adapter:
    plan = script.plan
    source: Source | Adapter
    if plan.adapter:
        (adapted,) = ADAPTED
        adapted.become(plan.base_seed, plan.seed)
        source = adapted.source(plan.adapter, Adapter)
        source.num_tensors = len(source.names)
    else:
        source = Source(weights_of(base_of(MODEL), plan.seed).items())
        source.num_tensors = len(source.named)
    source.script = script
    return source


class Reporting(WeightsClient):
    """A client whose calls are the stages."""

    def __init__(self, script: Script) -> None:
        super().__init__(script.plan.address)
        self.script = script
        self.source: Source | Adapter | None = None
        self.reply: Any = None
        script.close = self.close

    def begin(self, request, **options):
        self.script.reach("start")
        reply = super().begin(request, **options)
        self.script.reach("begun")
        if self.source is not None:
            self.source.phase = "transfer"
        return reply

    def _update(self, call, update, *args, **options):
        alone = not isinstance(update, str)
        if alone:
            self.script.reach("start")
        if self.source is not None:
            self.source.phase = "transfer"
        if self.script.plan.path in ("disk", "segment", "ipc"):
            self.script.passing("transfer")
        reply = call(update, *args, **options)
        if alone:
            self.reply = reply
            self.script.reach("committed")
        else:
            self.script.reach("sent")
        return reply

    def update_from_disk(self, update, *args, **options):
        return self._update(super().update_from_disk, update, *args, **options)

    def update_from_tensor(self, update, *args, **options):
        return self._update(super().update_from_tensor, update, *args, **options)

    def update_from_ipc(self, update, *args, **options):
        return self._update(super().update_from_ipc, update, *args, **options)

    def update_from_distributed(self, update, *args, **options):
        options["receive_timeout_s"] = self.script.plan.receive_timeout_s
        return self._update(super().update_from_distributed, update, *args, **options)

    def prepare(self, update_id, **options):
        reply = super().prepare(update_id, **options)
        self.script.reach("prepared")
        return reply

    def commit(self, update_id, **options):
        self.script.passing("commit")
        self.reply = super().commit(update_id, **options)
        self.script.reach("committed")
        return self.reply


def main(talk: socket.socket, **fields: Any) -> int:
    """Play the plan; returns the exit code."""
    script = Script(talk, Plan(**fields))
    _fill(script.plan.full, script.plan.full_bytes)
    with Reporting(script) as client:
        try:
            act = _adopt if script.plan.path == "adopt" else _send
            act(script, client)
        except (RollsyncError, UpdateError) as error:
            if script.finished:  # leaving: what it lent cannot be released over a channel that is closed
                return 0 if error.reason == "CLOSED" else 1
            script.finish("refused", str(error.reason))
        except OSError as error:
            script.finish("refused", errno.errorcode.get(error.errno or 0, str(error)))
    return 0


def _fill(what: str, nbytes: int) -> None:
    """The disk or shared memory is full from now on."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if what == "file":  # EFBIG, in the middle of a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
    elif what == "fsync":
        os.fsync = full  # type: ignore[assignment]
    elif what == "memory":
        os.posix_fallocate = full  # type: ignore[assignment]


def _sender(plan: Plan) -> Sender:
    return {
        "disk": lambda: DiskDirectory(plan.directory, max_shard_bytes=plan.shard_bytes),
        "distributed": lambda: BroadcastGroup(bucket_bytes=16384, group_timeout_s=5.0),
        "tensor": lambda: TensorStream(chunk_bytes=4096),
        "segment": TensorSegment,
        "ipc": IpcArena,
    }[plan.path]()


def _send(script: Script, client: Reporting) -> None:
    plan = script.plan
    source = client.source = _source(script)
    with _sender(plan) as sender:
        if plan.path == "tensor":
            _stop_after_sending(sender, client)
        try:
            if plan.form == "push":
                report = push_weights(
                    source,
                    client,
                    plan.version,
                    via=sender,
                    staging=plan.staging,
                    inflight=plan.inflight,
                    keep_previous=plan.keep_previous,
                    lease_s=plan.lease_s,
                    timeout_s=30.0,
                )
                version = report.version
            else:
                version = _in_steps(script, client, source, sender)
        except PushError as error:
            script.finish("refused", error.reason)
        else:
            script.finish("committed", version=version)


def _stop_after_sending(sender: Sender, client: Reporting) -> None:
    """Chunks go to receivers, past the client that the other stages are calls of."""
    send, script = sender.send, client.script

    def stop_after(*arguments: Any) -> Any:
        reply = send(*arguments)
        script.reach("sent")
        return reply

    def close() -> None:
        client.close()
        sender.close()

    sender.send = stop_after  # type: ignore[method-assign]
    script.close = close


def _in_steps(script: Script, client: Reporting, source: Source | Adapter, sender: Sender) -> int:
    plan = script.plan
    outgoing = Outgoing(source, source.manifest(), deadline=time.monotonic() + 30.0)
    fields = {"manifest": outgoing.manifest} | sender.stage(outgoing, [client])
    update = BeginUpdate(
        path=sender.path,
        version=plan.version,
        staging=Staging(plan.staging),
        inflight=Inflight(plan.inflight),
        keep_previous=plan.keep_previous,
        lease_s=plan.lease_s,
        adapter=source.spec(client.layout()) if isinstance(source, Adapter) else None,
        **fields,
    )
    if plan.form == "one call":
        return _in_one_call(client, update, sender, outgoing).brought_version
    begun = client.begin(update)
    beside = threading.Thread(target=_broadcast, args=(sender, begun, outgoing), daemon=True)
    beside.start()
    try:
        sender.send(client, begun, outgoing)
    except RollsyncError:
        sender.cancel()
        raise
    beside.join()
    client.prepare(begun.update_id)
    return client.commit(begun.update_id).brought_version


def _broadcast(sender: Sender, begun: Any, outgoing: Outgoing) -> None:
    try:
        sender.beside(begun, outgoing)
    except UpdateError as error:  # the engine's call fails too, and says more
        print(f"broadcast: {error}", flush=True)


def _in_one_call(client: Reporting, update: BeginUpdate, sender: Sender, outgoing: Outgoing) -> Any:
    if isinstance(sender, DiskDirectory):
        return client.update_from_disk(update, update.directory, timeout_s=30.0)
    if isinstance(sender, TensorStream):
        return client.update_from_tensor(update, sender._chunks(outgoing), timeout_s=30.0)
    segment = sender._segment.descriptor  # type: ignore[attr-defined]
    if isinstance(sender, TensorSegment):
        return client.update_from_tensor(update, segment=segment, timeout_s=30.0)
    return client.update_from_ipc(update, [segment], timeout_s=30.0)


def _adopt(script: Script, client: Reporting) -> None:
    plan = script.plan
    weights = weights_of(base_of(MODEL), plan.seed)
    first = dict(weights_of(base_of(MODEL), plan.seed + 1))
    script.reach("staging")
    arena = AdoptedArena(client, MODEL)
    if plan.second:
        script.live = False
        with arena.update(inflight=plan.inflight, lease_s=plan.lease_s, timeout_s=30.0):
            write_into(MODEL, first)
        script.say(moved=arena.report.version)
        script.live = True
    with arena.update(plan.version, inflight=plan.inflight, lease_s=plan.lease_s, timeout_s=30.0):
        for index, (name, parameter) in enumerate(arena._module.named_parameters()):
            if index == plan.at % 8:
                script.reach("transfer")
            with torch.no_grad():
                parameter.copy_(weights[name])
    script.finish("committed", version=arena.report.version)
    arena.close()
