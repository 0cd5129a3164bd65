"""What all generators outside the learner's process share: numbered snapshots, shares of a batch, proof of both."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.generation.agreement import Agreement
from async_rlhf.generation.messages import Failure, Reply, Request
from async_rlhf.generation.probe import differences, probe_logprobs
from async_rlhf.generation.protocol import Completions, GeneratorError, SamplingParams, Version
from async_rlhf.generation.replies import check_completions, fingerprint
from async_rlhf.models.adapters import has_adapters
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.models.leaving import Beside, Work
from async_rlhf.models.snapshots import Snapshots, differing
from async_rlhf.ranks.parallel import Parallel
from async_rlhf.reports.trace import Trace
from async_rlhf.types import Batch, Group, Prompt, drawn_versions

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0


class Worker(Protocol):
    """One process or server and its open requests, in order."""

    number: int
    label: str
    open: list[Request]

    def submit(self, request: Request) -> None:
        """Send a request. Returns at once."""

    def answered(self) -> Request:
        """Remove and return the request that was just answered."""

    def close(self) -> None:
        """End it."""


class RemoteGenerator:
    """Workers that share the prompts of every batch; subclasses wait for them.

    Only rank 0 has workers. The other ranks use this class itself, without workers.

    Args:
        config: of the run.
        policy: what they sample from.
        params: how to sample.
        trace: records generation.
        parallel: how the policy's weights are sharded over ranks.
        snapshots: where the workers find the weights.
        workers: at least one on rank 0.
    """

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
        self.trace = trace
        self._autocast = autocast_dtype(config)
        self._publisher, self._newest = Beside("publisher"), -1
        self._probing = self.config.probe_steps > 0
        self._params, self._vocabulary = params, policy.get_input_embeddings().num_embeddings
        dtype = getattr(torch, self.config.dtype)
        self.agreement = Agreement(self.config, params, dtype, self._autocast, parallel, config.staleness)
        self._published_as_is = policy.dtype == dtype and not has_adapters(policy)
        self._policy: PreTrainedModel | None = None
        self._probes: dict[int, list[float]] = {}
        self._prompts: dict[int, Sequence[Prompt]] = {}
        self._replies: dict[int, dict[int, Reply]] = {}
        self.on_arrival: Callable[[int, Sequence[Group]], None] | None = None
        """Called as soon as all completions of a batch are here, in any thread and before they are checked."""
        self._here: dict[int, dict[int, Completions]] = {}
        self._arriving = threading.Lock()

    def publish(self, policy: PreTrainedModel, version: int) -> None:
        """Copy the weights. A thread brings the copy to where the workers find it; until then they wait for it."""
        self.parallel.ranks.meet(f"publishing version {version}")
        self._publisher.finish()  # one version at a time is on its way
        self._policy, self._newest = policy, version
        self.snapshots.publish(policy, version, self.parallel, partial(self._beside, version))
        self._probes = {v: logprobs for v, logprobs in self._probes.items() if v in self.snapshots.published}
        if self._probing and version % self.config.probe_steps == 0 and self.parallel.takes_part:
            self._probes[version] = probe_logprobs(policy, self._autocast, self.parallel)

    def _beside(self, version: int, work: Work) -> Future[None]:
        """Have a part of publishing done beside training."""

        def timed() -> None:
            started = time.monotonic()
            work()
            self.trace.add("hand out", started, time.monotonic(), "publisher", version=version)

        return self._publisher(timed)

    def submit(self, index: int, version: Version, prompts: Sequence[Prompt]) -> None:
        """Give each worker its share of the batch."""
        self._prompts[index] = prompts
        self._replies[index] = {}
        count = len(self.workers)
        for worker in self.workers:
            share = prompts[worker.number * len(prompts) // count : (worker.number + 1) * len(prompts) // count]
            own = version[worker.number] if isinstance(version, tuple) else version
            # The columns stay here: they may be large, and only rewards need them.
            stripped = tuple(replace(prompt, columns={}) for prompt in share)
            probe = self._probing and (own is None or own in self._probes)
            after = self._newest if own is None else own
            worker.submit(Request(index, own, stripped, probe, in_flight=self.config.in_flight, after=after))

    def collect(self, index: int) -> Batch:
        """Wait for every share of the batch.

        Raises:
            GeneratorError: a worker raised, died too often, answered with other weights, or did not answer.
        """
        replies = self._await(index)
        seconds, shares = self.parallel.ranks.from_lead(f"completions of batch {index}", lambda: _course(replies))
        completions = [group for reply in replies for group in reply.completions]
        groups = tuple(Group(p, c) for p, c in zip(self._prompts.pop(index), completions, strict=True))
        return Batch(index, min(shares), groups, seconds, shares, self._measure(index, replies, groups))

    def note(self, worker: Worker, reply: Reply) -> None:
        """Note an answer at the moment that it arrives, in any thread: :meth:`collect` may be called much later."""
        if self.on_arrival is None:
            return
        with self._arriving:
            shares = self._here.setdefault(reply.batch, {})
            shares[worker.number] = reply.completions
            if len(shares) < len(self.workers):
                return
            del self._here[reply.batch]
        completions = [samples for number in sorted(shares) for samples in shares[number]]
        prompts = self._prompts.get(reply.batch, ())
        if len(prompts) == len(completions):  # else collect() says what is wrong
            self.on_arrival(reply.batch, tuple(Group(p, c) for p, c in zip(prompts, completions, strict=True)))

    def _await(self, index: int) -> list[Reply]:
        """Every worker's share, in the workers' order."""
        replies = self._replies[index]
        deadline = time.monotonic() + self.config.timeout
        while len(replies) < len(self.workers):
            self._publisher.require()
            answered = self._wait(deadline - time.monotonic())
            if answered:
                deadline = time.monotonic() + self.config.timeout
        del self._replies[index]
        return [replies[worker.number] for worker in self.workers]

    def close(self) -> None:
        """End the workers, and the thread that publishes."""
        for worker in self.workers:
            worker.close()
        self._publisher.close()
        self.snapshots.close()

    def _wait(self, seconds: float) -> bool:
        """Wait this long for an answer. Returns whether one came."""
        raise NotImplementedError

    def _accept(self, worker: Worker, reply: Reply) -> None:
        """Note an answer, once it has proven its weights."""
        self._check(worker, worker.answered(), reply)
        self._replies[reply.batch][worker.number] = reply
        loaded = reply.started + reply.load_seconds
        self.trace.add("load", reply.started, loaded, worker.label, version=reply.version)
        self.trace.add("generate", loaded, reply.ended, worker.label, batch=reply.batch, version=reply.version)

    def _check(self, worker: Worker, request: Request, reply: Reply) -> None:
        """Require the complete weights that the request names, and completions that are possible."""
        if reply.batch != request.batch or (request.version is not None and reply.version != request.version):
            raise GeneratorError(
                f"{worker.label} answered batch {reply.batch} with weights of version {reply.version}; batch "
                f"{request.batch} needs version {request.version}"
            )
        who = f"{worker.label} answered batch {reply.batch}"
        if reply.asked != fingerprint(request.prompts):
            raise GeneratorError(f"{who} with completions of other prompts than it was asked for")
        check_completions(who, request.prompts, reply.completions, self._params, self._vocabulary)
        drawn = drawn_versions(sample for samples in reply.completions for sample in samples)
        for version in sorted(drawn | {reply.version}):
            wrong = differing(reply.digests.get(version, {}), self.snapshots.published[version])
            if wrong:
                raise GeneratorError(
                    f"{worker.label} sampled batch {reply.batch} with weights that are not those of version "
                    f"{version}: {wrong}"
                )

    def _measure(self, index: int, replies: Sequence[Reply], groups: tuple[Group, ...]) -> dict[str, float]:
        """Require that the engine computes and draws what the learner would, and return how far they differ."""
        assert self._policy is not None
        probed = []
        for worker, reply in zip(self.workers, replies, strict=True):
            if reply.probe is not None and reply.probe[0] in self._probes:
                version, logprobs = reply.probe
                found_N = differences(logprobs, self._probes[version])
                who = f"{worker.label} holds the weights of version {version}"
                self.agreement.probe_noise.require(who, found_N, "the probe")
                probed.append(found_N.mean().item())
        metrics = {"weights/probe_difference": max(probed)} if probed else {}
        with self.trace.span("mismatch", batch=index):
            return metrics | self.agreement.measure(index, self._policy, partial(self._weights, index), groups)

    def _weights(self, index: int, version: int) -> Mapping[str, Tensor | None]:
        """A version's tensors; none where the policy still has those very numbers, when a batch is collected."""
        if self._published_as_is and version == index - 1:
            return {}
        return self.snapshots.views(version)


