"""Which changes of a module's code its tests notice: mutation testing.

    python benchmarks/mutants.py                                # all modules, one process, at most 80 mutants each
    python benchmarks/mutants.py --modules run.schedule --most 1000 --jobs 2

A mutant is the package with one small change: a comparison, an operator, a constant, `and` or `or`, a `not`, what a
function returns, or one statement left out. Its tests run in a fork of a process that has torch and transformers
already, on a copy of the package, so that processes which a test starts see it too. A mutant that no test notices is
alive, unless mutants.json says why nothing can notice it. Results are kept: the same mutant is not run again, but one
that lived is once the tests have changed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from smallest import parse

ROOT = Path(__file__).resolve().parents[1]
_LISTS = json.loads(Path(__file__).with_suffix(".json").read_text())
TESTS: dict[str, str] = _LISTS["tests"]
"""What pytest is told for each module, with files below tests/. Where the files take minutes: their quick tests."""
EQUIVALENT: dict[str, str] = _LISTS["equivalent"]
"""Mutants that behave as the code does, or that no test can tell from it, by name, and why."""

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


class Mutant(NamedTuple):
    """A module with one change."""

    module: str
    name: str
    """Function, and the first line that differs, before and after: does not depend on the line's number."""
    source: str


def changes(node: ast.AST) -> Iterator[ast.AST | None]:
    """What may stand in the place of a node; None for nothing."""
    match node:
        case ast.Compare(ops=[first, *rest]):
            yield ast.Compare(node.left, [_COMPARISONS[type(first)](), *rest], node.comparators)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            yield ast.BinOp(left, _ARITHMETIC[type(operator)](), right)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Raise() | ast.Assert():
            yield ast.Pass()
        case ast.If():
            yield ast.If(ast.Constant(False), node.body, node.orelse)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Break() | ast.Continue():
            yield ast.Pass()


def mutants(module: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    tree = ast.parse((ROOT / "async_rlhf" / f"{module.replace('.', '/')}.py").read_text())
    before, found = ast.unparse(tree).splitlines(), dict[str, Mutant]()

    def visit(node: ast.AST, where: str) -> None:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params") or isinstance(node, ast.JoinedStr):
                continue
            for place, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(child, ast.AST):
                    continue
                names = isinstance(child, ast.FunctionDef | ast.ClassDef)
                inner = f"{where}.{child.name}".lstrip(".") if names else where
                if not (isinstance(child, ast.Expr) and ast.unparse(child).startswith("logger.")):  # no test reads logs
                    for other in changes(child):
                        _put(node, field, place, other)
                        source = ast.unparse(ast.fix_missing_locations(tree))
                        _put(node, field, place, child)
                        pairs = zip(before, source.splitlines(), strict=False)
                        old, new = next((old.strip(), new.strip()) for old, new in pairs if old != new)
                        name = f"{inner}: {old} -> {new}"
                        found[name] = Mutant(module, name, source)
                    visit(child, inner)

    visit(tree, "")
    return list(found.values())


def _put(node: ast.AST, field: str, place: int | None, child: Any) -> None:
    if place is None:
        setattr(node, field, child)
    else:
        getattr(node, field)[place] = child


class Runs:
    """Tests of mutants, in forks, each with a copy of the package."""

    def __init__(self, jobs: int) -> None:
        self.copies = [Path(tempfile.mkdtemp(prefix="mutants-")) for _ in range(jobs)]
        for copied in self.copies:
            shutil.copytree(ROOT / "async_rlhf", copied / "async_rlhf")
        self.free, self.running = list(self.copies), {}

    def start(self, mutant: Mutant | None, module: str, seconds: float) -> None:
        """Start the tests of a mutant; None for those of the code as it is."""
        where = self.free.pop()
        inside = f"async_rlhf/{module.replace('.', '/')}.py"
        original = (ROOT / inside).read_text()
        (where / inside).write_text(original if mutant is None else mutant.source)
        for compiled in (where / inside).parent.glob(f"__pycache__/{Path(inside).stem}.*"):
            compiled.unlink()
        if (pid := os.fork()) == 0:
            _test(where, module)
        self.running[pid] = mutant, where, time.monotonic() + seconds, original, inside

    def wait(self) -> tuple[Mutant | None, str]:
        """The next one that ends: whether its tests "passed", "failed" or were "late"."""
        while True:
            for pid, (mutant, where, end, original, inside) in list(self.running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                late = time.monotonic() > end
                if ended or late:
                    os.killpg(pid, signal.SIGKILL) if late and not ended else _end_children(pid)
                    if not ended:
                        os.waitpid(pid, 0)
                    del self.running[pid]
                    (where / inside).write_text(original)
                    self.free.append(where)
                    return mutant, "late" if not ended else "failed" if status else "passed"
            time.sleep(0.02)

    def close(self) -> None:
        """Delete the copies."""
        for copied in self.copies:
            shutil.rmtree(copied, ignore_errors=True)


def _end_children(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _test(where: Path, module: str) -> None:
    """In the fork: run the tests with the copy of the package, and end with pytest's exit code."""
    import pytest

    os.setpgid(0, 0)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.environ["PYTHONPATH"] = str(where)
    sys.path.insert(0, str(where))
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    tests = [str(ROOT / "tests" / word) if ".py" in word else word for word in shlex.split(TESTS[module])]
    code = 3
    try:
        import async_rlhf

        assert str(async_rlhf.__file__).startswith(str(where))
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *tests]))
        loaded = {name: str(getattr(module, "__file__", "")) for name, module in list(sys.modules.items())}
        of_others = [name for name, file in loaded.items() if "site-packages" in file]
        (where / "imported.json").write_text(json.dumps(of_others))
    finally:
        os._exit(code)


