"""The generator's side: take a request, load the weights it names, sample, answer. Also a worker process's main loop.

Requests in flight are one queue over batches: prompts of the next requests take the places that ended completions
leave, and all that is under way goes on with the newest weights, of which the engine holds one version at a time.

In a process two threads serve the pipe, so that neither side ever waits for the other's main thread: one reads requests
(and ends the process when the learner is gone), one sends answers.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor

from async_rlhf.config import ConfigError
from async_rlhf.config.engines import find
from async_rlhf.generation.engines import ModelSpec, make_engine
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.protocol import (
    Completions,
    Engine,
    EngineLostError,
    Failure,
    Occupancy,
    Ready,
    Reply,
    Request,
    SamplingParams,
    drawing,
    fingerprint,
)
from async_rlhf.generation.staging import StagedWeights
from async_rlhf.models.publish import SnapshotRing
from async_rlhf.system.errors import UserCodeError
from async_rlhf.system.random_state import seed_all
from async_rlhf.types import Prompt, Sample, drawn_versions

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.001


class Weights(Protocol):
    """Where an engine finds numbered weights."""

    @property
    def newest(self) -> int:
        """The version published last."""

    def views(self, version: int) -> Mapping[str, Tensor]:
        """The tensors of a version."""


class RequestHandler:
    """Answers requests with an engine, each with the weights that the request names.

    Args:
        engine: samples.
        weights: where they lie.
        heartbeat: called often while it works; None if nobody waits for a sign of life.
        sampler: has the methods of an EpisodeSampler, which it is by default.
    """

    def __init__(
        self, engine: Engine, weights: Weights, heartbeat: Callable[[], None] | None = None, sampler: Any = None
    ) -> None:
        self.engine, self.weights = engine, weights
        self._heartbeat: Callable[[], None] = heartbeat or (lambda: None)
        self._staged = weights if isinstance(weights, StagedWeights) else None
        self.sampler = sampler or EpisodeSampler(engine, heartbeat=self._alive)
        if heartbeat is not None:
            engine.heartbeat_with(self._alive)
        self._held: dict[int, dict[str, str]] = {}
        self._probed: tuple[int, list[float]] | None = None

    def _alive(self) -> None:
        """Give a sign of life, between two steps of the engine."""
        self._heartbeat()
        if self._staged is not None:
            self._staged.stage(self.engine.version, newest=self.engine.refresh is not None)

    def answer(self, request: Request) -> Reply:
        """Load the weights and sample."""
        self.wait_for(request.after)
        engine, started = self.engine, time.monotonic()
        version = self.weights.newest if request.version is None else request.version
        self.load(version)
        loaded = time.monotonic()
        engine.refresh = (lambda: self.load(self.weights.newest)) if request.in_flight else None
        with drawing(engine, request.params):
            completions = self.sampler.generate(request.prompts, None if request.params is None else -request.batch)
        reply = self.reply(request, completions, version, started, loaded)
        self.forget_before(engine.version)
        return reply

    def reply(self, request: Request, completions: Completions, version: int, started: float, loaded: float) -> Reply:
        """The answer, with proof of the weights.

        Args:
            request: what was asked.
            completions: of its prompts.
            version: of the weights that drew the first tokens.
            started: when work on it began, on the monotonic clock.
            loaded: when its first weights were loaded.
        """
        engine, ended = self.engine, time.monotonic()
        versions = {version, *drawn_versions(sample for samples in completions for sample in samples)}
        occupancy, engine.occupancy = engine.occupancy, Occupancy()
        held = {number: digests for number, digests in self._held.items() if number in versions}
        asked = fingerprint(request.prompts)
        reply = Reply(request.batch, version, held, asked, completions, started, ended, loaded - started)
        return replace(
            reply,
            probe=self._probe() if request.probe and engine.version % request.probe == 0 else None,
            number=request.number,
            occupancy=(occupancy.taken, occupancy.places),
            environment_seconds=self.sampler.take_seconds(),
        )

    def _probe(self) -> tuple[int, list[float]]:
        """The engine's version, and what it says of the fixed sequences: computed once for each version."""
        if self._probed is None:
            self._probed = self.engine.version, self.engine.probe()
        return self._probed

    def wait_for(self, version: int) -> None:
        """Wait until a version has come, or a newer one."""
        while self.weights.newest < version:
            self._heartbeat()
            time.sleep(_LOOK_SECONDS)

    def forget_before(self, version: int) -> None:
        """Forget the digests of older versions: nothing that they have drawn is still to be answered."""
        self._held = {number: held for number, held in self._held.items() if number >= version}

    def load(self, version: int) -> None:
        """Make sure that the engine holds a version."""
        if version != self.engine.version:
            self._probed = None
            self._held[version] = self.engine.load(self.weights.views(version), version)


