"""What answers the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from async_rlhf.config.base import require

KINDS = ("environment", "tools", "agent")
"""The keys of what may answer the policy, of which a run has one at most."""


@dataclass(frozen=True)
class World:
    """What answers the policy, as a user gives it: an environment, an agent, tools, or nothing."""

    environment: Any = None
    """Makes an environment for each episode."""
    tools: Sequence[Any] = ()
    """Functions that the policy may call."""
    agent: Any = None
    """A function of a client and a row that asks the policy itself."""

    @property
    def gives_rewards(self) -> bool:
        """Whether a run needs no other rewards."""
        return self.environment is not None or self.agent is not None

    @property
    def all(self) -> list[Any]:
        """All that the user gives."""
        return [part for part in (self.environment, *self.tools, self.agent) if part is not None]

    def check(self, max_turns: int | None, prefix: str = "", key: str = "generation.max_turns") -> None:
        """Require that there is one of them at most, and that the length of episodes is said if there is one.

        Raises:
            ConfigError: the error names the key, with a prefix those of the training.
        """
        named = [name for name in KINDS if getattr(self, name)]
        rule = (
            f"must be left out with {named[0] if named else ''}: only one of environment, tools and agent may be given"
        )
        require(len(named) < 2, named[-1] if named else "", "something", rule)
        rule = "must be given with an environment, tools or an agent, and null without"
        require(bool(named) == (max_turns is not None), f"{prefix}{key}", max_turns, rule)
