"""Reads data sets: JSON lines, JSON, Parquet, CSV, a folder of them or one written by datasets, or a hub name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from async_rlhf.config import ConfigError
from async_rlhf.data.checksums import checksum_of
from async_rlhf.data.files import read_file
from async_rlhf.data.views import Joined
from async_rlhf.models.chats import unpadded
from async_rlhf.system.names import find_data, is_text

Rows = Sequence[Mapping[str, Any]]
T = TypeVar("T")


def load_rows(
    source: str, split: str = "train", *, columns: Sequence[str] = (), numbers: Sequence[str] = (), key: str = "data"
) -> Rows:
    """All rows of a data set. No type is guessed: JSON and Parquet say what a value is, and CSV has only text.

    Args:
        source: a .jsonl, .json, .csv or .tsv file, perhaps compressed, a .parquet file, a folder of such files named by
            their splits, one written by datasets, or a hub name; "name:config" if the hub has several configurations.
        split: the split to take if there are several.
        columns: columns that must be there.
        numbers: columns that are numbers in CSV, too.
        key: the configuration key that errors name.

    Raises:
        ConfigError: the source does not exist, cannot be read or is empty, or a column is missing.
    """
    path = find_data(source, split, key)
    rows: Rows = without_padding(_load(path, source, split, key, numbers))
    if len(rows) == 0:
        raise ConfigError(f"{key}: {source!r} has no rows; must have at least one")
    check_columns(rows, columns, key, source)
    return rows


def without_padding(rows: Any) -> Any:
    """Rows whose chats and schemas of tools lack the nulls with which Arrow fills them: it gives each call the
    arguments of all calls. Rows of JSON keep the nulls that they have.
    """
    features, form = getattr(rows, "features", None), getattr(rows, "format", None)
    nested = [
        name for name, kind in (features or {}).items() if "arguments" in repr(kind) or "parameters" in repr(kind)
    ]
    if not nested or not isinstance(form, Mapping) or form["type"] is not None:
        return rows

    def change(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {n: [unpadded(each) for each in column] if n in nested else column for n, column in batch.items()}

    return rows.with_transform(change)


def check_columns(rows: Rows, columns: Sequence[str], key: str, source: str = "the data set") -> None:
    """Require rows, and the given columns in every row, with a value.

    Raises:
        ConfigError: a column is missing or null, or these are no rows.
    """
    is_frame = not hasattr(rows, "column_names") and (hasattr(rows, "to_dict") or hasattr(rows, "to_dicts"))
    if isinstance(rows, Mapping) or is_frame:
        frame = "; of a frame give datasets.Dataset.from_pandas(frame), or frame.to_dict('records')" if is_frame else ""
        rule = f"must be a list of rows, or one split of a data set{frame}"
        raise ConfigError(f"{key}: got a {type(rows).__name__}; {rule}")
    if not hasattr(rows, "__len__"):  # a generator, or what load_dataset(..., streaming=True) returns
        rule = "must be a list of rows, or one split of a data set that was loaded without streaming"
        made = "datasets.Dataset.from_generator(...) makes one, whose rows are on disk"
        raise ConfigError(f"{key}: got a {type(rows).__name__}, which has no length; {rule}; {made}")
    columns = [column for column in columns if not has_all(rows, column)]
    for number, row in enumerate(rows if columns else ()):
        for column in columns:
            if not isinstance(row, Mapping):
                raise ConfigError(f"{key}: row {number + 1} of {source!r} is a {type(row).__name__}; must be a mapping")
            if row.get(column) is None:
                raise ConfigError(f"{key}: row {number + 1} of {source!r} {lacks(row, column)}")


def lacks(row: Mapping[str, Any], column: str) -> str:
    """What is wrong with a row that has no value in a column, for errors."""
    problem = f"has null as {column!r}" if column in row else f"has no {column!r}"
    return f"{problem}; it has {', '.join(map(repr, row))}"


def columns_of(row: Mapping[str, Any]) -> str:
    """The columns of a row, for errors: those that are null say so."""
    filled = [repr(name) for name, value in row.items() if value is not None]
    nulls = [f"null as {name!r}" for name, value in row.items() if value is None]
    return ", ".join([*filled, *nulls])


def has_all(rows: object, column: str) -> bool:
    """Whether it is known without reading the rows that all have a value in a column."""
    table: Any = getattr(rows, "data", None)  # of datasets.Dataset
    return column in getattr(table, "column_names", ()) and table.column(column).null_count == 0


def _load(path: Path, source: str, split: str, key: str, numbers: Sequence[str]) -> Any:
    """The rows of JSON and CSV files as they are there; datasets, which would guess their types, reads all else."""
    if path.is_file() and path.stat().st_size == 0:
        raise ConfigError(f"{key}: {source!r} has no rows; must have at least one")
    if is_text(path):
        return read_file(path, key, numbers)

    from datasets import DatasetDict, load_dataset, load_dataset_builder, load_from_disk

    try:
        if path.suffix == ".parquet":
            return load_dataset("parquet", data_files=str(path), split="train", **_by_content([path]))
        if path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            loaded = load_from_disk(str(path))
            if not isinstance(loaded, DatasetDict):
                return loaded
        elif path.is_dir():  # files as <split>.jsonl or <split>-00000-of-00002.parquet
            builder = load_dataset_builder(str(path))
            named = builder.config.data_files or {}
            if type(builder).__module__.rpartition(".")[2] in ("json", "csv"):
                return Joined([read_file(Path(file), key, numbers) for file in _split_of(named, split, source, key)])
            loaded = load_dataset(str(path), **_by_content([Path(file) for files in named.values() for file in files]))
        else:
            name, _, config = source.partition(":")
            return load_dataset(name, config or None, split=split)
        return _split_of(loaded, split, source, key)
    except ConfigError:
        raise
    except Exception as error:  # datasets raises many unrelated types for a source it cannot read
        why: BaseException = error
        while why.__cause__ is not None:  # "An error occurred while generating the dataset" says nothing
            why = why.__cause__
        raise ConfigError(
            f"{key}: {source!r} could not be read ({type(why).__name__}: {why}); must be a .jsonl, .json, .parquet "
            "or .csv file, a folder of such files or one written by datasets, or a name on the hub"
        ) from error


def _split_of(splits: Mapping[Any, T], split: str, source: str, key: str) -> T:
    if split not in splits:
        raise ConfigError(f"{key}: {source!r} has no split {split!r}; it has {', '.join(map(str, splits))}")
    return splits[split]


def _by_content(files: Sequence[Path]) -> dict[str, Any]:
    """Makes datasets convert files anew when their content has changed: by itself it goes by their dates."""
    return {"description": checksum_of([file.absolute() for file in files], Path("/"))}
