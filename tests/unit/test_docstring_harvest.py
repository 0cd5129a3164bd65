"""The docstring task's text: exact rows, fixed order, no leakage of splits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from tiny import json_rows

from async_rlhf.tasks.docstrings import harvest as docstring_harvest
from async_rlhf.tasks.docstrings.harvest import Function, default_sources, harvest, split, write_splits

MODULE = '''
class Store:
    """A class's own docstring is not taken."""

    def get_item(self, key: str, default=None) -> int:
        """Return the item of a key.

        More text.
        """

    async def fetch(self, *keys, timeout: float = 1.5):
        """Fetch the items of all keys"""
        def inner():
            """A nested function is not taken."""

    def __len__(self):
        """Return the number of items."""

    @property
    def size(self):
        \'\'\'The number of items.\'\'\'

if True:
    def _load(path): "Load a store from a file."

def get_item(self, key: str, default=None) -> int:
    """The same query again is dropped."""
'''
UNUSABLE = '''
def two_lines():
    """A summary that
    runs on."""

def short(): """Too few."""
def long(): """{long}"""
def doctest():
    """>>> doctest() + 1 is not text"""
def fields():
    """:param x: the only documented one"""
def directive():
    """.. deprecated since long ago"""
def title():
    """Parameters:"""
def signature(a, b):
    """signature(a, b, out=None) -> array"""
def accents():
    """Return the na\u00efve value."""
def wide({arguments}):
    """Return all the arguments."""
def nothing(): pass
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "shop"
    (root / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text('def version():\n    """Return the version as text."""\n')
    (root / "store.py").write_text(MODULE)
    arguments = ", ".join(f"argument_{number}" for number in range(20))
    (root / "unusable.py").write_text(UNUSABLE.format(long="long " * 25, arguments=arguments))
    (root / "broken.py").write_text('def broken(:\n    """Return what does not parse."""\n')
    (root / "tests" / "helper.py").write_text('def helper():\n    """Help the tests of the shop."""\n')
    (root / "test_shop.py").write_text('def helper():\n    """Help the tests of the shop."""\n')
    return root


def forbid_parsing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only spawned processes, which import the module anew, can still parse."""

    def parse(text: bytes) -> object:
        raise AssertionError("parsed in the calling process")

    monkeypatch.setattr(docstring_harvest.ast, "parse", parse)


def test_exact_rows_of_a_package(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        functions = harvest([str(package)])
    quotes = '\n    """'
    get_item = "def get_item(self, key: str, default=None) -> int:" + quotes
    fetch = "async def fetch(self, *keys, timeout: float=1.5):" + quotes
    assert functions == [
        Function("version", f"def version():{quotes}", "Return the version as text."),
        Function("get_item", get_item, "Return the item of a key."),
        Function("fetch", fetch, "Fetch the items of all keys"),
        Function("size", f"def size(self):{quotes}", "The number of items."),
        Function("_load", f"def _load(path):{quotes}", "Load a store from a file."),
    ]
    assert "harvested 5 functions from 4 files (1 did not parse)" in caplog.text


def test_processes_give_the_rows_of_one(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [str(package), "encodings", "email", "asyncio"]  # two tasks: an order to get wrong
    one = harvest(sources)
    monkeypatch.setattr(docstring_harvest, "_FEW_FILES", 1)
    forbid_parsing_here(monkeypatch)
    assert harvest(sources) == one
    assert len(one) > 100


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("no_such_package", "'no_such_package' is not installed"),
        ("json.decoder", "'json.decoder' is not a top-level name"),
        ("sys", "'sys' has no Python source"),
        ("./no_such_folder", "'./no_such_folder': no such folder or .py file"),
        ("missing.py", "'missing.py': no such folder or .py file"),
    ],
)
def test_unknown_source_is_named_with_what_would_be_right(source: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem + '.*must be an installed top-level package, "stdlib", or a path'):
        harvest([source])


def test_module_loaded_without_a_spec_has_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    with pytest.raises(ValueError, match="'made_by_hand' is not installed"):
        harvest(["made_by_hand"])


def test_default_sources_begin_with_the_standard_library() -> None:
    assert default_sources()[0] == "stdlib"
    assert set(default_sources()[1:]) <= set(docstring_harvest.PACKAGES)


def functions_named(names: Sequence[str]) -> list[Function]:
    return [
        Function(name, f'def {name}(x{number}):\n    """', f"Do the thing {number}.")
        for number, name in enumerate(names)
    ]


def test_split_keeps_a_name_in_one_part() -> None:
    names = [f"{prefix}run_{i}" for i in range(1000) for prefix in ("", "_", "__")] + [f"Run_{i}" for i in range(1000)]
    parts = split(functions_named(names), seed=3)
    groups = {part: {f.name.strip("_").casefold() for f in rows} for part, rows in parts.items()}
    assert not groups["train"] & groups["preference"]
    assert not groups["train"] & groups["heldout"]
    assert not groups["preference"] & groups["heldout"]
    assert [len(groups[part]) / 1000 for part in ("train", "preference", "heldout")] == pytest.approx(
        [0.70, 0.15, 0.15], abs=0.04
    )
    assert sum(map(len, parts.values())) == 4000


def test_split_depends_on_seed_and_name_alone() -> None:
    functions = functions_named([f"name_{i}" for i in range(300)])
    parts = split(functions, seed=1)
    assert split(functions, seed=1) == parts
    assert split(functions, seed=2) != parts
    for part, rows in split(functions[:100], seed=1).items():
        assert rows == [function for function in parts[part] if function in functions[:100]]
    # sha256("1:name_0") and so on: the same on every machine and in every process
    assert [f.name for f in parts["heldout"]][:4] == HELDOUT_OF_SEED_1


HELDOUT_OF_SEED_1 = ["name_14", "name_22", "name_29", "name_34"]


def test_written_files_have_their_fields(tmp_path: Path) -> None:
    train, preference, heldout = functions_named(["load", "save", "close"])
    parts = {"train": [train], "preference": [preference], "heldout": [heldout]}
    folder = tmp_path / "new" / "folder"
    write_splits(parts, folder)
    assert json_rows(folder / "sft.jsonl") == [
        {
            "query": 'def load(x0):\n    """',
            "query_reference_response": 'def load(x0):\n    """Do the thing 0.',
            "name": "load",
        }
    ]
    assert json_rows(folder / "rl.jsonl") == [{"query": 'def load(x0):\n    """', "name": "load"}]
    assert json_rows(folder / "preference_prompts.jsonl") == [
        {"query": 'def save(x1):\n    """', "reference_response": "Do the thing 1.", "name": "save"}
    ]
    assert json_rows(folder / "heldout.jsonl") == [
        {
            "query": 'def close(x2):\n    """',
            "query_reference_response": 'def close(x2):\n    """Do the thing 2.',
            "reference_response": "Do the thing 2.",
            "name": "close",
        }
    ]
    assert len(list(folder.iterdir())) == 4


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    parts = {"train": functions_named(["load"]), "preference": [], "heldout": []}
    write_splits(parts, tmp_path)
    before = (tmp_path / "sft.jsonl").read_text()
    broken = {**parts, "train": [*parts["train"], "not a function"]}
    with pytest.raises(AttributeError):
        write_splits(broken, tmp_path)  # type: ignore[arg-type]
    assert (tmp_path / "sft.jsonl").read_text() == before
    assert len(list(tmp_path.iterdir())) == 4
