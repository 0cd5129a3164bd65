"""Stages that are skipped where they are done, and supervised fine-tuning."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path

import pytest
import torch

from async_rlhf.algorithms.supervised import SFT
from async_rlhf.commands.evaluation.likelihood import EncodedRow
from async_rlhf.commands.sft import demonstration_rows, encode_rows, run_sft
from async_rlhf.commands.stage import Stage, fingerprint, json_lines
from async_rlhf.commands.train import train_stage
from async_rlhf.config import ConfigError, NewModelConfig, SFTConfig
from async_rlhf.config.base import key
from async_rlhf.config.parsing import parse
from async_rlhf.data import checksums
from async_rlhf.learner.learner import Learner
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.loading import load_policy, load_tokenizer
from async_rlhf.models.saving import write_model
from async_rlhf.models.weights import checksum, named_weights
from async_rlhf.run.config import RunConfig

# ---------------------------------------------------------------- stages


@dataclass(frozen=True)
class Settings:
    source: str
    rate: float = 1.0
    device: str | None = key(None, role="place")
    overwrite: bool = key(False, role="place")


@pytest.fixture
def make_stage(tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("first")

    def make(folder="out", outputs=(), **changes):
        config = Settings(str(source), **changes)
        paths = tuple(tmp_path / folder / name for name in outputs)
        return Stage(tmp_path / folder, "cook", config, {"source": config.source}, not outputs, paths)

    return make


def finish(stage, text="meal", results=None):
    with stage.publish_folder(results or {"loss": 0.5}) as folder:
        (folder / "dish").write_text(text)


def test_a_stage_is_done_once(make_stage, tmp_path, caplog):
    assert make_stage().done() is None
    finish(make_stage())
    caplog.set_level(logging.INFO)
    assert make_stage().done() == {"loss": 0.5}
    assert f"cook: done already, in {tmp_path / 'out'}" in caplog.messages
    assert make_stage(device="cuda:0").done() == {"loss": 0.5}, "where it ran is no difference"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["cook.json", "dish"]


def test_other_settings_are_an_error_that_names_them(make_stage, tmp_path):
    finish(make_stage())
    with pytest.raises(ConfigError, match=r"rate: was 1\.0, is 2\.0\npass --overwrite true"):
        make_stage(rate=2.0).done()
    assert make_stage(rate=2.0, overwrite=True).done() is None
    (tmp_path / "in.txt").write_text("second")
    with pytest.raises(ConfigError, match=r"source: was '.*in\.txt' \(xxh3:\w+\), is '.*in\.txt' \(xxh3:\w+\)"):
        make_stage().done()


def test_a_key_that_an_older_version_did_not_know_counts_as_its_default(make_stage):
    finish(make_stage())
    marker = make_stage().marker
    found = json.loads(marker.read_text())
    del found["config"]["rate"]
    marker.write_text(json.dumps(found))
    assert make_stage().done() == {"loss": 0.5}
    with pytest.raises(ConfigError, match=r"rate: was 1\.0, is 2\.0"):
        make_stage(rate=2.0).done()


def test_inputs_count_by_content(make_stage, tmp_path):
    finish(make_stage())
    os.utime(tmp_path / "in.txt", (1, 1))
    shutil.copy(tmp_path / "in.txt", tmp_path / "copy.txt")
    copied = Stage(
        tmp_path / "out", "cook", Settings(str(tmp_path / "copy.txt")), {"source": str(tmp_path / "copy.txt")}
    )
    assert copied.done() == {"loss": 0.5}


def test_a_model_counts_by_its_weights_and_not_by_its_markers(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    before = fingerprint(str(model))
    (model / "sft.json").write_text("a marker")
    assert fingerprint(str(model)) == before
    (model / "model.safetensors").write_bytes(b"weighty")
    assert fingerprint(str(model)) != before
    assert fingerprint("owner/model") == "owner/model"


def test_a_large_input_is_read_once_until_it_changes(tmp_path, monkeypatch):
    """Also if it changes to the same size and date."""
    monkeypatch.setenv("ASYNC_RLHF_CACHE", str(tmp_path / "cache"))
    read = []
    real = checksums._checksum_now
    monkeypatch.setattr(checksums, "_checksum_now", lambda files, *rest: read.append(len(files)) or real(files, *rest))
    source, folder = tmp_path / "rows.jsonl", tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    source.write_text("a")
    small = [fingerprint(str(path)) for path in (source, folder)]
    assert not (tmp_path / "cache").exists()

    monkeypatch.setattr(checksums, "_LARGE", 1)
    for path in (source, folder):  # just written: not kept yet
        fingerprint(str(path))
    assert read == [1, 2] * 2
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(checksums, "_SETTLED", -1.0)
    read.clear()
    for _ in range(3):
        assert [fingerprint(str(path)) for path in (source, folder)] == small
    assert read == [1, 2]
    time.sleep(0.05)  # longer than the tick of a file system's clock
    for path, text in ((source, "b"), (folder / "model.safetensors", "weighty")):
        before = path.stat()
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = [fingerprint(str(path)) for path in (source, folder)]
    assert all(one != other for one, other in zip(small, changed, strict=True))
    assert [fingerprint(str(path)) for path in (source, folder)] == changed
    assert read == [1, 2] * 2


def test_a_kept_checksum_that_is_damaged_is_computed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNC_RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checksums, "_LARGE", 1)
    monkeypatch.setattr(checksums, "_SETTLED", -1.0)
    (tmp_path / "rows.jsonl").write_text("a")
    expected = fingerprint(str(tmp_path / "rows.jsonl"))
    (kept,) = (tmp_path / "cache").iterdir()
    whole = kept.read_bytes()
    for damaged in (b"", whole[:9], b"\xff", *(whole[:i] + b"0" + whole[i + 1 :] for i in range(len(whole) - 1))):
        kept.write_bytes(damaged)
        assert fingerprint(str(tmp_path / "rows.jsonl")) == expected
        assert kept.read_bytes() == whole
    kept.unlink()
    kept.mkdir()
    assert fingerprint(str(tmp_path / "rows.jsonl")) == expected


def test_a_folder_of_others_is_never_replaced(make_stage, tmp_path):
    (tmp_path / "out").mkdir()
    assert make_stage().done() is None
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"output_dir: .* holds other files"):
            make_stage(overwrite=overwrite).done()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "rows").write_text("of others")
    with pytest.raises(ConfigError, match="nothing says that this stage finished it"):
        make_stage("files", outputs=["rows"]).done()


@pytest.mark.parametrize("killed_at", ["rows", "table", "done.json"])
def test_a_stage_that_was_killed_among_its_files_can_be_started_again(make_stage, tmp_path, monkeypatch, killed_at):
    """Without --overwrite; a file that it had not begun is still somebody else's."""
    names, replace_file = ("rows", "table"), Path.replace
    files = {tmp_path / "files" / name: name for name in names}

    class Killed(BaseException):
        """Nothing is cleaned up after a kill; what `finally` deletes here is a temporary file of no account."""

    def kill(path, target):
        if Path(target).name == killed_at:
            raise Killed
        return replace_file(path, target)

    stage = make_stage("files", outputs=names)
    assert stage.done() is None
    with monkeypatch.context() as patched:
        killed_at = stage.marker.name if killed_at == "done.json" else killed_at
        patched.setattr(Path, "replace", kill)
        with pytest.raises(Killed):
            stage.publish_files(files, {"rows": 2})
    del stage
    again = make_stage("files", outputs=names)
    assert again.done() is None
    again.publish_files(files, {"rows": 2})
    assert make_stage("files", outputs=names).done() == {"rows": 2}
    assert {path.name for path in (tmp_path / "files").iterdir()} == {*names, again.marker.name}
    (tmp_path / "files" / "other").write_text("years of work")
    again.marker.unlink()
    with pytest.raises(ConfigError, match="nothing says that this stage finished it"):
        make_stage("files", outputs=("other",)).done()


