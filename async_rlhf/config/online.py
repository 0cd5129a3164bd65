"""Configuration that every online algorithm shares: the schedule, the sampling, the rewards, the optimisation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from async_rlhf.config.base import (
    APART,
    FOLDER,
    SUMS,
    Checked,
    Rule,
    above,
    at_least,
    at_most,
    configuration,
    inside,
    key,
    require,
)
from async_rlhf.config.common import MAX_COEFFICIENT, SEED, STAYS, TEMPERATURE, TOKENS, TokensOnGPU, TrainingConfig
from async_rlhf.config.contradictions import check_together
from async_rlhf.config.generation import GenerationConfig
from async_rlhf.config.ray import RayConfig

if TYPE_CHECKING:
    from async_rlhf.config.policy import KLConfig

MAX_STALENESS = 128
"""Twice the largest that the asynchronous RLHF study tried; a ring of a million snapshots takes a minute to zero."""
_RATE_LEAVES = "AdamW moves every weight by about the rate at each step, which leaves no model"
LEARNING_RATE = (above(0), at_most(10.0, _RATE_LEAVES))
_FACTOR = Rule(lambda x: abs(x) <= MAX_COEFFICIENT, f"must be at most {MAX_COEFFICIENT:g} in size: {STAYS}")


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
PROMPT_CAP = 512
"""Tokens of the longest prompt where nothing is said of it and the model has room."""
UNITS_PER_PASS = 8
ANNOTATED_ROWS = 64
TOTAL_EPISODES = 131_072
_LONGER = "the run becomes longer"
_EVALUATION = "evaluation trains nothing"
_ENDS = "it decides when the run ends, not what a batch trains"

NonEosPenalty = bool | Literal["replace", "add"]


@configuration
class AdapterConfig(Checked):
    """Low-rank adapters by peft (Hu et al., arXiv 2106.09685) instead of training every weight. Dropout stays off."""

    rank: int = key(0, at_least(0))
    """Rank of the adapters; 0 trains every weight."""
    alpha: float = key(32.0, above(0))
    """The adapters' output is scaled by alpha / rank."""
    target_modules: list[str] = key([])
    """Names of the modules to adapt, linear layers whose weights no other layer shares; empty takes every linear layer
    except the head. The experts and routers of a mixture are none."""

    def check(self) -> None:
        if self.rank == 0:
            self.leaves_out(("alpha", "target_modules"), "with rank 0, which trains every weight")


@configuration
class LoRAConfig(AdapterConfig):
    """Adapters in online training. The reference policy is then the policy with its adapters off."""

    publish: Literal["merged", "adapter"] = "merged"
    """ "merged" publishes weights with the adapters merged in; "adapter" publishes only the adapters, a small part of
    the bytes, which the engine applies at every step (vLLM in a process or inline)."""
    base_bits: Literal[4] | None = None
    """Hold the linear layers below the adapters, but not the head, in 4 bits: QLoRA (nf4, by bitsandbytes), for a model
    given by name. Generators and checkpoints get the same rounded weights. null for all bits."""

    def check(self) -> None:
        super().check()
        self.keeps("base_bits", Rule(lambda _: self.rank > 0, "must be null with rank 0, which trains every weight"))


