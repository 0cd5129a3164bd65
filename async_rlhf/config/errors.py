"""Errors of a configuration: they name the key, the value and what is right."""

from __future__ import annotations

from async_rlhf.config.secrets import HIDDEN, is_secret, masked


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the key, the value unless it is secret, and what is right."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


_SHOWN = 300


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """Raise :class:`ConfigError` for ``key`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{key}: got {HIDDEN if is_secret(key) else shown(value)}; {rule}")


def shown(value: object) -> str:
    """A value as messages show it: on one line, and of limited length."""
    try:
        text = repr(value)
    except Exception as error:  # of any kind: an integer with more digits than Python prints, a user's own class
        text = f"a {type(value).__name__} ({error})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def problem_of_text(text: str) -> str | None:
    """What is wrong with a text in any key; None if nothing is."""
    if "\0" in text:
        return "must be without NUL characters, which no path or name can hold"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "must be Unicode text, without half characters (surrogates)"
    return None
