"""Configuration that every online algorithm shares: the schedule, the sampling, the rewards, the optimisation."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from async_rlhf.config.base import APART, FOLDER, SUMS, Checked, Rule, configuration, key, require
from async_rlhf.config.common import MAX_COEFFICIENT, STAYS, TEMPERATURE
from async_rlhf.config.engines import able, find
from async_rlhf.config.generation import GenerationConfig
from async_rlhf.config.ray import RayConfig
from async_rlhf.config.sizes import PROMPT_CAP, SizesConfig

MAX_STALENESS = 128
"""Twice the largest that the asynchronous RLHF study tried; a ring of a million snapshots takes a minute to zero."""
IN_LOSS: dict[str, Any] = {"le": MAX_COEFFICIENT, "why": "the loss has to stay a number of 32 bits"}
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
_BYTES_OF_TOKEN = 40
"""Nine columns of 4 bytes, or fewer, have a number for each token; and there is its text."""
_KEPT = "it decides what is kept, not what is trained"
_EVALUATION = "evaluation trains nothing"
_ENDS = "it decides when the run ends, not what a batch trains"

NonEosPenalty = bool | Literal["replace", "add"]


@configuration
class AdapterConfig(Checked):
    """Low-rank adapters by peft (Hu et al., arXiv 2106.09685) instead of training every weight. Dropout stays off."""

    rank: int = key(0, ge=0)
    """Rank of the adapters; 0 trains every weight."""
    alpha: float = key(32.0, gt=0)
    """The adapters' output is scaled by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = key([])
    """Names of the modules to adapt, linear layers whose weights no other layer shares; empty, or "all-linear", takes
    every linear layer except the head. The experts and routers of a mixture are none."""

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
        rule = "must be null with rank 0, which trains every weight"
        self.require(self.base_bits is None or self.rank > 0, "base_bits", rule)


