"""Estimates times that were not measured, from model sizes, hardware speed and batch size.

Each phase takes the time of its arithmetic or of its memory traffic, at the stated share of the peak. Of a mixture of
experts, arithmetic counts the parameters that a token meets. Gathers of sharded weights overlap with arithmetic, so a
pass takes the longer of both. Left out: the optimiser's own step, rewards in Python, and waking an engine that takes
turns with training, beyond loading weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from async_rlhf.algorithms.table import find
from async_rlhf.config import engines
from async_rlhf.config.base import require
from async_rlhf.models.memory import KEYS, USED, LearnerMemory, Pass, Shape
from async_rlhf.run.config import RunConfig
from async_rlhf.studies.plan.config import HardwareConfig, ModelSizeConfig, WorkloadConfig
from async_rlhf.studies.plan.times import BatchTimes, DoesNotFitError, Split, parts

_WEIGHT_BYTES, _GATHERED_BYTES = 4.0, 2.0  # the learner's are float32, and cast before they are gathered
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_HEAD = 128
"""Numbers of a head, in Llama, Mistral and Qwen3."""
_CONTEXT = 3e9
"""Bytes of a GPU that neither weights nor keys and values can have, with what staged weights leave free."""
_NETWORK = 50.0
"""1e9 bytes a second of a network card of 400 Gbit/s."""
_MOST_PARALLEL = 8
"""Devices of a host that are near enough to each other for tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The size of a batch, with no field open. The fields are those of WorkloadConfig."""

    prompts: int
    samples_per_prompt: int
    prompt_tokens: float
    response_length: int
    response_tokens: float
    trained_per_prompt: int
    num_epochs: int
    num_mini_batches: int
    longest_prompt: float
    train_rows: int
    annotate_rows: int
    recompute: bool | str | None = None
    """Gradient checkpointing, if the recipe says."""
    prompts_per_request: int | None = None
    eval_completions: int | None = None
    tensor_parallel: int | None = None
    values: bool = False
    """Whether the recipe's algorithm has a value model."""
    trained_prompts: int | None = None
    bf16: bool = True
    """As the recipe says, or a GPU decides."""
    generator_bytes: float = 2.0
    """Of a weight, the same."""
    mean_rows: int | None = None
    """Completions of mean length that a pass of the recipe has."""
    network: bool = False
    """Whether the recipe sends weights to servers by network."""
    stages: bool = True
    """Whether the recipe's generators copy the next version to their memory, where there is room: vLLM on one device in
    a process of the learner's host, with whole weights."""

    @property
    def rows_of_pass(self) -> int:
        """Completions that a pass with gradient has; as train_rows, if the recipe does not limit its tokens."""
        return self.mean_rows or self.train_rows

    @property
    def rows(self) -> int:
        """Completions that are trained on."""
        return (self.trained_prompts or self.prompts) * self.trained_per_prompt


def batch_of(workload: WorkloadConfig, recipe: RunConfig | None) -> Batch:
    """The workload, with the recipe's values where it leaves them open.

    Raises:
        ConfigError: neither gives a value.
    """
    whole = filled(workload, recipe)
    for key in ("prompts", "samples_per_prompt", "prompt_tokens", "response_length"):
        rule = "must be given with model.parameters, or run must name the YAML file of a run to take it from"
        require(getattr(whole, key) is not None, f"workload.{key}", None, rule)
    values: dict[str, Any] = {"num_epochs": 1, "num_mini_batches": 1, "train_rows": 8, "annotate_rows": 64}
    values |= {"response_tokens": whole.response_length, "trained_per_prompt": whole.samples_per_prompt}
    values["longest_prompt"] = whole.prompt_tokens
    settings = {item.name: getattr(whole, item.name, None) for item in fields(Batch)}
    values |= {name: value for name, value in settings.items() if value is not None}
    if recipe is not None:
        train = recipe.train
        values["recompute"] = None if train.gradient_checkpointing == "auto" else train.gradient_checkpointing
        if workload.train_rows is None:
            mean = math.ceil(values["prompt_tokens"] + values["response_tokens"])
            values["mean_rows"] = train.training_limits.rows(mean, find(recipe.algorithm).rows_per_unit)
        values |= {"values": find(recipe.algorithm).needs(train).copies_reward, "bf16": train.in_bfloat16}
        generation, ray, adapters = train.generation, train.launch == "ray", train.lora.publish == "adapter"
        values["generator_bytes"] = _BYTES[generation.weights_dtype]
        values["network"] = generation.weights_transport == "network"
        stages = "staged" in engines.find(generation.engine).supports and generation.placement != "server"
        values["stages"] = stages and not ray and not adapters
    batch = Batch(**values)
    for name, most, what in (
        ("response_tokens", batch.response_length, f"workload.response_length ({batch.response_length})"),
        ("trained_per_prompt", batch.samples_per_prompt, f"the {batch.samples_per_prompt} of a prompt"),
        ("trained_prompts", batch.prompts, f"the {batch.prompts} of a batch"),
    ):
        value = getattr(batch, name)
        require(value is None or value <= most, f"workload.{name}", value, f"must be at most {what}")
    return batch


