"""A run that is killed with kill -9, all of its processes at once and at any moment, goes on bit for bit: law 4.

benchmarks/faults.py does the same with many kills at random moments.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from killed_run import PHASES, PROMPTS, Kill
from killed_run import main as run_here
from pyarrow.parquet import read_table

from async_rlhf.run.folder import Checkpoints
from async_rlhf.run.manifest import verify, write_whole

PROGRAM = Path(__file__).with_name("killed_run.py")
MARK = "KILLED_RUN_TEST"
"""An environment variable by which processes are known."""


class BrokenPromise(AssertionError):  # noqa: N818
    """A run did not do what every run owes; the message says what."""


class Program:
    """Starts killed_run.py, and looks at what it leaves.

    Args:
        folder: for its log.
        forked: every run in a fork of one interpreter that has imported everything, which is faster; else each in a
            new one.
        patience: seconds after which no process may be left. A server of generators that was just started again
            imports its libraries before it looks whether anybody still needs it.
    """

    def __init__(self, folder: Path, forked: bool, patience: float = 5) -> None:
        self.patience = patience
        # A killed fork server leaves its socket in the folder for temporary files.
        self._scratch = tempfile.TemporaryDirectory()
        self.log = folder / "program.log"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = self._start(["--serve"], **pipes) if forked else None

    def _start(self, words: list[str], **pipes: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": self._scratch.name, MARK: self._scratch.name}
        with self.log.open("a") as file:
            options = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "env": environment, **pipes}
            return subprocess.Popen([sys.executable, PROGRAM, *words], start_new_session=True, text=True, **options)

    def run(
        self,
        out: Path,
        algorithm: str,
        staleness: int,
        batches: int,
        kill: Kill | None = None,
        measured: str = "",
        disturb: Kill | None = None,
    ) -> dict[str, Any]:
        """One run, which is killed or goes on to the end.

        Args:
            measured: the ``phases.json`` of a run that was not killed.
            disturb: a kill that the run survives, before the other one.

        Returns:
            Where it was killed, and the newest whole checkpoint.

        Raises:
            BrokenPromise: it ended otherwise, a process is still alive after 5 seconds, memory is left, or a checkpoint
                is damaged or gone.
        """
        before, place = newest(out), Path(f"{out}.killed.json")
        place.unlink(missing_ok=True)
        arguments = words(out, algorithm, staleness, batches)
        arguments += ["--kill", str(kill)] if kill else []
        arguments += ["--disturb", str(disturb)] if disturb else []
        arguments += ["--measured", measured] if kill or disturb else []
        try:
            code = self._exit_code(arguments, 300)
            left = self._survivors(self.patience)
        finally:
            self._kill_survivors()
        tail = self.log.read_text(errors="replace")[-2000:]
        _require(code == (-signal.SIGKILL if kill else 0), f"{algorithm} ended with code {code}:\n{tail}")
        _require(not left, f"still alive {self.patience:g} s after the kill: {list(left.values())}")
        memory = [path.name for path in Path("/dev/shm").glob("*async_rlhf*")]
        _require(not memory, f"left in /dev/shm: {memory}")
        note = json.loads(place.read_text()) if kill else {"saved": 0}
        note["newest"] = newest(out)
        kept = max(before, note["saved"])
        _require(note["newest"] >= kept, f"checkpoint-{kept} was whole; now checkpoint-{note['newest']} is the newest")
        return note

    def command(self, folder: Path, words: list[str], seconds: float = 0) -> bool:
        """``async-rlhf`` in a folder, killed after so many seconds unless that is 0. Whether it was.

        Raises:
            BrokenPromise: it failed, or a process is still alive after 5 seconds.
        """
        try:
            code = self._exit_code(["--command", str(seconds), str(folder), *words], 300)
            left = self._survivors(self.patience)
        finally:
            self._kill_survivors()
        tail = self.log.read_text(errors="replace")[-2000:]
        _require(code == 0 or (code == -signal.SIGKILL and seconds > 0), f"{words[0]} ended with code {code}:\n{tail}")
        _require(not left, f"still alive {self.patience:g} s after the kill: {list(left.values())}")
        return code != 0

    def _exit_code(self, arguments: list[str], timeout: float) -> int:
        if self._server is None:
            try:
                return self._start(arguments).wait(timeout)
            except subprocess.TimeoutExpired as error:
                raise BrokenPromise(f"no end after {timeout} s") from error
        print(json.dumps(arguments), file=self._server.stdin, flush=True)
        ready, _, _ = select.select([self._server.stdout], [], [], timeout)
        _require(bool(ready), f"no end after {timeout} s")
        return int(self._server.stdout.readline())

    def _survivors(self, seconds: float = 0) -> dict[int, str]:
        """Command lines of what is still alive of it after so long; children inherit its environment."""
        mark, deadline = f"{MARK}={self._scratch.name}".encode(), time.monotonic() + seconds
        while True:
            found = {}
            for place in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # it has ended, or is another user's
                    # The environment of a process that is dead, but not yet waited for, is empty.
                    if mark in (place / "environ").read_bytes().split(b"\0"):
                        found[int(place.name)] = (place / "cmdline").read_text(errors="replace").replace("\0", " ")
            if self._server is not None:
                found.pop(self._server.pid, None)
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def _kill_survivors(self) -> None:
        for pid in self._survivors():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.communicate()  # without requests it ends
        self._scratch.cleanup()


def words(out: Path, algorithm: str, staleness: int, batches: int) -> list[str]:
    """Arguments of the program."""
    named = {"out": out, "algorithm": algorithm, "staleness": staleness, "batches": batches}
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BrokenPromise(message)


def newest(out: Path) -> int:
    """The number of the newest checkpoint; all that are not half deleted must be whole."""
    whole = [path for path in Checkpoints(out).all() if (path / "manifest.json").exists()]
    for path in whole:
        verify(path)
    return max((int(path.name.rpartition("-")[2]) for path in whole), default=0)


def difference(ours: Path, theirs: Path, batches: int) -> str | None:
    """The first difference of two finished runs, or of ours to what a run of so many batches must hold."""
    for folder in (ours, theirs):
        numbers = [row["batch"] for row in _metrics(folder)]
        if numbers != list(range(1, batches + 1)):
            return f"metrics of {folder.name} are of batches {numbers}"
    for left, right in zip(_metrics(ours), _metrics(theirs), strict=True):
        if left != right:
            names = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
            return f"metrics of batch {left['batch']:g}: {', '.join(names)}"
    samples = (ours / "samples.jsonl").read_bytes()
    draws = [json.loads(line)["draw"] for line in samples.splitlines()]
    each = len(draws) // (PROMPTS * batches)
    if draws != [draw for draw in range(PROMPTS * batches) for _ in range(each)]:
        return f"samples are of draws {draws}"
    if samples != (theirs / "samples.jsonl").read_bytes():
        return "samples"
    if (ours / "digests.jsonl").read_bytes() != (theirs / "digests.jsonl").read_bytes():
        return "digests"
    tables = [{path.name: read_table(path) for path in (each / "rollouts").iterdir()} for each in (ours, theirs)]
    if tables[0] != tables[1] or len(tables[0]) != batches:
        return "rollouts"
    ours, theirs = ours / "final", theirs / "final"
    names = [{str(path.relative_to(end)) for path in end.rglob("*") if path.is_file()} for end in (ours, theirs)]
    if names[0] != names[1]:
        return f"files in one final folder only: {sorted(names[0] ^ names[1])}"
    # These two hold the seconds that every batch took.
    for name in sorted(names[0] - {"manifest.json", "trainer_state.json"}):
        if (ours / name).read_bytes() != (theirs / name).read_bytes():
            return f"final/{name}"
    return None if _state(ours) == _state(theirs) else "final/trainer_state.json"


def _metrics(folder: Path) -> list[dict[str, float]]:
    return [_timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _state(final: Path) -> dict[str, Any]:
    state = json.loads((final / "trainer_state.json").read_text())
    return state | {
        "log_history": [_timeless(row) for row in state["log_history"]],
        "newest": _timeless(state["newest"]),
    }


def _timeless(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith("time/") and name != "eps"}


ONCE_EACH = [
    Kill("log", 1, 0.3),  # in the middle of the first line of metrics
    Kill("generate", 4, 0.5),  # waits: for batches 1, 2, and 3, which the checkpoint after 2 needs, and 4
    Kill.saving("rename", within=0.0),  # checkpoint-4 is whole but for its name
    Kill("train", 3, 0.5),  # batch 5
    Kill("publish", 1, 0.2),
    Kill("score", 2, 0.2),  # batch 6
    Kill("rollouts", 2, 0.4),  # the same
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    with Program(tmp_path_factory.mktemp("program"), forked=True) as program:
        yield program


def goes_on(folder, program, kills, options):
    """Require a run with these kills to be the uninterrupted one."""
    whole, out = folder / "whole", folder / "killed"
    run_here(words(whole, *options))
    for kill in kills:
        program.run(out, *options, kill, f"{whole}.phases.json")
    run_here(words(out, *options))
    assert difference(out, whole, 6) is None
    return whole, out


def test_a_run_killed_in_every_phase_goes_on_bit_for_bit(tmp_path, program):
    """The uninterrupted run and the last part of the other are made here, by another interpreter."""
    assert sorted(kill.phase for kill in ONCE_EACH) == sorted(PHASES)
    goes_on(tmp_path, program, ONCE_EACH, ("ppo", 1, 6))


IN_EPISODES = [Kill("generate", 2, 0.4), Kill("generate", 4, 0.7, "learner")]
IN_EPISODES += [Kill("train", 1, 0.5), Kill("log", 1, 0.3)]


def test_a_run_killed_in_the_middle_of_episodes_goes_on_bit_for_bit(tmp_path, program):
    """Its generators are killed, too, before that; every episode is then played again from its beginning."""
    whole, out = goes_on(tmp_path, program, IN_EPISODES, ("episodes", 1, 6))
    assert (out / "episodes.jsonl").read_bytes() == (whole / "episodes.jsonl").read_bytes()


@pytest.mark.quick
def test_a_run_killed_while_it_saves_goes_on_bit_for_bit(tmp_path, program):
    whole, out, options = tmp_path / "whole", tmp_path / "killed", ("online_dpo", 0, 6)
    run_here(words(whole, *options))
    measured = f"{whole}.phases.json"
    program.run(out, *options, Kill("log", 5, 0.8), measured)  # in the middle of a sample of batch 5
    program.run(out, *options, Kill.saving("delete"), measured)
    assert (out / "checkpoint-6" / "manifest.json").exists()
    assert (out / "checkpoint-2").exists()
    assert not (out / "checkpoint-2" / "manifest.json").exists()
    run_here(words(out, *options))
    assert [path.name for path in Checkpoints(out).all()] == ["checkpoint-4", "checkpoint-6"]
    assert difference(out, whole, 6) is None
    program.run(out, *options, Kill.saving("rename"), measured)  # between the renames: a final policy was there already
    assert not (out / "final").exists()
    run_here(words(out, *options))
    assert difference(out, whole, 6) is None


def test_a_checkpoint_without_its_rollouts_gives_another_run(tmp_path):
    """The comparison can fail: batch 5 must be sampled by version 3, which only the checkpoint's rollouts know."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    run_here(words(whole, "ppo", 1, 6))
    out.mkdir()
    for name in ("metrics.jsonl", "samples.jsonl", "digests.jsonl"):
        shutil.copy(whole / name, out)
    files = shutil.copytree(whole / "checkpoint-4", tmp_path / "files", ignore=shutil.ignore_patterns("manifest.json"))
    (files / "resume" / "rollouts.jsonl").write_text("")
    # Batch 5 has been measured already. Else the sampling test would stop the run: the same random numbers come again.
    state = json.loads((files / "resume" / "state.json").read_text())
    evidence = state["values"]["agreement"]["evidence"]
    state["values"]["agreement"]["evidence"] = {name: evidence[name] for name in ("all", "recent", "copies", "batches")}
    (files / "resume" / "state.json").write_text(json.dumps(state))
    write_whole(out / "checkpoint-4", [lambda folder: shutil.copytree(files, folder, dirs_exist_ok=True)])
    run_here(words(out, "ppo", 1, 6))
    found = difference(out, whole, 6)
    assert found is not None
    assert found.startswith("metrics of batch 5: ")
    assert "schedule/version" in found
