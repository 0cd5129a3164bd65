"""The command on several ranks as its users start it: torchrun, accelerate launch, SLURM."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import yaml
from launching import family, finish, kill_all, metrics_of, weights_of
from ports import free_port
from ranks import new_policy
from tiny import PROMPTS, byte_tokenizer, rare

pytestmark = pytest.mark.distributed

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A model, prompts and a reward on the disk."""
    folder = tmp_path_factory.mktemp("inputs")
    new_policy().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    reward = """
        def letters(prompts, completions, **columns):
            return [sum(c.isascii() and c.isalpha() for c in text) + 0.01 * len(text) for text in completions]
    """
    (folder / "reward.py").write_text(textwrap.dedent(reward))
    return folder


def write_config(inputs: Path, folder: Path, **train: object) -> Path:
    config = {
        "model": str(inputs / "model"),
        "reward_funcs": [f"{inputs / 'reward.py'}:letters"],
        "data": {"train": str(inputs / "prompts.jsonl")},
        "train": {
            "output_dir": str(folder / "run"),
            "total_episodes": 48,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "adam_epsilon": 1e-2,
            "max_prompt_length": 32,
            "non_eos_penalty": False,
            "progress": False,
            "num_threads": 1,
            **train,
            "generation": {"response_length": 12, "num_threads": 1, "heartbeat_timeout": 60.0},
        },
    }
    path = folder / "run.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(words: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with log.open("ab") as file:
        return subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env=environment | variables, start_new_session=True
        )


def torchrun(config: Path, *more: str, ranks: int = 2) -> list[str]:
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return [*words, f"--master-port={free_port()}", "-m", "async_rlhf.cli", "train", "--config", str(config), *more]


@pytest.fixture(scope="module")
def by_torchrun(inputs, tmp_path_factory) -> Path:
    """The folder of a run's configuration, output and log."""
    folder = tmp_path_factory.mktemp("by_torchrun")
    finish(start(torchrun(write_config(inputs, folder)), folder / "log"), folder / "log", 120)
    return folder


def test_the_command_under_torchrun(by_torchrun, tmp_path, monkeypatch):
    """Trains, and is skipped the second time; a mistake is said once, and by nobody as a traceback."""
    config, log = by_torchrun / "run.yml", by_torchrun / "log"
    assert len(metrics_of(by_torchrun / "run")) == 6
    again = finish(start(torchrun(config), log), log, 120)
    assert "train: done already" in again
    # Python runs this as it starts: the rank that speaks for all is the slowest.
    (tmp_path / "sitecustomize.py").write_text("import os, time\ntime.sleep(4 * (os.environ.get('RANK') == '0'))\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    wrong = start(torchrun(config, "--train.parallel.ranks=3", "--train.total_episodes=36"), tmp_path / "wrong")
    assert wrong.wait(120) != 0
    kill_all(wrong)
    text = (tmp_path / "wrong").read_text()
    assert text.count("parallel.ranks: got 3; must be 2, the processes that were launched, or left out") == 1
    assert 'File "' not in text.split("torch.distributed.elastic")[0].split("Traceback")[0]


ACCELERATE = {
    "zero2": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "none", "gradient_accumulation_steps": 1},
    },
    "fsdp": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}},
}


@pytest.mark.parametrize("strategy", [rare("zero2"), rare("fsdp")])
def test_an_accelerate_config_file(inputs, by_torchrun, tmp_path, strategy):
    """It says how many ranks there are and what spreads their weights; the run is the one by torchrun."""
    general = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "num_processes": 2,
        "machine_rank": 0,
        "main_process_port": free_port(),
        "mixed_precision": "no",
        "use_cpu": strategy == "fsdp",
        "main_training_function": "main",
    }
    file, log = tmp_path / "accelerate.yml", tmp_path / "log"
    file.write_text(yaml.safe_dump({**general, **ACCELERATE[strategy]}))
    config = write_config(inputs, tmp_path)
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "-m", "async_rlhf.cli"]
    text = finish(start([*words, "train", "--config", str(config)], log), log, 120)
    assert f"2 ranks, {strategy}" in text
    ours, theirs = metrics_of(tmp_path / "run"), metrics_of(by_torchrun / "run")
    assert len(ours) == len(theirs) == 6
    for mine, one in zip(ours, theirs, strict=True):
        for name in ("loss/policy_avg", "grad_norm", "objective/kl", "objective/scores"):
            assert mine[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4), name


