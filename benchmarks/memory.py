"""Bytes that one rank of the learner holds at the peak of each phase, without a GPU; and what the planner computes.

    python benchmarks/memory.py                     every case, all layers: minutes
    python benchmarks/memory.py --only 8B --layers 4 5   from two depths, to all layers along a straight line
    python benchmarks/memory.py --json              a line of JSON as the last
    python benchmarks/memory.py --device cuda:0     one small learner on a GPU, for real

The learner's own annotate and update, and what publishes weights, run on fake tensors (fake_rank.py), with FSDP2 and
DDP on torch's fake process group. Not counted: workspaces of kernels, buffers of NCCL, what the allocator cannot use.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from fake_rank import HOST, KINDS, FakeRank, FakeRanks, Peak
from smallest import parse
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
)

from async_rlhf.algorithms.table import find
from async_rlhf.config import ParallelConfig
from async_rlhf.config.online import OnlineConfig
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.learner.learner import Learner
from async_rlhf.learner.strategies.choice import make_parallel
from async_rlhf.models import head
from async_rlhf.models.frozen_models import frozen
from async_rlhf.models.memory import LearnerMemory
from async_rlhf.models.publish import ALIGNMENT, SnapshotRing, layout
from async_rlhf.models.weights import weights_of
from async_rlhf.studies.plan.config import HardwareConfig, ModelSizeConfig, WorkloadConfig
from async_rlhf.studies.plan.roofline import Roofline, batch_of
from async_rlhf.types import Batch, Group, Prompt, Sample, ScoredBatch

PHASES = ("annotate", "update", "publish")
_OF_UPDATE = ("update", "forward", "backward", "step")
"""What the peak of an update is the highest of."""


def _sizes(layers: int, hidden: int, feed_forward: int, kv_heads: int, vocabulary: int, longest: int) -> dict[str, Any]:
    widths = {"hidden_size": hidden, "intermediate_size": feed_forward, "num_attention_heads": hidden // 128}
    depth = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "vocab_size": vocabulary}
    more = {"max_position_embeddings": longest, "tie_word_embeddings": False, "attn_implementation": "sdpa"}
    return {**widths, **depth, **more}


def pythia(layers: int = 24, hidden: int = 2048, vocabulary: int = 50_304) -> GPTNeoXConfig:
    """Pythia 1.4B, or another of its depth or width."""
    return GPTNeoXConfig(**_sizes(layers, hidden, 4 * hidden, hidden // 128, vocabulary, 8192))


def llama(
    layers: int = 32, hidden: int = 4096, feed_forward: int = 14_336, kv_heads: int = 8, vocabulary: int = 128_256
) -> LlamaConfig:
    """Llama 3 8B, or another of its depth or width."""
    return LlamaConfig(**_sizes(layers, hidden, feed_forward, kv_heads, vocabulary, 131_072))


@dataclass(frozen=True)
class Case:
    """A learner, one rank of which is measured: policy, reference and reward model of one shape, bfloat16.

    Args:
        model: transformers' configuration of the policy.
        ranks: R.
        strategy: "ddp" or "fsdp".
        checkpointing: gradient checkpointing.
        rows: completions of a pass with gradient.
        annotate_rows: completions of a pass without.
        prompt: tokens of every prompt.
        response: tokens of every completion.
        bf16: under autocast.
        passes: micro-batches of the rank in its optimiser step.
        context: C, ranks that share each row.
    """

    model: PretrainedConfig
    ranks: int
    strategy: str = "fsdp"
    checkpointing: bool | str = True
    rows: int = 8
    annotate_rows: int = 16
    prompt: int = 200
    response: int = 1024
    bf16: bool = True
    passes: int = 2
    context: int = 1

    @property
    def layers(self) -> int:
        return self.model.num_hidden_layers

    def of_depth(self, layers: int) -> Case:
        """The same with so many layers."""
        sizes = {**self.model.to_dict(), "num_hidden_layers": layers}
        return replace(self, model=type(self.model)(**sizes, attn_implementation="sdpa"))

    def config(self) -> OnlineConfig:
        """That of a run; RLOO's penalty needs the reference's log-probabilities, and the policy's before the update."""
        return find("rloo").config(
            per_device_train_batch_size=self.rows,
            annotate_batch_size=self.annotate_rows,
            gradient_accumulation_steps=self.passes,
            batches=1,
            samples_per_prompt=2,
            bf16=self.bf16,
            gradient_checkpointing=self.checkpointing,
            parallel=ParallelConfig(strategy=self.strategy, ranks=self.ranks, context_parallel=self.context),
            device="cpu",
        )

    def batch(self) -> ScoredBatch:
        """Completions for all ranks' passes, all as long as can be."""
        prompts = max(self.rows * self.passes, self.annotate_rows) * self.ranks // self.context // 2
        tokens, logprobs = [2] * self.response, np.zeros(self.response, np.float32)
        sample = Sample.answer([1] * self.prompt, tokens, logprobs, np.zeros(self.response, np.int64), "length")
        groups = tuple(Group(Prompt(i, i, (1,) * self.prompt), (sample, sample)) for i in range(prompts))
        return ScoredBatch(Batch(1, 0, groups, 0.0), torch.tensor([[0.0, 1.0]] * prompts), {})


