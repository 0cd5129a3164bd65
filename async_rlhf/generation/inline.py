"""Sampling in the learner's process, alternating with training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.config.engines import find
from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.generation.audit import Agreement
from async_rlhf.generation.engines import ModelSpec, make_engine
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.protocol import (
    Completions,
    Engine,
    GeneratorError,
    SamplingParams,
    check_completions,
    drawing,
)
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.adapters import only_adapter, write_base
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.models.weights import differing, digests, iterate_weights
from async_rlhf.system import random_state
from async_rlhf.system.trace import LEARNER, Trace
from async_rlhf.types import Batch, Group, Prompt


class PolicyEngine(TransformersEngine):
    """Samples from the policy that is being trained, by all ranks of the learner.

    Each rank samples for its share of the prompts; the completions do not depend on which rank samples them. If the
    weights are sharded over the ranks, each forward pass needs all ranks, so all of them sample everything, in step.

    Args:
        config: of the run.
        policy: on every rank.
        params: how to sample.
        parallel: the ranks, and how they hold the weights.
    """

    def __init__(
        self, config: OnlineConfig, policy: PreTrainedModel, params: SamplingParams, parallel: Parallel
    ) -> None:
        super().__init__(policy, params, autocast=autocast_dtype(config), device=parallel.device)
        self.parallel, self.ranks = parallel, parallel.ranks
        self.rounds, self.head_float32 = not parallel.is_sharded, config.head_float32
        self.keeps_pasts = self.keeps_pasts and parallel.ranks.count == 1  # rank 0 would compute less than the others

    def generate(self, prompts: Sequence[Prompt], progress: Callable[[int], None] | None = None) -> Completions:
        """See :class:`~async_rlhf.generation.protocol.Engine`. Every rank must call it.

        Args:
            prompts: on rank 0, which broadcasts them.
            progress: see TransformersEngine.

        Returns:
            All completions on rank 0, none on the others.
        """
        ranks = self.ranks
        if ranks.count == 1:
            return super().generate(prompts, progress)
        # Without columns, which may be large: only rewards need them.
        bare = ranks.broadcast("sampling", lambda: [replace(p, columns={}, messages=None) for p in prompts])
        if self.parallel.is_sharded:
            found = super().generate(bare)
            return found if ranks.is_main else []
        first, end = (rank * len(bare) // ranks.count for rank in (ranks.rank, ranks.rank + 1))
        found = super().generate(bare[first:end])
        return [completions for part in ranks.collect("completions", found) for completions in part]


def make_inline(config: OnlineConfig, engine: PolicyEngine, trace: Trace) -> InlineGenerator:
    """The generator in this process.

    Args:
        config: of the run.
        engine: samples from the learner's own policy; used if the engine that the run names can do that.
        trace: records generation.
    """
    policy, params, generation = engine.model, engine.params, config.generation
    supports = find(generation.engine).supports
    if "policy" in supports:
        agreement = Agreement(generation, params, torch.float32, engine.autocast, engine.parallel, config.staleness)
        return InlineGenerator(engine, trace, agreement, config.staleness)
    adapters_only, device = config.lora.publish == "adapter", policy.device
    require(not device.index, "device", str(device), f"must be the first GPU with {generation.engine} inline")
    # What sleeps drops its weights, and nothing would load those below an adapter again.
    sleep = "sleep" in supports and generation.vllm.sleep and device.type == "cuda" and not adapters_only
    spec = replace(ModelSpec.for_workers(config, policy, ALONE, device.type, None), sleeps=sleep)
    with TemporaryDirectory() as folder:
        if adapters_only:
            write_base(policy, Path(folder), spec.dtype)
            spec = replace(spec, base=folder, adapter=only_adapter(policy))
        before = random_state.capture()
        made = make_engine(spec, params)  # may seed every random generator of the process
        random_state.restore(*before)
    agreement = Agreement(generation, params, spec.dtype, spec.autocast)
    return InlineCopyGenerator(made, trace, agreement, sleep, spec.dtype, adapters_only)


class InlineGenerator:
    """No copy of the weights, no second process: the engine samples from the model being trained, between updates.

    With staleness 0 a batch is sampled when it is collected. With more, when it is submitted: the next update changes
    the weights that are to sample it. So the samples are those of generators beside training, bit for bit.

    Args:
        engine: samples from the learner's policy.
        trace: records generation.
        agreement: compares some completions with what the learner computes for them.
        staleness: S.
    """

    on_arrival: Callable[[int, int, Sequence[Group]], None] | None = None
    """Never called: nothing arrives beside training."""

    engine: Any

    def __init__(self, engine: Engine, trace: Trace, agreement: Agreement, staleness: int = 0) -> None:
        self.engine, self.trace, self.agreement = engine, trace, agreement
        self.sampler = EpisodeSampler(engine, getattr(engine, "ranks", None))
        self.at_once = staleness > 0
        self._sampled: dict[int, Batch] = {}
        self._policy: PreTrainedModel | None = None
        self._version = engine.version
        self._requests: dict[int, tuple[int, Sequence[Prompt]]] = {}
        self._evaluation: tuple[int, Sequence[Prompt], SamplingParams] | None = None

    def publish(self, policy: PreTrainedModel, version: int) -> None:
        """Note the version; the weights are already in place."""
        assert isinstance(self.engine, TransformersEngine)
        if policy is not self.engine.model:
            raise ValueError("inline generation samples from the learner's policy itself, and was given another model")
        self._policy = policy
        self._version = self.engine.version = version

    def submit(self, index: int, version: int | None, prompts: Sequence[Prompt]) -> None:
        """Note what to sample; :meth:`collect` does it, unless the weights will have changed by then."""
        self._requests[index] = (self._version if version is None else version, prompts)
        if self.at_once:
            self._sampled[index] = self._sample(index)

    def collect(self, index: int) -> Batch:
        """The batch, which is sampled now if it was not before."""
        return self._sampled.pop(index) if index in self._sampled else self._sample(index)

    def _sample(self, index: int) -> Batch:
        assert self._policy is not None
        version, prompts = self._requests.pop(index)
        if version != self._version:
            raise ValueError(f"batch {index} asks for version {version}; inline weights are at {self._version}")
        started = time.monotonic()
        completions = self._generate(prompts)
        ended = time.monotonic()
        self.trace.add("generate", started, ended, LEARNER, batch=index, version=version)
        vocabulary = self._policy.get_input_embeddings().num_embeddings
        check_completions(f"the engine answered batch {index}", prompts, completions, self.engine.params, vocabulary)
        groups = tuple(Group(p, c) for p, c in zip(prompts, completions, strict=True))
        with self.trace.span("mismatch", batch=index):
            metrics = self.agreement.measure(index, self._policy, lambda _: {}, groups)
        return Batch(index, version, groups, ended - started, (version,), metrics | self.sampler.metrics())

    def submit_evaluation(self, version: int, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Note what to sample; :meth:`collect_evaluation` does it."""
        self._evaluation = version, prompts, params

    def collect_evaluation(self, version: int) -> tuple[Group, ...]:
        """Sample the answers now."""
        asked, self._evaluation = self._evaluation, None
        if asked is None or not asked[0] == version == self._version:
            raise ValueError(f"an evaluation asks for version {version}; inline weights are at {self._version}")
        _, prompts, params = asked
        with drawing(self.engine, params):
            completions = self._generate(prompts, version)
        return tuple(Group(p, c) for p, c in zip(prompts, completions, strict=True))

    def close(self) -> None:
        """Do nothing."""
        self._requests.clear()
        self._sampled.clear()

    def _generate(self, prompts: Sequence[Prompt], evaluated: int | None = None) -> Completions:
        with self.engine.sampling():
            return self.sampler.generate(prompts, evaluated)