def build_handler(
    spec: ModelSpec, params: SamplingParams, weights: Weights, heartbeat: Callable[[], None]
) -> RequestHandler:
    """The handler of a process that is the generator's alone, with an engine of the model.

    Args:
        spec: the model.
        params: how to sample.
        weights: where they lie.
        heartbeat: called often while it works.
    """
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    seed_all(params.seed)
    engine = make_engine(spec, params)
    if isinstance(weights, SnapshotRing) and weights.fd >= 0 and torch.cuda.is_initialized():
        weights.pin(weights.memory)  # this process has the engine's weights, on a GPU
        if "staged" in find(spec.engine).supports and spec.adapter is None and spec.gpus == 1 and weights.folded:
            # By its number here: the process may see its own GPU alone, as the first.
            device = torch.device("cuda", torch.cuda.current_device())
            weights = StagedWeights(weights, device, getattr(engine, "unheld", 0))
            where = "on the GPU" if weights.has_room else "in the host's memory, as the GPU has no room for it"
            logger.info("generator: the next version of the weights waits %s", where)
    return RequestHandler(engine, weights, heartbeat)


@dataclass
class _Open:
    """A request that has begun."""

    request: Request
    started: float
    version: int
    completions: dict[int, tuple[Sample, ...]] = field(default_factory=dict)
    """Completions, by the prompt's number in the request."""


def serve(
    handler: RequestHandler, requests: queue.SimpleQueue[Request | None], answer: Callable[[Reply], None]
) -> None:
    """Answer requests until None comes: in flight with others, or one after the other."""
    request = requests.get()
    while request is not None:
        if request.in_flight:
            request = Stream(handler, requests, answer).run(request)
        else:
            answer(handler.answer(request))
            request = requests.get()


