"""Sampling in the learner's process, alternating with training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.config.engines import find
from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.generation.audit import Agreement, Comparison
from async_rlhf.generation.engines import ModelSpec, make_engine
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.protocol import Completions, Reply, Request, SamplingParams, require_answer
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.generation.worker import RequestHandler
from async_rlhf.models.adapters import only_adapter, write_base
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.models.weights import digests, iterate_weights
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
            sampled = super().generate(bare)
            return sampled if ranks.is_main else []
        first, end = (rank * len(bare) // ranks.count for rank in (ranks.rank, ranks.rank + 1))
        sampled = super().generate(bare[first:end])
        return [completions for part in ranks.collect("completions", sampled) for completions in part]


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
        return InlineGenerator(engine, PolicyWeights(), trace, agreement, config.staleness)
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
    weights = PolicyWeights(spec.dtype, adapters_only)
    return InlineGenerator(made, weights, trace, agreement, config.staleness, sleeps=sleep)


class PolicyWeights:
    """The policy's weights as they are now: of the versions that a generator may ask for, there is the newest alone.

    Args:
        dtype: of an engine that has a copy of them, to which they are rounded before anything reads them; None for
            one that samples from the policy itself.
        adapters_only: hand over only the policy's adapters.
    """

    policy: PreTrainedModel
    """That was published last."""

    def __init__(self, dtype: torch.dtype | None = None, adapters_only: bool = False) -> None:
        self._dtype, self._adapters_only = dtype, adapters_only
        self.newest = -1
        self.published: dict[int, dict[str, str]] = {}
        """The digests of the newest version, once it was asked for."""
        self.before: dict[int, dict[str, str]] = {}
        """Those of the version before."""

    def publish(self, policy: PreTrainedModel, version: int) -> None:
        """Note the version. The policy must not change until it has sampled."""
        self.before = self.published
        self.policy, self.newest, self.published = policy, version, {version: {}}

    def views(self, version: int) -> Mapping[str, Tensor]:
        """The tensors of the newest version; none for an engine that has the policy itself."""
        if version != self.newest:
            raise ValueError(f"asked for version {version}; inline weights are at {self.newest}")
        if self._dtype is None:
            return {}
        weights = dict(iterate_weights(self.policy, self._adapters_only, dtype=self._dtype))
        self.published = {version: digests(weights, folded=self.policy.device.type == "cuda")}
        return weights


class InlineGenerator:
    """An engine in the learner's process: the policy itself, or a copy that may take turns with it on a GPU.

    With staleness 0 a batch is sampled when it is collected. With more, when it is submitted: the next update changes
    the weights that are to sample it. So the samples are those of generators beside training, bit for bit.

    Args:
        engine: samples.
        weights: of the policy, for the engine.
        trace: records generation.
        agreement: compares some completions with what the learner computes for them.
        staleness: S.
        sleeps: let the engine sleep while the learner trains.
    """

    on_arrival: Callable[[int, int, Sequence[Group]], None] | None = None
    """Never called: nothing arrives beside training."""

    def __init__(
        self,
        engine: Any,
        weights: PolicyWeights,
        trace: Trace,
        agreement: Agreement,
        staleness: int = 0,
        sleeps: bool = False,
    ) -> None:
        self.engine, self.weights, self.trace, self.agreement = engine, weights, trace, agreement
        sampler = EpisodeSampler(engine, getattr(engine, "ranks", None))
        self.handler = RequestHandler(engine, weights, sampler=sampler)
        self._on_submit, self._sleeps, self._asleep = staleness > 0, sleeps, False
        self._running = not isinstance(engine, PolicyEngine)
        self._requests: dict[int, Request] = {}
        self._sampled: dict[int, tuple[Reply, Comparison | None]] = {}

    def publish(self, policy: PreTrainedModel, version: int) -> None:
        """Note the version: the weights are in place, and do not change until the batch is collected."""
        self.weights.publish(policy, version)
        if isinstance(self.engine, PolicyEngine):
            self.engine.version = version

    def submit(self, index: int, version: int | None, prompts: Sequence[Prompt]) -> None:
        """Note what to sample; :meth:`collect` does it, unless the weights will have changed by then."""
        self._requests[index] = Request(index, 0, self.weights.newest if version is None else version, tuple(prompts))
        if self._on_submit:
            self._sampled[index] = self._sample(index)

    def collect(self, index: int) -> Batch:
        """The batch, which is sampled now if it was not before."""
        reply, compared = self._sampled.pop(index) if index in self._sampled else self._sample(index)
        groups = self._groups(self._requests.pop(index), reply)
        metrics = self.agreement.judge(index, compared, self.weights.policy, groups)
        if self.engine.params.episodes is not None:
            metrics["time/environment"] = reply.environment_seconds
        return Batch(index, reply.version, groups, reply.ended - reply.started, (reply.version,), metrics)

    def _sample(self, index: int) -> tuple[Reply, Comparison | None]:
        """Sample a batch, and compare it with the learner while the policy still has these weights."""
        reply = self._answer(self._requests[index])
        self.trace.add("generate", reply.started, reply.ended, LEARNER, batch=index, version=reply.version)
        with self.trace.span("mismatch", batch=index):
            groups = self._groups(self._requests[index], reply)
            return reply, self.agreement.compare_batch(index, self.weights.policy, lambda _: {}, groups)

    def submit_evaluation(self, version: int, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Note what to sample; :meth:`collect_evaluation` does it."""
        self._requests[-version] = Request(-version, 0, version, tuple(prompts), params=params)

    def collect_evaluation(self, version: int) -> tuple[Group, ...]:
        """Sample the answers now."""
        request = self._requests.pop(-version)
        return self._groups(request, self._answer(request))

    def _answer(self, request: Request) -> Reply:
        """Sample now, awake. It is checked that the engine held the policy's weights, and what it has answered."""
        with self._awake():
            reply = self.handler.answer(request)
        vocabulary = self.weights.policy.get_input_embeddings().num_embeddings
        require_answer("the engine", request, reply, self.engine.params, vocabulary, self.weights.published)
        return reply

    @contextmanager
    def _awake(self) -> Iterator[None]:
        if isinstance(self.engine, PolicyEngine):
            with self.engine.sampling():
                yield
            return
        if self._asleep:
            self.engine.wake()
            self._asleep = False
        yield
        if self._sleeps:
            self.engine.sleep()
            self.engine.version, self._asleep = -1, True

    @staticmethod
    def _groups(request: Request, reply: Reply) -> tuple[Group, ...]:
        return tuple(Group(p, c) for p, c in zip(request.prompts, reply.completions, strict=True))

    def digests(self, version: int) -> Mapping[str, str]:
        """See :class:`~async_rlhf.generation.protocol.Generator`."""
        return (self.weights.before | self.weights.published).get(version, {})

    def close(self) -> None:
        """End an engine that has a copy of the weights."""
        self._requests.clear()
        self._sampled.clear()
        if self._running:
            self._running = False
            self.engine.close()
