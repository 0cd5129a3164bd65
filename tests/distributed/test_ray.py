"""A real Ray cluster of two nodes: the learner's, and one for actors that is killed in the middle of a run."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from environments import Echo
from tiny import count_letters, json_rows
from transformers import TrainerCallback

from async_rlhf import OnlineDPOTrainer
from async_rlhf.config import ConfigError, RayConfig
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.models.saving import write_model
from async_rlhf.rewards.functions import RewardError
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.system.errors import UserCodeError
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Group, Prompt, Sample, drawn_versions

pytestmark = pytest.mark.distributed
pytest.importorskip("ray")

NODE = {"num_cpus": 4, "object_store_memory": 80_000_000, "labels": {"role": "actors"}}
ACTORS = {"role": "actors"}


class TwoNodes:
    """A head, which the learner is on, and a node for actors."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # A node that is lost is noticed within two seconds instead of twenty.
        quickly = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 3,
        }
        head = {"num_cpus": 0, "object_store_memory": 80_000_000, "include_dashboard": False, "_system_config": quickly}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.node = self.cluster.add_node(**NODE)
        self.address = self.cluster.address

    def lose_node(self) -> None:
        """Its processes get no chance to say good-bye."""
        pids = actor_pids("GeneratorActor") | actor_pids("RewardActor")
        self.cluster.remove_node(self.node, allow_graceful=False)
        for pid in pids:  # those that were stopped cannot see that their node is gone
            kill(pid, signal.SIGKILL)

    def add_node(self) -> None:
        self.node = self.cluster.add_node(**NODE)


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        nodes = TwoNodes()
        yield nodes
        nodes.cluster.shutdown()


@pytest.fixture(autouse=True)
def disconnected():
    """Every test connects anew, and leaves no actor behind."""
    import ray

    yield
    assert wait_until(lambda: not actor_pids("GeneratorActor") and not actor_pids("RewardActor"), 20)
    ray.shutdown()


