"""What a configuration names: files, folders, models, data sets, functions, trackers. A command looks for all of them
before it loads torch, so that a misspelt one is an error at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from async_rlhf.config.base import Checked, ConfigError, fields_of, require
from async_rlhf.config.rewards import FUNCTION, FunctionName
from async_rlhf.system.files import from_json

TEXT_FILES = (".jsonl", ".json", ".csv", ".tsv")
"""Each perhaps compressed: rows.jsonl.gz."""
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
DATA_FILES = (*TEXT_FILES, ".parquet")
_HUB_SECONDS = 10.0
"""To wait for the hub's answer whether it has a name."""


def check_names(*configs: tuple[Checked, str]) -> None:
    """Require that there is what the keys of configurations name, see ``names`` of
    :func:`~async_rlhf.config.base.key`.

    Args:
        configs: each with what comes before its keys in errors.

    Raises:
        ConfigError: names the first that is not there. The hub is asked last.
    """
    order = list(_CHECKS)
    references = dict.fromkeys(named for config, group in configs for named in _names(config, group))
    for kind, key, name in sorted(references, key=lambda named: order.index(named[0])):
        _CHECKS[kind](name, key)


def _names(config: Any, group: str) -> Iterator[tuple[str, str, str]]:
    """The kind, the key and the name of each."""
    for item in fields_of(type(config)):
        value, key = getattr(config, item.name), f"{group}{item.name}"
        kind = item.metadata.get("names", "")
        if isinstance(value, Checked):
            yield from _names(value, f"{key}.")
        elif kind and isinstance(value, Mapping):
            yield from ((kind, f"{key}.{name}", source) for name, source in value.items())
        elif kind and value:
            yield from ((kind, key, name) for name in ([value] if isinstance(value, str) else value))


def is_path(source: str) -> bool:
    """Whether it can only be a path: hub names have at most one slash, and do not start with a dot or slash."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1


def why_nowhere(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Why a name that is no folder's is nothing on the hub either; None if the hub, or its cache here, may have it.

    One question without retries, where loading would try for half a minute before it gives up.
    """
    from huggingface_hub import HfApi, constants, errors

    # What the hub's client has fetched, and what datasets has made of it.
    rows = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"))
    fetched = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"
    if fetched.is_dir() or (kind == "dataset" and (rows / name.replace("/", "___")).is_dir()):
        return None
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_HUB_SECONDS)
    except errors.GatedRepoError:
        return None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        return f"there is no such folder, and the hub has no such {kind}"
    except errors.OfflineModeIsEnabled:
        return "there is no such folder, and the hub is not asked (HF_HUB_OFFLINE)"
    except Exception as error:  # the client's own kinds differ between its versions
        unreached = isinstance(error, (OSError, errors.LocalEntryNotFoundError))
        if unreached or "Connect" in type(error).__name__ or "Timeout" in type(error).__name__:
            return "there is no such folder; if it is a name on the hub, that cannot be reached now"
    return None


def with_revision(name: str) -> tuple[str, str | None]:
    """A hub name such as "owner/model@revision" as name and revision; a folder, and a name without one, as it is.

    A revision is a branch, a tag or a commit of the repository.
    """
    model, at, revision = name.rpartition("@")
    if not at or Path(name).expanduser().is_dir():
        return name, None
    return model, revision


def check_source(name: str | None, key: str) -> None:
    """Require a name to be that of a folder, or one that the hub may have, maybe with a revision.

    Raises:
        ConfigError: it can only be a folder's, and there is none; or it has an empty revision.
    """
    if name is None or Path(name).expanduser().is_dir():
        return
    hub_name, revision = with_revision(name)
    require(revision != "", key, name, "must have a branch, a tag or a commit after the @")
    rule = "must be a folder with a model, or a hub name such as owner/model or owner/model@revision"
    if Path(name).expanduser().exists():
        raise ConfigError(f"{key}: got {name!r}, which is a file; {rule}")
    require(hub_name.count("/") == 1 and not is_path(hub_name), key, name, f"there is no such folder; {rule}")
    require((why := why_nowhere(hub_name, "model")) is None, key, name, f"{why}; {rule}")


def check_folder(name: str, key: str) -> None:
    """Require of a folder that it holds a model, or adapters of one that is there.

    Raises:
        ConfigError: says what it lacks.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        base = base_of(folder)
        require(base is not None, key, name, "the folder has no config.json; must be a folder with a model")
        problem = f"{key}: got {name!r}, which has only adapters of {base!r}"
        rule = "must be a whole model, or adapters whose adapter_config.json says where theirs is"
        require(bool(base), key, name, f"the folder has only adapters, and their base is unknown; {rule}")
        try:
            _check_model(str(base), "base_model_name_or_path")
        except ConfigError as error:
            raise ConfigError(f"{problem}: {error}; {rule}") from None
    elif not any(next(folder.glob(kind), None) for kind in ("*.safetensors", "*.bin")):
        raise ConfigError(f"{key}: got {name!r}; the folder has no weights; must have model.safetensors, or its parts")


def base_of(folder: Path) -> str | None:
    """The model that the adapters in a folder are for, "" if they do not say; None if there are none."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        return str(from_json(file.read_text("utf-8")).get("base_model_name_or_path") or "")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{str(file)!r} is no JSON object: {error}") from error


