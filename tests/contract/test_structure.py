"""The structure that the design promises: who imports whom, what importing costs, and that every key is read."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import async_rlhf
from async_rlhf.config import (
    algorithms,
    base,
    evaluation,
    generation,
    online,
    parallel,
    plan,
    quickstart,
    ray,
    rewards,
    run,
    stages,
)

PACKAGE = Path(async_rlhf.__file__).parent
FILES = {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}

# Lower layers first. A module may import its own layer and those below; docs/architecture.md draws the same.
LAYERS = [
    {"children", "files", "config", "doors", "lock", "ranks", "signals", "types"},
    {"lora", "objectives", "parallel", "rewards", "rows"},
    {"weights"},
    {"algorithms", "forward", "models", "random_state", "reports"},
    {"data", "scoring", "generation"},
    {"checkpoint", "choices", "launch", "learner", "manifest", "monitor", "run_folder", "schedule", "stage"},
    {"callbacks"},
    {"wiring"},
    {"trainer"},
    {"trainers"},
    {"evaluation", "planning"},
    {"stages"},
    {"quickstart"},
    {"cli"},
]
ONLY_THESE_MAY_IMPORT = {
    "vllm": {"generation/vllm"},
    "ray": {"launch/ray"},
    "deepspeed": {"launch/deepspeed"},
    "reasoning_gym": {"rewards/reasoning_gym"},
}


def room(module: str) -> str:
    """The file or folder directly below the package that a module is in."""
    return module.split(".")[1]


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_imports_go_downward():
    layer = {name: number for number, names in enumerate(LAYERS) for name in names}
    upward = []
    for path, tree in FILES.items():
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for module in imports(tree):
            if module.startswith("async_rlhf.") and layer[room(module)] > layer[here]:
                upward.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert upward == []


def test_the_loop_knows_no_engine_and_objectives_know_only_tensors():
    for name in ("trainer.py", "schedule.py", "learner.py", "algorithms.py"):
        modules = imports(FILES[PACKAGE / name])
        assert {m for m in modules if m.startswith("async_rlhf.generation")} <= {"async_rlhf.generation.protocol"}, name
    for path in (PACKAGE / "objectives").glob("*.py"):
        known = {"__future__", "math", "typing", "torch", "async_rlhf"}
        assert {m.split(".")[0] for m in imports(FILES[path])} <= known, path
        assert {m for m in imports(FILES[path]) if m.startswith("async_rlhf")} <= {"async_rlhf.types"}
    assert "async_rlhf.generation" not in {m[:21] for m in imports(FILES[PACKAGE / "learner.py"])}


def test_heavy_extras_are_imported_where_they_are_used():
    for path, tree in FILES.items():
        place = str(path.relative_to(PACKAGE))
        for module in imports(tree):
            allowed = ONLY_THESE_MAY_IMPORT.get(module.split(".")[0])
            assert allowed is None or any(place.startswith(prefix) for prefix in allowed), f"{place} imports {module}"


def test_importing_the_package_loads_nothing_heavy():
    program = (
        "import sys, async_rlhf, async_rlhf.config, async_rlhf.cli, async_rlhf.rewards.reasoning_gym\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'deepspeed', 'wandb', 'matplotlib', 'datasets'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


CONFIGS = [
    kind
    for module in (generation, online, parallel, algorithms, run, stages, rewards, evaluation, quickstart, plan, ray)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, base.Checked) and kind.__module__ == module.__name__
]


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_configuration_field_is_read_and_documented(kind):
    """Read outside the configuration, as an attribute or by a derived property that is; and explained to the user."""
    outside = [tree for path, tree in FILES.items() if "config" not in path.relative_to(PACKAGE).parts]
    read = {node.attr for tree in outside for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    properties = {
        node.name: {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and "config" in path.relative_to(PACKAGE).parts
    }
    for _ in range(3):  # properties of properties
        read |= {name for derived, names in properties.items() if derived in read for name in names}
    documented = "\n".join(parent.__doc__ or "" for parent in kind.__mro__)
    for item in dataclasses.fields(kind):
        assert item.name in read, f"{kind.__name__}.{item.name} is read nowhere"
        assert f"        {item.name}: " in documented, f"{kind.__name__}.{item.name} is not documented"


def test_no_function_outgrows_its_reader():
    """How long a file may be is for its reader to say: one concern each."""
    large = [
        f"{path.name}:{node.lineno} {node.name}"
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= 60
    ]
    assert large == []
