"""What is run in the process with simulated GPUs: whole trainings, and single parts of them with their traffic."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import simulated_device
import torch
import transformers
from planted import Fault, planted
from simulated_device import Traffic, traffic
from tiny import PROMPTS, THREADS, byte_tokenizer, count_letters, json_rows, new_args, new_policy, new_reward_model
from transformers import TrainerCallback

from async_rlhf.commands.evaluate import run_evaluate
from async_rlhf.commands.evaluation import sampling
from async_rlhf.commands.evaluation.reward_judge import RewardJudge
from async_rlhf.config import EvaluateConfig
from async_rlhf.distributed.parallel import ALONE
from async_rlhf.generation import process, worker
from async_rlhf.generation.engines import ModelSpec, make_engine
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.staging import StagedWeights
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.generation.worker import build_handler
from async_rlhf.models import packing, weights
from async_rlhf.models import publish as snapshots
from async_rlhf.models.adapters import add_adapters
from async_rlhf.models.packing import is_packed
from async_rlhf.models.saving import write_model
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.types import Prompt


def prepare() -> None:
    """Give this process, and the workers that it starts, simulated GPUs."""
    torch.set_num_threads(THREADS)
    transformers.utils.logging.disable_progress_bar()
    context_of = process.context_of

    def with_gpus(method: str = "forkserver") -> Any:
        context = context_of(method)
        context.set_forkserver_preload(["simulated_worker"])
        return context

    process.context_of = with_gpus
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # where the fork server finds simulated_worker
    snapshots.reduce_tensor = simulated_device.share_tensor
    simulated_device.install()


def is_deterministic(folder: Path) -> tuple[bool, list[dict[str, float]]]:
    """A run with ``deterministic``. Returns whether torch was told so, and the metrics."""
    try:
        rows = train(folder, 2, name="deterministic", deterministic=True, generation={"top_p": 0.9})
        return torch.are_deterministic_algorithms_enabled(), rows
    finally:
        torch.use_deterministic_algorithms(False)


AS_ON_A_CPU = {"bf16": False, "max_tokens_per_pass": None, "annotate_max_tokens": None}
"""What a CPU decides. A GPU's numbers are compared with its, so nothing may round otherwise."""


