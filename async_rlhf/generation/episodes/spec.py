"""How episodes are played, as it reaches every process that samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import cloudpickle

from async_rlhf.config import GenerationConfig, OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.config.episodes import World
from async_rlhf.config.import_by_name import load_attribute
from async_rlhf.config.rewards import FunctionName
from async_rlhf.generation.episodes.tools import ToolEnvironment, as_environment, schemas_of
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.system.user_code import own_copy
from async_rlhf.types import Prompt


@dataclass(frozen=True)
class Sent:
    """Something of the user's that other processes need: they load it by its name or, without one, get it by value."""

    value: Any
    load: Callable[[], Any] | None = None
    name: str = ""

    @classmethod
    def of(cls, value: Any) -> Sent:
        """A class, a function or an object, with its name for messages."""
        return (
            value if isinstance(value, Sent) else cls(value, name=getattr(value, "__qualname__", type(value).__name__))
        )

    def __call__(self) -> Any:
        """What the environment's class or function makes."""
        return self.value()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.load or cloudpickle.dumps(self.value), self.name)


def _received(what: Any, name: str) -> Sent:
    return Sent(what(), what, name) if callable(what) else Sent(cloudpickle.loads(what), name=name)


def named(name: str, key: str) -> Sent:
    """What a configuration names: "module:attribute" or "file.py:attribute", with arguments those that are filled in.

    Raises:
        ConfigError: there is no such thing; the error names the key.
    """
    load = partial(_load, name, key)
    return Sent(load(), load, name)


def _load(name: str, key: str) -> Any:
    wanted = FunctionName.parse(name, key)
    function = load_attribute(wanted.place, wanted.attribute, key, "function")
    require(callable(function), key, name, "must be a class or a function")
    return function if wanted.arguments is None else partial(function, **wanted.arguments)


@dataclass(frozen=True)
class EpisodeSpec:
    """How episodes are played."""

    environment: Sent
    """Makes an environment for each episode."""
    chat: ChatTemplate
    """Writes the policy's chats."""
    generation: GenerationConfig
    """Has their limits; with ``max_turns``."""
    skip: bool
    """Give an episode that fails no reward, instead of ending the run."""
    is_agent: bool = False
    """The environment is an agent: a function of a client and a row, which asks the policy itself."""
    prompt_field: str = "query"
    """The column with the prompt."""
    is_judged: bool = False
    """Something else gives rewards, too, so an agent may return none."""

    def row(self, prompt: Prompt) -> dict[str, Any]:
        """The prompt's row, as the data has it: a copy, which the user's code may change."""
        chat = {} if prompt.messages is None else {self.prompt_field: list(prompt.messages)}
        copied: dict[str, Any] = own_copy({**prompt.columns, **chat})
        if prompt.column is not None:
            copied[prompt.column] = copied.pop(self.prompt_field)
        return copied


def _maker(world: World) -> Sent | None:
    if world.gives_rewards:
        return Sent.of(world.environment or world.agent)
    tools = world.tools
    functions = [Sent.of(tool) for tool in tools]
    names = ", ".join(function.name for function in functions)
    return Sent(partial(_with_tools, functions), name=names) if functions else None


def _with_tools(functions: Sequence[Sent]) -> ToolEnvironment:
    return ToolEnvironment([function.value for function in functions])


def tools_of(world: World) -> list[dict[str, Any]]:
    """Schemas of the functions that the policy may call; those of an agent are its own.

    Raises:
        ConfigError: the environment cannot be made, or a function has no types or explanations.
    """
    made = _maker(world)
    return [] if made is None or world.agent is not None else schemas_of(getattr(as_environment(made()), "tools", ()))


def episodes_of(
    config: OnlineConfig, world: World, chat: ChatTemplate, prompt_field: str = "query", is_judged: bool = False
) -> EpisodeSpec | None:
    """How a run plays its episodes; None if nothing answers the policy. See :class:`EpisodeSpec`."""
    skip = config.reward_errors == "skip"
    return spec_of(config.generation, world, chat, prompt_field, is_judged, skip)


def spec_of(
    generation: GenerationConfig,
    world: World,
    chat: ChatTemplate,
    prompt_field: str,
    is_judged: bool,
    skip: bool = False,
) -> EpisodeSpec | None:
    """The same for whoever has models play."""
    made = _maker(world)
    if made is None:
        return None
    is_agent, rule = world.agent is not None, "must be left out, or aiohttp must be installed: pip install aiohttp"
    require(not is_agent or find_spec("aiohttp") is not None, "agent", made.name, rule)
    return EpisodeSpec(made, chat, generation, skip, is_agent, prompt_field, is_judged)


def world_named(environment: str | None, tools: Sequence[str], agent: str | None) -> World:
    """What a configuration names.

    Raises:
        ConfigError: there is no such thing.
    """
    return World(
        None if environment is None else named(environment, "environment"),
        [named(name, "tools") for name in tools],
        None if agent is None else named(agent, "agent"),
    )
