"""The supervised stages: what is skipped, what is written, and that the losses are the right numbers."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from async_rlhf.config import ConfigError
from async_rlhf.stage import Stage, fingerprint

# ---------------------------------------------------------------- stages


@dataclass(frozen=True)
class Settings:
    source: str
    rate: float = 1.0
    device: str | None = None
    overwrite: bool = False


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


def test_inputs_count_by_content(make_stage, tmp_path):
    finish(make_stage())
    os.utime(tmp_path / "in.txt", (1, 1))
    shutil.copy(tmp_path / "in.txt", tmp_path / "copy.txt")
    copied = Stage(
        tmp_path / "out", "cook", Settings(str(tmp_path / "copy.txt")), {"source": str(tmp_path / "copy.txt")}
    )
    assert copied.done() == {"loss": 0.5}


def test_fingerprints_of_models_and_functions(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    before = fingerprint(str(model))
    (model / "sft.json").write_text("a marker")
    assert fingerprint(str(model)) == before
    (model / "model.safetensors").write_bytes(b"weighty")
    assert fingerprint(str(model)) != before

    code = tmp_path / "judge.py"
    code.write_text("def f(): pass")
    before = fingerprint(f"{code}:f")
    code.write_text("def f(): return 1")
    assert fingerprint(f"{code}:f") != before
    assert fingerprint("owner/model") == "owner/model"


def test_a_folder_of_others_is_never_replaced(make_stage, tmp_path):
    (tmp_path / "out").mkdir()
    assert make_stage().done() is None
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="output_dir: .* holds other files"):
            make_stage(overwrite=overwrite).done()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "rows").write_text("of others")
    with pytest.raises(ConfigError, match="nothing says that this stage finished it"):
        make_stage("files", outputs=["rows"]).done()


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


@pytest.mark.parametrize("at", ["body", "first file"])
def test_killed_midway_it_is_not_done(make_stage, tmp_path, at):
    """A real kill -9: in the body of a folder, and between the files and their marker."""
    files = at == "first file"
    script = f"""
import os, signal
from pathlib import Path
from tests.unit.test_stages_child import Settings, Stage
stage = Stage(Path({str(tmp_path / "out")!r}), "cook", Settings(), {{}}, {not files})
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
if {files}:
    class Files(dict):
        def items(self):
            yield stage.folder / "dish", "meal"
            die()
    from async_rlhf import stage as module
    original = module.whole_file
    calls = []
    def second_dies(path):
        calls.append(path)
        return original(path) if len(calls) == 1 else die()
    module.whole_file = second_dies
    stage.publish_files({{stage.folder / "dish": "meal"}}, {{}})
with stage.publish_folder({{}}) as folder:
    (folder / "dish").write_text("half a m")
    die()
""".replace(
        "from tests.unit.test_stages_child import Settings, Stage",
        "from dataclasses import make_dataclass\nfrom async_rlhf.stage import Stage\n"
        "Settings = make_dataclass('Settings', [('overwrite', bool, False)], frozen=True)",
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "out" / "dish").exists() == files
    assert not (tmp_path / "out" / "cook.json").exists()
    if not files:  # what is left over is in nobody's way
        assert make_stage().done() is None
        finish(make_stage())
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]