class MortalWorker(Worker, Protocol):
    """A worker that can be restarted when it was lost, and gets its requests again."""

    starts: int
    """How often it was started; answers from an earlier start are ignored."""
    since: float
    """When its silence may have begun."""

    has_begun: bool
    """Whether it has given a sign of life since it was started; until then it may be importing, building, compiling."""

    def silent_for(self) -> float:
        """Seconds since its last sign of life, or its start, while it had something to do; 0 if unknown."""

    def end(self) -> str:
        """Make sure that it has ended, and describe how it ended."""

    def kill(self) -> None:
        """End it, whatever it is doing."""

    def start(self) -> None:
        """Start it, the first time or again."""

    def send(self, request: Request) -> None:
        """Send a request without recording it as open."""


class Arrivals(queue.SimpleQueue[tuple[Any, int, Any]]):
    """(worker, number of its start, answer), put by other threads; a reply is noted at once."""

    def __init__(self) -> None:
        super().__init__()
        self.note: Callable[[Any, Reply], None] | None = None

    def put(self, item: tuple[Any, int, Any], block: bool = True, timeout: float | None = None) -> None:
        worker, start, answer = item
        if self.note is not None and isinstance(answer, Reply) and start == worker.starts:
            self.note(worker, answer)
        super().put(item, block, timeout)


