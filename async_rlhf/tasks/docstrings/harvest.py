"""The built-in task's text: functions of installed Python packages, with their docstrings' first lines.

A prompt (*query*) is a function's signature as code, ending where its docstring opens; the completion is the
first line of that docstring (its *summary*, PEP 257). The text is on every machine that can run the package,
so the task needs no download: `harvest` parses the standard library and some installed packages, `split`
divides the functions into train, preference and held-out parts, `write_splits` writes the stages' files.

Sources are read, never imported. It takes functions and methods, except dunders and functions nested in
functions, whose docstring's first paragraph is one line of 10 to 100 ASCII characters, mostly letters, that
is prose (no doctest, field list, section title or signature), and whose query is at most 200 characters long.
Docstrings in single quotes are read only in files that also have a triple quote.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.util
import inspect
import json
import logging
import multiprocessing
import os
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from async_rlhf.commands.stage import Stage
from async_rlhf.config import ConfigError
from async_rlhf.system.files import cache_folder, whole_file
from async_rlhf.tasks.docstrings.config import DocstringsConfig

logger = logging.getLogger(__name__)

STDLIB = "stdlib"
PACKAGES = ("torch", "transformers", "numpy", "accelerate", "datasets", "huggingface_hub")
SPLITS = ("train", "preference", "heldout")

FORMAT = 1  # raise it whenever the rows taken from the same files change: it is part of the cache's key
MAX_QUERY_CHARS = 200
MIN_SUMMARY_CHARS, MAX_SUMMARY_CHARS = 10, 100

_CHUNK_BYTES = 1_000_000  # one task of the pool: large compared to its overhead, small compared to the whole
_POOL_BYTES = 4_000_000  # below this, starting processes takes longer than parsing in this one
_SKIPPED_FOLDERS = {"test", "tests", "testing", "idle_test", "idlelib", "node_modules", "__pycache__"}
_SKIPPED_FOLDERS |= {"site-packages", "dist-packages"}  # they are in the standard library's folder
_NOT_PROSE = re.compile(
    r"^(>>>|\.\.|[:@#*\-=|<`\[({\\$%&]"  # doctest, directive, field list, title rule, table, markup
    r"|(args|arguments|parameters|params|returns?|yields?|raises?|examples?|notes?|attributes|inputs?"
    r"|outputs?|usage|todo|fixme|deprecated|warning|copied from)\s*(:|$))",
    re.IGNORECASE,
)
_SIGNATURE = re.compile(r"^[\w.\[\],]*\w\([^)]*\)?\s*(->|:|--|$)|->|^\w+\s*=")


class Function(NamedTuple):
    """One function with a usable docstring.

    `source` is the package (or file, or folder) it was found in, `module` and `qualname` are its place there,
    `name` is its bare name, `query` the prompt, `summary` its docstring's first line.
    """

    source: str
    module: str
    qualname: str
    name: str
    query: str
    summary: str


class _File(NamedTuple):
    source: str
    module: str
    path: str
    size: int
    mtime_ns: int


def default_sources() -> list[str]:
    """The sources `harvest` reads by default: the standard library and the installed ones of `PACKAGES`."""
    return [STDLIB, *(name for name in PACKAGES if importlib.util.find_spec(name) is not None)]


def harvest(
    sources: Sequence[str] | None = None,
    *,
    cache_dir: Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> list[Function]:
    """Functions with a one-line docstring summary, one for each distinct query, in a fixed order.

    `sources`: names of installed top-level packages or modules (found, not imported), `"stdlib"` for the
    standard library, or paths (with a slash, or ending in `.py`) of files or folders. The default is the
    standard library, and torch, transformers, numpy, accelerate, datasets and huggingface_hub if installed.

    `cache_dir`: where the rows are kept for the next call; the default is `$ASYNC_RLHF_CACHE`, else
    `~/.cache/async_rlhf`. The cache is keyed by the sources, the size and time of each of their files, the
    Python version and this module's `FORMAT`; a damaged cache file is harvested again.

    `workers`: processes that parse (default: one per core, or none for less than 4 MB). They are spawned, so
    a script that calls this at its top level needs the usual `if __name__ == "__main__":`.

    `progress`: show a progress bar on stderr. Order: by source as given, then file, then line; of functions
    with the same query the first is kept. Files that do not parse are skipped, and counted in the log.

    Raises ConfigError, with what would be right, for a source that is none of these.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be at least 1, or None for one per core; found {workers}")
    names = default_sources() if sources is None else list(sources)
    files = [file for name in names for file in _list_files(name)]
    path = (cache_dir or cache_folder()) / f"docstrings-{_cache_key(files)}.jsonl"
    functions = _read_cache(path)
    if functions is None:
        functions = _parse_files(files, workers, progress)
        _write_cache(path, functions)
    return functions


