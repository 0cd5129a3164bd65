"""The structure that the design promises: who imports whom, what importing costs, and how long a function may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import async_rlhf

PACKAGE = Path(async_rlhf.__file__).parent
FILES = {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}

# Lower layers first. A module may import its own layer and those below; docs/architecture.md draws the same.
LAYERS = [
    {"config", "system", "types"},
    {"algorithms", "distributed"},
    {"models"},
    {"data", "generation", "rewards"},
    {"learner"},
    {"run"},
    {"commands"},
    {"cli"},
    {"compat", "studies", "tasks"},  # found by name alone: see commands/table.py
]
ONLY_THESE_MAY_IMPORT = {
    "vllm": {"generation/vllm"},
    "ray": {"distributed/ray", "generation/ray", "rewards/ray"},
    "deepspeed": {"learner/strategies/deepspeed"},
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


def test_the_loop_knows_no_engine_and_algorithms_know_only_configurations_and_tensors():
    for name in ("run/loop.py", "run/schedule.py", "learner/learner.py"):
        modules = imports(FILES[PACKAGE / name])
        assert {m for m in modules if m.startswith("async_rlhf.generation")} <= {"async_rlhf.generation.protocol"}, name
    for path in (PACKAGE / "algorithms").glob("*.py"):
        modules = imports(FILES[path])
        known = {"__future__", "collections", "dataclasses", "importlib", "math", "re", "typing", "torch", "async_rlhf"}
        known |= {"functools", "pathlib"}
        assert {m.split(".")[0] for m in modules} <= known, path
        rooms = {room(m) for m in modules if m.startswith("async_rlhf.")}
        assert rooms <= {"algorithms", "config", "system", "types"}, path
    assert "async_rlhf.generation" not in {m[:21] for m in imports(FILES[PACKAGE / "learner" / "learner.py"])}


def test_heavy_extras_are_imported_where_they_are_used():
    for path, tree in FILES.items():
        place = str(path.relative_to(PACKAGE))
        for module in imports(tree):
            allowed = ONLY_THESE_MAY_IMPORT.get(module.split(".")[0])
            assert allowed is None or any(place.startswith(prefix) for prefix in allowed), f"{place} imports {module}"


def test_importing_the_package_loads_nothing_heavy():
    program = (
        "import sys, async_rlhf, async_rlhf.cli, async_rlhf.run.config, async_rlhf.rewards.reasoning_gym\n"
        "from async_rlhf.algorithms.table import built_in\nlist(built_in())\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'deepspeed', 'wandb', 'vl_convert', 'datasets'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_function_outgrows_its_reader():
    """How long a file may be is for its reader to say: one concern each."""
    large = [
        f"{path.name}:{node.lineno} {node.name}"
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= 60
    ]
    assert large == []


def test_every_file_of_tests_has_a_name_of_its_own():
    """They are imported by it alone: ``pytest tests`` refuses a second one."""
    names = [path.name for path in Path(__file__).parents[1].rglob("*.py") if path.name != "conftest.py"]
    assert [name for name in names if names.count(name) > 1] == []
