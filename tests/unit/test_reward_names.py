"""Functions by name, with arguments: what configurations may say, what is called, and what counts as another."""

from __future__ import annotations

import importlib
import sys

import cloudpickle
import pytest
import yaml
from tiny import call_reward_function

from async_rlhf.cli import main
from async_rlhf.commands.stage import fingerprint
from async_rlhf.config import ConfigError, PairsConfig
from async_rlhf.config.rewards import FunctionName
from async_rlhf.rewards.functions import load_reward_functions


@pytest.mark.parametrize(
    ("name", "place", "attribute", "arguments"),
    [
        ("a.b:c", "a.b", "c", None),
        ("a/b.py:c", "a/b.py", "c", None),
        ("a:c()", "a", "c", {}),
        ("a:c(n=3, x=-0.5, flag=True, none=None)", "a", "c", {"n": 3, "x": -0.5, "flag": True, "none": None}),
        ("a:c(text='d:e(f=1)', items=[1, (2, {'k': 3})])", "a", "c", {"text": "d:e(f=1)", "items": [1, (2, {"k": 3})]}),
        (r"a:c(pattern='\\d+')", "a", "c", {"pattern": r"\d+"}),
        (r"a:c(pattern=r'\d+')", "a", "c", {"pattern": r"\d+"}),
        (r"a:c(pattern='\d+')", "a", "c", {"pattern": r"\d+"}),
        ("a:c(\n  n=1,\n)", "a", "c", {"n": 1}),
        (r"C:\my (own)\r.py:c", r"C:\my (own)\r.py", "c", None),
        ("my (own)/r.py:c(n=1)", "my (own)/r.py", "c", {"n": 1}),
    ],
)
def test_names_of_functions(name, place, attribute, arguments):
    assert FunctionName.parse(name, "reward_funcs") == FunctionName(place, attribute, arguments)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("function", "must be"),
        ("a:", "must be"),
        (":c", "must be"),
        ("a:3", "must be"),
        ("a:c(", "must be"),
        ("a:c(3)", "arguments need their names"),
        ("a:c(**{'n': 1})", r"\*\* is not possible"),
        ("a:c(n=open('x'))", "malformed node"),
        ("a:c(n=x)", "malformed node"),
        ("a:c(n=1)(m=2)", "more than one pair"),
        ("a:c(n=1, n=2)", "n is given twice"),
        ("a:c(n=)", "invalid syntax|expected"),
    ],
)
def test_names_that_are_none(name, reason):
    with pytest.raises(ConfigError, match=rf"^reward_funcs: got .*{reason}") as error:
        PairsConfig(model="m", prompts="p", output="o", reward_funcs=[name])
    assert '"module:function"' in str(error.value)


def test_functions_with_arguments(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def fixed(value, text=''):\n"
        "    def reward(prompts, completions, **columns):\n"
        "        return [value + len(text)] * len(completions)\n"
        "    return reward\n"
        "def refuses(value):\n    raise ValueError('no such value')\n"
        "def nothing():\n    pass\n"
    )
    names = [
        f"{file}:fixed(value=2, text='a:b')",
        "async_rlhf.rewards:numeric_answer",
        "async_rlhf.rewards:regex(pattern='o')",
    ]
    functions = load_reward_functions(names)
    assert [call_reward_function(function, ["p"], ["two 2"], {"answer": [2]})[0] for function in functions] == [5, 1, 1]
    for call, message in {
        "fixed(limit=3)": "unexpected keyword argument 'limit'; a name with arguments calls a factory",
        "refuses(value=1)": "no such value; a name with arguments",
        "nothing()": "called with these arguments it must return a function, not None",
        "absent(value=1)": "has no function 'absent'",
    }.items():
        with pytest.raises(ConfigError, match=r"^reward_funcs: got ") as error:
            load_reward_functions([f"{file}:{call}"])
        assert message in str(error.value)
    with pytest.raises(ConfigError, match="tolerance: got 'big'; must be a finite number"):
        load_reward_functions(["async_rlhf.rewards:numeric_answer(tolerance='big')"])


