"""A parent that has imported everything, and forks what tests want to kill.

    python -m tests.faults.nursery SOCKET STUB [MODEL_DIR]

Importing torch and transformers takes seconds, forking a process that has them takes milliseconds. The
parent stays fit to be forked: it has one thread, and no channel was ever opened in it. Every request comes
over a connection of its own (unix, SOCK_SEQPACKET) with the descriptors that the child gets; the answers on
it are the child's pid and, when it has ended, its exit code (a signal's number, negated). If the other end
of the connection goes away first, the child is killed, and when stdin ends, all of them are.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import mmap
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
STUB = Path(__file__).with_name("stub.py")
START_SECONDS = 120.0


class Forked:
    """HARNESS. A forked process: its pid, its end, and lines of JSON to and from it."""

    def __init__(self, link: socket.socket, pid: int, talk: socket.socket) -> None:
        self._link, self.pid, self._talk = link, pid, talk
        self._received = b""
        self.code: int | None = None

    def say(self, word: str) -> None:
        with contextlib.suppress(OSError):  # it may be dead; whoever waits for its end sees that
            self._talk.sendall(json.dumps(word).encode() + b"\n")

    def hear(self, seconds: float) -> Any:
        """Its next message; None once it has no more to say, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            self._talk.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._talk.recv(1 << 16)
            except (TimeoutError, ConnectionResetError):
                return None
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None if it still runs after `seconds`."""
        if self.code is None:
            self._link.settimeout(max(0.001, seconds))
            with contextlib.suppress(TimeoutError):
                self.code = int(self._link.recv(64) or b"-9")
        return self.code

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.wait(10) is not None, f"process {self.pid} survived SIGKILL"

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.code is None:
            self.kill()
        self._link.close()
        self._talk.close()


class Nursery:
    """HARNESS. The parent, as seen by who asks it to fork."""

    def __init__(self, process: subprocess.Popen, path: str, stub: Path, log: Path) -> None:
        self._process, self._path, self.stub, self.log = process, path, stub, log

    def fork(self, role: str, **arguments: Any) -> Forked:
        """Fork a process that plays `role` (a key of ROLES); its output goes to the nursery's log."""
        ours, theirs = socket.socketpair()
        link = self._connect()
        with theirs:
            request = json.dumps({"role": role, "arguments": arguments}).encode()
            socket.send_fds(link, [request], [theirs.fileno()])
        return Forked(link, int(link.recv(64)), ours)

    def ask(self, **request: Any) -> Any:
        with contextlib.closing(self._connect()) as link:
            link.sendall(json.dumps(request).encode())
            return json.loads(link.recv(1 << 16))

    def children(self) -> dict[str, list[int]]:
        """Pids of the living, by role."""
        return self.ask(do="children")

    def pause(self, paused: bool) -> None:
        """Have it do nothing, or go on: what happens meanwhile it sees at once."""
        self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def arm(self, fault: str, at: int, milliseconds: int) -> None:
        """Let the engine's `at`-th read of a disk update fail ("error"), or be slow ("slow"); "" heals."""
        self.ask(do="arm", fault=fault, at=at, milliseconds=milliseconds)

    def num_reads(self) -> int:
        """How many reads of disk updates there were since a fault was armed."""
        return int(self.ask(do="count"))

    def _connect(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.connect(self._path)
        return link


@contextlib.contextmanager
def nursery(work_dir: Path, model_dir: Path | None = None) -> Iterator[Nursery]:
    """Start one; its children end with it. Trainers need `model_dir`."""
    path, stub, log = str(work_dir / "nursery"), work_dir / "python", work_dir / "log"
    stub.write_text(STUB.read_text().replace("@PYTHON@", sys.executable).replace("@SOCKET@", path))
    stub.chmod(0o700)
    model = [] if model_dir is None else [str(model_dir)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery", path, str(stub), *model],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not os.path.exists(path):
            assert process.poll() is None, f"the nursery did not start:\n{log.read_text()}"
            assert time.monotonic() < deadline, "the nursery is not ready"
            time.sleep(0.02)
        yield Nursery(process, path, stub, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:  # it still imports
            process.kill()
            process.wait()


# ---------------------------------------------------------------- the process


class _Parent:
    """Accepts requests and forks; one thread."""

    def __init__(self, path: str, stub: str, roles: dict[str, Callable[..., int]]) -> None:
        self._stub = stub
        self._roles = roles
        self._control = mmap.mmap(-1, 4096)  # shared with all children: which read fails
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path + ".new")
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, self._end)
        self._children: dict[int, tuple[str, socket.socket, int]] = {}
        self._running = True
        os.rename(path + ".new", path)

    def run(self) -> None:
        while self._running:
            for key, _ in self._selector.select():
                key.data()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _end(self) -> None:
        self._running = bool(os.read(0, 1))

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        data, fds, _, _ = socket.recv_fds(link, 1 << 16, 8)
        if data[:1] != b"{":  # a stub
            words = data.decode().split("\0")[1:]
            module = words[words.index("-m") + 1]
            role = module.rpartition(".")[2]
            self._fork(link, role if role in self._roles else "module", {"words": words}, fds)
            return
        request = json.loads(data)
        if "role" in request:
            self._fork(link, request["role"], request["arguments"], fds)
            return
        if request["do"] == "count":
            link.sendall(str(memoryview(self._control).cast("q")[2]).encode())
            link.close()
            return
        if request["do"] == "arm":
            words = ["", "error", "slow"]
            fields = [words.index(request["fault"]), request["at"], 0, request["milliseconds"]]
            memoryview(self._control).cast("q")[:4] = memoryview(bytearray(32)).cast("q")
            for index in (1, 2, 3, 0):
                memoryview(self._control).cast("q")[index] = fields[index]
        living: dict[str, list[int]] = {}
        for pid, (role, _, _) in self._children.items():
            living.setdefault(role, []).append(pid)
        link.sendall(json.dumps(living).encode())
        link.close()

    def _fork(self, link: socket.socket, role: str, arguments: dict[str, Any], fds: list[int]) -> None:
        assert len(os.listdir("/proc/self/task")) == 1, "a parent with threads must not fork"
        pid = os.fork()
        if pid == 0:
            self._be(link, role, arguments, fds)
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._children[pid] = role, link, pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(pid))
        self._selector.register(link, selectors.EVENT_READ, lambda: self._orphan(pid))
        with contextlib.suppress(OSError):
            link.sendall(str(pid).encode())

    def _reap(self, pid: int) -> None:
        _, link, pidfd = self._children.pop(pid)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link)
        with contextlib.suppress(OSError):
            link.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        link.close()

    def _orphan(self, pid: int) -> None:
        if pid not in self._children:
            return  # reaped a moment ago: one select told of both ends
        _, link, _ = self._children[pid]
        self._selector.unregister(link)
        os.kill(pid, signal.SIGKILL)

    def _be(self, link: socket.socket, role: str, arguments: dict[str, Any], fds: list[int]) -> None:
        """CHILD. Play the role, and never return."""
        code = 70
        try:
            link.close()
            self._listener.close()
            for _, other, pidfd in self._children.values():
                other.close()
                os.close(pidfd)
            self._selector.close()
            os.setsid()
            die_with_parent()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            faulthandler.register(signal.SIGUSR1, all_threads=True)  # a hung process tells where
            code = self._roles[role](fds, control=self._control, stub=self._stub, **arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001 - the log is all that is left to tell
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def die_with_parent() -> None:
    """CHILD. Whoever kills the nursery, a time limit for example, must not leave engines running."""
    parent = os.getppid()
    assert LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == 0, "prctl failed"
    if parent == 1 or os.getppid() != parent:
        os._exit(70)


def main(path: str, stub: str, model_dir: str = "") -> None:
    """Import, and fork on request until stdin ends."""
    from tests.faults import roles
    from weight_updater import host_scan

    host_scan.warm_up()  # half a second of every engine's start

    roles.load(Path(model_dir) if model_dir else None)
    parent = _Parent(path, stub, roles.ROLES)
    gc.collect()
    gc.freeze()
    parent.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
