"""Every benchmark runs, at its smallest size, and prints what can be: no figure here says how fast anything is."""

from __future__ import annotations

import ast
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from printed import BENCHMARKS, columns, in_here, markdown, require

from async_rlhf.config.parsing import parse
from async_rlhf.generation import placement
from async_rlhf.run.config import RunConfig
from async_rlhf.tasks.docstrings.config import QuickstartConfig
from async_rlhf.tasks.docstrings.quickstart import stage_configs

TESTS = Path(__file__).parents[1]
PARTS = {"fake_rank", "machine", "smallest", "waiting", "waits", "workload"}
"""What benchmarks import: no benchmarks themselves."""
ELSEWHERE = {
    **dict.fromkeys(
        # Each starts processes, and takes ten seconds or more.
        (
            "episodes",
            "faults",
            "loading",
            "memory",
            "mutants",
            "pays",
            "peers",
            "publish",
            "waits_agents",
            "waits_environment",
            "waits_evaluation",
            "waits_publish",
            "waits_queue",
            "waits_rewards",
            "waits_shares",
        ),
        "benchmarks/test_own_processes.py",
    ),
    "gpu": "benchmarks/test_gpu_run_book.py",
}


@pytest.fixture
def run(monkeypatch, capsys):
    return partial(in_here, monkeypatch, capsys)


def test_every_benchmark_is_run_by_a_test():
    found = {path.stem for path in BENCHMARKS.glob("*.py")} - PARTS
    here = {node.value for node in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(node, ast.Constant)}
    assert found == {name for name in found if f"{name}.py" in here} | ELSEWHERE.keys()
    for name, file in ELSEWHERE.items():
        assert f'"{name}.py"' in (TESTS / file).read_text(), f"{file} does not run {name}.py"


def test_benchmarks_use_public_names_of_the_package_alone():
    """Those of torch and of the interpreter have no public names for what fake_rank.py does."""
    of_others = {"os._exit", "sys._getframe"}
    found = []
    for path in sorted(BENCHMARKS.glob("*.py")):
        tree = ast.parse(path.read_text())
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        bases = {node.asname or node.name for part in _imports(tree) for node in part.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                where = ast.unparse(node)
                mine = where.startswith(("self.", "cls.")) or node.attr in own
                if not mine and where not in of_others and path.stem != "fake_rank":
                    found.append(f"{path.name}:{node.lineno} {where}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("patch", "setattr", "getattr")):
                names = [one.value for one in node.args if isinstance(one, ast.Constant) and _is_private(one.value)]
                found += [f"{path.name}:{node.lineno} {name}" for name in [*names, *filter(_is_private, _keys(node))]]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("async_rlhf"):
                found += [f"{path.name}:{node.lineno} {one.name}" for one in node.names if _is_private(one.name)]
            elif isinstance(node, ast.ClassDef) and bases & {ast.unparse(base) for base in node.bases}:
                inner = [one.name for one in node.body if isinstance(one, ast.FunctionDef) and _is_private(one.name)]
                used = [one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and _is_private(one.attr)]
                found += [f"{path.name}:{node.lineno} {node.name}.{name}" for name in [*inner, *used]]
    assert not found


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name != "_"


def _imports(tree: ast.Module) -> list[ast.ImportFrom]:
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [node for node in froms if (node.module or "").startswith("async_rlhf")]


def _keys(call: ast.Call) -> list[str]:
    return [keyword.arg or "" for keyword in call.keywords]


def test_what_asynchrony_is_compared_with_is_the_fastest_run_in_turn(monkeypatch, tmp_path):
    """docs/decisions.md: all cores for each phase, in the placement that is faster."""
    monkeypatch.setattr(placement, "available_cores", lambda: 6)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "async_rlhf" / "recipes" / "smollm"))
    overlap, race, cpu = import_module("overlap"), import_module("race"), torch.device("cpu")
    before = torch.get_num_threads()
    asked: list[dict[str, Any]] = []
    times = dict.fromkeys(("batch", "generate", "score", "annotate", "train", "publish", "wait"), 1.0)
    done = SimpleNamespace(mean_times=lambda: times)
    monkeypatch.setattr(overlap, "train", lambda *given, **_: asked.append({**given[3], "learner": given[4]}) or done)
    overlap.measure(0, 4, 8)
    assert (asked[0]["placement"], asked[0]["num_threads"], asked[0]["learner"]["num_threads"]) == ("inline", None, 2)
    words = race.command("sums", 0, 3, tmp_path)
    runs = [parse(RunConfig, "train", [*words[4:], "--model", "m"])[0].train]
    runs.append(stage_configs(QuickstartConfig(out=str(tmp_path)))["synchronous"].train)
    for run in runs:
        assert (run.staleness, run.seed, run.bf16) in ((0, 3, True), (0, 0, "auto"))
        with placement.shared_cores(run, cpu) as threads:
            assert threads == (None if run.placement == "inline" else 6)
            assert torch.get_num_threads() == (before if run.placement == "inline" else 6)


