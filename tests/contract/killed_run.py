"""A training run that kills its whole process group at a chosen moment, started by test_kill.py.

    python tests/contract/killed_run.py --out DIR [--algorithm ppo] [--staleness 1] [--batches 12]
                                        [--kill PHASE:OCCURRENCE:FRACTION[:WHO] --measured FILE]
                                        [--disturb PHASE:OCCURRENCE:FRACTION:WHO]
    python tests/contract/killed_run.py --command SECONDS FOLDER WORDS ...
    python tests/contract/killed_run.py --serve

Every run resumes where DIR holds a checkpoint. One that is not killed writes ``DIR.phases.json``: how long each phase
takes, and how many file operations each stage of saving has. A killed one needs it to place the kill after FRACTION of
the phase: "save" is divided evenly into STAGES and each stage into its file operations; the first half of "log" is the
line of metrics and the second half the samples; the others are timed. A phase that ends before its kill is killed at
its end, so a kill always happens. ``DIR.killed.json`` says where. WHO is the whole group, or the learner alone: either
ends the run. --disturb kills before that, in a phase that is timed, the generators, the server that
forks them, or both ("workers"); the run must go on.

With --command it is ``async-rlhf WORDS`` in FOLDER, killed after so many seconds; never for 0.

With --serve it reads arguments, a JSON list a line, and has a fork of itself run each, in a session of its own; it
answers with the exit code. Importing torch and transformers, which takes seconds, is done once then.
"""

from __future__ import annotations

import argparse
import builtins
import io
import json
import logging
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

TESTS = Path(__file__).parents[1]
PROMPTS = 8  # of a batch
SPANS = {"wait": "generate", **{name: name for name in ("score", "train", "publish", "rollouts")}}
"""Spans of the trace, and the phases that they are."""
PHASES = (*SPANS.values(), "log", "save")
ENDING, SURVIVED = ("group", "learner"), ("generators", "server", "workers")
"""Processes whose death ends the run, and those that it must survive."""
STAGES = ("write", "flush", "rename", "renamed", "delete")
"""Of saving: files into the temporary folder; onto the disk; before the renames; after them; deleting what is old."""
OPTIONS: dict[str, dict[str, Any]] = {
    "online_dpo": {"samples_per_prompt": 2},
    "best_of_k": {"samples_per_prompt": 3},
    "rloo": {"samples_per_prompt": 2},
    "ppo": {"samples_per_prompt": 1, "value_learning_rate": 3e-3},
    "grpo": {"samples_per_prompt": 3},
    "episodes": {"samples_per_prompt": 3},
}
EPISODES: dict[str, Any] = {"response_length": 10, "max_turns": 3, "stop_token_ids": list(range(60))}
EPISODES["episode_length"] = 30
"""Of runs by GRPO with an environment, whose algorithm is called "episodes" here."""


@dataclass(frozen=True)
class Kill:
    """When to kill: after a fraction of a phase, the first or a later time that the process comes to it."""

    phase: str
    occurrence: int = 1
    fraction: float = 0.5
    who: str = "group"

    @classmethod
    def parse(cls, text: str) -> Kill:
        """What ``str`` gave."""
        phase, occurrence, fraction, *who = text.split(":")
        if phase not in PHASES:
            raise argparse.ArgumentTypeError(f"{phase!r} is none of {', '.join(PHASES)}")
        return cls(phase, int(occurrence), float(fraction), *who)

    @classmethod
    def saving(cls, stage: str, occurrence: int = 1, within: float = 0.5) -> Kill:
        """In a stage of saving."""
        return cls("save", occurrence, (STAGES.index(stage) + within) / len(STAGES))

    def __str__(self) -> str:
        return f"{self.phase}:{self.occurrence}:{self.fraction:.3f}:{self.who}"