def test_arguments_count_for_the_fingerprint(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("fixed = 1\n")
    first = fingerprint(f"{file}:fixed(n=1)")
    assert first.startswith("fixed(n=1) in xxh3:")
    assert fingerprint(f"{file}:fixed(n=2)") != first
    file.write_text("fixed = 2\n")
    assert fingerprint(f"{file}:fixed(n=1)") != first
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__.py", "part.py"):
        (package / name).write_text("")
    before = fingerprint(f"{package / '__init__.py'}:f")
    (package / "part.py").write_text("changed = 1")
    assert fingerprint(f"{package / '__init__.py'}:f") != before
    assert fingerprint("async_rlhf.rewards:regex(pattern=r'a:b')").startswith("regex(pattern=r'a:b') in xxh3:")
    assert fingerprint("my-org/data:main") == "my-org/data:main"


@pytest.mark.parametrize("command", ["train", "pairs", "relabel", "evaluate"])
def test_reward_is_short_for_reward_funcs(command, capsys):
    needed = {
        "train": ["--model", "m", "--data.train", "d", "--reward_model", "r"],
        "pairs": ["--model", "m", "--prompts", "d", "--output", "o"],
        "relabel": ["--data", "d", "--output_dir", "o"],
        "evaluate": ["--models", "{a: m}", "--data", "d", "--output_dir", "o"],
    }
    with pytest.raises(SystemExit) as end:
        main([command, *needed[command], "--reward", "mine.py:f", "--reward=a:b(pattern='=--reward')", "--dry-run"])
    assert end.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["reward_funcs"] == ["mine.py:f", "a:b(pattern='=--reward')"]


# Files of the user's


def written(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def value_of(path, attribute="f"):
    return call_reward_function(load_reward_functions([f"{path}:{attribute}"])[0], ["p"], ["c"], {})[0]


FIXED = "def f(completions, **columns):\n    return [{value}] * len(completions)\n"


@pytest.mark.parametrize("name", ["statistics", "numpy", "tiny", "__main__", "sys", "my-rewards", "a.b", "ctypes"])
def test_a_file_takes_the_place_of_no_module(tmp_path, name):
    """Of the standard library, installed, of a test, or without a file; imported already or not."""
    before = dict(sys.modules)
    path = written(tmp_path / f"{name}.py", FIXED.format(value=2.0))
    assert value_of(path) == 2
    assert {known: sys.modules.get(known) for known in before} == before
    assert importlib.import_module("statistics").mean([1, 3]) == 2
    (function,) = load_reward_functions([f"{path}:f"])
    assert function.__code__.co_filename == str(path)
    assert cloudpickle.loads(cloudpickle.dumps(function))(completions=["c"]) == [2.0]


def test_files_of_one_name_are_two_modules_and_a_file_is_one_until_it_changes(tmp_path):
    paths = [written(tmp_path / folder / "same.py", FIXED.format(value=v)) for v, folder in enumerate("ab")]
    assert [*map(value_of, paths), *map(value_of, paths)] == [0, 1, 0, 1]
    first, second = ([load_reward_functions([f"{path}:f"])[0] for path in paths] for _ in range(2))
    assert first == second
    written(paths[1], FIXED.format(value=2))
    assert [*map(value_of, paths)] == [0, 2]


def test_a_file_finds_those_beside_it_wherever_it_is(tmp_path, monkeypatch):
    """They see the same module, too; in a function that is called later as well."""
    monkeypatch.chdir("/")
    helper = "from mine_of_three import KEPT\nkept = KEPT\ndef give():\n    import later_of_three\n"
    written(tmp_path / "helper_of_three.py", f"{helper}    return later_of_three.x\n")
    written(tmp_path / "later_of_three.py", "x = 3.0\n")
    text = "KEPT = []\nimport helper_of_three\ndef f(completions, **columns):\n"
    text += "    assert helper_of_three.kept is KEPT\n    return [helper_of_three.give()] * len(completions)\n"
    assert value_of(written(tmp_path / "mine_of_three.py", text)) == 3


def test_a_file_finds_those_beside_it_although_others_have_their_names(tmp_path):
    paths = []
    for number, folder in enumerate("aba"):
        written(tmp_path / folder / "beside.py", f"value = {folder!r}")
        text = "import beside\n" + FIXED.format(value="float(ord(beside.value))")
        paths.append(written(tmp_path / folder / f"mine_{number}.py", text))
    assert [*map(value_of, paths), *map(value_of, paths)] == [97, 98, 97, 97, 98, 97]


def test_a_file_that_cannot_be_imported_leaves_no_half_module(tmp_path):
    path = written(tmp_path / "half_a_module.py", "import no_such_module_at_all\n")
    with pytest.raises(ConfigError, match="No module named 'no_such_module_at_all'"):
        value_of(path)
    assert "half_a_module" not in sys.modules
    assert value_of(written(path, FIXED.format(value=4.0))) == 4