class RestartingGenerator(RemoteGenerator):
    """Workers that may die or hang: they are restarted and get their open requests again; the weights are still there.
    Subclasses make the workers, which put (worker, number of its start, answer) into ``_arrived``; the answer is None
    when the worker has died.
    """

    kind: str
    """What messages call a worker."""
    workers: Sequence[Any]
    """Each a :class:`MortalWorker`."""

    def __init__(self, arrived: Arrivals, *arguments: Any) -> None:
        super().__init__(*arguments)
        arrived.note = self.note
        self._arrived = arrived
        self._restarts = 0

    def _wait(self, seconds: float) -> bool:
        """Wait for an answer, but wake up in between to see which workers hang. Returns whether one came."""
        quarter = min(self.config.heartbeat_timeout, self.config.start_timeout) / 4
        pause, asked = min(max(seconds, 0.0), quarter, _LOOK_SECONDS), time.monotonic()
        try:
            worker, start, answer = self._arrived.get(timeout=pause)
        except queue.Empty:
            if time.monotonic() - asked > pause + quarter:  # this process itself was stopped for a while
                for worker in self.workers:
                    worker.since = time.monotonic()
                return True
            self._look_for_the_silent(seconds)
            return False
        return start == worker.starts and self._receive(worker, answer)

    def _look_for_the_silent(self, seconds: float) -> None:
        busy = [worker for worker in self.workers if worker.open]
        if seconds <= 0:
            raise GeneratorError(
                f"no answer from {self.kind} {', '.join(str(worker.number) for worker in busy)} "
                f"for {self.config.timeout:g} s (generation.timeout)"
            )
        for worker in busy:
            key = "heartbeat_timeout" if worker.has_begun else "start_timeout"
            limit = self.config.heartbeat_timeout if worker.has_begun else self.config.start_timeout
            if worker.silent_for() > limit:
                worker.kill()
                self._restart(worker, f"gave no sign of life for {limit:g} s (generation.{key})")

    def _receive(self, worker: MortalWorker, reply: Reply | Failure | None) -> bool:
        if reply is None:  # it died, perhaps in the middle of a message
            self._restart(worker)
            return False
        if isinstance(reply, Failure) and reply.out_of_memory:
            self._restart(worker, f"ran out of memory: {reply.message}")
            return False
        if isinstance(reply, Failure) and reply.is_config:
            raise ConfigError(reply.message)
        if isinstance(reply, Failure):
            raise GeneratorError(f"{self.kind} {worker.number}: {reply.message}\n\n{reply.traceback}")
        self._accept(worker, reply)
        return True

    def _restart(self, worker: MortalWorker, why: str = "") -> None:
        ended = worker.end()
        why = why or ended
        if self._restarts >= self.config.max_restarts:
            raise GeneratorError(
                f"{self.kind} {worker.number} {why} after {self._restarts} restarts (generation.max_restarts)"
            )
        self._restarts += 1
        logger.warning(
            "%s %d %s; starting it again, to sample batch %s again",
            self.kind,
            worker.number,
            why,
            ", ".join(str(request.batch) for request in worker.open),
        )
        worker.start()
        for request in worker.open:
            worker.send(request)


def _course(replies: Sequence[Reply]) -> tuple[float, tuple[int, ...]]:
    """The seconds that completions took, and the oldest version in each worker's share."""
    seconds = max(reply.ended for reply in replies) - min(reply.started for reply in replies)
    return seconds, tuple(_oldest(reply) for reply in replies)


def _oldest(reply: Reply) -> int:
    """Version of the first tokens. In flight, newer weights may have come between the start and the first token."""
    first = (int(s.versions[s.sampled.argmax()]) for group in reply.completions for s in group)
    return min(first, default=reply.version)