class StopAfter(TrainerCallback):
    """Ends a run after some batches; its schedules are those of the whole run."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.batches


def train(folder: Path, batches: int = 6, device: str = "cuda:0", **options: Any) -> list[dict[str, float]]:
    """A run of the golden runs' kind, on the first simulated GPU. Returns its metrics.

    Args:
        folder: for the output.
        batches: after which it ends.
        device: of the learner.
        options: of the configuration; "evaluates" adds held-out prompts.
    """
    held_out = PROMPTS[:5] if options.pop("evaluates", False) else None
    args = new_args(folder, device=device, **AS_ON_A_CPU | options)
    trainer = OnlineTrainer(
        new_policy(),
        args,
        PROMPTS,
        reward_model=new_reward_model(),
        reward_funcs=count_letters,
        processing_class=byte_tokenizer(),
        eval_dataset=held_out,
        callbacks=[StopAfter(batches)],
    )
    trainer.train()
    learner, reward_model = trainer.learner, trainer.run.scorer.reward_model
    for name, model in (
        ("model", learner.model),
        ("reference", learner.reference.model),
        ("reward model", reward_model),
    ):
        places = set() if model is None else {parameter.device for parameter in model.parameters()}
        kept = "cpu" if args.offload_frozen and name != "model" else device
        assert places <= {torch.device(kept)}, f"the {name} is on the wrong device: {places}"
    return json_rows(Path(args.output_dir) / "metrics.jsonl")


def by_itself(folder: Path) -> tuple[dict[str, Any], list[bool]]:
    """A run for which a GPU decides. Returns what it decided, and whether all models are packed.

    The kernel for packed rows is not simulated: they are computed one by one.
    """
    args = new_args(folder, device="cuda:0", algorithm="grpo", staleness=1)
    policy, reward, tokenizer = new_policy(), new_reward_model(), byte_tokenizer()
    trainer = OnlineTrainer(
        policy, args, PROMPTS, reward_model=reward, processing_class=tokenizer, callbacks=[StopAfter(2)]
    )
    has_kernel, packing.runs_kernel = packing.runs_kernel, lambda device: False
    try:
        trainer.train()
    finally:
        packing.runs_kernel = has_kernel
    found = {name: getattr(trainer.args, name) for name in ("bf16", "max_tokens_per_pass", "annotate_max_tokens")}
    models = (policy, trainer.learner.reference.model, trainer.run.scorer.reward_model)
    return found | {"dtype": trainer.args.generation.dtype}, list(map(is_packed, models))


def judges(folder: Path) -> list[str]:
    """Where the judge of an evaluation is: when an engine is made, and when it scores."""
    write_model(new_policy(), byte_tokenizer(), folder / "policy")
    write_model(new_reward_model(), byte_tokenizer(), folder / "reward")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    places, made, engine_of = list[str](), list[RewardJudge](), sampling.Engines.of
    judge_of, scored = RewardJudge.of.__func__, RewardJudge.__call__

    def noted(kind: type, *args: Any) -> RewardJudge:
        made.append(judge_of(kind, *args))
        return made[-1]

    def looked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            places.append(str(made[0].model.device))
            return function(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewardJudge, "of", classmethod(noted))
        patch.setattr(RewardJudge, "__call__", looked(scored))
        patch.setattr(sampling.Engines, "of", looked(engine_of))
        run_evaluate(
            EvaluateConfig(
                models={"policy": str(folder / "policy")},
                data=str(folder / "data.jsonl"),
                reward_model=str(folder / "reward"),
                output_dir=str(folder / "out"),
                response_length=4,
                device="cuda:0",
            )
        )
    return places


@dataclass(frozen=True)
class Update:
    """The traffic of training on one batch."""

    micro_batches: int
    waits: Mapping[str, int]
    """How often the host waited for the device, by place."""
    most_float64: int
    """Elements of the largest float64 tensor on the device."""
    cells: int
    """Tokens of the largest micro-batch, padding included."""
    copies: Mapping[str, int]
    """To the device that the host did not wait for, by "pinned" or "pageable" and place."""


def update(folder: Path, **options: Any) -> Update:
    """Train on one batch. The optimiser's own waits are left out: they are for its step, not for a micro-batch."""
    args = new_args(folder, device="cuda:0", **AS_ON_A_CPU | options)
    policy, reward, tokenizer = new_policy(), new_reward_model(), byte_tokenizer()
    trainer = OnlineTrainer(
        policy, args, PROMPTS, reward_model=reward, processing_class=tokenizer, callbacks=[StopAfter(1)]
    )
    learner, sizes, found = trainer.learner, [], Traffic()
    forward, train_on = learner.parallel.forward, learner.update

    def counted(tokens_BT: torch.Tensor, *rest: Any) -> Any:
        sizes.append(tokens_BT.numel())
        return forward(tokens_BT, *rest)

    def watched(*given: Any) -> Any:
        nonlocal found
        with traffic() as found:
            return train_on(*given)

    learner.parallel.forward, learner.update = counted, watched
    trainer.train()
    return Update(len(sizes), dict(found.waits), found.most_float64, max(sizes), dict(found.copies))


@dataclass(frozen=True)
class Published:
    """What publishing asks of the device and the bus."""

    moved: int
    """Bytes that left the device."""
    parameters: int
    tensors: int
    bytes_each: int
    """Of a parameter as it is published."""
    waits: Mapping[str, int]
    """How often the learner's own thread waited for the device, by place."""
    moved_meanwhile: int
    """Bytes that left the device before that thread could go on."""
    right: bool
    """Whether the weights are those of the moment, although they changed as soon as that thread went on."""
    pinned: int
    """Bytes of the host that a GPU could copy to by itself."""


@dataclass(frozen=True)
class PathOfWeights:
    """What bringing a version from one GPU to a generator on another one touches."""

    tensors: int
    bytes: Mapping[str, int]
    """By step, and of a version."""
    copies: Mapping[str, int]
    """To the GPU while the engine samples, that the host does not wait for."""
    waits: Mapping[str, int]
    """Of the host while a version is staged, by place."""
    pinned: bool
    """Whether the generator's GPU copies from the memory of the host by itself."""
    later: int
    """The version that the engine held when a newer one was on its way."""


