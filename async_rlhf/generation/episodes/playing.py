"""Plays episodes: the policy writes a message, its environment answers, the policy goes on.

An episode is a coroutine that asks for one answer of the policy after the other; who samples these, and which of them
together, is up to :class:`EpisodeSampler` or a server's client.
"""

from __future__ import annotations

import _thread
import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from async_rlhf.config import ConfigError
from async_rlhf.config.episodes import World
from async_rlhf.data.rendering import Renderer
from async_rlhf.generation.episodes.agents import Session
from async_rlhf.generation.episodes.endpoint import Client, Endpoint
from async_rlhf.generation.episodes.environment import Message, Observation
from async_rlhf.generation.episodes.episode import Ask, Episode, number
from async_rlhf.generation.episodes.replies import Replies
from async_rlhf.generation.episodes.requests import Settings
from async_rlhf.generation.episodes.spec import EpisodeSpec, tools_of
from async_rlhf.generation.episodes.tools import as_environment
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.sampling import request_seeds
from async_rlhf.system.errors import UserCodeError, frames_of, last_place
from async_rlhf.system.user_code import failure_of, leave_blocked_loop, own_copy, submit
from async_rlhf.types import Prompt, Sample

logger = logging.getLogger(__name__)

T = TypeVar("T")
_GRACE_SECONDS = 1.0
"""How long a coroutine that was cancelled may take to end."""


class _FailedError(Exception):
    """Code of the user's raised this error, or gave something wrong, or was not done in time."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error, self.is_late = error, False


@contextmanager
def _blamed() -> Iterator[None]:
    """Within, every error is the environment's."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise _FailedError(error) from error


def _messages(messages: Any, by: str) -> Sequence[Message]:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    if not is_list or not all(isinstance(entry, Mapping) and {"role", "content"} <= entry.keys() for entry in messages):
        rule = 'must be a list of messages, such as [{"role": "user", "content": "..."}]'
        raise TypeError(f"{by} gave the messages {messages!r:.200}; {rule}")
    return messages


class EpisodeError(UserCodeError):
    """An environment has failed. The message names it and the row."""


