"""Stages that are skipped if they are done, and whose results are either complete or absent."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from async_rlhf.config import ConfigError
from async_rlhf.config.base import decides_result, dotted, with_new_keys, without_gpu
from async_rlhf.config.import_by_name import neighbours
from async_rlhf.config.rewards import FunctionName
from async_rlhf.config.secrets import without_secrets
from async_rlhf.data import checksums
from async_rlhf.system.errors import is_own
from async_rlhf.system.files import from_json, whole_folder, write_file
from async_rlhf.system.lock import InUseError, hold

logger = logging.getLogger(__name__)

Source = str | Sequence[str] | Mapping[str, str] | None
"""One file, folder or hub name, or several."""

_MODEL_FILES = [
    *("config.json", "generation_config.json", "*.safetensors", "pytorch_model*.bin", "*.index.json", "adapter_*"),
    *("*.py", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    "chat_template*",
]


@dataclass(frozen=True)
class Stage:
    """A stage of work and the marker that says it is done: ``<folder>/<marker_name or name>.json``, written last.

    The marker holds the configuration, fingerprints of what was read, and the results.

    Args:
        folder: where the marker is, beside the outputs.
        name: of the marker, and of the stage in messages.
        config: a frozen dataclass with a field ``overwrite``.
        inputs: configuration key -> its file, folder or hub name (or several). They are compared by content, as is code
            of the user's that any other key names.
        owns_folder: the stage's output is the whole folder. Then a folder with other things in it is never replaced.
        outputs: else the files it writes. They are never replaced without a marker or ``overwrite``.
        overwrite_option: the option that errors tell the user to pass.
        marker_name: name of the marker, if ``name`` would not distinguish two outputs in one folder.
        locked: refuse a second process that does this stage, from :meth:`done` to the end of publishing.
        one_of_many: its caller says how many of many are done already.
    """

    folder: Path
    name: str
    config: Any
    inputs: Mapping[str, Source]
    owns_folder: bool = False
    outputs: tuple[Path, ...] = ()
    marker_name: str = ""
    overwrite_option: str = "--overwrite"
    locked: bool = True
    one_of_many: bool = False

    @property
    def marker(self) -> Path:
        """The file that says the stage is done."""
        return self.folder / f"{self.marker_name or self.name}.json"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The marker's entries for configuration and inputs."""
        values = dotted(dataclasses.asdict(self.config))
        # What a GPU would decide is left open in the trials of a sweep, and not known to older versions.
        values = without_gpu(values, self.config)
        config = {key: value for key, value in values.items() if decides_result(self.config, key)}
        inputs = _fingerprints({**_own_code(config), **self.inputs})
        # Through JSON and back, so that it can be compared with a marker.
        return json.loads(json.dumps(without_secrets({"config": config, "inputs": inputs})))

    def done(self) -> dict[str, Any] | None:
        """The results, if the stage was done with this configuration and these inputs; None if it is not done.

        Raises:
            ConfigError: it was done with others, or the folder holds something else, or another process is doing it.
        """
        results = self._done()
        if not self.locked or (results is not None and not self._lock.exists()):
            return results
        try:
            self.hold()
        except InUseError:
            if results is None:
                raise
            return results
        results = self._done()  # another process may have done it meanwhile
        if results is not None:
            self._release()  # with it goes what a process has left that was killed when all was done
        return results

    @property
    def _lock(self) -> Path:
        """A folder that is replaced as a whole has its lock beside it."""
        folder = self.folder.resolve()
        return folder.with_name(f".{folder.name}.lock") if self.owns_folder else folder / f".{self.marker.name}.lock"

    def hold(self) -> None:
        """Lock the stage against other processes, until it is published or this object is no longer referenced.

        Raises:
            InUseError: another process is doing it.
        """
        self.__dict__["_hold"] = hold(self._lock, self.name, self.folder)

    def _release(self) -> None:
        if (held := self.__dict__.pop("_hold", None)) is not None:
            held.release()

    def _done(self) -> dict[str, Any] | None:
        identity = self.identity
        record = self._read_marker()
        if record is None:
            self._check_place()
            return None
        if self.config.overwrite:
            logger.info("%s: done already, in %s; doing it again", self.name, self.folder)
            return None
        differences = list(_differences(record, identity))
        if differences:
            raise ConfigError(
                f"{self.name}: {str(self.folder)!r} holds the result of another configuration:\n  "
                + "\n  ".join(differences)
                + f"\npass {self.overwrite_option} true to replace it, or choose another output"
            )
        if not all(path.is_file() for path in self.outputs):
            return None
        if not self.one_of_many:
            logger.info("%s: done already, in %s", self.name, self.folder)
        self._list_of_begun.unlink(missing_ok=True)
        return record["results"]

    def _check_place(self) -> None:
        """Require that nothing but this stage's own files would be lost."""
        if self.owns_folder and self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(
                f"output_dir: {str(self.folder)!r} holds other files; must be a new or empty folder, or hold an "
                f"earlier result of {self.name}"
            )
        # Files that a killed stage had begun to write.
        begun = json.loads(self._list_of_begun.read_text("utf-8")) if self._list_of_begun.is_file() else []
        for path in self.outputs:
            if path.exists() and not self.config.overwrite and path.name not in begun:
                raise ConfigError(
                    f"{self.name}: {str(path)!r} is there, but nothing says that this stage finished it; pass "
                    f"{self.overwrite_option} true to replace it, or choose another output"
                )

    @contextmanager
    def publish_folder(self, results: Mapping[str, Any]) -> Iterator[Path]:
        """A temporary folder; when the body ends without error, it gets the marker and replaces ``folder``."""
        with whole_folder(self.folder) as temporary:
            yield temporary
            (temporary / self.marker.name).write_text(self._marker_text(results), encoding="utf-8")
        self._release()

    def publish_files(self, files: Mapping[Path, str], results: Mapping[str, Any]) -> None:
        """Write files whole, then the marker. An older marker is deleted first, so that it never describes newer files.

        Before all that, a list of the files is written, so that a stage that was killed in between can be restarted.
        """
        write_file(self._list_of_begun, json.dumps([path.name for path in files]))
        self.marker.unlink(missing_ok=True)
        for path, text in [*files.items(), (self.marker, self._marker_text(results))]:
            write_file(path, text)
        self._list_of_begun.unlink()
        self._release()

    @property
    def _list_of_begun(self) -> Path:
        return self.folder / f".{self.marker.name}.begun"

    def _marker_text(self, results: Mapping[str, Any]) -> str:
        content = {"stage": self.name, **self.identity, "results": dict(results)}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def _read_marker(self) -> dict[str, Any] | None:
        if not self.marker.is_file():
            return None
        try:
            record = from_json(self.marker.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self.name}: {str(self.marker)!r} is not JSON: {error}; move it away") from error
        if not isinstance(record, dict) or record.get("stage") != self.name:
            raise ConfigError(f"{self.name}: {str(self.marker)!r} was not written by this stage; choose another output")
        values = without_gpu(with_new_keys(record["config"], self.config), self.config)
        config = {key: value for key, value in values.items() if decides_result(self.config, key)}
        return {**record, "config": without_secrets(config)}


