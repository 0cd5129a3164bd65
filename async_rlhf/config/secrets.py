"""Secrets stay in the process: what is printed, logged or written shows a placeholder instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

HIDDEN = "***"
"""Placeholder of a secret."""
API_KEY_VARIABLE = "ASYNC_RLHF_API_KEY"
"""The environment variable with the key of vLLM servers, on both sides."""

_KEYS = {"api_key", "auth_token", "hf_token", "hub_token", "password", "push_to_hub_token", "secret", "token"}
_KEYS |= {"use_auth_token"}
# Up to the last @ before the path: a password may have one, too.
_USER = re.compile(r"(?<=://)[^/?#\s'\"]*(?=@)")
_QUERY = re.compile(r"([?&][\w-]*(?:key|token|secret|password|signature)=)[^&#\s'\"]+", re.IGNORECASE)


def masked(text: str) -> str:
    """A text without the user and password of the URLs in it, and without the keys in their queries."""
    return _QUERY.sub(rf"\g<1>{HIDDEN}", _USER.sub(HIDDEN, text))


def is_masked(url: str) -> bool:
    """Whether :func:`masked` has removed a secret from the URL, which then cannot be used."""
    return masked(url) == url and HIDDEN in url


def apart(url: str) -> tuple[str, tuple[str, str] | None]:
    """A URL without user and password, and the two apart: libraries log the URL and name it in errors."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    return parts._replace(netloc=host).geturl(), (unquote(name), unquote(password)) if at else None


def without_secrets(values: Any, hidden: str | None = None, key: str = "") -> Any:
    """A configuration's values, at any depth, with its secrets left out.

    Args:
        values: a mapping, a list, or a single value; keys may have dots.
        hidden: replaces the value of a secret key; null by default, so that a file can be used again.
        key: the key of these values.
    """
    if isinstance(values, Mapping):
        return {name: without_secrets(value, hidden, str(name)) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [without_secrets(value, hidden, key) for value in values]
    if not isinstance(values, str):
        return values
    return hidden if is_secret(key) else masked(values)


def is_secret(key: str) -> bool:
    """Whether a key's value is a secret as a whole. Of a key with dots, the last part counts."""
    return key.rpartition(".")[2].replace("-", "_").lower() in _KEYS