LONG: dict[str, Any] = {"rows": 1, "annotate_rows": 1, "prompt": 1072, "response": 130_000}
CASES = {
    "1.4B, DDP on 4": Case(pythia(), 4, "ddp"),
    "1.4B, DDP on 4, all activations": Case(pythia(), 4, "ddp", checkpointing=False),
    "8B, FSDP on 4": Case(llama(), 4),
    "8B, FSDP on 8": Case(llama(), 8),
    "8B, FSDP on 8, products kept": Case(llama(), 8, checkpointing="selective"),
    "8B, FSDP on 8, all activations": Case(llama(), 8, checkpointing=False),
    "8B, FSDP on 8, rows of 4,096": Case(llama(), 8, annotate_rows=8, prompt=96, response=4000),
    "8B, FSDP on 8, rows of 131,072": Case(llama(), 8, **LONG),
    "8B, FSDP on 8, rows of 131,072 on 2": Case(llama(), 8, **LONG, context=2),
    "8B, FSDP on 4, rows of 131,072 on 4": Case(llama(), 4, **LONG, context=4),
    "8B, FSDP on 8, rows of 131,072 on 8": Case(llama(), 8, **LONG, context=8),
    "70B, FSDP on 32": Case(llama(80, 8192, 28_672), 32),
    "70B, FSDP on 64": Case(llama(80, 8192, 28_672), 64),
}
"""The table of benchmarks/RESULTS.md."""


def measure(case: Case) -> dict[str, Peak]:
    """Peak of each part of "annotate", of an update ("forward", "backward", "step" and the rest) and of "publish"."""
    quiet()
    with FakeRank(case.ranks) as rank, patch.object(head, "LEAST_ROWS", head.LEAST_ROWS_ON_GPU):
        ledger = rank.ledger
        ledger.vocabulary = case.model.vocab_size
        learner, ring = _learner(case, rank)
        batch = case.batch()
        gc.collect()
        ledger.phase("annotate")
        experience, _ = learner.annotate(batch)
        ledger.phase("update")
        learner.update(experience, 1)
        ledger.phase("publish")
        with rank.computing():
            ring.publish(learner.policy, 1, learner.parallel)
        ledger.end()
        return ledger.peaks


