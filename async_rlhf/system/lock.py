"""One writer at a time: a lock file that says which process on which host writes a folder.

File-system locks (flock, fcntl) are unreliable over NFS, so the file itself is the lock: it appears whole, by a hard
link, and is taken over by a rename. On the same host the holder is looked up by process id and start time, so a dead
process's lock is taken over at once. A process on another host cannot be looked up: it refreshes the file's time, and
counts as dead when it has not done so for long, by the file system's clock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from async_rlhf.config.base import ConfigError

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
"""Between two signs of life of a holder."""
STALE_SECONDS = 120.0
"""Seconds without a sign of life after which a process that cannot be looked up counts as dead."""
_LOOK_SECONDS = 1.0
_EXITING = 4
"""The flag PF_EXITING in the kernel's flags of a process."""


class InUseError(ConfigError):
    """Another process writes there. The message names it and its host."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    host: str
    pid: int
    started: str
    """Start time, in the kernel's ticks since boot; empty if unknown."""
    place: str
    """The kernel's boot and the process-id namespace; empty if unknown."""
    token: str
    """Identifies this one lock."""

    @classmethod
    def here(cls) -> Holder:
        """This process, with a new token."""
        return cls(socket.gethostname(), os.getpid(), _started(os.getpid()) or "", _place(), uuid.uuid4().hex)

    def is_alive(self) -> bool | None:
        """Whether the process still runs; None if this cannot be told from here.

        This process itself counts as dead: it knows its own locks, so the lock belongs to an earlier program that had
        the same process id.
        """
        if not (self.place == _place() if self.place else self.host == socket.gethostname()):
            return None
        if self.pid == os.getpid():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it belongs to another user
        started = _started(self.pid)
        return None if started is None else started == self.started  # else another process now has the id


def _started(pid: int) -> str | None:
    """When a process was started; None if unknown. Empty for one that exists but no longer runs: it is a zombie, or its
    memory is still being freed, which takes seconds if there is much.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    killed = int(fields[28]) >> (signal.SIGKILL - 1) & 1  # among the pending signals
    return "" if fields[0] in "ZX" or int(fields[6]) & _EXITING or killed else fields[19]


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class _Seen:
    """A lock file at one moment. The holder is None if the text is incomplete."""

    holder: Holder | None
    changed: float


def _look(path: Path) -> _Seen | None:
    """Who holds a lock. Opening the file makes NFS ask the server."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            changed, text = os.fstat(file.fileno()).st_mtime, file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _Seen(Holder(**json.loads(text)), changed)
    except (ValueError, TypeError):
        return _Seen(None, changed)


class _Lock:
    """A lock that this process holds, possibly several times.

    Args:
        path: the file.
        key: the configuration key that errors name.
        folder: what is written, for messages.
    """

    def __init__(self, path: Path, key: str, folder: Path) -> None:
        self.path, self.key, self.folder = path, key, folder
        self.users = 0
        self.busy = False
        self._me = Holder.here()
        self._released = threading.Event()
        refuse_in_use(path, key, folder)  # if the lock is in use, nothing in the folder is touched
        self._made = [place for place in path.parents if not place.exists()]
        """Folders made for it, the innermost first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._take()
        threading.Thread(target=self._heartbeat, name=f"lock {path}", daemon=True).start()

    def _take(self) -> None:
        draft = self.path.with_name(f"{self.path.name}.{self._me.token}")
        first: _Seen | None = None
        try:
            with draft.open("x", encoding="utf-8") as file:
                json.dump(asdict(self._me), file)
                file.flush()
                os.fsync(file.fileno())
            began = time.monotonic()
            while True:
                with _in_turn(self.path.parent):
                    seen = _look(self.path)
                    if seen is None and self._link(draft):
                        break
                    if seen is not None and self._is_stale(seen, first or seen, draft, began):
                        logger.warning("taking over %s: %s", self.path, _described(seen.holder, "has ended"))
                        draft.replace(self.path)
                        break
                if first is None and seen is not None:
                    text = "%s: waiting for %s to see whether it is alive, for at most %g s"
                    logger.warning(text, self.path, _described(seen.holder), STALE_SECONDS)
                first = first or seen
                time.sleep(_LOOK_SECONDS)
            self._tidy()
        finally:
            draft.unlink(missing_ok=True)

    def _is_stale(self, seen: _Seen, first: _Seen, draft: Path, began: float) -> bool:
        """Whether the holder is dead; False if it is too early to tell.

        Raises:
            InUseError: it is alive.
        """
        alive = None if seen.holder is None else seen.holder.is_alive()
        if alive is False:
            return True
        if alive or seen != first:  # it has given a sign of life
            raise _in_use(self.path, self.key, self.folder, seen.holder)
        os.utime(draft)  # by the clock of the file system, as the heartbeats of the other
        age = draft.stat().st_mtime - seen.changed
        return max(age, time.monotonic() - began) > STALE_SECONDS

    def _link(self, draft: Path) -> bool:
        """Make the complete file unless one exists. Returns whether it was made."""
        try:
            os.link(draft, self.path)
        except FileExistsError:
            return draft.stat().st_nlink == 2  # ours: NFS says this if it repeats a request after a lost answer
        except OSError:  # a file system without hard links
            try:
                with self.path.open("x", encoding="utf-8") as file:
                    file.write(draft.read_text(encoding="utf-8"))
            except FileExistsError:
                return False
        return True

    def _tidy(self) -> None:
        """Delete drafts of processes that were killed; if that cannot be told, delete old drafts."""
        now = self.path.stat().st_mtime
        for draft in self.path.parent.glob(f"{self.path.name}.*"):
            with suppress(OSError):
                seen = _look(draft)
                dead = seen is not None and seen.holder is not None and seen.holder.is_alive() is False
                if seen is not None and (now - seen.changed > STALE_SECONDS or (dead and seen.holder != self._me)):
                    draft.unlink()

    def _heartbeat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # whoever writes next will find out
                if (seen := _look(self.path)) is None or seen.holder != self._me:
                    return
                os.utime(self.path)

    def require(self) -> None:
        """Require that this process still has the lock.

        Raises:
            OSError: the folder was deleted or moved, or another process has taken it over while this one was stopped.
        """
        seen = _look(self.path)
        if seen is None:
            raise FileNotFoundError(errno.ENOENT, "gone while it was being written: was it deleted?", str(self.folder))
        if seen.holder != self._me:
            why = f"taken over while this process gave no sign of life, by {_described(seen.holder)}"
            raise OSError(errno.ESTALE, why, str(self.folder))

    def release(self) -> None:
        """Delete the file, if it is this process's."""
        self._released.set()
        if os.getpid() != self._me.pid:  # a fork of the holder
            return
        with suppress(OSError):
            if (seen := _look(self.path)) is not None and seen.holder == self._me:
                self.path.unlink()
                for place in self._made:  # only those that are still empty
                    place.rmdir()


