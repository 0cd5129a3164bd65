"""The page about runs: what it reads, computes, draws, says, leaves out and escapes."""

from __future__ import annotations

import html
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from browser import browser
from tiny import PROMPTS, StopAfter, byte_tokenizer, count_letters, json_rows, new_args, new_policy, rare

from async_rlhf.cli import _spelt_out
from async_rlhf.config import ConfigError
from async_rlhf.run.folder import REPORT
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.studies.explain import repetition
from async_rlhf.studies.report import command as report
from async_rlhf.studies.report.charts import GREY, Axis, Key, Series, curves, render_png, thinned
from async_rlhf.studies.report.command import report_of_run, run_report
from async_rlhf.studies.report.config import ReportConfig
from async_rlhf.studies.report.html import LIMIT, embedded, page
from async_rlhf.studies.report.idleness import idleness
from async_rlhf.studies.report.proof import document, proof
from async_rlhf.studies.report.reading import Evaluation, ReadRun, Span, evaluations_of, read_run
from async_rlhf.studies.report.tables import overview
from async_rlhf.studies.report.verdict import verdict
from async_rlhf.studies.report.warnings import THRESHOLDS, warnings

EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\u2028<!--\ud800"
EVIL += "{{ 7 * 7 }}{% if %}"


def train(folder: Path, name: str, callbacks=(), **changes) -> Path:
    args = new_args(folder, name, save_steps=2, eval_steps=2, **changes)
    OnlineTrainer(
        new_policy(),
        args,
        PROMPTS,
        reward_funcs=count_letters,
        processing_class=byte_tokenizer(),
        eval_dataset=PROMPTS[:3],
        callbacks=callbacks,
    ).train()
    return Path(args.output_dir)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A finished synchronous run, and an asynchronous one that was stopped after its third batch and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    done = train(folder, "sync")
    with pytest.raises(SystemExit, match=r"^0$"):
        train(folder, "async", [StopAfter(4)], staleness=1)
    stopped = folder / "stopped"
    shutil.copytree(folder / "async", stopped)
    resumed = train(folder, "async", staleness=1, resume=True)
    return {"sync": done, "async": resumed, "stopped": stopped}


@pytest.fixture
def copied(runs, tmp_path):
    """A run's folder that may be damaged."""
    return {name: Path(shutil.copytree(path, tmp_path / name)) for name, path in runs.items()}


def data_of(text: str) -> dict:
    """What the page's script gets."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


class Elements(HTMLParser):
    """Counts elements, and takes the text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        if self.tags[-1:] not in (["script"], ["style"]):
            self.text += data


def made(folder: Path, rows: list[dict], **config) -> ReadRun:
    """A run with these rows of metrics."""
    full = [{"batch": float(i), "episode": 4.0 * i, "completions": 8.0 * i, **row} for i, row in enumerate(rows, 1)]
    return ReadRun(folder, "made", {"samples_per_prompt": 2, **config}, full)


# ---------------------------------------------------------------- looks


def test_a_run_has_one_colour_an_algorithm_one_shape_and_s_one_dash():
    series = [Series("a", "ppo", 0), Series("b", "ppo", 4), Series("c", "rloo", 4), Series("sft", reference=True)]
    looks = Key(series).looks
    assert len({look.colour for look in looks.values()}) == 4
    assert looks["sft"].colour == GREY
    assert looks["a"].shape == looks["b"].shape != looks["c"].shape
    assert looks["a"].dash == (1, 0) != looks["b"].dash == looks["c"].dash
    assert (looks["a"].fill, looks["b"].fill) == (0.0, 1.0)
    rows = [{"series": name, "x": i, "y": 1.0} for name in "ab" for i in range(100)]
    spec = curves(rows, Key(series), Axis("x", "x"), Axis("y", "y"))
    for layer in spec["layer"]:
        for channel in ("color", "stroke"):
            if channel in layer["encoding"]:
                scale = layer["encoding"][channel]["scale"]
                assert dict(zip(scale["domain"], scale["range"], strict=True)) == {
                    n: k.colour for n, k in looks.items()
                }
    assert [(row["series"], row["x"]) for row in spec["data"]["values"] if row["_last"]] == [("a", 99), ("b", 99)]


def test_thinned_rows_are_means_of_neighbours():
    rows = [{"batch": i, "value": float(i)} for i in range(1, 11)]
    assert thinned(rows, 100, ["value"]) == rows
    pairs = thinned(rows, 5, ["value"])
    assert pairs == [{"batch": 2 * i, "value": 2 * i - 0.5, "low": 2 * i - 1, "high": 2 * i} for i in range(1, 6)]
    assert thinned([*rows, {"batch": 11, "value": 99.0, "high": 100.0}], 1, ["value"])[0]["high"] == 100.0  # a spike
    assert thinned(rows, 5, ["batch"])[0] == {"batch": 1.5, "value": 2.0}


