"""Rewards by Ray actors that share the completions of every batch.

The reward model's batches do not depend on the number of actors, so its scores equal, bit for bit, those of one process
with as many threads. Functions get all completions of a prompt together.
"""

from __future__ import annotations

import inspect
import logging
import queue
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayError
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.distributed.ray import Actor, Place, Signs, is_lost, reward_place
from async_rlhf.models.forward import Row, autocast_dtype, score_batch
from async_rlhf.models.frozen_models import hold_linear
from async_rlhf.rewards.functions import Called, Outcome, RewardError, RewardFunction, call_reward_functions, collect
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.rewards.shares import SharedFunctions
from async_rlhf.system.trace import Trace

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0


class RewardActor(Signs):
    """One reward worker.

    Args:
        model: reference to the reward model, in a list; or an empty one.
        functions: reward functions by name, pickled.
        seed: of the run.
        resources: what it reserves.
    """

    def __init__(self, model: list[ray.ObjectRef], functions: bytes, seed: int, resources: Place) -> None:
        super().__init__()
        self._reference, self._pickled, self._seed, self._resources = model, functions, seed, resources
        self._model: PreTrainedModel | None = None
        self._functions: SharedFunctions | None = None

    @ray.method(concurrency_group="work")
    def score(self, batches: list[list[Row]], autocast: torch.dtype | None) -> list[Tensor]:
        """Scores of each batch of rows by the reward model."""
        if self._model is None:
            torch.set_num_threads(self._resources.threads)
            self._model = ray.get(self._reference[0]).to(self._resources.device).eval()
        return [score_batch(self._model, batch, autocast) for batch in batches]

    @ray.method(concurrency_group="work")
    def call(self, *arguments: Any) -> list[Outcome]:
        """See :meth:`~async_rlhf.rewards.shares.SharedFunctions.call`."""
        if self._functions is None:
            torch.set_num_threads(self._resources.threads)
            self._functions = SharedFunctions(cloudpickle.loads(self._pickled), self._seed)
        return self._functions.call(*arguments)


class RewardPool:
    """Reward workers; one that dies or hangs is restarted and given its share again.

    Args:
        config: of the run.
        arguments: of :class:`RewardActor`, except the last two.
    """

    def __init__(self, config: OnlineConfig, *arguments: Any) -> None:
        resources, room_timeout = reward_place(config.ray), config.ray.room_timeout
        self._config = config
        self._restarts = 0
        self._actors = [
            Actor(f"reward worker {number}", RewardActor, (*arguments, config.seed, resources), resources, room_timeout)
            for number in range(config.ray.reward_workers)
        ]
        for actor in self._actors:
            actor.start()

    def __len__(self) -> int:
        return len(self._actors)

    def ask(self, method: str, shares: Sequence[tuple[Any, ...] | None]) -> Callable[[], list[Any]]:
        """Call a method of each actor.

        Args:
            method: its name.
            shares: its arguments for each actor; None makes no call.

        Returns:
            A function that waits for the answers, in the order of the actors, None for those not called. It raises
            RewardError if an actor cannot answer.
        """
        arrived: queue.SimpleQueue[tuple[Actor, int, Any]] = queue.SimpleQueue()

        def send(actor: Actor, arguments: tuple[Any, ...]) -> None:
            actor.call(lambda start, answer: arrived.put((actor, start, answer)), method, *arguments)

        waiting = {actor: share for actor, share in zip(self._actors, shares, strict=True) if share is not None}
        for actor, share in waiting.items():
            send(actor, share)

        def collect() -> list[Any]:
            answers: dict[Actor, Any] = {}
            limit = self._config.generation.heartbeat_timeout
            while waiting.keys() - answers.keys():
                try:
                    actor, start, answer = arrived.get(timeout=min(limit / 4, _LOOK_SECONDS))
                except queue.Empty:
                    for actor in waiting.keys() - answers.keys():
                        if actor.silent_for() > limit:
                            self._restart(actor, f"gave no sign of life for {limit:g} s (generation.heartbeat_timeout)")
                            send(actor, waiting[actor])
                    continue
                if start != actor.starts:
                    continue
                if not isinstance(answer, RayError):
                    actor.at_rest()
                    answers[actor] = answer
                elif is_lost(answer):
                    self._restart(actor)
                    send(actor, waiting[actor])
                else:
                    raise RewardError(f"{actor.label}: {answer}") from answer
            return [answers.get(actor) for actor in self._actors]

        return collect

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            actor.kill()

    def _restart(self, actor: Actor, why: str = "") -> None:
        ended = actor.end()
        if not actor.has_place:  # it got onto a host that was about to go
            actor.silent_for()
            actor.start()
            return
        why = why or ended
        if self._restarts >= self._config.ray.reward_max_restarts:
            raise RewardError(f"{actor.label} {why} after {self._restarts} restarts (ray.reward_max_restarts)")
        self._restarts += 1
        logger.warning("%s %s; starting it again, to score its share again", actor.label, why)
        actor.start()


