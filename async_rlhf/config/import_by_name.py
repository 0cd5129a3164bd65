"""Loads the user's own Python by name: "module:attribute" or "path/to/file.py:attribute"."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from xxhash import xxh32_hexdigest

from async_rlhf.config.base import ConfigError


def load_attribute(source: str, attribute: str, key: str, what: str) -> Any:
    """An attribute of a module.

    Args:
        source: the module's name, or the path of a file that ends in .py.
        attribute: its name there.
        key: of the configuration, for errors.
        what: the kind of thing, for errors, such as "function".

    Raises:
        ConfigError: there is no such module or file, it cannot be imported, or it has no such attribute.
    """
    if "" not in sys.path:
        sys.path.append("")  # an installed command does not import from the current folder; python -m does
    name = f"{source}:{attribute}"
    try:
        module = _module_from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except SystemExit as error:  # else the command would end, perhaps with status 0, before it has done anything
        raise ConfigError(f"{key}: got {name!r}, which calls sys.exit() when it is imported; must not") from error
    except (ImportError, FileNotFoundError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f'{key}: got {name!r}: {error}; must be "module:{what}" or "path/to/file.py:{what}"'
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{key}: got {name!r}; {source} has no {what} {attribute!r}")
    return getattr(module, attribute)


_LOADED: dict[Path, tuple[bytes, ModuleType]] = {}
"""Files that were imported, as they were then."""


def _module_from_file(path: Path) -> ModuleType:
    """The module of a file: the same one until the file changes. It takes the place of no other module, and finds the
    files beside it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    path = path.resolve()
    source = path.read_bytes()
    if path in _LOADED and _LOADED[path][0] == source:
        return _LOADED[path][1]
    name = _own_name(path)
    if path not in _LOADED and name in sys.modules:  # another file has imported it
        return sys.modules[name]
    _show_neighbours(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # its name ends in .py
    module, before = importlib.util.module_from_spec(spec), sys.modules.get(name)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        exec(compile(source, path, "exec"), module.__dict__)  # not what an older file was compiled to
    except BaseException:
        sys.modules.pop(name) if before is None else sys.modules.update({name: before})
        raise
    _LOADED[path] = source, module
    return module


def _own_name(path: Path) -> str:
    """The file's name where nothing else has it, as whatever imports that name means this file; else one like it."""
    name = path.stem.replace(".", "_")
    return name if _found_as(name) in (None, path) else f"{name}_{xxh32_hexdigest(bytes(path))}"


def _found_as(name: str) -> Path | None:
    """The file that is imported by a name, or already has been; None if there is no such module. The path "" is one
    that has no file.
    """
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except ValueError:  # such as the program itself, which has no spec
        return Path()
    return None if spec is None else Path() if spec.origin is None else Path(spec.origin).resolve()


def neighbours(path: Path) -> list[Path]:
    """The files in the folder of a file of the user's that it imports, and those that these import, by their text: it
    does not depend on what is loaded.
    """
    files, left = list[Path](), [path]
    while left:
        for near in _imported_from(left.pop()):
            if near not in (path, *files):
                files.append(near)
                left.append(near)
    return sorted(files)


def _imported_from(path: Path) -> list[Path]:
    names = set[str]()
    try:
        tree: ast.AST = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError):  # who imports it is told
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
    return [near for name in names if (near := path.parent / f"{name}.py").is_file()]


def _show_neighbours(path: Path) -> None:
    """See that its imports find what is in its folder: before other such folders, and behind everything else, so that
    nothing there hides a module.
    """
    folder, others = str(path.parent), [str(known.parent) for known in _LOADED]
    if folder not in sys.path or folder in others:
        sys.path.insert(
            min([sys.path.index(other) for other in others if other in sys.path] or [len(sys.path)]), folder
        )
    importlib.invalidate_caches()
    for near in map(Path.resolve, _imported_from(path)):
        file = _found_as(near.stem)
        if file is not None and file != near and str(file.parent) in others:
            del sys.modules[near.stem]  # what has imported it keeps it
