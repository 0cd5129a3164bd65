"""Sampling in the learner's process, in turn with training, from the learner's own weights."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import nn

from async_rlhf.generation.protocol import Version
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.reports.trace import LEARNER, Trace
from async_rlhf.types import Prompt, RolloutBatch, RolloutGroup


class InlineGenerator:
    """Staleness 0 without a copy of the weights: the engine samples from the very model that is trained.

    Args:
        engine: on the learner's policy.
        trace: where generation is recorded.
    """

    def __init__(self, engine: TransformersEngine, trace: Trace) -> None:
        self.engine = engine
        self.trace = trace
        self._requests: dict[int, tuple[int, Sequence[Prompt]]] = {}

    def publish(self, policy: nn.Module, version: int) -> None:
        """Only the number changes hands."""
        if policy is not self.engine.model:
            raise ValueError("inline generation samples from the learner's policy itself, and was given another model")
        self.engine.version = version

    def submit(self, index: int, version: Version, prompts: Sequence[Prompt]) -> None:
        """Note what to sample; :meth:`collect` does it."""
        if isinstance(version, tuple):
            (version,) = version
        self._requests[index] = (self.engine.version if version is None else version, prompts)

    def collect(self, index: int) -> RolloutBatch:
        """Sample the batch now."""
        version, prompts = self._requests.pop(index)
        if version != self.engine.version:
            raise ValueError(f"batch {index} asks for version {version}; inline weights are at {self.engine.version}")
        started = time.monotonic()
        completions = self.engine.generate(prompts)
        ended = time.monotonic()
        self.trace.add("generate", started, ended, LEARNER, batch=index, version=version)
        groups = tuple(RolloutGroup(p, c) for p, c in zip(prompts, completions, strict=True))
        return RolloutBatch(index, version, groups, ended - started, (version,))

    def close(self) -> None:
        """Nothing to end."""
        self._requests.clear()
