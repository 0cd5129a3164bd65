"""What all generators outside the learner's process share: they publish weights, ask workers, and check their answers.

:class:`Publisher` has the versions of the weights, :class:`~async_rlhf.generation.supervisor.Supervisor` the workers,
and :class:`RemoteGenerator` the requests and replies between the two.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.generation.audit import Agreement, differences, probe_logprobs
from async_rlhf.generation.dispatch import Arrived, Dispatcher, Worker, cut
from async_rlhf.generation.protocol import GeneratorError, Reply, Request, SamplingParams, require_answer
from async_rlhf.generation.supervisor import Supervisor, overslept
from async_rlhf.models.adapters import has_adapters
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.models.publish import BackgroundThread, NoSnapshots, Snapshots
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Group, Prompt


class Publisher:
    """The versions of the weights that workers may sample with, and what proves that they did.

    Args:
        snapshots: where workers find the weights.
        config: of the run.
        probe_steps: versions that this number divides are probed; 0 for none.
        parallel: how the policy's weights are sharded over ranks.
        trace: gets a span of what brings each version to the workers.
    """

    policy: PreTrainedModel
    """That was published last."""

    def __init__(
        self, snapshots: Snapshots, config: OnlineConfig, probe_steps: int, parallel: Parallel, trace: Trace
    ) -> None:
        self.snapshots, self.parallel, self._trace = snapshots, parallel, trace
        self.newest = -1
        self.thread = BackgroundThread("publisher")
        self._probe_steps, self._autocast = probe_steps, autocast_dtype(config)
        self._dtype = getattr(torch, config.generation.weights_dtype)
        self._probes: dict[int, list[float]] = {}
        self._digests: dict[int, Mapping[str, str]] = {}
        """Of versions that nobody has asked for: at the end of a batch there are no more than two."""

    def digests(self, version: int) -> Mapping[str, str]:
        """See :class:`~async_rlhf.generation.protocol.Generator`."""
        if version not in self._digests:  # the last version of a run, maybe, behind which none was published
            self.thread.finish()
        return self._digests.pop(version, {})

    def publish(self, policy: PreTrainedModel, version: int) -> None:
        """Copy the weights. A thread brings the copy to where the workers find it; until then they wait for it."""
        parallel, snapshots = self.parallel, self.snapshots
        parallel.ranks.barrier(f"publishing version {version}")
        self.thread.finish()  # one version at a time is on its way
        self.policy, self.newest = policy, version
        snapshots.publish(policy, version, parallel, self.thread)
        self.thread(partial(self._end, version))
        self._probes = {v: logprobs for v, logprobs in self._probes.items() if v in snapshots.published}
        if self._probe_steps > 0 and version % self._probe_steps == 0 and parallel.takes_part:
            self._probes[version] = probe_logprobs(policy, self._autocast, parallel)

    def _end(self, version: int) -> None:
        """Note that a version is available, in the thread."""
        if self.parallel.ranks.is_main:
            self._digests[version] = self.snapshots.published.get(version, {})
        if self.thread.began is not None:
            self._trace.add("hand out", self.thread.began, time.monotonic(), "publisher", version=version)
        self.thread.began = None

    def may_probe(self, version: int | None) -> bool:
        """Whether those that sample with this version, or with the newest, can be asked for the probe."""
        return version is None or version in self._probes

    def probe_difference(self, replies: Sequence[tuple[str, Reply]], agreement: Agreement) -> float | None:
        """How far the probes of replies are from the learner's own, in nats per token, at most; None without any.

        Raises:
            GeneratorError: farther than rounding explains.
        """
        probed: list[Tensor] = []
        for label, reply in replies:
            if reply.probe is not None and reply.probe[0] in self._probes:
                version, logprobs = reply.probe
                found_N = differences(logprobs, self._probes[version])
                # How many workers were probed depends on timing; workers that compute alike are one measurement.
                if any(torch.equal(found_N, other_N) for other_N in probed):
                    continue
                agreement.probe_noise.require(f"{label} holds the weights of version {version}", found_N, "the probe")
                probed.append(found_N)
        return max((found_N.mean().item() for found_N in probed), default=None)

    def weights(self, index: int, version: int) -> Mapping[str, Tensor | None]:
        """A version's tensors; none where the policy still has those very numbers, when a batch is collected."""
        if version == index - 1 == self.newest and self.policy.dtype == self._dtype and not has_adapters(self.policy):
            return {}
        return self.snapshots.views(version)

    def close(self) -> None:
        """End the thread, and let go of the snapshots."""
        self.thread.close()
        self.snapshots.close()


