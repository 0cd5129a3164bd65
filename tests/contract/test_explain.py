"""`async-rlhf explain`: repeats an update of a finished run bit for bit, from whatever checkpoint there is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny import PROMPTS, byte_tokenizer, count_letters, json_rows, new_args, new_policy, rare
from transformers import GPTNeoXForCausalLM

from async_rlhf.cli import main
from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError
from async_rlhf.models.saving import write_model
from async_rlhf.run.config import DataConfig, RunConfig
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.studies.explain import repetition
from async_rlhf.studies.explain.command import run_explain
from async_rlhf.studies.explain.config import ExplainConfig
from async_rlhf.studies.explain.repetition import (
    Otherwise,
    Part,
    Repetition,
    RepetitionDiffersError,
    read_metrics,
    read_run,
)
from async_rlhf.studies.explain.update import difference, inner, norm

REWARD = """
def letters(prompts, completions, **columns):
    return [sum(c.isascii() and c.isalpha() for c in text) + 0.01 * len(text) for text in completions]
"""


@pytest.fixture
def train(tmp_path):
    """A finished run of six batches by the command, its folder."""
    write_model(new_policy(), byte_tokenizer(), tmp_path / "policy")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "reward.py").write_text(REWARD)

    def run(name="run", algorithm="online_dpo", **changes) -> Path:
        args = new_args(tmp_path, name, algorithm=algorithm, **changes)
        prompts = str(tmp_path / "prompts.jsonl")
        data = DataConfig(prompts, eval=prompts if changes.get("eval_steps") else None)
        reward = [f"{tmp_path / 'reward.py'}:letters"]
        config = RunConfig(str(tmp_path / "policy"), data, reward_funcs=reward, train=args, algorithm=algorithm)
        run_train(config)
        return Path(args.output_dir)

    return run


def checksums(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def moved(before: Path, after: Path) -> float:
    """How far apart the weights of two checkpoints are."""
    old, new = (load_file(path / "model.safetensors") for path in (before, after))
    assert old.keys() == new.keys()
    return torch.cat([(new[name].double() - old[name].double()).flatten() for name in old]).norm().item()


@pytest.mark.parametrize("staleness", [rare(0), 1, 2])
def test_an_update_is_repeated_from_the_checkpoint_before_it(train, staleness):
    run = train(staleness=staleness, save_steps=1, eval_steps=2)
    before = checksums(run)
    found = run_explain(ExplainConfig(str(run), batch=5, top=1))
    assert found["repeated"] == {"from": "checkpoint-4", "batches": 1, "after": 1, "compared": [5, 6]}
    # The weights that the run itself has written say how far this update has moved them.
    assert found["step"]["norm"] == pytest.approx(moved(run / "checkpoint-4", run / "checkpoint-5"), rel=1e-9)
    assert found["lag"]["batches"] == staleness
    whole = found["step"]["contributions"]
    assert whole["sum_of_units"] == pytest.approx(whole["of_the_whole_batch"], rel=1e-4)
    after = checksums(run)
    assert after.keys() - before.keys() == {"explain/explain-5.json", "explain/explain-5.txt"}
    assert before.items() <= after.items()
    assert json.loads((run / "explain" / "explain-5.json").read_text()) == found
    assert (run / "explain" / "explain-5.txt").read_text().startswith("Batch 5 of ")

    for checkpoint in ("checkpoint-4", "checkpoint-3"):
        shutil.rmtree(run / checkpoint)
    again = run_explain(ExplainConfig(str(run), batch=5, top=1, output_dir=str(run / "farther")))
    assert again["repeated"] == {"from": "checkpoint-2", "batches": 3, "after": 1, "compared": [3, 4, 5, 6]}
    assert {**again, "repeated": None} == {**found, "repeated": None}


@pytest.mark.parametrize("algorithm", ["online_dpo", "ppo"])
def test_without_checkpoints_it_repeats_the_run_from_its_beginning(train, algorithm, caplog):
    caplog.set_level("INFO")
    run = train(algorithm=algorithm, staleness=1)
    found = run_explain(ExplainConfig(str(run), batch=3, top=0))
    assert found["repeated"] == {"from": None, "batches": 3, "after": 3, "compared": [1, 2, 3, 4, 5, 6]}
    assert "no checkpoint before batch 3; repeats 3 batches from the beginning" in caplog.text
    first = run_explain(ExplainConfig(str(run), batch=1, top=0))
    assert first["repeated"]["compared"] == [1, 2, 3, 4, 5, 6]
    assert first["step"]["without_gradient"]["change"] == pytest.approx(1.0)  # nothing is left of earlier batches


def test_the_life_of_a_sample(train, capsys):
    """Its numbers are those of the run, and of the policies that its checkpoints hold."""
    run = train(staleness=1, save_steps=1, save_total_limit=None, num_mini_batches=1, algorithm="grpo")
    with pytest.raises(SystemExit):
        main(["explain", str(run), "--sample", "3/2"])
    found = json.loads((run / "explain" / "explain-3-sample-2.json").read_text())
    assert "Sample 2 of batch 3 of" in capsys.readouterr().out
    assert [each["sample"] for each in found["group"]][:2] == [1, 2]
    assert found["score"] == pytest.approx(found["rewards"]["letters"]["value"], rel=1e-6)
    assert {token["version"] for token in found["tokens"]} == {1}
    logged = [row for row in json_rows(run / "samples.jsonl") if row["batch"] == 3][1]
    assert (logged["completion"], logged["finish_reason"]) == (found["completion"], found["finish_reason"])
    whole = run_explain(ExplainConfig(str(run), batch=3, top=0))
    same = next(row for unit in whole["completions"] for row in unit["rows"] if row["number"] == 2)
    assert sum(token["percent"] for token in found["tokens"]) == pytest.approx(found["percent"], abs=1e-6)
    assert same["contribution"] * found["percent"] > 0
    assert found["logprob"]["after"] == pytest.approx(found["logprob"]["checkpoint-3"], abs=1e-4)
    assert list(found["logprob"])[2:5] == ["after", "checkpoint-3", "checkpoint-4"]
    for token in found["tokens"]:
        assert np.exp(token["before"] - token["by_the_sampler"]) == pytest.approx(token["ratio"], rel=1e-4)
    with pytest.raises(ConfigError, match=r"sample: got 999; must be of completions 1 to"):
        run_explain(ExplainConfig(str(run), batch=3, sample=999))


def test_a_run_is_explained_from_another_folder_than_it_was_started_in(train, tmp_path, monkeypatch):
    run = train(save_steps=2)
    text = (run / "run.yml").read_text()
    assert f"output_dir: {run}" in text
    assert f"train: {run.parent}/" in text
    (run / "run.yml").write_text(text.replace(f"{run.parent}/", ""))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    given = os.path.relpath(run)
    found = run_explain(ExplainConfig(given, batch=3, after=0, top=0, output_dir="here"))
    assert (found["run"], found["repeated"]["compared"]) == (given, [1, 2, 3])
    assert (tmp_path / "elsewhere" / "here" / "explain-3.json").is_file()
    assert Path.cwd() == tmp_path / "elsewhere"


def test_a_run_that_was_uploaded_is_repeated_without_uploads(train):
    run = train(save_steps=2)
    record = yaml.safe_load((run / "run.yml").read_text())
    hub = {"push_to_hub": True, "hub_model_id": "ours/policy", "hub_strategy": "end", "hub_private_repo": True}
    record["train"] |= hub
    (run / "run.yml").write_text(yaml.safe_dump(record))
    assert run_explain(ExplainConfig(str(run), batch=3, top=0))["repeated"]["compared"] == [3, 4, 5, 6]
    again = Part(run, read_run(str(run)), None, 3, 6, range(0)).config(run.parent).train
    assert {key: getattr(again, key) for key in hub} == {
        "push_to_hub": False,
        "hub_model_id": None,
        "hub_strategy": "every_save",
        "hub_private_repo": None,
    }


def test_a_run_that_logged_something_else_is_an_error_that_names_it(train):
    run = train(save_steps=2)
    path = run / "metrics.jsonl"
    lines = json_rows(path)
    true = lines[3]["loss/policy_avg"]
    lines[3]["loss/policy_avg"] = true + 1e-7
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        RepetitionDiffersError, match=rf"batch 4: loss/policy_avg is {true!r}, was .* \(1 metrics differ\)$"
    ):
        run_explain(ExplainConfig(str(run), batch=4))
    with pytest.raises(
        RepetitionDiffersError, match=r"batch 4: loss/policy_avg.*; --after 0 repeats no batch after 3$"
    ):
        run_explain(ExplainConfig(str(run), batch=3))
    run_explain(ExplainConfig(str(run), batch=3, after=0, top=0, output_dir=str(run / "elsewhere")))
    assert not (run / "explain").exists()
    run_explain(ExplainConfig(str(run), batch=6, top=0))  # from checkpoint-4


def test_what_cannot_be_explained_says_why(train, tmp_path, monkeypatch):
    run = train()
    with pytest.raises(ConfigError, match=r"batch: got 7; must be 1 to 6, the last batch that .* has logged"):
        run_explain(ExplainConfig(str(run), batch=7))
    with pytest.raises(ConfigError, match="batch: got 0; must be at least 1"):
        ExplainConfig(str(run), batch=0)
    with pytest.raises(ConfigError, match=r"run: got .*; must be the output folder of a run"):
        run_explain(ExplainConfig(str(tmp_path / "nowhere"), batch=1))
    run_explain(ExplainConfig(str(run), batch=1, top=0))
    with pytest.raises(ConfigError, match=r"output_dir: got .*; has explain-1.json already; set overwrite"):
        run_explain(ExplainConfig(str(run), batch=1, top=0))
    run_explain(ExplainConfig(str(run), batch=1, top=0, overwrite=True))

    starts = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps([starts[0] | {"ranks": 2}]))
    with pytest.raises(ConfigError, match="has a learner on 2 ranks; must be on one"):
        run_explain(ExplainConfig(str(run), batch=1, overwrite=True))

    args = replace(new_args(tmp_path, "python"), total_episodes=8)
    OnlineTrainer(new_policy(), args, PROMPTS, reward_funcs=count_letters, processing_class=byte_tokenizer()).train()
    with pytest.raises(
        ConfigError, match=r"started from Python with objects .*data.train: 20 rows.*cannot be explained"
    ):
        run_explain(ExplainConfig(args.output_dir, batch=1))


def test_the_command_line(train, capsys):
    run = train(algorithm="rloo", save_steps=2)
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(run), "--batch", "3", "--top", "2"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert (run / "explain" / "explain-3.txt").read_text() in shown
    for words in (
        "repeated: 1 batch from checkpoint-2, and 3 batches after it; the metrics of 4",
        "letters",
        "advantage",
    ):
        assert words in shown
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(run), "--batch", "30"])
    assert ended.value.code == 2
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"objective/kl": ', '"objective/kl": 1.0, "was": '))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(run), "--batch", "4"])
    assert ended.value.code == 1
    assert "async-rlhf explain: error: batch 3: objective/kl is" in capsys.readouterr().err


def part(run: Path, batch: int, last: int, checkpoint: str) -> Part:
    return Part(run, read_run(str(run)), run / checkpoint, batch, last, range(0))


def policy_of(checkpoint: Path) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in GPTNeoXForCausalLM.from_pretrained(checkpoint).parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)


def step(run: Path, batch: int) -> torch.Tensor:
    pairs = zip(*(policy_of(run / f"checkpoint-{b}") for b in (batch, batch - 1)), strict=True)
    return torch.cat([(after.double() - before).flatten() for after, before in pairs])


@pytest.mark.parametrize(("algorithm", "staleness"), [("online_dpo", 1), ("ppo", 0)])
def test_with_another_score_it_is_the_run_whose_reward_says_so(train, tmp_path, algorithm, staleness):
    how = {"algorithm": algorithm, "staleness": staleness, "save_steps": 1, "num_samples_logged": 100}
    run = train(**how)
    samples = json_rows(run / "samples.jsonl")
    texts, here = [row["completion"] for row in samples], [row for row in samples if row["batch"] == 3]
    lower = [n for n, row in enumerate(here, start=1) if row["score"] < here[(n - 1) ^ 1]["score"]]  # the rejected one
    number = next(n for n in lower if texts.count(here[n - 1]["completion"]) == 1 and n > 4)
    text, was = here[number - 1]["completion"], here[number - 1]["score"]
    scores = {number: was + 20.5}
    changed = Repetition(
        part(run, 3, 6, "checkpoint-2"), tmp_path / "scratch", keep=True, otherwise=Otherwise(scores)
    ).course
    found = run_explain(ExplainConfig(str(run), batch=3, top=1, what_if={str(number): was + 20.5}))

    once = f"[{was + 20.5!r} if c == {text!r} else x for c, x in zip(completions, plain(prompts, completions))]"
    again = f"plain = letters\ndef letters(prompts, completions, **columns):\n    return {once}\n"
    (tmp_path / "reward.py").write_text(REWARD + again)
    other = train("other", **how)
    assert same(policy_of(other / "checkpoint-2"), policy_of(run / "checkpoint-2"))
    for batch in range(3, 7):
        assert same(changed.weights[batch], policy_of(other / f"checkpoint-{batch}")), batch
        assert not same(changed.weights[batch], policy_of(run / f"checkpoint-{batch}"))
    before, logged = (read_metrics(folder) for folder in (run, other))
    assert {**changed.metrics[3], "reward/letters": 0} == {**logged[3], "reward/letters": 0}  # the total is replaced
    assert [changed.metrics[b] for b in (4, 5, 6)] == [logged[b] for b in (4, 5, 6)]

    told = found["what_if"]
    assert told["changes"] == [{"completion": number, "was": was, "is": pytest.approx(was + 20.5)}]
    assert told["completions_differ_from"] == 4 + staleness
    assert [each["batch"] for each in told["batches"]] == [3, 4, 5, 6]
    theirs = json_rows(other / "samples.jsonl")
    for each in told["batches"]:
        batch = each["batch"]
        for name, key in (("score", "objective/scores"), ("kl", "objective/kl")):
            assert each[name] == {"was": before[batch][key], "is": logged[batch][key]}
        ours, others = ([row["completion"] for row in rows if row["batch"] == batch] for rows in (samples, theirs))
        assert each["completions"] == len(ours) == 8 * {"ppo": 1}.get(algorithm, 2)
        assert each["others"] == sum(a != b for a, b in zip(ours, others, strict=True))
        old, new = step(run, batch), step(other, batch)
        assert each["update"]["change"] == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-4)
        assert each["update"]["cosine"] == pytest.approx(torch.cosine_similarity(new, old, dim=0).item(), abs=1e-5)
        assert each["kl_per_token"] > 0
    page = (run / "explain" / "explain-3.txt").read_text()
    assert f"What if completion {number} scores {was + 20.5:.4g}, not {was:.4g}" in page
    assert f"Completions are others from batch {4 + staleness} on." in page


def test_with_the_same_score_it_is_the_run_bit_for_bit(train, tmp_path):
    run = train(algorithm="rloo", staleness=1, save_steps=1, num_samples_logged=100)
    rows = json_rows(run / "samples.jsonl")
    scores = [row["score"] for row in rows if row["batch"] == 2]
    same_scores = {1: scores[0], 4: scores[3]}
    plain, other = (
        Repetition(part(run, 2, 5, "checkpoint-1"), tmp_path / name, keep=True, otherwise=Otherwise(given))
        for name, given in (("was", None), ("now", same_scores))
    )
    was, now = plain.course, other.course
    missing, way = (difference(plain.end, x) for x in (plain.end_without, policy_of(run / "checkpoint-1")))
    one_step = moved(run / "checkpoint-1", run / "checkpoint-2")
    assert plain.later[-1]["size"] == pytest.approx(norm(missing) / one_step, rel=1e-6)
    assert plain.later[-1]["share"] == pytest.approx(inner(missing, way) / norm(way) ** 2, rel=1e-6)
    assert was.metrics == now.metrics
    assert list(was.weights) == list(now.weights) == [1, 2, 3, 4, 5]
    for batch, weights in now.weights.items():
        assert same(weights, was.weights[batch])
        assert same(weights, policy_of(run / f"checkpoint-{batch}"))
    given = {str(number): score for number, score in same_scores.items()}
    told = run_explain(ExplainConfig(str(run), batch=2, after=3, top=0, what_if=given))["what_if"]
    assert told["completions_differ_from"] is None
    for each in told["batches"]:
        assert (each["others"], each["update"]["change"], each["kl_per_token"]) == (0, 0.0, 0.0)
        assert each["score"]["was"] == each["score"]["is"]
        assert each["kl"]["was"] == each["kl"]["is"]
    assert "All completions are the same." in (run / "explain" / "explain-2.txt").read_text()


def test_what_cannot_be_asked_says_so_before_a_model_is_loaded(train, monkeypatch):
    run = train()
    monkeypatch.setattr(repetition, "make_trainer", None)
    for scores, right in (
        ({"0": 1.0}, "must be numbers of completions, from 1"),
        ({"first": 1.0}, "must be numbers of completions, from 1"),
        ({"1": 1e39}, "a finite float32"),
        ({"1": None}, "a finite number"),
        ({"17": 1.0}, "must be of completions 1 to 16, which a batch of .* has"),
    ):
        with pytest.raises(ConfigError, match=rf"^what_if: .*{right}"):
            run_explain(ExplainConfig(str(run), batch=2, what_if=scores))
    for name in ("after", "before"):
        with pytest.raises(ConfigError, match=rf"^{name}: got -1; must be at least 0"):
            ExplainConfig(str(run), batch=2, **{name: -1})
    with pytest.raises(ConfigError, match=r"^without: got \[17\]; must be of completions 1 to 16"):
        run_explain(ExplainConfig(str(run), batch=2, without=[17]))
    with pytest.raises(ConfigError, match=r"^settings: got 'learning_rate'; must be keys of the objective: beta, "):
        run_explain(ExplainConfig(str(run), batch=2, settings={"learning_rate": 1.0}))
    with pytest.raises(ConfigError, match=r"^sample: got 1; must be null with what_if"):
        run_explain(ExplainConfig(str(run), batch=2, sample=1, without=[3]))


def test_without_a_completion_it_is_the_update_without_its_unit(train):
    run = train(algorithm="grpo", staleness=1, num_mini_batches=1, save_steps=1)
    found = run_explain(ExplainConfig(str(run), batch=3, top=1))
    first = found["completions"][0]
    number = first["rows"][0]["number"]
    again = run_explain(ExplainConfig(str(run), batch=3, top=1, without=[number], overwrite=True))
    assert again["what_if"]["without"] == [number]
    now = again["what_if"]["batches"][0]
    assert now["update"]["change"] == pytest.approx(first["without"]["change"], rel=1e-4)
    assert now["others"] == 0
    assert f"without completions {number}" in (run / "explain" / "explain-3.txt").read_text()


def test_other_settings_of_one_batch(train):
    run = train(algorithm="grpo", staleness=1, save_steps=1, total_episodes=24)

    def change(**settings) -> float:
        config = ExplainConfig(str(run), batch=2, top=0, after=0, settings=settings, overwrite=True)
        return run_explain(config)["what_if"]["batches"][0]["update"]["change"]

    assert change(cliprange=0.2) == 0.0
    assert change(**{"cliprange": 1e-4, "off_policy.importance": "none"}) > 1e-3


@pytest.mark.parametrize("algorithm", ["online_dpo", "ppo"])
def test_batches_are_ranked_by_what_they_added_to_the_way(train, algorithm):
    run = train(algorithm=algorithm, save_steps=1)
    found = run_explain(ExplainConfig(str(run), batch=5, top=0, before=3, after=1))
    assert found["repeated"] == {"from": "checkpoint-2", "batches": 3, "after": 1, "compared": [3, 4, 5, 6]}
    told = found["before"]
    assert told["norm"] == pytest.approx(moved(run / "checkpoint-2", run / "checkpoint-5"), rel=1e-6)
    assert {row["batch"] for row in told["batches"]} == {3, 4, 5}
    shares = [row["share"] for row in told["batches"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) + told["earlier"] == pytest.approx(1, abs=0.1)  # but for what Adam divides by
    assert all(row["kl_per_token"] > 0 for row in told["batches"])
    # Without its gradient, the batch has moved the weights by what earlier ones had left: the same in three ways.
    assert found["later"][0]["size"] == pytest.approx(found["step"]["without_gradient"]["change"], rel=1e-9)
    assert [row["batch"] for row in found["later"]] == [5, 6]
    alone = run_explain(ExplainConfig(str(run), batch=5, top=0, before=1, after=0, overwrite=True))
    (only,) = alone["before"]["batches"]
    assert only["share"] == pytest.approx(1 - alone["before"]["earlier"]) == alone["later"][0]["share"]
    assert only["kl_per_token"] == alone["step"]["without_gradient"]["kl_per_token"]
    assert "Batches (ranked: the 1 up to this one" in (run / "explain" / "explain-5.txt").read_text()
    start = run_explain(ExplainConfig(str(run), batch=2, top=0, before=9, after=0))["before"]
    assert {row["batch"] for row in start["batches"]} == {1, 2}
    assert start["earlier"] == pytest.approx(0, abs=1e-9)
