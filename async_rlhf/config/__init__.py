"""Configuration: frozen dataclasses, checked when they are made. Imports neither torch nor transformers."""

from async_rlhf.config.base import ConfigError
from async_rlhf.config.evaluation import EvaluateConfig, GenerateConfig
from async_rlhf.config.generation import GenerationConfig, ServeConfig, VLLMConfig
from async_rlhf.config.online import AdapterConfig, LoRAConfig, OnlineConfig
from async_rlhf.config.parallel import ParallelConfig
from async_rlhf.config.policy import GroupConfig, KLConfig, KLPenaltyConfig, OffPolicyConfig, RatioConfig
from async_rlhf.config.ray import RayConfig
from async_rlhf.config.rewards import FeedbackConfig, JudgeConfig
from async_rlhf.config.stages import NewModelConfig, PairsConfig, RelabelConfig, RewardConfig, SFTConfig

__all__ = [
    "AdapterConfig",
    "ConfigError",
    "EvaluateConfig",
    "FeedbackConfig",
    "GenerateConfig",
    "GenerationConfig",
    "GroupConfig",
    "JudgeConfig",
    "KLConfig",
    "KLPenaltyConfig",
    "LoRAConfig",
    "NewModelConfig",
    "OffPolicyConfig",
    "OnlineConfig",
    "PairsConfig",
    "ParallelConfig",
    "RatioConfig",
    "RayConfig",
    "RelabelConfig",
    "RewardConfig",
    "SFTConfig",
    "ServeConfig",
    "VLLMConfig",
]
