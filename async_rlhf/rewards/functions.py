"""Rewards that are Python functions: finding them, calling them, and checking what they return."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.config.import_by_name import load_attribute
from async_rlhf.config.rewards import FunctionName
from async_rlhf.rewards.calls import NoSequenceError, ProcessDiedError, RemoteError, TooLateError, call_together
from async_rlhf.system.errors import UserCodeError, frames_of, last_place, own_frames
from async_rlhf.system.user_code import own_copy

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""Called as f(prompts=[...], completions=[...], **columns); returns one number per completion. `def` or `async def`.

None instead of a number says that the function does not apply to that completion, and leaves its reward to the others.

A batch is judged as soon as it has been sampled, beside training on the one before, unless a function keeps a state
(`load_state_dict`) or draws from the global random generators: then batches are judged in their turn, and the
generators are seeded by (seed, batch) before. If every function of a run has a true attribute `by_prompt`, they are
called with some prompts of a batch, and all K completions of each, while others are still being sampled.

Every call of a plain function is made in a new thread, so what belongs to one thread must be opened within the call.
Coroutines all run in one event loop, for the life of the process: an HTTP client may be kept between calls, and none of
them may block. Functions of one batch run at the same time: of several, one that draws random numbers needs a generator
of its own if the run is to be repeatable, and keeps it in `state_dict`. The lists are copies, with all that is in them:
a function may change them.
"""


class RewardError(UserCodeError):
    """A reward that cannot be trained on. The message names the reward and the row.

    Args:
        message: says all.
        frames: see :class:`~async_rlhf.system.errors.UserCodeError`.
        cause: what a function did, in a few words that are the same each time: "raised KeyError".
    """

    def __init__(self, message: str = "", frames: str = "", cause: str = "failed") -> None:
        super().__init__(message, frames)
        self.cause = cause

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process the exception behind it is a text, for that process may not know its type."""
        trace = "".join(traceback.format_exception(self.__cause__)) if self.__cause__ else ""
        return _received, (str(self), self.frames, self.cause, trace)


def _received(message: str, frames: str, cause: str, trace: str) -> RewardError:
    error = RewardError(message, frames, cause)
    error.__cause__ = RemoteError("", "", trace) if trace else None
    return error


def load_reward_functions(names: Sequence[str]) -> list[RewardFunction]:
    """Functions by name: "package.module:function" or "path/to/file.py:function".

    With arguments, "package.module:factory(limit=3)", the factory is called with them and returns the function.

    Raises:
        ConfigError: there is no such module, file or function, or its factory refuses the arguments.
    """
    functions = [load_object(name, "reward_funcs") for name in names]
    _NAMES.update((id(function), (function, name)) for function, name in zip(functions, names, strict=True))
    return functions


_NAMES: dict[int, tuple[RewardFunction, str]] = {}


def name_loaded_by(function: RewardFunction) -> str | None:
    """The name that :func:`load_reward_functions` made the function from; None if it did not make it."""
    return _NAMES.get(id(function), (None, None))[1]


def load_object(name: str, key: str) -> Any:
    """Load a callable by name, for the given configuration key."""
    wanted = FunctionName.parse(name, key)
    function = load_attribute(wanted.place, wanted.attribute, key, "function")
    require(callable(function), key, name, f"{wanted.place} has no function {wanted.attribute!r}")
    return function if wanted.arguments is None else _made_by(function, wanted.arguments, name, key)


def _made_by(factory: Callable[..., Any], arguments: Mapping[str, Any], name: str, key: str) -> Any:
    """Call a factory with the arguments from a configuration."""
    try:
        made = factory(**arguments)
    except (TypeError, ValueError) as error:  # a ConfigError is a ValueError
        rule = "a name with arguments calls a factory, which has to take them and to return the function"
        raise ConfigError(f"{key}: got {name!r}: {error}; {rule}") from error
    require(callable(made), key, name, f"called with these arguments it must return a function, not {made!r:.200}")
    return made


def function_name(function: RewardFunction) -> str:
    """Its name in messages and metrics."""
    return getattr(function, "__name__", type(function).__name__)


RESERVED = ("prompts", "completions", "messages", "completion_messages", "metrics", "self")
"""Keywords that have a meaning of their own when a reward function is called."""


def columns_of(rows: Sequence[Mapping[str, Any]], without: str | None = None) -> dict[str, list[Any]]:
    """The data's columns as reward functions get them: by name, one value for each row, None where it has none.

    A column with a reserved name gets "_" behind it, which a warning says.

    Args:
        rows: of the data set, one for each completion.
        without: a column to leave out.
    """
    names = dict.fromkeys(name for row in rows for name in row if name != without)
    return {_keyword(name, frozenset(names)): [row.get(name) for row in rows] for name in names}


@lru_cache(maxsize=256)  # the warning is said once
def _keyword(name: str, taken: frozenset[str]) -> str:
    if name not in RESERVED:
        return name
    free = f"{name}_"
    while free in taken:
        free += "_"
    logger.warning("WARNING: reward functions get the data's column %r as %r: %r is ours", name, free, name)
    return free


def numbers(rewards: Sequence[float | None], prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The rewards, after checking that every completion has one.

    Raises:
        RewardError: one is None.
    """
    for reward, prompt, completion in zip(rewards, prompts, completions, strict=True):
        if reward is None:
            raise RewardError(
                "every reward function returned None; at least one must return a number. "
                f"Prompt: {prompt[-200:]!r}. Completion: {completion[:200]!r}"
            )
    return [reward for reward in rewards if reward is not None]


