"""The schedule: which weights sample which batch, and in which order.

Version v is the weights after training on v batches. With staleness S, batch b (from 1) is sampled by version
max(0, b - 1 - S). Publishing version v therefore allows exactly the batches that it has to sample: batches 1 to
S + 1 for version 0, batch v + 1 + S for every later one. So at most S + 1 batches are under way at any time,
and a batch that is too stale cannot exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def batches_for(version: int, staleness: int, num_batches: int, start: int = 0) -> range:
    """The batches that these weights sample: the inverse of :func:`version_for`.

    The weights that a run starts from, version ``start``, fill the pipeline: batches start + 1 to start + 1 + S.
    """
    first = start + 1 if version == start else version + 1 + staleness
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
        start: batches trained on before, by a run that is resumed here.
        ahead: what that run had sampled for the batches after them.
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
        start: int = 0,
        ahead: Sequence[RolloutBatch] = (),
    ) -> None:
        self.generator = generator
        self.prompts = prompts
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.staleness = staleness
        self.trace = trace
        self.start = start
        self._ahead = {batch.index: batch for batch in ahead}
        self._versions = {batch.index: batch.version for batch in ahead}

    def __iter__(self) -> Iterator[RolloutBatch]:
        for index in range(self.start + 1, self.num_batches + 1):
            self._collect(index)
            del self._versions[index]
            yield self._ahead.pop(index)

    def ahead(self, trained: int) -> list[RolloutBatch]:
        """The batches that older weights than version ``trained`` sample, for a checkpoint after that batch.

        Waits for them. Those weights are gone when the run is resumed; version ``trained`` itself is in the checkpoint,
        and what it samples can be sampled again.
        """
        older = [index for index, version in self._versions.items() if index > trained > version]
        for index in older:
            self._collect(index)
        return [self._ahead[index] for index in sorted(older)]

    def _collect(self, index: int) -> None:
        if index not in self._ahead:
            with self.trace.span("wait", batch=index):
                batch = self.generator.collect(index)
            self._check(batch)
            self._ahead[index] = batch

    def publish(self, policy: nn.Module, version: int) -> None:
        """Hand out numbered weights, and have them sample what they have to. Without a batch to sample, nothing."""
        due = batches_for(version, self.staleness, self.num_batches, self.start)
        batches = [index for index in due if index not in self._ahead]
        if len(batches) == 0:
            return
        with self.trace.span("publish", version=version):
            self.generator.publish(policy, version)
        for index in batches:
            self._versions[index] = version
            self.generator.submit(index, version, self.prompts.batch(index, self.batch_size))

    def _check(self, batch: RolloutBatch) -> None:
        expected = self._versions[batch.index]
        found = {v for group in batch.groups for rollout in group.rollouts for v in rollout.versions}
        if found != {expected}:
            raise StaleWeightsError(
                f"batch {batch.index} must be sampled by version {expected} (staleness {self.staleness}); "
                f"its tokens come from version {', '.join(map(str, sorted(found)))}"
            )