def quiet() -> None:
    """Fake tensors have no pointers, and transformers no labels for one output: neither matters here."""
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _learner(case: Case, rank: FakeRank) -> tuple[Learner, SnapshotRing]:
    """The learner and the snapshots of rank 0, with an optimiser that has taken a step."""
    config, ledger = case.config(), rank.ledger
    parallel = _watched(make_parallel(config, FakeRanks(0, case.ranks)), rank)
    policy = rank.new(lambda: AutoModelForCausalLM.from_config(case.model, dtype=torch.float32))
    ledger.weight_shapes = {tuple(p.shape) for p in policy.parameters() if p.dim() > 1}
    scores = type(case.model)(**{**case.model.to_dict(), "id2label": {0: "score"}, "pad_token_id": 0})
    reward = rank.new(lambda: AutoModelForSequenceClassification.from_config(scores, dtype=torch.float32))
    reward = frozen(reward.requires_grad_(False).eval(), config, parallel)
    learner = Learner(policy, None, find("rloo"), config, parallel=parallel)
    specs, size = layout(weights_of(policy, parallel=parallel, dtype=torch.bfloat16))
    memory = rank.new(lambda: torch.zeros(ALIGNMENT + size, dtype=torch.uint8))
    ledger.name([memory], HOST)
    ring = SnapshotRing(specs, size, 1, memory, dtype=torch.bfloat16)
    with rank.computing():
        for parameter in parallel.trained:
            parameter.grad = torch.zeros_like(parameter)
        parallel.step(1.0)
    assert learner.reference.model is not None
    ledger.name(list(policy.parameters()), "weights")
    ledger.name([*learner.reference.model.parameters(), *reward.parameters()], "frozen")
    ledger.name([x for state in parallel.optimizer.state.values() for x in state.values()], "optimiser")
    ledger.kept = reward  # the scorer has it
    for name, model in {"policy": policy, "reference": learner.reference.model}.items():
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        rank.follow(name, next(blocks for blocks in lists if len(blocks) == case.layers))
    return learner, ring


def _watched(parallel: Parallel, rank: FakeRank) -> Parallel:
    """The same, whose part of the work takes place on the fake device; passes and steps are phases."""
    ledger = rank.ledger

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any) -> Any:
            if name in _OF_UPDATE:
                ledger.phase(name)
            ledger.backward = name in ("prepare", "backward")
            try:
                with rank.computing():
                    return function(*args)
            finally:
                ledger.backward = False
                if name == "backward":
                    ledger.name([p.grad for p in parallel.trained if p.grad is not None], "gradients")

        return run

    for name in ("prepare", "frozen", "forward", "backward", "step"):
        setattr(parallel, name, watched(name, getattr(parallel, name)))
    return parallel


def along_a_line(few: dict[int, dict[str, Peak]], layers: int) -> dict[str, Peak]:
    """What :func:`measure` would say of so many layers, from what it says of two numbers of them, at least 4.

    Each part of each phase grows by the same from layer to layer. The parts differ in that, so the highest of few
    layers need not be that of many.
    """
    (low, less), (high, more) = sorted(few.items())

    def at(a: int, b: int) -> int:
        return a + (b - a) * (layers - low) // (high - low)

    return {
        name: Peak(
            at(less[name].total, more[name].total),
            {kind: at(less[name].kinds.get(kind, 0), more[name].kinds.get(kind, 0)) for kind in KINDS},
        )
        for name in less
        if not name.endswith("between")
    }


def phases(peaks: dict[str, Peak]) -> dict[str, Peak]:
    """Annotate, update and publish."""
    parts: dict[str, list[Peak]] = {phase: [] for phase in PHASES}
    for name, peak in peaks.items():
        phase = name.split()[0]
        parts["update" if phase in _OF_UPDATE else phase].append(peak)
    return {phase: max(found, key=lambda peak: peak.total) for phase, found in parts.items()}


