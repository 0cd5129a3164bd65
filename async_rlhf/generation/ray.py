"""Sampling in Ray actors: the actors' side, the learner's side, and the weights between them.

Snapshots are in Ray's object store, owned by the learner and on its node, so they survive the loss of an actor or of
another node. Requests carry a reference to the weights that they name; each node fetches a version once.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError
from torch import Tensor, nn
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.distributed.ray import Actor, NoRoomError, Signs, generator_place, is_lost
from async_rlhf.generation.dispatch import Worker
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import Failure, Ready, Reply, Request, SamplingParams
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.generation.worker import RequestHandler, build_handler, to_failure
from async_rlhf.models.publish import DraftSnapshots, Snapshots, TensorSpec, tensors_in
from async_rlhf.models.weights import digests

Memory = NDArray[np.uint8]


class ObjectStoreSnapshots(DraftSnapshots):
    """S + 1 snapshots in Ray's object store; see :class:`~async_rlhf.models.publish.Snapshots`.

    A snapshot is one array of bytes, which every reader on a node maps into its memory without a copy.

    Args:
        model: gives names and sizes.
        dtype: parameters are rounded to it.
        slots: S + 1.
        parallel: how the model's weights are sharded over ranks.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, slots: int, parallel: Parallel) -> None:
        super().__init__(dtype, slots)
        self._places(model, -1, parallel)
        self._references: dict[int, ray.ObjectRef] = {}
        self.on_arrival: Callable[[int], None] = lambda version: None
        """Called, in any thread, when a version has come into the store."""

    def make_available(self, version: int) -> None:
        self._references.pop(version - self.slots, None)
        self.published[version] = digests(self.draft, self._hashing)
        self._references[version] = ray.put(self.memory.numpy())
        self._newest = version
        self.on_arrival(version)

    def reference(self, version: int) -> list[ray.ObjectRef]:
        """The reference to a version, in a list: Ray then passes the reference itself and waits for nothing. The list
        is empty while the version is on its way.
        """
        return [self._references[version]] if version in self._references else []

    def views(self, version: int) -> dict[str, Tensor]:
        """The tensors of a version, without a copy."""
        return tensors_in(_tensor(ray.get(self._references[version])), self.specs)

    def close(self) -> None:
        """Let the store free the snapshots."""
        super().close()
        self._references.clear()


class FetchedWeights:
    """The versions that an actor has fetched."""

    def __init__(self, specs: Sequence[TensorSpec], slots: int) -> None:
        self.newest = -1
        self._specs, self._slots = specs, slots
        self._fetched: dict[int, Memory] = {}

    def fetch(self, version: int, reference: list[ray.ObjectRef]) -> None:
        """Fetch a version to this node; without a reference, another thread does so when it is announced."""
        if not reference:
            return
        if version not in self._fetched:
            self._fetched[version] = ray.get(reference[0])
        self.newest = max(self.newest, version)
        self.keep(self.newest - self._slots + 1)  # older ones are not asked for any more; an idle actor holds them too

    def keep(self, version: int) -> None:
        """Release all versions older than this one."""
        for old in [v for v in list(self._fetched) if v < version]:  # in place: another thread may change it too
            self._fetched.pop(old, None)

    def views(self, version: int) -> Mapping[str, Tensor]:
        """The tensors of a version, without a copy."""
        return tensors_in(_tensor(self._fetched[version]), self._specs)


