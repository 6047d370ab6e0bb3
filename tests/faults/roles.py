"""What the nursery's children do. Imported before the forks: everything that takes long stands at the top."""

from __future__ import annotations

import errno
import mmap
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from rollout_engine import engine_main
from rollout_engine.config import ServeConfig
from rollout_engine.server import app, receiver, receivers
from rollout_engine.server.engine_process import ENGINE_COMMAND
from tests.faults import bank, client, crowd, trainer
from tests.faults.adapted import Adapted
from tests.faults.weights import load_model
from weight_updater import gloo_child, gloo_parent


def load(model_dir: Path | None) -> None:
    """PARENT. What takes long, done by one thread; the trainer's model, if there are to be trainers."""
    torch.set_num_threads(1)
    if model_dir is not None:
        trainer.MODEL = load_model(model_dir)
        trainer.ADAPTED.append(Adapted(model_dir))
    # What engines and fronts import when they need it.
    assert transformers.AutoTokenizer is not None
    assert transformers.AutoConfig is not None
    assert len(os.listdir("/proc/self/task")) == 1, "the imports started a thread"


def front(fds: list[int], *, control: mmap.mmap, stub: str, config: dict, ready_file: str) -> int:
    """`rollsync serve`, whose engine and receivers come from the nursery."""
    os.close(fds[0])
    receivers.RECEIVER_COMMAND = (stub, *receivers.RECEIVER_COMMAND[1:])
    command = (stub, *ENGINE_COMMAND[1:])
    return app.serve(ServeConfig(**config), Path(ready_file), engine_command=command)


def engine(fds: list[int], *, control: mmap.mmap, stub: str, words: list[str]) -> int:
    """The engine process of a front; its group children come from the nursery as well."""
    gloo_parent.CHILD_COMMAND = (stub, *gloo_parent.CHILD_COMMAND[1:])
    os.preadv = _faulty_reads(control, os.preadv)  # type: ignore[assignment]
    bank.tell_on_signal(Path(stub).parent)
    return engine_main.main(_take_over(fds, words))


def receive(fds: list[int], *, control: mmap.mmap, stub: str, words: list[str]) -> int:
    """A receiver of chunk streams."""
    return receiver.main(_take_over(fds, words))


def group_child(fds: list[int], *, control: mmap.mmap, stub: str, words: list[str]) -> int:
    """The group child of an engine."""
    _take_over(fds, words)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    gloo_child.main()
    return 0


def module(fds: list[int], *, control: mmap.mmap, stub: str, words: list[str]) -> int:
    """Any module, as `python -m` runs it."""
    arguments, name = _take_over(fds, words), words[words.index("-m") + 1]
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def _take_over(fds: list[int], words: list[str]) -> list[str]:
    """Make the stub's standard streams ours; gives its arguments, with the descriptors' numbers here."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
        os.close(fd)
    arguments, own = words[words.index("-m") + 2 :], iter(fds[3:])
    for at, flag in enumerate(arguments):
        if flag.endswith("fd"):
            arguments[at + 1] = str(next(own))
    return arguments


def _faulty_reads(control: mmap.mmap, read: Callable[..., int]) -> Callable[..., int]:
    """os.preadv, of which the armed call fails or is slow; see Nursery.arm."""
    words = memoryview(control).cast("q")

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if words[0]:
            words[2] += 1
            if words[2] == words[1]:
                if words[0] == 1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                time.sleep(words[3] / 1000)
        return read(fd, buffers, offset, flags)

    return preadv


def _talking(play: Callable[..., int]) -> Callable[..., int]:
    def run(fds: list[int], *, control: mmap.mmap, stub: str, **arguments: object) -> int:
        return play(socket.socket(fileno=fds[0]), **arguments)

    return run


ROLES: dict[str, Callable[..., int]] = {
    "front": front,
    "engine_main": engine,
    "gloo_child": group_child,
    "receiver": receive,
    "module": module,
    "trainer": _talking(trainer.main),
    "client": _talking(client.main),
    "crowd": _talking(crowd.main),
}