def _import_what_tests_import(copied: Path) -> None:
    """Import the libraries that the last tests did: the next forks have them."""
    for name in json.loads((copied / "imported.json").read_text()):
        with suppress(Exception):
            importlib.import_module(name)
    assert threading.active_count() == 1  # a fork would be without the others, and might wait for them


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modules", nargs="*", default=list(TESTS), choices=list(TESTS))
    parser.add_argument("--most", type=int, default=80, help="mutants of a module, evenly spread")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    chosen = parse(parser, modules=["run.schedule"], most=1)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if chosen.results.exists():
        known = {(r["mutant"], r["tests"]): r["killed"] for r in map(json.loads, chosen.results.open())}
    runs, table, living = Runs(chosen.jobs), [], []
    try:
        for module in chosen.modules:
            every = mutants(module)
            count = min(len(every), chosen.most)
            some = [every[i * len(every) // count] for i in range(count)]
            words = shlex.split(TESTS[module])
            files = dict.fromkeys(word.partition("::")[0] for word in words if ".py" in word)
            tests = _digest(*words, *[(ROOT / "tests" / file).read_text() for file in files])
            keys = {mutant.name: _digest(mutant.source) for mutant in some}
            result = {m.name: True for m in some if any(k[0] == keys[m.name] and killed for k, killed in known.items())}
            result |= {m.name: False for m in some if known.get((keys[m.name], tests)) is False}
            open_ = [m for m in some if m.name not in result and f"{module}: {m.name}" not in EQUIVALENT]
            if open_:
                began = time.monotonic()
                runs.start(None, module, 1200)
                if runs.wait()[1] != "passed":
                    sys.exit(f"the tests of {module} fail without any change: {TESTS[module]}")
                _import_what_tests_import(runs.free[-1])
                limit = 10 + 3 * (time.monotonic() - began)
            while open_ or runs.running:
                while open_ and runs.free:
                    runs.start(open_.pop(0), module, limit)
                mutant, how = runs.wait()
                assert mutant is not None
                result[mutant.name] = how != "passed"
                with chosen.results.open("a") as file:
                    line = {"module": module, "name": mutant.name, "mutant": keys[mutant.name], "tests": tests}
                    file.write(json.dumps({**line, "killed": how != "passed", "how": how}) + "\n")
            alive = [name for name, killed in result.items() if not killed]
            same = sum(f"{module}: {m.name}" in EQUIVALENT for m in some)
            table.append((module, f"{len(some)} of {len(every)}", sum(result.values()), same, len(alive)))
            living += [f"{module}: {name}" for name in alive]
            print(*table[-1], flush=True)
    finally:
        runs.close()
    print("\n| module | mutants | killed | equivalent | alive |\n|---|---|---|---|---|")
    for row in table:
        print("|", " | ".join(map(str, row)), "|")
    print("", *living, sep="\n")


if __name__ == "__main__":
    main()
