"""What all generators outside the learner's process share: numbered snapshots, requests of a batch, workers, proofs.

Workers may come and go, die or hang: what one had, others take. One thread, the keeper, takes everything that comes
from workers, hands out requests, restarts and gives up. So nothing of this waits for the learner, which may be
training.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.generation.audit import Agreement, differences, probe_logprobs
from async_rlhf.generation.dispatch import Answer, Arrived, Dispatcher, Stop, Worker, cut
from async_rlhf.generation.protocol import GeneratorError, Ready, Reply, Request, SamplingParams, work
from async_rlhf.generation.validate_response import check_completions, fingerprint
from async_rlhf.generation.worker_count import WorkerCount
from async_rlhf.models.adapters import has_adapters
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.models.publish import BackgroundThread, NoSnapshots, Snapshots
from async_rlhf.models.weights import differing
from async_rlhf.system.errors import UserCodeError, last_place, own_frames
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Group, Prompt, drawn_versions

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_CLOSE_SECONDS = 60.0


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

    at_once = False
    streams = False
    """Whether a worker can sample several requests at a time."""
    kind = "generator"
    """What messages call a worker."""
    grows = False
    """Whether workers can be added and stopped."""
    unstartable: type[Exception] = GeneratorError
    """What a worker raises when it cannot be started at all."""
    workers: Sequence[Any]
    """The list is replaced, never changed."""

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
        self.workers = list(map(self.make, range(number)))
        streaming = self.streams and self.config.in_flight
        self._size = self.config.prompts_per_request or (1 if streaming else None)
        self.dispatcher = Dispatcher(self.workers, at_once=_in_flight(self._size, params) if streaming else 1)
        self._lanes = config.staleness + 1 if streaming else 0
        self._autocast = autocast_dtype(config)
        self.publisher, self._newest = BackgroundThread("publisher"), -1
        self._probing = self.config.probe_steps > 0
        dtype = getattr(torch, self.config.weights_dtype)
        self.agreement = Agreement(self.config, params, dtype, self._autocast, parallel, config.staleness)
        self._published_as_is = policy.dtype == dtype and not has_adapters(policy)
        self._policy: PreTrainedModel | None = None
        self._probes: dict[int, list[float]] = {}
        self._submitted = 0
        """The batch that was submitted last."""
        self._asked: dict[int, _Asked] = {}
        """By batch, or minus the version that is evaluated."""
        self.on_arrival: Callable[[int, int, Sequence[Group]], None] | None = None
        """Called as soon as all completions of a request are here, in any thread and before they are checked."""
        self._answers: queue.SimpleQueue[tuple[Worker, Request, Reply] | BaseException] = queue.SimpleQueue()
        self._restarts = 0
        self._members = threading.RLock()
        """Held by who changes the workers."""
        self._stopping: list[Worker] = []
        self._ending: list[threading.Thread] = []
        self._worker_count: WorkerCount | None = None
        self._look_seconds = min(self.config.heartbeat_timeout / 4, self.config.start_timeout / 4, _LOOK_SECONDS)
        self._closing = False
        self._keeper = threading.Thread(target=self._keep, name=f"keeper of each {self.kind}", daemon=True)
        if self.workers:
            self._keeper.start()

    def prepare(self, config: OnlineConfig, policy: PreTrainedModel) -> tuple[Snapshots, int]:
        """Where the workers find the weights, and how many of them :meth:`make` is to make."""
        return NoSnapshots(getattr(torch, self.config.weights_dtype), config.lora.publish == "adapter"), 0

    def make(self, number: int) -> Worker:
        """A new worker, already starting."""
        raise NotImplementedError

    def publish(self, policy: PreTrainedModel, version: int) -> None:
        """Copy the weights. A thread brings the copy to where the workers find it; until then they wait for it."""
        parallel, snapshots = self.parallel, self.snapshots
        parallel.ranks.barrier(f"publishing version {version}")
        self.publisher.finish()  # one version at a time is on its way
        self._policy, self._newest = policy, version
        snapshots.publish(policy, version, parallel, self.publisher)
        self.publisher(partial(self._trace_publisher, version))
        self._probes = {v: logprobs for v, logprobs in self._probes.items() if v in snapshots.published}
        if self._probing and version % self.config.probe_steps == 0 and parallel.takes_part:
            self._probes[version] = probe_logprobs(policy, self._autocast, parallel)

    def _trace_publisher(self, version: int) -> None:
        if self.publisher.began is not None:
            self.trace.add("hand out", self.publisher.began, time.monotonic(), "publisher", version=version)
        self.publisher.began = None

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
            replies = self._await(-version)
            self.parallel.ranks.barrier(f"answers of version {version}")
        if self.parallel.ranks.is_main:
            self.dispatcher.idle_share(-version)
        return self._groups(-version, replies)

    def _submit(
        self, index: int, version: int | None, prompts: Sequence[Prompt], params: SamplingParams | None = None
    ) -> None:
        # Held-out prompts may be few, and are not sampled in flight.
        size = self._size if params is None else self.config.prompts_per_request
        parts = cut(prompts, min(self.config.shares, len(prompts)), size)
        self._asked[index] = _Asked(prompts, [0, *accumulate(map(len, parts))][: len(parts)], {})
        # The workers have what episodes need since their start.
        sent_params, requests = params and replace(params, episodes=None), []
        in_flight = self.config.in_flight and params is None
        probe = self.config.probe_steps if (version is None or version in self._probes) and params is None else 0
        after = self._newest if version is None else version
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
        replies = self._await(index)
        course = self.parallel.ranks.broadcast(f"completions of batch {index}", lambda: self._course(index, replies))
        seconds, versions, idle = course
        self._trace_lanes(index, replies)
        groups = self._groups(index, replies)
        metrics = self._measure(index, replies, groups) | {"time/generate_idle_share": idle} | _places(replies)
        if self.params.episodes is not None:
            metrics["time/environment"] = sum(reply.environment_seconds for _, reply in replies)
        return Batch(index, min(versions), groups, seconds, versions, metrics)

    def taken(self, worker: Worker, reply: Reply) -> Request:
        """Give the worker its next request at the moment that its answer arrives, in any thread: :meth:`collect` may be
        called much later. Returns the request that was answered.
        """
        request = self.dispatcher.answered(worker, reply.batch, reply.number)
        if self.on_arrival is None:
            return request
        asked = self._asked[request.batch]
        first = asked.firsts[request.number]
        prompts = asked.prompts[first : first + len(request.prompts)]
        if len(prompts) == len(reply.completions):  # else collect() says what is wrong
            groups = tuple(Group(p, c) for p, c in zip(prompts, reply.completions, strict=True))
            self.on_arrival(request.batch, first, groups)
        return request

    def _await(self, index: int) -> list[tuple[str, Reply]]:
        """Every request's reply, in order, and who gave it."""
        replies, count = self._asked[index].replies, len(self._asked[index].firsts)
        deadline = time.monotonic() + self.config.timeout
        while len(replies) < count:
            self.publisher.require()
            answered = self._wait(deadline - time.monotonic())
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

    def _course(self, index: int, replies: Sequence[tuple[str, Reply]]) -> tuple[float, tuple[int, ...], float]:
        """The seconds that completions took, the oldest version in each request, and the workers' idle share."""
        seconds = max(reply.ended for _, reply in replies) - min(reply.started for _, reply in replies)
        return seconds, tuple(_oldest(reply) for _, reply in replies), self.dispatcher.idle_share(index)

    def close(self) -> None:
        """End the workers, and the thread that publishes."""
        self._closing = True
        self.arrived.put(None)
        if self._keeper.is_alive():
            self._keeper.join(timeout=_CLOSE_SECONDS)
        for thread in self._ending:
            thread.join(timeout=_CLOSE_SECONDS)
        for worker in self.workers:
            worker.close()
        self.publisher.close()
        self.snapshots.close()
        if self._worker_count is not None:
            self._worker_count.clear()

    def add_worker(self) -> int:
        """Start another worker, from any thread, which samples as soon as it is ready. Returns its number."""
        with self._members:
            taken = {worker.number for worker in self.workers}
            number = next(number for number in count() if number not in taken)
            self.workers = sorted([*self.workers, self.make(number)], key=lambda worker: worker.number)
            return number

    def stop_worker(self, number: int) -> None:
        """Have a worker end when it has answered what it has; from any thread.

        Raises:
            ConfigError: there is no such worker, or it is the last.
        """
        with self._members:
            numbers = [worker.number for worker in self._staying()]
            right = f"must be one of {', '.join(map(str, numbers))}"
            require(number in numbers, "worker", number, right)
            require(len(numbers) > 1, "worker", number, "must leave another one")
            (worker,) = (worker for worker in self._staying() if worker.number == number)
            self._stopping.append(worker)
            worker.arrive(Stop())

    def follow(self, folder: Path) -> None:
        """Say in a run's folder which workers there are, and have as many as are asked for there."""
        if self.grows:
            count = WorkerCount(folder)
            count.clear()
            count.write([worker.number for worker in self.workers])
            self._worker_count = count  # from here on the keeper obeys what is asked for there

    def _staying(self) -> list[Worker]:
        return [worker for worker in self.workers if worker not in self._stopping]

    def _follow(self) -> None:
        """Start or stop workers as is asked for in the run's folder, and say there who they are."""
        if self._worker_count is None:
            return
        try:
            wanted = self._worker_count.take()
            if wanted is not None:
                for _ in range(wanted - len(self._staying())):
                    self.add_worker()
                for worker in self._staying()[wanted:]:
                    self.stop_worker(worker.number)
            numbers = [worker.number for worker in self._staying()]
            if self._worker_count.present() != numbers or self._worker_count.is_asked():
                self._worker_count.write(numbers)
                logger.info("generators: %s", ", ".join(map(str, numbers)))
        except OSError as error:  # the run itself will say what is wrong with its folder
            logger.warning("WARNING: %s", error)

    def _wait(self, seconds: float) -> bool:
        """Wait for an answer, but wake up in between to see whether this process itself was stopped."""
        asked, pause = time.monotonic(), min(max(seconds, 0.0), self._look_seconds)
        try:
            answer = self._answers.get(timeout=pause)
        except queue.Empty:
            if _overslept(asked, pause):
                return True
            if seconds <= pause:
                raise self._no_answer() from None
            return False
        if isinstance(answer, BaseException):
            raise answer
        self._accept(*answer)
        return True

    def _no_answer(self) -> GeneratorError:
        numbers = ", ".join(str(worker.number) for worker in self._busy())
        return GeneratorError(
            f"no answer from {self.kind} {numbers} for {self.config.timeout:g} s (generation.timeout)"
        )

    def _busy(self) -> list[Worker]:
        """Workers that have something to do, if only to get ready."""
        return [worker for worker in self.workers if worker.open or not self.dispatcher.is_there(worker)]

    def _keep(self) -> None:
        """Take what comes, and look after the workers in between, until it is closed or something goes wrong."""
        looked = time.monotonic()
        try:
            while not self._closing:
                asked = time.monotonic()
                pause = max(0.0, looked + self._look_seconds - asked)
                try:
                    arrived = self.arrived.get(timeout=pause)
                    if arrived is not None and not self._closing:
                        with self._members:
                            self._take(*arrived)
                except queue.Empty:
                    # What came after a stop of this process was taken first.
                    if _overslept(asked, pause) or _overslept(looked, self._look_seconds):
                        for worker in self.workers:
                            worker.since = time.monotonic()
                    with self._members:
                        self._look_for_the_silent()
                        self._follow()
                    looked = time.monotonic()
        except BaseException as error:
            self._answers.put(error)

    def _take(self, worker: Worker, start: int, answer: Answer) -> None:
        if worker not in self.workers:
            return
        if isinstance(answer, Stop):
            self.dispatcher.leave(worker)
            self._dismiss_if_idle(worker)
        elif start != worker.starts:
            return
        elif isinstance(answer, Reply):
            self._answers.put((worker, self.taken(worker, answer), answer))
            self._dismiss_if_idle(worker)
        elif isinstance(answer, Ready):
            if worker not in self._stopping:
                self.dispatcher.join(worker)
        elif isinstance(answer, BaseException):
            raise answer
        elif answer is None:  # it died, perhaps in the middle of a message
            self._replace(worker)
        elif answer.is_lost:
            self._replace(worker, answer.message)
        elif answer.is_config:
            raise ConfigError(answer.message)
        elif frames := own_frames(answer.traceback):
            place = last_place(frames)
            raise UserCodeError(f"{self.kind} {worker.number}: {answer.message.removesuffix(place)}{place}", frames)
        else:
            raise GeneratorError(f"{self.kind} {worker.number}: {answer.message}\n\n{answer.traceback}")

    def _look_for_the_silent(self) -> None:
        for worker in self._busy():
            key = "heartbeat_timeout" if worker.has_begun else "start_timeout"
            limit = self.config.heartbeat_timeout if worker.has_begun else self.config.start_timeout
            try:
                silent = worker.silent_for()
            except self.unstartable as error:
                self._give_up(worker, error)
                continue
            if silent > limit:
                worker.kill()
                self._replace(worker, f"gave no sign of life for {limit:g} s (generation.{key})")

    def _replace(self, worker: Worker, why: str = "") -> None:
        """Give others what the worker had, and start it again if it may be."""
        back = self.dispatcher.lost(worker)
        ended = worker.end()
        if worker in self._stopping:
            self._dismiss_if_idle(worker)
            return
        if not worker.has_place:  # it got onto a host that was about to go
            worker.start()
            return
        why = why or ended
        if self._restarts >= self.config.max_restarts:
            right = f"{why} after {self._restarts} restarts (generation.max_restarts)"
            self._give_up(worker, GeneratorError(f"{self.kind} {worker.number} {right}"))
            return
        self._restarts += 1
        again = f", to sample {', '.join(work(request.batch) for request in back)} again" if back else ""
        logger.warning("%s %d %s; starting it again%s", self.kind, worker.number, why, again)
        self.trace.mark("restarted", worker.label, f"it {why}")
        worker.start()

    def _give_up(self, worker: Worker, error: Exception) -> None:
        """Go on without the worker; raise the error if it was the last."""
        self.dispatcher.lost(worker)
        others = [each for each in self._staying() if each is not worker]
        if not others:
            raise error
        self._dismiss(worker)
        self.trace.mark("given up", worker.label, str(error))
        logger.warning(
            "WARNING: %s; the run goes on with %d: %s", error, len(others), ", ".join(each.label for each in others)
        )

    def _dismiss_if_idle(self, worker: Worker) -> None:
        if worker in self._stopping and not worker.open:
            self._stopping.remove(worker)
            self._dismiss(worker)

    def _dismiss(self, worker: Worker) -> None:
        """End a worker; beside the others, for that may take a while."""
        self.workers = [each for each in self.workers if each is not worker]
        self._ending.append(threading.Thread(target=worker.close, daemon=True))
        self._ending[-1].start()

    def _accept(self, worker: Worker, request: Request, reply: Reply) -> None:
        """Note an answer, once it has proven its weights."""
        self._check(worker, request, reply)
        self._asked[request.batch].replies[request.number] = (worker.label, reply)
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
        params = replace(request.params or self.params, episodes=self.params.episodes)
        check_completions(who, request.prompts, reply.completions, params, self.vocabulary)
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
    """Requests that fill the places of a worker, and an eighth more that wait for places that become free; twice as
    many with environments, for which some wait at any time.
    """
    prompts = max(1, params.batch_size // params.samples_per_prompt) * (1 if params.episodes is None else 2)
    requests = math.ceil(prompts / (size or 1))
    return requests + max(1, requests // 8)


def _places(replies: Sequence[tuple[str, Reply]]) -> dict[str, float]:
    """The share of the places for completions that were taken, if the engines can tell."""
    taken, places = (sum(reply.occupancy[i] for _, reply in replies) for i in (0, 1))
    return {"time/generate_places_taken": taken / places} if places else {}


def _oldest(reply: Reply) -> int:
    """Version of the first tokens. In flight, newer weights may have come between the start and the first token."""
    first = (int(s.versions[s.sampled.argmax()]) for group in reply.completions for s in group)
    return min(first, default=reply.version)


def _overslept(asked: float, pause: float) -> bool:
    """Whether a wait took so much longer than it should that this process itself was stopped for a while."""
    return time.monotonic() - asked > 2 * pause + 0.5
