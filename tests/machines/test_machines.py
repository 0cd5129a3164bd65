"""Recipes and commands on simulated machines: each starts, trains, saves, is killed, resumes and ends.

Every process has the GPUs of tests/simulated_gpu/simulated_machine.py, and a stand-in for vLLM. Recipes are as they
stand but for the size of models, batches and answers. docs/first_hour_gpu.md has the table of what is run here.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from simulated_machine import WAYS, counts_in
from tiny import byte_tokenizer, json_rows
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from async_rlhf.models.saving import write_model

ROOT = Path(__file__).parents[2]
SIMULATED = ROOT / "tests/simulated_gpu/machine"
PROGRAM = Path(sys.executable).parent
SECONDS = 400
ROWS = 60
OTHER_SIZES = ("completions_per_batch", "batches", "metric_for_best_model")
ROUNDING = 0.02
"""Nats a token by which the generator may differ from the learner, in bfloat16: with other weights it is more."""
pytestmark = pytest.mark.machines
Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Case:
    """A recipe on a machine.

    Args:
        machine: GPUs of a host, and GB of each.
        recipe: its name.
        flags: what a page adds to the command.
        ranks: of the learner.
        hosts: that its ranks are spread over, each with such GPUs.
        servers: words of a server on another host; None for none.
        batches: that it trains.
        killed: whether it is killed after its first checkpoint, and resumed.
    """

    machine: str
    recipe: str
    flags: tuple[str, ...] = ()
    ranks: int = 1
    hosts: int = 1
    servers: tuple[str, ...] | None = None
    batches: int = 3
    killed: bool = True


def shares(part: float) -> tuple[str, str]:
    return ("--train.generation.vllm.gpu_memory_utilization", str(part))


IN_TURN = ("--train.staleness", "0", "--train.generation.placement", "process")
RAY = ("--train.generation.engine", "vllm", "--train.ray.reward_num_gpus", "1")
TWO = ("--train.ray.num_gpus=2", "--train.generation.vllm.tensor_parallel_size=2", "--train.generation.workers=1")
SERVED = ("--train.generation.dtype", "bfloat16", "--train.generation.heartbeat_timeout", "200")
CASES = {
    # of the recipes' pages
    "grpo_24gb": Case("1x24", "gsm8k/grpo_24gb"),
    "gsm8k on one": Case("1x80", "gsm8k/grpo", shares(0.3)),
    "gsm8k": Case("2x80", "gsm8k/grpo"),
    "gsm8k in turn": Case("2x80", "gsm8k/grpo", IN_TURN),
    "gsm8k, S = 2": Case(
        "2x80", "gsm8k/grpo", ("--train.staleness", "2", "--train.save_steps", "0"), batches=7, killed=False
    ),
    "gsm8k, pairs": Case("2x80", "gsm8k/online_dpo", ("--reward_funcs", "[tests/machines/lengths.py:letters]")),
    "tldr on one, in turn": Case("1x80", "tldr/online_dpo_410m", ("--train.staleness", "0", *shares(0.3))),
    "tldr on one": Case("1x80", "tldr/online_dpo_410m", shares(0.3)),
    "tldr on one of 24 GB": Case("1x24", "tldr/online_dpo_410m", shares(0.3)),
    "tldr": Case("2x80", "tldr/online_dpo_410m"),
    "tldr, 1B": Case("2x80", "tldr/online_dpo_1b"),
    "tldr, PPO": Case("2x80", "tldr/ppo_410m"),
    "tldr, RLOO": Case("2x80", "tldr/rloo_410m"),
    "tldr on four": Case("4x80", "tldr/online_dpo_410m", ranks=3),
    "tldr on four, in turn": Case("4x80", "tldr/online_dpo_410m", IN_TURN, ranks=3),
    "tldr on four, without vLLM": Case(
        "4x80", "tldr/online_dpo_410m", ("--train.staleness", "0", "--train.generation.engine", "transformers"), ranks=4
    ),
    "tldr, 2.8B": Case("4x80", "tldr/online_dpo_2.8b", ranks=3),
    "no_robots": Case("8x80", "no_robots/online_dpo", ranks=6),
    "sums on one": Case("1x24", "smollm/sums_gpu"),
    "sums": Case("2x80", "smollm/sums_gpu"),
    "chats, fine-tuned": Case("1x24", "no_robots/sft"),
    "chats, fine-tuned by ranks": Case("8x80", "no_robots/sft", ranks=8),
    "actors": Case("8x80", "ray/online_dpo", (*RAY, "--train.ray.num_gpus", "1")),
    "an actor of two GPUs": Case("3x80", "ray/online_dpo", (*RAY, *TWO)),
    # of docs/scaling.md
    "two GPUs a generator": Case("8x80", "gsm8k/grpo", ("--train.generation.vllm.tensor_parallel_size", "2")),
    "generators on seven": Case("8x80", "gsm8k/grpo", ("--train.generation.workers", "2")),
    "servers by network": Case("8x80", "gsm8k/grpo", ("--train.generation.weights_transport", "network"), servers=()),
    "servers of two GPUs by network": Case(
        "8x80",
        "gsm8k/grpo",
        ("--train.generation.weights_transport", "network"),
        servers=("--tensor_parallel_size", "2"),
    ),
    "servers by folder": Case("8x80", "gsm8k/grpo", ("--train.generation.weights_transport", "folder"), servers=()),
    "ranks and servers by network": Case(
        "2x80", "gsm8k/grpo", ("--train.generation.weights_transport", "network"), ranks=2, servers=()
    ),
    "two hosts": Case("8x80", "no_robots/online_dpo", ranks=4, hosts=2, batches=2),
    "shards on each host": Case(
        "8x80", "no_robots/online_dpo", ("--train.parallel.shard_size", "2"), ranks=4, hosts=2, batches=2
    ),
    "adapters alone": Case("2x80", "gsm8k/grpo", ("--train.lora.rank", "4", "--train.lora.publish", "adapter")),
    "adapters merged": Case("2x80", "gsm8k/grpo", ("--train.lora.rank", "4")),
}
SLURM = {
    "one_node": Case("4x80", "tldr/online_dpo_410m", ranks=3),
    "several_nodes": Case("2x80", "gsm8k/grpo", SERVED, ranks=2, hosts=2),
}
FEW = ("grpo_24gb", "gsm8k", "servers by network")
"""Those of CI: make test-machines-few."""


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A policy and a reward model whose heads can be divided among GPUs, and data of every recipe's form."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}[assistant]"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=258, bos_token_id=256, eos_token_id=256, pad_token_id=257, num_labels=1, **sizes)
    torch.manual_seed(0)
    write_model(LlamaForCausalLM(config), tokenizer, folder / "policy")
    write_model(LlamaForSequenceClassification(config), tokenizer, folder / "judge")
    sums = [(f"What is {i} + 1?", str(i + 1)) for i in range(ROWS)]
    plain = [{"query": question, "answer": answer} for question, answer in sums]
    talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": answer}] for text, answer in sums]
    chats = [{"messages": talk, "answer": talk[1]["content"]} for talk in talks]
    for name, rows in (("plain", plain), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words_of(case: Case, models: Path, output: Path) -> list[str]:
    """The command's words: the recipe, other sizes, and the case's flags."""
    asked = yaml.safe_load((ROOT / f"recipes/{case.recipe}.yml").read_text("utf-8"))
    supervised = "algorithm" not in asked
    chats = supervised or asked["data"].get("prompt_field") == "messages"
    data = models / ("chats.jsonl" if chats else "plain.jsonl")
    changes = {"output_dir": output, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    changes |= {"save_steps": 1, "eval_steps": 0, "parallel.ranks": case.ranks}
    if supervised:
        epochs = case.batches / math.ceil(ROWS / (4 * case.ranks))
        changes |= {"train": data, "eval": data, "max_length": 80, "num_epochs": epochs, "logging_steps": 1}
    else:
        # A random model seldom ends within six tokens, and ties teach nothing.
        changes |= {"generation.response_length": 6, "max_prompt_length": 64, "non_eos_penalty": "false"}
        changes |= {"total_episodes": 4 * case.ranks * case.batches, "num_threads": 1}
        changes |= dict.fromkeys(asked["train"].keys() & OTHER_SIZES, "null")
        changes = {"data.train": data, "data.eval": data} | {f"train.{key}": value for key, value in changes.items()}
    if "reward_model" in asked:
        changes["reward_model"] = models / "judge"
    found = ["sft" if supervised else "train", "--config", str(ROOT / f"recipes/{case.recipe}.yml")]
    found += [f"--model={models / 'policy'}", *(f"--{key}={value}" for key, value in changes.items())]
    return found + list(case.flags)


def environment_of(machine: str, folder: Path) -> dict[str, str]:
    """Of a process on a host."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {
        **kept,
        "SIMULATED_MACHINE": f"{machine}:{folder}",
        "PYTHONPATH": f"{SIMULATED}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "ASYNC_RLHF_API_KEY": "secret",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "of our choice",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{PROGRAM}:{os.environ['PATH']}",
    }