def actor_pids(kind: str) -> set[int]:
    """Living actor processes of this test's cluster."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.joinpath("cmdline").read_bytes().startswith(f"ray::{kind}".encode()):
                found.add(int(folder.name))
        except OSError:
            continue
    return {pid for pid in found if os.getpid() in ancestors(pid)}


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.append(pid)
    return found


def kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def has_trained(process: subprocess.Popen[str], metrics: Path) -> bool:
    """Or has ended."""
    return process.poll() is not None or (metrics.exists() and metrics.stat().st_size > 0)


def without_clock(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "eval_time/")) and k != "eps"} for row in metrics
    ]


def outcome(trainer: OnlineDPOTrainer):
    folder = Path(trainer.args.output_dir)
    metrics = json_rows(folder / "metrics.jsonl")
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    return weights, without_clock(metrics), (folder / "samples.jsonl").read_text()


def assert_same(ours, theirs) -> None:
    assert ours[1] == theirs[1]
    assert ours[2] == theirs[2]
    for name, tensor in theirs[0].items():
        assert torch.equal(ours[0][name], tensor), name


@pytest.fixture
def run(make_policy, make_reward_model, tokenizer, prompts, make_args):
    """A run of six batches, three of them under way at any time, with a reward model, a function and evaluations."""

    def run(name: str, *callbacks: TrainerCallback, generation: dict[str, object] | None = None, **options: object):
        generation = {"workers": 2, "probe_steps": 2, **(generation or {})}
        args = make_args(name, generation, staleness=2, **{"eval_steps": 2, **options})
        trainer = OnlineDPOTrainer(
            make_policy(),
            args,
            prompts,
            reward_model=make_reward_model(),
            reward_funcs=count_letters,
            processing_class=tokenizer,
            callbacks=callbacks,
            eval_dataset=prompts[:5],
        )
        trainer.train()
        return outcome(trainer)

    return run


_KEPT: dict[str, object] = {}


@pytest.fixture
def undisturbed(run, tmp_path_factory):
    """The run on this host alone, and its checkpoint after batch 3."""
    if not _KEPT:
        folder = tmp_path_factory.mktemp("undisturbed")
        _KEPT["outcome"] = run("local", output_dir=str(folder / "run"), save_steps=3, logging_steps=1)
        _KEPT["checkpoint"] = str(folder / "run" / "checkpoint-3")
    return _KEPT


def test_a_run_by_actors_is_bitwise_one_on_this_host_and_resumes_anywhere(cluster, run, undisturbed, tmp_path):
    by_actors = run(
        "actors",
        launch="ray",
        ray=RayConfig(address=cluster.address, labels=ACTORS, reward_workers=2, reward_labels=ACTORS),
        save_steps=3,
    )
    assert_same(by_actors, undisturbed["outcome"])
    resumed = run("here", resume_from=str(tmp_path / "actors" / "checkpoint-3"))
    assert_same((resumed[0], resumed[1], ""), (by_actors[0], by_actors[1][3:], ""))


def test_episodes_by_actors_are_bitwise_those_on_this_host(cluster, make_policy, tokenizer, prompts, make_args):
    """The environments are with the actors, which import their module. Batch 2 is sampled by the first weights."""
    outcomes, variables = {}, {"PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"}
    there = RayConfig(address=cluster.address, labels=ACTORS, runtime_env={"env_vars": variables})
    for name in ("here", "there"):
        ray = {"launch": "ray", "ray": there} if name == "there" else {}
        sizes = {"response_length": 8, "max_turns": 3, "episode_length": 40, "stop_token_ids": list(range(60))}
        args = make_args(name, {**sizes, "workers": 2, "mismatch_steps": 1}, staleness=1, total_episodes=32, **ray)
        policy = make_policy(max_position_embeddings=160)
        trainer = OnlineDPOTrainer(policy, args, prompts, environment=Echo, processing_class=tokenizer)
        trainer.train()
        outcomes[name] = outcome(trainer)
    assert_same(outcomes["there"], outcomes["here"])
    rows = outcomes["there"][1]
    assert [row["schedule/version"] for row in rows] == [0, 0, 1, 2]
    assert min(row["episode/turns"] for row in rows) > 1
    assert max(row["engine/logprob_difference"] for row in rows) < 1e-4


class LoseTheNode(TrainerCallback):
    """Stops the generators, so that batches are surely under way, and then takes their node away."""

    def __init__(self, cluster: TwoNodes) -> None:
        self.cluster = cluster
        self.lost: set[int] = set()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.lost = actor_pids("GeneratorActor")
            for pid in self.lost:
                os.kill(pid, signal.SIGSTOP)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.cluster.lose_node()
            self.cluster.add_node()


def test_a_node_that_is_killed_mid_run_costs_nothing_but_time(cluster, run, undisturbed, caplog):
    """Every actor was on it, and a batch was under way; a new node takes its place."""
    lose = LoseTheNode(cluster)
    ray_config = RayConfig(address=cluster.address, labels=ACTORS, reward_workers=1, reward_labels=ACTORS)
    with caplog.at_level(logging.WARNING):
        survived = run("survives", lose, launch="ray", ray=ray_config)
    assert len(lose.lost) == 2
    for worker in ("generator actor 0", "generator actor 1"):
        (line,) = [line for line in caplog.messages if line.startswith(f"{worker} died")]
        # Each had one request; those of batch 4, asked for just before the node was lost, may have lain in the queue.
        assert re.search(r"starting it again, to sample batch [234] again$", line)
    assert any(line.startswith("reward worker 0 died") and "score its share again" in line for line in caplog.messages)
    assert_same(survived, undisturbed["outcome"])


class HarmGenerators(TrainerCallback):
    """Kills one while the first batch is trained on, and stops the other two batches later."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.pids = sorted(actor_pids("GeneratorActor"))
            os.kill(self.pids[0], signal.SIGKILL)
        if state.global_step == 2:
            os.kill(self.pids[1], signal.SIGSTOP)


def test_actors_that_die_or_hang_are_replaced(cluster, run, undisturbed, caplog):
    harm = HarmGenerators()
    ray_config = RayConfig(address=cluster.address, labels=ACTORS)
    with caplog.at_level(logging.WARNING):
        survived = run("harmed", harm, generation={"heartbeat_timeout": 4.0}, launch="ray", ray=ray_config)
    assert len(harm.pids) == 2
    assert_same(survived, undisturbed["outcome"])
    again = [line for line in caplog.messages if line.startswith("generator actor") and "starting it again" in line]
    assert len(again) == 2
    assert "died (" in again[0]
    assert "gave no sign of life for 4 s (generation.heartbeat_timeout)" in again[1]


