"""Whatever is in a YAML file, on a command line or in a row of data: a valid configuration, or one clear error."""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import each

from async_rlhf.commands.table import COMMANDS, import_attribute
from async_rlhf.compat.original import parse_either
from async_rlhf.config import ConfigError
from async_rlhf.config.base import Checked
from async_rlhf.config.parsing import parse
from async_rlhf.config.yaml_text import MAX_ALIASES, MAX_CHARACTERS, parse_yaml
from async_rlhf.data.formats import RowReader, first_words
from async_rlhf.data.held_out import hold_out
from async_rlhf.data.loading import load_rows
from async_rlhf.data.ratings import read_ratings
from async_rlhf.run.config import RunConfig

SECONDS = 20.0  # of a case, on a machine with much else to do; one takes some 30 ms
RECIPES = Path(__file__).parents[2] / "recipes"
SEEDS = {
    "train": "model: m\nreward_funcs: [a:b]\ndata: {train: d.jsonl}\ntrain: {staleness: 1, output_dir: out}\n",
    "sft": "train: d.jsonl\noutput_dir: out\nlora: {rank: 4}\n",
    "reward": "train: d.jsonl\noutput_dir: out\nmodel: m\n",
    "pairs": "model: m\nprompts: d.jsonl\noutput: p.jsonl\nreward_model: r\n",
    "relabel": "data: d.jsonl\noutput_dir: out\nreward_funcs: [a:b]\nsplits: [train]\n",
    "generate": "models: {a: b}\ndata: d.jsonl\noutput_dir: out\n",
    "evaluate": "models: {a: b}\ndata: d.jsonl\noutput_dir: out\nreward_model: r\n",
    "plan": "seconds: {generate: 1.0, score: 1.0, train: 2.0}\ndevices: 2\n",
    "data": "out: out\nseed: 1\n",
    "quickstart": "out: out\nscale: 0.5\n",
    "serve": "model: m\noptions: {a: 1}\n",
    "explain": "run: out\nbatch: 3\n",
    "report": "runs: [a, b]\nout: a.html\n",
}
ORIGINAL = (
    "sft_model_path: a\nreward_model_path: b\ntotal_episodes: 64\nlearning_rate: 1e-5\noutput_dir: out\n"
    "loss_type: sigmoid\ndataset_name: d.jsonl\n"
)
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(9)
)
VALUES = [
    "1:30", "010", "0x1F", "1_000", "2024-01-01", "2024-01-01 10:00:00", "1e999", "-1e999", ".nan", ".inf", "1e-400",
    "4e30", "1000000", "1e300", "1e30", "-1", "0", "null", "~", "yes", "[ppo]", "{a: b}", "[]", "{}", '""', "9" * 5000,
    "9" * 30, "/dev/null", "x" * 5000, '"a\\0b"', '"\\ud800"', "!!python/object:os.system x", "!!binary aGk=",
    "!!set {a}", "&a [*a]", "*nowhere", "&x y", "[" * 50 + "]" * 50, "{a: " * 500, "!!int x", "!!float []",
    "!!timestamp x", "<<: *x", "'", '"', "- a", "? a", "%YAML 9.9", "---", "...", "@", "`", "\t", "é", "\u2028",
    "a: b: c", "{1: 2}", "{[]: 1}", "=", "<<", "true", "server", "vllm", "ray", "bounded", "ppo", "grpo", "http://[",
    "http://a:99999999", "cuda:99999999999999", "async_rlhf.rewards:regex(pattern='(')",
    f"a:b(c={'(' * 300}{')' * 300})", f"a:b(c={'9' * 5001})", "a:b()()", "-",
]  # fmt: skip


def all_keys() -> dict[str, list[str]]:
    """Every dotted key of every command."""

    def keys(kind, prefix=""):
        for item in fields(kind):
            hint = get_type_hints(kind)[item.name]
            yield f"{prefix}{item.name}"
            if isinstance(hint, type) and issubclass(hint, Checked):
                yield from keys(hint, f"{prefix}{item.name}.")

    found = {name: list(keys(import_attribute(COMMANDS[name].config))) for name in SEEDS}
    found["train"] += list(keys(RunConfig.of("ppo"))) + list(keys(RunConfig.of("grpo")))
    return found


