"""What goes wrong ends with the original error, within seconds, and leaves no process behind."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver, util
from pathlib import Path

import pytest
import torch
from faulty_worker import run_faulty_worker, run_hanging_worker, run_hungry_worker, run_stillborn_worker
from forked import be_script, start_forked
from tiny import alive, count_letters, json_rows, rare
from transformers import TrainerCallback

from async_rlhf import GenerationConfig, OnlineDPOConfig, OnlineDPOTrainer
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation import process
from async_rlhf.generation.audit import Agreement
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.models.saving import write_model
from async_rlhf.rewards.functions import RewardError
from async_rlhf.run.folder import Checkpoints
from async_rlhf.run.manifest import verify
from async_rlhf.run.schedule import StaleWeightsError
from async_rlhf.studies.report.reading import read_run
from async_rlhf.system.signals import ending_on_signals
from async_rlhf.system.trace import Trace


def descendants(pid: int) -> set[int]:
    """Living processes below a process that run our workers."""
    found, open_pids = set(), [pid]
    while open_pids:
        parent = open_pids.pop()
        listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        open_pids += map(int, listed)
        found.update(map(int, listed))
    return found


OTHERS: set[int] = set()
"""Processes of earlier tests: those of their reward functions end with this one."""


@pytest.fixture(autouse=True)
def know_the_others() -> None:
    OTHERS.clear()
    OTHERS.update(generator_pids())


def generator_pids() -> set[int]:
    """Processes that were forked by the fork server of this process, so the generators."""
    return {pid for child in descendants(os.getpid()) for pid in descendants(child)} - OTHERS


def trainer_for(make_policy, tokenizer, prompts, args, reward=count_letters, **options):
    return OnlineDPOTrainer(make_policy(), args, prompts, reward_funcs=reward, processing_class=tokenizer, **options)


class KillGenerator(TrainerCallback):
    """Kills every generator process after a batch, while the next batches are being sampled."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.killed: set[int] = set()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.after:
            self.killed = generator_pids()
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)


def test_a_killed_generator_is_restarted_and_samples_the_same_again(make_policy, tokenizer, prompts, make_args):
    before = threading.enumerate()
    undisturbed = trainer_for(make_policy, tokenizer, prompts, make_args("undisturbed", staleness=1))
    undisturbed.train()
    killer = KillGenerator(after=2)
    killed = trainer_for(make_policy, tokenizer, prompts, make_args("killed", staleness=1), callbacks=[killer])
    killed.train()
    assert len(killer.killed) == 1
    for name, tensor in undisturbed.model.state_dict().items():
        assert torch.equal(tensor, killed.model.state_dict()[name]), name
    assert generator_pids() == set()
    spans = read_run(Path(killed.args.output_dir), "killed").traces["trace.json"]
    (fault,) = (span for span in spans if span.why)
    assert (fault.track, fault.name) == ("generator 0", "restarted")
    assert "exit code -9" in fault.why
    assert not any(span.why for span in read_run(Path(undisturbed.args.output_dir), "undisturbed").traces["trace.json"])
    for thread in threading.enumerate():
        if thread not in before and thread.name.startswith("requests to"):
            thread.join(timeout=10)
            assert not thread.is_alive(), "of the process that was killed"


@contextmanager
def large_answer(policy, tokenizer, prompts, **generation):
    """A generator that samples 6400 completions for batch 1, more than a pipe holds; and its prompts."""
    args = OnlineDPOConfig(staleness=0, generation=GenerationConfig(placement="process", num_threads=1, **generation))
    generator = ProcessGenerator(args, policy, SamplingParams(400, 0.7, 48, (256,), 0), Trace())
    stream = PromptStream(prompts, tokenizer)
    with closing(generator):
        generator.publish(policy, 0)
        generator.submit(1, 0, stream.batch(1, 16))
        yield generator, stream


