"""A process that receives by gloo for an engine: a sender that misbehaves kills this, not the engine.

It speaks JSON lines: commands on stdin, answers on stdout. Buckets go into a shared-memory segment of two
halves, so that the engine copies one while the next arrives.

    -> {"do": "join", ...}                       <- {"is": "joined"}
    -> {"do": "receive", cut, segment ...}       <- {"is": "opened"} {"is": "agreed"}
                                                 <- {"is": "bucket", "bucket": k}   for each, in order
    -> {"do": "free"}       one half is free again, for each bucket
                                                 <- {"is": "received"}
    -> {"do": "probe"}                           <- {"is": "alive", "alive": true}
    -> {"do": "give_up", "text": ...}            tells the other ranks, then ends
    any error                                    <- {"is": "error", "reason": ..., "text": ..., "usable": ...}

The end of stdin ends the process, whatever it waits for. So does the death of rank 0, unless a command is
being carried out, which then fails: a trainer that was killed cannot say that its group is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from typing import Any

import torch

from weight_updater.buckets import Cut
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.gloo import GlooGroup
from weight_updater.meeting import Member
from weight_updater.requests import ShmSegment
from weight_updater.shm import SharedSegment

Message = dict[str, Any]

LOOK_S = 1.0
"""How often an idle child looks whether rank 0 is still there."""


class Child:
    """Carries out commands, one after another, on one thread; `give_up` may come in between."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.free_halves = threading.Semaphore(2)
        self.group: GlooGroup | None = None
        self._segment: SharedSegment | None = None
        self._halves: list[torch.Tensor] = []

    def run(self) -> None:
        """Until the process ends."""
        answer({"is": "ready"})
        while True:
            try:
                command = self.commands.get(timeout=LOOK_S)
            except queue.Empty:
                if self.group is not None and self.group.rank_0_gone():
                    os._exit(0)  # the engine sees that, and forgets the group
                continue
            try:
                self._do(command)
            except UpdateRefused as error:
                usable = command["do"] == "receive" and error.reason is Reason.MANIFEST_MISMATCH
                answer({"is": "error", "reason": error.reason, "text": error.message, "usable": usable})

    def give_up(self, text: str) -> None:
        """READER. Tell the other ranks why, then end: that closes all connections."""
        if self.group is not None:
            self.group.tell_failure(text)
        os._exit(0)

    def _do(self, command: Message) -> None:
        if command["do"] == "join":
            self.group = GlooGroup(Member(**command["member"]))
            answer({"is": "joined"})
        elif command["do"] == "probe":
            answer({"is": "alive", "alive": self.group is not None and self.group.rank_0_lives()})
        elif command["do"] == "receive":
            self._receive(command)

    def _receive(self, command: Message) -> None:
        assert self.group is not None, "the engine joins first"
        cut = Cut(**command["cut"])
        timeout_s: float = command["timeout_s"]
        if command["segment"] is not None:
            self._open(ShmSegment(*command["segment"]))
        answer({"is": "opened"})
        self.group.agree(cut, timeout_s)
        answer({"is": "agreed"})
        for bucket in range(len(cut)):
            # The engine limits this wait: if it does not free a half, it ends this process.
            self.free_halves.acquire()
            half = self._halves[bucket % 2][: cut.size(bucket)]
            self.group.wait(self.group.broadcast(half, timeout_s), bucket, timeout_s)
            answer({"is": "bucket", "bucket": bucket})
        for _ in range(2):  # both halves free: the engine has put everything away
            self.free_halves.acquire()
        self.free_halves.release(2)
        self.group.finish(timeout_s)
        answer({"is": "received"})

    def _open(self, descriptor: ShmSegment) -> None:
        self._halves = []
        if self._segment is not None:
            self._segment.close()
        self._segment = SharedSegment.open(descriptor)
        both = torch.frombuffer(self._segment.buf, dtype=torch.uint8)
        self._halves = list(both.view(2, -1))


def answer(message: Message) -> None:
    """Write one line to the engine."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read commands until stdin ends."""
    torch.set_num_threads(1)
    child = Child()
    threading.Thread(target=run_or_end, args=(child,), daemon=True).start()
    for line in sys.stdin:
        command: Message = json.loads(line)
        if command["do"] == "free":
            child.free_halves.release()
        elif command["do"] == "give_up":
            child.give_up(command["text"])
        else:
            child.commands.put(command)
    os._exit(0)  # not a return: the worker may hang in gloo


def run_or_end(child: Child) -> None:
    """A bug in the worker must end the process, so that the engine hears of it."""
    try:
        child.run()
    finally:
        with contextlib.suppress(Exception):
            sys.excepthook(*sys.exc_info())
        os._exit(1)


if __name__ == "__main__":
    main()
