"""Asynchronous RLHF for language models: sample and train at the same time, with exact staleness.

The public names are loaded when they are first used, so that ``import async_rlhf`` costs nothing and the
configuration can be read on a machine without torch.
"""

import logging
import warnings
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# peft loads bitsandbytes wherever it is installed, which then asks for one more package.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_PUBLIC = {
    "Algorithm": "async_rlhf.algorithms.record",
    "CISPOConfig": "async_rlhf.algorithms.grpo",
    "DrGRPOConfig": "async_rlhf.algorithms.grpo",
    "Environment": "async_rlhf.generation.episodes.environment",
    "GRPOConfig": "async_rlhf.algorithms.grpo",
    "GRPOTrainer": "async_rlhf.run.trainer",
    "GSPOConfig": "async_rlhf.algorithms.grpo",
    "GenerationConfig": "async_rlhf.config",
    "KLConfig": "async_rlhf.config",
    "LoRAConfig": "async_rlhf.config",
    "Needs": "async_rlhf.algorithms.record",
    "Observation": "async_rlhf.generation.episodes.environment",
    "OffPolicyConfig": "async_rlhf.config",
    "OnlineBoKConfig": "async_rlhf.algorithms.best_of_k",
    "OnlineBoKTrainer": "async_rlhf.run.trainer",
    "OnlineConfig": "async_rlhf.config",
    "OnlineDPOConfig": "async_rlhf.algorithms.online_dpo",
    "OnlineDPOTrainer": "async_rlhf.run.trainer",
    "OnlineTrainer": "async_rlhf.run.trainer",
    "OnlineTrainerState": "async_rlhf.run.callbacks",
    "PPOConfig": "async_rlhf.algorithms.ppo",
    "PPOTrainer": "async_rlhf.run.trainer",
    "ParallelConfig": "async_rlhf.config",
    "PolicyAndValueWrapper": "async_rlhf.models.forward",
    "RLOOConfig": "async_rlhf.algorithms.reinforce",
    "RLOOTrainer": "async_rlhf.run.trainer",
    "RayConfig": "async_rlhf.config",
    "ReinforcePPConfig": "async_rlhf.algorithms.reinforce",
}
_RENAMED: dict[str, str] = {}
"""Earlier names, and what each is now; for one version."""
__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if now := _RENAMED.get(name):
        warnings.warn(f"async_rlhf.{name} is now {now}; the next version has only that", FutureWarning, stacklevel=2)
        name = now
    if name not in _PUBLIC:
        raise AttributeError(f"module 'async_rlhf' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