class RayScorer(Scorer):
    """A :class:`~async_rlhf.rewards.scorer.Scorer` whose reward model and functions run in reward workers.

    Functions that keep a state for checkpoints stay in this process: the workers' states could not be merged.

    Raises:
        ConfigError: a function cannot be sent to another process, or there is nothing to share.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        kept = self.state()
        self._here = {name: f for name, f in self.reward_funcs.items() if name in kept}
        shared = {name: f for name, f in self.reward_funcs.items() if name not in kept}
        if not shared and self.reward_model is None:
            rule = "must be 0: the reward functions keep a state (state_dict), so this process has to call them"
            raise ConfigError(f"ray.reward_workers: got {self.config.ray.reward_workers}; {rule}")
        self._pickled = _pickled(shared)
        self._any_shared = bool(shared)
        if self.reward_model is not None:  # it is sent like this, and stays so in each worker
            hold_linear(self.reward_model, autocast_dtype(self.config), self.config.head_float32)

    model_elsewhere = True

    @contextmanager
    def started(self, trace: Trace | None = None) -> Iterator[None]:
        """Within, the reward workers are running."""
        model = [] if self.reward_model is None else [ray.put(self.reward_model)]
        self._pool = RewardPool(self.config, model, self._pickled)
        try:
            with self._early.running(trace):
                yield
        finally:
            self._pool.close()

    @property
    def scoring_ranks(self) -> int:
        return len(self._pool)

    def score_batches(self, batches: list[list[Row]]) -> list[Tensor]:
        """Scores of each batch of rows by the reward model."""
        count = len(self._pool)
        shares = [batches[number::count] for number in range(count)]
        dtype = autocast_dtype(self.config)
        answers = self._pool.ask("score", [(share, dtype) if share else None for share in shares])()
        return [answers[i % count][i // count] for i in range(len(batches))]

    def _call_functions(
        self, prompts: list[str], completions: Sequence[str], columns: Mapping[str, list[Any]], samples: int
    ) -> Called:
        count, groups = len(self._pool), len(prompts) // samples
        options = self.config.reward_timeout, self.skip, self.config.reward_retries

        def share(number: int) -> tuple[Any, ...] | None:
            part = slice(number * groups // count * samples, (number + 1) * groups // count * samples)
            columns_here = {name: values[part] for name, values in columns.items()}
            return (prompts[part], completions[part], columns_here, samples, *options) if prompts[part] else None

        answers: Callable[[], list[Any]] = list
        if self._any_shared:
            answers = self._pool.ask("call", [share(number) for number in range(count)])
        here, causes = call_reward_functions(self._here, prompts, completions, columns, *options)
        shared, more = collect((outcome for outcomes in answers() for outcome in outcomes or []), self.skip)
        rewards = here | shared
        return {name: rewards[name] for name in self.reward_funcs}, causes | more


def _pickled(functions: Mapping[str, RewardFunction]) -> bytes:
    """Pickled for an actor: code from a script or a file beside it is included, packages must be installed there."""
    for name, function in functions.items():
        module = inspect.getmodule(function if inspect.isroutine(function) else type(function))
        if module is not None and _is_loose(module):
            cloudpickle.register_pickle_by_value(module)
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # of any kind: objects have their own ways to refuse pickling
            rule = "with ray.reward_workers it must be a function that can be pickled"
            raise ConfigError(f"reward_funcs: {name}: {rule}: {type(error).__name__}: {error}") from error
    return cloudpickle.dumps(dict(functions))


def _is_loose(module: ModuleType) -> bool:
    """Whether it is a single file, in no package and not installed; the nodes may not have it."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    file = getattr(module, "__file__", None)
    if file is None or "." in module.__name__ or hasattr(module, "__path__"):
        return False
    return not any(Path(file).is_relative_to(folder) for folder in installed)