def path_of_weights(room: int = 80 * 10**9, unheld: int = 0) -> PathOfWeights:
    """Publish on the first GPU, and have a worker's engine on the second one load the version.

    Args:
        room: bytes that are free there.
        unheld: bytes of these that the engine will take.
    """
    policy, hashed, digest = new_policy().to("cuda:0"), Counter[str](), weights.digest
    expected = {name: tensor.bfloat16() for name, tensor in weights.named_weights(new_policy()).items()}

    def counted(tensor: torch.Tensor) -> str:
        hashed["checksums on the host"] += tensor.nbytes
        return digest(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "digest", counted)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (room, room))
        ring = snapshots.SnapshotRing.for_model(policy, torch.bfloat16, 2)
        with traffic() as out:
            ring.publish(policy, 0, ALONE)
        args = new_args(Path(), device="cuda:0", generation={"dtype": "bfloat16"})
        own = pickle.loads(ForkingPickler.dumps(ring))
        spec = replace(ModelSpec.for_workers(args, policy, ALONE, "cuda:1", 1), engine="vllm")
        patch.setattr(
            worker,
            "make_engine",
            lambda spec, params: make_engine(replace(spec, engine="transformers", device="cuda:0"), params),
        )
        patch.setattr(TransformersEngine, "unheld", unheld, raising=False)  # as vLLM's has it
        patch.setattr(simulated_device, "GPUS", 1)  # as in a process that CUDA_VISIBLE_DEVICES gives the second alone
        handler = build_handler(spec, SamplingParams(2, 1.0, 8, (256,), seed=0), own, lambda: None)
        pinned = own.memory.data_ptr() in simulated_device.SimulatedRuntime.pinned
        handler.load(0)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.neg_()
        ring.publish(policy, 1, ALONE)
        with traffic() as staging:
            handler.engine.generate([Prompt(0, 0, (1, 2, 3))])
        later = handler.engine.version
        with traffic() as there:
            handler.load(1)
        assert handler._held[1] == ring.published[1], "other weights"
        held = weights.named_weights(handler.engine.model)
        assert all(torch.equal(held[name].cpu(), -tensor) for name, tensor in expected.items())
    own.close()
    ring.close()
    sizes = {"a version": sum(tensor.nbytes for tensor in expected.values())}
    sizes |= {"to the host": sum(out.to_host.values()), "loaded": sum(there.to_device.values()), **hashed}
    copies, waits = (
        {place: count for place, count in found.items() if "staging" in place}
        for found in (staging.copies, staging.waits)
    )
    return PathOfWeights(len(expected), sizes, copies, waits, pinned, later)


def staged_beside_a_faster_learner() -> list[tuple[int, dict[str, int]]]:
    """S = 2, and the generator is the slower side: for each version that it loads in turn, which one waited on its GPU,
    and the bytes that came over the bus when it was loaded.
    """
    policy, found = new_policy().to("cuda:0"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 10**9, 80 * 10**9))
        ring = snapshots.SnapshotRing.for_model(policy, torch.bfloat16, 3)
        staged = StagedWeights(pickle.loads(ForkingPickler.dumps(ring)), torch.device("cuda:0"))
        for version in range(5):
            ring.publish(policy, version, ALONE)
            if version < 2:
                continue
            held = version - 2  # the generator still samples with it, while the learner is two versions ahead
            staged.stage(held, newest=False)
            waiting = staged._version
            with traffic() as there:
                for tensor in staged.views(held + 1).values():
                    tensor.to("cuda:0")
            found.append((waiting, dict(there.to_device)))
        staged.stage(0, newest=True)
        assert staged._version == 4, "in flight the newest is taken next"
    ring.close()
    return found