def test_a_generator_killed_while_it_sends_is_restarted(make_policy, tokenizer, prompts, monkeypatch):
    """An answer larger than the pipe lies half-sent, for nobody reads it before the process is killed."""
    read, goes_on = process.ProcessWorker._read, threading.Event()

    def read_later(worker, pipe, start):
        goes_on.wait()
        read(worker, pipe, start)

    monkeypatch.setattr(process.ProcessWorker, "_read", read_later)
    with large_answer(make_policy(), tokenizer, prompts) as (generator, _):
        worker, deadline = generator.workers[0], time.monotonic() + 120
        while (
            worker.heartbeat.value == 0 or time.monotonic() - worker.heartbeat.value < 2
        ):  # it has sampled, and begun to send
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(worker.process.pid, signal.SIGKILL)
        goes_on.set()
        batch = generator.collect(1)
    assert [len(group.samples) for group in batch.groups] == [400] * 16
    assert generator.supervisor.restarts == 1


def test_a_frozen_generator_blocks_neither_sending_nor_receiving(make_policy, tokenizer, prompts):
    """Stopped in the middle of things, with requests and answers larger than the pipe; it is given up and replaced."""
    with large_answer(make_policy(), tokenizer, prompts, max_restarts=0) as (generator, stream):
        assert len(generator.collect(1).groups) == 16
        os.kill(generator.workers[0].process.pid, signal.SIGSTOP)
        generator.supervisor._config = replace(
            generator.config, heartbeat_timeout=2.0
        )  # which a busy machine may take for one sign
        generator.submit(2, 0, stream.batch(2, 20_000))
        with pytest.raises(GeneratorError, match=r"gave no sign of life for 2 s \(generation.heartbeat_timeout\)"):
            generator.collect(2)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_whole_job_leaves_the_generators_to_the_learner(
    make_policy, tokenizer, prompts, make_args, sent, caplog
):
    """A scheduler or a terminal sends it to every process; the learner still needs answers for its checkpoint."""

    class TerminateAll(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                for pid in {*descendants(os.getpid()), *generator_pids(), os.getpid()}:
                    os.kill(pid, sent)

    args = make_args(staleness=2, generation={"max_restarts": 0})
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)  # or in the background of a shell
    try:
        by_hand = pytest.raises(KeyboardInterrupt, match="checkpoint-2 is saved; resume goes on from there")
        with by_hand if sent == signal.SIGINT else pytest.raises(SystemExit, match=r"^0$"):
            trainer_for(make_policy, tokenizer, prompts, args, callbacks=[TerminateAll()]).train()
        hangs_up = signal.getsignal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, interrupts)
    # The terminal's second SIGHUP may come when the run has ended and the program has not.
    assert hangs_up == (signal.SIG_IGN if sent == signal.SIGHUP else signal.SIG_DFL)
    verify(checkpoint := Path(args.output_dir) / "checkpoint-2")
    assert generator_pids() == set()
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    how = "checkpoint-2 is saved; resume goes on from there (--resume, or resume=True in Python)"
    assert (f"{how}: {checkpoint}" in warned) == (sent != signal.SIGINT)  # that one is the error's own text