class InlineCopyGenerator(InlineGenerator):
    """An engine in the learner's process with a copy of the weights; on a GPU the two may take turns with the memory.

    Args:
        engine: any.
        trace: records generation.
        agreement: see InlineGenerator.
        sleep: let the engine sleep while the learner trains.
        dtype: of the engine's parameters, to which they are rounded before anything reads them.
        adapters_only: hand over only the policy's adapters.
    """

    engine: Any

    def __init__(
        self,
        engine: Any,
        trace: Trace,
        agreement: Agreement,
        sleep: bool,
        dtype: torch.dtype,
        adapters_only: bool = False,
    ) -> None:
        super().__init__(engine, trace, agreement)
        self._dtype, self._adapters_only, self._sleeps = dtype, adapters_only, sleep
        self._asleep, self._running = False, True

    def publish(self, policy: PreTrainedModel, version: int) -> None:
        """Note the policy; its weights do not change until the batch is collected."""
        self._policy, self._version = policy, version

    def _generate(self, prompts: Sequence[Prompt], evaluated: int | None = None) -> Completions:
        """Wake, load the current weights, sample, and sleep again."""
        assert self._policy is not None
        if self._asleep:
            self.engine.wake()
            self._asleep = False
        if self.engine.version != self._version:
            self._load(self._policy, self._version)
        completions = self.sampler.generate(prompts, evaluated)
        if self._sleeps:
            self.engine.sleep()
            self.engine.version, self._asleep = -1, True
        return completions

    def _load(self, policy: PreTrainedModel, version: int) -> None:
        weights = dict(iterate_weights(policy, self._adapters_only, dtype=self._dtype))
        wrong = differing(self.engine.load(weights, version), digests(weights, folded=policy.device.type == "cuda"))
        if wrong:
            raise GeneratorError(f"the engine took weights that are not those of version {version}: {wrong}")

    def close(self) -> None:
        """End the engine."""
        super().close()
        if self._running:
            self._running = False
            self.engine.close()
