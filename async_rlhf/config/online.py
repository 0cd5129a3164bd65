"""Configuration that every online algorithm shares: the schedule, the sampling, the rewards, the optimisation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from async_rlhf.config.base import (
    DEVICE,
    FOLDER,
    SUMS,
    Checked,
    Rule,
    above,
    at_least,
    at_most,
    inside,
    key,
    require,
)
from async_rlhf.config.generation import GenerationConfig
from async_rlhf.config.parallel import ParallelConfig
from async_rlhf.config.ray import RayConfig

if TYPE_CHECKING:
    from async_rlhf.config.policy import KLConfig

MAX_STALENESS = 128
"""Twice the largest that the asynchronous RLHF study tried; a ring of a million snapshots takes a minute to zero."""
SEED = (at_least(0), at_most(2**32 - 1, "numpy's generators take no larger"))
_RATE_LEAVES = "AdamW moves every weight by about the rate at each step, which leaves no model"
LEARNING_RATE = (above(0), at_most(10.0, _RATE_LEAVES))
MAX_COEFFICIENT = 1e15
_STAYS = "what a weight or a penalty multiplies has to stay a number of 32 bits"
_FACTOR = Rule(lambda x: abs(x) <= MAX_COEFFICIENT, f"must be at most {MAX_COEFFICIENT:g} in size: {_STAYS}")


def _names_repository(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


_HUB_NAME = Rule(
    _names_repository, 'must be "name" or "owner/name" as the Hub has them: letters, digits, "_", "-", "."'
)
_KEPT = "it decides what is kept, not what is trained"

NonEosPenalty = bool | Literal["replace", "add"]
LRSchedule = Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"]


@dataclass(frozen=True)
class AdapterConfig(Checked):
    """Low-rank adapters by peft (Hu et al., arXiv 2106.09685) instead of training every weight. Dropout stays off."""

    rank: int = key(0, at_least(0))
    """Rank of the adapters; 0 trains every weight."""
    alpha: float = key(32.0, above(0))
    """The adapters' output is scaled by alpha / rank."""
    target_modules: list[str] = key([])
    """Names of the modules to adapt; empty takes every linear layer except the head."""


@dataclass(frozen=True)
class LoRAConfig(AdapterConfig):
    """Adapters in online training. The reference policy is then the policy with its adapters off."""

    publish: Literal["merged", "adapter"] = "merged"
    """ "merged" publishes weights with the adapters merged in; "adapter" publishes only the adapters, a small part of
    the bytes, which the engine applies at every step (vLLM in a process or inline)."""