@configuration
class OnlineConfig(TrainingConfig):
    """What every online algorithm shares.

    One *batch* is ``completions_per_batch`` completions, ``samples_per_prompt`` of each prompt; or, if that is null,
    ``per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches`` prompts, times the ranks of the
    learner. It is trained on for ``num_epochs`` epochs of ``num_mini_batches`` optimiser steps. An *episode* is a
    prompt.
    """

    output_dir: str = key("runs/online", *FOLDER, role="place", main="output")
    """Where checkpoints, metrics.jsonl, samples.jsonl and trace.json go. Only one process at a time may write
    there; a second one is refused."""
    overwrite_output_dir: bool = key(False, role="place")
    """Delete what an earlier run left there, and nothing else; with false, such files are an error."""
    resume_from: str | None = key(None, role="place", names="folder")
    """Resume from this checkpoint instead."""
    staleness: int = key(
        1, at_least(0), at_most(MAX_STALENESS, "S + 1 copies of the weights are held at once"), main="training"
    )
    """S. Batch b is sampled by the weights after max(0, b-1-S) batches; 0 is synchronous. With generation.in_flight
    newer weights take over as soon as they are there."""
    completions_per_batch: int | None = key(None, at_least(1), main="sizes")
    """Completions sampled and scored for one batch, by all ranks together, whatever the algorithm trains on: a batch is
    completions_per_batch / samples_per_prompt prompts, a multiple of num_mini_batches. null takes the size from
    per_device_train_batch_size and gradient_accumulation_steps. With it, per_device_train_batch_size only bounds a
    pass, and an optimiser step has as many passes as that takes."""
    batches: int | None = key(None, at_least(1), may_change=_LONGER, main="sizes")
    """Batches to train on in all; null for total_episodes."""
    total_episodes: int = key(TOTAL_EPISODES, at_least(1), may_change=_LONGER)
    """Prompts to train on in all; a multiple of the batch. Another way to say batches."""
    num_train_epochs: float | None = key(None, above(0), may_change=_LONGER)
    """Passes over the rows of the training data instead, rounded up to whole batches; null for batches or
    total_episodes."""
    samples_per_prompt: int = key(2, at_least(1), main="sizes")
    """K, completions per prompt; more give clearer pairs and better baselines but cost more sampling."""
    per_device_train_batch_size: int | None = key(None, at_least(1))
    """Size of one forward and backward pass: pairs of completions for DPO, else completions. null for 8; with
    max_tokens_per_pass it is then still 8 in the size of the batch, but a pass may have any number."""
    gradient_accumulation_steps: int = key(1, at_least(1))
    """Part of the batch size, see above, unless completions_per_batch says it. An optimiser step has this many passes;
    if every completion is trained on (all algorithms but online_dpo and best_of_k), samples_per_prompt times as
    many."""
    num_mini_batches: int = key(1, at_least(1))
    """N, optimiser steps per epoch over a batch."""
    num_epochs: int = key(1, at_least(1))
    """T, epochs over each batch."""
    trained_prompts: int | None = key(None, at_least(1))
    """Prompts of each batch that are trained on, null for all. With fewer than are sampled, those whose completions all
    have the same reward, which teach nothing, are left out first (dynamic sampling: DAPO, arXiv 2503.14476), then the
    last ones of the batch. `signal/prompts` in the log is the share of prompts whose rewards differ."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"] = "adamw"
    """ "adamw" in float32, 8 bytes a parameter for its moments; "adamw_8bit" holds them in 2 bytes (bitsandbytes), and
    "paged_adamw_8bit" in the host's memory where a GPU is full; "adafactor" holds one number for each row and column;
    "muon" trains matrices by Muon, with 4 bytes a parameter, and embeddings, head and vectors by AdamW. All take
    steps about as large as AdamW's at the same learning_rate. All but "adamw" are for one rank and for "ddp"."""
    learning_rate: float = key(3e-6, *LEARNING_RATE, main="training")
    """Peak rate of the optimiser."""
    adam_beta1: float = key(0.9, inside("[0, 1)"))
    """Of AdamW."""
    adam_beta2: float = key(0.999, inside("[0, 1)"))
    """Of AdamW."""
    adam_epsilon: float = key(1e-8, above(0), at_most(MAX_COEFFICIENT, STAYS))
    """Of AdamW."""
    max_grad_norm: float = key(1.0, at_least(0))
    """Gradients are clipped to this norm; 0 turns clipping off."""
    fp16: bool = False
    """As bf16, but in float16, for GPUs without bfloat16. The loss is scaled so that small gradients are not lost: a
    step whose gradient overflows is skipped and halves the scale (`skipped_steps` and `loss_scale` in the log)."""
    head_float32: bool = False
    """With bf16 or fp16, compute the logits in float32, in the reference too: much of a token's log-probability error
    comes from the head."""
    router_replay: bool = False
    """Send each token of a mixture to the experts that the sampler's routers chose for it, wherever the policy is
    annotated, trained or compared with the engine: rounding can no longer send it elsewhere. The learner's routers
    still weigh these experts, and learn. For Mixtral and Qwen3-MoE; the reference and the value model choose for
    themselves."""
    gradient_checkpointing: Literal["auto", "selective", True, False] = key("auto", role="speed")
    """Compute activations again in the backward pass instead of keeping them: about a third more work for much less
    memory. "selective" keeps matrix products and attention: hardly more work, and about half the memory. "auto" chooses
    the least with which the largest pass fits into the GPU's memory, and says so in the log; false on a CPU."""
    attn_implementation: str | None = None
    """transformers' name of the attention of the learner's models, such as "sdpa", "eager", "flash_attention_2" or the
    name of a kernel on the hub; null for each model's own choice."""
    torch_compile: bool = False
    """Compile the blocks of the learner's models with torch.compile: minutes at the start, faster passes on a GPU."""
    offload_frozen: bool = False
    """Keep the reference and the reward model in the host's memory, and on the GPU only while they compute."""
    annotate_batch_size: int | None = key(None, at_least(1))
    """Rows per pass without gradient (reference, reward and value model, old policy). null for 64, or for any number
    with annotate_max_tokens."""
    annotate_max_tokens: TokensOnGPU = key("on_gpu", TOKENS, without_gpu=None)
    """Tokens of one such pass at most, like max_tokens_per_pass; "on_gpu" takes annotate_batch_size rows."""
    packing: Literal["auto", True, False] = "auto"
    """Whether the rows of a pass become one sequence without padding, in which attention stays within each row and what
    rows have in common at their beginning is computed once. "auto" packs where max_tokens_per_pass or
    annotate_max_tokens is given, the model can, and it is faster: on a CPU, and with bf16 or fp16 on a GPU. True is an
    error for a model that cannot, such as one whose layers carry a state from token to token."""
    max_prompt_length: int | None = key(None, at_least(1))
    """Prompts with more tokens are dropped, and counted; null for 512, or less if the model has not so many positions
    besides those of the response."""
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
    reward_retries: int = key(
        0, at_least(0), at_most(16, "the last waits would take days"), may_change="what it asks may fail more often"
    )
    """How often a reward function that raises is called again, after 1, 2, 4 ... seconds, but not beyond
    reward_timeout."""
    logging_steps: int = key(1, at_least(1), role="log")
    """Batches between two lines in the log."""
    save_steps: int = key(0, at_least(0), may_change=_KEPT)
    """Batches between two checkpoints; 0 saves the final model only."""
    save_total_limit: int | None = key(None, at_least(1), may_change=_KEPT)
    """Checkpoints to keep, the newest and the best; null for all."""
    checkpoint_format: Literal["auto", "whole", "sharded"] = key("auto", role="speed")
    """ "whole" gathers what is trained, and the optimiser's state, on the first rank, and training waits until it is
    written. "sharded" copies both to the hosts' memory, and training goes on while every rank writes its own part
    (torch.distributed.checkpoint) and the first the policy in the standard format. "auto" is "sharded" with FSDP
    without cpu_offload where 3 billion parameters or more are trained, else "whole". "sharded" holds 12 bytes of host
    memory for each trained parameter, on all ranks together. A run may be resumed with the other format. ZeRO has only
    "whole"."""
    metric_for_best_model: str | None = key(None, may_change=_KEPT)
    """A metric, such as "eval_objective/scores"; the checkpoint where it was best is kept. null for that of stop_at."""
    greater_is_better: bool = key(True, may_change=_KEPT)
    """Whether a larger value is better, of metric_for_best_model and of stop_at."""
    eval_steps: int = key(0, at_least(0), may_change=_EVALUATION)
    """Batches between two evaluations on eval_dataset; 0 evaluates at the end only. Generators answer beside training,
    with just the weights of that batch; the result is logged, under that batch's number, staleness + 1 batches later,
    and one more copy of the weights is held until then. Every completion goes to eval_samples.jsonl, with its score."""
    eval_temperature: float | None = key(None, *TEMPERATURE, may_change=_EVALUATION)
    """Temperature of sampling in these evaluations, such as 0.01 for the likeliest answers; null for
    generation.temperature."""
    eval_samples_per_prompt: int = key(1, at_least(1), may_change=_EVALUATION)
    """Completions of each held-out prompt."""
    stop_at: str | None = key(None, may_change=_ENDS)
    """End the run when this result of the evaluations, such as "eval_objective/scores", is past its peak: the policy's
    held-out reward falls again when it has learnt to please the reward model alone. null trains all batches."""
    stop_patience: int = key(3, at_least(1), may_change=_ENDS)
    """Evaluations in a row without a new best after which stop_at ends the run."""
    num_samples_logged: int = key(4, at_least(0), role="log")
    """Completions of each logged batch to write to samples.jsonl."""
    run_name: str | None = key(None, role="log")
    """The run's name for the integrations of report_to."""
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
    report: bool = key(True, role="log")
    """At the end of the command, write a page about the run, report.html (``async-rlhf report``)."""
    seed: int = key(0, *SEED)
    """Decides prompts, samples and mini-batches. Python's, numpy's and torch's global random generators begin with it,
    so that a reward function that draws from them does the same in every run."""
    deterministic: bool = False
    """On a GPU, compute with deterministic kernels only: a run can then be repeated and resumed bit for bit, as it
    always can on a CPU, but is slower. False: equal up to rounding."""
    reward_model_device: str | None = key(None, APART, role="place", must_stay=SUMS)
    """A device for the reward model alone, e.g. "cuda:3", or "cpu" where cores are left: it then judges batches as they
    come, beside training. "learner" computes it on the learner's device, shared by its ranks, when a batch has its
    turn. null is "cpu" where generator processes and a learner share a CPU and take no turns, else "learner"."""
    reference_device: str | None = key(None, APART, role="place", must_stay=SUMS)
    """The same for the reference policy. It takes a model of its own: adapters are switched off where they are."""
    num_threads: int | None = key(None, at_least(1), at_most(4096, "no machine has more"), role="speed", must_stay=SUMS)
    """CPU threads of the learner; null for torch's choice, less the generators' share."""
    lora: LoRAConfig = key(LoRAConfig)
    """Train low-rank adapters instead of every weight."""
    generation: GenerationConfig = key(GenerationConfig)
    """How completions are sampled."""
    launch: Literal["local", "ray"] = key("local", role="place")
    """ "local" runs generators and rewards on this host (or in servers); "ray" runs them as actors in a Ray cluster."""
    ray: RayConfig = key(RayConfig)
    """The Ray cluster, and what its actors need."""

    def check(self) -> None:
        large = next((weight for weight in self.reward_weights if not _FACTOR.holds(weight)), None)
        require(large is None, "reward_weights", large, _FACTOR.right)
        place = Path(self.output_dir).resolve()
        right = "must name a folder of the run's own"
        self.require(bool(self.output_dir) and place != place.parent, "output_dir", right)
        check_together(self)
        super().check()

    @property
    def resuming(self) -> bool:
        """Whether there is an earlier run's folder to resume."""
        return self.resume or self.resume_from is not None

    @property
    def units_by_pass(self) -> int:
        """What a pass adds to the size of the batch: per_device_train_batch_size, or its default."""
        return self.per_device_train_batch_size or UNITS_PER_PASS

    @property
    def most_units(self) -> int | None:
        """Most pairs or completions of a forward and backward pass; None for any number."""
        return self.per_device_train_batch_size if self.tokens_of_pass is not None else self.units_by_pass

    @property
    def most_annotated(self) -> int | None:
        """Most rows of a pass without gradient; None for any number."""
        return self.annotate_batch_size or (ANNOTATED_ROWS if self.tokens_annotated is None else None)

    def rows_of_pass(self, rows_per_unit: int) -> int:
        """Rows of the largest forward and backward pass, if all are as long as they can be.

        Args:
            rows_per_unit: of the algorithm.
        """
        return self._rows(self.most_units, self.tokens_of_pass, rows_per_unit)

    @property
    def rows_annotated(self) -> int:
        """The same of a pass without gradient."""
        return self._rows(self.most_annotated, self.tokens_annotated, 1)

    def _rows(self, units: int | None, tokens: int | None, rows_per_unit: int) -> int:
        """Of as many units as there may be, or as its tokens allow."""
        found = [] if units is None else [units * rows_per_unit]
        if tokens is not None:
            found.append(max(rows_per_unit, tokens // self.max_length))
        return min(found)

    @property
    def by_tokens(self) -> bool:
        """Whether tokens limit a pass."""
        return self.tokens_of_pass is not None or self.tokens_annotated is not None

    @property
    def tokens_of_pass(self) -> int | None:
        """``max_tokens_per_pass``; None while a word stands for it, in whose place a run puts a number."""
        return self.max_tokens_per_pass if isinstance(self.max_tokens_per_pass, int) else None

    @property
    def tokens_annotated(self) -> int | None:
        """The same of ``annotate_max_tokens``."""
        return self.annotate_max_tokens if isinstance(self.annotate_max_tokens, int) else None

    @property
    def prompts_by_passes(self) -> int:
        """Prompts of a batch, as passes, accumulation, mini-batches and ranks say."""
        per_rank = self.units_by_pass * self.gradient_accumulation_steps * self.num_mini_batches
        return per_rank * self.parallel.ranks

    @property
    def batch_size(self) -> int:
        """Prompts of one batch."""
        if self.completions_per_batch is None:
            return self.prompts_by_passes
        return self.completions_per_batch // self.samples_per_prompt

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and response together, or of an episode."""
        return self.prompt_cap + self.generation.longest_episode

    def with_rows(self, rows: int) -> OnlineConfig:
        """The configuration with total_episodes in place of num_train_epochs, for that many rows of training data."""
        if self.num_train_epochs is None:
            return self
        batches = max(1, math.ceil(round(self.num_train_epochs * rows / self.batch_size, 9)))
        return replace(self, num_train_epochs=None, total_episodes=batches * self.batch_size)

    @property
    def num_batches(self) -> int:
        """B, batches of the whole run."""
        right = "says how long the run is only together with the data; use with_rows"
        self.require(self.num_train_epochs is None, "num_train_epochs", right)
        return self.total_episodes // self.batch_size if self.batches is None else self.batches

    @property
    def prompt_cap(self) -> int:
        """Most tokens of a prompt: ``max_prompt_length``, or what stands in for null while no model is known."""
        return PROMPT_CAP if self.max_prompt_length is None else self.max_prompt_length

    @property
    def num_optimizer_steps(self) -> int:
        """B x N x T."""
        return self.num_batches * self.num_mini_batches * self.num_epochs

    @property
    def kl_penalty(self) -> KLConfig | None:
        """The penalty that keeps the policy near the reference policy; None if the objective has none."""
        return None

    def with_kl_coef(self, coef: float) -> OnlineConfig:
        """A copy with the coefficient that a run has adapted, which is not checked again."""
        raise TypeError(f"{type(self).__name__} has no KL penalty")

    @property
    def best_metric(self) -> str | None:
        """The metric by which the best checkpoint is chosen."""
        return self.metric_for_best_model or self.stop_at

    @property
    def own_devices(self) -> set[str]:
        """The devices that frozen models have for themselves."""
        return {name for name in (self.reward_model_device, self.reference_device) if name not in (None, "learner")}

    @property
    def evaluation_delay(self) -> int:
        """Batches after which the result of an evaluation is due: when the generators, which take it up behind the
        batches that were asked for before, are to have sampled the batch after those. 0 where they are the learner.
        """
        if self.placement == "inline":
            return 0
        return min(self.staleness + 1, self.eval_steps or self.staleness)

    @property
    def snapshots(self) -> int:
        """Copies of the weights that generators are offered: those of S + 1 versions, and of one that is evaluated."""
        return max(self.staleness, self.evaluation_delay) + 1

    @property
    def placement(self) -> Literal["inline", "process", "server"]:
        """Where completions are sampled, "auto" resolved."""
        if self.generation.placement == "auto":
            return "inline" if self.staleness == 0 else "process"
        return self.generation.placement

    def summary(self) -> dict[str, Any]:
        """The derived quantities that ``--dry-run`` prints."""
        known = self.num_train_epochs is None
        lag = min(self.staleness, self.num_batches - 1) if known else self.staleness
        steps = self.num_mini_batches * self.num_epochs
        of_data = f"{self.num_train_epochs} x rows of the data / {self.batch_size}, rounded up"
        return {
            "prompts per batch": self.batch_size,
            "completions per batch": self.batch_size * self.samples_per_prompt,
            "batches": self.num_batches if known else of_data,
            "prompts": self.num_batches * self.batch_size if known else of_data,
            "longest prompt in tokens": self.prompt_cap
            if self.max_prompt_length is not None
            else f"{PROMPT_CAP}, or the model's positions less {self.generation.longest_episode} if that is less",
            "optimiser steps": self.num_optimizer_steps if known else f"{steps} for each batch",
            "lag in batches": f"0 at batch 1, rising to {lag}",
            "lag in optimiser steps": f"0 at the first step, at most {(lag + 1) * steps - 1}",
            "generation": f"{self.generation.engine}, {'Ray actors' if self.launch == 'ray' else self.placement}",
            "learner": f"{self.parallel.ranks} ranks, {self.parallel.strategy}"
            if self.parallel.ranks > 1
            else "1 rank",
        }
