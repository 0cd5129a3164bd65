"""The output folder: one run at a time writes there, nothing is deleted that no run has written, nothing is lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import make_dataclass
from pathlib import Path

import pytest
from tiny import count_letters, json_rows
from transformers import TrainerCallback

from async_rlhf import OnlineDPOTrainer
from async_rlhf.commands.stage import Stage
from async_rlhf.config import ConfigError
from async_rlhf.run import callbacks
from async_rlhf.run.folder import REPORT_MARK, Checkpoints, hold_folder
from async_rlhf.run.manifest import delete_whole, stranger_in, verify, write_whole
from async_rlhf.system.files import whole_file, write_file
from async_rlhf.system.lock import InUseError

HOLDER = Path(__file__).with_name("holder.py")


@pytest.fixture
def make(make_policy, tokenizer, prompts):
    """A trainer."""

    def make(args, *callbacks):
        return OnlineDPOTrainer(
            make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer, callbacks=callbacks
        )

    return make


class At(TrainerCallback):
    """Does something after a batch."""

    def __init__(self, batch: int, do) -> None:
        self.batch, self.do = batch, do

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.batch:
            self.do()


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def attempt(lock: Path) -> str:
    """What another process says that tries to hold a lock."""
    done = subprocess.run([sys.executable, HOLDER, lock], input="\n", capture_output=True, text=True, check=True)
    return done.stdout


# ---------------------------------------------------------------- one at a time


def test_a_folder_is_held_from_the_making_of_the_trainer_to_the_end_of_training(make, make_args):
    args, said = make_args(), []
    folder = Path(args.output_dir)
    trainer = make(args, At(2, lambda: said.append(attempt(folder / ".run.lock"))))
    assert f"process {os.getpid()} on host" in attempt(folder / ".run.lock")
    trainer.train()
    assert f"process {os.getpid()} on host" in said[0]
    assert attempt(folder / ".run.lock") == "held\n"


def test_a_trainer_that_fails_lets_go(make, make_args):
    def fail():
        raise ArithmeticError("in the second batch")

    args = make_args()
    with pytest.raises(ArithmeticError) as caught:
        make(args, At(2, fail)).train()
    assert attempt(Path(args.output_dir) / ".run.lock") == "held\n"
    with pytest.raises(ConfigError, match="holds an earlier run") as other:
        make(args)
    assert attempt(Path(args.output_dir) / ".run.lock") == "held\n"
    del caught, other  # they kept the trainers


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_run_that_ended_before_its_first_batch_can_be_started_again(
    make_policy, tokenizer, prompts, make_args, evaluates
):
    """Nothing is lost with it; what no run has written stays, and so does what holds a batch."""

    class Fails(TrainerCallback):
        def on_step_begin(self, *_, **known):
            raise ArithmeticError("before the first batch")

    def trainer(*callbacks):
        known = {"reward_funcs": count_letters, "processing_class": tokenizer, "callbacks": callbacks}
        return OnlineDPOTrainer(make_policy(), args, prompts, eval_dataset=prompts[:2] if evaluates else None, **known)

    args = make_args(save_steps=2, eval_on_start=evaluates)
    with pytest.raises(ArithmeticError) as caught:
        trainer(Fails()).train()
    del caught
    folder = Path(args.output_dir)
    assert (folder / "metrics.jsonl").exists()
    trainer().train()
    assert [row["batch"] for row in json_rows(folder / "metrics.jsonl") if "completions" in row] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match="holds an earlier run"):
        trainer()
    for place in [*folder.glob("checkpoint-*"), folder / "final"]:
        shutil.rmtree(place)
    with pytest.raises(ConfigError, match=r"holds an earlier run \("):
        trainer()


def test_a_second_trainer_of_the_same_process_does_not_train_meanwhile(make, make_args):
    args, errors = make_args(), []
    second = make(args)

    def compete():
        with pytest.raises(InUseError, match="is writing there") as caught:
            second.train()
        errors.append(caught.value)

    make(args, At(2, compete)).train()
    assert len(errors) == 1
    rows = json_rows(Path(args.output_dir) / "metrics.jsonl")
    assert [row["batch"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_no_model_is_loaded_in_a_folder_that_is_held(make, make_args):
    args = make_args()
    Path(args.output_dir).mkdir()
    holder = subprocess.Popen(
        [sys.executable, HOLDER, Path(args.output_dir) / ".run.lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    holder.stdout.readline()
    try:
        with pytest.raises(InUseError, match=f"process {holder.pid}"):
            OnlineDPOTrainer("/no/such/model", args, [], reward_funcs=count_letters)
    finally:
        holder.communicate("\n")


def test_a_run_whose_lock_was_taken_over_writes_no_more(make, make_args):
    """It did not reach the file system for long, which gave its lock to another."""
    args = make_args(save_steps=1)
    folder = Path(args.output_dir)

    def take_over():
        lock = folder / ".run.lock"
        lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": "elsewhere", "token": "another"}))

    with pytest.raises(OSError, match=r"taken over while this process did not reach it, by process .* 'elsewhere'"):
        make(args, At(3, take_over)).train()
    assert [path.name for path in Checkpoints(folder).all()] == ["checkpoint-1", "checkpoint-2"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert "elsewhere" in (folder / ".run.lock").read_text()


def test_a_stage_is_done_by_one_process(tmp_path):
    config = make_dataclass("Settings", [("overwrite", bool, False)], frozen=True)()
    for stage, lock in (
        (Stage(tmp_path / "model", "cook", config, {}, owns_folder=True), tmp_path / ".model.lock"),
        (Stage(tmp_path / "files", "cook", config, {}), tmp_path / "files" / ".cook.json.lock"),
    ):
        assert stage.done() is None
        assert "is writing there" in attempt(lock)
        if stage.owns_folder:
            with stage.publish_folder({}) as folder:
                (folder / "dish").write_text("meal")
        else:
            stage.publish_files({}, {})
        assert not lock.exists()
        holder = subprocess.Popen([sys.executable, HOLDER, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        holder.stdout.readline()
        assert stage.done() == {}, "what is done needs no lock"
        stage.marker.unlink()
        if stage.owns_folder:
            shutil.rmtree(stage.folder)
        with pytest.raises(InUseError, match=rf"cook: got .*; process {holder.pid} on host"):
            stage.done()
        holder.communicate(b"\n")


# ---------------------------------------------------------------- what is not the run's

STRANGERS = ("checkpoint-8-good/model", "checkpoint-old-3/model", "checkpoint-08/model", "checkpoint-/x", "notes.txt")
STRANGERS += ("trace-analysis.json", "trace-from-home.json", "final.txt", "finals/model", ".checkpoint-x.tmp/y")


def plant(folder: Path, *names: str) -> dict[str, bytes]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}: years of work")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.parametrize("how", ["resume", "overwrite_output_dir", "resume_from"])
def test_what_no_run_has_written_is_left_alone(make, make_args, how):
    args = make_args(save_steps=2)
    folder = Path(args.output_dir)
    planted = plant(folder, *STRANGERS)
    make(args).train()  # none of these is an earlier run
    again = {"resume_from": str(folder / "checkpoint-2")} if how == "resume_from" else {how: True}
    if how == "resume":
        shutil.rmtree(folder / "checkpoint-6")
    make(make_args(save_steps=2, save_total_limit=1, **again)).train()
    assert [path.name for path in Checkpoints(folder).all()] == ["checkpoint-6"]
    assert {name: (folder / name).read_bytes() for name in STRANGERS} == planted


@pytest.mark.parametrize("name", ["checkpoint-8/model", "final/model", "metrics.jsonl", "trace.json", "final"])
@pytest.mark.parametrize("how", ["resume", "overwrite_output_dir"])
def test_what_would_have_to_be_deleted_is_named(make, make_args, name, how):
    """Before any model is loaded. Where nothing says that a run has written it, a run must not delete it."""
    args = make_args(**{how: True})
    folder = Path(args.output_dir)
    planted = plant(folder, name)
    with pytest.raises(ConfigError, match=rf"(holds '{name.split('/')[0]}|resume: .* no whole checkpoint)"):
        OnlineDPOTrainer("/no/such/model", args, [], reward_funcs=count_letters)
    assert files_in(folder) == planted


def test_a_strange_newer_checkpoint_stops_a_resumed_run(make, make_args):
    make(make_args(save_steps=2)).train()
    args = make_args(save_steps=2, resume=True)
    folder = Path(args.output_dir)
    shutil.copytree(folder / "final", folder / "checkpoint-8")
    (folder / "checkpoint-8" / "manifest.json").unlink()
    before = files_in(folder)
    with pytest.raises(ConfigError, match="holds 'checkpoint-8', which would have to be deleted and which no run has"):
        make(args)
    assert files_in(folder) == before


def test_a_file_put_into_a_checkpoint_keeps_it(make, make_args, caplog):
    args = make_args(save_steps=1, save_total_limit=1)
    folder = Path(args.output_dir)
    note = folder / "checkpoint-2" / "notes.txt"
    make(args, At(3, lambda: note.write_text("the good one"))).train()
    assert [path.name for path in Checkpoints(folder).all()] == ["checkpoint-2", "checkpoint-6"]
    assert "checkpoint-2 is kept, for" in caplog.text
    verify(note.parent)
    with pytest.raises(ConfigError, match=r"holds 'checkpoint-2/notes.txt', which would have to be deleted"):
        make(make_args(overwrite_output_dir=True))


def test_a_page_of_the_command_report_is_a_runs_and_a_page_of_ones_own_is_not(make, make_args):
    args = make_args()
    folder, again = Path(args.output_dir), make_args(overwrite_output_dir=True)
    make(args).train()
    page, written = folder / "report.html", folder / "run_files.json"
    page.write_text("<p>my own")
    with pytest.raises(ConfigError, match=r"holds 'report.html', which would have to be deleted"):
        make(again)
    assert page.read_text() == "<p>my own"
    page.write_text(f"<!doctype html>{REPORT_MARK}")
    written.write_text(json.dumps([name for name in json.loads(written.read_text()) if name != page.name]))
    make(again).train()  # of an older version, whose list has no page
    assert not page.exists()


def test_what_takes_the_place_of_a_strangers_folder_sets_it_aside(make, make_args, caplog):
    """Found only when the training is over; the policy must not be lost for it."""
    args = make_args()
    folder = Path(args.output_dir)
    make(args, At(6, lambda: plant(folder, "final/thesis.txt"))).train()
    verify(folder / "final")
    assert files_in(folder / "final.kept-1") == {"thesis.txt": b"final/thesis.txt: years of work"}
    assert "was not written by a run" in caplog.text


@pytest.mark.parametrize("place", ["", "/", "//", "/tmp/../.."])
def test_no_run_has_a_folder_that_is_nobodys(make_args, place):
    with pytest.raises(ConfigError, match=r"output_dir: got '.*'; must name a folder of the run's own"):
        make_args(output_dir=place)


def test_a_half_deleted_checkpoint_is_still_known(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-2"

    def write(place: Path) -> None:
        for name in ("a", "b", "inner/c"):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(name)

    unlink = os.unlink
    for allowed in range(5):  # files that are deleted before it is interrupted
        write_whole(folder, [write])
        budget = iter(range(allowed))

        def unlink_some(*arguments, budget=budget, **options):
            if next(budget, None) is None:
                raise KeyboardInterrupt
            unlink(*arguments, **options)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) if allowed < 4 else nullcontext():
            patch.setattr(os, "unlink", unlink_some)
            delete_whole(folder)
        assert folder.exists() == (allowed < 4)
        if folder.exists():
            assert not (folder / "manifest.json").exists()
            assert stranger_in(folder) is None
            (folder / "stranger").write_text("")
            assert stranger_in(folder) == folder / "stranger"
            (folder / "stranger").unlink()
            delete_whole(folder)


# ---------------------------------------------------------------- links


def test_links_are_read_but_never_deleted_through(make, make_args, tmp_path):
    """A checkpoint that was moved to another disk, with a link in its place."""
    whole = make(make_args("whole", save_steps=2)).train()
    make(make_args(save_steps=2), At(5, lambda: os.kill(os.getpid(), 15)))
    args = make_args(save_steps=2)
    folder = Path(args.output_dir)
    make(args).train()
    moved = shutil.move(folder / "checkpoint-4", tmp_path / "moved")
    (folder / "checkpoint-4").symlink_to(moved)
    shutil.rmtree(folder / "checkpoint-6")
    before = files_in(moved)
    trainer = make(make_args(save_steps=1, save_total_limit=1, resume=True))
    assert trainer.run.folder.checkpoint == folder / "checkpoint-4"
    state = trainer.train()
    assert state.global_step == whole.global_step
    assert (folder / "checkpoint-4").is_symlink()
    assert files_in(moved) == before
    rows = json_rows(folder / "metrics.jsonl")
    assert [row["batch"] for row in rows] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match="holds 'checkpoint-4', which would have to be deleted"):
        make(make_args(overwrite_output_dir=True))


def test_a_link_where_a_checkpoint_is_saved_is_set_aside(make, make_args, tmp_path):
    args = make_args(save_steps=2)
    folder, other = Path(args.output_dir), tmp_path / "other"
    planted = plant(other, "precious")
    make(args, At(3, lambda: (folder / "checkpoint-4").symlink_to(other))).train()
    verify(folder / "checkpoint-4")
    assert not (folder / "checkpoint-4").is_symlink()
    assert (folder / "checkpoint-4.kept-1").readlink() == other
    assert files_in(other) == planted


def test_resuming_from_a_link_within_the_folder_to_another_run(make, make_args):
    """Its own checkpoints are of another run than the link leads to: none of them is the future of that."""
    make(make_args("first", save_steps=2)).train()
    make(make_args("second", save_steps=3)).train()
    first, second = Path(make_args("first").output_dir), Path(make_args("second").output_dir)
    (second / "latest").symlink_to(first / "checkpoint-2")
    before = files_in(second)
    with pytest.raises(ConfigError, match="holds an earlier run"):
        make(make_args("second", save_steps=2, resume_from=str(second / "latest")))
    assert files_in(second) == before
    (first / "latest").symlink_to("checkpoint-2")  # and a link to one's own is one's own
    make(make_args("first", save_steps=2, resume_from=str(first / "latest"))).train()
    rows = json_rows(first / "metrics.jsonl")
    assert [row["batch"] for row in rows] == [1, 2, 3, 4, 5, 6]


# ---------------------------------------------------------------- while it runs


def test_a_folder_that_is_deleted_while_a_run_writes_it_ends_the_run(make, make_args):
    args = make_args(save_steps=4)
    folder = Path(args.output_dir)
    with pytest.raises(FileNotFoundError, match="gone while it was being written: was it deleted") as caught:
        make(args, At(3, lambda: shutil.rmtree(folder))).train()
    assert caught.value.filename == str(folder)
    assert not folder.exists()


def test_a_log_that_is_replaced_while_a_run_writes_it_ends_the_run(make, make_args):
    args = make_args()
    log = Path(args.output_dir) / "metrics.jsonl"

    def rotate():
        log.rename(log.with_suffix(".1"))
        log.write_text("")

    with pytest.raises(FileNotFoundError, match="was it deleted, moved or replaced") as caught:
        make(args, At(3, rotate)).train()
    assert caught.value.filename == str(log)


@pytest.mark.parametrize(("size", "named"), [(2500, "metrics.jsonl"), (60_000, "checkpoint-4")])
def test_a_full_disk_is_said_with_the_file(make, make_args, size, named):
    """A limit on the size of files stands for it."""

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    try:
        with pytest.raises(OSError, match=named):
            make(make_args(save_steps=2, trace=False), At(4, fill)).train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_the_state_of_a_long_run_does_not_grow(make, make_args, monkeypatch):
    """And a resumed run's is the uninterrupted one's, with the best metric of an evaluation that is long ago."""
    monkeypatch.setattr(callbacks, "KEPT_LOGS", 2)
    options = {"save_steps": 2, "metric_for_best_model": "objective/scores"}
    whole = make(make_args("whole", **options)).train()
    assert [logs["step"] for logs in whole.log_history] == [5, 6]
    args = make_args(**options)
    make(args).train()
    shutil.rmtree(Path(args.output_dir) / "checkpoint-6")
    again = make(make_args(resume=True, **options)).train()
    state = json.loads((Path(args.output_dir) / "final" / "trainer_state.json").read_text())
    assert [logs["step"] for logs in state["log_history"]] == [5, 6]
    assert state["newest"]["objective/scores"] == whole.log_history[-1]["objective/scores"]
    assert again.best_metric == whole.best_metric


def test_the_best_metric_may_be_logged_seldom(make, make_args, prompts, make_policy, tokenizer, monkeypatch):
    monkeypatch.setattr(callbacks, "KEPT_LOGS", 1)
    args = make_args(save_steps=1, eval_steps=2, metric_for_best_model="eval_objective/scores")
    options = {"reward_funcs": count_letters, "processing_class": tokenizer, "eval_dataset": prompts[:4]}
    state = OnlineDPOTrainer(make_policy(), args, prompts, **options).train()
    assert state.best_metric is not None


def test_a_folder_that_is_made_for_nothing_is_deleted_again(tmp_path):
    with hold_folder(tmp_path / "new" / "run") as held:
        held.require()
    assert os.listdir(tmp_path) == []
    (tmp_path / "there").mkdir()
    hold_folder(tmp_path / "there").release()
    assert os.listdir(tmp_path) == ["there"]


def test_a_small_file_may_be_written_by_several_at_once(tmp_path):
    path = tmp_path / "folder" / "workers-wanted.json"
    with whole_file(path) as first:
        first.write("1, which is longer")
        with whole_file(path) as second:
            second.write("2")
        assert path.read_text() == "2"
        with pytest.raises(UnicodeEncodeError), whole_file(path) as third:
            third.write("\ud800")
    assert path.read_text() == "1, which is longer"
    assert [*path.parent.iterdir()] == [path]


def test_what_killed_writers_of_a_small_file_left_is_deleted(tmp_path):
    path = tmp_path / "table[1].txt"
    with whole_file(path) as first:
        if (pid := os.fork()) == 0:
            with whole_file(path):
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert len([*tmp_path.iterdir()]) == 2
        with whole_file(path) as second:
            assert len([*tmp_path.iterdir()]) == 2  # the first one's is still written
            second.write("2")
        first.write("1")
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == "1"


def test_checkpoints_by_default_are_ten_of_which_the_newest_stays(make_policy, tokenizer, prompts, make_args):
    saved: list[int] = []

    class Saved(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            saved.append(state.global_step)

    args = make_args(save_steps=None, batches=12, total_episodes=96)
    trainer = OnlineDPOTrainer(
        make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer, callbacks=[Saved()]
    )
    trainer.train()
    assert saved == [2, 4, 6, 8, 10, 12]
    assert [path.name for path in Checkpoints(Path(args.output_dir)).all()] == ["checkpoint-12"]


def test_a_run_that_says_nothing_of_checkpoints_deletes_none_of_one_that_did(
    make_policy, tokenizer, prompts, make_args
):
    found = []
    for batches, save_steps in ((6, 2), (12, None)):
        args = make_args(batches=batches, total_episodes=8 * batches, save_steps=save_steps, resume=batches > 6)
        OnlineDPOTrainer(make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer).train()
        found.append([path.name for path in Checkpoints(Path(args.output_dir)).all()])
    asked_for = ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert found == [asked_for, [*asked_for, "checkpoint-12"]]


def test_a_file_that_several_write_at_once_is_there_whole(tmp_path):
    """None takes another's for one that a killed writer has left."""

    def write(number: int) -> None:
        for _ in range(100):
            write_file(tmp_path / "file", f"{number}" * 100)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert (tmp_path / "file").read_text() in {f"{number}" * 100 for number in range(8)}
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
