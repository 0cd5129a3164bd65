"""What all generators outside the learner's process share: numbered snapshots, units of a batch, proof of both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.generation.agreement import Agreement
from async_rlhf.generation.dispatch import Dispatcher, Worker, cut
from async_rlhf.generation.messages import Reply, Request, work
from async_rlhf.generation.probe import differences, probe_logprobs
from async_rlhf.generation.protocol import GeneratorError, SamplingParams, Version
from async_rlhf.generation.replies import check_completions, fingerprint
from async_rlhf.models.adapters import has_adapters
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.models.leaving import Beside, Work
from async_rlhf.models.ring_shares import RingShares, agree
from async_rlhf.models.snapshots import NoSnapshots, SnapshotRing, Snapshots
from async_rlhf.models.weights import differing
from async_rlhf.ranks.parallel import Parallel
from async_rlhf.reports.trace import Trace
from async_rlhf.types import Batch, Group, Prompt, drawn_versions


class RemoteGenerator:
    """Workers that sample the units of every batch, each the next one when it is free; subclasses wait for them.

    Only rank 0 has workers. The other ranks use this class itself, without workers. With weights that are loaded in
    flight a worker that :attr:`streams` has so many units at a time that its places are full, of whichever batches.

    Args:
        config: of the run.
        policy: what they sample from.
        params: how to sample.
        trace: records generation.
        parallel: how the policy's weights are sharded over ranks.
        snapshots: where the workers find the weights.
        workers: at least one on rank 0.
    """

    at_once = False
    streams = False
    """Whether a worker can sample several units at a time."""

    def __init__(
        self,
        config: OnlineConfig,
        policy: PreTrainedModel,
        params: SamplingParams,
        trace: Trace,
        parallel: Parallel,
        snapshots: Snapshots,
        workers: Sequence[Worker] = (),
    ) -> None:
        self.parallel = parallel
        self.workers = workers
        self.snapshots = snapshots
        self.config = config.generation
        streaming = self.streams and self.config.in_flight
        self._size = self.config.prompts_per_request or (1 if streaming else None)
        self.dispatcher = Dispatcher(workers, at_once=_in_flight(self._size, params) if streaming else 1)
        self._lanes = config.staleness + 1 if streaming else 0
        self.trace = trace
        self._autocast = autocast_dtype(config)
        self._publisher, self._newest = Beside("publisher"), -1
        self._shares: RingShares | None = None
        self._handed_out: dict[int, float] = {}
        """When the publisher began with a version."""
        self._probing = self.config.probe_steps > 0
        self._params, self._vocabulary = params, policy.get_input_embeddings().num_embeddings
        dtype = getattr(torch, self.config.dtype)
        self.agreement = Agreement(self.config, params, dtype, self._autocast, parallel, config.staleness)
        self._published_as_is = policy.dtype == dtype and not has_adapters(policy)
        self._policy: PreTrainedModel | None = None
        self._probes: dict[int, list[float]] = {}
        self._submitted = 0
        """The batch that was submitted last."""
        self._prompts: dict[int, Sequence[Prompt]] = {}
        """By batch, or minus the version that is evaluated; as units and replies."""
        self._firsts: dict[int, list[int]] = {}
        """By batch: the number of each unit's first prompt."""
        self._replies: dict[int, dict[int, tuple[str, Reply]]] = {}
        """By batch and unit: who answered, and what."""
        self.on_arrival: Callable[[int, int, Sequence[Group]], None] | None = None
        """Called as soon as all completions of a unit are here, in any thread and before they are checked."""

    def publish(self, policy: PreTrainedModel, version: int) -> None:
        """Copy the weights. A thread brings the copy to where the workers find it; until then they wait for it."""
        self.parallel.ranks.meet(f"publishing version {version}")
        self._publisher.finish()  # one version at a time is on its way
        if self._newest < 0:
            self._agree_on_shares(policy)
        self._policy, self._newest = policy, version
        self.snapshots.publish(policy, version, self.parallel, partial(self._beside, version))
        self._publisher(partial(self._trace_publisher, version))
        self._probes = {v: logprobs for v, logprobs in self._probes.items() if v in self.snapshots.published}
        if self._probing and version % self.config.probe_steps == 0 and self.parallel.takes_part:
            self._probes[version] = probe_logprobs(policy, self._autocast, self.parallel)

    def _agree_on_shares(self, policy: PreTrainedModel) -> None:
        """Have each rank write its own share of the weights, if all of them can."""
        snapshots = self.snapshots
        if self.parallel.spreads_weights:
            ring = snapshots.for_others if isinstance(snapshots, SnapshotRing) else lambda: None
            self._shares = agree(policy, self.parallel, ring)
            if isinstance(snapshots, (SnapshotRing, NoSnapshots)):
                snapshots.shares = self._shares

    def _beside(self, version: int, work: Work) -> Future[None]:
        """Have a part of publishing done beside training."""

        def timed() -> None:
            self._handed_out.setdefault(version, time.monotonic())
            work()

        return self._publisher(timed)

    def _trace_publisher(self, version: int) -> None:
        if (started := self._handed_out.pop(version, None)) is not None:
            self.trace.add("hand out", started, time.monotonic(), "publisher", version=version)

    def submit(self, index: int, version: Version, prompts: Sequence[Prompt]) -> None:
        """Cut the batch into units, of which each free worker takes the next."""
        self._submit(index, version, prompts)
        self._submitted = index

    def submit_evaluation(self, version: int, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """The same with held-out prompts, behind the batches that were submitted before."""
        self._submit(-version, version, prompts, params)

    def collect_evaluation(self, version: int) -> tuple[Group, ...]:
        """Wait for every unit of them; raises what :meth:`collect` does."""
        with self.trace.span("wait", evaluation=version):
            replies = self._await(-version)
            self.parallel.ranks.meet(f"answers of version {version}")
        if self.parallel.ranks.leads:
            self.dispatcher.idle_share(-version)
        completions = [group for _, reply in replies for group in reply.completions]
        return tuple(Group(p, c) for p, c in zip(self._prompts.pop(-version), completions, strict=True))

    def _submit(
        self, index: int, version: Version, prompts: Sequence[Prompt], params: SamplingParams | None = None
    ) -> None:
        # Held-out prompts may be few, and are not sampled in flight.
        size = self._size if params is None else self.config.prompts_per_request
        parts = cut(prompts, min(self.config.shares, len(prompts)), size)
        self._prompts[index], self._replies[index] = prompts, {}
        self._firsts[index] = [0, *accumulate(map(len, parts))][: len(parts)]
        requests = []
        for unit, part in enumerate(parts):
            own = version[unit] if isinstance(version, tuple) else version
            # The columns stay here: they may be large, and only rewards need them.
            stripped = tuple(replace(prompt, columns={}) for prompt in part)
            probe = self.config.probe_steps if (own is None or own in self._probes) and params is None else 0
            in_flight = self.config.in_flight and params is None
            after = self._newest if own is None else own
            requests.append(Request(index, unit, own, stripped, probe, in_flight, params, self._submitted, after))
        self.dispatcher.add(requests)

    def collect(self, index: int) -> Batch:
        """Wait for every unit of the batch.

        Raises:
            GeneratorError: a worker raised, all died too often, one answered with other weights, or none answered.
        """
        replies = self._await(index)
        course = self.parallel.ranks.from_lead(f"completions of batch {index}", lambda: self._course(index, replies))
        seconds, versions, idle = course
        self._trace_lanes(index, replies)
        completions = [group for _, reply in replies for group in reply.completions]
        groups = tuple(Group(p, c) for p, c in zip(self._prompts.pop(index), completions, strict=True))
        metrics = self._measure(index, replies, groups) | {"time/generate_idle_share": idle} | _places(replies)
        return Batch(index, min(versions), groups, seconds, versions, metrics)

    def taken(self, worker: Worker, reply: Reply) -> Request:
        """Give the worker its next unit at the moment that its answer arrives, in any thread: :meth:`collect` may be
        called much later. Returns the request that was answered.
        """
        request = self.dispatcher.answered(worker, reply.batch, reply.unit)
        if self.on_arrival is None:
            return request
        first = self._firsts[request.batch][request.unit]
        prompts = self._prompts[request.batch][first : first + len(request.prompts)]
        if len(prompts) == len(reply.completions):  # else collect() says what is wrong
            groups = tuple(Group(p, c) for p, c in zip(prompts, reply.completions, strict=True))
            self.on_arrival(request.batch, first, groups)
        return request

    def _await(self, index: int) -> list[tuple[str, Reply]]:
        """Every unit's reply, in order, and who gave it."""
        replies, units = self._replies[index], len(self._firsts[index])
        deadline = time.monotonic() + self.config.timeout
        while len(replies) < units:
            self._publisher.require()
            answered = self._wait(deadline - time.monotonic())
            if answered:
                deadline = time.monotonic() + self.config.timeout
        del self._replies[index], self._firsts[index]
        return [replies[unit] for unit in range(units)]

    def _trace_lanes(self, index: int, replies: Sequence[tuple[str, Reply]]) -> None:
        """Requests that are under way together get one span for each worker and batch, on one of S + 1 tracks."""
        if not self._lanes:
            return
        for label in dict.fromkeys(label for label, _ in replies):
            mine = [reply for other, reply in replies if other == label]
            started, ended = min(reply.started for reply in mine), max(reply.ended for reply in mine)
            track = f"{label}, {index % self._lanes + 1} of {self._lanes}"
            self.trace.add("generate", started, ended, track, batch=index, version=min(map(_oldest, mine)))

    def _course(self, index: int, replies: Sequence[tuple[str, Reply]]) -> tuple[float, tuple[int, ...], float]:
        """The seconds that completions took, the oldest version in each unit, and the workers' idle share."""
        seconds = max(reply.ended for _, reply in replies) - min(reply.started for _, reply in replies)
        return seconds, tuple(_oldest(reply) for _, reply in replies), self.dispatcher.idle_share(index)

    def close(self) -> None:
        """End the workers, and the thread that publishes."""
        for worker in self.workers:
            worker.close()
        if self._shares is not None:
            self._shares.stop()
        self._publisher.close()
        self.snapshots.close()

    def _wait(self, seconds: float) -> bool:
        """Wait this long for an answer. Returns whether one came."""
        raise NotImplementedError

    def _accept(self, worker: Worker, request: Request, reply: Reply) -> None:
        """Note an answer, once it has proven its weights."""
        self._check(worker, request, reply)
        self._replies[request.batch][request.unit] = (worker.label, reply)
        loaded = reply.started + reply.load_seconds
        self.trace.add("load", reply.started, loaded, worker.label, version=reply.version)
        if request.params is None and not self._lanes:
            self.trace.add("generate", loaded, reply.ended, worker.label, batch=reply.batch, version=reply.version)
        elif request.params is not None:
            self.trace.add("evaluate", loaded, reply.ended, worker.label, version=reply.version)

    def _check(self, worker: Worker, request: Request, reply: Reply) -> None:
        """Require the complete weights that the request names, and completions that are possible."""
        if reply.batch != request.batch or (request.version is not None and reply.version != request.version):
            raise GeneratorError(
                f"{worker.label} answered {work(reply.batch)} with weights of version {reply.version}; "
                f"{work(request.batch)} needs version {request.version}"
            )
        who = f"{worker.label} answered {work(reply.batch)}"
        if reply.asked != fingerprint(request.prompts):
            raise GeneratorError(f"{who} with completions of other prompts than it was asked for")
        check_completions(who, request.prompts, reply.completions, request.params or self._params, self._vocabulary)
        drawn = drawn_versions(sample for samples in reply.completions for sample in samples)
        for version in sorted(drawn | {reply.version}):
            wrong = differing(reply.digests.get(version, {}), self.snapshots.published[version])
            if wrong:
                raise GeneratorError(
                    f"{worker.label} sampled {work(reply.batch)} with weights that are not those of version "
                    f"{version}: {wrong}"
                )

    def _measure(self, index: int, replies: Sequence[tuple[str, Reply]], groups: tuple[Group, ...]) -> dict[str, float]:
        """Require that the engine computes and draws what the learner would, and return how far they differ."""
        assert self._policy is not None
        probed: list[Tensor] = []
        for label, reply in replies:
            if reply.probe is not None and reply.probe[0] in self._probes:
                version, logprobs = reply.probe
                found_N = differences(logprobs, self._probes[version])
                # How many workers were probed depends on timing; workers that compute alike are one measurement.
                if any(torch.equal(found_N, other_N) for other_N in probed):
                    continue
                self.agreement.probe_noise.require(
                    f"{label} holds the weights of version {version}", found_N, "the probe"
                )
                probed.append(found_N)
        worst = {"weights/probe_difference": max(found_N.mean().item() for found_N in probed)} if probed else {}
        with self.trace.span("mismatch", batch=index):
            return worst | self.agreement.measure(index, self._policy, partial(self._weights, index), groups)

    def _weights(self, index: int, version: int) -> Mapping[str, Tensor | None]:
        """A version's tensors; none where the policy still has those very numbers, when a batch is collected."""
        if self._published_as_is and version == index - 1 == self._newest:
            return {}
        return self.snapshots.views(version)


def _in_flight(size: int | None, params: SamplingParams) -> int:
    """Units that fill the places of a worker, and an eighth more that wait for places that become free."""
    prompts = max(1, params.batch_size // params.samples_per_prompt)
    units = math.ceil(prompts / (size or 1))
    return units + max(1, units // 8)


def _places(replies: Sequence[tuple[str, Reply]]) -> dict[str, float]:
    """The share of the places for completions that were taken, if the engines can tell."""
    taken, places = (sum(reply.occupancy[i] for _, reply in replies) for i in (0, 1))
    return {"time/generate_places_taken": taken / places} if places else {}


def _oldest(reply: Reply) -> int:
    """Version of the first tokens. In flight, newer weights may have come between the start and the first token."""
    first = (int(s.versions[s.sampled.argmax()]) for group in reply.completions for s in group)
    return min(first, default=reply.version)
