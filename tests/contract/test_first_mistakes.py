"""What a newcomer gets wrong on the first day: each mistake is answered by one line that says what to do."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tables import each
from tiny import PROMPTS

from async_rlhf import GRPOConfig
from async_rlhf.algorithms.table import BUILT_IN
from async_rlhf.cli import main
from async_rlhf.commands.table import COMMANDS, import_attribute
from async_rlhf.config.errors import ConfigError
from async_rlhf.config.parsing import FEW, options_of
from async_rlhf.config.spelling import _ELSEWHERE
from async_rlhf.config.yaml_text import key_lines
from async_rlhf.models.saving import write_model
from async_rlhf.run.config import RunConfig
from async_rlhf.run.trackers import tracker_callbacks
from async_rlhf.studies.plan.config import PlanConfig
from async_rlhf.system import names

RECIPE = """\
model: model  # the first line
data: {train: prompts.jsonl}
reward_funcs: [reward.py:reward]
train:
  seed: 1
  generation:
    response_length: 8
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yml").write_text(RECIPE)
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return tmp_path


def ends(capsys, *words: str) -> tuple[int, str]:
    """The exit code of a command, and what it prints."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    code = ended.value.code
    said = capsys.readouterr()
    return code if isinstance(code, int) else 0, said.out + said.err


@each(
    [
        ("model: model", "modle: model", 1, "model"),
        ("train: prompts", "trian: prompts", 2, "data.train"),
        ("  seed:", "  sed:", 5, "train.seed"),
        ("    response_length", "    response_lenght", 7, "train.generation.response_length"),
        ("  seed:", "  max_new_tokens:", 5, "train.generation.response_length"),
        ("  seed:", "  temperature:", 5, "train.generation.temperature"),
    ]
)
def test_a_misspelt_key_of_a_file_gets_its_line_and_the_nearest_key(right, wrong, line, meant, capsys):
    Path("recipe.yml").write_text(RECIPE.replace(right, wrong))
    code, said = ends(capsys, "train", "--config", "recipe.yml", "--dry-run")
    assert code == 2
    assert f"'recipe.yml', line {line}: " in said
    assert f"did you mean {meant}?" in said


@each(
    [
        ("--learning_rate=1e-5", "train.learning_rate"),
        ("--learning-rate=1e-5", "train.learning_rate"),
        ("--num_generations=4", "train.samples_per_prompt"),
        ("--max_completion_length=9", "train.generation.response_length"),
        ("--output_dir=x", "train.output_dir"),
        ("--train.stalness=1", "train.staleness"),
        ("--num_threads=1", "train.num_threads"),  # and not that of the generator, which is deeper
    ]
)
def test_other_trainers_names_and_typing_errors_get_ours(word, meant, capsys):
    code, said = ends(capsys, "train", "--config", "recipe.yml", "--dry-run", word)
    assert (code, said.strip().endswith(f"no such option; did you mean --{meant}?")) == (2, True), said


def test_what_is_like_no_key_gets_no_suggestion(capsys):
    code, said = ends(capsys, "train", "--config", "recipe.yml", "--qqqqq", "1")
    assert (code, "did you mean" in said, "--qqqqq" in said) == (2, False, True)


def test_a_bad_value_gets_its_line_unless_the_command_line_sets_it(capsys):
    Path("recipe.yml").write_text(RECIPE.replace("seed: 1", "staleness: -1"))
    assert "staleness: got -1; must be at least 0 ('recipe.yml', line 5)" in ends(
        capsys, "train", "--config", "recipe.yml"
    )[1].replace("\n", "")
    said = ends(capsys, "train", "--config", "recipe.yml", "--train.staleness=-2")[1]
    assert "got -2" in said
    assert "line" not in said


def test_keys_have_lines():
    assert key_lines("a: &x\n  b: 1\nc:\n  d: [1]\n'e.f': 2\n") == {"a": 1, "a.b": 2, "c": 3, "c.d": 4, "e.f": 5}
    assert key_lines("") == {}


def test_names_of_other_trainers_lead_to_keys():
    known = {option.key for name in BUILT_IN for option in options_of(RunConfig.of(name))}
    known |= {option.key for option in options_of(PlanConfig)}
    assert set(_ELSEWHERE.values()) <= known


@each(
    [
        ("num_generations", 4, "did you mean samples_per_prompt?"),
        ("max_completion_length", 9, "did you mean generation.response_length?"),
        ("temperature", 0.5, "did you mean generation.temperature?"),
        ("beta", 0.1, "did you mean kl.coef?"),
        ("max_steps", 3, "did you mean batches?"),
        ("use_vllm", True, "did you mean generation.engine?"),
        ("eval_strategy", "steps", "did you mean eval_steps?"),
        ("peft_config", None, "did you mean lora.rank?"),
        ("warmup_ratio", 0.1, "did you mean warmup_steps?"),
        ("loss_type", "dapo", "the algorithm says it: GRPOConfig, DrGRPOConfig"),
    ]
)
def test_they_do_in_python_too(name, value, said):
    with pytest.raises(ConfigError, match=re.escape(f"{name}: GRPOConfig has no such key; ") + f".*{re.escape(said)}"):
        GRPOConfig(**{name: value})


def test_one_name_stands_for_a_list_of_it(capsys):
    assert GRPOConfig(report_to="wandb").report_to == ["wandb"]
    Path("recipe.yml").write_text(RECIPE.replace("train:\n  ", "train:\n  report_to: none\n  ", 1))
    assert "report_to:\n  - none" in ends(capsys, "train", "--config", "recipe.yml", "--dry-run")[1]
    names.check_integrations(GRPOConfig(report_to="none").report_to)
    assert tracker_callbacks(["none"], None, {}) == {}


def test_a_switch_needs_no_value(capsys):
    code, said = ends(capsys, "train", "--config", "recipe.yml", "--dry-run", "--train.resume", "--train.seed", "3")
    assert (code, "resume: true" in said, "seed: 3" in said) == (0, True, True)
    assert "resume: true" in ends(capsys, "train", "--config", "recipe.yml", "--dry-run", "--train.resume")[1]
    code, said = ends(capsys, "train", "--config", "recipe.yml", "--dry-run", "--train.seed", "--train.resume")
    assert (code, "--train.seed: got ''; must have a value behind it" in said) == (2, True)


def test_commands_and_algorithms_are_guessed(capsys):
    assert "did you mean train?" in ends(capsys, "trian")[1]
    words = ("train", "--config", "recipe.yml", "--algorithm", "gropo", "--dry-run")
    assert "did you mean grpo?" in ends(capsys, *words)[1]


def test_the_help_says_what_a_value_is(capsys):
    said = ends(capsys, "train", "--help-all")[1]
    for line in ("staleness INT", "trace [true|false]", "report_to TEXT ...", "learning_rate FLOAT"):
        assert f"--train.{line}" in said
    assert "--train.hub_strategy end|every_save|" in said


@pytest.mark.quick
@each(COMMANDS)
def test_the_short_help_shows_what_matters(command, capsys):
    code, short = ends(capsys, command, "--help")
    whole = ends(capsys, command, "--help-all")[1]
    kind = import_attribute(COMMANDS[command].config)
    kind = RunConfig.of("online_dpo") if kind is RunConfig else kind
    options = list(options_of(kind))
    main_keys = [option.key for option in options if option.known.get("main")]
    shown = re.findall(r"^ +--([\w.]+)", short, re.MULTILINE)
    assert code == 0
    if not main_keys or len(options) <= FEW:
        assert short == whole
        return
    assert set(shown) == set(main_keys)
    assert 8 <= len(shown) <= 20
    assert "--help-all explains all" in short
    assert len(short) < len(whole)
    for option in options:
        assert f"--{option.key} " in whole.replace("\n", " "), option.key


def test_the_short_help_of_an_algorithm_has_its_own_keys(capsys):
    assert "--train.kl.coef" in ends(capsys, "train", "--algorithm", "grpo", "--help")[1]
    assert "--train.beta" in ends(capsys, "train", "--help")[1]


MISSING = {
    "train": ["--train.output_dir=out/a", "--reward=reward.py:f", "--data.train=prompts.jsonl", "--model=runs/none"],
    "train --reward_model": ["--train.output_dir=o", "--data.train=m", "--model=m", "--reward_model=runs/n"],
    "sft": ["--output_dir=out/a", "--train=prompts.jsonl", "--model=runs/none"],
    "sft --train": ["--output_dir=out/a", "--train=runs/none", "--model=m"],
    "reward": ["--output_dir=out/a", "--train=runs/none.jsonl", "--model=m"],
    "pairs": ["--output=out/a/b.jsonl", "--prompts=prompts.jsonl", "--model=runs/none", "--reward=reward.py:f"],
    "generate": ["--output_dir=out/a", "--data=runs/none", "--models.a=m"],
    "evaluate": ["--output_dir=out/a", "--data=prompts.jsonl", "--models.a=m", "--reward_model=runs/none"],
    "relabel": ["--output_dir=out/a", "--data=runs/none", "--reward_model=m"],
}  # fmt: skip


@pytest.mark.quick
@each(MISSING)
def test_a_missing_place_is_said_to_be_missing_and_nothing_is_left(
    case, capsys, place, make_policy, tokenizer, monkeypatch
):
    write_model(make_policy(), tokenizer, place / "m")
    Path("reward.py").write_text("def f(prompts, completions, **columns):\n    return [0.0 for _ in completions]\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = sorted(Path().rglob("*"))
    code, said = ends(capsys, case.split()[0], *MISSING[case])
    assert code == 2
    assert re.search(r"got 'runs/n\w*(\.jsonl)?'; there is no such (file|folder)", said), said
    assert [path for path in sorted(Path().rglob("*")) if "__pycache__" not in path.parts] == before


MISSPELT = """
train --data.train p.jsonl --reward_funcs statistics:mean --model nope
train --data.train p.jsonl --reward_funcs nope.py:f --model m
train --data.train p.jsonl --reward_funcs nope:f --model m
train --data.train p.jsonl --agent nope.py:f --model m --train.output_dir p.jsonl/out
train --data.train p.jsonl --reward_model no/such --model m
train --data.train p.jsonl --reward_model m --model m --train.resume_from nope
sft --train nope.jsonl --output_dir o
sft --train p.jsonl --output_dir o --chat_template nope.jinja
sft --train p.jsonl --output_dir o --tokenizer ./nope
reward --train no/such --output_dir o --model m
pairs --prompts p.jsonl --model m --reward_model m --output p.jsonl/pairs.jsonl
relabel --data p.jsonl --output_dir o --reward_model ./nope
generate --data p.jsonl --output_dir o --models.a ./nope
evaluate --data p.jsonl --output_dir o --models.a m --judge.url http://a --judge.model b --judge.prompt_file nope
serve --model ./nope
report nope
explain nope --batch 1
plan --run nope
workers nope
sweep nope.yml
certify nope.yml
config migrate nope.yml
recipes nope
data --source nope --out o
""".strip().splitlines()


def test_a_misspelt_name_is_an_error_before_torch_is_loaded():
    """In every command; that is why it takes no second."""
    program = f"""
