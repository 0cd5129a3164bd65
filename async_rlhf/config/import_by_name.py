"""Loads the user's own Python by name: "module:attribute" or "path/to/file.py:attribute"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from async_rlhf.config.base import ConfigError


def load_attribute(place: str, attribute: str, key: str, what: str) -> Any:
    """An attribute of a module.

    Args:
        place: the module's name, or the path of a file that ends in .py.
        attribute: its name there.
        key: of the configuration, for errors.
        what: the kind of thing, for errors, such as "function".

    Raises:
        ConfigError: there is no such module or file, it cannot be imported, or it has no such attribute.
    """
    if "" not in sys.path:
        sys.path.append("")  # an installed command does not import from the current folder; python -m does
    name = f"{place}:{attribute}"
    try:
        module = _module_from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, FileNotFoundError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f'{key}: got {name!r}: {error}; must be "module:{what}" or "path/to/file.py:{what}"'
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{key}: got {name!r}; {place} has no {what} {attribute!r}")
    return getattr(module, attribute)


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
