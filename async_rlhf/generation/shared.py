"""Sampling from the policy that is being trained, by all ranks of the learner."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.generation.protocol import Completions, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.ranks.parallel import Parallel
from async_rlhf.types import Prompt


class SharedEngine:
    """Each rank samples for its share of the prompts; the completions do not depend on which rank samples them.

    If the weights are sharded over the ranks, each forward pass needs all ranks, so all of them sample everything, in
    step.

    Args:
        engine: samples from this rank's policy.
        parallel: the ranks, and how they hold the weights.
    """

    def __init__(self, engine: TransformersEngine, parallel: Parallel) -> None:
        self.engine, self.parallel = engine, parallel

    @property
    def model(self) -> PreTrainedModel:
        """The policy."""
        return self.engine.model

    @property
    def params(self) -> SamplingParams:
        """How the policy is sampled."""
        return self.engine.params

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.version = version

    def generate(self, prompts: Sequence[Prompt]) -> Completions:
        """See :class:`~async_rlhf.generation.protocol.Engine`. Every rank must call it with the same prompts."""
        ranks = self.parallel.ranks
        ranks.meet("sampling")
        if self.parallel.spreads_weights:
            return self.engine.generate(prompts)
        share = prompts[ranks.rank * len(prompts) // ranks.count : (ranks.rank + 1) * len(prompts) // ranks.count]
        found = ranks.gather("completions", self.engine.generate(share))
        return [completions for part in found for completions in part]


def shared_engine(
    config: OnlineConfig, policy: PreTrainedModel, params: SamplingParams, parallel: Parallel
) -> SharedEngine:
    """The engine on the learner's own policy, on every rank of the learner."""
    autocast = autocast_dtype(config)
    return SharedEngine(TransformersEngine(policy, params, autocast=autocast, device=parallel.device), parallel)
