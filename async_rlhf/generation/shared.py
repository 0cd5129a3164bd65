"""Sampling from the policy that is being trained, by all ranks of the learner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.generation.protocol import Completions, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.ranks.parallel import Parallel
from async_rlhf.types import Prompt

Plain = list[tuple[int, int, np.ndarray]]
"""Draw, row and tokens of some prompts, without their columns: these may be large, and only rewards need them."""


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

    @params.setter
    def params(self, params: SamplingParams) -> None:
        self.engine.params = params

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.version = version

    def generate(self, prompts: Sequence[Prompt]) -> Completions:
        """See :class:`~async_rlhf.generation.protocol.Engine`. Every rank must call it.

        Args:
            prompts: on rank 0; the others get what they sample for.

        Returns:
            All completions on rank 0, none on the others.
        """
        ranks = self.parallel.ranks
        if ranks.count == 1:
            return self.engine.generate(prompts)
        mine = _prompts(ranks.scatter("sampling", lambda: self._shares(prompts)))
        if self.parallel.spreads_weights:
            found = self.engine.generate(mine)
            return found if ranks.leads else []
        parts = ranks.collect("completions", self.engine.generate(mine))
        return [completions for part in parts for completions in part]

    def _shares(self, prompts: Sequence[Prompt]) -> list[Plain]:
        """What each rank samples for."""
        plain = [(prompt.draw, prompt.row, np.array(prompt.tokens, np.int32)) for prompt in prompts]
        count = self.parallel.ranks.count
        if self.parallel.spreads_weights:
            return [plain] * count
        return [plain[rank * len(plain) // count : (rank + 1) * len(plain) // count] for rank in range(count)]


def _prompts(plain: Plain) -> list[Prompt]:
    return [Prompt(draw, row, tuple(tokens.tolist())) for draw, row, tokens in plain]


def shared_engine(
    config: OnlineConfig, policy: PreTrainedModel, params: SamplingParams, parallel: Parallel
) -> SharedEngine:
    """The engine on the learner's own policy, on every rank of the learner."""
    autocast = autocast_dtype(config)
    return SharedEngine(TransformersEngine(policy, params, autocast=autocast, device=parallel.device), parallel)