KEYS = all_keys()
commands = st.sampled_from(sorted(SEEDS))
raw_values = (
    st.sampled_from(VALUES)
    | st.sampled_from(["0", "1", "2", "64", "0.5", "true", "false", "a", "null", "[a]", "{a:", "b}"])
    | st.text(max_size=12)
    | st.integers().map(str)
    | st.floats().map(str)
)
texts = st.text(st.characters(codec="utf-8"), max_size=60) | st.text(" \n:-[]{}&*!|>'\"%@`,?#ab01.", max_size=60)


def with_key(text: str, key: str, raw: str) -> str:
    """The file with one more key, or another value of it; where it is a file no more, with a line at its end."""
    try:
        values = yaml.safe_load(text)
        *groups, last = key.split(".")
        place = values
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = "@@"
        return yaml.safe_dump(values).replace("'@@'", raw)
    except Exception:  # of every kind: that is what is under test
        return f"{text}{key}: {raw}\n"


@st.composite
def files(draw):
    """A command and a text: a valid file that has been changed somewhere."""
    command = draw(commands)
    text = SEEDS[command] if draw(st.integers(0, 3)) else ORIGINAL
    # Most that is spliced is no YAML any more: every other file has keys and values changed only.
    hows = ["key"] if draw(st.booleans()) else ["key", "replace", "splice", "cut", "twice", "bomb"]
    for _ in range(draw(st.integers(1, 3))):
        how = draw(st.sampled_from(hows))
        place = draw(st.integers(0, len(text)))
        if how == "key":
            text = with_key(text, draw(st.sampled_from(KEYS[command])), draw(raw_values))
        elif how == "replace":
            lines = text.split("\n")
            number = draw(st.integers(0, len(lines) - 1))
            lines[number] = f"{lines[number].partition(':')[0]}: {draw(raw_values)}"
            text = "\n".join(lines)
        elif how == "splice":
            text = text[:place] + draw(texts) + text[place:]
        elif how == "cut":
            text = text[:place] + text[place + draw(st.integers(1, 10)) :]
        elif how == "twice":
            text += text
        else:
            text += BOMB
    return command, text