def _check_model(name: str, key: str) -> None:
    check_source(name, key)
    check_folder(name, key)


def is_text(path: Path) -> bool:
    """Whether a file is one of :data:`TEXT_FILES` by its name, perhaps compressed."""
    return (Path(path.stem) if path.suffix in _COMPRESSED else path).suffix in TEXT_FILES


def find_data(source: str, split: str, key: str) -> Path:
    """The file or folder that a data set's name means; a path that does not exist for a hub name.

    Raises:
        ConfigError: there is none.
    """
    path = Path(source).expanduser()
    files = [path / f"{split}{suffix}" for suffix in DATA_FILES]
    path = next((file for file in files if file.is_file()), path)
    if (path.suffix in DATA_FILES or is_text(path)) and not path.is_file():
        raise ConfigError(f"{key}: got {source!r}; there is no such file")
    if path.is_file() and not (path.suffix in DATA_FILES or is_text(path)):
        rule = "must be a .jsonl, .json, .csv or .tsv file, as it is or compressed (.gz), or a .parquet file"
        raise ConfigError(f"{key}: got {source!r}; {rule}")
    if is_path(source) and not path.exists():
        raise ConfigError(f"{key}: got {source!r}; there is no such file or folder")
    if not path.exists() and (why := why_nowhere(source.partition(":")[0], "dataset")) is not None:
        raise ConfigError(f"{key}: got {source!r}; {why}; must be a file, a folder, or a name on the hub")
    return path


def _check_function(name: str, key: str) -> None:
    source, top = (wanted := FunctionName.parse(name, key)).place, wanted.place.partition(".")[0]
    if source.endswith(".py"):
        why = "" if Path(source).is_file() else f"there is no file {source!r}"
    else:
        if "" not in sys.path:
            sys.path.append("")  # as where it is loaded
        with suppress(ValueError):  # a module without a spec, such as __main__
            why = "" if find_spec(top) is not None else f"No module named {top!r}"
    if why:
        raise ConfigError(f"{key}: got {name!r}: {why}; {FUNCTION}")


_MODULES = {
    **{name: (name,) for name in ("wandb", "trackio", "mlflow", "clearml", "codecarbon", "comet_ml", "dagshub")},
    **{name: (name,) for name in ("dvclive", "neptune", "swanlab")},
    "tensorboard": ("tensorboard", "tensorboardX"),
    "flyte": ("flytekit",),
}
"""By the integration's name, the modules of which it needs one."""


def check_integrations(names: Sequence[str]) -> None:
    """Require integrations that transformers knows and that are installed; to be called before anything is loaded.

    Raises:
        ConfigError: says how to install what is missing.
    """
    for name in names:
        _check_integration(name, "report_to")


def _check_integration(name: str, key: str) -> None:
    modules = _MODULES.get(name, ())
    if name == "none":
        return
    if not modules:
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(f"{key}: got {name!r}; must be one of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}")
    elif all(find_spec(module) is None for module in modules):
        package = modules[0].replace("_", "-")
        raise ConfigError(f"{key}: got {name!r}, which is not installed; pip install {package}")


def _there(is_there: Callable[[Path], bool], rule: str) -> Callable[[str, str], None]:
    def check(name: str, key: str) -> None:
        require(is_there(Path(name).expanduser()), key, name, rule)

    return check


def _check_template(name: str, key: str) -> None:
    """Of what can only be the name of a file, and no template's text or name."""
    if "{" not in name and ("/" in name or "." in name):
        _CHECKS["file"](name, key)


_CHECKS: Mapping[str, Callable[[str, str], None]] = {
    "tracker": _check_integration,
    "file": _there(Path.is_file, "there is no such file"),
    "folder": _there(Path.is_dir, "there is no such folder"),
    "run": _there(Path.is_dir, "there is no such folder; must be the output folder of a run"),
    "run or file": _there(Path.exists, "must be the output folder of a run, or the YAML file of one"),
    "template": _check_template,
    "function": _check_function,
    "source": check_source,
    "model": _check_model,
    "data": lambda name, key: (find_data(name, "train", key), None)[1],
}
"""What looks for each kind of name, those that may ask the hub last."""