def _differences(record: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterable[str]:
    """One line for each key whose value or content has changed."""
    old, new = record["inputs"], wanted["inputs"]
    for key in sorted(old):  # an older version has noted fewer
        if old[key] != new.get(key):
            was, now = record["config"].get(key), wanted["config"].get(key)
            yield f"{key}: was {was!r} ({old.get(key)}), is {now!r} ({new.get(key)})"
    inputs = tuple(old)
    old, new = record["config"], wanted["config"]
    for key in sorted(old.keys() | new.keys()):
        compared = any(key == name or key.startswith(f"{name}.") for name in inputs)
        if not compared and old.get(key) != new.get(key):
            yield f"{key}: was {old.get(key)!r}, is {new.get(key)!r}"


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object per line. Values that JSON does not support (dates) are written as text, NaN as null."""
    return "".join(_json_line(row) for row in rows)


def _json_line(row: Mapping[str, Any]) -> str:
    try:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str)
        line.encode()
    except ValueError:  # NaN, an infinity or a lone surrogate
        line = json.dumps(_finite(row), allow_nan=False, default=str)
    return line + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fingerprints(inputs: Source | Mapping[str, Source]) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _fingerprints(source) for key, source in inputs.items()}
    if inputs is None or isinstance(inputs, str):
        return None if inputs is None else fingerprint(inputs)
    return [fingerprint(item) for item in inputs]


def fingerprint(source: str) -> str:
    """Identifies an input: by a hash of the content if it is local, else by its name.

    In a model's folder only the files of model and tokenizer count, so logs and markers beside them may change. For a
    function, as "module:function" or "file.py:function(key=value)", its file counts too, and in a package the files
    beside it.
    """
    if ":" in source and not Path(source).expanduser().exists():
        return _function_fingerprint(source)
    path = Path(source).expanduser()
    if path.is_file():
        return checksums.checksum_of([path], path.parent, named=False)
    if not path.is_dir():
        return source
    if (path / "config.json").is_file():
        return checksums.checksum_of({file for pattern in _MODEL_FILES for file in path.glob(pattern)}, path)
    files = [file for file in path.rglob("*") if not file.name.startswith((".", "cache-"))]
    return checksums.checksum_of(files, path)


def _function_fingerprint(name: str) -> str:
    try:
        wanted = FunctionName.parse(name, "")
    except ConfigError:
        return name  # not a function's name but, for example, a hub data set's
    file = _file_of(wanted)
    if file is None or not file.is_file():
        return name
    files = file.parent.glob("*.py") if file.name == "__init__.py" else [file, *neighbours(file)]
    return f"{name.strip()[len(wanted.place) + 1 :]} in {checksums.checksum_of(files, file.parent)}"


def _own_code(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """The keys that name code of the user's own: an algorithm, an engine, callbacks, whatever it is."""
    named = {key: value if isinstance(value, list) else [value] for key, value in config.items()}
    return {key: values for key, values in named.items() if any(map(_names_own_code, values))}


def _names_own_code(name: Any) -> bool:
    if not isinstance(name, str) or ":" not in name:
        return False
    try:
        file = _file_of(FunctionName.parse(name, ""))
    except ConfigError:
        return False
    return file is not None and file.is_file() and is_own(str(file.resolve()))


def _file_of(wanted: FunctionName) -> Path | None:
    return Path(wanted.place).expanduser() if wanted.place.endswith(".py") else _module_file(wanted.place)


def _module_file(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None  # loading the function will report what is wrong with its name
    return None if spec is None or spec.origin is None else Path(spec.origin)