def test_the_same_signal_twice_ends_at_once():
    """But SIGTERM, which a launcher sends after Ctrl-C, does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    with ending_on_signals() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked() == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked() == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_too_many_deaths_end_the_run(make_policy, tokenizer, prompts, make_args):
    args = make_args(generation={"max_restarts": 0}, staleness=1)
    trainer = trainer_for(make_policy, tokenizer, prompts, args, callbacks=[KillGenerator(after=1)])
    with pytest.raises(GeneratorError, match=r"generator process 0 died \(exit code -9\).*max_restarts"):
        trainer.train()
    assert generator_pids() == set()


def test_a_raising_reward_function_ends_the_run_with_its_error(make_policy, tokenizer, prompts, make_args):
    calls = []

    def fails_later(prompts, completions, **columns):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("the third batch")
        return count_letters(prompts, completions)

    args = make_args(staleness=2)
    with pytest.raises(RewardError, match="fails_later raised ZeroDivisionError: the third batch") as caught:
        trainer_for(make_policy, tokenizer, prompts, args, fails_later).train()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in lines] == [1, 2]
    assert generator_pids() == set()


def test_an_error_in_the_generator_arrives_with_its_traceback(make_policy, tokenizer, prompts, make_args):
    args = make_args(staleness=1)
    trainer = trainer_for(make_policy, tokenizer, prompts, args)
    trainer.model.config.max_position_embeddings = 64
    trainer.model.config.hidden_act = "no_such_activation"  # the process cannot build this model
    started = time.monotonic()
    with pytest.raises(GeneratorError, match=r"(?s)generator process 0: KeyError.*Traceback.*no_such_activation"):
        trainer.train()
    assert time.monotonic() - started < 20
    assert generator_pids() == set()


def test_a_generator_that_stays_silent_is_given_up(make_policy, tokenizer, prompts, make_args):
    args = make_args(generation={"timeout": 1.0}, staleness=1)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            for pid in generator_pids():
                os.kill(pid, signal.SIGSTOP)

    with pytest.raises(GeneratorError, match=r"no answer from generator process 0 .* 1 s \(generation.timeout\)"):
        trainer_for(make_policy, tokenizer, prompts, args, callbacks=[Stop()]).train()
    assert generator_pids() == set()


def test_weights_that_are_not_what_was_published_stop_the_run(make_policy, tokenizer, prompts, make_args):
    """The worker reads what lies in shared memory; here something tears it after publication."""
    args = make_args(staleness=0, generation={"placement": "process"})
    policy, params = make_policy(), SamplingParams(2, 0.7, 4, (256,), 0)
    generator = ProcessGenerator(args, policy, params, Trace())
    try:
        generator.publish(policy, 0)
        generator.publisher.thread.finish()
        next(iter(generator.ring.views(0).values()))[0] += 1
        generator.submit(1, 0, PromptStream(prompts, tokenizer).batch(1, 2))
        with pytest.raises(
            GeneratorError,
            match=r"batch 1 with weights that are not those of version 0: 1 of \d+ tensors: gpt_neox.embed_in.weight",
        ):
            generator.collect(1)
    finally:
        generator.close()


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("ignores_the_update", r"28 of 28 tensors: gpt_neox.embed_in.weight"),
        ("loads_half_of_the_tensors", r"14 of 28 tensors: gpt_neox.layers.1.input_layernorm"),
        ("loads_in_the_wrong_order", r"2 of 28 tensors: gpt_neox.layers.0.attention.dense.weight, gpt_neox.layers.1"),
        ("transposes_one", r"1 of 28 tensors: gpt_neox.layers.1.attention.dense.weight"),
        ("computes_otherwise", r"computes other log-probabilities with them: they differ by"),
    ],
)
def test_a_generator_with_wrong_weights_is_caught_in_the_first_batch(
    make_policy, tokenizer, prompts, make_args, monkeypatch, fault, named
):
    """Version 1 samples batch 3 with staleness 1; two batches are trained on, not a third."""
    monkeypatch.setattr(process, "run_worker", partial(run_faulty_worker, fault))
    args = make_args(staleness=1, generation={"probe_steps": 1})
    with pytest.raises(GeneratorError, match=named):
        trainer_for(make_policy, tokenizer, prompts, args).train()
    lines = json_rows(Path(args.output_dir) / "metrics.jsonl")
    assert [line["batch"] for line in lines] == [1, 2]
    assert all(line["weights/probe_difference"] < 1e-5 for line in lines)
    assert generator_pids() == set()


@pytest.mark.parametrize(
    ("fault", "why"),
    [(run_hanging_worker, "gave no sign of life for 2 s"), (run_hungry_worker, "ran out of memory: RuntimeError")],
)
def test_a_generator_that_hangs_or_runs_out_of_memory_is_replaced(
    make_policy, tokenizer, prompts, make_args, monkeypatch, tmp_path, caplog, fault, why
):
    undisturbed = trainer_for(make_policy, tokenizer, prompts, make_args("undisturbed", staleness=1))
    undisturbed.train()
    monkeypatch.setattr(process, "run_worker", partial(fault, str(tmp_path / "flag")))
    args = make_args("faulty", staleness=1, generation={"heartbeat_timeout": 2.0})
    faulty = trainer_for(make_policy, tokenizer, prompts, args)
    faulty.train()
    assert (tmp_path / "flag").exists()
    assert f"generator process 0 {why}" in caplog.text
    assert "to sample batch 3" in caplog.text
    for name, tensor in undisturbed.model.state_dict().items():
        assert torch.equal(tensor, faulty.model.state_dict()[name]), name
    assert generator_pids() == set()


def test_a_generator_that_hangs_before_its_first_sign_of_life_is_replaced(
    make_policy, tokenizer, prompts, make_args, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(process, "run_worker", partial(run_stillborn_worker, str(tmp_path / "flag")))
    args = make_args(staleness=1, generation={"start_timeout": 10.0, "heartbeat_timeout": 60.0})
    trainer_for(make_policy, tokenizer, prompts, args).train()
    assert "generator process 0 gave no sign of life for 10 s (generation.start_timeout)" in caplog.text
    assert generator_pids() == set()


class LoseForkServer(TrainerCallback):
    """Kills the generator and takes from the learner what it would start another with."""

    def __init__(self, lose) -> None:
        self.lose = lose

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            generators, server = generator_pids(), vars(forkserver)["_forkserver"]
            self.lose(server)
            for pid in generators:
                os.kill(pid, signal.SIGKILL)


def lose_process(server) -> None:
    os.kill(server._forkserver_pid, signal.SIGKILL)


def lose_socket(server) -> None:
    os.unlink(server._forkserver_address)


def lose_folder(server) -> None:
    shutil.rmtree(util.get_temp_dir())


def lose_both(server) -> None:
    lose_folder(server)
    lose_process(server)


RARE = [rare(lose) for lose in (lose_process, lose_socket, lose_folder)]


@pytest.mark.parametrize("lose", [lose_both, *RARE])
def test_a_generator_is_restarted_although_the_fork_server_is_gone(
    make_policy, tokenizer, prompts, make_args, lose, caplog
):
    """Killed, or its socket deleted by what cleans the folder for temporary files."""
    undisturbed = trainer_for(make_policy, tokenizer, prompts, make_args("undisturbed", staleness=1))
    undisturbed.train()
    survivor = trainer_for(
        make_policy, tokenizer, prompts, make_args("lost", staleness=1), callbacks=[LoseForkServer(lose)]
    )
    survivor.train()
    assert "starting it again" in caplog.text
    for name, tensor in undisturbed.model.state_dict().items():
        assert torch.equal(tensor, survivor.model.state_dict()[name]), name
    assert generator_pids() == set()


def test_a_busy_generator_does_not_outlive_its_run_although_the_fork_server_is_dead(make_policy, tokenizer, prompts):
    """Then nothing tells whether it lives: multiprocessing believes it dead, and kills it no more."""
    config, policy = OnlineDPOConfig(generation=GenerationConfig(num_threads=1)), make_policy()
    generator = ProcessGenerator(config, policy, SamplingParams(400, 0.7, 48, (256,), 0), Trace())
    with closing(generator):
        generator.publish(policy, 0)
        generator.submit(1, 0, PromptStream(prompts, tokenizer).batch(1, 2000))  # minutes of work
        worker = generator.workers[0]
        deadline = time.monotonic() + 120
        while not worker.has_begun:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pid = worker.process.pid
        lose_process(vars(forkserver)["_forkserver"])
        while worker.process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert alive(pid)
    deadline = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_error_leaves_the_last_checkpoint_whole(make_policy, tokenizer, prompts, make_args):
    """Here in a callback; the run then goes on from it."""

    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise ArithmeticError("in the fifth batch")

    args = make_args(staleness=1, save_steps=2)
    with pytest.raises(ArithmeticError, match="in the fifth batch"):
        trainer_for(make_policy, tokenizer, prompts, args, callbacks=[Breaks()]).train()
    assert generator_pids() == set()
    checkpoints = Checkpoints(Path(args.output_dir))
    assert checkpoints.newest_whole() == checkpoints.path(4)
    state = trainer_for(make_policy, tokenizer, prompts, make_args(staleness=1, save_steps=2, resume=True)).train()
    assert state.global_step == 6


def test_a_full_disk_leaves_the_last_checkpoint_whole(make_policy, tokenizer, prompts, make_args):
    """A limit on the size of files stands for the full disk: writing fails in the middle."""
    whole = trainer_for(make_policy, tokenizer, prompts, make_args("whole"))
    whole.train()
    args = make_args(save_steps=2)

    class Fill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

    try:
        with pytest.raises(OSError, match=r"File too large.*checkpoint-4"):
            trainer_for(make_policy, tokenizer, prompts, args, callbacks=[Fill()]).train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    folder = Path(args.output_dir)
    assert sorted(path.name for path in folder.glob("*checkpoint*")) == ["checkpoint-2"]
    again = trainer_for(make_policy, tokenizer, prompts, make_args(save_steps=2, resume=True))
    again.train()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


def test_the_probe_is_logged_as_often_as_it_is_made(make_policy, tokenizer, prompts, make_args):
    args = make_args(staleness=1, generation={"probe_steps": 2}, bf16=True)
    trainer_for(make_policy, tokenizer, prompts, args).train()
    lines = json_rows(Path(args.output_dir) / "metrics.jsonl")
    probed = [line["schedule/version"] for line in lines if "weights/probe_difference" in line]
    assert probed == [0, 0, 2, 4]


def test_rollouts_of_another_version_stop_the_run(make_policy, tokenizer, prompts, make_args):
    from async_rlhf.run.schedule import RolloutSchedule
    from async_rlhf.types import Batch, Group

    class Stale:
        """Answers batch 2 with what was sampled for batch 1."""

        agreement = None

        def __init__(self) -> None:
            from async_rlhf.distributed.parallel import Parallel
            from async_rlhf.generation.inline import InlineGenerator, PolicyEngine, PolicyWeights

            self.model = make_policy()
            params = SamplingParams(2, 0.7, 4, (256,), 0)
            self.inner = InlineGenerator(
                PolicyEngine(OnlineDPOConfig(), self.model, params, Parallel()),
                PolicyWeights(),
                Trace(),
                Agreement(GenerationConfig(mismatch_samples=0), params, torch.float32, None),
            )

        def publish(self, policy, version):
            return None if version else self.inner.publish(policy, version)

        def submit(self, index, version, prompts):
            self.inner.submit(index, 0, prompts)

        def collect(self, index):
            batch = self.inner.collect(index)
            groups = tuple(Group(g.prompt, tuple(replace(r) for r in g.samples)) for g in batch.groups)
            return Batch(index, 0, groups, 0.0)

    generator = Stale()
    rollouts = RolloutSchedule(
        generator, PromptStream(prompts, tokenizer), batch_size=2, num_batches=3, staleness=0, trace=Trace()
    )
    rollouts.publish(generator.model, 0)
    batches = iter(rollouts)
    next(batches)
    rollouts.publish(generator.model, 1)
    with pytest.raises(StaleWeightsError, match="batch 2 must be sampled by version 1"):
        next(batches)


SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
import tiny
from async_rlhf import OnlineDPOTrainer, OnlineDPOConfig, GenerationConfig
from transformers import GPTNeoXForCausalLM
torch.set_num_threads(1)
args = OnlineDPOConfig(output_dir={out!r}, staleness=1, total_episodes=4 * 100000, per_device_train_batch_size=4,
                       max_prompt_length=32, non_eos_penalty=False, progress=False,
                       generation=GenerationConfig(response_length=12))
torch.manual_seed(0)
trainer = OnlineDPOTrainer(GPTNeoXForCausalLM(tiny.tiny_config()), args, [{{"query": "def f():"}}] * 8,
                           reward_funcs=tiny.count_letters, processing_class=tiny.byte_tokenizer())
trainer.train()
"""


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, (1, 130, -signal.SIGINT)), (signal.SIGKILL, (-signal.SIGKILL,))]
)
def test_no_process_outlives_the_learner(tmp_path, sent, code):
    """A script without a __main__ guard, interrupted as by Ctrl-C, and killed."""
    script, out = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), out=str(out)))
    learner = start_forked(be_script, script, log=tmp_path / "log")
    try:
        deadline = time.monotonic() + 400
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text().count("\n") > 2:
            assert learner.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        processes = descendants(learner.pid)
        assert len(processes) >= 2  # the fork server, and the generator
        shared_memory = set(os.listdir("/dev/shm"))
        if sent == signal.SIGINT:
            os.killpg(learner.pid, sent)
        else:
            learner.send_signal(sent)
        assert learner.wait(timeout=20) in code, (tmp_path / "log").read_text()
        deadline = time.monotonic() + 60
        while any(alive(pid) for pid in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in processes if alive(pid)] == []
        assert set(os.listdir("/dev/shm")) <= shared_memory
        complete = (out / "metrics.jsonl").read_text().splitlines()[:-1]
        assert [json.loads(line)["batch"] for line in complete] == list(range(1, len(complete) + 1))
    finally:
        learner.process.kill()


