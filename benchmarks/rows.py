"""What lies between the replies of the generators and the first micro-batch, without any model.

    python benchmarks/rows.py [--json] [--rows 8192] [--tokens 8000] [--ranks 1 2] [--rounds 3]

Replies of 8,192 completions, prompt included 8,000 tokens each, as they come from a worker's message: 8 completions a
prompt, for GRPO with a KL penalty and two steps a batch. Real processes, which talk by gloo. Then everything that a run
does with them goes on for real: the replies are checked, as the batch is against the schedule; rows are scored, padded,
annotated by the reference and by the policy before the update, credited, and dealt out. Only the models do nothing:
log-probabilities are a constant, a row's score is its last token's number modulo 7; and no completion is sampled again.

    seconds   from the replies to the first micro-batch on rank 0, when its rows are on their device
    busy      seconds of a core's that rank 0 has computed in that time; other work on the machine matters less to it
    replies   bytes of the replies in the memory of rank 0
    above     the most that rank 0 holds besides, in 1e9 bytes
    whole     both together; what Python, PyTorch and the model take before there is any reply is not counted
    received  what another rank has been sent until its own first micro-batch, in 1e9 bytes
    ratio     seconds / the seconds of copying the tensors of that experience once, in memory that is new as well

The medians over rounds; each round and each number of ranks has processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from smallest import parse
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

from async_rlhf import GenerationConfig, GRPOConfig
from async_rlhf.algorithms.table import find
from async_rlhf.config import ParallelConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.generation.dispatch import Worker
from async_rlhf.generation.protocol import Reply, Request, SamplingParams, fingerprint
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.learner import learner as learners
from async_rlhf.learner.strategies.choice import make_parallel
from async_rlhf.models import forward
from async_rlhf.models.publish import NoSnapshots
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.run.schedule import RolloutSchedule
from async_rlhf.system.trace import Trace
from async_rlhf.types import PolicyOutput, Prompt, Sample

SAMPLES, PROMPT, VOCABULARY = 8, 200, 32_000
COLUMNS = ("seconds", "busy", "ratio", "replies", "above", "whole", "received")


class Prompts:
    """The same prompts for every batch."""

    def __init__(self, rows: int) -> None:
        random = np.random.default_rng(0)
        tokens = random.integers(1, VOCABULARY, (rows // SAMPLES, PROMPT)).tolist()
        self.prompts = [Prompt(i, i, tuple(each)) for i, each in enumerate(tokens)]

    def batch(self, index: int, size: int) -> list[Prompt]:
        """All of them."""
        return self.prompts[:size]


class Ready(Worker):
    """Answers with a reply that is there already."""

    has_begun = True
    reply: Reply

    def submit(self, request: Request) -> None:
        """Answer at once."""
        self.open = [request]
        self.arrive(self.reply)

    def close(self) -> None:
        """Do nothing."""


class Snapshots(NoSnapshots):
    """None, of which the replies have proof."""

    def publish(self, *_: Any) -> dict[str, str]:
        """Take nothing."""
        self.published = {0: {}}
        return {}


class Generator(RemoteGenerator):
    """Whose worker never dies."""

    kind = "worker"

    def prepare(self, config: Any, policy: Any) -> tuple[Snapshots, int]:
        return Snapshots(), int(self.parallel.ranks.is_main)

    def make(self, number: int) -> Ready:
        return Ready(number, "generator 0", self.arrived)


def reply(prompts: Sequence[Prompt], length: int) -> Reply:
    """The completions of a worker, as unpickled."""
    random = np.random.default_rng(1)
    completions = []
    for prompt in prompts:
        after = length - len(prompt.tokens)
        answers = []
        for _ in range(SAMPLES):
            tokens = random.integers(1, VOCABULARY, after, np.int32)
            logprobs = random.random(after, np.float32) - 2
            answers.append(Sample.answer(prompt.tokens, tokens, logprobs, np.zeros(after, np.int32), "length"))
        completions.append(tuple(answers))
    return Reply(1, 0, {0: {}}, fingerprint(prompts), completions, 0.0, 1.0, 0.0)


def logprobs(_model: Any, tokens_BT: Tensor, sampled_BT: Tensor, *_: Any, **__: Any) -> PolicyOutput:
    """Those of a model that takes no time."""
    return PolicyOutput(sampled_BT.float() * -1.5, torch.zeros(tokens_BT.shape))


def scores(_model: Any, tokens_BT: Tensor, lengths_B: Tensor, **_: object) -> Tensor:
    """Those of a reward model that takes no time."""
    return (tokens_BT[torch.arange(len(tokens_BT)), lengths_B - 1] % 7).float()


def held() -> int:
    """Bytes in this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def most_held() -> int:
    """The most since :func:`forget_most`."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def forget_most() -> None:
    """Begin anew to look for the most."""
    Path("/proc/self/clear_refs").write_text("5")


class Counted:
    """Counts the bytes that this rank is sent."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> Counted:
        named = [(dist, name) for name in ("recv", "irecv", "broadcast", "all_gather")]
        named += [(dist.distributed_c10d, name) for name in ("broadcast", "all_gather")]  # for objects
        for place, name in named:
            patch.object(place, name, self._counting(getattr(place, name))).start()
        return self

    def __exit__(self, *_: object) -> None:
        patch.stopall()

    def _counting(self, function: Any) -> Any:
        def counting(into: Tensor | list[Tensor], *args: Any, **options: Any) -> Any:
            self.bytes += sum(tensor.nbytes for tensor in ([into] if isinstance(into, Tensor) else into))
            return function(into, *args, **options)

        return counting