def planned(case: Case) -> LearnerMemory:
    """What ``async-rlhf plan`` computes of the same learner."""
    with FakeRank(1) as rank:
        policy = rank.new(lambda: AutoModelForCausalLM.from_config(case.model, dtype=torch.float32))
        parameters = sum(p.numel() for p in policy.parameters())
    head = case.model.vocab_size * case.model.hidden_size
    sizes = ModelSizeConfig(
        parameters=parameters,
        reward_parameters=parameters - head,
        layers=case.layers,
        kv_width=case.model.num_key_value_heads * case.model.hidden_size // case.model.num_attention_heads,
        hidden=case.model.hidden_size,
        vocabulary=case.model.vocab_size,
        feed_forward=case.model.intermediate_size,
        block=case.model.model_type,
        strategy=case.strategy,
        context_parallel=case.context,
        bf16=case.bf16,
        recompute=case.checkpointing,
    )
    workload = WorkloadConfig(
        prompts=1,
        samples_per_prompt=2,
        prompt_tokens=case.prompt,
        response_length=case.response,
        train_rows=case.rows,
        annotate_rows=case.annotate_rows,
    )
    return Roofline(HardwareConfig(), sizes, batch_of(workload, None)).memory(case.ranks, case.checkpointing)


def on_device(case: Case, device: str) -> dict[str, Peak]:
    """The most that a GPU's tensors take in each phase but "publish": the case on one rank, for real."""
    quiet()
    config = replace(case.config(), device=device)
    policy = AutoModelForCausalLM.from_config(case.model, dtype=torch.float32).to(device)
    scores = type(case.model)(**{**case.model.to_dict(), "id2label": {0: "score"}, "pad_token_id": 0})
    reward = AutoModelForSequenceClassification.from_config(scores, dtype=torch.bfloat16).to(device)
    learner, batch, found = Learner(policy, None, find("rloo"), config), case.batch(), {}
    learner.update(learner.annotate(batch)[0], 1)  # the optimiser has a state from now on
    for name in PHASES[:2]:
        torch.cuda.reset_peak_memory_stats(device)
        if name == "annotate":
            experience, _ = learner.annotate(batch)
        else:
            learner.update(experience, 2)
        found[name] = Peak(torch.cuda.max_memory_allocated(device), {})
    del reward
    return found


def row(name: str, case: Case, found: dict[str, Peak]) -> str:
    """Markdown: 1e9 bytes of each phase, the planner's in brackets, and what the peak is made of."""
    plan = planned(case).phases()
    totals = {phase: f"{peak.total / 1e9:.1f} ({plan[phase] / 1e9:.1f})" for phase, peak in found.items()}
    cells = [totals.get(phase, "") for phase in PHASES]
    most = max(found.values(), key=lambda peak: peak.total)
    return f"| {' | '.join([name, *cells, *(f'{most.kinds.get(kind, 0) / 1e9:.1f}' for kind in KINDS)])} |"


def _of_all(case: Case, layers: list[int] | None) -> dict[str, Peak]:
    if layers is None:
        return measure(case)
    return along_a_line({few: measure(case.of_depth(few)) for few in layers}, case.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--layers", type=int, nargs=2, help="measure with so few, and go on along a straight line")
    parser.add_argument("--json", action="store_true", help="one more line, of JSON")
    parser.add_argument(
        "--device", default="cpu", help="of a learner that is no fake; the CPU's allocator counts nothing"
    )
    options = parse(parser, only="1.4B, DDP on 4, all", layers=[4, 5])
    cases = CASES
    if options.device != "cpu":
        cases = {"410m on one GPU": Case(pythia(24, 1024), 1, "ddp", checkpointing=False, rows=4, annotate_rows=8)}
    print(f"| 1e9 bytes (planned) | {' | '.join([*PHASES, *KINDS])} |\n{'|---' * (1 + len(PHASES) + len(KINDS))}|")
    results, began = {}, time.monotonic()
    for name, case in cases.items():
        if name.startswith(options.only):
            on_gpu = options.device != "cpu"
            found = on_device(case, options.device) if on_gpu else phases(_of_all(case, options.layers))
            print(row(name, case, found), flush=True)
            plan = planned(case).phases()
            results[name] = {
                phase: {"bytes": peak.total, "planned": round(plan[phase]), **peak.kinds}
                for phase, peak in found.items()
            }
    if options.json:
        print(json.dumps({"memory": results, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
