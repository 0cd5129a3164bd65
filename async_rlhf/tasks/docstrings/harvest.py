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
from async_rlhf.system.files import whole_file
from async_rlhf.system.progress import progress_bar
from async_rlhf.tasks.docstrings.config import DocstringsConfig

logger = logging.getLogger(__name__)

STDLIB = "stdlib"
PACKAGES = ("torch", "transformers", "numpy", "accelerate", "datasets", "huggingface_hub")
SHARES = {"train": 0.70, "preference": 0.15, "heldout": 0.15}
"""Of the names, by split."""
MAX_QUERY_CHARS = 200
MIN_SUMMARY_CHARS, MAX_SUMMARY_CHARS = 10, 100
_FEW_FILES = 1000
"""Up to so many, starting processes takes longer than parsing in this one."""

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
    """A function with a usable docstring."""

    name: str
    """Without its class and module."""
    query: str
    summary: str


def default_sources() -> list[str]:
    """The standard library and the installed ones of `PACKAGES`."""
    return [STDLIB, *(name for name in PACKAGES if importlib.util.find_spec(name) is not None)]


def harvest(sources: Sequence[str] = ()) -> list[Function]:
    """Functions with a one-line docstring summary: by source, file and line, and for each query only the first.

    Args:
        sources: names of installed top-level packages or modules, `"stdlib"` for the standard library, or paths (with a
            slash, or ending in `.py`) of files or folders; none for :func:`default_sources`.

    Raises:
        ConfigError: a source is none of these.
    """
    files = [path for source in sources or default_sources() for path in _files_of(source)]
    by_query: dict[str, Function] = {}
    unparsed = 0
    with progress_bar("harvest docstrings", len(files)) as progress:
        for done, functions in enumerate(_parsed(files), start=1):
            unparsed += functions is None
            for function in functions or ():
                by_query.setdefault(function.query, function)
            progress(done)
    logger.info("harvested %d functions from %d files (%d did not parse)", len(by_query), len(files), unparsed)
    return list(by_query.values())


def split(functions: Iterable[Function], seed: int) -> dict[str, list[Function]]:
    """Functions divided into `train`, `preference` and `heldout`, without leakage between them.

    All functions with the same bare name (case and leading underscores aside) fall into the same part, so
    no query and no override of a method is ever on both sides. A name's part depends only on `seed` and the
    name: adding functions moves none.
    """
    parts: dict[str, list[Function]] = {part: [] for part in SHARES}
    for function in functions:
        group = function.name.lstrip("_").casefold()
        digest = hashlib.sha256(f"{seed}:{group}".encode()).digest()
        position = int.from_bytes(digest[:8], "big") / 2**64
        train, preference, _ = SHARES.values()
        part = "train" if position < train else "preference" if position < train + preference else "heldout"
        parts[part].append(function)
    return parts


def write_splits(splits: Mapping[str, Sequence[Function]], folder: Path) -> None:
    """Write the stages' JSONL files, each whole and without end-of-sequence tokens."""
    layout = {
        "sft": ("train", ["query_reference_response"]),
        "rl": ("train", []),
        "preference_prompts": ("preference", ["reference_response"]),
        "heldout": ("heldout", ["query_reference_response", "reference_response"]),
    }
    for stem, (part, answers) in layout.items():
        with whole_file(folder / f"{stem}.jsonl") as file:
            file.writelines(json.dumps(_row(function, answers)) + "\n" for function in splits[part])


def _row(function: Function, answers: Sequence[str]) -> dict[str, str]:
    """A line of a file, with the summary in these columns."""
    texts = {"reference_response": function.summary, "query_reference_response": function.query + function.summary}
    return {"query": function.query, **{name: texts[name] for name in answers}, "name": function.name}


def _files_of(source: str) -> list[Path]:
    """The Python files of a source, sorted by their path in it."""
    root = _locate(source)
    return [root] if root.is_file() else sorted(_walk(root), key=lambda path: path.relative_to(root).as_posix())


def _locate(source: str) -> Path:
    """A source's file or folder."""
    rule = 'it must be an installed top-level package, "stdlib", or a path with a slash (./folder) or .py'
    if source == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    if "/" in source or os.sep in source or source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        if path.is_dir() or (path.is_file() and path.suffix == ".py"):
            return path
        raise ConfigError(f"source {source!r}: no such folder or .py file; {rule}")
    if not source.isidentifier():  # a dotted name would make find_spec import its parent
        raise ConfigError(f"source {source!r} is not a top-level name; {rule}")
    loaded = sys.modules.get(source)
    # find_spec raises for a module that was loaded without a spec, such as __main__
    spec = importlib.util.find_spec(source) if loaded is None else loaded.__spec__
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
        return Path(spec.origin)
    problem = "is not installed" if spec is None else "has no Python source"
    raise ConfigError(f"source {source!r} {problem}; {rule}")


def _walk(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [sub for sub in subfolders if sub not in _SKIPPED_FOLDERS and not sub.startswith(".")]
        for file in files:
            if file.endswith(".py") and not file.startswith("test_") and file != "conftest.py":
                yield Path(folder, file)


def _parsed(files: Sequence[Path]) -> Iterator[list[Function] | None]:
    """What :func:`_functions_of` says of each file."""
    if len(files) <= _FEW_FILES:
        yield from map(_functions_of, files)
        return
    # Spawned, not forked: the caller may hold torch's threads and their locks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=context, initializer=gc.disable) as pool:
        yield from pool.map(_functions_of, files, chunksize=100)


def _functions_of(path: Path) -> list[Function] | None:
    """The usable functions of a file; None if it does not parse."""
    text = path.read_bytes()
    if b'"""' not in text and b"'''" not in text:  # no docstrings: skip the parse, which is the expensive part
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    functions = []
    for node in _definitions(tree):
        if (summary := _summary(node)) and (query := _query(node)):
            functions.append(Function(node.name, query, summary))
    return functions


def _definitions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods in the order of their lines, also in `if`, `try` and `with`."""
    for field in ("body", "handlers", "orelse", "finalbody"):
        for node in getattr(tree, field, ()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node
            elif isinstance(node, (ast.ClassDef, ast.If, ast.Try, ast.With, ast.ExceptHandler)):
                yield from _definitions(node)


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


def run_data(config: DocstringsConfig) -> dict[str, float]:
    """Harvest functions, split them, and write the files of each split. Returns the number of functions in each."""
    stage = Stage(Path(config.out), "data", config, inputs={})
    if (results := stage.done()) is not None:
        return results
    functions = harvest(config.source)
    if config.max_functions is not None and len(functions) > config.max_functions:
        chosen = set(random.Random(config.seed).sample(range(len(functions)), config.max_functions))
        functions = [function for i, function in enumerate(functions) if i in chosen]
    splits = split(functions, config.seed)
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