@configuration
class KLConfig(Checked):
    """The penalty that keeps the policy near the reference policy."""

    coef: float = key(0.05, ge=0, main="training", **IN_LOSS)
    """The coefficient of the KL penalty; with 0 no reference policy is loaded. This and every other KL here compares
    the distributions at generation.temperature, not at 1."""
    where: Literal["reward", "loss"] = "reward"
    """ "reward" subtracts it from the reward, "loss" adds it to the loss."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Per token, with d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d."""
    corrected: bool = False
    """In the loss, weight the k3 of each token by pi / mu, where mu sampled it, and let the gradient flow through that
    weight: this gives the gradient of the KL of each token given its prefix. k3 alone does not, least of all with
    samples of older weights (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""
    target: float | None = key(None, gt=0, **IN_LOSS)
    """Adapt the coefficient to keep the KL of a completion at this value (Ziegler et al., arXiv 1909.08593, section
    2.2); null leaves the coefficient fixed."""
    horizon: int = key(10_000, ge=1)
    """Completions over which an adapted coefficient changes by at most 20%."""

    def check(self) -> None:
        rule = 'must be "k2" or "k3" with kl.where "loss": the gradient of k1 is zero in expectation'
        rule += " and would restrain nothing"
        require(self.where == "reward" or self.estimator != "k1", "kl.estimator", self.estimator, rule)
        rule = 'must be false unless kl.where is "loss" and kl.estimator "k3", whose gradient it corrects'
        able = self.where == "loss" and self.estimator == "k3"
        require(able or not self.corrected, "kl.corrected", self.corrected, rule)
        require(self.target is None or self.coef > 0, "kl.coef", self.coef, "must be above 0 with kl.target: 0 stays 0")


@configuration
class OnlineConfig(SizesConfig):
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
    staleness: int = key(1, ge=0, le=MAX_STALENESS, why="S + 1 copies of the weights are held at once", main="training")
    """S. Batch b is sampled by the weights after max(0, b-1-S) batches; 0 is synchronous. With generation.in_flight
    newer weights take over as soon as they are there."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"] = "adamw"
    """ "adamw" in float32, 8 bytes a parameter for its moments; "adamw_8bit" holds them in 2 bytes (bitsandbytes), and
    "paged_adamw_8bit" in the host's memory where a GPU is full; "adafactor" holds one number for each row and column;
    "muon" trains matrices by Muon, with 4 bytes a parameter, and embeddings, head and vectors by AdamW. All take
    steps about as large as AdamW's at the same learning_rate. All but "adamw" are for one rank and for "ddp"."""
    adam_beta1: float = key(0.9, ge=0, lt=1)
    """Of AdamW."""
    adam_beta2: float = key(0.999, ge=0, lt=1)
    """Of AdamW."""
    adam_epsilon: float = key(1e-8, gt=0, le=MAX_COEFFICIENT, why=STAYS)
    """Of AdamW."""
    max_grad_norm: float = key(1.0, ge=0)
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
    packing: Literal["auto", True, False] = "auto"
    """Whether the rows of a pass become one sequence without padding, in which attention stays within each row and what
    rows have in common at their beginning is computed once. "auto" packs where max_tokens_per_pass or
    annotate_max_tokens is given, the model can, and it is faster: on a CPU, and with bf16 or fp16 on a GPU. True is an
    error for a model that cannot, such as one whose layers carry a state from token to token."""
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
    reward_timeout: float | None = key(None, gt=0, may_change="the machine may be slower")
    """Seconds that the reward functions may take together for a batch; null for no limit. With a limit, functions that
    can be found by name are called in separate processes, which are killed at the limit."""
    reward_retries: int = key(
        0, ge=0, le=16, why="the last waits would take days", may_change="what it asks may fail more often"
    )
    """How often a reward function that raises is called again, after 1, 2, 4 ... seconds, but not beyond
    reward_timeout."""
    logging_steps: int = key(1, ge=1, role="log")
    """Batches between two lines in the log."""
    save_steps: int | None = key(None, ge=0, may_change=_KEPT, main="output")
    """Batches between two checkpoints; 0 for the final model alone; null for a tenth of the run, of which the newest
    one is kept."""
    save_total_limit: int | None = key(None, ge=1, may_change=_KEPT)
    """Checkpoints to keep, the newest and the best; null for all."""
    metric_for_best_model: str | None = key(None, may_change=_KEPT)
    """A metric, such as "eval_objective/scores"; the checkpoint where it was best is kept."""
    greater_is_better: bool = key(True, may_change=_KEPT)
    """Whether a larger value of metric_for_best_model is better."""
    eval_steps: int = key(0, ge=0, may_change=_EVALUATION, main="output")
    """Batches between two evaluations on eval_dataset; 0 evaluates at the end only. Generators answer beside training,
    with just the weights of that batch; the result is logged, under that batch's number, staleness + 1 batches later,
    and one more copy of the weights is held until then. Every completion goes to eval_samples.jsonl, with its score."""
    eval_on_start: bool = key(False, may_change=_EVALUATION)
    """Evaluate before batch 1, too, with eval_steps; logged as batch 0. No checkpoint is the best by it."""
    eval_temperature: float | None = key(None, *TEMPERATURE, may_change=_EVALUATION)
    """Temperature of sampling in these evaluations, such as 0.01 for the likeliest answers; null for
    generation.temperature."""
    eval_samples_per_prompt: int = key(1, ge=1, may_change=_EVALUATION)
    """Completions of each held-out prompt."""
    early_stopping_patience: int | None = key(None, ge=1, may_change=_ENDS)
    """End the run when metric_for_best_model is past its peak, after so many evaluations in a row without a new best:
    the policy's held-out reward falls again when it has learnt to please the reward model alone. null trains all
    batches."""
    num_samples_logged: int = key(4, ge=0, role="log")
    """Completions of each logged batch to write to samples.jsonl."""
    rollouts: Literal["all", "logged", "none"] = key("logged", role="log")
    """ "logged" writes num_samples_logged completions of each logged batch, "none" writes none. "all" also writes every
    sample of every batch, with tokens, log-probabilities, rewards and advantages, as Parquet into the folder rollouts;
    the log says at the start how much that is at most."""
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
    seed = key(0)
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
    num_threads: int | None = key(None, ge=1, le=4096, why="no machine has more", role="speed", must_stay=SUMS)
    """CPU threads of the learner; null for torch's choice, less that of generators that sample meanwhile."""
    lora: LoRAConfig = key(LoRAConfig)
    """Train low-rank adapters instead of every weight."""
    generation: GenerationConfig = key(GenerationConfig)
    """How completions are sampled."""
    launch: Literal["local", "ray"] = key("local", role="place")
    """ "local" runs generators and rewards on this host (or in servers); "ray" runs them as actors in a Ray cluster."""
    ray: RayConfig = key(RayConfig)
    """The Ray cluster, and what its actors need."""

    def require_whole(self, condition: bool, key: str, rule: str) -> None:
        """Require a condition where ``top_p`` or ``top_k`` truncate what samples: a weight pi / mu would then compare
        the whole policy with a truncated one, is below 1 from the start, and shrinks with each token."""
        why = (
            "a weight would compare the whole policy with the truncated one that sampled, and leave short answers alone"
        )
        rule = f"must be {rule} with generation.top_p below 1 or generation.top_k: {why}"
        self.require(condition or not self.generation.truncates, key, rule)

    def check(self) -> None:
        large = next((weight for weight in self.reward_weights if not _FACTOR.holds(weight)), None)
        require(large is None, "reward_weights", large, _FACTOR.text)
        folder = Path(self.output_dir).resolve()
        rule = "must name a folder of the run's own"
        self.require(bool(self.output_dir) and folder != folder.parent, "output_dir", rule)
        super().check()
        self._check_engine()
        if not self.push_to_hub:
            self.leaves_out(("hub_model_id", "hub_strategy", "hub_private_repo", "hub_token"), "without push_to_hub")
        if self.rollouts == "none":
            self.leaves_out(["num_samples_logged"], 'with rollouts "none"')
        rule = "must be false with resume: a run that is resumed cannot also be deleted"
        self.require(not (self.overwrite_output_dir and self.resume), "overwrite_output_dir", rule)
        self._check_evaluation()
        self._check_generation()
        if self.router_replay:
            self._check_router_replay()
        self._check_precision_and_penalty()
        self._check_parallel()
        self._check_own_devices()
        self._check_launch()
        self._check_deterministic()

    def _check_engine(self) -> None:
        """Refuse an engine that takes turns to be ahead, and requests that are larger than a batch."""
        name, supports = self.generation.engine, find(self.generation.engine).supports
        in_turn = self.generation.placement == "inline" and "policy" not in supports
        rule = f'must be 0 with generation.engine "{name}" and placement "inline", where the two take turns'
        rule += '; use placement "process"'
        self.require(not in_turn or self.staleness == 0, "staleness", rule)
        key, shares = "generation.urls" if self.generation.urls else "generation.workers", self.generation.shares
        rule, size = f"must be at most the batch of {self.batch_size} prompts", self.generation.prompts_per_request
        require(shares <= self.batch_size, key, shares, rule)
        self.require(size is None or size <= self.batch_size, "generation.prompts_per_request", rule)
        rule = 'must be null with placement "inline", where nothing is sent'
        self.require(size is None or self.placement != "inline", "generation.prompts_per_request", rule)

    def _check_evaluation(self) -> None:
        """Refuse temperatures that an engine cannot sample at, and ends that can never come."""
        engine = self.generation.engine
        coldest = find(engine).coldest
        rule = f'must be at least {coldest:g} with generation.engine "{engine}", which samples no colder'
        self.require((self.eval_temperature or 1.0) >= coldest, "eval_temperature", rule)
        name, stops = self.metric_for_best_model, self.early_stopping_patience is not None
        if name is None:
            self.leaves_out(["greater_is_better", "early_stopping_patience"], "without metric_for_best_model")
            return
        rule = 'must be a result of evaluations with early_stopping_patience, such as "eval_objective/scores"'
        self.require(not stops or name.startswith("eval_"), "metric_for_best_model", rule)
        self.require(not stops or self.eval_steps > 0, "eval_steps", "must be at least 1 with early_stopping_patience")
        self.require(not self.eval_on_start or self.eval_steps > 0, "eval_on_start", "must be false without eval_steps")

    def _check_generation(self) -> None:
        """Check what a place ignores, and what an engine needs to load adapters only and weights in flight."""
        if self.placement != "process":
            elsewhere = f'with placement "{self.placement}", which has no processes of its own'
            self.leaves_out(["generation.workers", "generation.device"], elsewhere)
        alone = "adapters" in find(self.generation.engine).supports and self.placement != "server"
        rule = f'must be "merged" but with generation.engine {able("adapters")} in placement "process" or "inline"'
        self.require(self.lora.publish == "merged" or alone, "lora.publish", rule)
        measured, in_flight = self.generation.mismatch_samples > 0, self.generation.in_flight
        rule = 'must be above 0 with lora.publish "adapter": nothing else shows that vLLM has taken the adapter'
        self.require(self.lora.publish == "merged" or measured, "generation.mismatch_samples", rule)
        rule = "must be at least 1 with generation.in_flight: else there are never weights to load meanwhile"
        self.require(not in_flight or self.staleness >= 1, "staleness", rule)

    def _check_router_replay(self) -> None:
        """Refuse what brings no routes, or brings more than one for a token."""
        rule = f"must be false unless generation.engine is {able('routes')}, which say where each token was sent"
        self.require("routes" in find(self.generation.engine).supports, "router_replay", rule)
        rule = "must be false with generation.in_flight: new weights read all tokens again, and send them elsewhere"
        self.require(not self.generation.in_flight, "router_replay", rule)
        rule = "must be false with torch_compile, which would compile a block again for each layer's routes"
        self.require(not self.torch_compile, "router_replay", rule)

    def _check_precision_and_penalty(self) -> None:
        """Refuse keys that would have no effect, and penalties that would reward."""
        rule = "must be false with bf16: there is one type to compute in"
        self.require(not (self.in_bfloat16 and self.fp16), "fp16", rule)
        rule = "must be false without bf16 and fp16, where everything is float32"
        self.require(self.bf16 is not False or self.fp16 or not self.head_float32, "head_float32", rule)
        if self.optimizer == "adafactor":
            names = ("adam_beta1", "adam_beta2", "adam_epsilon")
            self.leaves_out(names, 'with optimizer "adafactor", which has no such number')
        rule = 'must be at most 0 with non_eos_penalty "add": what is cut off would be rewarded for it'
        self.require(self.non_eos_penalty != "add" or self.penalty_reward_value <= 0, "penalty_reward_value", rule)

    def _check_deterministic(self) -> None:
        """Refuse what cannot be repeated, or cannot be told to be."""
        if not self.deterministic:
            return
        rule = "must be a number or null with deterministic: another time, other memory may be left"
        for name in ("max_tokens_per_pass", "annotate_max_tokens"):
            self.require(getattr(self, name) != "auto", name, rule)
        rule = "must be false with generation.in_flight: which weights draw a token depends on timing"
        self.require(not self.generation.in_flight, "deterministic", rule)
        rule = "must be false with generation.seed_per_request false: nothing says what is sampled"
        self.require(self.generation.seed_per_request, "deterministic", rule)
        rule = "must be false with servers: start them with VLLM_BATCH_INVARIANT=1, which cannot be seen from here"
        self.require(self.placement != "server", "deterministic", rule)
        engine = self.generation.engine
        rule = f'must be false with launch "ray" and engine "{engine}": its nodes have environments of their own'
        self.require(self.launch == "local" or find(engine).environment is None, "deterministic", rule)

    def _check_parallel(self) -> None:
        """Refuse what does not work with a learner on several ranks."""
        parallel, engine = self.parallel, self.generation.engine
        alone = f'must be "process" or "server" with parallel.ranks above 1 and generation.engine "{engine}"'
        in_turn = self.placement == "inline" and "policy" not in find(engine).supports
        self.require(parallel.ranks == 1 or not in_turn, "generation.placement", alone)
        rule = 'must be "merged" with weights spread over ranks (parallel.strategy)'
        spread = parallel.ranks > 1 and parallel.strategy in ("fsdp", "zero3")
        self.require(not spread or self.lora.publish == "merged", "lora.publish", rule)
        parallel.require_format(self.checkpoint_format)
        rule = "must be null with weights spread over ranks (parallel.strategy)"
        self.require(not spread or self.lora.base_bits is None, "lora.base_bits", rule)
        rule = 'must be false with parallel.strategy "zero3", whose parallel.cpu_offload does the same'
        self.require(parallel.strategy != "zero3" or not self.offload_frozen, "offload_frozen", rule)

    def _check_own_devices(self) -> None:
        """Refuse a device for a frozen model that is somewhere else."""
        rule = "must be null with ray.reward_workers, which have devices of their own (ray.reward_num_gpus)"
        self.require(self.reward_model_device is None or self.ray.reward_workers == 0, "reward_model_device", rule)
        rule = "must be false with reward_model_device and reference_device, where frozen models are alone"
        self.require(not self.own_devices or not self.offload_frozen, "offload_frozen", rule)

    def _check_launch(self) -> None:
        """Nothing that would be ignored may be set."""
        if self.launch == "local":
            self.ray.leaves_out([item.name for item in fields(RayConfig)], 'unless launch is "ray"', "ray.")
            return
        rule = "must be a number or null with ray.reward_workers: what fits there cannot be seen from here"
        self.require(self.annotate_max_tokens != "auto" or self.ray.reward_workers == 0, "annotate_max_tokens", rule)
        rule = 'must be "process", or "auto" with a staleness of at least 1, with launch "ray"'
        self.require(self.placement == "process", "generation.placement", rule)
        rule = 'must be null with launch "ray": ray.num_gpus says whether generators run on GPUs'
        self.require(self.generation.device is None, "generation.device", rule)
        gpus = self.generation.vllm.tensor_parallel_size
        rule = f"must be {gpus}, as generation.vllm.tensor_parallel_size says, or 0 to sample on CPUs"
        self.require(gpus == 1 or self.ray.num_gpus in (0, gpus), "ray.num_gpus", rule)
        rule = 'must be "merged" with launch "ray": the weights below the adapters would have to be on every node'
        self.require(self.lora.publish == "merged", "lora.publish", rule)

    @property
    def resuming(self) -> bool:
        """Whether there is an earlier run's folder to resume."""
        return self.resume or self.resume_from is not None

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and response together, or of an episode."""
        return self.prompt_cap + self.generation.longest_episode

    @property
    def rollout_bytes(self) -> int:
        """Of a batch that ``rollouts: all`` writes, at most, before compression; texts count 4 bytes a token."""
        return self.batch_size * self.samples_per_prompt * self.max_length * _BYTES_OF_TOKEN

    @property
    def kl_penalty(self) -> KLConfig | None:
        """The penalty that keeps the policy near the reference policy; None if the objective has none."""
        return None

    def with_kl_coef(self, coef: float) -> OnlineConfig:
        """A copy with the coefficient that a run has adapted, which is not checked again."""
        raise TypeError(f"{type(self).__name__} has no KL penalty")

    @property
    def own_devices(self) -> set[str]:
        """The devices that frozen models have for themselves."""
        return {name for name in (self.reward_model_device, self.reference_device) if name not in (None, "learner")}

    @property
    def saves_every(self) -> int:
        """Batches between two checkpoints; 0 for none."""
        return math.ceil(self.num_batches / 10) if self.save_steps is None else self.save_steps

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
        known = self.epochs is None
        lag = min(self.staleness, self.num_batches - 1) if known else self.staleness
        steps = self.num_mini_batches * self.num_epochs
        of_data = f"{self.epochs} x rows of the data / {self.batch_size}, rounded up"
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