def tiny_config(length: int) -> GPTNeoXConfig:
    """Of models whose weights do not matter, with so many positions."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return GPTNeoXConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=length, num_labels=1, pad_token_id=0)


def step(rows: int, length: int, rank: int, ranks: int) -> None:
    """One batch up to the first micro-batch, on one rank; then the process prints what it has found, and ends."""
    config = GRPOConfig(
        per_device_train_batch_size=8,
        annotate_batch_size=16,
        completions_per_batch=rows,
        num_mini_batches=2,
        batches=1,
        samples_per_prompt=SAMPLES,
        staleness=0,
        non_eos_penalty=False,
        generation=GenerationConfig(
            response_length=length - PROMPT, mismatch_samples=0, probe_steps=0, placement="process"
        ),
        parallel=ParallelConfig(strategy="ddp", ranks=ranks),
        device="cpu",
    )
    small = tiny_config(length)
    policy, reward = GPTNeoXForCausalLM(small), GPTNeoXForSequenceClassification(small)
    group = dist.new_group(backend="gloo") if ranks > 1 else None
    parallel = make_parallel(config, Ranks(rank, ranks, rank, ranks, group))
    learner = learners.Learner(policy, None, find("grpo"), config, parallel=parallel)
    scorer = Scorer(None, config, reward, (), "query", parallel)  # type: ignore[arg-type]  # no text is read
    params = SamplingParams(SAMPLES, 1.0, length - PROMPT, (0,), 0)
    trace, prompts = Trace(), Prompts(rows if rank == 0 else 0)
    generator = Generator(config, policy, params, trace, parallel)
    empty = held()
    if rank == 0:
        generator.workers[0].reply = reply(prompts.prompts, length)
    replies = held()
    size = {"batch_size": rows // SAMPLES, "num_batches": 1, "staleness": 0}
    rollouts = RolloutSchedule(generator, prompts, **size, trace=trace, is_main=rank == 0)  # type: ignore[arg-type]
    rollouts.publish(policy, 0)

    def reached(*_: Any) -> None:
        seconds, busy, most = time.perf_counter() - began, time.process_time() - computed, most_held()
        parallel.ranks.barrier("end")  # all have what they wait for
        memory = {"replies": replies - empty, "above": most - replies, "whole": most - empty}
        found = {"seconds": seconds, "busy": busy, **memory}
        if rank == 0:
            again = time.perf_counter()
            _ = [tensor.clone() for tensor in experience.tensors().values()]
            found["ratio"] = seconds / (time.perf_counter() - again)
        print(json.dumps(found if rank == 0 else {"received": counted.bytes}), flush=True)
        os._exit(0)  # the rest of the step, and rows that are on their way for it, do not matter

    forget_most()
    parallel.forward = reached  # type: ignore[method-assign]
    parallel.ranks.barrier("start")
    began, computed = time.perf_counter(), time.process_time()
    with Counted() as counted:
        (batch,) = rollouts
        experience, _ = learner.annotate(scorer(batch))
        learner.update(experience, 1)


def run(options: argparse.Namespace, ranks: int) -> dict[str, float]:
    """One round, in new processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = [sys.executable, __file__, "--rows", str(options.rows), "--tokens", str(options.tokens)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    children = [
        subprocess.Popen([*words, "--rank", f"{rank}/{ranks}/{port}"], stdout=subprocess.PIPE, env=environment)
        for rank in range(ranks)
    ]
    found: dict[str, float] = {}
    for child in children:
        told, _ = child.communicate()
        if child.returncode:
            raise RuntimeError(f"a rank ended with code {child.returncode}")
        found |= json.loads(told.splitlines()[-1])
    return {name: found[name] / (1 if name in COLUMNS[:3] else 1e9) for name in COLUMNS if name in found}


def be_rank(options: argparse.Namespace) -> None:
    """One of the processes."""
    rank, ranks, port = map(int, options.rank.split("/"))
    if ranks > 1:
        address, patience = f"tcp://127.0.0.1:{port}", timedelta(minutes=10)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=patience)
    with patch.object(learners, "response_logprobs", logprobs), patch.object(forward, "reward_scores", scores):
        step(options.rows, options.tokens, rank, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON, last")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parse(parser, rows=64, tokens=220, rounds=1)
    if options.rank:
        be_rank(options)
        return
    rounds: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in options.ranks}
    for _ in range(options.rounds):
        for ranks, found in rounds.items():
            found.append(run(options, ranks))
    table = [
        {"ranks": ranks, **{name: statistics.median(each[name] for each in found) for name in found[0]}}
        for ranks, found in rounds.items()
    ]
    print(f"{options.rows} rows of {options.tokens} tokens; seconds, and 1e9 bytes; medians of {options.rounds}")
    print(f"{'ranks':>10}" + "".join(f"{name:>10}" for name in COLUMNS))
    for row in table:
        print(f"{row['ranks']:>10}" + "".join(f"{row[n]:>10.2f}" if n in row else " " * 10 for n in COLUMNS))
    if options.json:
        last = table[-1]
        print(json.dumps({"ratio": last["ratio"], "seconds": last["seconds"], "whole": last["whole"], "rows": table}))


if __name__ == "__main__":
    main()
