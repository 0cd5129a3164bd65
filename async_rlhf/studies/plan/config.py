"""Configuration of ``async-rlhf plan``: where the times come from, and which choices to try."""

from __future__ import annotations

from typing import Any, Literal

from async_rlhf.config.base import FOLDER, Checked, Rule, configuration, key, require
from async_rlhf.config.common import SeededConfig
from async_rlhf.config.online import MAX_STALENESS

_SHARE = Rule(lambda x: 0 < x <= 1, "must be above 0 and at most 1, a share")
_SHARE_OF_TIME: dict[str, Any] = {"ge": 0, "le": 1, "why": "a share of the time"}


@configuration
class SecondsConfig(Checked):
    """Seconds that one batch takes, if you know them and no run has measured them."""

    generate: float | None = key(None, gt=0, main="where times come from")
    """Time of each generator for its share, including loading the weights."""
    rewards: float = key(0.0, ge=0)
    """Seconds of the reward functions of a batch. They judge a batch as soon as it is sampled, beside training."""
    score: float = key(0.0, ge=0)
    """Time of rewards, and of the reference and value models' passes over the batch."""
    train: float | None = key(None, gt=0, main="where times come from")
    """Time of the update."""
    publish: float = key(0.0, ge=0)
    """Time of publishing the weights, for which the learner waits."""
    transfer: float = key(0.0, ge=0)
    """Time from then until the generators have the weights, beside the learner's work."""
    other: float = key(0.0, ge=0)
    """Time of whatever else the learner does between two batches, such as logging."""

    def check(self) -> None:
        rule = "must be given together with train: seconds of one batch each"
        require((self.generate is None) == (self.train is None), "seconds.generate", self.generate, rule)


@configuration
class ScalingConfig(Checked):
    """How measured or given seconds change with the number of devices; not used when times come from ``model`` sizes.

    With G generators instead of the G0 measured, sampling takes ``fixed + (1 - fixed) x G0 / G`` of its time; likewise
    for learners. Every decoding step reads all weights however few the rows, so sampling shrinks less than training.
    """

    generators: int | None = key(None, ge=1)
    """With how many generators the seconds were measured; null for those of the run, else 1."""
    learners: int = key(1, ge=1)
    """With how many learners they were measured."""
    generate_fixed: float = key(0.3, **_SHARE_OF_TIME)
    """Share of sampling time that stays however few prompts a generator has."""
    learn_fixed: float = key(0.05, **_SHARE_OF_TIME)
    """Share of scoring and training time that stays however many learners there are."""
    speeds: list[float] = key([], Rule(lambda speeds: all(speed > 0 for speed in speeds), "must be above 0, each"))
    """Speeds of the generators, if they differ; the seconds are those of speed 1, and so are generators without one."""

    _group = "scaling."


@configuration
class VariationConfig(Checked):
    """How much the times vary from batch to batch: lognormal, with the given mean."""

    generate: float | None = key(None, ge=0)
    """Standard deviation / mean of a generator's time for a batch, drawn for each generator; null resamples the
    batches of a measured run, and is 0 without one."""
    learn: float | None = key(None, ge=0)
    """The same of the learner's time for a batch."""
    lengths: float = key(1.0, ge=0)
    """Standard deviation of the logarithm of a completion's length, for workload.in_flight: lognormal, with the mean
    workload.response_tokens and cut off at workload.response_length."""


