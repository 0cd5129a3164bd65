"""Every process whose environment has SIMULATED_MACHINE gets its GPUs as soon as it imports torch."""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class _AfterTorch(Loader):
    """Loads torch, then gives it the GPUs."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import simulated_machine  # noqa: F401  # which does it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _AfterTorch(spec.loader)
        return spec


if "SIMULATED_MACHINE" in os.environ:
    sys.path += [str(folder) for folder in Path(__file__).parents[1:3]]
    sys.meta_path.insert(0, _Finder())
