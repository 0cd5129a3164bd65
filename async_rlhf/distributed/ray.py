"""Ray: the connection to a cluster, what its actors need, and actors that can be restarted."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from async_rlhf.config import ConfigError, OnlineConfig, RayConfig
from async_rlhf.config.base import require
from async_rlhf.system.subprocesses import require_own_package

try:
    import ray
except ImportError as error:
    raise ConfigError("launch: got 'ray'; needs Ray: pip install 'async-rlhf[ray]'") from error
from ray.exceptions import ActorDiedError, RayError, RayTaskError, RuntimeEnvSetupError

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_MANY = 1_000_000
_TELL_AFTER_SECONDS = 30.0
"""The log mentions an actor that is not placed by then."""


class NoRoomError(RuntimeError):
    """The cluster did not find room for an actor in time."""


@dataclass(frozen=True)
class Place:
    """What an actor reserves on the node that it is placed on."""

    num_cpus: float
    num_gpus: float
    labels: Mapping[str, str]

    @property
    def device(self) -> str:
        """The device of its models."""
        return "cuda" if self.num_gpus else "cpu"

    @property
    def threads(self) -> int:
        """One per reserved CPU."""
        return max(1, int(self.num_cpus))

    def options(self) -> dict[str, Any]:
        """Ray's options for it. Ray must not restart actors: a new one needs more than its constructor's arguments."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "label_selector": dict(self.labels) or None,
            "max_restarts": 0,
            "max_task_retries": 0,
        }

    def times_on(self, node: Mapping[str, Any]) -> int:
        """How many such actors a node could hold if it held nothing else."""
        if any(node["Labels"].get(name) != value for name, value in self.labels.items()):
            return 0
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        times = [node["Resources"].get(name, 0.0) / number for name, number in wanted.items() if number]
        return int(min(times, default=_MANY))

    def __str__(self) -> str:
        labels = "".join(f", label {name}={value}" for name, value in self.labels.items())
        return f"{self.num_cpus:g} CPU, {self.num_gpus:g} GPU{labels}"


def generator_place(config: RayConfig) -> Place:
    """What each generator reserves."""
    return Place(config.num_cpus, config.num_gpus, config.labels)


def reward_place(config: RayConfig) -> Place:
    """What each reward worker reserves."""
    return Place(config.reward_num_cpus, config.reward_num_gpus, config.reward_labels)


def connect(config: OnlineConfig) -> None:
    """Connect this process to the cluster, and require that its nodes could hold all actors of the run.

    A process that is already connected keeps its cluster. The connection ends with the process, and the actors with it.

    Raises:
        ConfigError: there is no cluster, or its nodes do not have what the actors need.
    """
    if not ray.is_initialized():
        connect_to(config.ray.address, config.ray.runtime_env)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    logger.info("Ray: %s", describe_nodes())
    wanted = [("generation.workers", config.generation.workers, generator_place(config.ray))]
    wanted.append(("ray.reward_workers", config.ray.reward_workers, reward_place(config.ray)))
    for key, number, resources in wanted:
        room = sum(resources.times_on(node) for node in nodes)
        rule = f"must be at most {room}: each needs {resources}, and the cluster has {describe_nodes()}"
        require(number <= room, key, number, rule)


def connect_to(cluster: str | None, runtime_env: Mapping[str, Any] | None = None) -> None:
    """Connect this process to a cluster.

    Args:
        cluster: its address; None takes RAY_ADDRESS, else the cluster of this host, else a new one.
        runtime_env: what Ray copies to the nodes.

    Raises:
        ConfigError: there is no such cluster, or its workers would run other code than this.
    """
    require_own_package("ray", "Ray's workers")
    address = cluster or os.environ.get("RAY_ADDRESS")
    key = "ray.address" if cluster else "RAY_ADDRESS"
    host, _, port = (address or "").rpartition(":")
    try:
        if host and "/" not in host:  # Ray itself would retry for minutes and then end the process
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        with _sigterm_left_alone():
            ray.init(
                address=cluster,
                runtime_env=dict(runtime_env) if runtime_env else None,
                include_dashboard=False,
                logging_level=logging.WARNING,
            )
    except (OSError, ValueError, RuntimeError) as error:
        rule = "must be the address of a running Ray cluster (ray start --head) of the same Ray and Python"
        raise ConfigError(f"{key}: got {address!r}; {rule}: {error}") from error


@contextmanager
def _sigterm_left_alone() -> Iterator[None]:
    """Keep the command line's SIGTERM handler, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def describe_nodes() -> str:
    """A text that lists the living nodes and their resources."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    words = []
    for node in nodes:
        labels = {name: value for name, value in node["Labels"].items() if not name.startswith("ray.io/node-")}
        resources = Place(node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0), labels)
        words.append(f"{node['NodeManagerAddress']} ({resources})")
    return f"{len(nodes)} nodes: {', '.join(words)}"