@contextmanager
def started(words: list[str], environment: dict[str, str], log: Path) -> Iterator[Process]:
    """A command in a group of processes of its own, which ends with it."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            words, env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            kill(process)


def kill(process: Process) -> None:
    """It and all that it has started, as a host that goes: torchrun gives each rank a session of its own."""
    with suppress(psutil.NoSuchProcess):
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(case: Case, models: Path, folder: Path) -> Iterator[list[str]]:
    """Words by which the run finds the case's server, on a host of its own; or those of Ray's actors."""
    if case.recipe.startswith("ray/"):
        with clustered(case.machine, folder) as address:
            yield [f"--train.ray.address={address}"]
        return
    if case.servers is None:
        yield []
        return
    port = free_port()
    words = ["async-rlhf", "serve", "--model", str(models / "policy"), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", "bfloat16", *case.servers]
    with started(words, environment_of(case.machine, folder / "servers"), folder / "server.log"):
        found = ["--train.generation.placement", "server", "--train.generation.urls", f"[http://127.0.0.1:{port}]"]
        yield [*found, "--train.generation.heartbeat_timeout", "200"]


def require_whole(case: Case, words: list[str], hosts: list[dict[str, str]], output: Path, log: Path) -> None:
    """The case's run is started, killed after its first checkpoint, started again, and ends."""
    deadline = time.monotonic() + SECONDS
    for last in (False, True) if case.killed else (True,):
        with ExitStack() as stack:
            processes = [stack.enter_context(started(words, environment, log)) for environment in hosts]
            while not last and not list(output.parent.glob("*/checkpoint-1")):
                assert all(process.poll() is None for process in processes), log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.05)
            for process in processes * last:
                assert process.wait(timeout=max(1, deadline - time.monotonic())) == 0, log.read_text()[-3000:]
    assert log.read_text().count("resume: there is no checkpoint") == 1
    places = ("config.json", "final/config.json", "final/adapter_config.json")
    assert any((output / place).is_file() for place in places)
    batches = [row for row in json_rows(output / "metrics.jsonl") if {"objective/scores", "loss"} & row.keys()]
    assert [row.get("batch", row.get("step")) for row in batches] == list(range(1, case.batches + 1))
    assert all(row["engine/logprob_difference"] < ROUNDING for row in batches if "engine/logprob_difference" in row)


