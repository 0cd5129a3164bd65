"""Reads data sets: JSON lines, JSON, Parquet, CSV, a folder of them or one written by datasets, or a hub name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.config import ConfigError
from async_rlhf.system.hub import is_path, why_nowhere

Rows = Sequence[Mapping[str, Any]]
_FILE_FORMATS = {".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_rows(source: str, split: str = "train", *, columns: Sequence[str] = (), key: str = "data") -> Rows:
    """All rows of a data set.

    Args:
        source: a .jsonl, .json, .parquet or .csv file, a folder of such files named by their splits, one written by
            datasets, or a hub name; "name:config" if the hub has several configurations.
        split: the split to take if there are several.
        columns: columns that must be there.
        key: the configuration key that errors name.

    Raises:
        ConfigError: the source does not exist, cannot be read or is empty, or a column is missing.
    """
    path = Path(source).expanduser()
    files = [path / f"{split}{suffix}" for suffix in (".jsonl", *_FILE_FORMATS)]
    path = next((file for file in files if file.is_file()), path)
    if path.suffix in (".jsonl", *_FILE_FORMATS) and not path.is_file():
        raise ConfigError(f"{key}: got {source!r}; there is no such file")
    if is_path(source) and not path.exists():
        raise ConfigError(f"{key}: got {source!r}; there is no such file or folder")
    if not path.exists() and (why := why_nowhere(source.partition(":")[0], "dataset")) is not None:
        raise ConfigError(f"{key}: got {source!r}; {why}; must be a file, a folder, or a name on the hub")
    rows = _load_jsonl(path, key) if path.suffix == ".jsonl" else _load_with_datasets(path, source, split, key)
    if len(rows) == 0:
        raise ConfigError(f"{key}: {source!r} has no rows; must have at least one")
    check_columns(rows, columns, key, source)
    return rows


def check_columns(rows: Rows, columns: Sequence[str], key: str, source: str = "the data set") -> None:
    """Require the given columns in every row, with a value."""
    for number, row in enumerate(rows):
        for column in columns:
            if row.get(column) is None:
                found = f"has null as {column!r}" if column in row else f"has no {column!r}"
                raise ConfigError(f"{key}: row {number + 1} of {source!r} {found}; it has {', '.join(map(repr, row))}")


def _load_jsonl(path: Path, key: str) -> list[dict[str, Any]]:
    rows = []
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            try:
                line = raw.decode("utf-8")
                if not line.strip():
                    continue
                row = json.loads(line, object_pairs_hook=_once_each)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{key}: line {number} of {str(path)!r} is not UTF-8: {error}") from error
            except json.JSONDecodeError as error:
                raise ConfigError(f"{key}: line {number} of {str(path)!r} is not JSON: {error}") from error
            except RecursionError:
                place = f"{key}: line {number} of {str(path)!r}"
                raise ConfigError(f"{place} has lists or objects too deep within each other") from None
            except ValueError as error:  # a duplicate key, or a number with more digits than Python reads
                raise ConfigError(f"{key}: line {number} of {str(path)!r} cannot be read: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{key}: line {number} of {str(path)!r} is {line.strip()[:60]!r}; must be an object")
            rows.append(row)
    return rows


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys, of which all but the last would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r:.80} is there twice")
    return made


def _load_with_datasets(path: Path, source: str, split: str, key: str) -> Rows:
    from datasets import DatasetDict, load_dataset, load_from_disk

    try:
        if path.suffix in _FILE_FORMATS:
            return load_dataset(_FILE_FORMATS[path.suffix], data_files=str(path), split="train")
        if path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            loaded = load_from_disk(str(path))
            if not isinstance(loaded, DatasetDict):
                return loaded
        elif path.is_dir():  # files as <split>.jsonl or <split>-00000-of-00002.parquet
            loaded = load_dataset(str(path))
        else:
            name, _, config = source.partition(":")
            return load_dataset(name, config or None, split=split)
        if split not in loaded:
            raise ConfigError(f"{key}: {source!r} has no split {split!r}; it has {', '.join(loaded)}")
        return loaded[split]
    except ConfigError:
        raise
    except Exception as error:  # datasets raises many unrelated types for a source it cannot read
        raise ConfigError(
            f"{key}: {source!r} could not be read ({type(error).__name__}: {error}); must be a .jsonl, .json, .parquet "
            "or .csv file, a folder of such files or one written by datasets, or a name on the hub"
        ) from error
