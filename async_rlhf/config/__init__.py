"""Configuration: frozen dataclasses, checked when they are made. Imports neither torch nor transformers."""

from async_rlhf.config.algorithms import (
    ALGORITHM_CONFIGS,
    GroupConfig,
    GRPOConfig,
    KLConfig,
    KLPenaltyConfig,
    OffPolicyConfig,
    OnlineBoKConfig,
    OnlineDPOConfig,
    PPOConfig,
    RatioConfig,
    RLOOConfig,
    algorithm_of,
)
from async_rlhf.config.base import ConfigError
from async_rlhf.config.evaluation import EvaluateConfig, GenerateConfig
from async_rlhf.config.generation import GenerationConfig, ServeConfig, VLLMConfig
from async_rlhf.config.online import AdapterConfig, LoRAConfig, OnlineConfig
from async_rlhf.config.parallel import ParallelConfig
from async_rlhf.config.plan import PlanConfig
from async_rlhf.config.ray import RayConfig
from async_rlhf.config.rewards import JudgeConfig
from async_rlhf.config.run import DataConfig, ReplayConfig, RunConfig
from async_rlhf.config.stages import (
    NewModelConfig,
    PairsConfig,
    RelabelConfig,
    RewardConfig,
    SFTConfig,
)

__all__ = [
    "ALGORITHM_CONFIGS",
    "AdapterConfig",
    "ConfigError",
    "DataConfig",
    "EvaluateConfig",
    "GRPOConfig",
    "GenerateConfig",
    "GenerationConfig",
    "GroupConfig",
    "JudgeConfig",
    "KLConfig",
    "KLPenaltyConfig",
    "LoRAConfig",
    "NewModelConfig",
    "OffPolicyConfig",
    "OnlineBoKConfig",
    "OnlineConfig",
    "OnlineDPOConfig",
    "PPOConfig",
    "PairsConfig",
    "ParallelConfig",
    "PlanConfig",
    "RLOOConfig",
    "RatioConfig",
    "RayConfig",
    "RelabelConfig",
    "ReplayConfig",
    "RewardConfig",
    "RunConfig",
    "SFTConfig",
    "ServeConfig",
    "VLLMConfig",
    "algorithm_of",
]
