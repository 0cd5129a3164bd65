"""The learner on several ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from async_rlhf.config.base import Checked, configuration, key, require

Strategy = Literal["ddp", "fsdp", "zero1", "zero2", "zero3"]
DECIDED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("managed_gradient_accumulation", "optimizer", "scheduler", "fp16", "bf16", "torch_autocast"),
)
"""Keys of DeepSpeed's configuration that our own keys decide."""


_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_A_RANK = (*_NEEDED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RUN_ID")
"""Variables that make a process one of several ranks."""


_LARGEST_IN_ZERO3 = 3 * 10**9
"""Parameters of a model whose rounded copy, 6 GB, leaves room on any GPU that is used for it."""


def launched_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """R, the processes that torchrun, accelerate or srun have started; 1 without them."""
    return int(environment["WORLD_SIZE"]) if all(environment.get(name) for name in _NEEDED) else 1


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The rank of this process among them."""
    return int(environment["RANK"]) if launched_ranks(environment) > 1 else 0


def launched_on_host(environment: Mapping[str, str] = os.environ) -> int:
    """How many of them are on this host."""
    return int(environment.get("LOCAL_WORLD_SIZE", 1)) if launched_ranks(environment) > 1 else 1


@configuration(kw_only=True)
class SharedConfig(Checked):
    """Work that is shared over several ranks, one for each device, while each has models of its own: start the command
    with torchrun, accelerate launch, or srun.
    """

    # No keys, as they have no type here: what starts ranks asks for them.
    strategy = "ddp"
    timeout = 1800.0

    ranks: int = key(launched_ranks, ge=1, role="speed")
    """The number of processes that share the work; by default as many as were launched together with this one. A given
    value is checked at the start."""


@configuration
class ParallelConfig(SharedConfig):
    """The learner on several ranks, one for each device: start the command with torchrun, accelerate launch,
    or srun as in recipes/slurm.
    """

    strategy: Literal["auto", "ddp", "fsdp", "zero1", "zero2", "zero3"] = "auto"
    """ "ddp" keeps all weights on every rank; "zero1" shards the optimiser's state (DeepSpeed), "zero2" the gradients
    too; "zero3" and "fsdp" (PyTorch's FSDP2) shard everything; "auto" takes what an accelerate config file says, else
    "ddp"."""
    ranks = key(launched_ranks, role="result")
    """R, the number of learner processes; by default as many as were launched together with this one. A given value is
    checked at the start, and --dry-run shows the sizes of a run with that many."""
    cpu_offload: bool = False
    """Keep what is sharded in the host's memory, except the weights in use."""
    reshard_after_forward: bool = True
    """With "fsdp", free the other ranks' weights after the forward pass and fetch them again for the backward pass:
    less memory, more traffic."""
    shard_size: int | None = key(None, ge=1)
    """With "fsdp", the ranks that share one copy of the weights, such as those of one host, whose links are fast; other
    ranks hold further copies, and only gradients cross between them, once for each optimiser step. null for all
    ranks."""
    reduce: Literal["every_pass", "once"] = "every_pass"
    """With "fsdp", when gradients are summed over the ranks that share a copy: after each pass, or once for each
    optimiser step, which saves traffic and takes 4 bytes a parameter of the whole model on each rank."""
    context_parallel: int = key(1, ge=1)
    """C, ranks that follow one another and share each row: every one computes a part of its tokens, and in attention a
    part of the heads (Ulysses). For rows that are too long for one rank; C must divide the ranks and the heads."""
    timeout: float = key(1800.0, gt=0, role="speed")
    """Seconds after which a rank that waits for the others gives up."""
    deepspeed: dict[str, Any] = key({})
    """More of DeepSpeed's own configuration, such as {"zero_optimization": {"stage3_prefetch_bucket_size": 5e7}}; keys
    that follow from the configuration here must not be set."""

    def check(self) -> None:
        rule = 'must be empty unless strategy is "zero1", "zero2" or "zero3"'
        self.require(self.strategy not in ("ddp", "fsdp") or not self.deepspeed, "deepspeed", rule)
        for name in DECIDED:
            rule = "must be left out: it follows from the keys of train"
            require(name not in self.deepspeed, f"deepspeed.{name}", self.deepspeed.get(name), rule)
        rule = "must be left out of deepspeed.zero_optimization: strategy says it"
        zero_options = self.deepspeed.get("zero_optimization", {})
        right_kind = 'must be a mapping, such as {"stage3_prefetch_bucket_size": 5e7}'
        require(isinstance(zero_options, dict), "deepspeed.zero_optimization", zero_options, right_kind)
        stage = zero_options.get("stage")
        require(stage is None, "deepspeed.zero_optimization.stage", stage, rule)
        rule, size = 'must be false with strategy "ddp": nothing is spread', self.shard_size
        self.require(self.strategy != "ddp" or not self.cpu_offload, "cpu_offload", rule)
        rule = f"must divide the {self.ranks} ranks (parallel.ranks)"
        self.require(size is None or self.ranks % size == 0, "shard_size", rule)
        self.require(self.ranks % self.context_parallel == 0, "context_parallel", rule)
        fsdp, condition = self.strategy in ("auto", "fsdp"), 'unless strategy is "fsdp"'
        self.require(fsdp or size is None, "shard_size", f"must be null {condition}")
        self.require(fsdp or self.reduce == "every_pass", "reduce", f"must be left out {condition}")
        self.require(fsdp or self.reshard_after_forward, "reshard_after_forward", f"must be true {condition}")

    def require_size(self, parameters: int, rounded: bool) -> None:
        """Require a model that "zero3" spreads. It gathers float32, and autocast keeps the rounded copy of each layer
        that is trained to the end of a pass, so that in 16 bits each rank holds all of these after all.

        Args:
            parameters: that are trained.
            rounded: whether the learner computes in 16 bits.
        """
        why = f"{parameters / 1e9:.1f} billion trained parameters in 16 bits, of which zero3 holds copies on each rank"
        fits = self.strategy != "zero3" or not rounded or parameters <= _LARGEST_IN_ZERO3
        require(fits, "parallel.strategy", self.strategy, f'must be "fsdp" for {why}')

    def require_format(self, checkpoints: str) -> None:
        """Require a format of checkpoints that the strategy has."""
        rule = f'must be "whole" or "auto" with parallel.strategy "{self.strategy}"'
        rule += ": DeepSpeed lays out the optimiser its own way"
        zero = self.ranks > 1 and self.strategy.startswith("zero")
        require(not zero or checkpoints != "sharded", "checkpoint_format", checkpoints, rule)
