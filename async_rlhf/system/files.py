"""Files and folders written whole: under a temporary name, flushed to disk, then renamed into place."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from uuid import uuid4

_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}
_OF_RUST = re.compile(r"\(os error (\d+)\)")


def cache_folder() -> Path:
    """The folder for caches, which can be computed again: ``$ASYNC_RLHF_CACHE``, else ``~/.cache/async_rlhf``."""
    folder = os.environ.get("ASYNC_RLHF_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "async_rlhf"


def from_json(text: str | bytes, **how: Any) -> Any:
    """The value of a JSON text from elsewhere. Raises ValueError, also for one that is nested too deeply for Python."""
    try:
        return json.loads(text, **how)
    except RecursionError:
        raise ValueError("lists or objects are too deep within each other") from None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within, add the file's name to errors of the disk: writing to an open file raises them without a name. Those of
    safetensors and tokenizers, which are no OSErrors, become some.
    """
    try:
        yield
    except Exception as error:  # of any kind: what is written in Rust has its own
        match = None if isinstance(error, OSError) else _OF_RUST.search(str(error))
        number = getattr(error, "errno", None) if match is None else int(match[1])
        if getattr(error, "filename", None) is None and number in _OF_DISKS:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name only when the body ends without error; else nothing is left of it. Of
    several that are written at once, the last to end is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete_abandoned(path)
    with naming(path), _locked_temporary(path) as file:
        temporary = Path(file.name)
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)  # while it is locked: another writer would take it for abandoned
        finally:
            temporary.unlink(missing_ok=True)


def write_file(path: Path, text: str) -> None:
    """Write a text file whole."""
    with whole_file(path) as file:
        file.write(text)


def _locked_temporary(path: Path) -> TextIO:
    """A new text file beside another, with a lock as long as it is open."""
    while True:
        # Each has a name of its own: another writer deletes by name what it has found without a lock.
        temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
        file = temporary.open("w", encoding="utf-8")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if temporary.exists():
            return file
        file.close()  # another writer has deleted it before it was locked


def _delete_abandoned(path: Path) -> None:
    """Delete what writers of a file that were killed have left: nobody has a lock on it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def whole_lines(path: Path) -> list[str]:
    """The lines of a text file that grows line by line; none if it does not exist. An incomplete last line is removed
    from the file, so that the next one starts on a new line.
    """
    data = path.read_bytes() if path.is_file() else b""
    whole, _, cut = data.rpartition(b"\n")
    if cut:
        path.write_bytes(whole + b"\n" if whole else b"")
    # Not splitlines(), which also splits at other characters.
    return whole.decode("utf-8").split("\n") if whole else []


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder that replaces an older one only when the body ends without error. If a link is in its place, the link is
    replaced and its target stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with naming(path):
            yield temporary
        for file in temporary.rglob("*"):
            _flush_to_disk(file)  # for a folder, the names in it
        _flush_to_disk(temporary)
        if path.exists() or path.is_symlink():
            _delete(old)
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError:
            if old.exists() or old.is_symlink():
                old.rename(path)
            raise
        _flush_to_disk(path.parent)  # the names themselves
        _delete(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _delete(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class JsonLines:
    """Appends objects to a file.

    Args:
        path: the file.
        keep: bytes of an existing file to keep; the rest is cut off.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        self._path = path
        self._file: BinaryIO = path.open("ab" if keep else "wb")
        if self._file.tell() < keep:
            raise OSError(f"{str(path)!r} has {self._file.tell()} bytes, but {keep} when the checkpoint was written")
        self._file.truncate(keep)
        self._file.seek(0, os.SEEK_END)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one whole line and pass it to the operating system.

        Raises:
            OSError: it cannot be written, or the file is no longer at its path, so nobody would find the line.
        """
        self._require_place()
        text = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        # A lone surrogate, from a prompt that is not valid Unicode, becomes a JSON escape.
        with naming(self._path):
            self._file.write(text.encode(errors="backslashreplace"))
            self._file.flush()

    def position(self) -> int:
        """Bytes written so far, which are on the disk when this returns."""
        self._require_place()
        with naming(self._path):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def _require_place(self) -> None:
        try:
            there = os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            there = False
        if not there:
            why = "gone while the run writes it: was it deleted, moved or replaced?"
            raise FileNotFoundError(errno.ENOENT, why, str(self._path))

    def close(self) -> None:
        """Close the file."""
        with naming(self._path):
            self._file.close()