@dataclass(frozen=True)
class OnlineConfig(Checked):
    """What every online algorithm shares.

    One *batch* is ``per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches`` prompts, times the
    ranks of the learner, with ``samples_per_prompt`` completions each. It is trained on for ``num_epochs`` epochs of
    ``num_mini_batches`` optimiser steps. An *episode* is a prompt.
    """

    output_dir: str = key("runs/online", FOLDER, role="place")
    """Where checkpoints, metrics.jsonl, samples.jsonl and trace.json go. Only one process at a time may write
    there; a second one is refused."""
    overwrite_output_dir: bool = key(False, role="place")
    """Delete what an earlier run left there, and nothing else; with false, such files are an error."""
    resume: bool = key(False, role="place")
    """Resume from the newest whole checkpoint in output_dir, bit for bit; without one, start at the beginning."""
    resume_from: str | None = key(None, role="place")
    """Resume from this checkpoint instead."""
    resume_anyway: bool = key(False, role="place")
    """Resume even if a key differs that makes the run a different one."""
    staleness: int = key(1, at_least(0), at_most(MAX_STALENESS, "S + 1 copies of the weights are held at once"))
    """S. Batch b is sampled by the weights after max(0, b-1-S) batches; 0 is synchronous."""
    staleness_mode: Literal["exact", "bounded"] = "exact"
    """ "exact" samples with exactly those weights; "bounded" takes the newest weights available when a worker starts,
    never older than those, and records the versions in schedule.jsonl, as they may differ from run to run."""
    replay_from: str | None = None
    """A schedule.jsonl whose versions are repeated, so that the losses equal those of that run."""
    total_episodes: int = key(131_072, at_least(1), may_change="the run becomes longer")
    """Prompts to train on in all; a multiple of the batch."""
    samples_per_prompt: int = key(2, at_least(1))
    """K, completions per prompt; more give clearer pairs and better baselines but cost more sampling."""
    per_device_train_batch_size: int = key(8, at_least(1))
    """Size of one forward and backward pass: pairs of completions for DPO, else completions."""
    gradient_accumulation_steps: int = key(1, at_least(1))
    """Part of the batch size, see above. An optimiser step has this many passes; if every completion is trained on (all
    algorithms but online_dpo and best_of_k), samples_per_prompt times as many."""
    num_mini_batches: int = key(1, at_least(1))
    """N, optimiser steps per epoch over a batch."""
    num_epochs: int = key(1, at_least(1))
    """T, epochs over each batch."""
    learning_rate: float = key(3e-6, *LEARNING_RATE)
    """Peak rate of AdamW."""
    lr_scheduler_type: LRSchedule = "linear"
    """transformers' schedule of that name, stepped once after every optimiser step."""
    warmup_steps: int = key(0, at_least(0))
    """Optimiser steps of linear warm-up."""
    weight_decay: float = key(0.0, at_least(0), at_most(MAX_COEFFICIENT, _STAYS))
    """Weight decay of AdamW; biases and normalisation weights, which have one dimension, do not decay."""
    adam_beta1: float = key(0.9, inside("[0, 1)"))
    """Of AdamW."""
    adam_beta2: float = key(0.999, inside("[0, 1)"))
    """Of AdamW."""
    adam_epsilon: float = key(1e-8, above(0), at_most(MAX_COEFFICIENT, _STAYS))
    """Of AdamW."""
    max_grad_norm: float = key(1.0, at_least(0))
    """Gradients are clipped to this norm; 0 turns clipping off."""
    bf16: bool = False
    """Forward and backward under bfloat16 autocast; the weights stay float32."""
    head_float32: bool = False
    """With bf16, compute the logits in float32, in the reference too: much of a token's log-probability error comes
    from the head."""
    gradient_checkpointing: bool = False
    """Trade compute for memory in the models being trained."""
    annotate_batch_size: int = key(64, at_least(1))
    """Rows per pass without gradient (reference, reward and value model, old policy)."""
    max_prompt_length: int = key(512, at_least(1))
    """Prompts with more tokens are dropped, and counted."""
    non_eos_penalty: NonEosPenalty = True
    """For a completion that did not end by itself: "replace" (or true) replaces its score by penalty_reward_value,
    "add" adds penalty_reward_value to its score, false changes nothing."""
    penalty_reward_value: float = key(-1.0, _FACTOR)
    """See non_eos_penalty."""
    length_penalty: float = key(0.0, _FACTOR)
    """Subtracted from the score for each token of a completion."""
    reward_weights: list[float] = key([])
    """Factor of each reward function; empty for 1 each."""
    reward_model_weight: float = key(1.0, _FACTOR)
    """Factor of the reward model's score."""
    reward_errors: Literal["error", "skip"] = "error"
    """If a reward function raises, is too slow, or returns something that is no finite number: "error" stops the run,
    "skip" leaves the prompts concerned out of the batch and counts them."""
    reward_timeout: float | None = key(None, above(0), may_change="the machine may be slower")
    """Seconds that the reward functions may take together for a batch; null for no limit. With a limit, functions that
    can be found by name are called in separate processes, which are killed at the limit."""
    logging_steps: int = key(1, at_least(1), role="log")
    """Batches between two lines in the log."""
    save_steps: int = key(0, at_least(0), may_change=_KEPT)
    """Batches between two checkpoints; 0 saves the final model only."""
    save_total_limit: int | None = key(None, at_least(1), may_change=_KEPT)
    """Checkpoints to keep, the newest and the best; null for all."""
    metric_for_best_model: str | None = key(None, may_change=_KEPT)
    """A metric, such as "eval_objective/scores"; the checkpoint where it was best is kept."""
    greater_is_better: bool = key(True, may_change=_KEPT)
    """Whether a larger metric is better."""
    eval_steps: int = key(0, at_least(0), may_change="evaluation trains nothing")
    """Batches between two evaluations on eval_dataset; 0 evaluates at the end only."""
    num_samples_logged: int = key(4, at_least(0), role="log")
    """Completions of each logged batch to write to samples.jsonl."""
    report_to: list[str] = key([], role="log")
    """transformers' integrations, e.g. ["wandb", "tensorboard", "trackio"]."""
    run_name: str | None = key(None, role="log")
    """Name for those integrations."""
    project: str | None = key(None, role="log")
    """The project of W&B or trackio, the experiment of MLflow; null for what $WANDB_PROJECT or $MLFLOW_EXPERIMENT_NAME
    says, or else "huggingface", as transformers has it."""
    push_to_hub: bool = key(False, role="place")
    """Upload the policy to the Hugging Face Hub, beside training; an upload that fails is a warning."""
    hub_model_id: str | None = key(None, _HUB_NAME, role="place")
    """The repository, "name" or "owner/name"; null for the name of output_dir."""
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = key("every_save", role="place")
    """ "end" uploads the final policy; "every_save" the policy of each checkpoint, too; "checkpoint" besides the newest
    checkpoint with all that resuming needs, as last-checkpoint; "all_checkpoints" every one, under its own name."""
    hub_private_repo: bool | None = key(None, role="place")
    """Whether a repository that is made here is private; null leaves it to the owner's settings."""
    hub_token: str | None = key(None, role="place")
    """The token; it is written to no file. Null takes $HF_TOKEN, or that of ``hf auth login``."""
    progress: bool = key(True, role="log")
    """Show a progress bar."""
    trace: bool = key(True, role="log")
    """Write the spans of generate, score, train, publish and wait to trace.json."""
    seed: int = key(0, *SEED)
    """Decides prompts, samples and mini-batches."""
    device: str | None = key(None, DEVICE, role="place", must_stay=SUMS)
    """Device of the learner, e.g. "cuda:0"; null takes the first GPU, or the CPU."""
    trust_remote_code: bool = key(False, role="place")
    """Run Python code that comes with a model, here and where completions are sampled; with false, a model that needs
    this is an error."""
    num_threads: int | None = key(None, at_least(1), at_most(4096, "no machine has more"), role="speed", must_stay=SUMS)
    """CPU threads of the learner; null for torch's choice, less the generators' share."""
    lora: LoRAConfig = key(LoRAConfig)
    """Train low-rank adapters instead of every weight."""
    generation: GenerationConfig = key(GenerationConfig)
    """How completions are sampled."""
    parallel: ParallelConfig = key(ParallelConfig)
    """The learner on several ranks."""
    launch: Literal["local", "ray"] = key("local", role="place")
    """ "local" runs generators and rewards on this host (or in servers); "ray" runs them as actors in a Ray cluster."""
    ray: RayConfig = key(RayConfig)
    """The Ray cluster, and what its actors need."""

    def check(self) -> None:
        large = next((weight for weight in self.reward_weights if not _FACTOR.holds(weight)), None)
        require(large is None, "reward_weights", large, _FACTOR.right)
        place = Path(self.output_dir).resolve()
        right = "must name a folder of the run's own"
        require(bool(self.output_dir) and place != place.parent, "output_dir", self.output_dir, right)
        require(
            self.total_episodes % self.batch_size == 0,
            "total_episodes",
            self.total_episodes,
            f"must be a multiple of the batch of {self.batch_size} prompts (per_device_train_batch_size "
            f"{self.per_device_train_batch_size} x gradient_accumulation_steps "
            f"{self.gradient_accumulation_steps} x num_mini_batches {self.num_mini_batches} x {self.parallel.ranks} "
            f"ranks), such as "
            f"{max(1, round(self.total_episodes / self.batch_size)) * self.batch_size}",
        )
        require(
            self.generation.placement != "inline" or self.staleness == 0,
            "staleness",
            self.staleness,
            'must be 0 with generation.placement "inline": there is no second process to sample meanwhile; '
            'use placement "process"',
        )
        for name in ("hub_model_id", "hub_strategy", "hub_private_repo", "hub_token"):
            given = getattr(self, name) != type(self).__dataclass_fields__[name].default
            require(self.push_to_hub or not given, name, getattr(self, name), "must be left out without push_to_hub")
        right = "must be false with resume: a run that is resumed cannot also be deleted"
        require(not (self.overwrite_output_dir and self.resume), "overwrite_output_dir", True, right)
        require(
            self.replay_from is None or self.staleness_mode == "bounded",
            "replay_from",
            self.replay_from,
            'must be null with staleness_mode "exact", which needs no record to be repeated',
        )
        require(
            self.generation.shares <= self.batch_size,
            "generation.urls" if self.generation.urls else "generation.workers",
            self.generation.shares,
            f"must be at most the batch of {self.batch_size} prompts",
        )
        self._check_generation()
        self._check_precision_and_penalty()
        self._check_parallel()
        self._check_launch()

    def _check_generation(self) -> None:
        """Check what an engine needs to load only adapters, and to change weights in flight."""
        able = self.generation.engine == "vllm" and self.placement != "server"
        right = 'must be "merged" but with generation.engine "vllm" in placement "process" or "inline"'
        require(self.lora.publish == "merged" or able, "lora.publish", self.lora.publish, right)
        measured = self.generation.mismatch_samples > 0
        right = 'must be above 0 with lora.publish "adapter": nothing else shows that vLLM has taken the adapter'
        require(self.lora.publish == "merged" or measured, "generation.mismatch_samples", 0, right)
        in_flight = self.generation.in_flight
        right = 'must be "bounded" with generation.in_flight: which weights draw a token depends on timing'
        require(not in_flight or self.staleness_mode == "bounded", "staleness_mode", self.staleness_mode, right)
        right = "must be null with generation.in_flight: a record of versions by batch cannot repeat it"
        require(not in_flight or self.replay_from is None, "replay_from", self.replay_from, right)
        right = "must be at least 1 with generation.in_flight: else there are never weights to load meanwhile"
        require(not in_flight or self.staleness >= 1, "staleness", self.staleness, right)

    def _check_precision_and_penalty(self) -> None:
        """Refuse keys that would have no effect, and penalties that would reward."""
        right = "must be false without bf16, where everything is float32"
        require(self.bf16 or not self.head_float32, "head_float32", self.head_float32, right)
        right = 'must be at most 0 with non_eos_penalty "add": what is cut off would be rewarded for it'
        adds = self.non_eos_penalty == "add"
        require(not adds or self.penalty_reward_value <= 0, "penalty_reward_value", self.penalty_reward_value, right)

    def _check_parallel(self) -> None:
        """Refuse what does not work with a learner on several ranks."""
        parallel = self.parallel
        alone = 'must be "process" or "server" with parallel.ranks above 1 and generation.engine "vllm"'
        inline_vllm = self.placement == "inline" and self.generation.engine == "vllm"
        require(parallel.ranks == 1 or not inline_vllm, "generation.placement", self.generation.placement, alone)
        right = 'must be "merged" with weights spread over ranks (parallel.strategy)'
        spread = parallel.ranks > 1 and parallel.strategy in ("fsdp", "zero3")
        require(not spread or self.lora.publish == "merged", "lora.publish", self.lora.publish, right)
        right = 'must be null, "cpu" or "cuda" with parallel.ranks above 1: each rank takes the GPU of its number'
        own = parallel.ranks == 1 or self.device in (None, "cpu", "cuda")
        require(own, "device", self.device, right)

    def _check_launch(self) -> None:
        """Nothing that would be ignored may be set."""
        if self.launch == "local":
            right = 'must be left out unless launch is "ray"'
            for item in fields(RayConfig):
                value = getattr(self.ray, item.name)
                require(value == getattr(RayConfig(), item.name), f"ray.{item.name}", value, right)
            return
        generation = self.generation
        right = 'must be "process", or "auto" with a staleness of at least 1, with launch "ray"'
        require(self.placement == "process", "generation.placement", generation.placement, right)
        right = 'must be null with launch "ray": ray.num_gpus says whether generators run on GPUs'
        require(generation.device is None, "generation.device", generation.device, right)
        right = 'must be "merged" with launch "ray": the weights below the adapters would have to be on every node'
        require(self.lora.publish == "merged", "lora.publish", self.lora.publish, right)

    @property
    def resuming(self) -> bool:
        """Whether there is an earlier run's folder to resume."""
        return self.resume or self.resume_from is not None

    @property
    def batch_size(self) -> int:
        """Prompts of one batch."""
        per_rank = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_mini_batches
        return per_rank * self.parallel.ranks

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and response together."""
        return self.max_prompt_length + self.generation.response_length

    @property
    def num_batches(self) -> int:
        """B, batches of the whole run."""
        return self.total_episodes // self.batch_size

    @property
    def num_optimizer_steps(self) -> int:
        """B x N x T."""
        return self.num_batches * self.num_mini_batches * self.num_epochs

    @property
    def kl_penalty(self) -> KLConfig | None:
        """The penalty that keeps the policy near the reference policy; None if the objective has none."""
        return None

    def with_kl_penalty(self, penalty: KLConfig) -> OnlineConfig:
        """A copy with another penalty."""
        raise TypeError(f"{type(self).__name__} has no KL penalty")

    @property
    def placement(self) -> Literal["inline", "process", "server"]:
        """Where completions are sampled, "auto" resolved."""
        if self.generation.placement == "auto":
            return "inline" if self.staleness == 0 else "process"
        return self.generation.placement

    def summary(self) -> dict[str, Any]:
        """The derived quantities that ``--dry-run`` prints."""
        return {
            "prompts per batch": self.batch_size,
            "completions per batch": self.batch_size * self.samples_per_prompt,
            "batches": self.num_batches,
            "optimiser steps": self.num_optimizer_steps,
            "lag in batches": f"0 at batch 1, rising to {min(self.staleness, self.num_batches - 1)}",
            "generation": f"{self.generation.engine}, {'Ray actors' if self.launch == 'ray' else self.placement}",
            "learner": f"{self.parallel.ranks} ranks, {self.parallel.strategy}"
            if self.parallel.ranks > 1
            else "1 rank",
        }