import os, sys
from async_rlhf.cli import main
for line in {MISSPELT}:
    try:
        main(line.split())
    except SystemExit as ended:
        print(ended.code, "torch" in sys.modules, line)
"""
    Path("p.jsonl").write_text('{"query": "a"}\n')
    Path("m").mkdir()
    for file in ("config.json", "model.safetensors"):
        Path("m", file).touch()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines() == [f"2 False {line}" for line in MISSPELT], done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(MISSPELT)
    assert all("error: " in line and ("nope" in line or "no/such" in line or "p.jsonl/" in line) for line in said)


@each(["train", "sft", "reward"])
def test_a_missing_tracker_is_named_before_anything_is_loaded(command, capsys, monkeypatch):
    """With a model and data that are not there either, which would be the next errors."""
    monkeypatch.setattr(names, "find_spec", lambda module: None)
    words = {"train": ["--train.report_to=tensorboard", "--data.train=none.jsonl", "--reward=no.py:f"]}.get(
        command, ["--report_to=tensorboard", "--train=none.jsonl", "--output_dir=out"]
    )
    code, said = ends(capsys, command, "--model=runs/none", *words)
    assert code == 2
    assert "report_to: got 'tensorboard', which is not installed; pip install tensorboard" in said
    assert not Path("out").exists()


@pytest.mark.parametrize("command", ["pairs", "relabel", "evaluate", "train"])
def test_a_failing_reward_function_is_one_line_below_its_frames(capsys, command, place, make_policy, tokenizer, caplog):
    write_model(make_policy(), tokenizer, place / "m")
    Path("reward.py").write_text("def f(prompts, completions, **columns):\n    return [1 / 0 for _ in completions]\n")
    Path("pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 3)
    small = ["--response_length=4", "--device=cpu", "--reward=reward.py:f"]
    words = {
        "pairs": ["--model=m", "--prompts=prompts.jsonl", "--output=out/b.jsonl", *small],
        "relabel": ["--data=pairs.jsonl", "--output_dir=out", *small[1:]],
        "evaluate": ["--models.a=m", "--data=prompts.jsonl", "--output_dir=out", *small],
        "train": ["--model=m", "--data.train=prompts.jsonl", "--reward=reward.py:f", "--train.output_dir=out"],
    }[command]
    if command == "train":
        words += ["--train.completions_per_batch=8", "--train.batches=1", "--train.device=cpu", "--train.staleness=0"]
        words += ["--train.generation.response_length=4"]
    code, said = ends(capsys, command, *words)
    assert code == 1
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "error:" in line]
    assert re.fullmatch(
        rf"async-rlhf {command}: error: reward function f raised ZeroDivisionError: division by zero "
        r"\(.*reward.py, line 2\)",
        line,
    ), line
    assert said.count('  File "') == said.count('reward.py", line 2, in ') >= 1


EPISODES = """
class Breaks:
    def reset(self, row, seed):
        return self.answer({})
    def step(self, message):
        pass
    def answer(self, table):
        return table["no such"]
    def close(self):
        pass