class Stream:
    """Answers requests whose completions are under way together.

    Args:
        handler: has the engine and the weights.
        requests: more requests, or None for the end.
        answer: called with each reply as soon as it is complete.
    """

    def __init__(
        self, handler: RequestHandler, requests: queue.SimpleQueue[Request | None], answer: Callable[[Reply], None]
    ) -> None:
        self.handler, self.requests, self.answer = handler, requests, answer
        self._waiting: deque[tuple[_Open, int]] = deque()
        """Prompts that have no place yet: the request, and the prompt's number in it."""
        self._taken: dict[int, tuple[_Open, int]] = {}
        """The same for prompts that are under way, by the engine's number."""
        self._numbers = count()
        self._next: Request | None = None
        self._ended = False

    def run(self, request: Request) -> Request | None:
        """Answer this request, and those that come meanwhile and are in flight too.

        Returns:
            The next request, which may have to wait for another one; None for the end.
        """
        self._put(request)
        handler = self.handler
        while self._waiting:  # the engine ends when nothing is under way, even if more has come since it asked
            handler.wait_for(self._waiting[0][0].request.after)
            handler.engine.refresh = lambda: handler.load(handler.weights.newest)
            self._numbers = count()
            for number, samples in handler.sampler.stream(self._more):
                self._note(*self._taken.pop(number), samples)
        return self._next if self._ended else self.requests.get()

    def _put(self, request: Request) -> None:
        opened = _Open(request, 0.0, -1)
        self._waiting.extend((opened, number) for number in range(len(request.prompts)))

    def _more(self, places: int) -> Sequence[Prompt]:
        """The next prompts, for as many places."""
        while not self._ended and not self.requests.empty():
            request = self.requests.get()
            if request is None or not request.in_flight:
                self._next, self._ended = request, True
            else:
                self._put(request)
        # A request may be younger than the weights at the last step, and must not be drawn by older ones than its own.
        self.handler.load(self.handler.weights.newest)
        prompts: list[Prompt] = []
        while self._waiting and len(prompts) < places:
            opened, number = self._waiting[0]
            if opened.request.after > self.handler.engine.version:  # its weights are on their way
                break
            self._waiting.popleft()
            if number == 0:
                opened.started, opened.version = time.monotonic(), self.handler.engine.version
            self._taken[next(self._numbers)] = opened, number
            prompts.append(opened.request.prompts[number])
        return prompts

    def _note(self, opened: _Open, number: int, samples: tuple[Sample, ...]) -> None:
        """Keep a prompt's completions; answer if they are the last of their request."""
        opened.completions[number] = samples
        request = opened.request
        if len(opened.completions) == len(request.prompts):
            completions = [opened.completions[i] for i in range(len(request.prompts))]
            under_way = [each.version for each, _ in self._taken.values()]
            # Its other prompts may wait, and have no version yet.
            begun = [each.version for each, _ in self._waiting if each.version >= 0]
            self.answer(self.handler.reply(request, completions, opened.version, opened.started, opened.started))
            self.handler.forget_before(min([*under_way, *begun, self.handler.engine.version]))


def to_failure(error: Exception) -> Failure:
    """The message that tells the learner about an error."""
    is_config, is_lost = isinstance(error, ConfigError), isinstance(error, EngineLostError)
    says_all = is_config or is_lost or isinstance(error, UserCodeError)
    text = str(error) if says_all else f"{type(error).__name__}: {error}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        text, is_lost = f"ran out of memory: {text}", True  # a new process has all of its memory free
    return Failure(text, traceback.format_exc(), is_config, is_lost)


def run_worker(pipe: Connection, spec: ModelSpec, params: SamplingParams, ring: SnapshotRing, heartbeat: Any) -> None:
    """Serve requests until None comes or the learner is gone.

    Args:
        pipe: to the learner.
        spec: the model.
        params: how to sample.
        ring: the weights.
        heartbeat: shared memory that takes the time, on the monotonic clock, of the latest sign of life.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the learner, which ends its workers
    if spec.gpus > 1:
        os.setpgrp()  # the processes that vLLM starts can be ended with this one, and Ctrl-C does not reach them
    logging.getLogger("transformers").setLevel(logging.ERROR)
    requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    replies: queue.SimpleQueue[Ready | Reply | Failure | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, requests), daemon=True).start()
    sender = threading.Thread(target=_send, args=(pipe, replies))
    sender.start()
    try:
        alive = partial(setattr, heartbeat, "value")
        handler = build_handler(spec, params, ring, heartbeat=lambda: alive(time.monotonic()))
        replies.put(Ready())
        serve(handler, requests, replies.put)
    except Exception as error:
        replies.put(to_failure(error))
    finally:
        replies.put(None)
        sender.join()


def _read(pipe: Connection, requests: queue.SimpleQueue[Request | None]) -> None:
    try:
        while True:
            requests.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)  # the learner is gone: nobody needs what this process is computing


def _send(pipe: Connection, replies: queue.SimpleQueue[Ready | Reply | Failure | None]) -> None:
    try:
        while (reply := replies.get()) is not None:
            pipe.send(reply)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)