def test_a_checkpoint_of_this_host_goes_on_in_a_cluster(cluster, run, undisturbed):
    ray_config = RayConfig(address=cluster.address, labels=ACTORS)
    resumed = run("there", resume_from=undisturbed["checkpoint"], launch="ray", ray=ray_config)
    assert_same((resumed[0], resumed[1], ""), (undisturbed["outcome"][0], undisturbed["outcome"][1][3:], ""))


@pytest.fixture
def slow_actors(cluster):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    hook = {"worker_process_setup_hook": "slow_actor.slow_down", "env_vars": {"PYTHONPATH": path}}
    return RayConfig(address=cluster.address, labels=ACTORS, runtime_env=hook, num_cpus=3)


@pytest.mark.rare
def test_newest_weights_between_batches_and_between_tokens_then_no_room_then_no_more_restarts(
    slow_actors, make_policy, tokenizer, prompts, make_args
):
    """One actor, for starting it takes longest. Sampling a batch takes 16 steps of 50 ms."""
    from async_rlhf.distributed.ray import NoRoomError, connect
    from async_rlhf.generation.ray import RayGenerator

    args = make_args(
        generation={"max_restarts": 0, "heartbeat_timeout": 4.0}, staleness=2, launch="ray", ray=slow_actors
    )
    connect(args)
    stream, params = PromptStream(prompts, tokenizer), SamplingParams(2, 0.7, 16, (256,), 0)

    def versions(batch: Batch) -> set[int]:
        for sample in batch.samples:
            assert list(sample.versions) == sorted(sample.versions)
        return drawn_versions(batch.samples)

    with closing(RayGenerator(args, make_policy(), params, Trace())) as generator:
        generator.publish(make_policy(0), 0)
        generator.submit(1, None, stream.batch(1, 4))
        assert versions(generator.collect(1)) == {0}
        generator.submit(2, None, stream.batch(2, 4))
        generator.submit(3, None, stream.batch(3, 4))  # asked for at version 0, begun with version 1
        time.sleep(0.2)
        generator.publish(make_policy(1), 1)
        assert versions(generator.collect(2)) == {0}
        assert versions(generator.collect(3)) == {1}

        generator.config = replace(generator.config, in_flight=True)
        generator.submit(4, None, stream.batch(4, 4))
        time.sleep(0.3)
        generator.publish(make_policy(2), 2)
        assert versions(generator.collect(4)) == {1, 2}

        crowded = replace(args, ray=replace(slow_actors, room_timeout=2.0))
        with closing(RayGenerator(crowded, make_policy(), params, Trace())) as second:
            second.publish(make_policy(), 0)
            second.submit(1, 0, stream.batch(1, 4))
            right = r"generator 0 was not started within 2 s \(ray.room_timeout\): it needs 3 CPU, 0 GPU, label role="
            with pytest.raises(NoRoomError, match=right):
                second.collect(1)

        (pid,) = actor_pids("GeneratorActor")
        generator.submit(5, None, stream.batch(5, 4))
        os.kill(pid, signal.SIGKILL)
        right = r"generator actor 0 died \(ActorDiedError: [^\n]*\) after 0 restarts \(generation.max_restarts\)"
        with pytest.raises(GeneratorError, match=right):
            generator.collect(5)