def test_overlap(run):
    titles = ["wall", "generate", "train", "publish", "wait", "publish share", "efficiency", "speed-up"]
    rows = columns(run("overlap.py"), 14, titles)
    assert [row[""] for row in rows] == ["0", "1", "2"]
    for row in rows:
        for title in titles[:5]:
            require(row[title])
        require(row["publish share"], 0, 1)
        # Of 4 batches that count, 2 more may have been sampled before.
        require(row["efficiency"], 0, 1.5)
        require(row["speed-up"], 0.01)


@pytest.mark.rare
def test_overlap_waiting(run):
    """All of its parts: each must run to its end, and none may stop the next."""
    rows = columns(run("overlap.py", "--waiting"), 54, ["ours", "naive"])
    shares = {"the same: share of a batch within publish()", "lognormal lengths, S = 2: places that are busy"}
    names = {row[""] for row in rows}
    assert len(rows) == 6
    assert shares < names
    assert any("workers of speeds" in name for name in names)
    for row in rows:
        for title in ("ours", "naive"):
            require(row[title], 0 if row[""] in shares else 0.01, 1 if row[""] in shares else 1000)
        assert row["rest"].strip().startswith(("at most", "at least", "under"))


def test_waits_picture(run, tmp_path):
    run("waits_picture.py", str(tmp_path / "a.png"), "--traces", str(tmp_path / "traces"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        "everything_in_its_turn.json",
        "nobody_waits.json",
    }


def test_learner(run):
    titles = ["budget", "update", "bare", "ratio", "smallest", "largest", "padding", "peak"]
    (row,) = columns(run("learner.py", "--threads", "1"), 0, titles)
    for title in titles:
        require(row[title], 1e-3)
    require(row["padding"], 1)


def test_digests(run):
    out = run("digests.py")
    assert "8 samples of 20 tokens: 0." in out
    assert "states of random generators: 0." in out


def test_shared_tokens(run):
    """What a count says does not depend on the machine: 2 prompts of 8 tokens, with 2 answers each."""
    text, sampled = run("shared_tokens.py").split("sampling")
    titles = [
        "training",
        "shape",
        "tokens",
        "forest",
        "fewer",
        "bound",
        "padded",
        "ratio",
        "smallest",
        "largest",
        "part",
        "memory",
    ]
    (row,) = columns(text.replace("training", "training shape"), 0, titles)
    assert "neox" in sampled
    assert int(row["tokens"]) - int(row["forest"]) == 2 * 8
    assert 1 < float(row["bound"]) < float(row["fewer"])
    assert float(row["memory"]) > 1
    require(row["padded"], 1e-3)
    require(row["ratio"], 1e-3)


def test_generation(run):
    names = ["ours", "generate", "bare loop"]
    tables = markdown(run("generation.py", "--model", "llama", "--contestants", *names, "products"))
    assert len(tables) == 2
    for rows, known in zip(tables, ([*names, "products"], names), strict=True):
        assert [row[""] for row in rows] == known
        for row in rows:
            require(row["tokens/s"], 1)
            require(row["/ generate"].replace("-", " "), 0.01)
            require(row["/ bare loop"].replace("-", " "), 0.01)