def test_a_failure_midway_leaves_the_older_result_whole(make_stage, tmp_path):
    def burn():
        with make_stage(rate=2.0, overwrite=True).publish_folder({"loss": 0.1}) as folder:
            (folder / "dish").write_text("half a m")
            raise RuntimeError("fire")

    with pytest.raises(RuntimeError, match="fire"):
        burn()
    assert not (tmp_path / "out").exists()
    finish(make_stage())
    with pytest.raises(RuntimeError, match="fire"):
        burn()
    assert (tmp_path / "out" / "dish").read_text() == "meal"
    assert make_stage().done() == {"loss": 0.5}


DIE = """
import os, signal, sys
from dataclasses import make_dataclass
from pathlib import Path
import async_rlhf.commands.stage as module

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

config = make_dataclass("Settings", [("overwrite", bool, False)], frozen=True)()
stage = module.Stage(Path(sys.argv[1]), "cook", config, {})
"""
IN_THE_BODY = """
with stage.publish_folder({}) as folder:
    (folder / "dish").write_text("half a m")
    die()
"""
BEFORE_THE_MARKER = """
write_file = module.write_file
module.write_file = lambda path, text: die() if path == stage.marker else write_file(path, text)
stage.publish_files({stage.folder / "dish": "meal"}, {})
"""