class _Asked(NamedTuple):
    """What workers were asked for, and what came back."""

    prompts: Sequence[Prompt]
    firsts: list[int]
    """The number of each request's first prompt."""
    replies: dict[int, tuple[str, Reply]]
    """By request: who answered, and what."""


class RemoteGenerator:
    """Workers that sample the requests of every batch, each the next one when it is free; subclasses make them.

    Only rank 0 has workers. The other ranks use this class itself, without workers. With weights that are loaded in
    flight a worker that :attr:`streams` has so many requests at a time that its places are full, of whichever batches.
    A worker that dies or hangs is started again, and others take what it had; the weights are still there.

    Args:
        config: of the run.
        policy: what they sample from.
        params: how to sample.
        trace: records generation.
        parallel: how the policy's weights are sharded over ranks.
    """

    streams = False
    """Whether a worker can sample several requests at a time."""
    kind = "generator"
    """What messages call a worker."""
    grows = False
    """Whether workers can be added and stopped."""
    unstartable: type[Exception] = GeneratorError
    """What a worker raises when it cannot be started at all."""

    def __init__(
        self,
        config: OnlineConfig,
        policy: PreTrainedModel,
        params: SamplingParams,
        trace: Trace,
        parallel: Parallel = ALONE,
    ) -> None:
        self.parallel, self.trace, self.params = parallel, trace, params
        self.config, self.vocabulary = config.generation, policy.get_input_embeddings().num_embeddings
        self.arrived: queue.SimpleQueue[Arrived | None] = queue.SimpleQueue()
        """Where the workers put what comes from them."""
        self.snapshots, number = self.prepare(config, policy)
        self.publisher = Publisher(self.snapshots, config, self.config.probe_steps, parallel, trace)
        streaming = self.streams and self.config.in_flight
        self._shares = self.config.shares
        self._size = self.config.prompts_per_request or (1 if streaming else None)
        self._lanes = config.staleness + 1 if streaming else 0
        dtype = getattr(torch, self.config.weights_dtype)
        self.agreement = Agreement(self.config, params, dtype, autocast_dtype(config), parallel, config.staleness)
        self._submitted = 0
        """The batch that was submitted last."""
        self._asked: dict[int, _Asked] = {}
        """By batch, or minus the version that is evaluated."""
        self.on_arrival: Callable[[int, int, Sequence[Group]], None] | None = None
        """Called as soon as all completions of a request are here, in any thread and before they are checked."""
        self._answers: queue.SimpleQueue[tuple[Worker, Request, Reply] | BaseException] = queue.SimpleQueue()
        self.supervisor = Supervisor(
            self.kind,
            self.config,
            make=self.make,
            number=number,
            per_worker=_in_flight(self._size, params) if streaming else 1,
            arrived=self.arrived,
            trace=trace,
            on_reply=self._on_reply,
            on_error=self._answers.put,
            unstartable=self.unstartable,
        )
        self.supervisor.start()

    @property
    def workers(self) -> Sequence[Any]:
        """Those there are now."""
        return self.supervisor.workers

    @property
    def dispatcher(self) -> Dispatcher:
        """Gives them requests."""
        return self.supervisor.dispatcher

    def prepare(self, config: OnlineConfig, policy: PreTrainedModel) -> tuple[Snapshots, int]:
        """Where the workers find the weights, and how many of them :meth:`make` is to make."""
        return NoSnapshots(getattr(torch, self.config.weights_dtype), config.lora.publish == "adapter"), 0

    def make(self, number: int) -> Worker:
        """A new worker, already starting."""
        raise NotImplementedError

    def publish(self, policy: PreTrainedModel, version: int) -> None:
        """See :meth:`Publisher.publish`."""
        self.publisher.publish(policy, version)

    def submit(self, index: int, version: int | None, prompts: Sequence[Prompt]) -> None:
        """Cut the batch into requests, of which each free worker takes the next."""
        self._submit(index, version, prompts)
        self._submitted = index

    def submit_evaluation(self, version: int, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """The same with held-out prompts, behind the batches that were submitted before."""
        self._submit(-version, version, prompts, params)

    def collect_evaluation(self, version: int) -> tuple[Group, ...]:
        """Wait for every request of them; raises what :meth:`collect` does."""
        with self.trace.span("wait", evaluation=version):
            replies = self._wait_for_replies(-version)
            self.parallel.ranks.barrier(f"answers of version {version}")
        if self.parallel.ranks.is_main:
            self.dispatcher.idle_share(-version)
        return self._groups(-version, replies)

    def _submit(
        self, index: int, version: int | None, prompts: Sequence[Prompt], params: SamplingParams | None = None
    ) -> None:
        # Held-out prompts may be few, and are not sampled in flight.
        size = self._size if params is None else self.config.prompts_per_request
        parts = cut(prompts, min(self._shares, len(prompts)), size)
        self._asked[index] = _Asked(prompts, [0, *accumulate(map(len, parts))][: len(parts)], {})
        # The workers have what episodes need since their start.
        sent_params, requests = params and replace(params, episodes=None), []
        in_flight = self.config.in_flight and params is None
        probe = self.config.probe_steps if params is None and self.publisher.may_probe(version) else 0
        after = self.publisher.newest if version is None else version
        for number, part in enumerate(parts):
            # The columns stay here: they may be large, and only rewards and environments need them.
            bare = (replace(prompt, columns={}, messages=None) for prompt in part)
            sent = tuple(bare if self.params.episodes is None else part)
            requests.append(
                Request(index, number, version, sent, probe, in_flight, sent_params, self._submitted, after)
            )
        self.dispatcher.add(requests)

    def collect(self, index: int) -> Batch:
        """Wait for every request of the batch.

        Raises:
            GeneratorError: a worker raised, all died too often, one answered with other weights, or none answered.
        """
        replies = self._wait_for_replies(index)
        statistics = self.parallel.ranks.broadcast(
            f"completions of batch {index}", lambda: self._statistics(index, replies)
        )
        seconds, versions, idle = statistics
        self._trace_lanes(index, replies)
        groups = self._groups(index, replies)
        metrics = self._measure(index, replies, groups) | {"time/generate_idle_share": idle} | _occupancy(replies)
        if self.params.episodes is not None:
            metrics["time/environment"] = sum(reply.environment_seconds for _, reply in replies)
        return Batch(index, min(versions), groups, seconds, versions, metrics)

    def _on_reply(self, worker: Worker, reply: Reply) -> None:
        """Give the worker its next request at the moment that its reply arrives, in the keeper: :meth:`collect` may be
        called much later.
        """
        request = self.dispatcher.answered(worker, reply.batch, reply.number)
        if self.on_arrival is not None:
            asked = self._asked[request.batch]
            first = asked.firsts[request.number]
            prompts = asked.prompts[first : first + len(request.prompts)]
            if len(prompts) == len(reply.completions):  # else collect() says what is wrong
                groups = tuple(Group(p, c) for p, c in zip(prompts, reply.completions, strict=True))
                self.on_arrival(request.batch, first, groups)
        self._answers.put((worker, request, reply))

    def _wait_for_replies(self, index: int) -> list[tuple[str, Reply]]:
        """Every request's reply, in order, and who gave it."""
        replies, count = self._asked[index].replies, len(self._asked[index].firsts)
        deadline = time.monotonic() + self.config.timeout
        while len(replies) < count:
            self.publisher.thread.require()
            answered = self._receive(deadline - time.monotonic())
            if answered:
                deadline = time.monotonic() + self.config.timeout
        return [replies[number] for number in range(count)]

    def _groups(self, index: int, replies: Sequence[tuple[str, Reply]]) -> tuple[Group, ...]:
        completions = [group for _, reply in replies for group in reply.completions]
        return tuple(Group(p, c) for p, c in zip(self._asked.pop(index).prompts, completions, strict=True))

    def _trace_lanes(self, index: int, replies: Sequence[tuple[str, Reply]]) -> None:
        """Requests that are under way together get one span for each worker and batch, on one of S + 1 tracks."""
        if not self._lanes:
            return
        for label in dict.fromkeys(label for label, _ in replies):
            mine = [reply for other, reply in replies if other == label]
            started, ended = min(reply.started for reply in mine), max(reply.ended for reply in mine)
            track = f"{label}, {index % self._lanes + 1} of {self._lanes}"
            self.trace.add("generate", started, ended, track, batch=index, version=min(map(_oldest, mine)))

    def _statistics(self, index: int, replies: Sequence[tuple[str, Reply]]) -> tuple[float, tuple[int, ...], float]:
        """The seconds that completions took, the oldest version in each request, and the workers' idle share."""
        seconds = max(reply.ended for _, reply in replies) - min(reply.started for _, reply in replies)
        return seconds, tuple(_oldest(reply) for _, reply in replies), self.dispatcher.idle_share(index)

    def digests(self, version: int) -> Mapping[str, str]:
        """See :class:`~async_rlhf.generation.protocol.Generator`."""
        return self.publisher.digests(version)

    def close(self) -> None:
        """End the workers, and the thread that publishes."""
        self.supervisor.close()
        self.publisher.close()

    def follow(self, folder: Path) -> None:
        """Have as many workers as are asked for in a run's folder, if they can be added and stopped."""
        if self.grows:
            self.supervisor.follow(folder)

    def _receive(self, seconds: float) -> bool:
        """Wait for an answer, but wake up in between to see whether this process itself was stopped."""
        asked, pause = time.monotonic(), min(max(seconds, 0.0), self.supervisor.look_seconds)
        try:
            answer = self._answers.get(timeout=pause)
        except queue.Empty:
            if overslept(asked, pause):
                return True
            if seconds <= pause:
                raise self._no_answer() from None
            return False
        if isinstance(answer, BaseException):
            raise answer
        self._record(*answer)
        return True

    def _no_answer(self) -> GeneratorError:
        numbers = ", ".join(str(worker.number) for worker in self.supervisor.busy())
        return GeneratorError(
            f"no answer from {self.kind} {numbers} for {self.config.timeout:g} s (generation.timeout)"
        )

    def _record(self, worker: Worker, request: Request, reply: Reply) -> None:
        """Note an answer, once it has proven its weights."""
        published = self.publisher.snapshots.published
        require_answer(worker.label, request, reply, self.params, self.vocabulary, published)
        self._asked[request.batch].replies[request.number] = (worker.label, reply)
        loaded = reply.started + reply.load_seconds
        self.trace.add("load", reply.started, loaded, worker.label, version=reply.version)
        if request.params is None and not self._lanes:
            self.trace.add("generate", loaded, reply.ended, worker.label, batch=reply.batch, version=reply.version)
        elif request.params is not None:
            self.trace.add("evaluate", loaded, reply.ended, worker.label, version=reply.version)

    def _measure(self, index: int, replies: Sequence[tuple[str, Reply]], groups: tuple[Group, ...]) -> dict[str, float]:
        """Require that the engine computes and draws what the learner would, and return how far they differ."""
        probed, weights = (
            self.publisher.probe_difference(replies, self.agreement),
            partial(self.publisher.weights, index),
        )
        worst = {} if probed is None else {"weights/probe_difference": probed}
        with self.trace.span("mismatch", batch=index):
            return worst | self.agreement.measure(index, self.publisher.policy, weights, groups)


def _in_flight(size: int | None, params: SamplingParams) -> int:
    """Requests that fill the places of a worker, and an eighth more that wait for places that become free; twice as
    many with environments, for which some wait at any time.
    """
    prompts = max(1, params.batch_size // params.samples_per_prompt) * (1 if params.episodes is None else 2)
    requests = math.ceil(prompts / (size or 1))
    return requests + max(1, requests // 8)


def _occupancy(replies: Sequence[tuple[str, Reply]]) -> dict[str, float]:
    """The share of the places for completions that were taken, if the engines can tell."""
    taken, places = (sum(reply.occupancy[i] for _, reply in replies) for i in (0, 1))
    return {"time/generate_places_taken": taken / places} if places else {}


def _oldest(reply: Reply) -> int:
    """Version of the first tokens. In flight, newer weights may have come between the start and the first token."""
    first = (int(s.versions[s.sampled.argmax()]) for group in reply.completions for s in group)
    return min(first, default=reply.version)