class Player:
    """Plays episodes.

    Args:
        spec: how.

    Raises:
        ConfigError: there are tools, and the chat template cannot write their calls, or these cannot be read.
    """

    def __init__(self, spec: EpisodeSpec) -> None:
        self.spec, self._limits, self.seconds = spec, spec.generation, 0.0
        """Seconds that environments took, all together."""
        schemas = [] if spec.is_agent else tools_of(World(spec.environment))
        self._renderer = Renderer(spec.chat.tokenizer, schemas, spec.chat)
        self._renderer.check()
        replies = spec.generation.replies_from
        self._replies = None if replies is None else Replies(Path(replies))
        self._endpoint: Endpoint | None = None

    def take_seconds(self) -> float:
        """Seconds that environments took since this was last called."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    async def close(self) -> None:
        """Stop what was started in this event loop."""
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            await endpoint.close()

    async def play(
        self, prompt: Prompt, number: int, params: SamplingParams, ask: Ask, evaluated: int | None = None
    ) -> Sample:
        """One episode, the prompt's sample of that number; in an evaluation, of the version ``evaluated``.

        A truncated episode keeps the rewards that it has had. Its last answer was cut off, or there was no room for the
        next, or there had been ``max_turns`` of them.

        Raises:
            EpisodeError: the environment failed, and ``skip`` is false.
        """
        if self.spec.is_agent:
            return await self._play_agent(prompt, number, params, ask)
        episode = Episode(self.spec, params, prompt, number)
        renderer = self._renderer.of_row(prompt.columns, f"row {prompt.row + 1}")
        environment: Any = None
        try:
            seed = request_seeds(params.seed, [prompt])[0]
            with _blamed():
                recorded = None if self._replies is None else self._replies.of(evaluated, prompt.draw, number)
                environment = recorded or as_environment(self.spec.environment())
            opened = await self._call(environment.reset, self.spec.row(prompt), seed)
            with _blamed():
                opened = _messages(() if opened is None else opened, "reset()")
                episode.open(renderer.opening(prompt, opened), opened)
            goes_on = True
            while goes_on:
                turn = episode.turn()
                message = renderer.message(episode.add(await ask(turn)), turn.tokens)
                if goes_on := episode.finish_reason == "stop":
                    goes_on = await self._step(environment, message, episode, renderer)
                else:
                    episode.say([message])
        except _FailedError as failed:
            await self._failed(episode, failed, ask)
        finally:
            if environment is not None:
                await self._close(environment)
        return episode.sample()

    async def _step(self, environment: Any, message: Message, episode: Episode, renderer: Renderer) -> bool:
        """Have the environment answer; returns whether the policy is to go on."""
        observed = await self._call(environment.step, own_copy(message))
        with _blamed():
            if not isinstance(observed, Observation):
                raise TypeError(f"step() returned {observed!r:.200}; must be an Observation")
            if not observed.done:
                _messages(observed.messages, "step()")
            episode.note(message, observed)
            if observed.done or len(episode.turns) == self._limits.max_turns:
                episode.finish_reason = "stop" if observed.done else "length"
                return False
            return episode.observe(renderer.observation(observed.messages, episode.last, episode.chat))

    async def _play_agent(self, prompt: Prompt, number: int, params: SamplingParams, ask: Ask) -> Sample:
        """Have an agent play; its sample has all its conversations."""
        self._endpoint = self._endpoint or Endpoint()
        begin = partial(Episode, self.spec, params, prompt, number)
        session = Session(begin, self._renderer, self._limits.max_turns, ask)
        client = await self._endpoint.open(session.answer, Settings(params, self._limits))
        try:
            reward = await self._reward(session, client, prompt)
            if session.refused:
                await self._sampled(session.last(), ask)
            with _blamed():
                session.end(reward)
        except _FailedError as failed:
            if session.error is not None:
                raise session.error from None
            await self._failed(session.last(), failed, ask)
        finally:
            self._endpoint.forget(client)
        return session.sample()

    async def _reward(self, session: Session, client: Client, prompt: Prompt) -> float:
        """Have an agent ask the policy; returns its reward."""
        try:
            reward = await self._call(self.spec.environment.value, client, self.spec.row(prompt), session=session)
        except _FailedError:
            if session.refused and session.error is None:  # it was told that there is no room: the episode is cut off
                return 0.0
            raise
        with _blamed():
            if reward is None and not self.spec.is_judged:
                raise ValueError("the agent returned None; must return its reward, a number, as nothing else gives one")
            return 0.0 if reward is None else number(reward, "the agent returned")

    async def _failed(self, episode: Episode, failed: _FailedError, ask: Ask) -> None:
        what, error = f"raised {type(failed.error).__name__}: {failed.error}", failed.error
        if failed.is_late:
            what = f"was not done after {self._limits.step_timeout:g} s (generation.step_timeout)"
        kind, frames = "agent" if self.spec.is_agent else "environment", frames_of(error)
        position = f"(row {episode.prompt.row}, turn {len(episode.turns)})"
        message, frame = f"the {kind} {self.spec.environment.name} {what} {position}", last_place(frames)
        if not self.spec.skip:
            hint = "reward_errors: skip goes on without the episode's reward"
            raise EpisodeError(f"{message}; {hint}{frame}", frames) from error
        logger.warning("WARNING: %s%s; the episode has no reward", message, frame)
        await self._sampled(episode, ask)
        episode.fail()

    async def _sampled(self, episode: Episode, ask: Ask) -> None:
        """See that the policy has written something, as every sample has to have something that was sampled."""
        if not episode.turns:
            episode.add(await ask(episode.turn()))

    async def _close(self, environment: Any) -> None:
        try:
            await self._call(environment.close)
        except _FailedError as failed:
            logger.warning("WARNING: close() of an environment raised %r", failed.error)

    async def _call(self, function: Callable[..., Any], *arguments: Any, session: Session | None = None) -> Any:
        """Call a method of an environment, or an agent: a coroutine here, a plain function in a thread, which may hang.
        What an agent waits for the policy does not count.
        """
        started, late = time.monotonic(), 0.0
        try:
            with _blamed():
                async with asyncio.timeout(self._limits.step_timeout) as limit:
                    if session is not None:
                        session.limit, session.seconds = limit, self._limits.step_timeout
                    if inspect.iscoroutinefunction(function):
                        outcome, ended = await _in_loop(function(*arguments))
                    else:
                        outcome, ended = await _in_thread(function, arguments)
                        if inspect.isawaitable(outcome):
                            outcome, ended = await _in_loop(outcome)
                    late = time.monotonic() - ended  # others had their turn meanwhile
                    return outcome
        except _FailedError as failed:
            failed.is_late = limit.expired()  # else it is the code's own TimeoutError
            if failed.is_late:
                leave_blocked_loop()
            raise
        finally:
            self.seconds += time.monotonic() - started - late - (0.0 if session is None else session.waited)


async def _in_loop(awaitable: Awaitable[T]) -> tuple[T, float]:
    """Have it done in the event loop of the user's coroutines. Returns when that was done, too."""

    async def timed() -> tuple[T, float]:
        return await awaitable, time.monotonic()

    future, cancel = submit(timed())
    done = asyncio.wrap_future(future)
    try:
        outcome = await asyncio.shield(done)
    except asyncio.CancelledError:
        cancel()
        await asyncio.wait([done], timeout=_GRACE_SECONDS)
        raise
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _in_thread(function: Callable[..., T], arguments: tuple[Any, ...]) -> asyncio.Future[tuple[T, float]]:
    """Call it in a thread of its own, for which no process waits when it ends. Returns when that was done, too."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[T, float]] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def work() -> None:
        result, failed = None, None
        try:
            result = function(*arguments)
        except (Exception, SystemExit) as error:
            failed = failure_of(error)
        with suppress(RuntimeError):  # nobody waits for it any more
            loop.call_soon_threadsafe(settle, (result, time.monotonic()), failed)

    _thread.start_new_thread(work, ())  # threading.Thread would wait until it runs, and for its end
    return future
