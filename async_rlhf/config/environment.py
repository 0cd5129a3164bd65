"""Variables that a configuration file may set: ``env:`` at its top."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from async_rlhf.config.base import require

KEY = "env"
EXPLAINED = (
    "Environment variables to set before torch is loaded, in a file: WANDB_*, HF_*, TOKENIZERS_* and "
    "CUDA_VISIBLE_DEVICES, but no keys, tokens or addresses of servers. A variable that the environment has already "
    "stays as it is."
)
_ALLOWED = re.compile(r"(WANDB|HF|TOKENIZERS)_[A-Z0-9_]+|CUDA_VISIBLE_DEVICES")
_SECRET = re.compile(r"(^|_)(API_KEY|KEY|TOKEN|PASSWORD|SECRET|COOKIE)(_|$)")
_PLACE = re.compile(r"(^|_)(BASE_URL|URL|ENDPOINT|HOST|PROXY|PROXIES|HEADERS)(_|$)")


def checked_environment(values: Any) -> dict[str, str]:
    """The variables of a file as text.

    Whoever writes a file must not make this program load libraries (LD_PRELOAD, PYTHONPATH), send keys to another host
    (HF_ENDPOINT, WANDB_BASE_URL) or keep a key where everybody reads it.

    Raises:
        ConfigError: one of them may not be set by a file, or its value is not text on one line.
    """
    rule = "must be names of variables and their values"
    require(values is None or isinstance(values, Mapping), KEY, values, rule)
    variables = {}
    for name, value in (values or {}).items():
        rule = "a file may set only WANDB_*, HF_*, TOKENIZERS_* and CUDA_VISIBLE_DEVICES; export others in the shell"
        require(isinstance(name, str) and _ALLOWED.fullmatch(name) is not None, KEY, name, rule)
        rule = "is a secret, which no file may hold; must be exported in the shell"
        require(_SECRET.search(name) is None, KEY, name, rule)
        rule = "says which server gets keys and data; must be exported in the shell"
        require(_PLACE.search(name) is None, KEY, name, rule)
        plain = isinstance(value, (str, int, float)) and str(value).isprintable()
        require(plain, f"{KEY}.{name}", value, "must be text on one line, a number, or true or false")
        variables[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return variables