def filled(workload: WorkloadConfig, recipe: RunConfig | None) -> WorkloadConfig:
    """The workload, with the recipe's values where it leaves them open."""
    settings = {key: value for key, value in asdict(workload).items() if value is not None}
    return workload if recipe is None else replace(_workload(recipe), **settings)


def _workload(recipe: RunConfig) -> WorkloadConfig:
    """What a recipe says of its batches."""
    train, algorithm = recipe.train, find(recipe.algorithm)
    return WorkloadConfig(
        prompts=train.batch_size,
        samples_per_prompt=train.samples_per_prompt,
        prompt_tokens=float(train.prompt_cap),
        response_length=train.generation.response_length,
        trained_per_prompt=algorithm.rows_per_prompt(train),
        trained_prompts=train.trained_prompts,
        longest_prompt=train.prompt_cap,
        train_rows=train.training_limits.rows(train.max_length, algorithm.rows_per_unit),
        annotate_rows=train.annotation_limits.rows(train.max_length),
        num_epochs=train.num_epochs,
        num_mini_batches=train.num_mini_batches,
        prompts_per_request=train.generation.prompts_per_request,
        in_flight=train.generation.in_flight or None,
        tensor_parallel=tp if (tp := train.generation.vllm.tensor_parallel_size) > 1 else None,
        places=train.generation.batch_size,
        eval_steps=train.eval_steps or None,
    )