Outcome = tuple[str, list[float | None], RewardError | None]
"""What a function has done: its name; its rewards, None where it does not apply and NaN where it failed; its error."""
Called = tuple[dict[str, list[float | None]], dict[str, str]]
"""The rewards of each function, and the :attr:`RewardError.cause` of each that has failed."""


def call_reward_functions(
    functions: Mapping[str, RewardFunction],
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    timeout: float | None = None,
    skip: bool = False,
    retries: int = 0,
) -> Called:
    """The rewards of every function; all functions run at the same time, each in a separate thread.

    At the time limit an async function is cancelled. A plain one cannot be stopped (unless it is a
    :class:`~async_rlhf.rewards.sandbox.StoppableFunction`): it is abandoned and continues in its thread, perhaps
    during its own next call, but does not keep the process from ending.

    Args:
        functions: by their names in messages; see :data:`RewardFunction`.
        prompts: the prompt of each completion.
        completions: texts without the stop token.
        columns: the data set's columns, one value for each completion.
        timeout: seconds for all functions together; None for no limit.
        skip: log a failure as a warning and give NaN to the completions that it concerns.
        retries: how often a function that raises is called again, within the limit.

    Raises:
        RewardError: without ``skip``: a function raised, was too slow, or returned a wrong count or something that is
            no finite number. The other functions are then not waited for.
    """
    rewards, causes = collect(judge(functions, prompts, completions, columns, timeout, retries), skip)
    return {name: rewards[name] for name in functions}, causes


def collect(outcomes: Iterable[Outcome], skip: bool) -> Called:
    """The rewards of a batch from outcomes, of which one function may have several, for one part after the other.

    Raises:
        RewardError: a function has failed, without ``skip``.
    """
    rewards: dict[str, list[float | None]] = {}
    causes = {}
    for name, values, error in outcomes:
        rewards.setdefault(name, []).extend(values)
        if error is not None:
            causes[name] = error.cause
            raise_or_warn(error, sum(map(has_failed, values)), len(values), skip)
    return rewards, causes


def judge(
    functions: Mapping[str, RewardFunction],
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    timeout: float | None = None,
    retries: int = 0,
) -> Iterator[Outcome]:
    """The basis of :func:`call_reward_functions`: yields each function's outcome as soon as it is done."""
    names = list(functions)
    calls = [partial(_call, function, prompts, completions, columns) for function in functions.values()]
    for number, outcome in call_together(calls, timeout, retries):
        name = names[number]
        if isinstance(outcome, BaseException) or len(outcome) != len(completions):
            yield name, [math.nan] * len(completions), _failure(name, outcome, len(completions), timeout)
            continue
        rewards, error = [None if value is None else number_of(value) for value in outcome], None
        bad = next((i for i, reward in enumerate(rewards) if has_failed(reward)), None)
        if bad is not None:
            error = RewardError(
                f"reward function {name} returned {repr(outcome[bad])[:200]}; must be a finite number, or None. "
                f"Prompt: {prompts[bad][-200:]!r}. Completion: {completions[bad][:200]!r}",
                cause="returned no finite number",
            )
        yield name, rewards, error


def has_failed(reward: float | None) -> bool:
    """Whether a function should have given a reward and did not."""
    return reward is not None and math.isnan(reward)


def raise_or_warn(error: RewardError, missing: int, completions: int, skip: bool) -> None:
    """Handle completions without a reward: raise or warn.

    Raises:
        RewardError: the given error, unless ``skip``.
    """
    if not skip:
        raise error
    logger.warning("%d of %d completions have no reward: %s", missing, completions, error)


def _call(
    function: RewardFunction, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> Any:
    """Call it with its own copies, so that changes to them affect neither other functions nor the data."""
    lists = own_copy({name: list(values) for name, values in columns.items()})
    return function(prompts=list(prompts), completions=list(completions), **lists)


def _failure(name: str, outcome: list[Any] | BaseException, count: int, timeout: float | None) -> RewardError:
    """The error of a whole call."""
    if isinstance(outcome, list):
        text = f"reward function {name} returned {len(outcome)} rewards for {count} completions"
        return RewardError(text, cause="returned another number of rewards than of completions")
    if isinstance(outcome, TooLateError):
        limit = "the limit for the reward functions of a batch (reward_timeout)"
        text = f"reward function {name} was not done after {timeout:g} s, {limit}"
        return RewardError(text, cause="was not done in time")
    if isinstance(outcome, NoSequenceError):
        rule = f"must be a list, an array or a tensor of {count} numbers, one for each completion"
        return RewardError(f"reward function {name} returned {outcome}; {rule}", cause="returned no sequence")
    if isinstance(outcome, ProcessDiedError):
        return RewardError(f"reward function {name}: {outcome}", cause="ended its process")
    kind, text = type(outcome).__name__, str(outcome)
    frames = frames_of(outcome)
    if isinstance(outcome, RemoteError):
        kind, text, frames = outcome.kind, outcome.text, own_frames(outcome.trace)
    what = f"raised {kind}"
    error = RewardError(f"reward function {name} {what}: {text}{last_place(frames)}", frames, what)
    error.__cause__ = outcome  # as `raise ... from` does, so that its traceback is shown
    return error


def number_of(value: Any) -> float:
    """The value as a float; NaN for what is no finite number."""
    try:
        return float(value) if math.isfinite(value) else math.nan  # isfinite() refuses text, which float() would read
    except Exception:  # whatever the __float__ of a tensor or of the user's own class may raise
        return math.nan