@configuration
class HardwareConfig(Checked):
    """One device, and the shares of its peaks that are achieved; the defaults are an H100 80GB SXM. Their sources
    are in docs/commands/plan.md."""

    name: str = key("H100 80GB SXM", role="log")
    """Name in the report."""
    tflops: float = key(989.0, gt=0)
    """Peak of dense matrix products in the precision of training, in 1e12 operations a second."""
    memory_gb: float = key(80.0, gt=0)
    """Memory of a device, in 1e9 bytes."""
    memory_share: float = key(0.9, _SHARE)
    """Share of it that can be used."""
    memory_gbs: float = key(3350.0, gt=0)
    """Bandwidth of that memory, in 1e9 bytes a second."""
    train_mfu: float = key(0.35, _SHARE)
    """Share of the peak that forward and backward passes achieve, with what gradient checkpointing computes again."""
    forward_mfu: float = key(0.5, _SHARE)
    """Share of the peak that passes without gradient achieve, including a generator's prefill of prompts."""
    decode_share: float = key(0.85, _SHARE)
    """Share of the memory's bandwidth that decoding achieves."""
    step_seconds: float = key(0.001, ge=0)
    """Overhead of each decoding step, in seconds: launching, sampling, scheduling."""
    reduce_gbs: float = key(300.0, gt=0)
    """Bandwidth of sums and gathers over devices, as NCCL's tests report it ("bus bandwidth")."""
    reduce_seconds: float = key(1e-5, ge=0)
    """What each sum over the devices of a generator takes, however small; there are two in a block."""
    copy_gbs: float = key(16.0, gt=0)
    """Speed of bringing weights to the generators, beside their work, in 1e9 bytes a second."""
    network_gbs: float | None = key(None, gt=0)
    """Speed of a host's network card, in 1e9 bytes a second, if generators are servers elsewhere: each gets a copy of
    its own, all from one host. null for generators on the learner's host, or for 50 if the recipe's
    generation.weights_transport is "network"."""
    weights_gbs: float = key(4.0, gt=0)
    """Speed at which a generator loads and verifies them, in 1e9 bytes a second; each of its devices reads them all."""

    _group = "hardware."


@configuration
class ModelSizeConfig(Checked):
    """Sizes of the models, to estimate times that have not been measured."""

    parameters: float | None = key(None, gt=0, main="where times come from")
    """Parameters of the policy, such as 8.0e9; of a mixture, with all experts."""
    layers: int = key(0, ge=0, main="where times come from")
    """Transformer blocks."""
    kv_width: int = key(0, ge=0, main="where times come from")
    """Key heads x head size: the numbers that a token adds to each layer's cache, once for keys and once for values."""
    hidden: int | None = key(None, ge=1)
    """Width of the residual stream; null for what parameters, layers and vocabulary imply, with 12 x hidden^2
    parameters in a block."""
    vocabulary: int = key(128_256, ge=1)
    """Rows of the embedding."""
    feed_forward: int | None = key(None, ge=1)
    """Width of the feed-forward layer, of a mixture that of one expert ("moe_intermediate_size" in some models'
    config.json); null for 3.5 x hidden ("llama") or 4 x hidden ("gpt_neox")."""
    attention_width: int | None = key(None, ge=1)
    """Query heads x head size; null for hidden."""
    experts: int = key(1, ge=1)
    """Experts of each block; in a model's config.json "num_experts" or "num_local_experts"."""
    experts_per_token: int = key(1, ge=1)
    """Experts that each token meets; in config.json "num_experts_per_tok". Arithmetic counts these, memory all."""
    block: Literal["llama", "gpt_neox"] = "llama"
    """ "llama" has RMSNorm and a gated feed-forward layer, as Mistral and Qwen have; "gpt_neox" LayerNorm and GELU."""
    tied: bool = False
    """The output head is the embedding."""
    reference_parameters: float | None = key(None, ge=0)
    """Parameters of the reference policy; null for the policy's, 0 for none."""
    reward_parameters: float | None = key(None, ge=0)
    """Parameters of the reward model; null for the policy's, 0 for none."""
    frozen_devices: int = key(0, ge=0, le=2, why="each of the two models has one")
    """Devices besides ``devices`` for reference and reward model, which then compute beside training, as
    train.reference_device and train.reward_model_device have it: 1 for both, 2 for one each; 0: the learners compute
    them, when a batch has its turn."""
    value_parameters: float | None = key(None, ge=0)
    """Parameters of the value model, which is trained as well; null for the policy's if the recipe's algorithm has one,
    else for none."""
    generator_bytes: float | None = key(None, gt=0)
    """Bytes per weight in a generator, and so in what is published; null for those of the recipe's generation.dtype,
    else 2."""
    learner_bytes: float = key(16.0, gt=0)
    """Bytes per weight in the learner: float32 weight, gradient and two moments are 16."""
    frozen_bytes: float | None = key(None, ge=0)
    """Bytes per weight of reference and reward model; null for 2 with bf16, else 4."""
    gradient_bytes: float = key(4.0, ge=0)
    """Bytes of each gradient number that the learners sum up."""
    strategy: Literal["fsdp", "zero3", "zero2", "zero1", "ddp"] = "fsdp"
    """What learners share, as in train.parallel.strategy. With the first two that is all models."""
    context_parallel: int = key(1, ge=1)
    """Learners that share each row, as in train.parallel.context_parallel: what a pass holds is divided by it. What
    they exchange in each block takes time."""
    bf16: bool | None = None
    """The learner computes in bfloat16, under autocast; null for what the recipe says, or a GPU decides where it says
    nothing."""
    activations_gb: float | None = key(None, ge=0)
    """Memory that a learner needs at its peak besides learner_bytes and frozen_bytes, in 1e9 bytes; null computes it:
    activations, logits, weights gathered from other learners and copies to compute with."""
    recompute: Literal["selective", True, False] | None = None
    """Gradient checkpointing: less memory, one more forward pass, or none with "selective". null for what the
    recipe says, or else where it does not fit without."""

    def check(self) -> None:
        for name in ("layers", "kv_width"):
            value = getattr(self, name)
            rule = "must be at least 1 with model.parameters: it sizes the keys and values"
            require(self.parameters is None or value >= 1, f"model.{name}", value, rule)
        rule = f"must be at most the {self.experts} experts of a block"
        require(self.experts_per_token <= self.experts, "model.experts_per_token", self.experts_per_token, rule)
        for name in ("hidden", "feed_forward"):
            rule = "must be given with model.experts: it sizes the experts"
            require(self.experts == 1 or getattr(self, name) is not None, f"model.{name}", None, rule)


