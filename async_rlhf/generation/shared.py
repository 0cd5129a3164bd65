"""Sampling from the policy that is being trained, by all ranks of the learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from async_rlhf.generation.protocol import Completions, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.parallel import spread_of
from async_rlhf.ranks import Ranks
from async_rlhf.types import Prompt


class SharedEngine:
    """Each rank samples for its share of the prompts; who samples what makes no difference to the completions.

    Where the weights are spread over the ranks, each forward pass needs all of them, and they all sample everything, in
    step.

    Args:
        engine: on this rank's policy.
        ranks: who samples.
        name: what the ranks call this engine.
    """

    def __init__(self, engine: TransformersEngine, ranks: Ranks, name: str) -> None:
        self.engine, self.ranks, self.name = engine, ranks, name

    @property
    def model(self) -> PreTrainedModel:
        """The policy."""
        return self.engine.model

    @property
    def params(self) -> SamplingParams:
        """How it samples."""
        return self.engine.params

    @property
    def version(self) -> int:
        """Of the weights, as rank 0 counts them."""
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.version = version

    def generate(self, prompts: Sequence[Prompt], version: int | None = None) -> Completions:
        """See :class:`~async_rlhf.generation.protocol.Engine`. Ranks but the first are told the version."""
        if version is not None:
            self.version = version
        stripped = [replace(prompt, columns={}) for prompt in prompts] if self.ranks.count > 1 else prompts
        with self.ranks.calling(self.name, stripped, self.version):
            if spread_of(self.model) is not None:
                return self.engine.generate(stripped)
            count, rank = self.ranks.count, self.ranks.rank
            share = stripped[rank * len(prompts) // count : (rank + 1) * len(prompts) // count]
            return [completions for part in self.ranks.gather(self.engine.generate(share)) for completions in part]
