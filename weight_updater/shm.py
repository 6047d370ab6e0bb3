"""POSIX shared memory between processes of one user, without torch and without a resource tracker.

A segment is a file "rollsync-<random>" in /dev/shm with mode 0600. Whoever opens one by name gets no
further than such a file: the name must match, it must be a regular file of the same user, and exactly as
large as was said. The creator unlinks it; mappings of it live on until they are closed.

A creator that is killed cannot unlink. So the names that `create` makes end in ".held": their creator (and
what it forks) holds a lock on the file until it closes it or dies, and the next `create` of this user
removes those that nobody holds. A file gets that name only once it is locked, so none is ever taken for
dead between its creation and its lock; files without the ending are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import time
from dataclasses import dataclass
from types import TracebackType

from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import ShmSegment

_DIRECTORY = "/dev/shm"
_NAME = re.compile(r"rollsync-[0-9a-f]{32}(\.held)?\Z")
_HELD = re.compile(r"rollsync-[0-9a-f]{32}\.held\Z")
_UNFINISHED = re.compile(r"rollsync-[0-9a-f]{32}\.new\Z")
_UNFINISHED_S = 60.0
"""Nobody needs longer from creating a file to locking it; it has the name of an unfinished one meanwhile."""
_FLOCK = "@hhqqi0q"  # struct flock of 64-bit Linux: type, whence, start, length, pid; padded to 8 bytes

# Segments of this process. Looking whether one is held opens and closes it, which would drop its record lock.
_ours: set[str] = set()


class SharedSegment:
    """A mapped segment. Use `create` or `open`; close it (or use `with`) in the same place.

    buf: the mapped bytes, writable. Views of it (numpy, torch) must be dropped before `close`; if one is
        still alive, the mapping goes when that view does, and nothing is raised.
    descriptor: name, size and allocation id, for the other side.
    """

    def __init__(self, descriptor: ShmSegment, fd: int, mapping: mmap.mmap, *, creator: bool) -> None:
        self.descriptor = descriptor
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._buf: memoryview | None = memoryview(mapping)
        self._creator = creator
        self._creator_pid = os.getpid()

    @classmethod
    def create(cls, size: int, *, owner_lock: bool = False) -> SharedSegment:
        """Make a new zeroed segment of `size` bytes, whose memory is reserved at once; first remove those
        that killed processes of this user left behind.

        owner_lock: hold a record lock on it for the creator's lifetime, so that openers can tell when the
            creator died (`owner_alive`). The creating process must not open the same segment by name
            and close it again: POSIX drops a process's locks with any of its descriptors.

        Raises:
            UpdateRefused (NO_MEMORY): shared memory is full.
            ValueError: a size below 1.
        """
        if size < 1:
            raise ValueError(f"a shared-memory segment needs at least 1 byte, not {size}")
        sweep()
        name = f"rollsync-{secrets.token_hex(16)}"
        path = f"{_DIRECTORY}/{name}.new"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # flock, not a record lock: it survives that this process opens and closes the segment by name.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # posix_fallocate, not ftruncate: a full /dev/shm is an error here, not a SIGBUS at a later write.
            os.posix_fallocate(fd, 0, size)
            if owner_lock:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mapping = mmap.mmap(fd, size)
            name = f"{name}.held"
            _ours.add(name)
            os.rename(path, f"{_DIRECTORY}/{name}")
        except OSError as error:
            _ours.discard(name)
            os.close(fd)
            os.unlink(path)
            raise UpdateRefused(
                Reason.NO_MEMORY,
                f"no shared-memory segment of {size} bytes in {_DIRECTORY}: {error.strerror}",
            ) from error
        descriptor = ShmSegment(name, size, secrets.token_hex(16))
        return cls(descriptor, fd, mapping, creator=True)

    @classmethod
    def open(cls, segment: ShmSegment) -> SharedSegment:
        """Map a segment that another process of this user made.

        Raises:
            UpdateRefused (MEMORY_UNAVAILABLE): a name that cannot be ours, no such segment, another
                owner, or a size other than said.
        """
        if not _NAME.match(segment.name):
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"{segment.name!r} is not the name of a rollsync segment (rollsync- and 32 hex digits, and "
                f".held if its creator holds a lock on it)",
            )
        try:
            fd = os.open(f"{_DIRECTORY}/{segment.name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"shared-memory segment {segment.name} cannot be opened ({error.strerror}); "
                "does the trainer run on this host, as this user, and still hold it?",
            ) from error
        try:
            _check_file(fd, segment)
            mapping = mmap.mmap(fd, segment.size)
        except (UpdateRefused, OSError, ValueError) as error:
            os.close(fd)
            if isinstance(error, UpdateRefused):
                raise
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE, f"shared-memory segment {segment.name} cannot be mapped: {error}"
            ) from error
        return cls(segment, fd, mapping, creator=False)

    @property
    def buf(self) -> memoryview:
        """The mapped bytes; ValueError once closed."""
        if self._buf is None:
            raise ValueError(f"shared-memory segment {self.descriptor.name} is closed")
        return self._buf

    def owner_alive(self) -> bool:
        """For an opener in another process: whether the creator still holds its lock (False if it never
        took one). Only asks, takes nothing, so that several openers cannot mislead each other.
        """
        question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(self._fd, fcntl.F_GETLK, question)
        lock_type: int = struct.unpack(_FLOCK, answer)[0]
        return lock_type != fcntl.F_UNLCK

    def is_linked(self) -> bool:
        """Whether the segment still has its name: nobody has removed it."""
        return os.fstat(self._fd).st_nlink > 0

    def check_size(self) -> None:
        """For a mapping that was kept: refuse a segment that has shrunk, which nobody may read beyond its end
        (the system kills who does).

        Raises:
            UpdateRefused (MEMORY_UNAVAILABLE): it is smaller than it was.
        """
        size = os.fstat(self._fd).st_size
        if size < self.descriptor.size:
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"shared-memory segment {self.descriptor.name} has shrunk from {self.descriptor.size} bytes "
                f"to {size} since it was mapped; make a new one",
            )

    def close(self) -> None:
        """Give back the mapping and the descriptor; harmless twice. Does not unlink."""
        if self._mapping is None:
            return
        os.close(self._fd)
        # Views that are still alive keep the mapping; it goes when they do.
        with contextlib.suppress(BufferError):
            if self._buf is not None:
                self._buf.release()
            self._mapping.close()
        self._buf = None
        self._mapping = None

    def unlink(self) -> None:
        """Remove the name; harmless twice, or if someone else removed it. For the creator only."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{_DIRECTORY}/{self.descriptor.name}")
        _ours.discard(self.descriptor.name)

    def __enter__(self) -> SharedSegment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        # A fork of the creator must not take the name away from it.
        if self._creator and os.getpid() == self._creator_pid:
            self.unlink()


