"""What a run's folder says about how the run came to be: run.yml, environment.json, and the same for trackers."""

from __future__ import annotations

import inspect
import json
import logging
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import yaml
from xxhash import xxh3_64_hexdigest

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.config.base import dotted
from async_rlhf.config.import_by_name import neighbours
from async_rlhf.config.rewards import FunctionName
from async_rlhf.config.secrets import HIDDEN, is_secret, masked, without_secrets
from async_rlhf.rewards.functions import name_loaded_by
from async_rlhf.system.errors import is_own
from async_rlhf.system.files import from_json, whole_file, write_file
from async_rlhf.system.versions import environment

logger = logging.getLogger(__name__)

RUN_FILE = "run.yml"
"""The whole configuration of a run, next to its logs: ``async-rlhf train --config run.yml`` runs it again."""
_ARITHMETIC = (
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)
"""Environment variables by which kernels add in another order, or in other types."""
ENVIRONMENT = "environment.json"
"""Versions, commits and machine of every start of the run: a list, the first start first."""


@dataclass(frozen=True)
class Record:
    """How a run was asked for, without its secrets."""

    values: Mapping[str, Any]
    """As :class:`~async_rlhf.run.config.RunConfig` spells it."""
    unnamed: Mapping[str, str] = field(default_factory=dict)
    """Keys that were given as objects in Python -> what they were."""

    def flat(self) -> dict[str, Any]:
        """The configuration as trackers show it: dotted keys, those of training without a prefix."""
        values = without_secrets(dict(self.values), HIDDEN)
        train = values.pop("train", {})
        for key in ("reward_funcs", "callbacks", "tools"):
            values[key] = [_without_secret_arguments(name) for name in values.get(key) or []]
        for key in ("environment", "agent"):
            values[key] = values.get(key) and _without_secret_arguments(values[key])
        return dotted(values) | dotted(train)

    def write(self, folder: Path) -> None:
        """Write run.yml, for the owner alone: engine options and reward arguments may contain secrets that we cannot
        recognise.
        """
        with whole_file(folder / RUN_FILE) as file:
            os.fchmod(file.fileno(), 0o600)
            if self.unnamed:
                file.write("# Of a run from Python. To run this file as a command, give by name what was an object:\n")
                file.writelines(f"#   {key}: {what}\n" for key, what in self.unnamed.items())
            yaml.safe_dump(without_secrets(dict(self.values)), file, sort_keys=False)


def unnamed_in(path: Path) -> list[str]:
    """What a run from Python was given as objects, as :meth:`Record.write` noted it: "key: what", or nothing."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return [line.removeprefix("#   ") for line in lines if line.startswith("#   ")]


def of_command(config: Any) -> Record:
    """The record of a run by the command: its whole configuration."""
    return Record(asdict(config))


def of_python(config: OnlineConfig, algorithm: str, inputs: Any) -> Record:
    """The record of a run from Python: names where there are names, and a word about every object.

    Args:
        config: of the run.
        algorithm: its name.
        inputs: the run's :class:`~async_rlhf.run.inputs.Inputs`.
    """
    unnamed: dict[str, str] = {}
    models = {}
    for key in ("model", "reward_model", "ref_model", "value_model"):
        model = getattr(inputs, key)
        if model is not None and not isinstance(model, str):
            unnamed[key] = type(model).__name__
            model = getattr(model.config, "_name_or_path", "") or None
        models[key] = model
    world, functions = inputs.world, {"reward_funcs": list(inputs.reward_funcs)}
    functions |= {"environment": [world.environment], "tools": list(world.tools), "agent": [world.agent]}
    names = {key: [name_loaded_by(f) or _name(f) for f in each if f is not None] for key, each in functions.items()}
    for key, each in functions.items():
        lost = [_name(f) for f in each if f is not None and name_loaded_by(f) is None and not _can_be_found(f)]
        if lost:
            unnamed[key] = ", ".join(lost)
    unnamed |= {"data.train": f"{_count(inputs.train_dataset)} rows"}
    if inputs.eval_dataset is not None:
        unnamed["data.eval"] = f"{_count(inputs.eval_dataset)} rows"
    callbacks = [_name(callback if isinstance(callback, type) else type(callback)) for callback in inputs.callbacks]
    if inputs.processing_class is not None:
        unnamed["tokenizer"] = type(inputs.processing_class).__name__
    values = {
        "model": models.pop("model"),
        "data": {"train": None, "eval": None, "prompt_field": inputs.prompt_field},
        **models,
        "reward_funcs": names["reward_funcs"],
        "environment": next(iter(names["environment"]), None),
        "tools": names["tools"],
        "agent": next(iter(names["agent"]), None),
        "tokenizer": getattr(inputs.processing_class, "name_or_path", None) or None,
        "callbacks": callbacks,
        "train": asdict(config),
        "algorithm": algorithm,
    }
    return Record(values, unnamed)


def derived(config: OnlineConfig, rows: int | None = None) -> dict[str, Any]:
    """What follows from a configuration, as trackers show it.

    Args:
        config: of the run.
        rows: prompts of one pass over the data, if that is known.
    """
    sizes: dict[str, Any] = {
        "prompts_per_batch": config.batch_size,
        "completions_per_batch": config.batch_size * config.samples_per_prompt,
        "batches": config.num_batches,
        "optimizer_steps": config.num_optimizer_steps,
        "longest_prompt": config.prompt_cap,
        "ranks": config.parallel.ranks,
        "placement": config.placement,
    }
    if rows:
        sizes |= {"prompts": rows, "num_train_epochs": config.num_batches * config.batch_size / rows}
    return sizes


def first_time(folder: Path) -> str | None:
    """The time that chat templates saw in a run; None if its folder does not say."""
    starts = starts_of(folder / ENVIRONMENT) or [{}]
    time = starts[0].get("chat_time")
    return time if isinstance(time, str) else None


def note_start(
    folder: Path,
    goes_on: bool,
    ranks: int,
    device: torch.device,
    chat_time: datetime,
    inputs: Mapping[str, str],
    threads: int | None,
) -> None:
    """Add this start to environment.json. A run that begins afresh begins a new list.

    Args:
        folder: of the run.
        goes_on: whether it is resumed there.
        ranks: of the learner.
        device: of the learner.
        chat_time: that chat templates see.
        inputs: checksums of what the run was given, by name.
        threads: of each generator process; None for torch's choice.
    """
    path = folder / ENVIRONMENT
    earlier = starts_of(path)
    if earlier is None:
        logger.warning("WARNING: %s was not written by a run, and is left as it is", path)
        return
    now = environment() | {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "chat_time": chat_time.isoformat(),
        "ranks": ranks,
        "inputs": dict(inputs),
        "processor": {"name": _processor(), "kernels": torch.backends.cpu.get_cpu_capability()},
        "threads": {"learner": torch.get_num_threads(), "generator": threads or torch.get_num_threads()},
        "arithmetic": {name: os.environ[name] for name in _ARITHMETIC if name in os.environ},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    now["command"] = without_secret_words(now["command"])
    write_file(path, json.dumps([*(earlier if goes_on else []), now], indent=1) + "\n")


def _processor() -> str:
    """Its name, as Linux has it."""
    with suppress(OSError):
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        return str(names[0]) if names else platform.machine()
    return platform.machine()


def _is_start(start: Any) -> bool:
    return isinstance(start, dict) and "async_rlhf" in start


def starts_of(path: Path) -> list[dict[str, Any]] | None:
    """The starts noted so far; None if it is another file."""
    if not path.exists():
        return []
    try:
        starts = from_json(path.read_text(encoding="utf-8"))
        return starts if isinstance(starts, list) and all(map(_is_start, starts)) else None
    except (OSError, ValueError):
        return None


def without_secret_words(words: list[str]) -> list[str]:
    """A command's words without the values of secret keys: "--a.api_key=x" and "--a.api_key x"."""
    shown, hide = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = name.startswith("--") and is_secret(name[2:])
        shown.append(HIDDEN if hide else f"{name}={HIDDEN}" if secret and equals else _public(word))
        hide = secret and not equals and not hide
    return shown


