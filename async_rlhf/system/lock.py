"""One writer at a time: a file that its writer keeps locked (flock), and that says who it is.

The kernel lets go of the lock when its holder ends, however that happens. Linux carries it over NFS, between hosts.
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
from pathlib import Path

from async_rlhf.config.base import ConfigError
from async_rlhf.system.files import from_json

logger = logging.getLogger(__name__)

_ENDING_SECONDS = 60.0
"""How long a process that is ending is waited for."""
_TRIES = 100
"""Folders are deleted only when they are empty: nobody meets that so often."""
_EXITING = 4
"""The flag PF_EXITING in the kernel's flags of a process."""


class InUseError(ConfigError):
    """Another process writes there. The message names it and its host."""


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
        self._made: list[Path] = []
        """Folders made for it, the innermost first."""
        me = {"host": socket.gethostname(), "pid": os.getpid(), "token": uuid.uuid4().hex}
        self._text, self._pid = json.dumps(me), os.getpid()
        self.descriptor = self._take()

    def _take(self) -> int:
        """The descriptor of the file, locked, which says who has it.

        Raises:
            InUseError: another process has locked it.
        """
        began = time.monotonic()
        while True:
            descriptor = self._open()
            try:
                # Its last holder may have deleted it meanwhile.
                if _locked(descriptor, fcntl.LOCK_EX) and _is_file(descriptor, self.path):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, self._text.encode())
                    return os.dup(descriptor)
                _require_patience(self.path, self.key, self.folder, began)
            finally:
                os.close(descriptor)

    def _open(self) -> int:
        """Open the file, in folders that its last holder may be deleting."""
        tries = _TRIES
        while True:
            try:
                self._made = [folder for folder in self.path.parents if folder in self._made or not folder.exists()]
                self.path.parent.mkdir(parents=True, exist_ok=True)
                return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except (FileNotFoundError, FileExistsError):  # the second, if it was there and is not when it is looked at
                tries -= 1
                if tries == 0:
                    raise

    def require(self) -> None:
        """Require that this process still has the lock.

        Raises:
            OSError: the folder was deleted or moved; or another process has the lock, as may be where the file system
                was away for long.
        """
        if not self.path.exists():
            raise FileNotFoundError(errno.ENOENT, "gone while it was being written: was it deleted?", str(self.folder))
        if self.path.read_text(encoding="utf-8", errors="replace") != self._text:
            why = f"taken over while this process did not reach it, by {_described(self.path)}"
            raise OSError(errno.ESTALE, why, str(self.folder))

    def release(self) -> None:
        """Delete the file, if it is this process's."""
        if os.getpid() != self._pid:  # a fork of the holder
            return
        with suppress(OSError):
            self.require()
            self.path.unlink()
            for folder in self._made:  # only those that are still empty
                folder.rmdir()
        os.close(self.descriptor)


_held: dict[Path, _Lock] = {}
_changing = threading.RLock()


def _forget() -> None:
    """Forget all locks: a fork holds none."""
    global _changing
    for lock in _held.values():
        os.close(lock.descriptor)
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
                raise _in_use(lock.path, lock.key, lock.folder)
            lock.busy = True
        try:
            yield
        finally:
            lock.busy = False

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def require_hold(held: Hold | None) -> None:
    """Require that what is locked is still there and locked by this process; nothing of None, on ranks without a lock.

    Raises:
        OSError: it is not.
    """
    if held is not None:
        held.require()


def hold(path: Path, key: str, folder: Path) -> Hold:
    """Lock a folder, which is made if necessary. This process may lock it several times.

    Args:
        path: the lock file.
        key: the configuration key that errors name.
        folder: what is locked, for messages.

    Raises:
        InUseError: another process holds it.
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
    """Require that no other process holds a lock. Writes nothing.

    Raises:
        InUseError: one does.
    """
    if path.parent.resolve() / path.name in _held:
        return
    began = time.monotonic()
    while path.exists():
        with suppress(FileNotFoundError), path.open("rb") as file:
            if _locked(file.fileno(), fcntl.LOCK_SH):
                return
        _require_patience(path, key, folder, began)


def _locked(descriptor: int, how: int) -> bool:
    """Lock an open file, unless somebody else has."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        logger.warning("WARNING: %s: this file system has no locks (%s): nothing else may write there", name, error)
    return True


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _require_patience(path: Path, key: str, folder: Path, began: float) -> None:
    """Wait for a moment, in which somebody may only look, or longer, while the holder ends.

    Raises:
        InUseError: that has been long enough.
    """
    seconds = time.monotonic() - began
    if seconds > _ENDING_SECONDS or (seconds > 0.3 and not _is_ending(path)):
        raise _in_use(path, key, folder)
    time.sleep(0.05)


def _is_ending(path: Path) -> bool:
    """Whether the holder was killed and still frees its memory, which takes seconds if there is much."""
    holder = _holder(path)
    try:
        stat = Path(f"/proc/{holder.get('pid')}/stat").read_text(errors="replace")
    except OSError:
        return False
    fields = stat.rpartition(")")[2].split()
    killed = int(fields[28]) >> (signal.SIGKILL - 1) & 1  # among the pending signals
    return holder.get("host") == socket.gethostname() and bool(fields[0] in "ZX" or int(fields[6]) & _EXITING or killed)


def _holder(path: Path) -> dict[str, object]:
    """Who has written itself into a lock file; nothing if it cannot be read."""
    try:
        holder = from_json(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _in_use(path: Path, key: str, folder: Path) -> InUseError:
    rule = f"must be another folder, or that process must end first (its lock: {path})"
    return InUseError(f"{key}: got {str(folder)!r}; {_described(path)} is writing there; {rule}")


def _described(path: Path) -> str:
    holder = _holder(path)
    return f"process {holder.get('pid')} on host {holder.get('host')!r}" if holder else "a process"