def test_an_actor_that_waits_for_weights_which_it_cannot_fetch_ends_the_run(
    cluster, make_policy, prompts, tokenizer, make_args, monkeypatch
):
    """It was asked to sample before they had come into the store."""
    from async_rlhf.distributed.ray import connect
    from async_rlhf.generation.ray import ObjectStoreSnapshots, RayGenerator

    finish = ObjectStoreSnapshots.make_available
    monkeypatch.setattr(ObjectStoreSnapshots, "make_available", lambda *given: (time.sleep(1), finish(*given)))
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    hook = {"worker_process_setup_hook": "slow_actor.fail_to_fetch", "env_vars": {"PYTHONPATH": path}}
    args = make_args(
        generation={"timeout": 300.0},
        staleness=1,
        launch="ray",
        ray=RayConfig(address=cluster.address, labels=ACTORS, runtime_env=hook),
    )
    connect(args)
    params, policy, started = SamplingParams(2, 0.7, 16, (256,), 0), make_policy(), time.monotonic()
    with closing(RayGenerator(args, policy, params, Trace())) as generator:
        generator.publish(policy, 0)
        generator.submit(1, 0, PromptStream(prompts, tokenizer).batch(1, 4))
        with pytest.raises(UserCodeError, match=r"generator actor 0: .*no room for version 0"):
            generator.collect(1)
    assert time.monotonic() - started < 200


class AwaitsActors(TrainerCallback):
    """Training begins once so many have left a file: else a run is over before the last of them comes."""

    def __init__(self, attempts: Path, count: int) -> None:
        self.attempts, self.count = attempts, count

    def on_step_begin(self, args, state, control, **kwargs):
        assert wait_until(lambda: len(list(self.attempts.iterdir())) == self.count, 60)


@pytest.mark.rare
def test_actors_that_are_lost_before_they_run_are_placed_again_and_that_is_no_restart(
    cluster, run, undisturbed, tmp_path
):
    """As those that are placed on a node that is about to go. Two are lost, of generators or reward workers."""
    attempts = tmp_path / "attempts"
    attempts.mkdir()
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    hook = {
        "worker_process_setup_hook": "slow_actor.lose_the_first",
        "env_vars": {"PYTHONPATH": path, "ATTEMPTS": str(attempts)},
    }
    config = RayConfig(
        address=cluster.address, labels=ACTORS, reward_workers=1, reward_labels=ACTORS, reward_max_restarts=0
    )
    all_come = AwaitsActors(attempts, 2 + 3)  # the lost ones, two generators and a reward worker
    ray_config = replace(config, runtime_env=hook)
    placed = run("placed", all_come, generation={"max_restarts": 0}, launch="ray", ray=ray_config)
    assert_same(placed, undisturbed["outcome"])


class Counted:
    """A reward with a state: it has to stay where checkpoints are written."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts, completions, **columns):
        self.calls += 1
        return [0.25 * self.calls] * len(completions)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def moody(prompts, completions, fault, **columns):
    """Does what the data says: dies with its process, the first time; or raises, or returns no number."""
    for word in fault:
        if word == "raise":
            raise ZeroDivisionError("in a reward worker")
        if word.startswith("/") and not Path(word).exists():
            Path(word).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return [float("nan") if word == "nan" else float(len(text)) for text, word in zip(completions, fault, strict=True)]


def test_a_folder_with_another_package_of_our_name_is_refused(tmp_path, monkeypatch, make_args):
    """Ray's workers would have it first on their path."""
    from async_rlhf.distributed.ray import connect

    (tmp_path / "async_rlhf").mkdir()
    (tmp_path / "async_rlhf" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"ray: in this folder Ray's workers would import .*; must be started in"):
        connect(make_args(staleness=1, launch="ray", ray=RayConfig()))


def batch_of(tokenizer, faults: list[str]) -> Batch:
    """Eight prompts of various lengths with three completions each, of which the first and the last are equal."""
    groups = []
    for i, fault in enumerate(faults):
        text = f"def f{i}{'x' * (i % 3)}():"
        prompt = Prompt(i, i, tuple(tokenizer(text)["input_ids"]), {"query": text, "fault": fault})
        words = [f"Return {'a' * (i * 2)}.", f"Make {i}.", f"Return {'a' * (i * 2)}."]
        tokens = [(*tokenizer(word)["input_ids"], 256) for word in words]
        answers = [Sample.answer(prompt.tokens, t, [0.0] * len(t), [0] * len(t), "stop") for t in tokens]
        groups.append(Group(prompt, tuple(answers)))
    return Batch(1, 0, tuple(groups), 0.0)