@configuration
class WorkloadConfig(Checked):
    """Size of a batch. null takes a value from the recipe that ``run`` names."""

    prompts: int | None = key(None, ge=1, main="size of a batch")
    """Prompts of a batch."""
    samples_per_prompt: int | None = key(None, ge=1, main="size of a batch")
    """K, completions of a prompt."""
    prompt_tokens: float | None = key(None, gt=0)
    """Mean length of a prompt; null for the recipe's longest."""
    response_length: int | None = key(None, ge=1, main="size of a batch")
    """Most tokens of a completion, and the number of decoding steps, as one of many completions gets there."""
    response_tokens: float | None = key(None, gt=0)
    """Mean length of a completion; null for response_length."""
    trained_per_prompt: int | None = key(None, ge=1)
    """Completions of a prompt that are trained on; null for K (DPO: 2, best-of-K: 1)."""
    trained_prompts: int | None = key(None, ge=1)
    """Prompts of a batch that are trained on; null for the recipe's train.trained_prompts, or all."""
    longest_prompt: int | None = key(None, ge=1)
    """Most tokens of a prompt, for the memory of a pass; null for the recipe's longest, or else prompt_tokens."""
    train_rows: int | None = key(None, ge=1)
    """Completions of a pass with gradient on each learner; null for the recipe's, else 8."""
    annotate_rows: int | None = key(None, ge=1)
    """Completions of a pass without gradient; null for the recipe's annotate_batch_size, else 64."""
    num_epochs: int | None = key(None, ge=1)
    """T, epochs over each batch; without a recipe, 1."""
    num_mini_batches: int | None = key(None, ge=1)
    """N, optimiser steps per epoch; without a recipe, 1."""
    prompts_per_request: int | None = key(None, ge=1)
    """Prompts that a free generator takes at a time; null for the recipe's generation.prompts_per_request, or else as
    many requests as there are generators."""
    in_flight: bool | None = None
    """Requests of the next batches fill the places that ended answers leave; null for true if the recipe's
    generation.in_flight is, or if estimated times are shorter by a fifth with it."""
    tensor_parallel: int | None = key(None, ge=1)
    """Devices of each generator, which share its model. null: the recipe's generation.vllm.tensor_parallel_size, if
    that is above 1; or else 1, or the fastest of 1, 2, 4 and 8 if weights take more than half of a device."""
    places: int | None = key(None, ge=1)
    """Completions that a generator decodes together, if in_flight; null for the recipe's generation.batch_size, or else
    all of its share of a batch."""
    eval_completions: int | None = key(None, ge=1)
    """Completions of an evaluation, which generators sample; null for no evaluations."""
    eval_steps: int | None = key(None, ge=1)
    """Batches between two evaluations; null for the recipe's."""