@st.composite
def command_lines(draw):
    """A command and its options."""
    command = draw(commands)
    words = []
    for _ in range(draw(st.integers(1, 4))):
        key = draw(st.sampled_from(KEYS[command]) | st.text(max_size=8))
        value = draw(raw_values).replace("\0", "")
        words += draw(st.sampled_from([[f"--{key}={value}"], [f"--{key}", value], [f"--{key}"], [value]]))
    return command, [word.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape") for word in words]


def outcome(command: str, words: list[str]) -> str:
    """ "valid", or the error; anything else that is raised is the test's failure."""
    started = time.monotonic()
    try:
        config, text = parse_either(import_attribute(COMMANDS[command].config), command, words)
        assert isinstance(config, Checked)
        assert isinstance(text, str)
        found = "valid"
    except ConfigError as error:
        found = str(error)
    except SystemExit as ended:
        found = f"exit code {ended.code or 0}"  # 0, after --help
    assert found
    assert "\n" not in found, found
    assert len(found) < 3000
    assert found != "exit code 1"
    assert time.monotonic() - started < SECONDS
    return found


CASES = settings(
    max_examples=int(os.environ.get("FUZZ_CASES", 200)),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory):
    """Nothing that is parsed is written; but relative paths shall not find what is here."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("fuzz"))
    yield
    os.chdir(before)


def test_the_files_that_are_changed_are_valid(capsys):
    for command, text in SEEDS.items():
        Path("seed.yml").write_text(text)
        assert outcome(command, ["--config", "seed.yml"]) == "valid", command
    Path("seed.yml").write_text(ORIGINAL)
    assert outcome("train", ["--config", "seed.yml"]) == "valid"


@CASES
@given(files())
def test_every_file_is_valid_or_has_one_clear_error(case):
    command, text = case
    Path("case.yml").write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome(command, ["--config", "case.yml"])


@CASES
@given(command_lines())
def test_every_command_line_is_valid_or_has_one_clear_error(case):
    command, words = case
    Path("seed.yml").write_text(SEEDS[command])
    outcome(command, ["--config", "seed.yml", *words])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({"role": json_values | st.just("user")}, optional={"content": json_values}), max_size=3
)
columns = st.sampled_from(
    ["query", "prompt", "chosen", "rejected", "messages", "text", "completion", "query_reference_response", "score"]
)
rows = st.dictionaries(columns, json_values | messages | st.text(max_size=8), max_size=4).map(json.dumps)
odd_lines = st.sampled_from(
    [
        *("[" * 100_000, '{"query": ' * 50_000, '{"query": %s}' % ("9" * 5000), '{"query": "a", "query": "b"}', "null"),
        *("[]", '{"query": NaN}', '{"query": "\\ud800"}', '{"query": "a\\u0000"}', "\ufeff{}", "{'query': 1}"),
        '{"query": 1e999}',
    ]
)


@CASES
@given(st.lists(rows | odd_lines | texts, max_size=4))
def test_every_file_of_rows_is_read_or_has_one_clear_error(lines):
    Path("rows.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    started = time.monotonic()
    found, errors = [], []
    try:
        found = load_rows("rows.jsonl", key="data.train")
    except ConfigError as error:
        errors.append(str(error))
    reader = RowReader(None, "data.train")
    for read in (
        lambda: [reader.prompt(row.get("query"), f"data.train: row {n}") for n, row in enumerate(found, 1)],
        lambda: list(reader.demonstrations(found)),
        lambda: list(reader.preferences(found)),
        lambda: read_ratings(found, "score", "data.train"),
        lambda: first_words(found, 1, "data.train"),
        lambda: hold_out(found, 0.5, "data.train"),
    ):
        try:
            read()
        except ConfigError as error:
            errors.append(str(error))
    assert all("data.train" in error and len(error) < 3000 for error in errors)
    assert time.monotonic() - started < SECONDS


@each([
    ("a: 1\nb: 2\na: 3", "line 3: got the key 'a' again (line 1); must be there once"),
    ("a: " + "9" * 5000, "is no YAML: Exceeds the limit"),
    ("a: " + "[" * 5000, "is no YAML: lists or mappings too deep in each other"),
    ("a: &x\n  b: *x", "line 2: holds itself, by an alias"),
    (BOMB, f"more than {MAX_ALIASES} aliases"),
    ("x" * (MAX_CHARACTERS + 1), f"must be at most {MAX_CHARACTERS} characters"),
    ('a: "b\\0c"', "must be without NUL characters"),
    ('a: "\\ud800"', "must be Unicode text"),
    ("1: 2", "line 1: got '1' as a key; must be text"),
    ("a: !!python/name:os.system", "line 1: got the tag !!python/name:os.system; must be without it"),
    ("a: 1\nb: !!set {c}", "line 2: got the tag !!set; must be without it"),
    ("a: !!binary aGk=", "line 1: got the tag !!binary; must be without it"),
    ("a: [1", "line 1: is no YAML"),
])  # fmt: skip
def test_what_yaml_must_not_say(text, expected):
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, "--config: 'f.yml'")
    assert str(error.value).startswith("--config: 'f.yml'")
    assert expected in str(error.value)


def test_what_yaml_says_is_what_it_looks_like():
    text = "a: 1e-5\nb: 1.5\nc: 2024-01-01\nd: 12\ne: true\nf: null\ng: '010'\nh: 1_000\n"
    text += f"# {'_' * 80}\nn: '{'1' * 80}'\n"
    text += "i: &i {x: 1}\nj: {<<: *i, y: 2}\nk: 1e5\nl: 1:30\nm: 010"
    found = parse_yaml(text, "f")
    assert found == yaml.safe_load(text) | {"a": 1e-5, "c": "2024-01-01", "k": 1e5, "l": "1:30", "m": "010"}


@each([
    (["--train.staleness", "1000000"], "staleness: got 1000000; must be at most 128: S + 1 copies of the weights"),
    (["--train.generation.temperature", "1e300"], "temperature: got 1e+300; must be 0.001 to 1000"),
    (["--train.learning_rate", "1e30"], "learning_rate: got 1e+30; must be at most 10.0: AdamW moves"),
    (["--train.total_episodes", "4" + "0" * 30], "must be at most 1,000,000,000,000 in size"),
    (["--train.output_dir", "/dev/null"], "output_dir: got '/dev/null'; is there and is no folder"),
    (["--train.output_dir", "x" * 300], "output_dir: got 'xxx"),
    (["--train.seed", str(2**32)], "seed: got 4294967296; must be at most 4,294,967,295"),
    (["--train.generation.workers", "5000"], "workers: got 5000; must be at most 1,024: each is a process"),
    (["--train.seed", "1:30"], "train.seed: got '1:30'; must be a number"),
    (["--train.learning_rate", "1:30.5"], "train.learning_rate: got '1:30.5'; must be a number"),
    (["--algorithm", "[ppo]"], "algorithm: got '[ppo]'; must be one of"),
])  # fmt: skip
def test_values_without_sense_are_named(words, expected):
    Path("seed.yml").write_text(SEEDS["train"])
    assert expected in outcome("train", ["--config", "seed.yml", *words])


LOOK_ALIKES = (
    "1__0", "1_0", "1_", "1._5", "1e1_0", "\ufeff1.0", "1.0\ufeff", "\xa01.0", "1.0\u2003", "\u0661", "\uff11.0",
    "1\u0660.5", "010", "1.0\x1f", "1\u200b", "\xb2",
)  # fmt: skip


@pytest.mark.quick
@each(itertools.product(LOOK_ALIKES, ["train.generation.temperature", "train.batches"]))
def test_what_only_looks_like_a_number_is_none(text, key, monkeypatch):
    """In an option, a variable and a file, with and without quotes."""
    told = f"{key}: got {text!r}; must be a number"
    Path("seed.yml").write_text(SEEDS["train"])
    assert outcome("train", ["--config", "seed.yml", f"--{key}", text]).startswith(told)
    assert outcome("train", ["--config", "seed.yml", f"--{key}={text}"]).startswith(told)
    monkeypatch.setenv(f"ASYNC_RLHF_{key.replace('.', '__').upper()}", text)
    assert outcome("train", ["--config", "seed.yml"]).startswith(told)
    monkeypatch.delenv(f"ASYNC_RLHF_{key.replace('.', '__').upper()}")
    *groups, last = key.split(".")
    for value in (json.dumps(text), text):
        inner = f"{last}: {value}"
        for group in groups[:0:-1]:
            inner = f"{group}: {{{inner}}}"
        Path("file.yml").write_text(f"model: m\ndata: {{train: d.jsonl}}\ntrain: {{{inner}, output_dir: out}}\n")
        said = outcome("train", ["--config", "file.yml", "--reward_funcs", "a:b"])
        assert "must be a number" in said or "must be a plain decimal number" in said or "is no YAML" in said


@each(["1_000", "1000", " 1000", "+1000"])
def test_numbers_may_have_thousands_apart(text, monkeypatch):
    Path("file.yml").write_text(SEEDS["train"].replace("staleness: 1", f"batches: {text}"))
    monkeypatch.setenv("ASYNC_RLHF_TRAIN__WARMUP_STEPS", text)
    found = parse(RunConfig, "train", ["--config", "file.yml", "--train.save_steps", text])[0].train
    assert (found.batches, found.warmup_steps, found.save_steps) == (1000, 1000, 1000)


DEVICES = ["cuda:99999999999999999999", "cuda:128", "xpu:255", "cuda:01", "cuda:\u0661", "cuda:"]


@each(itertools.product(DEVICES, ["train.device", "train.generation.device", "train.reference_device"]))
def test_a_device_that_no_machine_can_have_is_named(device, key):
    Path("seed.yml").write_text(SEEDS["train"])
    said = outcome("train", ["--config", "seed.yml", f"--{key}", device])
    assert f'device: got {device!r}; must be "cpu", "cuda", "cuda:1" or the like up to 127, "mps"' in said
    assert outcome("train", ["--config", "seed.yml", f"--{key}", "cuda:127"]) == "valid"


def test_an_algorithm_that_is_a_list_is_named():
    Path("seed.yml").write_text(SEEDS["train"] + "algorithm: [ppo]\n")
    with pytest.raises(ConfigError, match=r"algorithm: got \['ppo'\]; must be one of online_dpo"):
        parse(RunConfig, "train", ["--config", "seed.yml"])


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub():
    for source in ("/no/such/folder", "./nothing", "~/nothing/here", "a/b/c"):
        with pytest.raises(ConfigError, match=r"data.train: got .*there is no such file or folder"):
            load_rows(source, key="data.train")