@pytest.mark.parametrize(("script", "left"), [(IN_THE_BODY, []), (BEFORE_THE_MARKER, [".cook.json.begun", "dish"])])
def test_killed_midway_it_is_not_done(make_stage, tmp_path, script, left):
    ended = subprocess.run([sys.executable, "-c", DIE + script, str(tmp_path / "out")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "out").glob("*")) == left
    if not left:  # what is left over beside it is in nobody's way
        assert make_stage().done() is None
        finish(make_stage())
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]


AFTER_ALL = """
stage.hold()
stage.publish_files({stage.folder / "dish": "meal"}, {"loss": 0.5})
stage.hold()
die()
"""


def test_killed_when_all_was_done_it_is_done_and_leaves_no_lock(make_stage, tmp_path):
    subprocess.run([sys.executable, "-c", DIE + AFTER_ALL, str(tmp_path / "out")], check=False)
    stage = Stage(tmp_path / "out", "cook", make_dataclass("Settings", [("overwrite", bool, False)])(), {}, False)
    assert (tmp_path / "out" / ".cook.json.lock").exists()
    assert stage.done() == {"loss": 0.5}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["cook.json", "dish"]


# ---------------------------------------------------------------- SFT

ROWS = [
    {"query": f"def f{i}(a):", "query_reference_response": f"def f{i}(a): Add {'one ' * (i % 4)}to a."}
    for i in range(12)
]


def write_rows(path: Path, rows) -> str:
    path.write_text(json_lines(rows))
    return str(path)


def sft_config(tmp_path, **changes) -> SFTConfig:
    values = {
        "train": str(tmp_path / "sft.jsonl"),
        "output_dir": str(tmp_path / "sft"),
        **({} if "model" in changes else {"new_model": NewModelConfig(300, 16, 1, 2, 64)}),
        "per_device_train_batch_size": 4,
        "num_epochs": 2.0,
    }
    return SFTConfig(**values | changes)


def loss_by_hand(model, rows: list[EncodedRow]) -> float:
    """Mean over all response tokens, row by row, without padding or mask, in float64."""
    total, count = 0.0, 0
    for row in rows:
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([row.tokens])).logits[0].double()
        for position in range(max(row.start, 1), len(row.tokens)):
            probabilities = logits_TV[position - 1].exp() / logits_TV[position - 1].exp().sum()
            total -= math.log(probabilities[row.tokens[position]].item())
            count += 1
    return total / count


@pytest.mark.parametrize("completion_only", [True, False])
@pytest.mark.parametrize(("size", "accumulate"), [(12, 1), (5, 3)])
def test_sft_loss_is_the_mean_over_response_tokens(make_policy, tokenizer, tmp_path, completion_only, size, accumulate):
    """One optimiser step: its loss is that of the starting weights, however it is split (5 + 5 + 2 rows)."""
    rows, dropped = encode_rows(ROWS, ChatTemplate(tokenizer), completion_only, 96, "train")
    assert dropped == 0
    model = make_policy()
    by_hand = loss_by_hand(model, rows)
    config = sft_config(
        tmp_path,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulate,
        num_epochs=1.0,
        learning_rate=1e-8,
    )
    learner = Learner(model, None, SFT, config.for_learner(1, str(tmp_path)))
    assert learner.update(demonstration_rows(rows), 1)["loss"] == pytest.approx(by_hand, rel=1e-5)


def test_rows_that_do_not_fit(tokenizer):
    kept, dropped = encode_rows(ROWS, ChatTemplate(tokenizer), True, 30, "train")
    assert (len(kept), dropped) == (9, 3)
    assert all(len(row.tokens) <= 30 for row in kept)
    with pytest.raises(ConfigError, match="max_length: got 5; no row of train has 2 to 5 tokens"):
        encode_rows(ROWS, ChatTemplate(tokenizer), True, 5, "train")
    with pytest.raises(ConfigError, match=r"train: row 2: .* must begin with `query`"):
        encode_rows([ROWS[0], {**ROWS[1], "query": "def g"}], ChatTemplate(tokenizer), True, 30, "train")


