"""Checksums of files, of which large ones are read once until they change."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from async_rlhf.system.files import cache_folder, write_file

logger = logging.getLogger(__name__)

_LARGE = 100_000_000
"""Bytes of files from which their checksum is kept; fewer are read in a tenth of a second."""
_SETTLED = 2.0  # seconds: a file that changed later may change again at what counts as the same time


def digest_of(text: str) -> str:
    """A checksum of a text, to name files and folders by."""
    return xxhash.xxh3_128_hexdigest(text.encode(errors="backslashreplace"))


def checksum_of(files: Iterable[Path], folder: Path, named: bool = True) -> str:
    """A checksum of the files' content; of large ones it is kept, and computed again when one of them has changed.

    Args:
        files: those that are no files do not count.
        folder: they are in it.
        named: whether their names below the folder count, too.
    """
    paths = sorted(file for file in files if file.is_file())
    stats = [file.stat() for file in paths]
    settled = time.time() - max((stat.st_ctime for stat in stats), default=0) > _SETTLED
    if sum(stat.st_size for stat in stats) < _LARGE or not settled:
        return _checksum_now(paths, folder, named)
    names = f"{named} {folder.resolve()} {[str(file.resolve()) for file in paths]}"
    of = f"{names} {[(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]}"
    kept = cache_folder() / f"contents-{digest_of(names)}.txt"
    with suppress(OSError, ValueError):
        checksum, proof = kept.read_text(encoding="utf-8").split()
        if proof == digest_of(f"{checksum} {of}"):  # of these files as they are now, and not damaged
            return checksum
    checksum = _checksum_now(paths, folder, named)
    try:
        write_file(kept, f"{checksum} {digest_of(f'{checksum} {of}')}\n")
    except OSError as error:
        logger.warning("the cache file %s could not be written: %s", kept, error)
    return checksum


def _checksum_now(files: Sequence[Path], folder: Path, named: bool) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        if named:
            digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return f"xxh3:{digest.hexdigest()}"
