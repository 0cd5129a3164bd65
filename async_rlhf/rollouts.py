"""The schedule: which weights sample which batch, and in which order.

Version v is the weights after training on v batches. With staleness S, batch b (from 1) is sampled by version
max(0, b - 1 - S). Publishing version v therefore allows exactly the batches that it has to sample: batches 1 to
S + 1 for version 0, batch v + 1 + S for every later one. So at most S + 1 batches are under way at any time,
and a batch that is too stale cannot exist.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from async_rlhf.data.stream import PromptStream
from async_rlhf.generation.protocol import Generator
from async_rlhf.reports.trace import Trace
from async_rlhf.types import RolloutBatch


class StaleWeightsError(RuntimeError):
    """Completions were sampled by other weights than the schedule says."""


def version_for(batch: int, staleness: int) -> int:
    """The weights that sample a batch."""
    return max(0, batch - 1 - staleness)


def batches_for(version: int, staleness: int, num_batches: int) -> range:
    """The batches that these weights sample: the inverse of :func:`version_for`."""
    first = 1 if version == 0 else version + 1 + staleness
    return range(first, min(version + 1 + staleness, num_batches) + 1)


class Rollouts:
    """Batches of completions in order. Iterate, and publish the weights after each batch.

    Args:
        generator: who samples.
        prompts: from where.
        batch_size: prompts of a batch.
        num_batches: batches in all.
        staleness: S.
        trace: where waiting is recorded.
    """

    def __init__(
        self,
        generator: Generator,
        prompts: PromptStream,
        *,
        batch_size: int,
        num_batches: int,
        staleness: int,
        trace: Trace,
    ) -> None:
        self.generator = generator
        self.prompts = prompts
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.staleness = staleness
        self.trace = trace

    def __iter__(self) -> Iterator[RolloutBatch]:
        for index in range(1, self.num_batches + 1):
            with self.trace.span("wait", batch=index):
                batch = self.generator.collect(index)
            self._check(batch)
            yield batch

    def publish(self, policy: nn.Module, version: int) -> None:
        """Hand out numbered weights, and have them sample what they have to. Without a batch to sample, nothing."""
        batches = batches_for(version, self.staleness, self.num_batches)
        if len(batches) == 0:
            return
        with self.trace.span("publish", version=version):
            self.generator.publish(policy, version)
        for index in batches:
            self.generator.submit(index, version, self.prompts.batch(index, self.batch_size))

    def _check(self, batch: RolloutBatch) -> None:
        expected = version_for(batch.index, self.staleness)
        found = {v for group in batch.groups for rollout in group.rollouts for v in rollout.versions}
        if found != {expected}:
            raise StaleWeightsError(
                f"batch {batch.index} must be sampled by version {expected} (staleness {self.staleness}); "
                f"its tokens come from version {', '.join(map(str, sorted(found)))}"
            )
