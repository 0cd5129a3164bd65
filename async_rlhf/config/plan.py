"""Configuration of ``async-rlhf plan``: where the times come from, and what is to be tried with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from async_rlhf.config.base import Checked, require
from async_rlhf.config.online import MAX_SEED, MAX_STALENESS


@dataclass(frozen=True)
class SecondsConfig(Checked):
    """Seconds that one batch takes, where you know them and no run has measured them.

    Args:
        generate: of each generator for its share, loading the weights included.
        score: rewards, and what reference and value model say of the batch.
        train: the update.
        publish: handing the weights out.
        other: whatever else the learner does between two batches, such as logging.
    """

    generate: float | None = None
    score: float = 0.0
    train: float | None = None
    publish: float = 0.0
    other: float = 0.0

    def check(self) -> None:
        self.above(0, "generate", "train")
        self.at_least(0, "score", "publish", "other")
        right = "must be given together with train: seconds of one batch each"
        require((self.generate is None) == (self.train is None), "seconds.generate", self.generate, right)


@dataclass(frozen=True)
class ScalingConfig(Checked):
    """How measured or given seconds change with the number of devices; a model's size needs none of this.

    With G generators instead of the G0 measured, sampling takes ``fixed + (1 - fixed) x G0 / G`` of its time; learners
    alike. Every step of decoding reads all weights however few the rows, so sampling shrinks less than training.

    Args:
        generators: with how many the seconds were measured; null for those of the run, else 1.
        learners: the same.
        generate_fixed: share of sampling that stays however few prompts a generator has.
        learn_fixed: share of scoring and training that stays however many learners there are.
    """

    generators: int | None = None
    learners: int = 1
    generate_fixed: float = 0.3
    learn_fixed: float = 0.05

    def check(self) -> None:
        self.at_least(1, "generators", "learners")
        for key in ("generate_fixed", "learn_fixed"):
            value = getattr(self, key)
            require(0 <= value <= 1, f"scaling.{key}", value, "must be in [0, 1], a share of the time")


@dataclass(frozen=True)
class VariationConfig(Checked):
    """How much the times differ from batch to batch: lognormal, with the mean as given.

    Args:
        generate: standard deviation / mean of a generator's time for a batch, drawn for each generator; null draws
            again from the batches of a measured run, and is 0 without one.
        learn: the same of the learner's time for a batch.
    """

    generate: float | None = None
    learn: float | None = None

    def check(self) -> None:
        self.at_least(0, "generate", "learn")


@dataclass(frozen=True)
class HardwareConfig(Checked):
    """One device, and what is achieved of it; the defaults are an H100 80GB SXM.

    Args:
        name: for the report.
        tflops: peak of dense matrix products in the precision of training, in 1e12 operations a second.
        memory_gb: memory of a device, in 1e9 bytes.
        memory_share: share of it that can be used.
        memory_gbs: bandwidth of that memory, in 1e9 bytes a second.
        train_mfu: share of the peak that forward and backward passes achieve.
        forward_mfu: share of the peak that passes without gradient achieve, prompts of a generator included.
        decode_share: share of the memory's bandwidth that decoding achieves.
        step_seconds: seconds that each step of decoding costs beside: launching, sampling, scheduling.
        reduce_gbs: bandwidth of summing gradients over the learners, as NCCL's tests report it ("bus bandwidth").
        weights_gbs: speed of handing weights out, and of taking them in: copies and checksums.
    """

    name: str = "H100 80GB SXM"
    tflops: float = 989.0
    memory_gb: float = 80.0
    memory_share: float = 0.9
    memory_gbs: float = 3350.0
    train_mfu: float = 0.4
    forward_mfu: float = 0.5
    decode_share: float = 0.6
    step_seconds: float = 0.005
    reduce_gbs: float = 300.0
    weights_gbs: float = 10.0

    def check(self) -> None:
        self.above(0, "tflops", "memory_gb", "memory_gbs", "reduce_gbs", "weights_gbs")
        self.at_least(0, "step_seconds")
        for key in ("memory_share", "train_mfu", "forward_mfu", "decode_share"):
            value = getattr(self, key)
            require(0 < value <= 1, f"hardware.{key}", value, "must be above 0 and at most 1, a share")


@dataclass(frozen=True)
class ModelSizeConfig(Checked):
    """Size of the models, to estimate times that nobody has measured.

    Args:
        parameters: of the policy, such as 8.0e9.
        layers: transformer blocks.
        kv_width: key heads x head size: what a token leaves in each layer's cache, once for keys and once for values.
        reference_parameters: of the reference policy; null for the policy's, 0 for none.
        reward_parameters: of the reward model; null for the policy's, 0 for none.
        generator_bytes: of each weight of a generator, and so of what is published.
        learner_bytes: of each weight of the learner: float32 weight, gradient and two moments are 16.
        frozen_bytes: of each weight of reference and reward model.
        gradient_bytes: of each number that the learners sum up.
        sharded: the learners share weights, moments, reference and reward model (FSDP, ZeRO-3); else each holds all.
        activations_gb: what forward and backward passes take on each learner, in 1e9 bytes.
        recompute: gradient checkpointing: one more forward pass.
    """

    parameters: float | None = None
    layers: int = 0
    kv_width: int = 0
    reference_parameters: float | None = None
    reward_parameters: float | None = None
    generator_bytes: float = 2.0
    learner_bytes: float = 16.0
    frozen_bytes: float = 4.0
    gradient_bytes: float = 4.0
    sharded: bool = True
    activations_gb: float = 10.0
    recompute: bool = False

    def check(self) -> None:
        self.above(0, "parameters", "generator_bytes", "learner_bytes")
        self.at_least(0, "reference_parameters", "reward_parameters", "frozen_bytes", "gradient_bytes")
        self.at_least(0, "activations_gb", "layers", "kv_width")
        for key in ("layers", "kv_width"):
            value = getattr(self, key)
            right = "must be at least 1 with model.parameters: it sizes the keys and values"
            require(self.parameters is None or value >= 1, f"model.{key}", value, right)


@dataclass(frozen=True)
class WorkloadConfig(Checked):
    """What a batch holds. null takes it from the recipe that ``run`` names.

    Args:
        prompts: of a batch.
        samples_per_prompt: K.
        prompt_tokens: mean length of a prompt; null for the recipe's longest.
        response_length: most tokens of a completion: so many steps of decoding, as one of many completions gets there.
        response_tokens: mean length of a completion; null for response_length.
        trained_per_prompt: completions of a prompt that are trained on; null for K (DPO: 2, best-of-K: 1).
        num_epochs: T; without a recipe, 1.
        num_mini_batches: N; the same.
    """

    prompts: int | None = None
    samples_per_prompt: int | None = None
    prompt_tokens: float | None = None
    response_length: int | None = None
    response_tokens: float | None = None
    trained_per_prompt: int | None = None
    num_epochs: int | None = None
    num_mini_batches: int | None = None

    def check(self) -> None:
        self.at_least(1, "prompts", "samples_per_prompt", "response_length", "trained_per_prompt")
        self.at_least(1, "num_epochs", "num_mini_batches")
        self.above(0, "prompt_tokens", "response_tokens")


@dataclass(frozen=True)
class PlanConfig(Checked):
    """Predict the speed of a run, and the best split of its devices: ``async-rlhf plan``.

    The times come from one of three: an earlier run (``run`` names its folder), ``seconds``, or the sizes in ``model``.

    Args:
        run: the output folder of a run, whose batches have measured the times; or the YAML file of one, from which
            ``workload`` takes batch size and lengths.
        devices: to be split between generators and learners; null for as many as were measured.
        max_staleness: the largest S to try.
        in_turn: also propose that all devices sample and train in turn, synchronously; false only compares with it.
            Several devices in turn need a learner that samples on every one of them.
        overlap_slowdown: so many times longer do sampling and training take while both go on at once: 1 on devices of
            their own, more where they share a GPU or the memory of a CPU.
        batches: to simulate for each choice.
        warm_up: first batches of a measured run to leave out.
        tolerance: choices that differ by less are equal; the smallest S of them is proposed.
        rows: splits to show, the fastest.
        seed: of the variation.
        output_dir: where plan.json goes, and trace.json, the proposed schedule as ui.perfetto.dev shows it; null for
            nowhere.
        seconds: of a batch, where you know them.
        scaling: of measured or given seconds.
        variation: from batch to batch.
        hardware: of one device.
        model: sizes.
        workload: of a batch.
    """

    run: str | None = None
    devices: int | None = None
    max_staleness: int = 4
    in_turn: bool = False
    overlap_slowdown: float = 1.0
    batches: int = 200
    warm_up: int = 4
    tolerance: float = 0.02
    rows: int = 8
    seed: int = 0
    output_dir: str | None = None
    seconds: SecondsConfig = field(default_factory=SecondsConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    variation: VariationConfig = field(default_factory=VariationConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    model: ModelSizeConfig = field(default_factory=ModelSizeConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)

    def check(self) -> None:
        self.at_least(1, "devices", "overlap_slowdown", "rows")
        self.at_least(0, "max_staleness", "warm_up", "seed")
        self.at_most(MAX_STALENESS, "train takes no more", "max_staleness")
        self.at_most(100_000, "each is simulated, for every choice", "batches", "devices")
        self.at_most(MAX_SEED, "numpy's generators take no larger", "seed")
        self.at_least(8 * (self.max_staleness + 1), "batches")
        self.is_folder("output_dir")
        require(0 <= self.tolerance < 1, "tolerance", self.tolerance, "must be in [0, 1), a share of the time")
        given = self.seconds.generate is not None
        right = "must be null with seconds: the times are either given or estimated"
        require(self.model.parameters is None or not given, "model.parameters", self.model.parameters, right)
        right = "must be given with model.parameters: how many devices are to be split?"
        require(self.model.parameters is None or self.devices is not None, "devices", self.devices, right)