UNCLOSED = """
import sys
import termios
sys.path.insert(0, {tests!r})
import tiny
from async_rlhf import OnlineDPOConfig
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.system.trace import Trace
from transformers import GPTNeoXForCausalLM
policy = GPTNeoXForCausalLM(tiny.tiny_config())
generator = ProcessGenerator(OnlineDPOConfig(), policy, SamplingParams(400, 0.7, 48, (256,), 0), Trace())
generator.publish(policy, 0)
generator.submit(1, 0, PromptStream([{{"query": "def f():"}}], tiny.byte_tokenizer()).batch(1, 500))
raise RuntimeError("while the generator samples")
"""


@pytest.mark.rare
def test_a_program_that_fails_without_closing_its_generator_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNCLOSED.format(tests=str(Path(__file__).parents[1])))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "RuntimeError: while the generator samples" in done.stderr


@pytest.fixture
def command(tmp_path, make_policy, tokenizer, prompts):
    """The words that start a long run, with the output in the folder "out"."""
    write_model(make_policy(), tokenizer, tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "reward.py").write_text(
        "def reward(completions, **_):\n    return [float(len(c)) for c in completions]"
    )
    out = tmp_path / "out"
    values = {
        "model": tmp_path / "model",
        "reward_funcs": f"[{tmp_path / 'reward.py'}:reward]",
        "data.train": tmp_path / "data.jsonl",
        "train.output_dir": out,
        "train.total_episodes": 4 * 100_000,
        "train.per_device_train_batch_size": 4,
        "train.max_prompt_length": 32,
        "train.non_eos_penalty": "false",
        "train.progress": "false",
        "train.generation.response_length": 12,
    }
    return [sys.executable, "-m", "async_rlhf.cli", "train", *(f"--{key}={value}" for key, value in values.items())]