@dataclass(frozen=True)
class Roofline:
    """Seconds of a batch on the stated hardware; all batches are alike.

    Args:
        hardware: of one device.
        model: sizes of the models.
        batch: size of a batch.
    """

    hardware: HardwareConfig
    model: ModelSizeConfig
    batch: Batch

    def batches(self, split: Split) -> Sequence[BatchTimes]:
        """One batch, as all are alike."""
        if split.generators > self.batch.prompts:
            prompts = self.batch.prompts
            raise DoesNotFitError(f"{split.generators} generators are more than the {prompts} prompts of a batch")
        if split.learners % (shared := self.model.context_parallel):
            raise DoesNotFitError(f"{split.learners} learners are no groups of {shared} (model.context_parallel)")
        # In turn, an engine gets the memory that the learner leaves; activations are freed by then.
        held, peak = self.learner_bytes(split.learners)
        room, devices = self.room_of(split) - (held if split.in_turn else 0.0), split.tensor_parallel
        generate = self.generate_seconds(split.generators, room, devices)
        if peak > self._room():
            raise DoesNotFitError(
                f"a learner of {split.learners} needs {peak / 1e9:.0f} GB on each device, which has "
                f"{self._room() / 1e9:.0f}"
            )
        staged = self.stages(split)
        moved = self._loading(staged)
        learn, rewards = self.learn_seconds(split.learners), self.frozen_seconds()
        requests, evaluate = self._requests(split, generate, moved, room)
        if split.in_turn:
            return [BatchTimes(requests, learn, publish=0.0, rewards=rewards, evaluate=evaluate)]
        publish = self.publish_seconds(split.learners)
        transfer = self._weights() / (self.hardware.copy_gbs * 1e9)
        if self._network is not None:
            transfer += split.generators * self._weights() / (self._network * 1e9)
        once = min(1.0, split.generators / len(requests))  # of all requests of a batch, each generator's first
        unstaged = once * (self._loading(False) - moved)
        more = {"rewards": rewards, "transfer": transfer, "load": moved, "unstaged": unstaged}
        return [BatchTimes(requests, learn, publish, evaluate=evaluate, **more)]

    def _requests(
        self, split: Split, share: float, moved: float, room: float
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of each request of a batch and of an evaluation. Every generator loads the weights once a batch."""
        batch, generators, devices = self.batch, split.generators, split.tensor_parallel
        evaluate: tuple[float, ...] = ()
        if batch.eval_completions is not None:
            prompts = batch.eval_completions / batch.samples_per_prompt / generators
            evaluate = (self.sample_seconds(math.ceil(prompts), room, devices),) * generators
        if batch.prompts_per_request is None:
            return (moved + share,) * generators, evaluate
        sizes = parts(batch.prompts, batch.prompts_per_request)
        load = moved * min(1.0, generators / len(sizes))
        return tuple(load + self.sample_seconds(size, room, devices) for size in sizes), evaluate

    def _loading(self, staged: bool) -> float:
        """Seconds in which a generator loads a version: over the bus, or from its own memory, where that is read or
        written five times, and once more for checksums.
        """
        return self._weights() / (self.hardware.weights_gbs * 1e9 if not staged else self.hardware.memory_gbs * 1e9 / 6)

    def stages(self, split: Split) -> bool:
        """Whether it is faster if the next version waits in the generator's memory, which then has less for keys and
        values.
        """
        if split.in_turn or split.tensor_parallel > 1 or self._network is not None or not self.batch.stages:
            return False
        try:
            there = self.generate_seconds(split.generators, self._reduced_room())
        except DoesNotFitError:
            return False
        return there + self._loading(True) < self.generate_seconds(split.generators) + self._loading(False)

    def room_of(self, split: Split) -> float:
        """Bytes of a generator's device for weights, keys and values."""
        return self._reduced_room() if self.stages(split) else self._room()

    def _reduced_room(self) -> float:
        return min(self._room(), self.hardware.memory_gb * 1e9 - self._weights() - _CONTEXT)

    def degrees(self) -> tuple[int, ...]:
        """Numbers of devices of a generator to try."""
        if self.batch.tensor_parallel is not None:
            return (self.batch.tensor_parallel,)
        small = 2 * self._weights() <= self._room()
        return (1,) if small else tuple(2**i for i in range(_MOST_PARALLEL.bit_length()))

    @property
    def _network(self) -> float | None:
        """1e9 bytes a second to servers; None without."""
        return self.hardware.network_gbs or (_NETWORK if self.batch.network else None)

    def publish_seconds(self, learners: int) -> float:
        """Seconds of the learner for a version: a copy in its own memory, of gathered weights if they are sharded,
        which is then read once for checksums.
        """
        hardware, gathered = self.hardware, (learners - 1) / learners * self._sharded
        copied = self._policy * (_WEIGHT_BYTES + 2 * self._published_bytes)
        return copied / (hardware.memory_gbs * 1e9) + gathered * self._weights() / (hardware.reduce_gbs * 1e9)

    def generate_seconds(self, generators: int, room: float | None = None, devices: int = 1) -> float:
        """Seconds of one generator for its share of the prompts; see :meth:`sample_seconds`."""
        return self.sample_seconds(math.ceil(self.batch.prompts / generators), room, devices)

    def sample_seconds(self, prompts: int, room: float | None = None, devices: int = 1) -> float:
        """Seconds of one generator for so many prompts.

        Every step reads all weights, and the keys and values of the completions under way; as many of these run at once
        as their keys and values have room for. Completions that begin together never hold more tokens than they have in
        the end: t tokens each, of as many as are longer than t (Markov's inequality). Matrix products take the longer
        of their memory traffic and their arithmetic, and so does attention after them; with several devices there are
        two sums over them in each block.

        Args:
            prompts: sampled together.
            room: bytes of each device for weights, keys and values; None for all that can be used.
            devices: of the generator, which divide weights, keys and values.
        """
        batch, hardware, model = self.batch, self.hardware, self.model
        rows = prompts * batch.samples_per_prompt
        token = 2 * model.layers * model.kv_width * self._published_bytes
        room = devices * (self._room() if room is None else room) - self._weights()
        if room < token * (batch.prompt_tokens + batch.response_length):
            raise DoesNotFitError(
                f"a generator needs {self._weights() / 1e9:.0f} GB for weights and more for a completion, and finds "
                f"{max(0.0, room + self._weights()) / 1e9:.0f}" + (f" on {devices} devices" if devices > 1 else "")
            )
        concurrent = math.floor(room / (token * (batch.prompt_tokens + batch.response_tokens)))
        peak = devices * hardware.tflops * 1e12 * hardware.forward_mfu
        seen, tokens = batch.prompt_tokens + batch.response_tokens / 2, rows * batch.response_tokens
        steps = batch.response_length * max(1.0, rows / concurrent)
        read = devices * hardware.memory_gbs * 1e9 * hardware.decode_share
        products = max(steps * self._weights() / read, tokens * 2 * self._active / peak)
        attention = tokens * max(seen * token / read, self._attention(seen) / peak)
        prompt = prompts * batch.prompt_tokens
        prefill = prompt * (2 * self._active + self._attention(batch.prompt_tokens / 2)) / peak
        each = hardware.step_seconds + 2 * model.layers * hardware.reduce_seconds * (devices > 1)
        summed = 4 * (devices - 1) / devices * model.layers * shape_of(model).hidden * self._published_bytes
        summed *= (prompt + tokens) / (hardware.reduce_gbs * 1e9)
        return prefill + products + attention + steps * each + summed

    def frozen_seconds(self) -> float:
        """Seconds of reference and reward model on devices of their own; 0 where the learners compute them.

        Raises:
            DoesNotFitError: a model does not fit into its device.
        """
        batch, hardware, count = self.batch, self.hardware, self.model.frozen_devices
        if count == 0:
            return 0.0
        held = (sum if count == 1 else max)(self._judges) * self._frozen_bytes
        if held > self._room():
            needed = f"{held / 1e9:.0f} GB for their weights, and {count} of model.frozen_devices"
            raise DoesNotFitError(f"reference and reward model need {needed} has {self._room() / 1e9:.0f}")
        scored = self._forest(batch.prompts, batch.samples_per_prompt)
        each = [self._forward(size, scored) / (hardware.tflops * 1e12 * hardware.forward_mfu) for size in self._judges]
        return sum(each) if count == 1 else max(each)

    def learn_seconds(self, learners: int) -> float:
        """Seconds of reward, reference and value model and update with this many learners."""
        batch, hardware, model = self.batch, self.hardware, self.model
        peak = hardware.tflops * 1e12 * learners
        scored = self._forest(batch.prompts, batch.samples_per_prompt)
        trained = self._forest(batch.trained_prompts or batch.prompts, batch.trained_per_prompt, batch.num_mini_batches)
        judges = sum(self._forward(size, scored) for size in (*self._here, self._value))
        trains = sum(self._forward(size, trained) for size in (self._policy, self._value)) * batch.num_epochs
        forward = judges / (peak * hardware.forward_mfu)
        update = (4 if self.recompute(learners) is True else 3) * trains / (peak * hardware.train_mfu)
        around, gbs = (learners - 1) / learners, hardware.reduce_gbs * 1e9
        if self._sharded:  # once for a forward pass, twice for one with gradient, whose gradients are summed then
            whole = around * _GATHERED_BYTES / gbs / learners
            passes = batch.prompts * batch.samples_per_prompt / batch.annotate_rows
            forward = max(forward, (self._frozen + self._value) * whole * passes)
            passes = batch.rows * batch.num_epochs / batch.rows_of_pass
            update = max(update, (2 + model.gradient_bytes / _GATHERED_BYTES) * self._trained * whole * passes)
        summed = 2 * around * self._trained * model.gradient_bytes / gbs
        passes = 3 if self.recompute(learners) else 2  # its backward pass exchanges gradients
        exchanged = passes * self._trained * sum(trained) * batch.num_epochs
        exchanged = self._exchanged * (exchanged + (self._value + self._shared) * sum(scored))
        exchanged /= self._policy * learners * gbs
        return forward + update + exchanged + summed * batch.num_epochs * batch.num_mini_batches

    @property
    def _exchanged(self) -> float:
        """Bytes that a learner sends for each of its tokens in a forward pass of the policy, if learners share rows:
        queries, keys, values and what attention returns, in each block. Keys and values have as many heads as there are
        learners, or more.
        """
        model, shared = self.model, self.model.context_parallel
        queries = model.attention_width or shape_of(model).hidden
        keys = min(queries, max(model.kv_width, shared * _HEAD))
        each = 2 if self._bf16 else 4
        return (shared - 1) / shared * model.layers * 2 * (queries + keys) * each

    @property
    def _shared(self) -> float:
        """Parameters of the frozen models that learners compute and whose rows they share: not of the reward model."""
        return 0.0 if self.model.frozen_devices else self._judges[0]

    def _attention(self, seen: float) -> float:
        """Operations of attention for a token that sees so many, without what is in the weights: scores and their sums
        of values, in every block.
        """
        return 4 * self.model.layers * (self.model.attention_width or shape_of(self.model).hidden) * seen

    def _forest(self, prompts: int, samples: int, parts: int = 1) -> tuple[float, float]:
        """Tokens of prompts and of completions that passes compute: each prompt once for all of its samples, which are
        in this many parts of a batch by chance; or for each, where rows are padded.
        """
        together = parts * (1 - (1 - 1 / parts) ** samples) if self._bf16 else samples
        return prompts * together * self.batch.prompt_tokens, prompts * samples * self.batch.response_tokens

    def _forward(self, parameters: float, tokens: tuple[float, float]) -> float:
        """Operations of a forward pass over tokens of prompts and completions, by the policy or a model of another
        size.
        """
        before, after = self.batch.prompt_tokens, self.batch.response_tokens
        seen = zip(tokens, (before / 2, before + after / 2), strict=True)
        operations = sum(count * (2 * self._active + self._attention(each)) for count, each in seen)
        return operations * parameters / self._policy

    def _keys(self, samples: int) -> float:
        """Keys of a pass for each of its tokens: of every sample those of its prompt too, which stands there once."""
        prompt, response = self.batch.longest_prompt, self.batch.response_length
        return min(KEYS, samples * (prompt + response) / (prompt + samples * response)) if self._bf16 else 0.0

    @property
    def _policy(self) -> float:
        assert self.model.parameters is not None
        return self.model.parameters

    @property
    def _active(self) -> float:
        """Parameters of the policy that a token meets: three matrices for each expert."""
        model = self.model
        rest = model.experts - model.experts_per_token
        return self._policy - (3 * model.layers * rest * model.hidden * model.feed_forward if rest else 0)  # type: ignore

    @property
    def _judges(self) -> list[float]:
        """Parameters of reference and reward model."""
        both = (self.model.reference_parameters, self.model.reward_parameters)
        return [self._policy if parameters is None else parameters for parameters in both]

    @property
    def _here(self) -> list[float]:
        """Parameters of those on the learners."""
        return [] if self.model.frozen_devices else self._judges

    @property
    def _frozen(self) -> float:
        return sum(self._here)

    @property
    def _value(self) -> float:
        """Parameters of the value model."""
        parameters = self.model.value_parameters
        return parameters if parameters is not None else self._policy if self.batch.values else 0.0

    @property
    def _trained(self) -> float:
        return self._policy + self._value

    @property
    def _sharded(self) -> bool:
        """Whether the learners share all models."""
        return self.model.strategy in ("fsdp", "zero3")

    @property
    def _frozen_bytes(self) -> float:
        size = self.model.frozen_bytes
        return size if size is not None else 2.0 if self._bf16 else 4.0

    @property
    def _bf16(self) -> bool:
        return self.batch.bf16 if self.model.bf16 is None else self.model.bf16

    @property
    def _published_bytes(self) -> float:
        return self.model.generator_bytes or self.batch.generator_bytes

    def _room(self) -> float:
        return self.hardware.memory_gb * 1e9 * self.hardware.memory_share

    def _weights(self) -> float:
        return self._policy * self._published_bytes

    def learner_bytes(self, learners: int) -> tuple[float, float]:
        """Bytes on each of this many learners: what it holds between batches, and at its peak."""
        if self.model.activations_gb is None:
            recompute = self.recompute(learners)
            held = sum(memory.held() for memory in self.memories(learners, recompute))
            return held, max(self.phases(learners, recompute).values())
        held = self.model.learner_bytes * self._trained + self._frozen_bytes * self._frozen
        held /= learners if self._sharded else 1
        return held, held + self.model.activations_gb * 1e9

    def recompute(self, learners: int) -> bool | str:
        """Whether this many learners compute activations again: as configured, or else as a run decides it."""
        asked = self.batch.recompute if self.model.recompute is None else self.model.recompute
        if asked is not None or self.model.activations_gb is not None:
            return asked or False
        room = min(self._room(), USED * self.hardware.memory_gb * 1e9)
        least = (again for again in (False, "selective") if self.phases(learners, again)["update"] <= room)
        return next(least, True)

    def phases(self, learners: int, recompute: bool | str) -> dict[str, float]:
        """Bytes of each of this many learners at the peak of each phase."""
        each = [memory.phases() for memory in self.memories(learners, recompute)]
        return {name: sum(phases[name] for phases in each) for name in each[0]}

    def memories(self, learners: int, recompute: bool | str) -> list[LearnerMemory]:
        """Of the policy with the frozen models, and of the value model, which is trained in the same passes."""
        policy = self.memory(learners, recompute)
        value = replace(policy, shape=replace(policy.shape, parameters=self._value), frozen=0.0)
        return [policy, value] if self._value else [policy]

    def memory(self, learners: int, recompute: bool | str) -> LearnerMemory:
        """What each of this many learners holds, term by term."""
        model, batch = self.model, self.batch
        tokens = batch.longest_prompt + batch.response_length
        annotate, update = (
            Pass(rows * tokens, rows * batch.response_length, rows * tokens * self._keys(samples))
            for rows, samples in (
                (batch.annotate_rows, batch.samples_per_prompt),
                (batch.train_rows, batch.trained_per_prompt),
            )
        )
        return LearnerMemory(
            shape_of(model),
            self._frozen,
            learners,
            self._sharded,
            recompute,
            self._bf16,
            annotate,
            update,
            self._frozen_bytes,
            model.learner_bytes,
            int(model.strategy[4:]) if model.strategy.startswith("zero") else 0,
            model.context_parallel,
        )


def shape_of(model: ModelSizeConfig) -> Shape:
    """The sizes, with no field open."""
    assert model.parameters is not None
    embeddings = model.vocabulary * (1 if model.tied else 2)
    # parameters = 12 x layers x hidden^2 + embeddings x hidden
    root = math.sqrt(embeddings**2 + 48 * model.layers * model.parameters)
    hidden = model.hidden or round((root - embeddings) / (24 * model.layers))
    feed_forward = model.feed_forward or round(hidden * (3.5 if model.block == "llama" else 4))
    met = model.experts_per_token * feed_forward
    sizes = model.parameters, model.layers, hidden, model.vocabulary, model.kv_width, met, model.block, model.tied
    return Shape(*sizes, query_width=model.attention_width or 0)
