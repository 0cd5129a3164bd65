"""What a user sees: progress where there is no terminal, a summary, warnings, tables; and no noise of libraries."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from tables import each
from tiny import PROMPTS, count_letters, new_args
from transformers import AutoModelForCausalLM

from async_rlhf.cli import main
from async_rlhf.commands.evaluate import run_evaluate
from async_rlhf.commands.evaluation.tables import format_table
from async_rlhf.commands.evaluation.training import Penalties, training_penalties
from async_rlhf.config import ConfigError, EvaluateConfig, KLConfig
from async_rlhf.models import loading, saving
from async_rlhf.models.loading import load_policy, new_reward_model
from async_rlhf.models.saving import write_model
from async_rlhf.run import warnings as run_warnings
from async_rlhf.run.callbacks import ProgressCallback
from async_rlhf.run.summary import training_summary
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.run.warnings import cut_off_warning
from async_rlhf.studies.report.charts import Axis
from async_rlhf.studies.report.html import page
from async_rlhf.studies.report.plots import judged
from async_rlhf.studies.report.reading import read_evaluation, read_run
from async_rlhf.system import progress
from async_rlhf.system.progress import Lines, progress_bar


def test_a_log_gets_a_line_at_once_then_every_few_seconds_and_at_the_end(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = Lines("train: batch", 100, done=20)
    for batch in range(21, 101):
        now[0] += 1.0
        lines.say(batch, f"score {batch}")
        lines.say(batch)  # the same batch again
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "train: batch 21 of 100, 1/s, 0:01:19 left, score 21"
    assert said[1] == "train: batch 26 of 100, 1/s, 0:01:14 left, score 26"
    assert said[-1] == "train: batch 100 of 100, 1/s, 0:00:00 left, score 100"
    assert len(said) == 17  # 21, 26, ... 96, 100


@pytest.mark.parametrize("logging_steps", [1, 4])
def test_training_without_a_terminal_is_not_silent(
    make_policy, tokenizer, make_args, capsys, monkeypatch, logging_steps
):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    args = make_args(progress=True, logging_steps=logging_steps)
    OnlineTrainer(make_policy(), args, PROMPTS, reward_funcs=count_letters, processing_class=tokenizer).train()
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == [f"train: batch {batch} of 6" for batch in range(1, 7)]
    scored = [", score " in line and ", ended " in line for line in said]
    assert scored == ([True] * 6 if logging_steps == 1 else [False, False, False, True, False, False])


def test_other_work_without_a_terminal_is_not_silent(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def said(seconds: float) -> list[str]:
        with progress_bar("generate: a", 10) as done:
            for number in range(1, 11):
                now[0] += seconds
                done(number)
        return [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]

    assert said(3.0) == [f"generate: a: {number} of 10" for number in (2, 4, 6, 8, 10)]
    assert said(2.0) == [f"generate: a: {number} of 10" for number in (3, 6, 9, 10)]
    assert said(0.4) == []  # over before it needs a word


def test_the_bar_shows_how_many_answers_end(monkeypatch, capsys):
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    bar, state = ProgressCallback(), SimpleNamespace(max_steps=4, global_step=0)
    bar.on_train_begin(None, state, None)
    bar.on_log(None, state, None, logs={"objective/scores": -0.4, "objective/kl": 1.25, "val/ended_share": 0.33})
    bar.stop()
    assert "score -0.400, kl 1.25, ended 33%" in capsys.readouterr().err


@contextmanager
def _loud(_size: float):
    yield


def test_loading_and_saving_a_small_model_says_nothing(make_policy, tokenizer, tmp_path, capfd, caplog, monkeypatch):
    transformers.logging.enable_progress_bar()  # an earlier run in this process may have turned bars off

    def load_and_save() -> str:
        write_model(make_policy(), tokenizer, tmp_path / "m")
        load_policy(str(tmp_path / "m"))
        write_model(new_reward_model(str(tmp_path / "m"), tokenizer, 0), tokenizer, tmp_path / "r")
        said = capfd.readouterr()
        return said.out + said.err + caplog.text

    assert load_and_save() == ""
    monkeypatch.setattr(loading, "quietly", _loud)
    monkeypatch.setattr(saving, "quietly", _loud)
    noise = load_and_save()  # what it would be otherwise
    assert all(one in noise for one in ("LOAD REPORT", "Writing model shards"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert "Loading weights" in capfd.readouterr().err  # and outside it is the user's own affair


def test_weights_that_are_left_out_are_named(make_reward_model, make_policy, tokenizer, tmp_path, caplog):
    write_model(make_policy(), tokenizer, tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"another.weight": weights["embed_out.weight"].clone()}, tmp_path / "model.safetensors")
    load_policy(str(tmp_path))
    assert "1 weights belong to no causal language model and are left out: another.weight" in caplog.text


@each([
    ({"non_eos_penalty": True}, 0.33, "67% of the first batch's answers are cut off at 12 tokens .* scored -1, what"),
    ({"non_eos_penalty": "add", "penalty_reward_value": -2.0}, 0.5, "50% .*; -2 is added to their score"),
    ({"non_eos_penalty": True}, 0.8, None),
    ({"non_eos_penalty": False}, 0.0, None),
    ({"algorithm": "grpo", "mask_truncated": True}, 0.1, "90% .* not trained on"),
])  # fmt: skip
def test_what_cut_off_answers_cost_is_said(changes, share, told, tmp_path):
    found = cut_off_warning(new_args(tmp_path, **changes), share)
    assert (found is None) == (told is None)
    if told is not None:
        import re

        assert re.search(told, found), found


def test_a_run_whose_prompts_all_tie_says_that_its_kl_penalty_alone_moves_it(
    make_policy, tokenizer, make_args, caplog, monkeypatch
):
    """Its steps count, so it is not idle; other scores, or no penalty, are no news."""
    monkeypatch.setattr(run_warnings, "IDLE", 2)

    def said(tied, **changes):
        caplog.clear()
        calls = iter([False, *tied])

        def reward(prompts, completions, **columns):
            return [1.0 for _ in completions] if next(calls) else count_letters(prompts, completions)

        args = make_args(algorithm="grpo", total_episodes=32, overwrite_output_dir=True, **changes)
        trainer = OnlineTrainer(make_policy(), args, PROMPTS, reward_funcs=reward, processing_class=tokenizer)
        assert trainer.train().optimizer_steps == 8
        return [record.message for record in caplog.records if "KL penalty alone" in record.message]

    (told,) = said([True, True, True], kl=KLConfig(coef=0.25))
    start = "WARNING: the last 2 batches, up to 3, have moved the policy by its KL penalty alone (kl.coef 0.25)"
    assert told.startswith(start)
    assert "all completions of a prompt had the same score" in told
    assert said([True, False, True], kl=KLConfig(coef=0.25)) == []


def test_a_run_warns_at_its_first_batch_alone(make_policy, tokenizer, make_args, caplog):
    args = make_args(non_eos_penalty=True)
    OnlineTrainer(make_policy(), args, PROMPTS, reward_funcs=count_letters, processing_class=tokenizer).train()
    warned = [record for record in caplog.records if "cut off at 12 tokens" in record.message]
    assert [record.levelno for record in warned] == [logging.WARNING]


def trained(place: Path, name: str, caplog, code: int = 3, **changes: object) -> str:
    """A run of the command, and what it says. All of its answers score the same, so it learns nothing."""
    options = {"output_dir": name, "completions_per_batch": 8, "batches": 6, "staleness": 0, "device": "cpu"}
    options |= {"eval_steps": 3, "non_eos_penalty": "true", "length_penalty": 0.5, "generation.response_length": 5}
    words = [f"--train.{key}={value}" for key, value in {**options, **changes}.items()]
    caplog.clear()
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit) as ended:
        main(["train", "--model=m", "--data.train=p.jsonl", "--data.eval=p.jsonl", "--reward=r.py:f", *words])
    assert ended.value.code == code
    return caplog.text


@pytest.fixture
def inputs(tmp_path, monkeypatch, make_policy, tokenizer) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(make_policy(), tokenizer, tmp_path / "m")
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS[:6]))
    Path("r.py").write_text("def f(prompts, completions, **columns):\n    return [3.0 for _ in completions]\n")
    return tmp_path


def test_training_ends_with_what_came_of_it(inputs, caplog):
    said = trained(inputs, "out", caplog)
    assert "trained on 6 batches; 0:00:0" in said
    lines = list(map(json.loads, Path("out/metrics.jsonl").read_text().splitlines()))
    scores = [line["objective/scores"] for line in lines if "objective/scores" in line]
    held_out = [line["eval_objective/scores"] for line in lines if "eval_objective/scores" in line]
    assert f"reward: {scores[0]:.3f} -> {scores[-1]:.3f}" in said
    assert f"held-out reward: {held_out[0]:.3f} -> {held_out[-1]:.3f}" in said
    assert "policy: out/final" in said
    assert "every metric: out/metrics.jsonl" in said


WITHOUT_PENALTY = {"non_eos_penalty": "false", "length_penalty": 0.0}
SOME = """
calls = []
def f(prompts, completions, **columns):
    calls.append(1)
    if len(calls) == 2:
        raise ConnectionError("busy")
    return [float("nan") if len(calls) == 3 and i == 5 else float(i) for i in range(len(completions))]