def _wait_for_batches(learner, out) -> None:
    deadline = time.monotonic() + 400
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text().count("\n") > 2:
        assert learner.poll() is None, learner.stderr and learner.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def started(tmp_path, command):
    """The command on a long run, after its first batches; its output folder; and its options."""
    learner = subprocess.Popen(
        command,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        _wait_for_batches(learner, tmp_path / "out")
        yield learner, tmp_path / "out", command
    finally:
        with suppress(ProcessLookupError):
            os.killpg(learner.pid, signal.SIGKILL)


def test_sigterm_saves_and_the_run_can_be_resumed(started):
    learner, out, command = started
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(timeout=120) == 0
    assert "SIGTERM: a checkpoint follows" in learner.stderr.read()
    (checkpoint,) = Checkpoints(out).all()
    verify(checkpoint)
    trained = int(checkpoint.name.rpartition("-")[2])
    assert len((out / "metrics.jsonl").read_text().splitlines()) == trained
    longer = [*command, "--resume", f"--train.total_episodes={4 * (trained + 2)}", "--train.save_steps=1000"]
    done = subprocess.run(longer, capture_output=True, text=True, timeout=180, check=True)
    assert f"resuming after batch {trained}" in done.stderr
    rows = json_rows(out / "metrics.jsonl")
    assert [row["batch"] for row in rows] == list(range(1, trained + 3))


@pytest.mark.rare
def test_a_second_run_in_the_folder_is_refused_and_the_first_goes_on(started):
    """A job that a scheduler has started twice. The first one, killed, is followed at once."""
    learner, out, command = started
    again = [*command, "--resume"]
    before = {path.name for path in out.iterdir()}
    second = subprocess.run(again, capture_output=True, text=True, timeout=180)
    assert second.returncode == 2
    assert f"process {learner.pid} on host {socket.gethostname()!r} is writing there" in second.stderr
    assert {path.name for path in out.iterdir()} == before
    assert learner.poll() is None
    trained = (out / "metrics.jsonl").read_text().count("\n")
    learner.kill()
    third = subprocess.Popen([*again, "--train.save_steps=1"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 400
    while not Checkpoints(out).all():
        assert third.poll() is None, third.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    third.send_signal(signal.SIGTERM)
    errors = third.communicate(timeout=60)[1]
    assert third.returncode == 0, errors
    assert trained > 2
    rows = json_rows(out / "metrics.jsonl")
    assert [row["batch"] for row in rows] == list(range(1, len(rows) + 1))
    assert not (out / ".run.lock").exists()


@pytest.mark.rare
def test_a_closed_terminal_is_as_sigterm(command, tmp_path):
    """With all that the processes of a terminal suffer then: every one gets SIGHUP, and none can write any more."""
    ours, theirs = pty.openpty()
    words = [word for word in command if "progress" not in word]  # a bar, which is drawn into the void
    words.append("--train.generation.max_restarts=0")
    learner = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lambda: _own(theirs))
    os.close(theirs)
    thread = threading.Thread(target=_drain, args=(ours,), daemon=True)
    thread.start()
    try:
        _wait_for_batches(learner, tmp_path / "out")
        processes = descendants(learner.pid)
        os.close(ours)
        for _ in range(3):  # a shell hands it on, and when that has ended the kernel sends it as well
            with suppress(ProcessLookupError):
                os.killpg(learner.pid, signal.SIGHUP)
            time.sleep(0.05)
        assert learner.wait(timeout=60) == 0
    finally:
        learner.kill()
    (checkpoint,) = Checkpoints(tmp_path / "out").all()
    verify(checkpoint)
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in processes if alive(pid)] == []


def _own(terminal: int) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests themselves may run under nohup
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def _drain(terminal: int) -> None:
    with suppress(OSError):
        while select.select([terminal], [], [], 0.1)[0] is not None:
            if select.select([terminal], [], [], 0)[0]:
                os.read(terminal, 4096)


@pytest.mark.rare
def test_under_nohup_a_run_goes_on(command, tmp_path):
    learner = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    try:
        _wait_for_batches(learner, tmp_path / "out")
        os.killpg(learner.pid, signal.SIGHUP)
        lines = (tmp_path / "out" / "metrics.jsonl").read_text().count("\n")
        deadline = time.monotonic() + 60
        while (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") < lines + 5:
            assert learner.poll() is None, learner.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(timeout=60) == 0
    finally:
        learner.kill()


def test_ctrl_c_saves_and_says_so(started):
    learner, out, _ = started
    learner.send_signal(signal.SIGINT)
    errors = learner.communicate(timeout=60)[1]
    (checkpoint,) = Checkpoints(out).all()
    assert learner.returncode == 130
    assert "Ctrl-C: a checkpoint follows after this batch" in errors
    assert f"async-rlhf train: interrupted: {checkpoint.name} is saved; resume goes on from there" in errors
    verify(checkpoint)


@pytest.mark.rare
def test_ctrl_c_twice_ends_without_a_checkpoint_and_three_times_at_once(started):
    """After the second one the command waits some seconds for a generator that does not react."""
    learner, _, _ = started
    processes = descendants(learner.pid)
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    for _ in range(2):
        learner.send_signal(signal.SIGINT)
        time.sleep(1)
        assert learner.poll() is None
    learner.send_signal(signal.SIGINT)
    assert learner.wait(timeout=3.5) == 130  # without the third it would take 5 s
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in processes if alive(pid)] == []