def test_a_png_is_drawn_without_complaint(tmp_path, capfd):
    key = Key([Series("a", "ppo", 0)])
    rows = [{"series": "a", "x": i, "y": i, "low": i - 1, "high": i + 1} for i in range(3)]
    render_png(curves(rows, key, Axis("x", "x"), Axis("y", "y")), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert os.listdir(tmp_path) == ["a.png"]
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------- who waited


def span(track: str, name: str, start: float, end: float, batch: int = 1) -> Span:
    return Span(track, name, start, end, batch)


def test_idle_shares_of_a_trace_made_by_hand():
    spans = [
        span("learner", "wait", 0, 4),
        span("learner", "mismatch", 3, 4),  # work within the waiting
        span("learner", "train", 4, 8),
        span("learner", "evaluate", 8, 10),
        span("learner", "wait", 8, 9, 0),  # for the evaluation's answers
        span("generator 0", "load", 0, 1),
        span("generator 0", "generate", 1, 3),
        span("generator 0", "generate", 7, 8, 2),
        span("generator 1, 1 of 2", "generate", 0, 4),
        span("generator 1, 2 of 2", "generate", 3, 6),  # overlaps: one generator
        span("rewards", "rewards", 0, 9),
    ]
    found = idleness([spans])
    expected = {"wait": 0.4, "mismatch": 0.1, "train": 0.4, "evaluate": 0.1, "other": 0.0}
    assert found.learner == pytest.approx(expected)
    # Generator 0 did nothing for 4 of 8 seconds, generator 1 never in its 6.
    assert (found.generators, found.number) == (pytest.approx(4 / 14), 2)
    assert found.text == "The learner waited 40% of the time, its 2 generators 29%."
    assert idleness([[*spans, Span("learner", "fault", 100, 100, 1, "killed")]]) == found  # a fault is no work
    # A second start that only waits: of 20 seconds the learner waited 14.
    assert idleness([spans, [span("learner", "wait", 0, 10)]]).learner["wait"] == pytest.approx(0.7)
    alone = idleness([[span("learner", "wait", 0, 10), span("learner", "generate", 1, 10)]])
    assert alone.text == "The learner waited 10% of the time and sampled itself for 90% of it: both sides took turns."
    assert idleness([[span("generator 0", "generate", 0, 1)]]) is None


# ---------------------------------------------------------------- reading


def test_what_folders_of_real_runs_say(runs):
    sync, resumed, stopped = (read_run(runs[name], name) for name in ("sync", "async", "stopped"))
    assert (sync.state, resumed.state, stopped.state) == ("finished", "finished", "interrupted")
    assert (sync.batches, sync.planned, stopped.batches, stopped.planned) == (6, 6, 4, 6)
    assert (sync.algorithm, sync.staleness, resumed.staleness) == ("online_dpo", 0, 1)
    assert [row["batch"] for row in resumed.rows] == [1, 2, 3, 4, 5, 6]
    assert [row["batch"] for row in sync.evals] == [2, 4, 6]
    assert (len(sync.starts), len(resumed.starts)) == (1, 2)
    assert list(resumed.traces) == ["trace.json", "trace-from-4.json"]
    assert sync.problems == []
    assert idleness(sync.traces.values()).generators is None
    assert 0 < idleness(resumed.traces.values()).generators < 1


def test_the_charts_have_the_numbers_of_the_runs(runs):
    read = [read_run(runs[name], name) for name in ("sync", "async")]
    specs = data_of(page(read))["specs"]
    for run in read:
        shown = [row for row in specs["val-ratio-p50"]["data"]["values"] if row["series"] == run.name]
        logged = [(row["batch"], *(row[f"val/ratio_{part}"] for part in ("p01", "p50", "p99"))) for row in run.rows]
        drawn = [(row["batch"], row["low"], row["value"], row["high"]) for row in shown]
        assert drawn == [pytest.approx(values, rel=1e-5) for values in logged]
        path = [row for row in specs["score-kl"]["data"]["values"] if row["series"] == run.name]
        logged = [(row["objective/kl"], row["objective/scores"]) for row in run.rows]
        assert [(row["kl"], row["score"]) for row in path] == [pytest.approx(values, rel=1e-5) for values in logged]
        assert path[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert specs["schedule-lag-mean"]["layer"][0]["encoding"]["x"]["scale"]["zero"] is True
    lags = {row["series"]: row["value"] for row in specs["schedule-lag-mean"]["data"]["values"]}
    assert lags == {"sync": 0, "async": 1}
    work = specs["work-1"]["data"]["values"]
    assert {row["track"] for row in work} == {"generator 0", "learner", "reference", "rewards", "publisher"}
    assert min(row["start"] for row in work) == 0
    assert {row["text"] for row in work if row["what"] == "train"} == {"5", "6"}  # of the newest start
    assert specs["val-ess-token"]["layer"][-1]["data"]["values"] == [{"value": 0.7}]
    assert specs["val-ess-token"]["layer"][0]["encoding"]["y"]["scale"]["domain"] == [0, 1]


def test_runs_with_other_batches_are_compared_by_episodes(runs):
    run = read_run(runs["sync"], "sync")
    other = replace(run, name="half", rows=[{**row, "episode": row["episode"] / 2} for row in run.rows])
    spec = data_of(page([run, other]))["specs"]["schedule-lag-mean"]
    assert spec["layer"][0]["encoding"]["x"]["field"] == "episode"


def test_a_run_that_is_written_right_now(copied):
    """A half-written last line, a trace that is cut off, and no end."""
    run = copied["stopped"]
    for name in ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"batch": 5.0, "episo')
    (run / "trace.json").write_text((run / "trace.json").read_text()[:-80])
    found = read_run(run, "run")
    assert (found.batches, found.state, found.problems) == (4, "interrupted", [])
    assert "Not finished" in [warned.title for warned in warnings([found])]
    text = page([found], refresh=3)
    assert "ended before it was done, after batch 4 of 6" in text
    assert data_of(text)["refresh"] == 3
    (run / "metrics.jsonl").write_text("")  # a run that has only begun
    assert "after batch 0" in page([read_run(run, "run")])


def test_generators_that_were_lost_are_in_the_page(copied):
    trace = copied["stopped"] / "trace.json"
    text = trace.read_text().removesuffix("]\n")
    why = "it died (exit code -9) <b> at http://me:SECRET@host"
    fault = {"ph": "i", "pid": 1, "tid": 0, "ts": 0.0}
    events = [fault | {"name": "restarted", "args": {"why": why}}, fault | {"name": "end"}]
    first = json.loads(next(line for line in text.splitlines() if '"ph": "X"' in line).rstrip(","))
    events[0]["ts"] = first["ts"] + 2.5e6
    trace.write_text(text.rstrip().rstrip(",") + ",\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    run = read_run(copied["stopped"], "run")
    (found,) = [span for span in run.traces["trace.json"] if span.why]
    assert (found.name, round(found.start, 3), found.end - found.start) == ("restarted", 2.5, 0.0)
    shown = page([run])
    assert "Faults and restarts" in shown
    assert "it died (exit code -9) &lt;b&gt; at http://***@host" in shown  # older traces have it whole
    assert "SECRET" not in shown


def test_lines_that_are_no_json_are_counted_and_said(copied):
    path = copied["sync"] / "samples.jsonl"
    path.write_text("no json\n[1]\n" + path.read_text())
    found = read_run(copied["sync"], "run")
    assert found.problems == ["samples.jsonl: 2 lines are not JSON objects and are left out"]
    assert "2 lines are not JSON objects" in page([found])


def test_a_training_sample_opens_its_life(copied):
    """What explain has written of it; else the command that does."""
    run = copied["sync"]
    (run / "explain").mkdir()
    (run / "explain" / "explain-1-sample-2.txt").write_text("Sample 2 of batch 1")
    answers = [one for group in data_of(page([read_run(run, "a")]))["samples"] for one in group["answers"]]
    lives = [one["life"] for one in answers if one["batch"] == 1 and one["life"]]
    assert f"async-rlhf explain {run} --sample 1/1" in lives
    assert "Sample 2 of batch 1" in lives
    assert f"async-rlhf explain {run} --sample 1/2" not in lives


def test_what_was_checked_is_a_table_and_a_document(runs):
    """Of a run with S = 1 that was resumed: tokens, tests and starts are counted; what was not checked is said."""
    run = read_run(runs["async"], "a")
    checks = {check["promise"]: (check["checked"], check["words"]) for check in document(run)["checks"]}
    tokens = sum(sum(row["drawn"].values()) for row in json_rows(runs["async"] / "digests.jsonl"))
    times, words = checks["each token was drawn by the weights that the schedule names"]
    assert times == run.batches
    assert words.startswith(f"{tokens:,} tokens: ")
    assert "by weights of 1 batches before" in words
    assert checks["engine and learner compute the same"][0] == sum("engine/kl" in row for row in run.rows)
    assert checks["a resumed run goes on as the same run"][0] == 1
    assert checks["the run repeats"] == (0, f"not tried by the run itself: async-rlhf diff {run.folder} tries it")
    text = Elements(page([run])).text
    assert "What was checked" in text
    assert "not checked" in text
    older = replace(run, digests=(), rows=[{"batch": 1.0}], starts=())
    assert [check.checked for check in proof(older)] == [1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("depth", [100, rare(900), 100_000])
def test_values_that_are_nested_without_end_are_damage_like_other(copied, tmp_path, depth):
    """In every file of a run that the page reads."""
    run, deep = copied["async"], "[" * depth + "]" * depth
    judged = tmp_path / "judged"
    judged.mkdir()
    files = sorted(path for path in run.iterdir() if path.suffix in (".json", ".jsonl", ".yml"))
    assert {path.name for path in files} >= {"metrics.jsonl", "samples.jsonl", "environment.json", "trace.json"}
    for path in [*files, run / "final" / "trainer_state.json", judged / "evaluation.json", judged / "samples.jsonl"]:
        before = path.read_text() if path.exists() else ""
        for text in (deep, f'{{"name": {deep}}}', f'[{{"name": {deep}}}]', deep[:depth]):
            path.write_text(f"{before if path.suffix == '.jsonl' else ''}{text}\n")
            found = read_run(run, "a")
            assert "Runs" in Elements(page([found], evaluations_of([found], [judged]))).text
            if depth == 100_000 and path.suffix == ".jsonl" and path.parent == run:
                assert any(told.startswith(f"{path.name}: 1 lines are not JSON") for told in found.problems)
        path.write_text(before)


WRONG = [{"a": 1}, *map(rare, ("x", [1], [None], 10**400, True))]
FIGURES = {"reward_mean": {"estimate": 1.0, "low": 0.0, "high": 2.0}, "mean_length": 3.0}
JUDGED = {"config": {"models.sft": "elsewhere"}, "results": {"reference": "sft", "prompts": 2, "notes": ["n"]}}
JUDGED["results"] |= {"reference_response": FIGURES, "models": {"sft": FIGURES, "checkpoint-2": FIGURES}}
SAID = {"query": "q", "reference_response": "r", "reference_score": 1.0, "models": {"sft": {"score": 1.0}}}
SPOKEN = {"messages": [{"role": "assistant", "content": "a"}], "rewards": [1.0], "metrics": {"turns": 1}}


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_values_of_wrong_types_are_left_out_and_said(copied, tmp_path, wrong):
    """In every file, whichever value it is; the page is made without it."""
    run, judged = copied["async"], tmp_path / "judged"
    judged.mkdir()
    samples = run / "samples.jsonl"
    samples.write_text("".join(json.dumps({**row, **SPOKEN}) + "\n" for row in json_rows(samples)))
    whole = {path: path.read_text() for path in (run / "metrics.jsonl", samples, run / "eval_samples.jsonl")}
    whole |= {run / "environment.json": (run / "environment.json").read_text()}
    whole |= {judged / "evaluation.json": json.dumps(JUDGED), judged / "samples.jsonl": f"{json.dumps(SAID)}\n"}

    def read():
        found = read_run(run, "a")
        assert "Runs" in Elements(page([found], evaluations_of([found], [judged]))).text
        return [told for told in found.problems if "of another type" in told]

    for path, text in whole.items():
        path.write_text(text)
    assert read() == []
    for path, text in whole.items():
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        value = json.loads(lines[-1])
        parts = [*value] if isinstance(value, list) else [value]
        if "results" in value:
            parts += [value["config"], value["results"], *value["results"]["models"].values(), FIGURES["reward_mean"]]
        for part in parts:
            names = [*part][:: 9 if path.name == "metrics.jsonl" else 1]
            for name in names:
                right, part[name] = part[name], wrong
                path.write_text("".join(f"{line}\n" for line in [*lines[:-1], json.dumps(value)]))
                assert all(line.startswith(path.name) and f"({name})" in line for line in read())
                part[name] = right
        path.write_text(text)
    (run / "environment.json").write_text('[{"packages": 3, "async_rlhf": [], "started": 1}, 5]')
    samples.write_text('{"batch": "x", "prompt": "p", "completion": "c", "messages": [1]}\n')
    said = "values are of another type than a run writes and are left out"
    assert read() == [
        f"samples.jsonl: 2 {said} (batch, messages)",
        f"environment.json: 3 {said} (async_rlhf, packages, start)",
    ]


def test_a_configuration_of_any_bytes_is_read_or_refused_at_once(copied):
    run, draw = copied["sync"], random.Random(0)
    for number in range(300):
        letters = [
            bytes([one]) for one in (range(256) if number % 2 else b"0123456789_:-+.eE?![]{}&*<>|@ \n\t'\"%,#~ab")
        ]
        (run / "run.yml").write_bytes(b"".join(draw.choice(letters) for _ in range(draw.choice([50, 2000]))))
        start = time.perf_counter()
        read_run(run, "a")
        with suppress(ConfigError):
            repetition.read_run(str(run))
        assert time.perf_counter() - start < 2


def test_values_that_are_not_finite_are_missing(copied):
    run = copied["sync"]
    for name, keys in (("metrics.jsonl", ("objective/scores", "objective/kl")), ("samples.jsonl", ("score",))):
        rows = json_rows(run / name)
        last = max(row["batch"] for row in rows)
        for row in rows:
            if row["batch"] == last and "eval_objective/scores" not in row:
                row |= dict(zip(keys, (float("nan"), float("-inf")), strict=False))
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_run(run, "run")
    assert found.problems[0] == "metrics.jsonl: 2 values are NaN or infinite and are left out"
    text = page([found])
    assert "2 values are NaN or infinite" in text
    path = data_of(text)["specs"]["score-kl"]["data"]["values"]
    assert [row["score"] for row in path] == [
        pytest.approx(row["objective/scores"], rel=1e-5) for row in found.rows if row["batch"] < 6
    ]
    assert {row["batch"] for row in found.samples if "score" not in row} == {6}


def test_the_staleness_of_a_run_in_flight_is_at_most_that(copied):
    run, said = copied["async"], []
    for in_flight in (False, True):
        config = yaml.safe_load((run / "run.yml").read_text())
        config["train"]["generation"]["in_flight"] = in_flight
        (run / "run.yml").write_text(yaml.safe_dump(config))
        said += [row for row in overview([read_run(run, "run")])[1] if row[0] == "S, staleness"]
    assert said == [["S, staleness", "1"], ["S, staleness", "1, at most"]]


def test_only_the_metrics_are_needed(copied, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(copied["sync"] / "metrics.jsonl", bare)
    found = read_run(bare, "bare")
    assert {problem.split()[0] for problem in found.problems} == {"run.yml", "environment.json", "trace.json"}
    text = page([found])
    assert {"score-kl", "val-ratio-p50"} <= data_of(text)["specs"].keys()
    assert 'id="work"' not in text
    for junk in ("run.yml", "environment.json", "trace.json"):
        (bare / junk).write_text("{[")
    assert len(page([read_run(bare, "bare")])) > 1000


def test_no_run_or_another_stage_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"runs: got .*; must be the output folder of a run"):
        read_run(tmp_path, "x")
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    with pytest.raises(ConfigError, match="is of another command than train"):
        read_run(tmp_path, "x")


# ---------------------------------------------------------------- what may not be shown, or not as it is


def test_texts_of_models_stay_texts(copied):
    run = copied["sync"]
    rows = json_rows(run / "samples.jsonl")
    rows[0] |= {"prompt": EVIL, "completion": EVIL * 2}
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = yaml.safe_load((run / "run.yml").read_text())
    config["model"] = EVIL.replace("\ud800", "").replace("\u2028", "")
    (run / "run.yml").write_text(yaml.safe_dump(config))
    text = page([read_run(run, EVIL)])
    text.encode()  # a lone surrogate became an escape
    plain, evil = Elements(page([read_run(copied["async"], "run")])), Elements(text)
    assert evil.tags.count("script") == plain.tags.count("script") == 3
    assert "img" not in evil.tags
    assert "window.hacked = 1" in evil.text  # as text
    assert any(group["prompt"] == EVIL for group in data_of(text)["samples"])
    assert "<" not in embedded({"x": EVIL})
    assert json.loads(embedded({"x": EVIL})) == {"x": EVIL}


def test_conversations_say_who_speaks_what_is_called_and_what_it_is_worth(copied):
    call = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    said = [("Be brief.\n", {"role": "user"}), ("Let me\nuser: see.\n", {"role": "assistant", "tool_calls": [call]})]
    said += [("clear", {"role": "tool", "name": "weather"}), ("", {"role": "assistant"})]
    row = {"batch": 1, "prompt": "?", "completion": "", "rewards": [0.5, None], "metrics": {"turns": 2.0}}
    row["messages"] = [{"content": text, **who} for text, who in said]
    (copied["sync"] / "samples.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = [
        group for group in data_of(page([read_run(copied["sync"], "run")]))["samples"] if group["kind"] == "training"
    ]
    text = 'user: Be brief.\nassistant: Let me\n  user: see. weather({"city": "Zürich"}) [0.5]\ntool weather: clear\n'
    assert found["answers"][0]["text"] == f"{text}assistant: "
    assert found["answers"][0]["metrics"] == {"turns": 2}


def test_secrets_and_free_options_are_left_out(copied):
    run = copied["sync"]
    config = yaml.safe_load((run / "run.yml").read_text())
    config["train"]["generation"]["vllm"]["options"] = {"hf_token": "SECRET1", "anything": "SECRET2"}
    config["train"]["ray"]["runtime_env"] = {"env_vars": {"KEY": "SECRET3"}}
    config["train"]["generation"]["api_key"] = "SECRET4"
    config["train"]["generation"]["urls"] = ["https://me:SECRET5@host/v1?api_key=SECRET6"]
    config["reward_funcs"] = ["judge:score(token='SECRET7', prefix='SECRET8', scale=2.5)"]
    (run / "run.yml").write_text(yaml.safe_dump(config))
    starts = json.loads((run / "environment.json").read_text())
    starts[0]["command"] = [
        "train",
        "--reward=judge:score(prefix='SECRET9')",
        "--train.generation.vllm.options={a: SECRET0}",
        "--train.generation.vllm.options.hf_token_x=SECRETA",
        "--ray.runtime_env.KEY",
        "SECRETB",
        "--base.train.parallel.deepspeed.flag",
        "--train.seed=31",
        "shown",
    ]
    (run / "environment.json").write_text(json.dumps(starts))
    text = page([read_run(run, "run")])
    assert re.findall(r"SECRET\w", text) == []
    for words in ("options.hf_token_x=***", "--ray.runtime_env.KEY ***", "deepspeed.flag --train.seed=31 shown"):
        assert words in text
    assert "scale=2.5" in text
    assert "https://***@host" in text


def test_a_page_stays_small_and_says_what_it_left_out(tmp_path):
    rows = [{"objective/scores": 0.001 * i, "val/ess_token": 1.0, "objective/kl": 0.1 * i} for i in range(20_000)]
    run = made(tmp_path, rows)
    samples = [
        {
            "batch": b,
            "draw": d,
            "score": 1.0,
            "prompt": f"prompt {b} {d}",
            "completion": "ab " * 3000,
            "finish_reason": "stop",
        }
        for b in range(1, 1001)
        for d in range(2)
    ]
    run = replace(run, samples=samples)
    text = page([run])
    assert len(text.encode()) < LIMIT
    data = data_of(text)
    batches = {one["batch"] for group in data["samples"] for one in group["answers"]}
    assert 20 < len(batches) < 1000
    assert re.search(rf"training samples of {len(batches)} of 1000 batches", text)
    assert all(
        one["text"].endswith("… (6,000 more characters)") for group in data["samples"] for one in group["answers"]
    )
    assert len(data["specs"]["val-ess-token"]["data"]["values"]) <= 2000
    path = data["specs"]["score-kl"]["data"]["values"]
    assert (path[0]["kl"], len(path)) == (0.0, 21)  # the first as it is, then means
    # More work than fits: each run's timeline has less of it.
    worked = {"trace.json": [span("learner", "train", i, i + 1, i) for i in range(4000)]}
    many = page([replace(run, name=str(i), traces=worked, rows=run.rows[:10]) for i in range(20)])
    assert len(many.encode()) < LIMIT
    assert "of 4000 pieces of work" in many


# ---------------------------------------------------------------- warnings


FLAT = {"objective/scores": 1.0, "objective/kl": 2.0, "val/response_length": 20.0, "policy/entropy_avg": 2.0}
FLAT |= {"val/ended_share": 0.9, "objective/ties": 0.0, "val/ess_token": 0.99, "val/ess_sequence": 0.9}
FLAT |= {"policy/clipfrac_avg": 0.1, "policy/importance_capped": 0.0, "grad_norm": 1.0, "optimizer_steps": 4.0}
FLAT |= {"engine/logprob_difference": 1e-6, "engine/sampling_evidence": -1.0}
RISES = {"objective/scores": lambda i: 0.1 * i}


@pytest.mark.parametrize(
    ("changes", "title", "figure"),
    [
        ({}, None, ""),
        (RISES, None, ""),
        ({"val/ended_share": 1 - THRESHOLDS.cut_off}, "Answers are cut off", "30%"),
        (
            {"val/ended_share": 0.5, "episode/out_of_room": 0.4},
            "Episodes end for want of room",
            "generation.episode_length cut off 40%",
        ),
        (
            {"val/ended_share": 0.5, "episode/out_of_turns": 0.3},
            "Episodes end for want of turns",
            "generation.max_turns cut off 30%",
        ),
        ({"optimizer_steps": lambda i: 4.0 * (i < 31)}, "Nothing is learnt", "last 10 logged batches"),
        ({"objective/ties": 2.0}, "Many prompts teach nothing", "50% of the last prompts"),  # of 4 prompts
        ({"objective/kl": 12.0}, "Far from the reference", "0.60 per token"),
        ({"objective/kl": lambda i: 0.1 * i}, "KL grows without a gain", "to 3.65 nats"),
        ({"val/ess_token": 0.5}, "The effective sample size is low", "50% of their tokens"),
        ({"val/ess_sequence": 0.2}, "The effective sample size is low", "20% of their completions"),
        ({"policy/clipfrac_avg": 0.4}, "Much is clipped", "40% of the ratios"),
        ({"policy/importance_capped": 0.2}, "Much is clipped", "20% of the importance weights"),
        ({"policy/entropy_avg": lambda i: 2 - 0.045 * i}, "The policy has become narrow", "nats"),
        ({**RISES, "val/response_length": lambda i: 20 + i}, "Answers grow with the score", "to 56.5 tokens"),
        (
            {**RISES, "reward/good": lambda i: 2.0 - 0.01 * (i - 12) ** 2},
            "The rewards part",
            "good fell from 1.39 to -4.05; it was highest about batch 12",
        ),
        ({**RISES, "reward/good": lambda i: 0.01 * (i - 12) ** 2}, None, ""),
        (
            {**RISES, "reward/rm_deviation": lambda i: 1.0 + 0.05 * i},
            "The reward models disagree more and more",
            "rm_deviation from 1.23 to 2.83",
        ),
        ({**RISES, "reward/rm_deviation": lambda i: 3.0 - 0.05 * i}, None, ""),
        ({"objective/kl": lambda i: 0.02 * i}, None, ""),  # it is small
        ({**RISES, "reward/skipped": lambda i: 5.0 * (i <= 20)}, "Rewards are missing", "100 completions"),
        ({"engine/logprob_difference": 0.1}, "Engine and learner disagree", "0.1 nats"),
        ({"engine/sampling_evidence": lambda i: 3.5 if i == 7 else 0}, "The engine may not draw what it says", "3.5"),
        ({"grad_norm": lambda i: 50.0 if i == 7 else 1.0}, "A gradient stands out", "batch 7 has the norm 50"),
        ({"skipped_steps": 1.0}, "Steps are skipped", "40 steps"),
    ],
)
def test_each_warning_has_its_figure_and_no_other_is_raised(changes, title, figure, tmp_path):
    rows = [
        {**FLAT, **{key: value(i) if callable(value) else value for key, value in changes.items()}}
        for i in range(1, 41)
    ]
    stays = [] if "objective/scores" in changes else ["The score has not risen"]
    found = warnings([made(tmp_path, rows)])
    assert [warned.title for warned in found] == [*stays, *([] if title is None else [title])]
    assert all(figure in warned.text for warned in found[len(stays) :])


@pytest.mark.parametrize(
    ("score", "title", "figure"),
    [
        (lambda i: 0.01 * (i % 5), "The score has not risen", "0.02 in the first third of the batches and 0.0"),
        (lambda i: 0.02 * (i % 5) + 0.0002 * i, "The score has not risen", "(95%, over batches), which may be chance"),
        (lambda i: 0.02 * (i % 5) - 0.01 * i, "The score has fallen", "-0.2"),
        (lambda i: 0.02 * (i % 5) + 0.01 * i, None, ""),
        (lambda i: 0.02 * (i % 5) + min(0.01 * i, 0.1), None, ""),  # it rose, and stays
    ],
)
def test_a_score_that_does_not_rise_beyond_chance(score, title, figure, tmp_path):
    rows = [{**FLAT, "objective/scores": score(i)} for i in range(1, 41)]
    found = warnings([made(tmp_path, rows)])
    assert [warned.title for warned in found] == ([] if title is None else [title])
    assert all(figure in warned.text for warned in found)
    assert not warnings([made(tmp_path, rows[:11])])  # too few to tell


def test_a_penalty_that_falls_is_what_is_wanted(tmp_path):
    rows = [
        {**FLAT, "objective/scores": 0.1 * i, "reward/right": 0.1 * i, "reward/slips": 5 - 0.1 * i} for i in range(41)
    ]
    run = made(tmp_path, rows)
    assert [warned.title for warned in warnings([run])] == ["The rewards part"]
    weighed = replace(run, config={**run.config, "reward_weights": [1.0, -1.0]})
    assert warnings([weighed]) == []


def test_training_against_held_out_and_gold_rewards(tmp_path):
    rows = [{**FLAT, "objective/scores": 0.1 * i} for i in range(1, 41)]
    held_out = [{"batch": 10.0 * i, "eval_objective/scores": 2.0 - i} for i in range(1, 4)]
    found = warnings([replace(made(tmp_path, rows), evals=held_out)])
    assert [warned.title for warned in found] == ["Better in training, worse on held-out prompts"]
    assert "from 0.45 to 3.65" in found[0].text
    assert "from 1 to -1" in found[0].text

    folder = tmp_path / "evaluation"
    folder.mkdir()
    golds = {"sft": 0.1, "checkpoint-100": 0.3, "checkpoint-20": 0.5}
    models = {name: {"reward_mean": {"estimate": x, "low": x - 0.05, "high": x + 0.05}} for name, x in golds.items()}
    results = {"reference": "sft", "reference_response": None, "prompts": 10, "models": models}
    results["reward"] = "gold reward"
    config = {"run": str(tmp_path), "models.sft": "elsewhere"}
    (folder / "evaluation.json").write_text(json.dumps({"config": config, "results": results}))
    run = made(tmp_path, rows)
    (evaluation,) = evaluations_of([run])
    (warned,) = warnings([run], [evaluation])
    assert warned.title == "The gold reward is past its peak"
    assert "0.500 at batch 20 and is 0.300 at batch 100" in warned.text
    text = page([run], [evaluation])
    assert [row["batch"] for row in data_of(text)["specs"]["gold-batches-0"]["data"]["values"]] == [20, 100]
    assert "0.500 [0.450, 0.550]" in text
    assert evaluations_of([replace(run, folder=tmp_path / "other")]) == []  # it is of no run on the page

    del results["reward"]  # as an older version wrote it
    older = json.dumps({"config": config, "results": results}).replace("reward_mean", "gold_mean")
    (folder / "evaluation.json").write_text(older)
    (again,) = evaluations_of([run])
    assert again.results["models"] == evaluation.results["models"]
    assert [warned.title for warned in warnings([run], [again])] == ["The reward is past its peak"]


# ---------------------------------------------------------------- the command


def test_words_of_the_command_line():
    assert _spelt_out("report", ["a", "b", "--out", "x.html", "--open"]) == [
        *("--runs=a", "--runs=b", "--out", "x.html", "--open=true")
    ]
    assert _spelt_out("report", ["a", "--live", "false"]) == ["--runs=a", "--live", "false"]


def test_a_page_of_several_runs_begins_with_a_verdict(runs):
    """By held-out prompts where there are some, by gold rewards of an evaluation first."""
    read = [read_run(runs[name], name) for name in ("async", "sync")]
    (said,) = verdict(read)
    last = [max(row["batch"] for row in run.eval_samples) for run in read]
    scores = [
        {row["row"]: row["score"] for row in run.eval_samples if row["batch"] == batch}
        for run, batch in zip(read, last, strict=True)
    ]
    difference = sum(scores[0][row] - scores[1][row] for row in scores[1]) / len(scores[1])
    assert said.startswith("async against sync: ")
    assert f"held-out score, {difference:+.3f} [" in said
    assert f"on the same {len(scores[1])} prompts" in said
    assert "times as fast" in said
    assert "The learner waited" in said
    assert verdict(read[:1]) == []
    models = {name: {"score": score} for name, score in (("a", 0.75), ("s", 0.25))}
    samples = [{"query": query, "models": models} for query in "xy"]
    config = {f"models.{name}": str(run.folder / "final") for name, run in zip("as", read, strict=True)}
    judged = Evaluation(Path(), config, {"reward": "gold reward", "models": {"a": {}, "s": {}}}, samples)
    assert "more gold reward, +0.500 [+0.500, +0.500] on the same 2 prompts" in verdict(read, [judged])[0]
    bare = [replace(run, eval_samples=[], traces={}) for run in read]
    assert "no held-out prompts, so no interval" in verdict(bare)[0]
    damaged = [replace(run, eval_samples=[{"batch": 1, "score": "x"}, {}], rows=[]) for run in bare]
    assert "their rewards cannot be compared" in verdict(damaged)[0]
    text = page(read)
    assert text.index("In short") < text.index('id="runs-title"')
    assert said in html.unescape(text)


def test_one_page_of_several_runs_and_none_over_a_file_of_others(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [str(runs["sync"]), str(runs["async"])]
    assert run_report(ReportConfig(folders)) == Path(REPORT)
    assert data_of(Path(REPORT).read_text())["runs"] == ["sync", "async"]
    run_report(ReportConfig(folders))  # a page of ours is replaced
    Path("mine.html").write_text("<p>mine")
    with pytest.raises(ConfigError, match=r"out: got 'mine.html'; is there and is no page"):
        run_report(ReportConfig(folders, out="mine.html"))
    assert Path("mine.html").read_text() == "<p>mine"
    with pytest.raises(ConfigError, match=r"out: got 'metrics.jsonl'; must end with .html"):
        ReportConfig(folders, out="metrics.jsonl")
    with pytest.raises(ConfigError, match="must name each once"):
        ReportConfig([folders[0], folders[0]])
    with pytest.raises(ConfigError, match="must name at least one folder"):
        ReportConfig([])
    shutil.copytree(runs["sync"], tmp_path / "other" / "sync")
    run_report(ReportConfig([folders[0], "other/sync"]))
    assert data_of(Path(REPORT).read_text())["runs"] == [f"{runs['sync'].parent.name}/sync", "other/sync"]
    assert [name for name in os.listdir() if name.startswith(".")] == []


def test_without_vl_convert_it_says_what_to_install(runs, monkeypatch):
    monkeypatch.setattr(report, "can_draw", lambda: False)
    with pytest.raises(ConfigError, match=r"install it with: pip install 'async-rlhf\[report\]'"):
        run_report(ReportConfig([str(runs["sync"])]))
    assert report_of_run(runs["sync"]).endswith("(after pip install 'async-rlhf[report]')")


def test_a_run_ends_with_its_page_and_does_not_fail_because_of_it(copied, monkeypatch, caplog):
    run = copied["sync"]
    assert report_of_run(run) == f"warnings, timeline and samples: {run / REPORT}"
    assert "finished, after batch 6 of 6" in (run / REPORT).read_text()
    (run / REPORT).write_text("my own")
    assert report_of_run(run) == f"warnings, timeline and samples: async-rlhf report {run}"
    assert "is no page of async-rlhf report" in caplog.text
    assert (run / REPORT).read_text() == "my own"


@contextmanager
def held(folder: Path):
    """Another process trains there: it logs one more batch when it is told, and ends when it is told."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom async_rlhf.run.folder import hold_folder\n"
        "folder = Path(sys.argv[1])\n"
        "with hold_folder(folder):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    path = folder / 'metrics.jsonl'\n"
        "    last = [line for line in path.read_text().splitlines() if 'time/batch' in line][-1]\n"
        "    path.open('a').write(last.replace('\"batch\": 4.0', '\"batch\": 5.0') + '\\n')\n"
        "    print('logged', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    words = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()


def test_live_follows_a_run_until_it_ends(copied, monkeypatch):
    run = copied["stopped"]
    (run / "eval_samples.jsonl").unlink()
    seen = []

    def sleep(seconds: float) -> None:
        text = (run / REPORT).read_text()
        seen.append(
            (data_of(text)["refresh"], re.search(r"(running now|ended before it was done), after batch \d", text)[0])
        )
        if len(seen) == 1:
            process.stdin.write("log\n")
            process.stdin.flush()
            assert process.stdout.readline() == "logged\n"
        elif len(seen) == 2:
            process.stdin.close()
            process.wait(60)

    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=sleep))
    with held(run) as process:
        run_report(ReportConfig([str(run)], live=True, every=2.5))
    assert seen == [(2.5, "running now, after batch 4"), (2.5, "running now, after batch 5")]
    text = (run / REPORT).read_text()
    assert data_of(text)["refresh"] is None
    assert "ended before it was done, after batch 5" in text


def test_ctrl_c_leaves_a_page_that_does_not_follow(copied, monkeypatch):
    run = copied["stopped"]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=interrupt))
    with held(run):
        run_report(ReportConfig([str(run)], live=True))
        text = (run / REPORT).read_text()
    assert data_of(text)["refresh"] is None
    assert "running now, after batch 4 of 6" in text


# ---------------------------------------------------------------- in a browser


READERS = {
    "document.querySelector('[data-series=sync]').click()": "drawn.length === 6 && drawn[0].series === 'async'",
    "document.querySelector('[data-series=sync]').click() ": "drawn.length === 12",
}
"""What a reader does with the legend, and what must then be drawn of the lags."""


def differs(group) -> float:
    """How far the mean scores of runs lie apart, or the scores of one run."""
    runs: dict[str, list[float]] = {}
    for one in group["answers"]:
        if one["score"] is not None:
            runs.setdefault(one["run"], []).append(one["score"])
    means = [sum(own) / len(own) for own in runs.values()] if len(runs) > 1 else [*itertools.chain(*runs.values())]
    return max(means) - min(means) if means else -1.0


def test_in_a_browser(copied, tmp_path):
    """Every chart is drawn, nothing complains, nothing is asked of a network, a phone need not scroll sideways, search
    finds, and a completion with a script in it is text."""
    rows = json_rows(copied["sync"] / "samples.jsonl")
    rows[0] |= {"completion": "a needle in it " + EVIL}
    (copied["sync"] / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "page.html"
    run_report(ReportConfig([str(copied["sync"]), str(copied["async"])], out=str(out)))
    specs = data_of(out.read_text())["specs"]
    stale = {"schedule-lag-mean", "val-ess-token", "val-ess-sequence", "val-ratio-p50"}
    assert {*specs} == stale | {"score-kl", "work-0", "work-1"}
    with browser() as shown:
        shown.call("Network.enable")
        for width, dark in ((1280, False), (390, True)):
            shown.open(out, width, 900, dark)
            assert shown.run("document.querySelectorAll('[data-drawn=yes] canvas').length") == len(specs)
            assert shown.run("document.documentElement.scrollWidth") <= width
            pixels = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
            blank = f"(c) => !{pixels}.some((x, i, all) => x !== all[i % 4])"
            assert shown.run(f"[...document.querySelectorAll('canvas')].filter({blank}).length") == 0
            assert shown.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
            folded = shown.run("document.querySelectorAll('.folded').length")
            assert folded > 3 if dark else folded == 0  # on a phone
        shown.run("document.querySelector('nav a[href=\"#samples\"]').click()")
        assert shown.run("document.querySelectorAll('.folded').length") == folded - 1
        shown.run("document.getElementById('search').value = 'NEEDLE'")
        shown.run("document.getElementById('search').dispatchEvent(new Event('input'))")
        assert shown.run("document.getElementById('found').textContent") == "1 completions of 1 prompts"
        assert shown.run("document.querySelector('.answer mark').textContent") == "needle"
        assert "window.hacked = 1" in shown.run("document.querySelector('.answer pre').textContent")
        assert shown.run("String(window.hacked)") == "undefined"
        shown.run("document.getElementById('theme').click()")
        for script, told in READERS.items():
            shown.run(script)
            shown.wait_for(f"((drawn) => {told})(window.charts['schedule-lag-mean'].data('source_0'))")
        shown.run("document.getElementById('search').value = ''")
        shown.run("order.value = '1'; order.dispatchEvent(new Event('input'))")
        groups = data_of(out.read_text())["samples"]
        most = max(map(differs, groups))
        told = shown.run("document.querySelector('.group pre').textContent")
        assert told in {group["prompt"] for group in groups if differs(group) == most}
        assert shown.errors == []
        assert {url.split(":")[0] for url in shown.requests} <= {"file", "data", "blob"}


def test_a_page_that_follows_keeps_the_readers_place(runs, tmp_path):
    out = tmp_path / "page.html"
    out.write_text(page([read_run(runs["async"], "run")], refresh=0.7))
    with browser() as shown:
        shown.open(out, 390, 800)
        # It may load itself again at any moment, and be half there.
        drawn = "document.documentElement?.dataset.drawn === 'yes'"
        opened, kind = "document.getElementById('configuration').open", "document.getElementById('kind').value"
        shown.wait_for(f"{drawn} && (document.querySelectorAll('.folded .fold').forEach((one) => one.click()), true)")
        shown.wait_for(f"{drawn} && ({opened} = true, {kind} = 'training', scrollTo(0, 1234), window.before = true)")
        there = f"{opened} === true && {kind} === 'training' && Math.round(scrollY) === 1234"
        shown.wait_for(f"window.before !== true && {drawn} && {there}")
        assert shown.errors == []
