"""How configurations name the judge of completions: a reward model, Python functions, or a language model."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from async_rlhf.config.base import Checked, ConfigError, Rule, configuration, key, require
from async_rlhf.config.secrets import HIDDEN, apart, is_masked

GOLD_REWARD = "async_rlhf.tasks.docstrings.reward:gold_rewards"


FUNCTION = (
    'must be "module:function" or "path/to/file.py:function", maybe with literal keyword arguments: '
    '"module:function(limit=3)"'
)
_FORM = re.compile(r"(?P<place>.+?):(?P<attribute>[^\W\d]\w*)(?P<call>\(.*\))?", re.DOTALL)


@dataclass(frozen=True)
class FunctionName:
    """ "place:attribute" or "place:attribute(key=value, ...)".

    Args:
        place: a module, or the path of a file that ends with ".py".
        attribute: what to take from it.
        arguments: arguments to call it with first; None if the name has no parentheses.
    """

    place: str
    attribute: str
    arguments: dict[str, Any] | None = None

    @staticmethod
    def parse(name: str, key: str) -> FunctionName:
        """Parse the name that was given for a configuration key.

        Raises:
            ConfigError: the name has another form, or arguments that are not literals.
        """
        match = _FORM.fullmatch(name.strip())
        if match is None:
            raise ConfigError(f"{key}: got {name!r}; {FUNCTION}")
        arguments = None if match["call"] is None else _arguments(match["call"], name, key)
        return FunctionName(match["place"], match["attribute"], arguments)


def _arguments(call: str, name: str, key: str) -> dict[str, Any]:
    arguments = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backslashes that are no escapes, as in '\\d+'
            tree = ast.parse(f"f{call}", mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
            raise ValueError("there is more than one pair of parentheses")
        if tree.args:
            raise ValueError("arguments need their names")
        for keyword in tree.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise ValueError("** is not possible" if keyword.arg is None else f"{keyword.arg} is given twice")
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error).partition(" on line")[0]
        raise ConfigError(f"{key}: got {name!r}: {reason}; {FUNCTION}") from error
    return arguments


def check_functions(functions: Sequence[str], key: str = "reward_funcs") -> None:
    """Require every name to have the form of a function's name.

    Raises:
        ConfigError: one does not.
    """
    for name in functions:
        FunctionName.parse(name, key)


@configuration
class EndpointConfig(Checked):
    """A model behind a URL."""

    url: str | None = key(
        None,
        Rule(
            lambda url: url.startswith(("http://", "https://")),
            'must begin with http:// or https://, such as "http://localhost:8000/v1"',
        ),
        Rule(lambda url: not is_masked(url), f"must have its user and password again in the place of {HIDDEN}"),
    )
    """URL up to and including the version, such as "http://localhost:8000/v1"; null for no such judge."""
    model: str = ""
    """Name of the model at that URL."""
    api_key_variable: str = key("OPENAI_API_KEY", role="place")
    """The environment variable with the key; it may be unset if no key is needed."""
    concurrency: int = key(8, ge=1, role="speed")
    """Requests under way at the same time."""
    timeout: float = key(120.0, gt=0, role="speed")
    """Seconds for one request."""
    max_retries: int = key(5, ge=0, role="speed")
    """How often a failed request is repeated."""

    def require_public(self) -> None:
        """Require a URL, as an option of a reward function, which is written to run.yml."""
        key = f"{self._group}url"
        require(self.url is not None, key, self.url, "must be the URL of a server")
        rule = "must have no user and password in it, as it is written to run.yml; use api_key_variable"
        require(apart(self.url or "")[1] is None, key, "a URL with a password", rule)


@configuration
class JudgeConfig(EndpointConfig):
    """A language model that compares two completions, behind an OpenAI-compatible URL.

    Each pair is shown twice, the second time in the other order; a completion wins when both verdicts name it, and
    two verdicts that contradict each other count as a tie.
    """

    _group = "judge."

    prompt_file: str | None = key(None, names="file")
    """A text file with {prompt}, {first} and {second} that asks for a verdict of "A" or "B"; null for a general
    question about helpfulness. In the place of {mark} comes a word that is in none of the three."""
    max_tokens: int = key(16, ge=1)
    """Most tokens of a verdict."""

    def check(self) -> None:
        self.require(self.url is None or self.model != "", "model", "name the model at judge.url")


def check_rewards(judged: bool, reward_model: object) -> None:
    """Require something to train on; the reward model is for the error."""
    rule = "give a reward_model, reward_funcs, an environment or an agent, or several of them"
    require(judged, "reward_model", reward_model, rule)
