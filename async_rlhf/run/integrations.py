"""Trackers that transformers reports to: whether there is such a one, and whether its package is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from async_rlhf.config import ConfigError

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
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(f"report_to: got {name!r}; must be one of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}")
        modules = _MODULES.get(name, ())
        if modules and all(find_spec(module) is None for module in modules):
            package = modules[0].replace("_", "-")
            raise ConfigError(f"report_to: got {name!r}, which is not installed; pip install {package}")