"""


def test_completions_without_a_reward_are_counted_by_cause_and_the_count_is_resumed(inputs, caplog):
    Path("r.py").write_text(SOME)
    changes = {**WITHOUT_PENALTY, "reward_errors": "skip", "eval_steps": 6, "save_steps": 3}
    said = trained(inputs, "out", caplog, 0, **changes, batches=3)
    told = "9 of 24 completions had no reward: reward function f raised ConnectionError (8), reward function f returned"
    assert f"{told} no finite number (1)" in said
    assert f"{told} no finite number (1)".replace("of 24", "of 48") in trained(
        inputs, "out", caplog, 0, **changes, batches=6, resume="true"
    )


@pytest.mark.parametrize("why", ["ties", "no reward"])
def test_a_run_that_learnt_nothing_says_so_and_does_not_count_as_done(inputs, caplog, capsys, why):
    if why == "no reward":
        Path("r.py").write_text("def f(prompts, completions, **columns):\n    raise ConnectionError\n")
    options = {**WITHOUT_PENALTY, "batches": 12, "reward_errors": "skip", "eval_steps": 0}
    said = trained(inputs, "out", caplog, **options)
    reason = {
        "ties": "all completions of a prompt had the same score, which does not say which is better",
        "no reward": "96 of 96 completions had no reward: reward function f raised ConnectionError (96)",
    }
    ten = reason[why][:28].replace("96", "80")
    ended = "no optimiser step in all 12 batches: the policy is the one that the run started from; "
    assert f"WARNING: {ended}{reason[why]}" in said
    assert f"WARNING: no optimiser step in the last 10 batches, up to 10: {ten}" in said
    assert said.count("in the last 10 batches") == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"async-rlhf train: error: {ended}{reason[why]}")
    assert not Path("out/train.json").exists()
    assert "no optimiser step in all 12" in trained(inputs, "out", caplog, **options, overwrite_output_dir="true")


def test_the_reward_at_start_and_end_is_that_of_several_batches(tmp_path):
    rows = [{"batch": float(i), "objective/scores": float(i)} for i in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = training_summary(tmp_path, "final", "metrics.jsonl", 75.2)
    assert "trained on 40 batches; 0:01:15 in all" in told
    assert "reward: 2.500 -> 38.500 (the first and the last 4 logged)" in told
    assert "held-out" not in told
    (tmp_path / "metrics.jsonl").write_text("")
    assert "trained on 0 batches" in training_summary(tmp_path, "final", "metrics.jsonl", 1)


def test_evaluation_says_where_training_scored_otherwise_and_can_do_so_too(inputs, caplog):
    """All answers have 5 tokens and none ends, so every score is known: 3 from the function, -1 from the penalty."""
    trained(inputs, "out", caplog)
    config = {"models": {"sft": "m", "policy": "out/final"}, "data": "p.jsonl", "reward_funcs": ["r.py:f"]}
    config |= {"response_length": 5, "device": "cpu"}
    plain = run_evaluate(EvaluateConfig(output_dir="plain", **config))
    assert [one["reward_mean"]["estimate"] for one in plain["models"].values()] == [3.0, 3.0]
    ended = [one["ended_share"] for one in plain["models"].values()]
    assert ended == [0.0, 0.0]
    (note,) = plain["notes"]
    assert "training scores -1 to what is cut off (non_eos_penalty)" in note
    assert "0.5 off for each token (length_penalty). With that the means are: sft -1.000, policy -1.000" in note
    assert note in format_table(plain)
    assert note in Path("plain/evaluation.txt").read_text()
    same = run_evaluate(EvaluateConfig(output_dir="same", penalties="training", **config))
    assert [one["reward_mean"]["estimate"] for one in same["models"].values()] == [-1.0, -1.0]
    assert same["notes"][0].startswith("Scores here are those of training")
    config["models"] = {"sft": "m", "again": "m"}
    with pytest.raises(
        ConfigError, match="penalties: got 'training'; must be null: no model is in the folder of a run"
    ):
        run_evaluate(EvaluateConfig(output_dir="none", penalties="training", **config))


@pytest.mark.parametrize(
    ("name", "judge", "models"),
    [
        ("reward (trained on)", ["r.py:f"], ["m", "out/final"]),
        ("reward (trained on)", ["copy/r.py:f"], ["m", "out/final"]),
        ("gold reward", ["g.py:f"], ["m", "out/final"]),
        ("gold reward", ["other/r.py:f"], ["m", "out/final"]),
        ("reward", ["r.py:f", "g.py:f"], ["m", "out/final"]),
        ("reward", ["r.py:f"], ["m", "m"]),
        ("reward", ["g.py:f"], ["out/final", "python/final"]),
        ("reward", ["g.py:f"], ["m", "elsewhere/final"]),
    ],
    ids=[
        "trained on",
        "by another path",
        "another",
        "of the same name",
        "in part",
        "no run",
        "a run that does not say it",
        "a file that is not there",
    ],
)
def test_a_reward_is_gold_where_nobody_was_trained_on_it(inputs, name, judge, models):
    """In the table, the plot and the page of the run."""
    code = Path("r.py").read_text()
    for place, text in {"g.py": code + "\n", "copy/r.py": code, "other/r.py": code + "\n"}.items():
        Path(place).parent.mkdir(exist_ok=True)
        Path(place).write_text(text)
    runs = {"out": "r.py:f", "elsewhere": "gone/r.py:f", "python": "r.py:f"}
    for run, reward in runs.items():
        shutil.copytree("m", f"{run}/final")
        python = "#   reward_funcs: g:f\n" if run == "python" else ""
        Path(run, "run.yml").write_text(f"{python}reward_model: null\nreward_funcs: [{reward!r}]\n")
        Path(run, "metrics.jsonl").write_text('{"batch": 1, "objective/scores": 1.0}\n')
    config = {"models": dict(zip("ab", models, strict=True)), "data": "p.jsonl", "reward_funcs": judge}
    results = run_evaluate(EvaluateConfig(output_dir="o", response_length=5, device="cpu", **config))
    first = name.partition(" ")[0]
    text = Path("o/evaluation.txt").read_text()
    assert f" {name} ┃" in text
    assert f" {first} difference " in text
    assert ("gold" in text) == (first == "gold")
    assert judged(results) == Axis("reward_mean", f"{name} (mean, 95% interval)")
    run = read_run(Path(models[-1]).parent if models[-1] != "m" else Path("out"), "run")
    shown = page([run], [read_evaluation(Path("o"))])
    assert f"{name.capitalize()} against KL" in shown
    assert f">{name}<" in shown
    assert ("old reward" in shown) == (first == "gold")


def test_penalties_are_applied_as_in_training():
    answers = ([1.0, 1.0], [True, False], [4, 4])
    assert Penalties("replace", -1.0, 0.5).applied(*answers) == [-1.0, -1.0]
    assert Penalties(True, -3.0, 0.0).applied(*answers) == [1.0, -3.0]
    assert Penalties("add", -3.0, 0.25).applied(*answers) == [0.0, -3.0]
    assert Penalties(False, -3.0, 0.25).applied(*answers) == [0.0, 0.0]


def test_runs_with_different_penalties_are_not_mixed(tmp_path):
    for name, value in {"a": -1.0, "b": -2.0}.items():
        (tmp_path / name).mkdir()
        text = f"train: {{non_eos_penalty: true, penalty_reward_value: {value}, length_penalty: 0.0}}\n"
        (tmp_path / name / "run.yml").write_text(text)
    places = [str(tmp_path / name / "final") for name in ("a", "a", "b")]
    assert training_penalties(places[:2]) == Penalties(True, -1.0, 0.0)
    with pytest.raises(ConfigError, match=r"a/run.yml' and '.*b/run.yml' have different ones"):
        training_penalties(places)
    assert training_penalties([str(tmp_path / "elsewhere")]) is None


def test_tables_are_as_wide_as_the_terminal_and_in_the_order_given(inputs):
    config = {"models": {"zeta": "m", "alpha": "m"}, "data": "p.jsonl", "reward_funcs": ["r.py:f"]}
    results = run_evaluate(EvaluateConfig(output_dir="o", response_length=5, device="cpu", **config))
    for width in (60, 90, 160):
        lines = format_table(results, width).splitlines()
        assert max(map(len, lines)) <= width
    text = Path("o/evaluation.txt").read_text()
    assert text.index("zeta") < text.index("alpha") < text.index("def f0(x)")


def test_a_command_of_the_core_loads_no_study_no_format_of_others_and_no_task():
    """Not even by name, unless it reads a file, which may be the original's."""
    program = (
        "import sys\nfrom async_rlhf.cli import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit:\n    pass\n"
        "from async_rlhf.run import trainer\n"
        "from async_rlhf.commands import evaluate, generate, pairs, relabel, reward, serve, sft, train\n"
        "print(sorted(m for m in sys.modules if m.split('.')[1:2] and m.split('.')[:1] == ['async_rlhf'] "
        "and m.split('.')[1] in ('compat', 'studies', 'tasks')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip().splitlines()[-1] == "[]"