@configuration
class PlanConfig(SeededConfig):
    """Predict the speed of a run, and the best split of its devices: ``async-rlhf plan``.

    The times come from one of three sources: an earlier run (``run`` names its folder), ``seconds``, or the sizes in
    ``model``.
    """

    run: str | None = key(None, main="where times come from", names="run or file")
    """The output folder of a run, whose batches give the measured times; or a run's YAML file, from which ``workload``
    takes batch size and lengths."""
    devices: int | None = key(None, ge=1, le=100_000, why="each is simulated, for every choice", main="choices")
    """Devices to split between generators and learners; null for as many as were measured."""
    max_staleness: int = key(4, ge=0, le=MAX_STALENESS, why="train takes no more", main="choices")
    """The largest S to try."""
    in_turn: bool = False
    """Also propose that all devices alternate between sampling and training, synchronously; false only compares with
    it. With several devices this needs a learner that samples on every one of them."""
    overlap_slowdown: float = key(1.0, ge=1)
    """How many times longer sampling and training take while both go on at once: 1 on separate devices, more if they
    share a GPU or the memory of a CPU."""
    batches: int = key(200, le=100_000, why="each is simulated, for every choice")
    """Batches to simulate for each choice."""
    warm_up: int = key(4, ge=0)
    """First batches of a measured run to leave out."""
    tolerance: float = key(0.02, ge=0, lt=1, why="a share of the time")
    """Choices whose times differ by a smaller share are equal; the one with the smallest S is proposed."""
    rows: int = key(8, ge=1, role="log")
    """How many of the fastest splits to show."""
    output_dir: str | None = key(None, *FOLDER, role="place", main="output")
    """Where plan.json goes, and trace.json, the proposed schedule as ui.perfetto.dev shows it; null for nowhere."""
    seconds: SecondsConfig = key(SecondsConfig)
    """Seconds of a batch, if you know them."""
    scaling: ScalingConfig = key(ScalingConfig)
    """How measured or given seconds scale with devices."""
    variation: VariationConfig = key(VariationConfig)
    """How times vary from batch to batch."""
    hardware: HardwareConfig = key(HardwareConfig)
    """Properties of one device."""
    model: ModelSizeConfig = key(ModelSizeConfig)
    """Sizes of the models."""
    workload: WorkloadConfig = key(WorkloadConfig)
    """Size of a batch."""

    def check(self) -> None:
        least = 8 * (self.max_staleness + 1)
        self.require(self.batches >= least, "batches", f"must be at least {least}")
        are_seconds = self.seconds.generate is not None
        rule = "must be null with seconds: the times are either given or estimated"
        require(self.model.parameters is None or not are_seconds, "model.parameters", self.model.parameters, rule)
        rule = "must be given with model.parameters: how many devices are to be split?"
        require(self.model.parameters is None or self.devices is not None, "devices", self.devices, rule)
