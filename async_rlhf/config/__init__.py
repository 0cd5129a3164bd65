"""Configuration: frozen dataclasses, checked when they are made. Imports neither torch nor transformers."""

from async_rlhf.config.base import ConfigError
from async_rlhf.config.online import GenerationConfig, OnlineConfig, OnlineDPOConfig
from async_rlhf.config.run import (
    DataConfig,
    EvaluateConfig,
    NewModelConfig,
    PairsConfig,
    RewardConfig,
    RunConfig,
    SFTConfig,
)

__all__ = [
    "ConfigError",
    "DataConfig",
    "EvaluateConfig",
    "GenerationConfig",
    "NewModelConfig",
    "OnlineConfig",
    "OnlineDPOConfig",
    "PairsConfig",
    "RewardConfig",
    "RunConfig",
    "SFTConfig",
]
