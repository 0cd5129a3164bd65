"""Bytes that one rank of the learner holds at its peak, without a GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from fake_rank import FakeRank, FakeRanks, Peak
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPTNeoXConfig, LlamaConfig

from async_rlhf.algorithms.table import find
from async_rlhf.config import ParallelConfig
from async_rlhf.learner.learner import Learner
from async_rlhf.learner.strategies.choice import make_parallel
from async_rlhf.models.snapshots import SnapshotRing
from async_rlhf.ranks.parallel import Parallel
from async_rlhf.types import Batch, Group, Prompt, Sample, ScoredBatch


def pythia(layers: int = 24, hidden: int = 2048, vocabulary: int = 50304) -> GPTNeoXConfig:
    """Pythia 1.4b."""
    return GPTNeoXConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
    )


def llama(
    layers: int = 32, hidden: int = 4096, feed_forward: int = 14336, kv_heads: int = 8, vocabulary: int = 128256
) -> LlamaConfig:
    """Llama 3 8B."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )


@dataclass(frozen=True)
class Case:
    model: Any
    ranks: int = 1
    strategy: str = "fsdp"
    rows: int = 8
    annotate_rows: int = 16
    prompt: int = 200
    response: int = 400
    checkpointing: bool = True
    bf16: bool = True
    passes: int = 2
    options: dict[str, Any] = field(default_factory=dict)


def scored_batch(case: Case) -> ScoredBatch:
    rows = case.rows * case.passes * case.ranks
    groups = []
    for number in range(rows // 2):
        samples = tuple(
            Sample.answer(
                [1] * case.prompt, [2] * case.response, np.zeros(case.response), [0] * case.response, "length"
            )
            for _ in range(2)
        )
        groups.append(Group(Prompt(number, number, (1,) * case.prompt), samples))
    return ScoredBatch(Batch(1, 0, tuple(groups), 0.0), torch.tensor([[0.0, 1.0]] * (rows // 2)), {})


def measure(case: Case) -> dict[str, Peak]:
    with FakeRank(case.ranks) as rank:
        return _measure(case, rank)


def _measure(case: Case, rank: FakeRank) -> dict[str, Peak]:
    algorithm = find("rloo")
    args = algorithm.config(
        per_device_train_batch_size=case.rows,
        annotate_batch_size=case.annotate_rows,
        gradient_accumulation_steps=max(1, case.passes // 2),
        bf16=case.bf16,
        gradient_checkpointing=case.checkpointing,
        parallel=ParallelConfig(strategy=case.strategy, ranks=case.ranks),
        device="cpu",
        **case.options,
    )
    ranks = FakeRanks(0, case.ranks)
    parallel = make_parallel(args, ranks)
    _marked(parallel, rank)
    ledger = rank.ledger
    ledger.vocabulary = case.model.vocab_size
    t = time.time()
    policy = rank.new(lambda: AutoModelForCausalLM.from_config(case.model, dtype=torch.float32))
    ledger.weight_shapes = {tuple(p.shape) for p in policy.parameters() if p.dim() > 1}
    config = type(case.model)(**{**case.model.to_dict(), "num_labels": 1, "pad_token_id": 0})
    reward = rank.new(lambda: AutoModelForSequenceClassification.from_config(config, dtype=torch.float32))
    print("made", time.time() - t)
    reward = parallel.frozen(reward.requires_grad_(False).eval())
    learner = Learner(policy, None, algorithm, args, parallel=parallel)
    print("learner", time.time() - t)
    ring = SnapshotRing.for_model(policy, torch.bfloat16, 1, parallel=parallel)
    with rank.computing():
        for parameter in parallel.trained:
            parameter.grad = torch.zeros_like(parameter)
        parallel.step(1.0)
    ledger.name(list(policy.parameters()), "weights")
    ledger.name([*learner.reference.parameters(), *reward.parameters()], "frozen")
    ledger.name([x for state in parallel.optimizer.state.values() for x in state.values()], "optimiser")
    print("step", time.time() - t)
    batch = scored_batch(case)
    gc.collect()
    ledger.phase("annotate")
    experience, _ = learner.annotate(batch)
    ledger.phase("update")
    learner.update(experience, 1)
    ledger.phase("publish")
    with rank.computing():
        ring.publish(policy, 1, parallel)
    ledger.end()
    print("publish", time.time() - t)
    return ledger.peaks


def _marked(parallel: Parallel, rank: FakeRank) -> None:
    """Let the device's part of the learner's work take place on the fake device."""
    ledger = rank.ledger

    def computing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any) -> Any:
            if name in ("forward", "backward", "step"):
                ledger.phase(name)
            ledger.doing = "gradients" if name in ("prepare", "backward") else "activations"
            with rank.computing():
                result = function(*args)
            ledger.doing = "activations"
            if name == "backward":
                ledger.name([p.grad for p in parallel.trained if p.grad is not None], "gradients")
            return result

        return run

    for name in ("prepare", "frozen", "forward", "backward", "step"):
        setattr(parallel, name, computing(name, getattr(parallel, name)))


if __name__ == "__main__":
    import sys

    kind, layers, ranks, strategy, ck = sys.argv[1:6]
    case = Case({"l": llama, "p": pythia}[kind](int(layers)), int(ranks), strategy, checkpointing=bool(int(ck)))
    for name, peak in measure(case).items():
        print(name, f"{peak.total / 1e9:.3f}", {k: round(v / 1e9, 3) for k, v in peak.kinds.items()})
        if len(sys.argv) > 6:
            from collections import Counter
            c = Counter(); n = Counter()
            for size, k, what in peak.largest:
                c[k, what] += size; n[k, what] += 1
            for (k, what), size in c.most_common(int(sys.argv[6])):
                print(f"   {size / 1e6:9.1f} MB {n[k, what]:3d} x {k} {what}")