class Signs:
    """The base of actors: a separate thread reports signs of life while the actor works."""

    def __init__(self) -> None:
        self.last_sign: float | None = None
        """Monotonic clock; None when idle, or during work of unknown length."""
        self.has_begun = True
        """False while it is still preparing to work."""

    @ray.method(concurrency_group="signs")
    def silence(self) -> tuple[float, bool]:
        """Seconds since the last sign of life, and whether it has begun to work."""
        last = self.last_sign
        return 0.0 if last is None else time.monotonic() - last, self.has_begun


class Actor:
    """The learner's handle of one actor: start it, call it, watch it, end it, restart it wherever there is room.

    Args:
        label: its name in messages.
        kind: its class, a :class:`Signs`.
        arguments: of its constructor.
        resources: what it needs.
        room_timeout: seconds that it may take to be placed and started.
        environment: variables that its process needs.
    """

    def __init__(
        self,
        label: str,
        kind: type[Signs],
        arguments: tuple[Any, ...],
        resources: Place,
        room_timeout: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.label, self.resources, self.room_timeout = label, resources, room_timeout
        groups = {"work": 1, "weights": 1, "signs": 1}  # threads
        options = resources.options()
        if environment:
            options["runtime_env"] = {"env_vars": dict(environment)}
        self._remote = ray.remote(concurrency_groups=groups)(kind).options(**options)
        self._arguments = arguments
        self.starts = 0
        self.has_place = True

    def start(self) -> None:
        """Ask Ray to place and start it. Returns at once. One that was lost before it had a place waits on for one."""
        self.starts += 1
        self.since = time.monotonic()
        if self.has_place:
            self._asked_for_room, self._has_warned, self._died = self.since, False, "died"
        self.has_place = False
        self._silence = 0.0
        self.has_begun = False
        self._handle = self._remote.remote(*self._arguments)
        self._ask_for_a_sign()

    def call(self, then: Callable[[int, Any], None], method: str, *arguments: Any) -> None:
        """Call a method. Returns at once.

        Args:
            then: called in another thread with the number of the start that was called, and the result or the
                :class:`ray.exceptions.RayError` of the call.
        """
        start = self.starts

        def done(future: Future[Any]) -> None:
            error = future.exception()
            if isinstance(error, RayError) and start == self.starts:
                self._died = f"died ({_first_line(error)})"
            then(start, future.result() if error is None else error)

        getattr(self._handle, method).remote(*arguments).future().add_done_callback(done)

    def silent_for(self) -> float:
        """Seconds without a sign of life; 0 while it waits for room.

        Raises:
            NoRoomError: it has waited too long.
        """
        now = time.monotonic()
        if not self.has_place:
            self._wait_for_room(now - self._asked_for_room)
            return 0.0
        asked = self._asked
        if asked is None:
            self._ask_for_a_sign()
            return self._silence
        return max(self._silence, now - max(asked, self.since))

    def at_rest(self) -> None:
        """Forget its reported silence: it has answered, so that work is over."""
        self._silence, self.has_begun = 0.0, True

    def _ask_for_a_sign(self) -> None:
        self._asked: float | None = time.monotonic()
        self.call(self._heard, "silence")

    def _heard(self, start: int, answer: tuple[float, bool] | RayError) -> None:
        if start == self.starts and not isinstance(answer, RayError):
            self.has_place, self._asked = True, None
            self._silence, self.has_begun = answer

    def _wait_for_room(self, seconds: float) -> None:
        last = "" if self._died == "died" else f"; at the last attempt it {self._died}"
        needs = f"it needs {self.resources}; the cluster has {describe_nodes()}{last}"
        if seconds > self.room_timeout:
            raise NoRoomError(
                f"{self.label} was not started within {self.room_timeout:g} s (ray.room_timeout): {needs}"
            )
        if seconds > _TELL_AFTER_SECONDS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s is not there yet; it has %g s (ray.room_timeout): %s", self.label, self.room_timeout, needs
            )

    def end(self) -> str:
        """Make sure that it has ended, and describe how it ended."""
        self.kill()
        return self._died

    def kill(self) -> None:
        """End it, whatever it is doing."""
        ray.kill(self._handle)


def is_lost(error: RayError) -> bool:
    """Whether the actor was lost, so that another may succeed; else the call itself failed."""
    if isinstance(error, ActorDiedError):
        return not error.actor_init_failed
    return not isinstance(error, (RayTaskError, RuntimeEnvSetupError))


def _first_line(error: RayError) -> str:
    """The first line of a message: Ray's messages fill a page."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "_id:" not in line]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"