class Taking(torch.nn.Module):
    """Stands in for vLLM's model: it takes tensors by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weight.data.fill_(float(sum(1 for _ in tensors)))


def server_takes_what_was_published(processes: int) -> list[tuple[int, int]]:
    """The learner and the server are on GPUs, and the weights come over the network. For each process of the server the
    number of checksums that it gives, and of tensors in all.

    vLLM is not there: its loader is replaced by :class:`Taking`.
    """
    names = ("vllm", "vllm.config", "vllm.model_executor", "vllm.model_executor.model_loader")
    stand_ins = {name: ModuleType(name) for name in (*names, "vllm.model_executor.model_loader.reload")}
    stand_ins["vllm.config"].set_current_vllm_config = lambda config: nullcontext()
    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        setattr(stand_ins["vllm.model_executor.model_loader.reload"], name, lambda *given: None)
    policy, counts = new_policy().to("cuda:0"), []
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_ins.items():
            patch.setitem(sys.modules, name, module)
        from async_rlhf.generation import vllm_weights

        ring = snapshots.SnapshotRing.for_model(policy, torch.bfloat16, 2)
        ring.publish(policy, 0, ALONE)
        patch.setattr(vllm_weights.Receiver, "receive", lambda *given: iter(ring.views(0).items()))
        invitation = json.dumps({"backend": "tcp", "folded": ring.folded})
        merged = {}
        for rank in range(processes):
            loader = vllm_weights.SnapshotLoader()
            held = SimpleNamespace(model=Taking())
            runner = SimpleNamespace(get_model=partial(getattr, held, "model"), reset_lora_state=lambda: None)
            parallel = SimpleNamespace(world_size=processes)
            model_config = SimpleNamespace(hf_text_config=policy.config, dtype=torch.bfloat16)
            vars(loader).update(
                rank=rank,
                device=torch.device("cuda:0"),
                model_runner=runner,
                vllm_config=SimpleNamespace(parallel_config=parallel, model_config=model_config),
            )
            share = loader.receive_snapshot(invitation)
            counts.append((len(share), len(ring.specs)))
            merged |= share
        assert merged == ring.published[0], "the learner would refuse what the server took"
    ring.close()
    return counts


def benchmark_of_kernels() -> dict[str, Any]:
    """What benchmarks/shared_tokens.py measures of its smallest shape."""
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    import shared_tokens

    return shared_tokens.measure("neox", "tiny", SimpleNamespace(size="small", device="cuda:0", bf16=False, rounds=1))


def publish_float32(kind: str, folder: Path) -> Published:
    """The same without rounding."""
    return publish(kind, folder, dtype=torch.float32)


def publish(kind: str, folder: Path, lora: bool = False, dtype: torch.dtype = torch.bfloat16) -> Published:
    """Publish snapshots of a policy, and change it at once."""
    policy = new_policy()
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    if lora:
        from async_rlhf import LoRAConfig

        add_adapters(policy, LoRAConfig(rank=4), seed=0)
    expected = {name: tensor.to(dtype, copy=True) for name, tensor in weights.named_weights(policy).items()}
    policy.to("cuda:0")
    before = sum(simulated_device.SimulatedRuntime.pinned.values())
    if kind == "folder":
        ring: Any = snapshots.SnapshotFolder(folder / "snapshots", dtype, 2)
    elif kind == "object store":
        from async_rlhf.generation import ray as ray_generation

        ray_generation.ray.put = bytes  # no cluster is needed to see what leaves the device
        ring = ray_generation.ObjectStoreSnapshots(policy, dtype, 2, ALONE)
    else:
        ring = getattr(snapshots, kind).for_model(policy, dtype, 2)
    pinned = sum(simulated_device.SimulatedRuntime.pinned.values()) - before
    work: list[Callable[[], None]] = []
    with traffic() as meanwhile:
        ring.publish(policy, 1, ALONE, work.append)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    with traffic() as later:
        for part in work:
            part()
    found = ring.published[1] == weights.digests(expected, folded=kind in ("DeviceRing", "SnapshotRing"))
    if kind == "SnapshotRing":  # its checksums are of what has left, not of what has arrived
        found = found and all(torch.equal(expected[name], tensor) for name, tensor in ring.views(1).items())
    with traffic() as looking:
        assert ring.newest == 1
    assert not looking.waits, "who samples in flight would wait for the device in every step"
    ring.close()
    assert sum(simulated_device.SimulatedRuntime.pinned.values()) == before, "memory of the host stays pinned"
    early = sum(meanwhile.to_host.values())
    moved = early + sum(later.to_host.values())
    return Published(
        moved, parameters, len(expected), dtype.itemsize, dict(meanwhile.waits), early, bool(found), pinned
    )


def decode_waits(length: int, stops: int = 12) -> tuple[Mapping[str, int], list[int]]:
    """Sample for prompts of unequal lengths. Returns the waits by place, and the lengths of the completions.

    Args:
        length: of the longest completion.
        stops: so many of the vocabulary's 258 tokens end a completion, so that rows end one after the other.
    """
    policy = new_policy().to("cuda:0")
    params = SamplingParams(2, 1.0, length, tuple(range(stops)), seed=0)
    prompts = [Prompt(i, i, tuple(range(1, 6 + i))) for i in range(8)]
    with traffic() as found:
        completions = TransformersEngine(policy, params).generate(prompts)
    return dict(found.waits), [len(sample.drawn) for samples in completions for sample in samples]


def tokens_in_flight(device: str) -> list[tuple[list[int], list[int]]]:
    """Sample while newer weights come every third step. Returns tokens and versions of each completion."""
    engine = TransformersEngine(new_policy().to(device), SamplingParams(2, 1.0, 12, (256, 10), seed=0))
    steps = 0

    def refresh() -> None:
        nonlocal steps
        steps += 1
        if steps % 3 == 0:
            newer = weights.named_weights(new_policy(seed=steps))
            engine.load({name: tensor.to(device) for name, tensor in newer.items()}, version=steps)

    engine.refresh = refresh
    prompts = [Prompt(i, i, tuple(range(1, 6 + i))) for i in range(3)]
    completions = engine.generate(prompts)
    return [(sample.drawn.tolist(), sample.versions.tolist()) for samples in completions for sample in samples]


def with_fault(fault: Fault, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function while the package has the fault, in this process."""
    with planted(fault):
        return function(*args, **options)


def leaves(device: str) -> list[float]:
    """Weights that a publisher has brought to the host, from any GPU."""
    model = torch.nn.Linear(3, 2, bias=False).to(device)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3))
    place, later = torch.zeros(2, 3, dtype=torch.bfloat16), []
    leaving = snapshots.AsyncCopy(model, ALONE, lambda work: later.append(work) or Future())
    leaving.copy(model.weight, place)
    leaving.end(lambda: None)
    for work in later:
        work()
    return place.flatten().tolist()
