"""Trains in this process, which is one of several ranks or alone, one run after the other.

torchrun --nproc-per-node 2 tests/distributed/ranks.py '[{"folder": "/tmp/runs", "name": "ddp"}]'
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import safetensors
import torch
from environments import Echo, forget
from tiny import PROMPTS, byte_tokenizer, count_letters, new_args, tiny_config, widened
from transformers import GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

from async_rlhf.config import KLConfig, LoRAConfig, ParallelConfig
from async_rlhf.distributed import loss_scale
from async_rlhf.learner.learner import Learner
from async_rlhf.models import head, saving
from async_rlhf.models.publish import NoSnapshots
from async_rlhf.models.saving import FILE_BYTES
from async_rlhf.run import build, inputs, shards
from async_rlhf.run.trainer import OnlineTrainer

SPREADS, SHARD_BYTES = inputs.is_spread, shards._FILE_BYTES
MAKE_PARALLEL = build.make_parallel
SMOOTH = {"learning_rate": 1e-2, "adam_epsilon": 1e-2, "max_grad_norm": 1.0}
"""With a large epsilon a step is nearly proportional to the gradient: rounding stays rounding."""


def new_policy(**changes: int) -> GPTNeoXForCausalLM:
    torch.manual_seed(0)
    return widened(GPTNeoXForCausalLM(tiny_config(**changes)))


def new_reward_model() -> GPTNeoXForSequenceClassification:
    torch.manual_seed(1)
    config = tiny_config()
    config.num_labels = 1
    return widened(GPTNeoXForSequenceClassification(config)).eval()


LEFT_OUT = {"an update": (Learner, "update"), "its share of the weights": (NoSnapshots, "publish")}
"""Calls that every rank has to make."""


def break_down(rank: int, how: str, after: float = 0.0) -> None:
    """Break this process as told, if it is that rank: at once, or while it waits for what rank 0 says next."""

    def now() -> None:
        print("FAILING", flush=True)
        if how == "raise":
            raise RuntimeError("told to fail")
        if how == "full":  # the disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
            return
        if how in LEFT_OUT:
            setattr(*LEFT_OUT[how], lambda *_: {})
            return
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ.get("RANK", 0)) == rank:
        threading.Timer(after, now).start() if after else now()


def unsteady(slow: float = 0.0, none_at: int = 0, missing: int = 0):
    """The reward: slow from the second batch on, missing for one whole batch, or for the first so many completions."""
    calls: list[None] = []

    def rewards(prompts, completions, **columns):
        calls.append(None)
        if len(calls) > 1:
            time.sleep(slow)
        absent = len(prompts) if len(calls) == none_at else missing
        return [float("nan")] * absent + count_letters(prompts, completions)[absent:]

    return rewards


def require_no_batch(trainer: OnlineTrainer) -> None:
    """This rank is not 0: it must get no completions and scores."""
    annotate = trainer.learner.annotate

    def without_batch(scored):
        assert scored.batch.groups == ()
        assert scored.scores_PK.numel() == 0
        return annotate(scored)

    trainer.learner.annotate = without_batch


def change_modules(whole: bool, first_scale: float, head_rows: int | None, file_bytes: int, of_page: bool) -> None:
    """Have every rank load whole models; begin with this loss scale; cut the head into chunks of so many rows; write
    weights in files of so many bytes; take the strategy of the page.
    """
    build.make_parallel = strategy_of_the_page if of_page and "RANK" in os.environ else MAKE_PARALLEL
    saving.FILE_BYTES = file_bytes
    shards.READ_BYTES = file_bytes
    inputs.is_spread = (lambda *_: False) if whole else SPREADS
    loss_scale.FIRST = first_scale
    if head_rows is not None:
        head.CHUNK_BYTES, head.LEAST_ROWS, head.KEPT_BYTES = 1, head_rows, 0


def count_opens(path: Path) -> None:
    """Note how many files of safetensors are opened while shards are loaded."""
    opened, safe_open, load = [], safetensors.safe_open, shards.load_shards

    def counted(*words, **options):
        opened.append(options.get("filename", words[0] if words else ""))
        return safe_open(*words, **options)

    def loaded(learner, folder):
        safetensors.safe_open = counted
        found = load(learner, folder)
        safetensors.safe_open = safe_open
        path.write_text(json.dumps([Path(name).name for name in opened]))
        return found

    build.load_shards = loaded


def fail_at(trainer: OnlineTrainer, batch: int, **how) -> None:
    """Break down, as told, before this batch is annotated."""
    annotate, batches = trainer.learner.annotate, count(1)

    def failing(scored):
        if next(batches) == batch:
            break_down(**how)
        return annotate(scored)

    trainer.learner.annotate = failing


def strategy_of_the_page(_config, ranks):
    """The one that docs/extend/strategy.md shows, as it stands there."""
    page = (Path(__file__).parents[2] / "docs" / "extend" / "strategy.md").read_text(encoding="utf-8")
    shown: dict = {}
    exec(page.partition("```python\n")[2].partition("```")[0], shown)
    return shown["AveragedGradients"](ranks)


GROUPS = {"kl": KLConfig}


def train(
    folder: str,
    name: str,
    algorithm: str = "online_dpo",
    ranks: int | None = None,
    strategy: str = "auto",
    lora: int = 0,
    reward_model: bool = False,
    evaluate: bool = False,
    parallel: dict | None = None,
    fail: dict | None = None,
    slow_rewards: float = 0.0,
    no_reward_at: int = 0,
    missing_rewards: int = 0,
    first_scale: float = loss_scale.FIRST,
    lora_targets: list[str] | None = None,
    head_rows: int | None = None,
    file_bytes: int = FILE_BYTES,
    models: str | None = None,
    whole: bool = False,
    episodes: bool = False,
    agent: bool = False,
    of_page: bool = False,
    shard_bytes: int | None = None,
    opens: str = "",
    **changes,
) -> None:
    """One run, as its arguments say; those of a group of keys are a dictionary.

    Its models are made here; or they are ``policy`` and ``reward_model`` in a folder; "{rank}" in its name is the
    number of the rank.
    """
    rank = int(os.environ.get("RANK", 0))
    change_modules(whole, first_scale, head_rows, file_bytes, of_page)
    shards._FILE_BYTES = shard_bytes or SHARD_BYTES
    if opens:
        count_opens(Path(folder, f"{opens}-{rank}"))
    named = None if models is None else Path(models.format(rank=rank))
    args = new_args(
        Path(folder),
        name,
        algorithm=algorithm,
        parallel=ParallelConfig(strategy=strategy, **({} if ranks is None else {"ranks": ranks}), **(parallel or {})),
        lora=LoRAConfig(rank=lora, target_modules=lora_targets or []),
        **{**SMOOTH, **{key: GROUPS[key](**x) if key in GROUPS else x for key, x in changes.items()}},
    )
    sizes = {"max_position_embeddings": 160} if episodes else {}
    trainer = OnlineTrainer(
        new_policy(**sizes) if named is None else str(named / "policy"),
        args,
        PROMPTS,
        reward_funcs=() if episodes else unsteady(slow_rewards, no_reward_at, missing_rewards),
        environment=Echo if episodes and not agent else None,
        agent=forget if agent else None,
        reward_model=None if not reward_model else str(named / "reward_model") if named else new_reward_model(),
        processing_class=byte_tokenizer(),
        eval_dataset=PROMPTS[:5] if evaluate else None,
    )
    if rank > 0:
        require_no_batch(trainer)
    if fail is not None:
        fail_at(trainer, 1 + (not slow_rewards), **fail)
    trainer.train()
    print(f"rank {rank}: {name} is done", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for run in json.loads(sys.argv[1]):
        train(**run)