def test_rewards_by_actors_are_those_of_one_process_ties_errors_and_all(
    cluster, make_reward_model, tokenizer, make_args, tmp_path, caplog
):
    from async_rlhf.distributed.ray import connect
    from async_rlhf.rewards.ray import RayScorer

    ray_config = RayConfig(address=cluster.address, reward_workers=2, reward_labels=ACTORS)
    args = make_args(staleness=1, annotate_batch_size=4, launch="ray", ray=ray_config, bf16=True)
    connect(args)
    functions = [count_letters, moody, stateful := Counted()]
    ours = RayScorer(tokenizer, args, make_reward_model(), functions)
    theirs = Scorer(tokenizer, args, make_reward_model(), [count_letters, moody, Counted()])
    assert ours.reward_model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.dtype == torch.bfloat16  # the same numbers

    def compare(faults: list[str]) -> torch.Tensor:
        batch = batch_of(tokenizer, faults)
        found, expected = ours(batch), theirs(batch)
        assert torch.equal(found.scores_PK.nan_to_num(-1e9), expected.scores_PK.nan_to_num(-1e9))
        assert without_clock([found.metrics]) == without_clock([expected.metrics])
        return found.scores_PK

    with ours.started():
        scores = compare([""] * 8)
        assert torch.equal(scores[:, 0], scores[:, 2])  # equal completions tie exactly
        assert (scores[:, 0] != scores[:, 1]).all()
        assert compare([""] * 3).shape == (3, 3)
        flag = tmp_path / "died"
        (tmp_path / "never").touch()
        with caplog.at_level(logging.WARNING):
            found = ours(batch_of(tokenizer, ["", "", "", "", "", str(flag), "", ""]))
        assert flag.exists()
        assert [line.partition(" (")[0] for line in caplog.messages if "again" in line] == ["reward worker 1 died"]
        assert torch.equal(found.scores_PK, theirs(batch_of(tokenizer, [""] * 8)).scores_PK)

        for fault, text in [("raise", "moody raised ZeroDivisionError: in a"), ("nan", "moody returned nan; must be")]:
            with pytest.raises(RewardError, match=f"reward function {text}") as caught:
                ours(batch_of(tokenizer, ["", "", "", "", "", "", fault, ""]))
            with pytest.raises(RewardError) as expected:
                theirs(batch_of(tokenizer, ["", "", "", "", "", "", fault, ""]))
            assert str(caught.value) == str(expected.value)
            if fault == "raise":
                assert 'raise ZeroDivisionError("in a reward worker")' in str(caught.value.__cause__)

        ours.skip = theirs.skip = True
        compare(["", "", "", "", "", "nan", "", ""])
        scores = ours(batch_of(tokenizer, ["", "", "", "", "", "raise", "", ""])).scores_PK
        assert scores.isnan().any(dim=1).tolist() == [False] * 4 + [True] * 4  # of the share that failed
    assert ours.state() == {"Counted": {"calls": stateful.calls}}
    assert stateful.calls == 7

    alone = replace(args, reward_weights=[])
    with pytest.raises(ConfigError, match=r"ray.reward_workers: got 2; must be 0: the reward functions keep a state"):
        RayScorer(tokenizer, alone, None, [Counted()])
    locked = {"lock": threading.Lock()}

    def locks(prompts, completions, **columns):
        return [float(locked["lock"].locked())] * len(completions)

    with pytest.raises(ConfigError, match=r"reward_funcs: locks: with ray.reward_workers .* TypeError: cannot pickle"):
        RayScorer(tokenizer, args, None, [locks])


def test_what_cannot_work_is_said_before_a_model_is_loaded(cluster, tokenizer, prompts, make_args, monkeypatch):
    def error(**options: object) -> str:
        args = make_args(staleness=1, launch="ray", **options)
        with pytest.raises(ConfigError) as caught:
            OnlineDPOTrainer("there/is/no/such/model", args, prompts, reward_funcs=count_letters)
        return str(caught.value)

    nobody = error(ray=RayConfig(address="127.0.0.1:1"))
    assert nobody.startswith("ray.address: got '127.0.0.1:1'; must be the address of a running Ray cluster")
    lacking = error(ray=RayConfig(address=cluster.address, num_gpus=1))
    assert "generation.workers: got 1; must be at most 0: each needs 1 CPU, 1 GPU, and the cluster has" in lacking
    assert "2 nodes: " in lacking
    assert "(4 CPU, 0 GPU, label role=actors)" in lacking
    elsewhere = error(ray=RayConfig(address=cluster.address, labels={"role": "nobody"}))
    assert "must be at most 0: each needs 1 CPU, 0 GPU, label role=nobody" in elsewhere
    many = error(ray=RayConfig(address=cluster.address, reward_workers=9, reward_num_cpus=0.5))
    assert "ray.reward_workers: got 9; must be at most 8: each needs 0.5 CPU" in many

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "async_rlhf.distributed.ray")
    assert error() == "launch: got 'ray'; needs Ray: pip install 'async-rlhf[ray]'"


