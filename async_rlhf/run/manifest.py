"""Folders that are whole or not there: each has a manifest with the size and the checksum of every file."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import xxhash

from async_rlhf.system.files import whole_folder

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_DELETED = ".deleted.json"
"""The name of the manifest while its checkpoint is being deleted."""


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged or no checkpoint at all. The message names the file."""


def write_whole(folder: Path, write: Iterable[Any]) -> None:
    """Write a folder, with its manifest, that appears under its name only when all of it is on the disk.

    It takes the place of one that was written in the same way. Anything else is set aside under another name.

    Args:
        folder: its place.
        write: functions that each write into the folder they are given.
    """
    if (stranger := stranger_in(folder)) is not None:
        numbers = (f"{folder.name}.kept-{number}" for number in count(1))
        aside = next(path for name in numbers if not os.path.lexists(path := folder.with_name(name)))
        logger.warning("WARNING: %s was not written by a run; %s is kept, as %s", stranger, folder, aside.name)
        folder.rename(aside)
    with whole_folder(folder) as temporary:
        for part in write:
            part(temporary)
        files = {str(path.relative_to(temporary)): _digest(path) for path in _files(temporary)}
        (temporary / _MANIFEST).write_text(json.dumps(files, indent=1, sort_keys=True), encoding="utf-8")


def verify(folder: Path) -> None:
    """Require every file of the manifest to be as it was written.

    Raises:
        CheckpointError: names the first that is not.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        names = dict(manifest).items()
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{str(folder / _MANIFEST)!r} cannot be read: {error}") from error
    for name, digest in names:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{str(path)!r} is missing")
        if _digest(path) != digest:
            raise CheckpointError(f"{str(path)!r} is not what was written: its checksum differs")


def stranger_in(folder: Path) -> Path | None:
    """What nobody may delete with a folder that :func:`write_whole` would write: the folder itself, where it is a link
    or was not written so, or the first thing in it that its manifest does not list. None where there is no such thing.
    """
    if not os.path.lexists(folder):
        return None
    if folder.is_symlink() or not folder.is_dir():
        return folder
    inside = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    lists = [folder / _DELETED, folder / _MANIFEST]
    listing = next((path for path in lists if path.is_file()), None)
    if listing is None:
        return folder if inside else None  # nothing is left where deleting was interrupted at its end
    try:
        listed = {folder / name for name in dict(json.loads(listing.read_text(encoding="utf-8")))}
    except (ValueError, TypeError):  # damaged: what it said can no longer be told
        return None
    return next((path for path in inside if path not in {*listed, *lists}), None)


def delete_whole(folder: Path) -> None:
    """Delete a folder in which there is no stranger. When that is interrupted it is no checkpoint any more, whatever is
    left, but still says what was in it.
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


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{path.stat().st_size} bytes, xxh3 {digest.hexdigest()}"