def split(
    functions: Iterable[Function], *, seed: int, fractions: tuple[float, float, float] = (0.70, 0.15, 0.15)
) -> dict[str, list[Function]]:
    """Divide functions into `train`, `preference` and `heldout`, without leakage between them.

    All functions with the same bare name (case and leading underscores aside) fall into the same part, so
    no query and no override of a method is ever on both sides. A name's part depends only on `seed` and the
    name: adding functions moves none. `fractions` are of the names, in that order, and must sum
    to 1 (ValueError).
    """
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-9:
        raise ConfigError(f"fractions must be three numbers >= 0 (train, preference, heldout) with sum 1: {fractions}")
    parts: dict[str, list[Function]] = {part: [] for part in SPLITS}
    for function in functions:
        group = function.name.lstrip("_").casefold()
        digest = hashlib.sha256(f"{seed}:{group}".encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        part = 0 if place < fractions[0] else 1 if place < fractions[0] + fractions[1] else 2
        parts[SPLITS[part]].append(function)
    return parts


def write_splits(splits: Mapping[str, Sequence[Function]], out_dir: Path) -> dict[str, Path]:
    """Write the stages' JSONL files into `out_dir` (made if missing), each whole; return their paths by stem.

    `sft` (train): query, query_reference_response, name. `rl` (train): query, name. `preference_prompts`
    (preference): query, reference_response, name. `heldout`: query, query_reference_response,
    reference_response, name. No end-of-sequence token is added. Raises ConfigError for a missing split.
    """
    missing = [part for part in SPLITS if part not in splits]
    if missing:
        raise ConfigError(f"splits lacks {missing}: it must have {list(SPLITS)}, found {sorted(splits)}")
    layout = {
        "sft": ("train", ["query_reference_response"]),
        "rl": ("train", []),
        "preference_prompts": ("preference", ["reference_response"]),
        "heldout": ("heldout", ["query_reference_response", "reference_response"]),
    }
    paths = {}
    for stem, (part, answers) in layout.items():
        paths[stem] = Path(out_dir) / f"{stem}.jsonl"
        _write_lines(paths[stem], (json.dumps(_row(function, answers)) for function in splits[part]))
    return paths


def _row(function: Function, answers: Sequence[str]) -> dict[str, str]:
    """A line of a file, with the summary in these columns."""
    texts = {"reference_response": function.summary, "query_reference_response": function.query + function.summary}
    return {"query": function.query, **{name: texts[name] for name in answers}, "name": function.name}


def _list_files(source: str) -> list[_File]:
    """The Python files of one source, sorted by their path in it."""
    name, root, prefix = _locate(source)
    found = [root] if root.is_file() else sorted(_walk(root), key=lambda path: path.relative_to(root).as_posix())
    files = []
    for path in found:
        parts = [name] if path == root else [*prefix, *path.relative_to(root).with_suffix("").parts]
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        stat = path.stat()
        files.append(_File(name, ".".join(parts), str(path), stat.st_size, stat.st_mtime_ns))
    return files


def _locate(source: str) -> tuple[str, Path, list[str]]:
    """A source's name, its file or folder, and the first parts of its modules' names."""
    right = 'it must be an installed top-level package, "stdlib", or a path with a slash (./folder) or .py'
    if source == STDLIB:
        return STDLIB, Path(sysconfig.get_paths()["stdlib"]), []
    if "/" in source or os.sep in source or source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        if path.is_dir():
            return path.name, path, [path.name] if (path / "__init__.py").exists() else []
        if path.is_file() and path.suffix == ".py":
            return path.stem, path, []
        raise ConfigError(f"source {source!r}: no such folder or .py file; {right}")
    if not source.isidentifier():  # a dotted name would make find_spec import its parent
        raise ConfigError(f"source {source!r} is not a top-level name; {right}")
    loaded = sys.modules.get(source)
    # find_spec raises for a module that was loaded without a spec, such as __main__
    spec = importlib.util.find_spec(source) if loaded is None else loaded.__spec__
    if spec is not None and spec.submodule_search_locations:
        return source, Path(next(iter(spec.submodule_search_locations))), [source]
    if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
        return source, Path(spec.origin), []
    problem = "is not installed" if spec is None else "has no Python source"
    raise ConfigError(f"source {source!r} {problem}; {right}")


def _walk(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [sub for sub in subfolders if sub not in _SKIPPED_FOLDERS and not sub.startswith(".")]
        for file in files:
            if file.endswith(".py") and not file.startswith("test_") and file != "conftest.py":
                yield Path(folder, file)


def _parse_files(files: Sequence[_File], workers: int | None, progress: bool) -> list[Function]:
    """Parse all files, keep the first function of each query, and log the counts."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    chunks = list(_chunks(files))
    total = sum(file.size for file in files)
    if workers is None:
        workers = 1 if total < _POOL_BYTES else os.cpu_count() or 1
    bars = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    by_query: dict[str, Function] = {}
    n_unparsed = 0
    with Progress("{task.description}", *bars, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("harvesting docstrings", total=total)
        for chunk, (rows, n_failed) in zip(chunks, _map_chunks(chunks, workers), strict=True):
            for row in rows:
                by_query.setdefault(row.query, row)
            n_unparsed += n_failed
            bar.advance(task, sum(file.size for file in chunk))
    logger.info("harvested %d functions from %d files (%d did not parse)", len(by_query), len(files), n_unparsed)
    return list(by_query.values())


def _chunks(files: Iterable[_File]) -> Iterator[list[_File]]:
    """Runs of consecutive files of about `_CHUNK_BYTES` each: their results, in order, are in file order."""
    chunk: list[_File] = []
    size = 0
    for file in files:
        chunk.append(file)
        size += file.size
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _map_chunks(chunks: Sequence[list[_File]], workers: int) -> Iterator[tuple[list[Function], int]]:
    if workers == 1 or len(chunks) < 2:
        yield from map(_parse_chunk, chunks)
        return
    # Spawned, not forked: the caller may hold torch's threads and their locks.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(chunks)), mp_context=context, initializer=gc.disable)
    try:
        yield from pool.map(_parse_chunk, chunks)
    finally:
        pool.shutdown(cancel_futures=True)


def _parse_chunk(chunk: Sequence[_File]) -> tuple[list[Function], int]:
    """The functions of some files, and how many files did not parse."""
    rows = []
    n_failed = 0
    for file in chunk:
        text = Path(file.path).read_bytes()
        if b'"""' not in text and b"'''" not in text:  # no docstrings: skip the parse, which is the expensive part
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in other people's files
                tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            n_failed += 1
            continue
        for node, qualname in _definitions(tree, ""):
            query, summary = _query(node), _summary(node)
            if query is not None and summary is not None:
                rows.append(Function(file.source, file.module, qualname, node.name, query, summary))
    return rows, n_failed


def _definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Functions and methods in the order of their lines, also in `if`, `try` and `with`."""
    for field in ("body", "handlers", "orelse", "finalbody"):
        for node in getattr(tree, field, ()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node, prefix + node.name
            elif isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
                yield from _definitions(node, prefix)


def _query(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """The function's signature on one line and its docstring's opening quotes; None if the function is not usable."""
    if node.name.startswith("__") and node.name.endswith("__"):
        return None
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{keyword} {node.name}({ast.unparse(node.args)}){returns}:"
    query = f'{signature}\n    """'
    usable = signature.isascii() and signature.isprintable() and len(query) <= MAX_QUERY_CHARS
    return query if usable else None


def _summary(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """The first line of the function's docstring; None if there is no usable one."""
    docstring = ast.get_docstring(node, clean=False)
    if docstring is None:
        return None
    line, _, rest = inspect.cleandoc(docstring[:1000]).partition("\n")
    line = line.strip()
    if rest.partition("\n")[0].strip() or not MIN_SUMMARY_CHARS <= len(line) <= MAX_SUMMARY_CHARS:
        return None
    letters = sum(char.isalpha() or char == " " for char in line)
    if not line.isascii() or not line.isprintable() or letters < 0.8 * len(line) or " " not in line:
        return None
    return None if _NOT_PROSE.search(line) or _SIGNATURE.search(line) or '"""' in line else line


def _cache_key(files: Iterable[_File]) -> str:
    # The Python version counts because ast.unparse's text may change with it.
    key = hashlib.sha256(f"{FORMAT} {sys.version_info[:2]}".encode())
    for file in files:
        key.update("".join(f"\0{value}" for value in file).encode())
    return key.hexdigest()[:24]


def _write_cache(path: Path, functions: Sequence[Function]) -> None:
    lines = [json.dumps(function._asdict()) for function in functions]
    header = json.dumps({"functions": len(lines), "sha256": _checksum(lines)})
    _write_lines(path, [header, *lines])


def _read_cache(path: Path) -> list[Function] | None:
    """The cached functions, or None if there is no cache file or it is not what was written."""
    if not path.exists():
        return None
    header, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    if header != json.dumps({"functions": len(lines), "sha256": _checksum(lines)}):
        logger.warning("cache file %s is damaged; harvesting again", path)
        return None
    return [Function(**json.loads(line)) for line in lines]


def _checksum(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with whole_file(path) as file:
        file.writelines(f"{line}\n" for line in lines)


def run_data(config: DocstringsConfig) -> dict[str, float]:
    """Harvest functions, split them, and write the files of each split. Returns the number of functions in each."""
    stage = Stage(Path(config.out), "data", config, inputs={})
    if (results := stage.done()) is not None:
        return results
    functions = harvest(config.source or None)
    if config.max_functions is not None and len(functions) > config.max_functions:
        chosen = set(random.Random(config.seed).sample(range(len(functions)), config.max_functions))
        functions = [function for i, function in enumerate(functions) if i in chosen]
    splits = split(functions, seed=config.seed)
    for name, part in splits.items():
        if not part:
            raise ConfigError(
                f"source: got {config.source}, with {len(functions)} functions that have a one-line summary; must have "
                f"enough for every split, and {name} has none"
            )
    write_splits(splits, Path(config.out))
    results = {name: float(len(part)) for name, part in splits.items()}
    stage.publish_files({}, results)
    return results
