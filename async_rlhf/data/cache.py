"""Results about whole data sets: computed once, and kept in folders of the cache for the next run.

A folder is written whole and says of what it is, the size and the checksum of each of its files, and the checksum of
all that it says. So one that is of other data or was damaged is noticed, and made again. Two processes that make the
same one do not disturb each other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from mmap import MADV_DONTNEED, mmap
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import xxhash

from async_rlhf.system.files import cache_folder

logger = logging.getLogger(__name__)

CACHED_FROM = 1_000_000
"""Characters or bytes of data from which results are kept; of fewer they are computed as fast as they are read."""
_LARGE = 100_000_000
"""Bytes of files from which their checksum is kept; fewer are read in a tenth of a second."""
_SETTLED = 2.0  # seconds: a file that changed later may change again at what counts as the same time
_META = "meta.json"
_ABANDONED = 24 * 3600  # seconds after which an unfinished folder is one that a killed process left behind


@dataclass(frozen=True)
class Kept:
    """One result that is kept: raw arrays in a folder, and what is written beside them."""

    folder: Path
    meta: Mapping[str, Any]

    def array(self, name: str, dtype: Any) -> np.ndarray:
        """The flat array in a file. It is mapped, not read."""
        path = self.folder / name
        if path.stat().st_size == 0:  # nothing to map
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, mode="r")


def find(name: str, of: str) -> Kept | None:
    """What is kept under a name; None if there is nothing, or it is of something else. What is damaged is warned of.

    Args:
        name: of the folder.
        of: identifies what the result was computed from.
    """
    folder = cache_folder() / name
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        whole = meta.pop("sum") == digest_of(json.dumps(meta))
        whole = whole and all(_sum(folder / file) == known for file, known in meta["files"].items())
        if whole:
            return Kept(folder, meta) if meta["of"] == of else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    logger.warning("cache folder %s is damaged; it is made again", folder)
    return None


def keep(name: str, of: str, write: Callable[[Path], Mapping[str, Any]]) -> Kept | None:
    """Keep a result; None, with a warning, if it cannot be kept: that is no reason to stop.

    Args:
        name: of the folder.
        of: see :func:`find`.
        write: writes the files into a folder, and returns what else is to be kept: values for JSON.
    """
    folder = cache_folder() / name
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(folder.parent)
        temporary = folder.with_name(f".{name}.{uuid4().hex}.tmp")
        temporary.mkdir()
        meta = {**write(temporary), "of": of}
        meta["files"] = {file.name: _sum(file, flush=True) for file in sorted(temporary.iterdir())}
        with (temporary / _META).open("w", encoding="utf-8") as file:
            json.dump({**meta, "sum": digest_of(json.dumps(meta))}, file)
            file.flush()
            os.fsync(file.fileno())
        _put(temporary, folder)
    except OSError as error:
        logger.warning("the cache folder %s could not be written: %s", folder, error)
        return None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return find(name, of)


def kept_array(kind: str, of: str | None, dtype: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
    """An array about some data: from the cache, or made now, and kept if the data have a fingerprint.

    Args:
        kind: what it is; part of the folder's name, so made of letters.
        of: fingerprint of the data and of everything else that the array depends on; None keeps nothing.
        dtype: of the array.
        make: computes it.
    """
    if of is None:
        return make()
    name = f"{kind}-{digest_of(of)}"
    found = find(name, of)
    if found is None:
        made = make()
        found = keep(name, of, partial(write_array, "values.bin", made, {}))
        if found is None:
            return made
    return found.array("values.bin", dtype)


def digest_of(text: str) -> str:
    """A checksum of a text, to name folders by."""
    return xxhash.xxh3_128_hexdigest(text.encode(errors="backslashreplace"))


def checksum_of(files: Iterable[Path], folder: Path, named: bool = True) -> str:
    """A checksum of the files' content; of large ones it is kept, and computed again when one of them has changed.

    Args:
        files: those that are no files do not count.
        folder: they are in it.
        named: whether their names below the folder count, too.
    """
    found = sorted(file for file in files if file.is_file())
    stats = [file.stat() for file in found]
    settled = time.time() - max((stat.st_ctime for stat in stats), default=0) > _SETTLED
    if sum(stat.st_size for stat in stats) < _LARGE or not settled:
        return _checksum_now(found, folder, named)
    name = f"contents-{digest_of(f'{named} {folder.resolve()} {[str(file.resolve()) for file in found]}')}"
    of = str([(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats])
    kept = find(name, of) or keep(name, of, lambda _: {"checksum": _checksum_now(found, folder, named)})
    return _checksum_now(found, folder, named) if kept is None else str(kept.meta["checksum"])


def _checksum_now(files: Sequence[Path], folder: Path, named: bool) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        if named:
            digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return f"xxh3:{digest.hexdigest()}"


def code_of(*names: str) -> str:
    """A checksum of files, this folder's or with their whole path: of the code that computes what is kept."""
    digest = xxhash.xxh3_128()
    for name in names:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def write_array(name: str, values: np.ndarray, meta: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Write a flat array and return what is to be kept beside it, for :func:`keep`."""
    values.tofile(folder / name)
    return meta


def forget(values: np.ndarray) -> None:
    """Let go of the memory that a mapped array takes by now; it is read from its file again when it is needed."""
    base: Any = values
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap):
        base.madvise(MADV_DONTNEED)


def _put(temporary: Path, folder: Path) -> None:
    """Rename into place. What was there goes; if another process has just put its own there, that stays."""
    old = temporary.with_suffix(".old.tmp")
    with suppress(FileNotFoundError):
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _delete_abandoned(parent: Path) -> None:
    for folder in parent.glob(".*.tmp"):
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - newest > _ABANDONED:
                shutil.rmtree(folder, ignore_errors=True)


def _sum(path: Path, flush: bool = False) -> list[Any]:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        if flush:
            os.fsync(file.fileno())
        return [file.tell(), digest.hexdigest()]
