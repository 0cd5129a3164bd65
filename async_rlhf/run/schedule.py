"""The schedule: which weights sample which batch, and in which order.

Version v is the weights after training on v batches. With staleness S, batch b (from 1) is sampled by version
max(0, b - 1 - S). Publishing version v therefore releases exactly the batches that v must sample: batches 1 to S + 1
for version 0, batch v + 1 + S for every later one. So at most S + 1 batches are under way at any time,
and no batch can be too stale. With weights that come in flight the same batches are handed out at the same time, but a
worker begins with the newest version that there is, the schedule's or a newer one, and takes every newer one meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from async_rlhf.data.stream import PromptStream, SharedPrompts
from async_rlhf.generation.protocol import Generator, SamplingParams
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Group, Prompt, drawn_versions


class StaleWeightsError(RuntimeError):
    """Completions were sampled by weights other than those that the schedule requires."""


def version_for(batch: int, staleness: int) -> int:
    """The version of the weights that samples a batch."""
    return max(0, batch - 1 - staleness)


def batches_for(version: int, staleness: int, num_batches: int, start: int = 0) -> range:
    """The batches that a version samples: the inverse of :func:`version_for`.

    The weights that a run starts from, version ``start``, fill the pipeline: batches start + 1 to start + 1 + S.
    """
    first = start + 1 if version == start else version + 1 + staleness
    return range(first, min(version + 1 + staleness, num_batches) + 1)


class RolloutSchedule:
    """Batches of completions in order. Iterate, and publish the weights after each batch. Every rank does both.

    Args:
        generator: samples the completions.
        prompts: the prompts to sample for.
        batch_size: prompts of a batch.
        num_batches: batches in all.
        staleness: S.
        trace: records the waiting.
        in_flight: sample with the newest weights there are, at most S batches older than the schedule's newest.
        start: batches that a resumed run has already trained on.
        ahead: batches after those that it had already sampled.
        is_main: whether this is rank 0, which alone has the completions, and checks them.
    """

    def __init__(
        self,
        generator: Generator,
        prompts: PromptStream | SharedPrompts,
        *,
        batch_size: int,
        num_batches: int,
        staleness: int,
        trace: Trace,
        in_flight: bool = False,
        start: int = 0,
        ahead: Sequence[Batch] = (),
        is_main: bool = True,
    ) -> None:
        self.generator = generator
        self.prompts = prompts
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.staleness = staleness
        self.trace = trace
        self.in_flight = in_flight
        self.start = start
        self.is_main = is_main
        self._newest = -1
        self._ahead = {batch.index: batch for batch in ahead}
        self._asked = set(self._ahead)

    def __iter__(self) -> Iterator[Batch]:
        for index in range(self.start + 1, self.num_batches + 1):
            self._collect(index)
            self._asked.remove(index)
            yield self._ahead.pop(index)

    def ahead(self, trained: int) -> list[Batch]:
        """The batches under way that weights older than version ``trained`` sample, for a checkpoint after that batch.

        Blocks until they are sampled, since their weights will not exist after a resume. The newest batch is left out:
        the checkpoint holds the version that samples it.
        """
        last = trained + self.staleness
        older = sorted(index for index in self._asked if index <= last)
        for index in older:
            self._collect(index)
        return [self._ahead[index] for index in older]

    def _collect(self, index: int) -> None:
        if index not in self._ahead:
            with self.trace.span("wait", batch=index):
                batch = self.generator.collect(index)
            if self.is_main:
                self._check(batch)
            self._ahead[index] = batch

    def publish(self, policy: nn.Module, version: int) -> None:
        """Publish a version of the weights and submit the batches that it samples; do nothing if no batch needs it."""
        due = batches_for(version, self.staleness, self.num_batches, self.start)
        batches = [index for index in due if index not in self._ahead]
        # In flight, any version but the last may draw tokens.
        if not batches and not (self.in_flight and version < self.num_batches):
            return
        self._publish(policy, version)
        for index in batches:
            self._asked.add(index)
            asked = None if self.in_flight else version
            self.generator.submit(index, asked, self.prompts.batch(index, self.batch_size))

    def ask(self, policy: nn.Module, version: int, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Ask for answers to held-out prompts by exactly this version, which the policy is now, needed by a batch or
        not. They are sampled behind the batches that were submitted before.
        """
        self._publish(policy, version)
        self.generator.submit_evaluation(version, prompts, params)

    def answers(self, version: int) -> tuple[Group, ...]:
        """What :meth:`ask` asked for.

        Raises:
            StaleWeightsError: other weights have answered.
        """
        groups = self.generator.collect_evaluation(version)
        versions = drawn_versions(sample for group in groups for sample in group.samples)
        if versions - {version}:
            raise StaleWeightsError(
                f"the evaluation after batch {version} must be of version {version}; its tokens come from version "
                f"{', '.join(map(str, sorted(versions)))}"
            )
        return groups

    def _publish(self, policy: nn.Module, version: int) -> None:
        if version != self._newest:
            with self.trace.span("publish", version=version):
                self.generator.publish(policy, version)
            self._newest = version

    def _check(self, batch: Batch) -> None:
        """By the definition, whatever was handed out when."""
        versions = drawn_versions(batch.samples)
        oldest = max(self.start, version_for(batch.index, self.staleness))
        newest = batch.index - 1 if self.in_flight else oldest
        if not oldest <= min(versions) <= max(versions) <= newest:
            expected = f"{oldest} to {newest}" if self.in_flight else str(oldest)
            raise StaleWeightsError(
                f"batch {batch.index} must be sampled by version {expected} (staleness {self.staleness}); "
                f"its tokens come from version {', '.join(map(str, sorted(versions)))}"
            )
