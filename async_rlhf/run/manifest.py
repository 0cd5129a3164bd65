"""Folders that are either complete or absent: each has a manifest with the size and the checksum of every file."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import xxhash

from async_rlhf.system.files import from_json, whole_folder

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_DELETED = ".deleted.json"
"""The name of the manifest while its checkpoint is being deleted."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or is no checkpoint at all. The message names the file."""


def write_whole(folder: Path, write: Iterable[Any]) -> None:
    """Write a folder, with its manifest, that appears under its name only when all of it is on disk.

    It replaces a folder that was written in the same way. Anything else in its place is moved to another name.

    Args:
        folder: its path.
        write: functions that each write into the folder they are given.
    """
    with appearing(folder) as temporary:
        for part in write:
            part(temporary)
        seal(temporary)


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """The same, but the body does the writing: into the folder that it gets, which it must :func:`seal` at its end."""
    if (stranger := stranger_in(folder)) is not None:
        numbers = (f"{folder.name}.kept-{number}" for number in count(1))
        aside = next(path for name in numbers if not os.path.lexists(path := folder.with_name(name)))
        logger.warning("WARNING: %s was not written by a run; %s is kept, as %s", stranger, folder, aside.name)
        folder.rename(aside)
    with whole_folder(folder) as temporary:
        yield temporary


def seal(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the manifest of a folder that is complete.

    Args:
        folder: its path.
        known: checksums of files that others have written, by the paths within the folder.
    """
    names = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {name: (known or {}).get(name) or digest_of(path) for name, path in names.items()}
    (folder / _MANIFEST).write_text(json.dumps(files, indent=1, sort_keys=True), encoding="utf-8")


def require_written(folder: Path, known: Mapping[str, str]) -> None:
    """Require that this rank sees the files that others have written.

    Args:
        folder: where.
        known: their checksums, by the paths within the folder.

    Raises:
        OSError: one of them is not here, or not as large as it was written.
    """
    for name, digest in known.items():
        path = folder / name
        if not path.is_file() or not digest.startswith(f"{path.stat().st_size} bytes"):
            rule = "must be on a file system that all ranks see"
            raise OSError(f"output_dir: {str(path)!r}, which another rank has written, is not there; {rule}")


def verify(folder: Path) -> None:
    """Require every file of the manifest to be unchanged.

    Raises:
        CheckpointError: names the first that is not.
    """
    try:
        manifest = from_json((folder / _MANIFEST).read_text(encoding="utf-8"))
        names = dict(manifest).items()
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{str(folder / _MANIFEST)!r} cannot be read: {error}") from error
    for name, digest in names:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{str(path)!r} is missing")
        if digest_of(path) != digest:
            raise CheckpointError(f"{str(path)!r} is not what was written: its checksum differs")


def stranger_in(folder: Path) -> Path | None:
    """What must not be deleted with a folder that :func:`write_whole` would replace: the folder itself if it is a link
    or was not written that way, else the first entry that its manifest does not list. None if there is no such thing.
    """
    if not os.path.lexists(folder):
        return None
    if folder.is_symlink() or not folder.is_dir():
        return folder
    inside = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    lists = [folder / _DELETED, folder / _MANIFEST]
    listing = next((path for path in lists if path.is_file()), None)
    if listing is None:
        return folder if inside else None  # an empty folder is left if deletion was interrupted at its end
    try:
        listed = {folder / name for name in dict(from_json(listing.read_text(encoding="utf-8")))}
    except (ValueError, TypeError):  # the manifest is damaged and can no longer be read
        return None
    return next((path for path in inside if path not in {*listed, *lists}), None)


def delete_whole(folder: Path) -> None:
    """Delete a folder that has no stranger (:func:`stranger_in`). If this is interrupted, the rest no longer counts as
    a checkpoint but still lists what was in it.
    """
    listing = folder / _DELETED
    with suppress(FileNotFoundError):
        (folder / _MANIFEST).replace(listing)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != listing:
            path.unlink()
    listing.unlink(missing_ok=True)
    folder.rmdir()


def digest_of(path: Path) -> str:
    """Size and checksum of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{path.stat().st_size} bytes, xxh3 {digest.hexdigest()}"