def _public(word: str) -> str:
    start = word.find("{")
    if start >= 0 and word.endswith("}"):  # a group of keys, or a key that is a mapping
        try:
            values = yaml.safe_load(word[start:])
            return word[:start] + json.dumps(without_secrets(values, HIDDEN))
        except (yaml.YAMLError, TypeError):
            return HIDDEN
    return masked(_without_secret_arguments(word))


def without_text_arguments(name: str) -> str:
    """A function's name as in reward_funcs, with those of its arguments that are numbers, true, false or null."""
    return _with_arguments(name, lambda key, value: is_secret(key) or not isinstance(value, (int, float, type(None))))


def _without_secret_arguments(name: str) -> str:
    """The same without the values of arguments such as api_key."""
    return _with_arguments(name, lambda key, value: is_secret(key))


def _with_arguments(name: str, hides: Callable[[str, Any], bool]) -> str:
    if "(" not in name:
        return name
    try:
        wanted = FunctionName.parse(name, "")
    except ConfigError:
        return name
    arguments = (f"{k}={HIDDEN if hides(k, v) else repr(v)}" for k, v in (wanted.arguments or {}).items())
    return f"{wanted.place}:{wanted.attribute}({', '.join(arguments)})"


CODE = "code of "
"""How a run's inputs that are code begin."""


def code_digests(functions: Iterable[Any]) -> dict[str, str]:
    """Checksums of the user's own files that functions, classes and objects are made of, and of the files beside these
    that they import: :data:`CODE` and the file's name -> checksum. Of what the program itself defines, its own text. Of
    a record, such as an algorithm's, what it holds counts.
    """
    texts: dict[str, list[bytes]] = {}
    left = list(functions)
    while left:
        function = left.pop()
        if is_dataclass(function) and not isinstance(function, type):
            left += [held for each in fields(function) if callable(held := getattr(function, each.name))]
        made = inspect.unwrap(function.func if isinstance(function, partial) else function)
        made = made if isinstance(made, type) or inspect.isroutine(made) else type(made)
        with suppress(OSError, TypeError):  # it has no source, as what is typed at a prompt
            file = inspect.getsourcefile(made)
            if file is None or not is_own(file):
                continue
            if made.__module__ == "__main__":
                texts.setdefault(made.__qualname__, []).append(inspect.getsource(made).encode())
                continue
            for path in (Path(file), *neighbours(Path(file).resolve())):
                texts.setdefault(path.name, []).append(path.read_bytes())
    return {f"{CODE}{name}": xxh3_64_hexdigest(b"".join(sorted({*all_of}))) for name, all_of in texts.items()}


def _name(function: Callable[..., Any]) -> str:
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


def _can_be_found(function: Callable[..., Any]) -> bool:
    return getattr(function, "__qualname__", "<").isidentifier() and function.__module__ != "__main__"


def _count(rows: Any) -> int | str:
    return len(rows) if hasattr(rows, "__len__") else "some"