def sweep() -> int:
    """Remove this user's segments whose creators died, or closed them for good; returns how many.

    `create` does it each time. A segment that a living process holds is never removed; mappings of a
    removed one live on.
    """
    num_removed = 0
    for name in os.listdir(_DIRECTORY):
        unfinished = _UNFINISHED.match(name) is not None
        if name in _ours or not (unfinished or _HELD.match(name)):
            continue
        path = f"{_DIRECTORY}/{name}"
        # Another process may sweep too, or unlink what is its own.
        with contextlib.suppress(FileNotFoundError):
            num_removed += _remove_if_dead(path, min_age_s=_UNFINISHED_S if unfinished else 0.0)
    return num_removed


@dataclass(frozen=True, slots=True)
class Survey:
    """Segments that are there. left: of this user, and nobody holds them; sizes in bytes."""

    num_held: int = 0
    held_bytes: int = 0
    num_left: int = 0
    left_bytes: int = 0
    num_of_others: int = 0


def survey() -> Survey:
    """Look at what `sweep` would look at, and remove nothing. Unfinished segments are not looked at: to ask
    whether one is held could be taken for holding it.
    """
    counts = dict.fromkeys(Survey.__slots__, 0)
    for name in os.listdir(_DIRECTORY):
        if not _HELD.match(name):
            continue
        path = f"{_DIRECTORY}/{name}"
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(path, follow_symlinks=False)
            if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
                counts["num_of_others"] += 1
                continue
            kind = "held" if name in _ours or _is_held(path) else "left"
            counts[f"num_{kind}"] += 1
            counts[f"{kind}_bytes"] += found.st_size
    return Survey(**counts)


def _is_held(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _remove_if_dead(path: str, *, min_age_s: float) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR):
            return False  # another user's, or no file of ours
        raise
    try:
        found = os.fstat(fd)
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if not ours or time.time() - found.st_mtime < min_age_s:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.unlink(path)
        return True
    finally:
        os.close(fd)


def _check_file(fd: int, segment: ShmSegment) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE, f"shared-memory segment {segment.name} does not belong to this user"
        )
    if found.st_size != segment.size:
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"shared-memory segment {segment.name} is {found.st_size} bytes, not the {segment.size} named",
        )