_held: dict[Path, _Lock] = {}
_changing = threading.RLock()


def _forget() -> None:
    """Forget all locks: a fork holds none."""
    global _changing
    _held.clear()
    _changing = threading.RLock()


os.register_at_fork(after_in_child=_forget)


class Hold:
    """A lock, held until it is released, nobody refers to it any more, or the process ends."""

    def __init__(self, lock: _Lock) -> None:
        self._lock = lock
        lock.users += 1
        self.release = weakref.finalize(self, _drop, lock)
        """Release it. The file is deleted when all holds of this process are released."""

    def require(self) -> None:
        """See :meth:`_Lock.require`."""
        self._lock.require()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, no other hold of this process may enter.

        Raises:
            InUseError: one has entered.
        """
        lock = self._lock
        with _changing:
            if lock.busy:
                raise _in_use(lock.path, lock.key, lock.folder, lock._me)
            lock.busy = True
        try:
            yield
        finally:
            lock.busy = False

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def hold(path: Path, key: str, folder: Path) -> Hold:
    """Lock a folder, which is made if necessary. This process may lock it several times.

    Args:
        path: the lock file.
        key: the configuration key that errors name.
        folder: what is locked, for messages.

    Raises:
        InUseError: another process holds it. For a process on another host, this takes seconds to find out; if it shows
            no sign of life, ``STALE_SECONDS``.
        OSError: the folder cannot be written to.
    """
    path = path.parent.resolve() / path.name
    with _changing:
        lock = _held.get(path)
        if lock is None:
            lock = _held[path] = _Lock(path, key, folder)
        return Hold(lock)


def _drop(lock: _Lock) -> None:
    with _changing:
        lock.users -= 1
        if lock.users == 0:
            if _held.get(lock.path) is lock:
                del _held[lock.path]
            lock.release()


def refuse_in_use(path: Path, key: str, folder: Path) -> None:
    """Require that no other living process of this host holds a lock. Writes nothing.

    Raises:
        InUseError: one does.
    """
    for pause in (0.1, 0.0):  # for a moment, a killed process still looks alive
        seen = _look(path)
        holder = None if seen is None else seen.holder
        if holder is None or not holder.is_alive():
            return
        time.sleep(pause)
    raise _in_use(path, key, folder, holder)


def _in_use(path: Path, key: str, folder: Path, holder: Holder | None) -> InUseError:
    who = _described(holder, "is writing there")
    right = f"must be another folder, or that process must end first (its lock: {path})"
    return InUseError(f"{key}: got {str(folder)!r}; {who}; {right}")


def _described(holder: Holder | None, does: str = "") -> str:
    who = "a process" if holder is None else f"process {holder.pid} on host {holder.host!r}"
    return f"{who} {does}".rstrip()


@contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """Let processes that take over the same lock enter one after another, if the file system can do this. If it cannot,
    the last one gets the lock, and the others notice before they write.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a fork that has a copy of the descriptor
        os.close(descriptor)