async def agent(client, row):
    await client.chat([{"role": "user", "content": "x"}])
    return Breaks().answer({})

from transformers import TrainerCallback

class Callback(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        Breaks().answer({})

def reward(completions, **columns):
    return [float(len(text)) for text in completions]
"""


ENGINE = """
from async_rlhf.config.engines import EngineSpec

def make(spec, params, *more):
    raise KeyError("no such")

ENGINE = EngineSpec("mine_of_engines:make", frozenset({"redraw"}))
"""


@pytest.mark.parametrize("staleness", [0, 1], ids=["inline", "in a process"])
@pytest.mark.parametrize("what", ["environment", "agent", "callbacks", "reward_funcs", "engine"])
def test_code_of_the_users_that_raises_is_shown_alone(capsys, what, staleness, make_policy, tokenizer, place):
    """Whatever it is, and wherever it is called: its own frames, and one line of ours."""
    write_model(make_policy(), tokenizer, place / "m")
    Path("mine.py").write_text(EPISODES)
    words = ["--model=m", "--data.train=prompts.jsonl", "--train.output_dir=out", f"--train.staleness={staleness}"]
    words += ["--train.completions_per_batch=8", "--train.batches=1", "--train.device=cpu", "--train.progress=false"]
    words += ["--train.generation.response_length=4", "--train.max_prompt_length=40"]
    given = {"environment": "Breaks", "agent": "agent", "callbacks": '["mine.py:Callback"]', "reward_funcs": "answer"}
    if what == "engine":
        Path("mine_of_engines.py").write_text(ENGINE)
        words += ["--train.generation.engine=mine_of_engines:ENGINE", "--reward=mine.py:reward"]
    else:
        words += [f"--{what}={given[what]}" if what == "callbacks" else f"--{what}=mine.py:{given[what]}"]
    if what in ("environment", "agent"):
        words += ["--train.generation.max_turns=2"]
    if what == "callbacks":
        words += ["--reward=mine.py:reward"]
    if what == "reward_funcs":
        Path("mine.py").write_text("def answer(completions, **columns):\n    return {}['no such']\n")
    code, said = ends(capsys, "train", *words)
    assert code == 1, said
    assert "Traceback" not in said
    frames = [line for line in said.splitlines() if line.startswith('  File "')]
    assert frames, said
    assert all(re.search(r'mine(_of_engines)?\.py"', frame) for frame in frames)
    last = said.splitlines()[-1]
    assert last.startswith("async-rlhf train: error: ")
    assert "KeyError: 'no such'" in last
    assert re.search(r"mine(_of_engines)?.py, line \d+\)", last), last


@pytest.mark.parametrize(
    "command",
    [
        "train --config recipe.yml --train.output_dir out --train.device",
        "sft --model model --train prompts.jsonl --output_dir out --device",
        "generate --models.a model --data prompts.jsonl --output_dir out --response_length 4 --device",
        "pairs --model model --prompts prompts.jsonl --output out.jsonl --reward_funcs reward.py:reward --device",
    ],
    ids=lambda command: command.split()[0],
)
def test_a_device_that_is_not_there_is_named_before_anything_is_done(make_policy, tokenizer, capsys, command):
    write_model(make_policy(), tokenizer, Path("model"))
    Path("reward.py").write_text("def reward(completions, **columns):\n    return [0.0] * len(completions)\n")
    code, said = ends(capsys, *command.split(), "cuda:99")
    assert code == 2
    assert "device: got 'cuda:99'; must be a device of this host, where torch sees" in said
    assert "Traceback" not in said
    assert not Path("out").exists() or not list(Path("out").iterdir())


def test_a_full_disk_amid_the_work_says_what_to_do(capsys, monkeypatch):
    def full(_config):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/mine/metrics.jsonl")

    monkeypatch.setattr("async_rlhf.commands.recipes.run_recipes", full)
    with pytest.raises(SystemExit) as ended:
        main(["recipes"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "async-rlhf recipes: error: OSError: [Errno 28] No space left on device: 'runs/mine/metrics.jsonl'; "
        "make room and start again: what was saved before is whole\n"
    )