@contextmanager
def clustered(machine: str, folder: Path) -> Iterator[str]:
    """The address of a cluster: the learner's host, which has no room for actors, and one for them."""
    address, size = f"127.0.0.1:{free_port()}", ["--num-cpus", "8", "--num-gpus", machine.partition("x")[0]]
    head = ["--head", "--port", address.partition(":")[2], "--num-cpus", "0", "--include-dashboard", "false"]
    nodes = {"host0": head, "actors": ["--address", address, "--labels", "role=actors", *size]}
    with ExitStack() as stack:
        for host, words in nodes.items():
            words, log = ["ray", "start", "--block", "--node-ip-address", "127.0.0.1", *words], folder / f"{host}.log"
            node = stack.enter_context(started(words, environment_of(machine, folder / host), log))
            while "Ray runtime started" not in log.read_text():
                assert node.poll() is None, log.read_text()
                time.sleep(0.1)
        yield address


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.rare] * (name not in FEW)) for name in CASES])
def test_it_trains_is_killed_resumes_and_ends(name, models, tmp_path):
    case, output, log, launcher = CASES[name], tmp_path / "run", tmp_path / "run.log", ["async-rlhf"]
    # The generator is the slower side, so that the learner is two versions ahead.
    slow = {"SIMULATED_SECONDS_A_STEP": "2" if name == "gsm8k, S = 2" else "0"}
    hosts = [environment_of(case.machine, tmp_path / f"host{number}") | slow for number in range(case.hosts)]
    if case.ranks > 1:
        launcher = ["torchrun", "--nproc-per-node", str(case.ranks // case.hosts), "--nnodes", str(case.hosts)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        launcher += ["--local-addr", "127.0.0.1", "-m", "async_rlhf.cli"]  # no network knows a simulated host's name
    with served(case, models, tmp_path) as found:
        words = [*launcher, *words_of(case, models, output), *found, "--resume"]
        require_whole(case, words, hosts, output, log)
    if name == "gsm8k, S = 2":  # each version crosses the bus once: what waits is what is asked for next
        size = sum(2 * tensor.numel() for tensor in load_file(models / "policy/model.safetensors").values())
        (generator,) = [counts for counts in counts_in(tmp_path / "host0").values() if counts[1]]
        assert size <= generator[2 + WAYS.index("pinned")] <= size * (case.batches - 2 + 2)


@pytest.mark.rare
@pytest.mark.parametrize(("name", "host"), [("two GPUs a generator", "host0"), ("an actor of two GPUs", "actors")])
def test_a_generator_of_two_gpus_that_is_killed_is_started_again(name, host, models, tmp_path):
    """Its vLLM would have both GPUs for a minute more: the ranks end by their own watch, or with their group."""
    case, output, log = CASES[name], tmp_path / "run", tmp_path / "log"
    with served(case, models, tmp_path) as found:
        words = ["async-rlhf", *words_of(case, models, output), *found]
        with started(words, environment_of(case.machine, tmp_path / "host0"), log) as process:
            while not (output / "checkpoint-1").is_dir():
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.05)
            computing = [pid for pid, counts in counts_in(tmp_path / host).items() if any(counts[: -len(WAYS)])]
            parents = [psutil.Process(pid).ppid() for pid in computing]
            (generator,) = {parent for parent in parents if parents.count(parent) == 2}
            os.kill(generator, signal.SIGKILL)
            assert process.wait(timeout=SECONDS) == 0, log.read_text()[-3000:]
    assert "starting it again" in log.read_text()


SRUN = """
    #!{python}
    # What srun does, with a simulated host for the servers and one for the ranks.
    import os, signal, subprocess, sys
    words, count, host = sys.argv[1:], int(os.environ["SLURM_NTASKS"]), "ranks"
    while words[0].startswith("--"):
        option, _, value = words[0].partition("=")
        count = int(value) if option == "--ntasks" else count
        host = "servers" if option == "--nodelist" else host
        words = words[1:]
    tasks = []
    signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
    for number in range(count):
        task = {{"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number), "SLURM_NTASKS": str(count)}}
        task["SIMULATED_MACHINE"] = os.environ["SIMULATED_MACHINE"] + host
        tasks.append(subprocess.Popen(words, env={{**os.environ, **task, "SLURM_NNODES": "1"}}))
    sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """
    #!/bin/sh
    if [ "$1" = show ]; then echo "$3" | tr , '\\n'; fi
"""


@pytest.mark.rare
@pytest.mark.parametrize("script", SLURM)
def test_the_scripts_of_slurm(script, models, tmp_path):
    """Ranks beside a generator; or two ranks, and two servers on another host: without SLURM's commands."""
    case, tools, log = SLURM[script], tmp_path / "bin", tmp_path / "log"
    tools.mkdir()
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (tools / name).write_text(textwrap.dedent(text).lstrip())
        (tools / name).chmod(0o755)
    environment = environment_of(case.machine, tmp_path / "host-")
    del environment["ASYNC_RLHF_API_KEY"]
    environment |= {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_JOB_NODELIST": ",".join(["localhost", "127.0.0.1"][: case.hosts]),
        "SLURM_NTASKS": str(case.hosts * case.ranks),
        "SLURM_NTASKS_PER_NODE": str(case.ranks),
        "SLURM_NNODES": str(case.hosts),
        "RESULTS": str(tmp_path / "results"),
        "PATH": f"{tools}:{environment['PATH']}",
    }
    _, _, recipe, *words = words_of(case, models, tmp_path / "unused")
    words = [word for word in words if not word.startswith("--train.output_dir")]
    served = [str(models / "policy")] * (case.hosts - 1)
    words = ["bash", str(ROOT / f"recipes/slurm/{script}.sh"), recipe, *served, *words]
    output = tmp_path / "results" / environment["SLURM_JOB_ID"] / Path(recipe).stem
    require_whole(case, words, [environment], output, log)


@pytest.mark.rare
@pytest.mark.parametrize("machine", ["1x24000", "2x80000"])
def test_the_quickstart(machine, tmp_path):
    """Its models have their own size, so that a byte of theirs is one."""
    words = ["async-rlhf", "quickstart", "--scale", "0.01", "--out", str(tmp_path / "out")]
    run(words, environment_of(machine, tmp_path / "host"), tmp_path / "log")


@pytest.mark.rare
@pytest.mark.parametrize("machine", ["1x24", "1x80", "8x80"])
def test_the_stages(models, machine, tmp_path):
    """SFT and a reward model by their recipes; then what that says of answers which vLLM samples."""
    environment, log = environment_of(machine, tmp_path / "host"), tmp_path / "log"
    plain, pairs, done = models / "plain.jsonl", tmp_path / "pairs.jsonl", tmp_path / "done.jsonl"
    rows = [json.loads(line) for line in plain.read_text().splitlines()]
    pairs.write_text(
        "".join(json.dumps({"prompt": row["query"], "chosen": row["answer"], "rejected": "no"}) + "\n" for row in rows)
    )
    done.write_text("".join(json.dumps({"prompt": row["query"], "completion": row["answer"]}) + "\n" for row in rows))
    sizes = ["--max_length=80", "--num_epochs=1", "--gradient_accumulation_steps=2", "--eval_steps=0"]
    for name, data, more in (("gsm8k/sft", done, []), ("tldr/reward", pairs, ["--reference=null", "--center=false"])):
        command, model = name.rpartition("/")[2], models / ("policy" if name == "gsm8k/sft" else "judge")
        words = ["async-rlhf", command, "--config", f"recipes/{name}.yml", f"--model={model}", f"--train={data}"]
        run([*words, f"--eval={data}", f"--output_dir={tmp_path / command}", *sizes, *more], environment, log)
    words = ["async-rlhf", "evaluate", "--config", "recipes/tldr/evaluate.yml", f"--models={{sft: {tmp_path / 'sft'}}}"]
    words += ["--run=null", "--ref_model=null", f"--reward_model={tmp_path / 'reward'}", "--reward_tokenizer=null"]
    words += [f"--data={plain}", f"--output_dir={tmp_path / 'evaluation'}", "--max_prompts=8", "--response_length=6"]
    run(words, environment, log)
    assert (tmp_path / "evaluation/evaluation.json").is_file()


def run(words: list[str], environment: dict[str, str], log: Path) -> None:
    with started(words, environment, log) as process:
        assert process.wait(timeout=SECONDS) == 0, log.read_text()[-3000:]


NOT_SIMULATED = ("that_auto_makes_fit", "figures_are_written", "what_publishing_takes", "checksums_are_the_same")
"""What measures the memory of CUDA's kernels, or speed for ten minutes, or is a kernel of Triton's."""


@pytest.mark.rare
@pytest.mark.parametrize("file", ["generation", "packing", "ranks", "weights"])
def test_the_tests_for_gpus_run_here(file, tmp_path):
    """Each body of tests/gpu, with models of their own size, on GPUs too small for what a host has no room for."""
    environment = environment_of("3x16", tmp_path / "host") | {"SIMULATED_SCALE": "1"}
    words = [sys.executable, "-m", "pytest", "-m", "gpu", f"tests/gpu/test_{file}_gpu.py"]
    words += ["-k", f"not {' and not '.join(NOT_SIMULATED)}"]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