class Watch:
    """Follows a run through its phases, measures them, and kills where it is told to.

    Args:
        out: the run's folder.
        kill: the moment, if there is one.
        measured: what an earlier run wrote into its ``phases.json``.
        disturb: the moment of a kill that the run survives, if there is one.
    """

    def __init__(
        self, out: Path, kill: Kill | None = None, measured: dict[str, Any] | None = None, disturb: Kill | None = None
    ) -> None:
        self.out, self.kill, self.disturb = out, kill, disturb
        self.measured = measured or {"seconds": {}, "operations": {}, "samples": 1}
        self.saved = 0
        """The newest checkpoint that this process has given its name."""
        self.operations: Counter[str] = Counter()
        """The most of any saving, by stage."""
        self._seen: Counter[str] = Counter()
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._samples: Counter[int] = Counter()
        self._dying = threading.Lock()

    def due(self, phase: str) -> bool:
        """Count a phase that begins. Whether it is the one to be killed in."""
        self._seen[phase] += 1
        return self.kill is not None and (phase, self._seen[phase]) == (self.kill.phase, self.kill.occurrence)

    def die(self, at: str, **where: object) -> None:
        """Leave a note and kill the whole group. Never returns."""
        if self._dying.acquire(blocking=False):  # else another thread is at it
            note = {"kill": str(self.kill), "at": at, "saved": self.saved, **where}
            # Not by open, which counts the operations of saving and would come back here.
            file = os.open(f"{self.out}.killed.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(file, json.dumps(note).encode())
            if self.kill is not None and self.kill.who == "learner":
                os.kill(os.getpid(), signal.SIGKILL)
            os.killpg(os.getpgrp(), signal.SIGKILL)
        time.sleep(60)

    def strike(self) -> None:
        """Kill processes that the run can do without."""
        assert self.disturb is not None
        server = [forkserver._forkserver._forkserver_pid]  # type: ignore[attr-defined]
        generators = [process.pid for process in multiprocessing.active_children()]
        pids = {"generators": generators, "server": server, "workers": server + generators}[self.disturb.who]
        for pid in filter(None, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with open(f"{self.out}.struck", "a") as file:
            file.write(f"{self.disturb} {len(pids)}\n")

    @contextmanager
    def timed(self, phase: str, **where: int) -> Iterator[None]:
        """A phase in which the kill is a matter of time."""
        due = self.due(phase)
        length = self.measured["seconds"].get(phase, 0.0)
        if due and self.kill is not None:
            delay = self.kill.fraction * length
            self._after(delay, self.die, f"after {delay * 1000:.1f} ms", **where)
        if self.disturb is not None and (phase, self._seen[phase]) == (self.disturb.phase, self.disturb.occurrence):
            self._after(self.disturb.fraction * length, self.strike)
        started = time.monotonic()
        yield
        if due:
            self.die("at its end", **where)
        self._seconds[phase].append(time.monotonic() - started)

    def _after(self, seconds: float, do: Callable[..., None], *arguments: Any, **named: Any) -> None:
        timer = threading.Timer(seconds, do, arguments, named)
        timer.daemon = True
        timer.start()

    def log(self, file: Any, row: dict[str, Any]) -> None:
        """A line that is about to be written: of metrics, which come first, or of samples; not of digests."""
        if "prompts" in row:
            return
        is_sample = "draw" in row
        if is_sample:
            self._samples[row["batch"]] += 1
        due = self._seen["log"] == getattr(self.kill, "occurrence", 0) if is_sample else self.due("log")
        if self.kill is None or self.kill.phase != "log" or not due or is_sample != (self.kill.fraction >= 0.5):
            return
        fraction = self.kill.fraction * 2
        if is_sample:
            number, fraction = divmod((fraction - 1) * self.measured["samples"], 1)
            if self._samples[row["batch"]] <= number:
                return
        data = (json.dumps(row, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        file.write(data[: int(len(data) * fraction)])
        file.flush()
        self.die(f"after {fraction:.0%} of a line of {'samples' if is_sample else 'metrics'}", batch=row["batch"])

    def write_measured(self) -> None:
        """Tell later runs how long each phase takes."""
        measured = {
            # The first of each kind takes longer: libraries load what they need.
            "seconds": {phase: statistics.fmean(all_[1:] or all_) for phase, all_ in self._seconds.items()},
            "operations": self.operations,
            "samples": max(self._samples.values(), default=0),
        }
        Path(f"{self.out}.phases.json").write_text(json.dumps(measured, indent=1))


class Saving:
    """Counts the file operations of one saving. The kill comes before one of them, else at the end.

    Args:
        watch: over the run.
        folder: what is saved.
    """

    def __init__(self, watch: Watch, folder: Path) -> None:
        self.watch, self.folder = watch, folder
        self.stage = "write"
        self.done: Counter[str] = Counter()
        self.target: tuple[int, int] | None = None
        if watch.due("save") and watch.kill is not None:
            stage, within = divmod(watch.kill.fraction * len(STAGES), 1)
            operations = watch.measured["operations"][STAGES[int(stage)]]
            # There are two renames where the folder takes the place of an older one.
            self.target = (int(stage), int(within * (2 if STAGES[int(stage)] == "rename" else operations)))
        self._patches = ExitStack()
        for module, name in ((builtins, "open"), (io, "open"), *((os, n) for n in ("fsync", "rename"))):
            self._patches.enter_context(patch.object(module, name, self._counted(name, getattr(module, name))))
        for name in ("unlink", "rmdir"):
            self._patches.enter_context(patch.object(os, name, self._counted(name, getattr(os, name))))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(path: Any, *arguments: Any, **options: Any) -> Any:
            self._before(name, path)
            result = original(path, *arguments, **options)
            if name == "rename" and Path(path).name == f".{self.folder.name}.tmp":
                self.stage = "renamed"
                if self.folder.name.startswith("checkpoint-"):
                    self.watch.saved = int(self.folder.name.rpartition("-")[2])
            return result

        return operation

    def _before(self, name: str, path: Any) -> None:
        if name == "fsync" and self.stage == "write":
            self.stage = "flush"
        elif name == "rename":
            self.stage = "rename"
        elif name in ("unlink", "rmdir") and self.stage == "renamed":
            self.stage = "delete"
        if self.target is not None and (STAGES.index(self.stage), self.done[self.stage]) >= self.target:
            self.watch.die(f"{self.stage}: before {name} {path}", folder=self.folder.name)
        self.done[self.stage] += 1

    def end(self) -> None:
        """Everything is in place, and what is old is deleted."""
        self._patches.close()
        if self.target is not None:
            self.watch.die("at its end", folder=self.folder.name)
        self.watch.operations |= self.done  # the larger of both, for each stage


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Within, the package tells the watch what it does."""
    from async_rlhf.run import loop as trainer
    from async_rlhf.run.folder import FINAL, Checkpoints
    from async_rlhf.system.files import JsonLines
    from async_rlhf.system.trace import Trace

    span, write_line = Trace.span, JsonLines.write
    write_whole, delete_old = trainer.write_whole, Checkpoints.delete_old
    savings: list[Saving] = []

    @contextmanager
    def watched_span(self: Trace, name: str, **details: int) -> Iterator[None]:
        with span(self, name, **details), watch.timed(SPANS[name], **details) if name in SPANS else nullcontext():
            yield

    def watched_line(self: JsonLines, row: dict[str, Any]) -> None:
        watch.log(self._file, row)
        write_line(self, row)

    def watched_write(folder: Path, write: Any) -> None:
        savings.append(Saving(watch, folder))
        write_whole(folder, write)
        if folder.name == FINAL:
            savings.pop().end()

    def watched_delete(self: Checkpoints, *arguments: Any) -> None:
        delete_old(self, *arguments)
        if savings:
            savings.pop().end()

    with (
        patch.object(Trace, "span", watched_span),
        patch.object(JsonLines, "write", watched_line),
        patch.object(trainer, "write_whole", watched_write),
        patch.object(Checkpoints, "delete_old", watched_delete),
    ):
        yield
    watch.write_measured()


def train(arguments: argparse.Namespace) -> None:
    """Train the tiny policy of the tests; equal arguments give equal runs."""
    import torch
    from environments import Echo
    from tiny import byte_tokenizer, count_letters, tiny_config
    from transformers import GPTNeoXForCausalLM

    from async_rlhf.algorithms.table import find
    from async_rlhf.config import GenerationConfig
    from async_rlhf.run.trainer import OnlineTrainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = GPTNeoXForCausalLM(tiny_config())
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # so that samples differ
    has_world = arguments.algorithm == "episodes"
    generation = {"response_length": 40, "num_threads": 1, "max_restarts": 100, **(EPISODES if has_world else {})}
    config = find("grpo" if has_world else arguments.algorithm).config(
        output_dir=str(arguments.out),
        resume=True,
        staleness=arguments.staleness,
        total_episodes=PROMPTS * arguments.batches,
        per_device_train_batch_size=PROMPTS // 2,
        num_mini_batches=2,
        learning_rate=1e-3,
        max_prompt_length=32,
        non_eos_penalty=False,
        save_steps=2,
        save_total_limit=2,
        num_samples_logged=100,
        rollouts="all",
        progress=False,
        num_threads=1,
        generation=GenerationConfig(**generation),
        **OPTIONS[arguments.algorithm],
    )
    prompts = [{"query": f"def f{i}(x{'y' * (i % 5)}):", "name": f"f{i}"} for i in range(20)]
    measured = json.loads(arguments.measured.read_text()) if arguments.measured else None
    judged = {"environment": Echo} if has_world else {"reward_funcs": count_letters}
    trainer = OnlineTrainer(policy, config, prompts, processing_class=byte_tokenizer(), **judged)
    with watched(Watch(arguments.out, arguments.kill, measured, arguments.disturb)):
        trainer.train()


def main(words: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--algorithm", choices=OPTIONS, default="online_dpo")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--kill", type=Kill.parse)
    parser.add_argument("--disturb", type=Kill.parse)
    parser.add_argument("--measured", type=Path)
    arguments = parser.parse_args(words)
    sys.path.insert(0, str(TESTS))
    if arguments.kill is not None:
        if os.getpgrp() != os.getpid():
            parser.error("--kill: this process shares its group with others; start it in a session of its own")
        sys.setswitchinterval(1e-4)  # the thread that kills must not wait for 5 ms
    if arguments.staleness > 0:
        # The generators' server imports torch and transformers on another core while this process does.
        forkserver.set_forkserver_preload(["async_rlhf.generation.worker"])
        forkserver.ensure_running()
    train(arguments)


def command(seconds: float, folder: str, words: Sequence[str]) -> None:
    """``async-rlhf WORDS`` in a folder, which kills its whole group after so many seconds; never for 0."""
    import torch

    from async_rlhf.cli import main as run_command

    torch.set_num_threads(1)
    os.chdir(folder)
    if seconds > 0:
        timer = threading.Timer(seconds, os.killpg, (os.getpgrp(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    try:
        run_command(list(words))
    except SystemExit as ended:
        if ended.code != 0:
            raise RuntimeError(f"async-rlhf {' '.join(words)} ended with code {ended.code}") from ended


def serve() -> None:
    """Answer requests until there are no more."""
    sys.path.insert(0, str(TESTS))
    for name in ("tiny", "async_rlhf.run.trainer", "transformers.models.gpt_neox.modeling_gpt_neox"):
        import_module(name)
    from forked import fork_the_fork_server

    while line := sys.stdin.readline():
        if (pid := os.fork()) == 0:
            os.setsid()
            os.dup2(2, 1)  # the answers are this process's alone
            fork_the_fork_server()
            code = 1
            try:
                words = json.loads(line)
                if words[0] == "--command":
                    command(float(words[1]), words[2], words[3:])
                else:
                    main(words)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    if sys.argv[1:] == ["--serve"]:
        serve()
    elif sys.argv[1:2] == ["--command"]:
        command(float(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        main()
