"""Every key of every configuration is read by the code that it is for; followed while all commands run with little."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, get_type_hints

import environments
import pytest
import torch
import torch.distributed as dist
from tiny import PROMPTS, byte_tokenizer, new_args, tiny_config
from transformers import GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

from async_rlhf import OnlineDPOConfig
from async_rlhf.algorithms.table import BUILT_IN, built_in
from async_rlhf.commands import serve, workers
from async_rlhf.commands.doctor import DoctorConfig, run_doctor
from async_rlhf.commands.evaluate import run_evaluate
from async_rlhf.commands.generate import run_generate
from async_rlhf.commands.pairs import run_pairs
from async_rlhf.commands.recipes import RecipesConfig, run_recipes
from async_rlhf.commands.relabel import run_relabel
from async_rlhf.commands.reward import run_reward
from async_rlhf.commands.sft import run_sft
from async_rlhf.commands.stage import Stage
from async_rlhf.commands.table import COMMANDS, import_attribute
from async_rlhf.commands.train import run_train
from async_rlhf.compat.original.command import MigrateConfig, run_config
from async_rlhf.config import (
    AdapterConfig,
    EvaluateConfig,
    GenerateConfig,
    JudgeConfig,
    KLConfig,
    LoRAConfig,
    NewModelConfig,
    OffPolicyConfig,
    OnlineConfig,
    PairsConfig,
    ParallelConfig,
    RayConfig,
    RelabelConfig,
    RewardConfig,
    ServeConfig,
    SFTConfig,
    VLLMConfig,
)
from async_rlhf.config.base import Checked
from async_rlhf.config.sizes import SizesConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.parallel import ALONE
from async_rlhf.generation import server_generator, vllm_engine
from async_rlhf.generation.inline import PolicyEngine
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.generation.server_client import key_of
from async_rlhf.generation.supervisor import Supervisor
from async_rlhf.generation.worker_count import WorkerCount
from async_rlhf.learner.launch import start_ranks
from async_rlhf.learner.strategies.deepspeed import ZeRO
from async_rlhf.learner.strategies.fsdp import FullyShardedDataParallel
from async_rlhf.models.saving import write_model
from async_rlhf.rewards.chat import JudgeError
from async_rlhf.rewards.functions import RewardError
from async_rlhf.rewards.judge import Pair, PairwiseJudge
from async_rlhf.run.checkpoint import as_saved
from async_rlhf.run.config import DataConfig, RunConfig
from async_rlhf.run.factory import make_generator
from async_rlhf.run.hub import HubUploads
from async_rlhf.studies.certify.command import run_certify
from async_rlhf.studies.certify.config import CertifyConfig
from async_rlhf.studies.explain.command import run_explain
from async_rlhf.studies.explain.config import ExplainConfig
from async_rlhf.studies.plan.command import run_plan
from async_rlhf.studies.plan.config import ModelSizeConfig, PlanConfig, SecondsConfig, WorkloadConfig
from async_rlhf.studies.report.command import run_report
from async_rlhf.studies.report.config import ReportConfig
from async_rlhf.studies.sweep import command as sweep
from async_rlhf.studies.sweep.command import run_sweep
from async_rlhf.studies.sweep.config import SweepConfig
from async_rlhf.studies.sweep.running import Outcome
from async_rlhf.system.lock import InUseError
from async_rlhf.system.trace import Trace
from async_rlhf.tasks.docstrings.config import DocstringsConfig, QuickstartConfig
from async_rlhf.tasks.docstrings.harvest import run_data
from async_rlhf.tasks.docstrings.quickstart import stage_configs

HAS_RAY = find_spec("ray") is not None
Read = set[tuple[type, str]]
"""Classes of configurations that are there, and the names of their keys that were read."""
CONFIG = "async_rlhf.config"
COMMON = f"{CONFIG}.common"


def _reader(frame: FrameType | None) -> str:
    """The module that asked, maybe through a property of the configuration; CONFIG where all keys are treated alike, as
    by checks, printing and comparing."""
    while frame is not None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        ours = (
            module.startswith(CONFIG) or re.fullmatch(r"async_rlhf\.(studies|tasks)\.\w+\.config", module) is not None
        )
        if module in (f"{CONFIG}.base", "async_rlhf.system.names", f"{CONFIG}.parsing") or (
            ours and code.co_name in ("check", "summary")
        ):
            return CONFIG
        if code.co_filename == "<string>":  # what dataclasses writes
            return CONFIG
        if module != __name__ and not ours:
            return module
        frame = frame.f_back
    return CONFIG


@contextmanager
def following() -> Iterator[Read]:
    """Within, what the package reads of any configuration is noted."""
    read: Read = set()

    def get(config: Checked, name: str) -> Any:
        if name in type(config).__dataclass_fields__:
            reader = _reader(sys._getframe(1))
            if reader.startswith("async_rlhf.") and reader != CONFIG:
                read.add((type(config), name))
        return object.__getattribute__(config, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checked, "__getattribute__", get, raising=False)
        yield read


def on_meta(kind: type[Checked], read: Read) -> list[str]:
    """The keys that a class adds, or shares with other commands, and that nobody has read of it or of what is made of
    it: what one command reads says nothing of another."""
    elsewhere = {above for base in kind.__bases__ if base.__module__ != COMMON for above in base.__mro__}
    shared = [each for each in kind.__mro__ if each is kind or (each.__module__ == COMMON and each not in elsewhere)]
    own = {name for each in shared for name in inspect.get_annotations(each)}
    seen = {name for found, name in read if issubclass(found, kind)}
    return [item.name for item in fields(kind) if item.name in own and item.name not in seen]


class Inputs:
    """Models, data and rewards on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tokenizer = byte_tokenizer()
        torch.manual_seed(0)
        self.policy = GPTNeoXForCausalLM(tiny_config())
        write_model(self.policy, tokenizer, folder / "policy")
        config = tiny_config()
        config.num_labels = 1
        self.judge = GPTNeoXForSequenceClassification(config)
        write_model(self.judge, tokenizer, folder / "judge")
        self.write("prompts.jsonl", PROMPTS)
        self.write("texts.jsonl", [{"query": "ab", "query_reference_response": f"ab{i % 7}" * 2} for i in range(40)])
        self.write("pairs.jsonl", [{"prompt": f"p{i}", "chosen": "aa", "rejected": "b"} for i in range(20)])
        self.write("rated.jsonl", [{"text": f"a{i}", "score": i} for i in range(20)])
        (folder / "reward.py").write_text(
            "def reward(prompts, completions, **columns):\n    return [float(len(set(t))) for t in completions]\n"
        )

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def reward(self) -> list[str]:
        return [f"{self['reward.py']}:reward"]

    def run(self, name: str, algorithm: str, more: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
        """Two batches of four prompts."""
        values = {"total_episodes": 8, "num_mini_batches": 1, "device": "cpu", **changes}
        values = {"generation": {"response_length": 6, "num_threads": 1}, **values}
        train = new_args(self.folder, name, algorithm=algorithm, **values)
        data = DataConfig(self["prompts.jsonl"], eval=self["prompts.jsonl"])
        rest = {"reward_funcs": self.reward, "algorithm": algorithm, **(more or {})}
        return RunConfig(self["policy"], data, train=train, **rest)


def _trains(inputs: Inputs) -> None:
    generation = {"response_length": 6, "num_threads": 1, "probe_steps": 1}
    kept = {"save_steps": 4, "save_total_limit": 1, "eval_steps": 4, "metric_for_best_model": "eval_objective/scores"}
    judged = {"reward_model": inputs["judge"], "tokenizer": inputs["policy"], "ref_model": inputs["policy"]}
    penalties = {"non_eos_penalty": "add", "length_penalty": 0.1, "reward_timeout": 60.0, "reward_errors": "skip"}
    kept |= {"early_stopping_patience": 9}
    more = {"total_episodes": 32, "staleness": 1, **kept, **penalties}
    run_train(inputs.run("dpo", "online_dpo", judged, generation=generation, reward_weights=[2.0], **more))
    run_explain(ExplainConfig(inputs["dpo"], batch=2))
    late = {"non_eos_penalty": False, "bootstrap_truncated": True, "value_learning_rate": 1e-3}
    ppo = {**late, "kl": KLConfig(target=1.0), "save_steps": 1, "lora": LoRAConfig(rank=2), "resume": True}
    for episodes in (8, 16):
        run_train(inputs.run("ppo", "ppo", {"value_model": inputs["judge"]}, **ppo, total_episodes=episodes))
    exact = {"bf16": True, "head_float32": True, "gradient_checkpointing": True, "mask_truncated": True}
    run_train(inputs.run("grpo", "grpo", kl=KLConfig(where="loss", estimator="k3", corrected=True), **exact))
    old = OffPolicyConfig(level="sequence", importance="masked")
    run_train(inputs.run("rloo", "rloo", off_policy=old, num_mini_batches=2, per_device_train_batch_size=2))
    world = {"environment": f"{Path(environments.__file__)}:Echo", "reward_funcs": []}
    turns = {"response_length": 6, "num_threads": 1, "max_turns": 2, "episode_length": 30}
    run_train(inputs.run("episodes", "grpo", world, generation=turns))
    run_train(inputs.run("tools", "grpo", {"tools": ["async_rlhf.tasks.tools:calculate"]}, generation=turns))
    for name in BUILT_IN:
        if name not in ("online_dpo", "ppo", "grpo", "rloo"):
            run_train(inputs.run(name, name))


def _stages(inputs: Inputs) -> None:
    texts, prompts, policy, judge = (inputs[name] for name in ("texts.jsonl", "prompts.jsonl", "policy", "judge"))
    small: dict[str, Any] = {"device": "cpu", "response_length": 4, "max_prompts": 4}
    part = AdapterConfig(2)
    nn = str(Path(torch.__file__).parent / "nn")
    held_out = {"data": prompts, **small}
    played = {"environment": f"{Path(environments.__file__)}:Echo", "max_turns": 2}
    models = {"a": policy, "b": inputs["dpo/final"]}
    judged = {"output_dir": inputs["evaluated"], "reward_model": judge, "ref_model": policy}
    stages = {
        run_sft: SFTConfig(texts, inputs["sft"], eval=texts, new_model=NewModelConfig(300, 16, 1, 1, 64), lora=part),
        run_reward: RewardConfig(inputs["pairs.jsonl"], inputs["reward"], model=policy, reference=texts),
        run_pairs: PairsConfig(policy, prompts, inputs["made.jsonl"], reward_funcs=inputs.reward, **small),
        run_relabel: RelabelConfig(data=inputs["pairs.jsonl"], output_dir=inputs["again"], reward_model=judge),
        run_generate: GenerateConfig(run=inputs["dpo"], checkpoints=["final"], output_dir=inputs["said"], **held_out),
        partial(run_generate): GenerateConfig(models={"a": policy}, output_dir=inputs["played"], **held_out, **played),
        run_evaluate: EvaluateConfig(models=models, **judged, **held_out),
        run_data: DocstringsConfig(inputs["data"], source=[nn], max_functions=100),
    }
    run_pairs(PairsConfig(from_ratings=inputs["rated.jsonl"], output=inputs["drawn.jsonl"]))
    for stage, config in stages.items():
        stage(config)
        stage(config)  # done already, and not to be overwritten
    run_report(ReportConfig([inputs["dpo"]], live=True))
    stage_configs(QuickstartConfig(inputs["quick"]))
    with suppress(JudgeError):  # nobody answers
        nobody = JudgeConfig("http://127.0.0.1:9/v1", "m", max_retries=0)
        PairwiseJudge(nobody, inputs.folder / "verdicts.jsonl").outcomes([Pair("p", "a", "b")], "judging")
    (inputs.folder / "original.yml").write_text(ORIGINAL)
    run_config(MigrateConfig(inputs["original.yml"], algorithm="online_dpo", output=inputs["ours.yml"]))


def _many(inputs: Inputs) -> None:
    """A sweep and a certificate, their runs in this process, where their reading is followed."""
    train: dict[str, Any] = {"completions_per_batch": 8, "batches": 2, "non_eos_penalty": False}  # else all would tie
    train["generation"] = {"response_length": 4, "placement": "inline"}
    base = {"model": inputs["policy"], "data": {"train": inputs["prompts.jsonl"]}, "reward_funcs": inputs.reward}
    held_out = {"data": inputs["prompts.jsonl"], "reward_funcs": inputs.reward, "response_length": 4, "max_prompts": 4}
    both: dict[str, Any] = {"base": {**base, "train": train}, "held_out": held_out}

    def here(jobs, parallel, threads, devices):
        return (Outcome(job, job.function(job.argument)) for job in jobs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "run_jobs", here)
        grid = {"train.staleness": [0, 1]}
        run_sweep(SweepConfig(**both, output_dir=inputs["sweep"], grid=grid, baseline={"train.staleness": 0}))
        run_certify(
            CertifyConfig(
                **both, output_dir=inputs["certificate"], staleness=1, margin=9.0, breakdown_rate=0.5, max_pairs=10
            )
        )


ORIGINAL = """sft_model_path: a
reward_model_path: b
dataset_name: d.jsonl
total_episodes: 64
learning_rate: 1e-5
loss_type: sigmoid
output_dir: out
"""


def _plans(inputs: Inputs) -> None:
    workload = WorkloadConfig(64, 2, prompt_tokens=8.0, response_length=8)
    run_plan(PlanConfig(run=inputs["dpo"], warm_up=0, devices=2, output_dir=inputs["plan"]))
    evaluated = replace(workload, in_flight=True, eval_completions=8, eval_steps=5)
    run_plan(PlanConfig(seconds=SecondsConfig(generate=1.0, train=1.0), workload=evaluated))
    run_plan(PlanConfig(model=ModelSizeConfig(1e9, 2, 64), devices=2, workload=workload))


class StopError(Exception):
    """What the keys are for has been called."""


def _stop(*_: Any, **__: Any) -> Any:
    raise StopError


def _in_use(_: Path) -> None:
    raise InUseError("in use")


def _give_up(_: Any, error: Exception) -> None:
    raise error


def _elsewhere(inputs: Inputs) -> None:
    """What goes to vLLM, DeepSpeed, other hosts and other ranks, up to the call of those."""
    args = partial(new_args, inputs.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "find_spec", lambda name: object())
        patch.setattr(serve.os, "execve", _stop)
        with pytest.raises(StopError):
            serve.run_serve(ServeConfig(inputs["policy"], api_key="0123"))
        run_doctor(DoctorConfig())
        vllm_engine._options(VLLMConfig(), on_cpu=True)
        patch.setattr(vllm_engine, "VLLMEngine", _stop)
        patch.setattr(server_generator, "check_server", lambda url, *_: key_of(served.generation))
        patch.setattr(server_generator, "SnapshotFolder", _stop)
        served = args(generation={"engine": "vllm", "placement": "server", "urls": ["http://127.0.0.1:9"]})
        engine = PolicyEngine(args(), inputs.policy, SamplingParams(2, 0.7, 6, (256,), 0), ALONE)
        for config in (args(generation={"engine": "vllm"}), served):
            with pytest.raises(StopError):
                make_generator(config, engine, Trace(), 1)
        dead, often = (
            SimpleNamespace(end=lambda: "died", number=0, has_place=True),
            {"restarts": 3, "kind": "generator"},
        )
        often |= {"dispatcher": SimpleNamespace(lost=lambda _: []), "_give_up": _give_up, "_stopping": []}
        with pytest.raises(GeneratorError, match="max_restarts"):
            Supervisor._replace(SimpleNamespace(_config=served.generation, **often), dead)
        WorkerCount(inputs.folder).write([0])
        patch.setattr(workers, "refuse_second", _in_use)
        patch.setattr(workers, "_PATIENCE_SECONDS", 0.0)
        workers.run_workers(workers.WorkersConfig(str(inputs.folder), 2))
        patch.chdir(inputs.folder)
        run_recipes(RecipesConfig("slurm"))
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
            patch.setenv(name, value)
        patch.setattr(dist, "init_process_group", _stop)
        with pytest.raises(StopError):
            start_ranks(args(device="cpu"))
        uploads = HubUploads(args(push_to_hub=True))
        patch.setattr(uploads._api, "create_repo", _stop)
        with pytest.raises(StopError):
            uploads._repository()
        uploads.on_save(None, SimpleNamespace(global_step=1), None)
    zero = ZeRO.__new__(ZeRO)  # without DeepSpeed
    zero.config, zero.run = ParallelConfig("zero2"), args()
    zero._options(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fsdp = FullyShardedDataParallel(Ranks(), ParallelConfig("fsdp"), torch.device("cpu"), args())
    fsdp._parts = [fsdp.frozen(inputs.judge)]
    fsdp.accumulating(last=False)
    dist.destroy_process_group()


def _ray(inputs: Inputs) -> None:
    """The same of Ray, where it is installed."""
    from async_rlhf.distributed import ray, ray_tasks
    from async_rlhf.generation import ray as ray_generation
    from async_rlhf.rewards import ray as ray_rewards

    config = new_args(inputs.folder, staleness=1, launch="ray", ray=RayConfig(reward_workers=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray.ray, "init", _stop)
        with pytest.raises(StopError):
            ray.connect(config)
        patch.setattr(ray_tasks, "run_tasks", _stop)
        files = {"base": "recipes/docstrings/online_dpo.yml", "held_out": {}, "output_dir": inputs["sweep"]}
        with pytest.raises(StopError):
            list(sweep._outcomes([None], SweepConfig(**files, executor="ray")))
        patch.setattr(ray.Actor, "start", _stop)
        with pytest.raises(StopError):
            ray_rewards.RewardPool(config)
        patch.setattr(ray_generation, "ActorWorker", _stop)
        with pytest.raises(StopError):
            ray_generation.RayGenerator(config, inputs.policy, None, None)
        dead = SimpleNamespace(end=lambda: "died", label="worker", has_place=True)
        with pytest.raises(RewardError, match="max_restarts"):
            ray_rewards.RewardPool._restart(SimpleNamespace(_config=config, _restarts=3), dead)


def kinds() -> list[type[Checked]]:
    """Every class of configurations that a command has, groups and bases included."""
    found: dict[type[Checked], None] = {}

    def add(kind: Any) -> None:
        for each in kind.__mro__ if isinstance(kind, type) and issubclass(kind, Checked) else ():
            if each not in found and issubclass(each, Checked) and each is not Checked:
                found[each] = None
                for hint in get_type_hints(each).values():
                    add(hint)

    for kind in [
        *(import_attribute(command.config) for command in COMMANDS.values()),
        *(algorithm.config for algorithm in built_in()),
    ]:
        add(kind)
    return list(found)


def test_every_key_is_read(tmp_path):
    inputs = Inputs(tmp_path)
    with following() as read:
        for part in (_trains, _stages, _many, _plans, _elsewhere, *([_ray] if HAS_RAY else [])):
            part(inputs)
    unread = {kind.__name__: names for kind in kinds() if (names := on_meta(kind, read))}
    if not HAS_RAY:
        assert unread.pop("ManyRunsConfig") == ["gpus"]
        del unread["RayConfig"]
    assert unread == {}


@dataclass(frozen=True)
class Planted(OnlineDPOConfig):
    """A configuration with a key that nobody reads."""

    nothing: int = 0


def test_what_treats_all_keys_alike_reads_none():
    """Else a key that is checked, printed and compared alone would count as one that does something."""
    with following() as found:
        config = Planted(total_episodes=8)
        assert config == pickle.loads(pickle.dumps(replace(config, nothing=0)))
        assert "nothing" in repr(config)
        assert as_saved(config, "online_dpo")["nothing"] == asdict(config)["nothing"] == 0
        assert Stage(Path(), "x", config, {}).identity["config"]["nothing"] == 0
        assert config.num_optimizer_steps > 0  # by a test, not by the package
    assert on_meta(Planted, found) == ["nothing"]
    assert {"batches", "bf16"} <= set(on_meta(SizesConfig, found))  # its own, and one that it shares
    assert "num_epochs" in on_meta(SizesConfig, found)
    assert "optimizer" in on_meta(OnlineConfig, found)
