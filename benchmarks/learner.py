"""What the learner costs beyond the arithmetic that nobody can avoid.

    python benchmarks/learner.py [--json] [--rounds 5] [--budgets 512 1024 2048 4096 8192] [--threads N]
    python benchmarks/learner.py --device cuda:0 --bf16 --hidden 1024 --layers 24 --budgets 4096 16384

A GPT-NeoX of 6.8M parameters and 64 completions of ragged length: prompts of 10 to 60 tokens, responses lognormal with
median 60 and sigma 1, up to 400. Two ways to compute on as many real tokens take turns, round by round, so that a
machine whose speed drifts treats them alike:

    bare      forward and backward passes of transformers' model alone: rows of one length, so nothing is padded, and
              logits for as many response tokens; in passes of 1 to 32 rows, of which the fastest counts
    update    the whole update of the learner (GRPO, no reference): passes of at most so many tokens, log-probabilities
              and entropies, loss, metrics, clipping and the optimiser's step

    ratio     update / bare: 1 is a learner that wastes nothing; the median over rounds, and the smallest and largest
    padding   tokens that the update computes / real tokens
    peak      operations a second (6 for each weight and real token) / those of one large product of matrices
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import matmul_tflops, seconds
from smallest import parse
from transformers import GPTNeoXForCausalLM
from workload import neox

from async_rlhf import GRPOConfig, KLConfig
from async_rlhf.algorithms.table import find
from async_rlhf.learner.learner import Learner
from async_rlhf.models.rows import sampled_rows
from async_rlhf.types import Experience, Sample

ROWS, VOCABULARY, LONGEST = 64, 4096, 460
BARE_ROWS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Size:
    """Of the policy, and where and how it computes."""

    hidden: int = 256
    layers: int = 6
    device: str = "cpu"
    bf16: bool = False

    def autocast(self) -> torch.autocast:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.bf16)


def policy(size: Size) -> GPTNeoXForCausalLM:
    return neox(VOCABULARY, size.hidden, size.layers, 4, LONGEST).to(size.device)


def lengths() -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each prompt and of each response."""
    random = np.random.default_rng(0)
    prompts_R = random.integers(10, 61, ROWS)
    responses_R = np.clip(np.round(60 * np.exp(random.standard_normal(ROWS))), 1, 400).astype(int)
    return prompts_R, responses_R


def experience() -> Experience:
    random = np.random.default_rng(1)
    samples = [
        Sample.answer(
            random.integers(0, VOCABULARY, before).tolist(),
            random.integers(0, VOCABULARY, after),
            np.full(after, -np.log(VOCABULARY), np.float32),
            np.zeros(after, int),
            "stop",
        )
        for before, after in zip(*lengths(), strict=True)
    ]
    rows = sampled_rows(samples)
    scores_R = torch.from_numpy(random.standard_normal(ROWS)).float()
    return Experience(**rows, scores_B=scores_R, loss_weights_U=torch.ones(ROWS))


def update(tokens: int, size: Size) -> tuple[Callable[[], Any], float]:
    """An update in passes of at most so many tokens, and how many tokens it computes for each real one."""
    config = GRPOConfig(
        batches=1,
        per_device_train_batch_size=ROWS,
        samples_per_prompt=4,
        max_tokens_per_pass=tokens,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        kl=KLConfig(coef=0.0),
        device=size.device,
        bf16=size.bf16,
    )
    algorithm = find("grpo")
    learner = Learner(policy(size), None, algorithm, config)
    rows = algorithm.credit(experience(), config)
    computed = 0

    def count(_model: Any, _args: Any, arguments: dict[str, Any]) -> None:
        nonlocal computed
        computed += arguments["input_ids"].numel()

    handle = learner.policy.register_forward_pre_hook(count, with_kwargs=True)
    learner.update(rows, 1)
    handle.remove()
    return lambda: learner.update(rows, 1), computed / int(rows.lengths_B.sum())


def bare(rows: int, size: Size) -> Callable[[], None]:
    """Forward and backward passes over as many real tokens, in rows of one length, so many at once."""
    model, (prompts_R, responses_R) = policy(size), lengths()
    before, after = round(prompts_R.mean()), round(responses_R.mean())
    tokens_RT = torch.randint(0, VOCABULARY, (ROWS, before + after), generator=torch.Generator().manual_seed(0))
    tokens_RT = tokens_RT.to(size.device)

    def compute() -> None:
        for tokens_BT in tokens_RT.split(rows):
            with size.autocast():
                logits_BTV = model(input_ids=tokens_BT, use_cache=False, logits_to_keep=after + 1).logits[:, :-1]
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, before:].flatten())
            loss.backward()
        model.zero_grad()

    compute()
    return compute


def measure(budgets: list[int], rounds: int, size: Size) -> list[dict[str, float]]:
    """A row for each budget."""
    bares = {rows: bare(rows, size) for rows in BARE_ROWS}
    updates = {tokens: update(tokens, size) for tokens in budgets}
    bare_seconds: dict[int, list[float]] = {rows: [] for rows in bares}
    update_seconds: dict[int, list[float]] = {tokens: [] for tokens in updates}
    for _ in range(rounds):
        for rows, compute in bares.items():
            bare_seconds[rows].append(seconds(compute, size.device))
        for tokens, (compute, _) in updates.items():
            update_seconds[tokens].append(seconds(compute, size.device))
    fastest = min(bare_seconds.values(), key=statistics.median)
    dtype = torch.bfloat16 if size.bf16 else torch.float32
    most = matmul_tflops(size.device, dtype, 256 if size.device == "cpu" else 8192)
    operations = 6e-12 * sum(map(sum, lengths())) * sum(p.numel() for p in policy(size).parameters())
    table = []
    for tokens, (_, padding) in updates.items():
        ratios = [mine / theirs for mine, theirs in zip(update_seconds[tokens], fastest, strict=True)]
        middle = statistics.median(update_seconds[tokens])
        row = {"budget": tokens, "update": middle, "bare": statistics.median(fastest)}
        row |= {"ratio": statistics.median(ratios), "smallest": min(ratios), "largest": max(ratios)}
        table.append(row | {"padding": padding, "tflops": operations / middle, "peak": operations / middle / most})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the rows as one line of JSON, last")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], metavar="TOKENS")
    parser.add_argument("--hidden", type=int, default=256, help="the policy's width; a multiple of 4")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, help="threads of torch; by default torch's choice")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    options = parse(parser, rounds=1, budgets=[256], hidden=64, layers=1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = measure(options.budgets, options.rounds, Size(options.hidden, options.layers, options.device, options.bf16))
    total = int(sum(part.sum() for part in lengths()))
    print(f"{ROWS} rows, {total} tokens, {torch.get_num_threads()} threads; seconds of an update and a bare pass")
    columns = ["budget", "update", "bare", "ratio", "smallest", "largest", "padding", "peak"]
    print("".join(f"{name:>10}" for name in columns))
    for row in rows:
        print(f"{row['budget']:>10}" + "".join(f"{row[name]:>10.3f}" for name in columns[1:]))
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
