"""Functions by name, with arguments: what configurations may say, what is called, and what counts as another."""

from __future__ import annotations

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