@pytest.fixture
def command(cluster, make_policy, tokenizer, prompts, tmp_path, monkeypatch):
    """Starts the command; its reward is a file that the nodes know nothing of."""
    write_model(make_policy(), tokenizer, tmp_path / "policy")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "letters.py").write_text(inspect.getsource(count_letters))
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started = []

    def start(name: str, *launcher: str, **train: object) -> subprocess.Popen[str]:
        config = {
            "model": str(tmp_path / "policy"),
            "data": {"train": str(tmp_path / "prompts.jsonl")},
            "reward_funcs": [f"{tmp_path / 'letters.py'}:count_letters"],
            "train": {
                "output_dir": str(tmp_path / name),
                "max_prompt_length": 32,
                "non_eos_penalty": False,
                "progress": False,
                "launch": "ray",
                "generation": {"response_length": 8},
                **train,
            },
        }
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(config))
        words = [*launcher, "-m", "async_rlhf.cli", "train", "--config", str(tmp_path / f"{name}.yml")]
        log = (tmp_path / f"{name}.log").open("w")
        # What runs the tests in the background may have Ctrl-C ignored, and a child inherits that.
        heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, text=True, preexec_fn=heeding)
        started.append(process)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_however_the_command_ends_its_actors_end(command, tmp_path):
    ends = {"interrupted": (signal.SIGINT, 130), "killed": (signal.SIGKILL, -9)}
    rewards = {"interrupted": {"reward_workers": 1, "reward_labels": ACTORS}, "killed": {}}
    processes = {name: command(name, total_episodes=40_000, ray={"labels": ACTORS, **rewards[name]}) for name in ends}
    for name, process in processes.items():
        assert wait_until(partial(has_trained, process, tmp_path / name / "metrics.jsonl"), 120)
        assert process.poll() is None, (tmp_path / f"{name}.log").read_text()
    assert len(actor_pids("GeneratorActor")) == 2
    assert len(actor_pids("RewardActor")) == 1
    for name, (number, code) in ends.items():
        processes[name].send_signal(number)
        assert processes[name].wait(timeout=30) == code
    assert wait_until(lambda: not actor_pids("GeneratorActor") and not actor_pids("RewardActor"), 15)


@pytest.mark.rare
def test_a_learner_on_two_ranks_under_torchrun_has_its_actors_too(command, make_policy, tokenizer, prompts, make_args):
    """Weights that are spread over ranks come together for the object store; the run is that of one process."""
    # With a large epsilon a step is nearly proportional to the gradient: rounding stays rounding.
    smooth = {"learning_rate": 1e-2, "adam_epsilon": 1e-2, "total_episodes": 48, "staleness": 1}
    alone = make_args("alone", {"response_length": 8}, gradient_accumulation_steps=2, num_mini_batches=1, **smooth)
    trainer = OnlineDPOTrainer(make_policy(), alone, prompts, reward_funcs=count_letters, processing_class=tokenizer)
    trainer.train()
    expected = outcome(trainer)[1]

    folder = Path(alone.output_dir).with_name("ranks")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d"]
    spread = {"per_device_train_batch_size": 4, "parallel": {"strategy": "fsdp"}, "ray": {"labels": ACTORS}}
    process = command("ranks", *torchrun, **smooth, **spread)
    assert process.wait(timeout=180) == 0, folder.with_name("ranks.log").read_text()
    metrics = json_rows(folder / "metrics.jsonl")
    assert len(metrics) == len(expected) == 6
    for ours, theirs in zip(metrics, expected, strict=True):
        for name in ("schedule/version", "objective/scores", "objective/kl", "loss/policy_avg", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
