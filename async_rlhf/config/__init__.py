"""Configuration: frozen dataclasses, checked when they are made. Imports neither torch nor transformers."""
# ruff: noqa: F401 - other rooms import the names from here

from async_rlhf.config.base import ConfigError
from async_rlhf.config.evaluation import EvaluateConfig, GenerateConfig
from async_rlhf.config.generation import GenerationConfig, ServeConfig, VLLMConfig
from async_rlhf.config.online import AdapterConfig, KLConfig, LoRAConfig, OnlineConfig
from async_rlhf.config.parallel import ParallelConfig
from async_rlhf.config.policy import GroupConfig, KLPenaltyConfig, OffPolicyConfig, RatioConfig
from async_rlhf.config.ray import RayConfig
from async_rlhf.config.rewards import JudgeConfig
from async_rlhf.config.stages import NewModelConfig, PairsConfig, RelabelConfig, RewardConfig, SFTConfig