SRUN = """
    #!{python}
    # What srun does, on this host alone: as many tasks, each with its number, and signals handed on to all.
    import os, signal, subprocess, sys
    words, count = sys.argv[1:], int(os.environ["SLURM_NTASKS"])
    while words[0].startswith("--"):
        option, _, value = words[0].partition("=")
        count = int(value) if option == "--ntasks" else count
        words = words[1:]
    tasks = []
    signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
    for number in range(count):
        task = {{"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}}
        tasks.append(subprocess.Popen(words, env={{**os.environ, **task}}))
    sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """
    #!/bin/sh
    if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$REQUEUED"; fi
"""


def slurm_job(folder: Path) -> tuple[Path, dict[str, str]]:
    """Stand-ins for SLURM's commands, and the environment of a job that finds them."""
    tools = folder / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (tools / name).write_text(textwrap.dedent(text).lstrip())
        (tools / name).chmod((tools / name).stat().st_mode | stat.S_IXUSR)
    return tools, {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "RESULTS": str(folder / "results"),
        "REQUEUED": str(folder / "requeued"),
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


@pytest.mark.rare
def test_one_slurm_job_trains_generates_and_evaluates(inputs, tmp_path):
    """By two ranks, then alone; put back into the queue after each of its parts, it does none of them again."""
    _, job = slurm_job(tmp_path)
    config, log = write_config(inputs, tmp_path, save_steps=3, staleness=1), tmp_path / "log"
    held_out = {"data": str(inputs / "prompts.jsonl"), "response_length": 8, "max_prompt_length": 32, "device": "cpu"}
    judged = {"reward_funcs": [f"{inputs / 'reward.py'}:letters"], "device": "cpu"}
    for name, values in (("generate", held_out), ("evaluate", judged)):
        (tmp_path / f"{name}.yml").write_text(json.dumps(values))  # JSON is YAML
    files = [str(path) for path in (config, tmp_path / "generate.yml", tmp_path / "evaluate.yml")]
    words = ["bash", str(RECIPES / "slurm" / "train_generate_evaluate.sh"), *files]
    output = tmp_path / "results" / job["SLURM_JOB_ID"] / "run"
    text = finish(start(words, log, **job), log, 300)
    assert "2 ranks, ddp" in text
    assert len(metrics_of(output)) == 6
    names = {path.stem for path in (output / "generations").glob("*.jsonl")}
    assert {"checkpoint-3", "final"} <= names
    results = json.loads((output / "evaluation" / "evaluation.json").read_text())["results"]["models"]
    assert results.keys() == names
    assert all(one["reward_mean"]["estimate"] > 0 for one in results.values())
    assert not (tmp_path / "requeued").exists()
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    finish(start(words, log, **job), log, 200)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    wrong = subprocess.run(words[:3], env={**os.environ, **job}, capture_output=True, text=True, check=False)
    assert wrong.returncode != 0
    assert "usage: sbatch recipes/slurm/train_generate_evaluate.sh TRAIN.yml" in wrong.stderr


def test_a_slurm_job_that_is_preempted_goes_on_exactly(inputs, tmp_path):
    """The script of recipes/slurm, with stand-ins for SLURM's commands: signal, save, back into the queue, resume."""
    tools, job = slurm_job(tmp_path)
    config, log = write_config(inputs, tmp_path, total_episodes=480, staleness=1), tmp_path / "log"
    whole = tmp_path / "whole"
    finish(start(torchrun(config, f"--train.output_dir={whole}"), log), log, 240)
    words = ["bash", str(RECIPES / "slurm" / "one_node.sh"), str(config)]
    output = tmp_path / "results" / job["SLURM_JOB_ID"] / "run"
    first = start(words, tmp_path / "job", **job)
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or len((output / "metrics.jsonl").read_text().splitlines()) < 5:
        assert time.monotonic() < deadline, (tmp_path / "job").read_text()[-4000:]
        assert first.poll() is None, (tmp_path / "job").read_text()[-4000:]
        time.sleep(0.1)
    next(member for member in family(first) if str(tools / "srun") in member.cmdline()).terminate()
    finish(first, tmp_path / "job", 60)
    assert (tmp_path / "requeued").read_text().split() == ["requeue", job["SLURM_JOB_ID"]]
    assert not (output / "final").exists()
    finish(start(words, tmp_path / "job", **job), tmp_path / "job", 240)
    assert (tmp_path / "requeued").read_text().count("requeue") == 1
    assert metrics_of(output) == metrics_of(whole)
    left, right = weights_of(output), weights_of(whole)
    assert all(torch.equal(left[name], right[name]) for name in right)
