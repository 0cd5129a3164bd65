"""How large the house may be: lines of pure code, names at the top level, configuration keys; and no circles."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import async_rlhf

PACKAGE = Path(async_rlhf.__file__).parent
TESTS = Path(__file__).parents[1]
CORE, WHOLE, TESTED, NAMES, KEYS = 25_187, 31_944, 41232, 16, 463
"""Each rises only with a feature, by what that feature needs."""
PROGRAMS = 4_030
"""Of benchmarks/ and scripts/."""
SECONDS = 420
"""Of processor time that ``make test`` may take: four minutes on two cores."""
FOLDERS = "benchmarks", "scripts"
ABOVE_THE_CORE = ("studies", "compat", "tasks")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def lines(path: Path) -> int:
    """Of pure code: without comments, blank lines, docstrings and the texts of keys."""
    source = path.read_text(encoding="utf-8")
    code = {n for n, line in enumerate(source.split("\n"), 1) if line.strip() and not line.lstrip().startswith("#")}
    texts = set[int]()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):  # one of several lines may have any lines
            code |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(code - texts)


def test_lines():
    rooms: dict[str, int] = defaultdict(int)
    for path in PACKAGE.rglob("*.py"):
        rooms[path.relative_to(PACKAGE).parts[0]] += lines(path)
    told = dict(sorted(rooms.items(), key=lambda room: -room[1]))
    assert sum(n for room, n in rooms.items() if room not in ABOVE_THE_CORE) <= CORE, told
    assert sum(rooms.values()) <= WHOLE, told
    assert sum(map(lines, TESTS.rglob("*.py"))) <= TESTED
    programs = {path.name: lines(path) for name in FOLDERS for path in (TESTS.parent / name).rglob("*.py")}
    assert sum(programs.values()) <= PROGRAMS, programs


def test_the_seconds_of_the_first_tier():
    """Of ``make test``, added over its processes, as they were recorded last."""
    found = json.loads((TESTS / "durations.json").read_text(encoding="utf-8"))
    assert found["others"] + sum(found["slow"][name] for name in found["quick"]) <= SECONDS


def test_names_at_the_top_level():
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert len(names - {"__init__"}) <= NAMES


def keys(trees: Iterable[ast.Module]) -> int:
    """Definitions of keys in Checked and every class that is derived from it, at whatever distance. A key that a class
    defines again, with a type, counts again; another default alone, ``name = key(value)``, is no definition.
    """
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = [(one, {ast.unparse(base) for base in one.bases}) for one in classes]
    found = {"Checked"}
    while more := {one.name for one, above in bases if found & above} - found:
        found |= more
    own = (child for one, above in bases if found & above for child in one.body)
    return sum(isinstance(child, ast.AnnAssign) and "ClassVar" not in ast.unparse(child.annotation) for child in own)


def test_configuration_keys():
    assert keys(parsed(path) for path in PACKAGE.rglob("*.py")) <= KEYS


def test_keys_of_a_derived_class_count():
    text = "class A(Checked):\n a: int = 0\nclass B(A, C):\n b: int = 0\n a: int = 1\nclass C:\n c: int = 0"
    text += "\nclass D(A):\n a = 2\n d: ClassVar[int] = 0"
    assert keys([ast.parse(text)]) == 3


def imports_of(path: Path, files: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                module if (module := f"{node.module}.{name.name}") in files else node.module for name in node.names
            }
    return found & files


def circles(edges: dict[str, set[str]]) -> set[str]:
    """Nodes that can be reached from themselves."""
    reached = {one: set(others) for one, others in edges.items()}
    changed = True
    while changed:
        changed = False
        for others in reached.values():
            more = set().union(*(reached.get(other, set()) for other in others)) - others
            others |= more
            changed |= bool(more)
    return {one for one, others in reached.items() if one in others}


def test_no_file_and_no_folder_imports_itself_by_way_of_others():
    paths = {
        ".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p
        for p in PACKAGE.rglob("*.py")
    }
    files = {name: imports_of(path, set(paths)) for name, path in paths.items()}
    rooms: dict[str, set[str]] = defaultdict(set)
    for name, others in files.items():
        rooms[name.split(".")[1] if "." in name else ""] |= {o.split(".")[1] for o in others if "." in o}
    assert circles({room: others - {room} for room, others in rooms.items()}) == set()
    assert circles(files) == set()


def test_a_circle_would_be_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}