def test_run_sft(tmp_path, caplog):
    write_rows(tmp_path / "sft.jsonl", ROWS)
    write_rows(tmp_path / "held.jsonl", ROWS[:5])
    config = sft_config(tmp_path, eval=str(tmp_path / "held.jsonl"))
    results = run_sft(config)
    model, tokenizer = load_policy(config.output_dir), load_tokenizer(config.output_dir)
    held, _ = encode_rows(ROWS[:5], ChatTemplate(tokenizer), True, 64, "eval")
    assert (results["rows"], results["dropped"]) == (12, 0)
    assert results["eval_loss"] == pytest.approx(loss_by_hand(model, held), rel=1e-5)
    assert results["eval_perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert results["train_loss"] < math.log(len(tokenizer)) + 0.5
    assert model.generation_config.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held.jsonl", "sft", "sft.jsonl"]

    caplog.set_level(logging.INFO)
    assert run_sft(config) == results == json.loads((tmp_path / "sft" / "sft.json").read_text())["results"]
    assert f"sft: done already, in {config.output_dir}" in caplog.messages
    with pytest.raises(ConfigError, match=r"learning_rate: was 0\.001, is 0\.01"):
        run_sft(replace(config, learning_rate=0.01))

    twin, other = (
        load_policy(str(tmp_path / name))
        for name, seed in (("twin", 0), ("other", 1))
        if run_sft(replace(config, output_dir=str(tmp_path / name), seed=seed))
    )
    assert checksum(named_weights(twin)) == checksum(named_weights(model))
    assert checksum(named_weights(other)) != checksum(named_weights(model))
    lower = run_sft(replace(config, learning_rate=0.01, overwrite=True))
    assert lower["eval_loss"] < results["eval_loss"] - 0.1


def test_sft_continues_a_model_and_learns(tmp_path, make_policy, tokenizer):
    write_model(make_policy(), tokenizer, tmp_path / "base")
    write_rows(tmp_path / "sft.jsonl", [{"query_reference_response": "same text"}] * 24)
    config = sft_config(
        tmp_path, model=str(tmp_path / "base"), completion_only=False, learning_rate=1e-2, num_epochs=8.0
    )
    assert run_sft(replace(config, eval=config.train))["eval_perplexity"] < 1.5
    with pytest.raises(ConfigError, match=r"row 1 of train has no prompt \(`query`"):
        run_sft(replace(config, completion_only=True, output_dir=str(tmp_path / "none")))


CODE = """
from dataclasses import replace

from beside_of_stages import SCALE
from transformers import TrainerCallback

from async_rlhf.algorithms.online_dpo import ONLINE_DPO
from async_rlhf.config.engines import ENGINES

MINE, ENGINE, Watch = replace(ONLINE_DPO, name="mine"), ENGINES["transformers"], TrainerCallback
"""


@pytest.mark.quick
@pytest.mark.parametrize("key", ["algorithm", "callbacks", "train.generation.engine", "environment", "reward_funcs"])
def test_code_of_the_users_decides_whether_a_run_is_done(tmp_path, key):
    """Whatever it is, and what it imports beside it; of an older marker, what is noted there."""
    file, beside = tmp_path / "mine.py", tmp_path / "beside_of_stages.py"
    file.write_text(CODE)
    beside.write_text("SCALE = 1\n")
    name = f"{file}:{ {'algorithm': 'MINE', 'callbacks': 'Watch'}.get(key, 'ENGINE') }"
    words = ["--model=m", "--data.train=p", f"--train.output_dir={tmp_path / 'out'}", "--reward_model=r"]
    words += [f"--{key}={name}" if key not in ("callbacks", "reward_funcs") else f'--{key}=["{name}"]']
    words += ["--train.generation.max_turns=2"] if key == "environment" else []
    config, _ = parse(RunConfig, "train", words)
    train_stage(config).publish_files({}, {"score": 1.0})
    assert train_stage(config).done() == {"score": 1.0}
    for path in (file, beside):
        before = path.read_text()
        path.write_text(f"{before}# another\n")
        with pytest.raises(ConfigError, match=rf"\n  {key}: was .*mine\.py:.*\(.* in xxh3:.*\), is .* in xxh3:"):
            train_stage(config).done()
        path.write_text(before)
    assert train_stage(config).done() == {"score": 1.0}
    marker = train_stage(config).marker
    found = json.loads(marker.read_text())
    assert found["inputs"].pop(key)
    marker.write_text(json.dumps(found))
    assert train_stage(config).done() == {"score": 1.0}
    if key == "callbacks":
        with pytest.raises(ConfigError, match=r"\n  callbacks: was .*mine\.py:Watch.*, is"):
            train_stage(replace(config, callbacks=[])).done()