class GeneratorActor(Signs):
    """One generator. Requests, weights and health checks arrive in separate threads.

    Args:
        spec: the model.
        params: how to sample.
        specs: places of the tensors in a snapshot.
        slots: versions that may be asked for.
    """

    def __init__(self, spec: ModelSpec, params: SamplingParams, specs: Sequence[TensorSpec], slots: int) -> None:
        super().__init__()
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self._spec, self._params = spec, params
        self._weights = FetchedWeights(specs, slots)
        self._handler: RequestHandler | None = None
        self.has_begun = False

    @ray.method(concurrency_group="work")
    def sample(self, request: Request, version: int, reference: list[ray.ObjectRef]) -> Reply | Failure:
        """Answer a request. ``version`` is the one that it names, or else the newest when it was sent."""
        try:
            self.last_sign = time.monotonic()
            if self._handler is None:
                self._handler = build_handler(self._spec, self._params, self._weights, self._heartbeat)
            self._weights.fetch(version, reference)
            reply = self._handler.answer(request)
            self._weights.keep(reply.version)
        except Exception as error:
            return to_failure(error)
        finally:
            self.last_sign = None
        # Every host's monotonic clock has its own zero.
        return _shifted(reply, time.time() - time.monotonic())

    @ray.method(concurrency_group="weights")
    def announce(self, version: int, reference: list[ray.ObjectRef]) -> Failure | None:
        """Fetch new weights while the previous ones still sample."""
        try:
            self._weights.fetch(version, reference)
        except Exception as error:  # a request that waits for them would wait for ever
            return to_failure(error)
        return None

    def _heartbeat(self) -> None:
        self.has_begun, self.last_sign = True, time.monotonic()


class RayGenerator(RemoteGenerator):
    """Actors that sample the requests of every batch."""

    kind, grows, unstartable = "generator actor", True, NoRoomError

    def prepare(self, config: OnlineConfig, policy: PreTrainedModel) -> tuple[Snapshots, int]:
        """See :meth:`RemoteGenerator.prepare`."""
        resources = generator_place(config.ray)
        threads = config.generation.num_threads or resources.threads
        spec = ModelSpec.for_workers(config, policy, self.parallel, resources.device, threads)
        snapshots = ObjectStoreSnapshots(policy, spec.dtype, config.snapshots, self.parallel)
        snapshots.on_arrival = self._announce
        environment = spec.environment((spec.device,)) if spec.device == "cpu" else None
        of_actors = (spec, self.params, snapshots.specs, snapshots.slots)
        self.actor = (GeneratorActor, of_actors, resources, config.ray.room_timeout, environment)
        """What each of them is, and needs."""
        self.store = snapshots
        return snapshots, config.generation.workers

    def make(self, number: int) -> ActorWorker:
        """See :meth:`RemoteGenerator.make`."""
        return ActorWorker(number, self)

    def _announce(self, version: int) -> None:
        """Have every actor fetch a version."""
        for worker in self.workers:
            worker.announce(version)


class ActorWorker(Actor, Worker):
    """One generator actor.

    Args:
        number: among the actors.
        generator: whose worker it is.
    """

    def __init__(self, number: int, generator: RayGenerator) -> None:
        Worker.__init__(self, number, f"generator {number}", generator.arrived)
        Actor.__init__(self, self.label, *generator.actor)
        self._snapshots = generator.store
        self.start()

    def announce(self, version: int) -> None:
        self.call(self._answer, "announce", version, self._snapshots.reference(version))

    def submit(self, request: Request) -> None:
        self.open.append(request)
        version = max(self._snapshots.newest, request.after) if request.version is None else request.version
        self.call(self._answer, "sample", request, version, self._snapshots.reference(version))

    def answered(self, index: int) -> Request:
        self.at_rest()
        return super().answered(index)

    def close(self) -> None:
        self.kill()

    def _answer(self, start: int, answer: Reply | Failure | RayError | None) -> None:
        if isinstance(answer, Reply):
            self.arrive(_shifted(answer, time.monotonic() - time.time()), start)
        elif isinstance(answer, RayError):
            self.arrive(None if is_lost(answer) else Failure(str(answer), ""), start)
        elif answer is not None:  # new weights arrive without a word
            self.arrive(answer, start)

    def _heard(self, start: int, answer: tuple[float, bool] | RayError) -> None:
        """It is placed, and can take requests, once it has given a sign; lost before that, it has none to fail."""
        placed = self.has_place
        super()._heard(start, answer)
        if isinstance(answer, RayError):
            if not placed:
                self._answer(start, answer)
        elif not placed:
            self.arrive(Ready(), start)


def _shifted(reply: Reply, seconds: float) -> Reply:
    return replace(reply, started=reply.started + seconds, ended=reply.ended + seconds)


def _tensor(memory: Memory) -> Tensor:
    """A tensor on read-only memory of the object store, without torch's warning that it cannot be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(memory)
