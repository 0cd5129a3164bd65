"""Configuration of online training as a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields, make_dataclass
from typing import Any

from async_rlhf.algorithms.table import find
from async_rlhf.config.base import REQUIRED, configuration, key, require
from async_rlhf.config.common import PromptsConfig, RewardedConfig, TrainRowsConfig, WorldConfig
from async_rlhf.config.online import OnlineConfig
from async_rlhf.config.rewards import check_functions, check_rewards


@configuration
class DataConfig(PromptsConfig, TrainRowsConfig):
    """Where prompts come from."""

    _group = "data."


@configuration
class RunConfig(RewardedConfig, WorldConfig):
    """Online training: ``async-rlhf train``."""

    model: str = key(REQUIRED, main="data and models", names="model")
    """The policy to start from, a folder or a name on the hub. Every name of a model or tokenizer on the hub may say a
    branch, a tag or a commit: owner/model@revision."""
    data: DataConfig = key(REQUIRED)
    """Where prompts come from."""
    reward_model = key(None, main="data and models")
    """A sequence-classification model with one output, read at the last token: a folder or a name on the hub."""
    reward_funcs = key([], main="data and models")
    """Instead of or besides reward_model, Python functions as "module:function" or "file.py:function", optionally with
    literal keyword arguments, called as f(prompts=..., completions=..., **columns) and returning one number per
    completion. They may be async; all are called at the same time."""
    ref_model: str | None = key(None, names="model")
    """The reference policy; null takes the policy's starting weights."""
    value_model: str | None = key(None, names="source")
    """The value model that PPO starts from, such as the value_model folder of an earlier run's checkpoint; null takes
    the reward model."""
    tokenizer: str | None = key(None, names="source")
    """The tokenizer, a folder or a name on the hub; null takes the policy's."""
    callbacks: list[str] = key([], names="function")
    """transformers' callbacks as "module:Class" or "file.py:Class"."""
    train: OnlineConfig = key(lambda: find("online_dpo").config())
    """Everything about the training itself; the keys depend on the algorithm."""
    algorithm: str = key("online_dpo", main="training")
    """The objective: online_dpo, best_of_k, rloo, reinforce_pp, ppo, grpo, dr_grpo, gspo or cispo, or a record of your
    own as "module:RECORD" or "path/to/file.py:RECORD"."""

    @classmethod
    def with_all_keys(cls, value: Callable[[str], Any]) -> type[RunConfig]:
        algorithm = value("algorithm")
        return cls.of(cls.algorithm if algorithm is None else algorithm)

    @staticmethod
    def of(algorithm: str) -> type[RunConfig]:
        """This class with one algorithm's keys for ``train``, for parsing."""
        kind = find(algorithm).config
        # No default for train: that would be a run of default size, which not every number of ranks can divide.
        keys = [("train", kind, field(kw_only=True)), ("algorithm", str, key(algorithm, main="training"))]
        namespace = {"__doc__": RunConfig.__doc__}
        return make_dataclass("RunConfig", keys, bases=(RunConfig,), frozen=True, namespace=namespace)

    def __reduce__(self) -> tuple[Any, ...]:
        """By the algorithm's name: a class from a file of the user's own is loaded where it is unpickled."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        train = values.pop("train")
        return _unpickled, (values, {item.name: getattr(train, item.name) for item in fields(train)})

    @property
    def overwrite(self) -> bool:
        """Whether to train again if that is done already."""
        return self.train.overwrite_output_dir

    def check(self) -> None:
        algorithm = find(self.algorithm)
        rule = f"must be a {algorithm.config.__name__} with algorithm {self.algorithm!r}"
        require(type(self.train) is algorithm.config, "train", type(self.train).__name__, rule)
        rule = f"must be null: {self.algorithm!r} has no value model"
        needs = algorithm.needs(self.train)
        require(self.value_model is None or needs.values, "value_model", self.value_model, rule)
        check_functions(self.reward_funcs)
        check_functions(self.callbacks, "callbacks")
        weights, functions = self.train.reward_weights, self.reward_funcs
        rule = f"must be empty, or one number for each of the {len(functions)} of reward_funcs"
        require(len(weights) in (0, len(functions)), "train.reward_weights", weights, rule)
        steps, held = self.train.eval_steps, self.data.eval is not None or self.data.eval_fraction is not None
        require(steps == 0 or held, "train.eval_steps", steps, "must be 0 without data.eval or data.eval_fraction")
        if not held:
            names = ("train.eval_temperature", "train.eval_samples_per_prompt")
            self.leaves_out(names, "without data.eval or data.eval_fraction")
        if self.reward_model is None:
            self.leaves_out(["train.reward_model_weight"], "without reward_model")
        judged = self.reward_model is not None or len(self.reward_funcs) > 0 or self.world.gives_rewards
        check_rewards(judged, self.reward_model)
        check_functions(self.tools, "tools")
        for name in ("environment", "agent"):
            check_functions([] if getattr(self, name) is None else [getattr(self, name)], name)
        self.world.check(self.train.generation.max_turns, "train.")


def _unpickled(values: dict[str, Any], train: dict[str, Any]) -> RunConfig:
    return RunConfig(**values, train=find(values["algorithm"]).config(**train))
