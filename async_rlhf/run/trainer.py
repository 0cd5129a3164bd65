"""The trainers that a user constructs; they open and close everything that training needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from async_rlhf.algorithms.best_of_k import BEST_OF_K
from async_rlhf.algorithms.grpo import GRPO
from async_rlhf.algorithms.online_dpo import ONLINE_DPO
from async_rlhf.algorithms.ppo import PPO
from async_rlhf.algorithms.record import Algorithm
from async_rlhf.algorithms.reinforce import RLOO
from async_rlhf.config import LoRAConfig, OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.config.episodes import World
from async_rlhf.data.checksums import digest_of
from async_rlhf.data.loading import Rows, check_columns
from async_rlhf.data.tokenizer import text_of
from async_rlhf.generation.placement import shared_cores
from async_rlhf.generation.protocol import Generator
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.learner.learner import Learner
from async_rlhf.learner.optimizers import Optimizers
from async_rlhf.rewards.functions import RewardFunction
from async_rlhf.rewards.reward_models import RewardModels
from async_rlhf.run.async_checkpoint import saving
from async_rlhf.run.build import Run, build
from async_rlhf.run.callbacks import Callbacks, OnlineTrainerState
from async_rlhf.run.factory import make_generator
from async_rlhf.run.folder import FINAL, log_names
from async_rlhf.run.held_out import Evaluations, evaluate
from async_rlhf.run.hub import push_policy
from async_rlhf.run.inputs import Inputs, Model, Start
from async_rlhf.run.loop import TrainingLoop, write_learner
from async_rlhf.run.record import Record, note_start
from async_rlhf.run.schedule import RolloutSchedule
from async_rlhf.system.files import JsonLines
from async_rlhf.system.lock import require_hold
from async_rlhf.system.names import check_source
from async_rlhf.system.signals import ending_on_signals
from async_rlhf.system.trace import Trace
from async_rlhf.types import Group


class OnlineTrainer:
    """Online training of a causal language model; the type of the configuration selects the algorithm.

    Args:
        model: the policy, trained in place; a model, a folder or a hub name, perhaps owner/model@revision.
        args: the configuration: GRPOConfig for GRPO, and so on.
        train_dataset: rows with the prompt's text, such as a datasets.Dataset or a list of dicts.
        reward_model: scores completions: a sequence-classification model with one output, a folder or a hub name.
        reward_funcs: called as f(prompts=..., completions=..., **columns); their sum, and the reward model's score,
            is the reward. The name of a reward model, as in TRL, is a function that reads it with its own tokenizer.
        environment: makes an environment for each episode, which answers the policy's messages: a class or a function
            without arguments; see :class:`~async_rlhf.Environment`. TRL's ``environment_factory`` works, too.
        tools: instead, functions that the policy may call, with types and a docstring that explains every parameter.
        agent: instead, an async function of a :class:`~async_rlhf.generation.episodes.endpoint.Client` and a row that
            asks the policy as often as it likes and returns a reward.
        ref_model: the reference policy; None takes the policy's starting weights.
        value_model: for PPO, the value model to start from: a model, or the value_model folder of an earlier run's
            checkpoint; None takes the reward model, or without one the policy's body.
        processing_class: the tokenizer; None loads the policy's.
        eval_dataset: held-out rows.
        callbacks: transformers' callbacks.
        optimizers: an optimiser of your own, on exactly the parameters that are trained, and its schedule, which is
            stepped after every optimiser step; None for AdamW, and for ``lr_scheduler_type``. One rank, or DDP.
        prompt_field: the column with the prompt's text.
        formatting_func: makes the prompt of a row, text or a chat, in place of ``prompt_field``, under whose name it
            is then found. This is all that a collator could do here: prompts are tokenised by the stream and padded by
            the engine, and rows by the learner.
        algorithm: an algorithm of your own; ``args`` must be its configuration.
        peft_config: a LoraConfig of peft, in place of ``args.lora``.
        record: what run.yml says; None writes what can be said of these arguments.
        start: of a command that has read its inputs after it; None starts the run here.

    Raises:
        ConfigError: the arguments do not fit together; raised before anything is trained or written.
    """

    algorithm: ClassVar[Algorithm | None] = None
    """Set by subclasses, which accept no other."""

    def __init__(
        self,
        model: Model,
        args: OnlineConfig,
        train_dataset: Rows,
        *,
        reward_model: Model | None = None,
        reward_funcs: RewardFunction | str | Sequence[RewardFunction | str] = (),
        environment: Callable[[], Any] | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        agent: Callable[..., Any] | None = None,
        ref_model: Model | None = None,
        value_model: Model | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        eval_dataset: Rows | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
        optimizers: Optimizers = (None, None),
        prompt_field: str = "query",
        formatting_func: Callable[[Mapping[str, Any]], Any] | None = None,
        algorithm: Algorithm | None = None,
        peft_config: Any = None,
        record: Record | None = None,
        start: Start | None = None,
    ) -> None:
        check_columns(train_dataset, (), "train_dataset")
        check_columns(eval_dataset if eval_dataset is not None else (), (), "eval_dataset")
        if formatting_func is not None:
            train_dataset = formatted(train_dataset, formatting_func, prompt_field)
            if eval_dataset is not None:
                eval_dataset = formatted(eval_dataset, formatting_func, prompt_field)
        inputs = Inputs(
            model=model,
            train_dataset=train_dataset,
            algorithm=self.algorithm or algorithm,
            reward_model=reward_model,
            reward_funcs=_functions(reward_funcs),
            world=World(environment, tools, agent),
            ref_model=ref_model,
            value_model=value_model,
            processing_class=processing_class,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
            prompt_field=prompt_field,
            record=record,
            start=start,
        )
        if peft_config is not None:
            args = replace(args, lora=_adapters(peft_config, args))
        self.run = build(args, inputs)
        self._started = False

    @property
    def args(self) -> OnlineConfig:
        """The configuration."""
        return self.run.config

    @property
    def model(self) -> PreTrainedModel:
        """The policy."""
        return self.run.learner.policy

    @property
    def learner(self) -> Learner:
        """The learner, which trains the policy."""
        return self.run.learner

    @property
    def callbacks(self) -> Callbacks:
        """The callbacks, and the state that they see."""
        return self.run.callbacks

    @property
    def processing_class(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return self.run.tokenizer

    def train(self) -> OnlineTrainerState:
        """Run the whole training, or what is left of it, once. The policy is then in ``<output_dir>/final``.

        On Ctrl-C, SIGTERM or SIGHUP it writes a checkpoint after the current batch, from which the run can be resumed;
        then it raises KeyboardInterrupt, or exits with code 0. With several ranks, all must call it.

        Returns:
            The final state.
        """
        if self._started:
            raise RuntimeError("this trainer has trained already; make a new one to train again")
        self._started = True
        return train(self.run)

    def evaluate(self) -> dict[str, float]:
        """Score the policy as it is now on eval_dataset; before or after training.

        Nothing is written. With several ranks, all must call it.

        Returns:
            The metrics, with names that begin with "eval_".

        Raises:
            ConfigError: there is no eval_dataset.
        """
        run = self.run
        require(run.eval_prompts is not None, "eval_dataset", None, "must be given, to evaluate on")
        with run.failure_detector.watching(), run.scorer.started():
            return evaluate(run)[0]

    def save_model(self, output_dir: str | None = None) -> Path:
        """Write the policy, in ``export_dtype``, its tokenizer, and PPO's value model into a folder. Every rank must
        call it.

        Args:
            output_dir: None for "final" in the run's folder. What is there already is replaced if it was written in
                this way, else moved to another name.

        Returns:
            The folder, which ``from_pretrained`` loads.
        """
        run = self.run
        folder = run.folder.path / FINAL if output_dir is None else Path(output_dir).expanduser()
        if run.ranks.is_main:
            folder.parent.mkdir(parents=True, exist_ok=True)
        write_learner(run, folder, getattr(torch, run.config.export_dtype))
        return folder

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Call one of transformers' callbacks, too: a class or an instance."""
        self.run.callbacks.add(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Call a callback no more; returns it, or None if there is none such."""
        return self.run.callbacks.pop(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Call a callback no more."""
        self.pop_callback(callback)

    def push_to_hub(
        self,
        repo_id: str | None = None,
        *,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str = "End of training",
    ) -> str | None:
        """Upload the final policy to the Hugging Face Hub and wait for it; ``push_to_hub`` of the configuration does
        so beside training.

        Args:
            repo_id: the repository; None takes hub_model_id, or the name of output_dir.
            private: whether it is made private, if it is made.
            token: None takes hub_token, $HF_TOKEN, or that of ``hf auth login``.
            commit_message: of the upload.

        Returns:
            The URL of the commit; None on the other ranks, which upload nothing.

        Raises:
            RuntimeError: there is no final policy yet.
        """
        if not self.run.ranks.is_main:
            return None
        folder = self.run.folder.path / FINAL
        if not folder.is_dir():
            raise RuntimeError(f"push_to_hub: there is no {str(folder)!r}; call train() first")
        name = repo_id or self.args.hub_model_id or self.run.folder.path.resolve().name
        private = self.args.hub_private_repo if private is None else private
        return push_policy(folder, name, private, token or self.args.hub_token, commit_message)


def _functions(reward_funcs: RewardFunction | str | Sequence[RewardFunction | str]) -> tuple[RewardFunction, ...]:
    """All reward functions; one that reads a model for each name of a model, as in TRL.

    Raises:
        ConfigError: one is no function, or the name of no model.
    """
    each = (reward_funcs,) if callable(reward_funcs) or isinstance(reward_funcs, str) else tuple(reward_funcs)
    rule = "must be a function, or the name of a reward model; give a loaded one as reward_model"
    functions: list[RewardFunction] = []
    for function in each:
        if isinstance(function, str):
            check_source(function, "reward_funcs")
            function = RewardModels([function], device="cuda" if torch.cuda.is_available() else "cpu")
        fits = callable(function) and not isinstance(function, PreTrainedModel)
        require(fits, "reward_funcs", f"a {type(function).__name__}", rule)
        functions.append(function)
    return tuple(functions)


_DESCRIPTIVE = {"base_model_name_or_path", "revision", "peft_version"}
"""What a LoraConfig says of files that it was saved in, and decides nothing."""


def _adapters(config: Any, args: OnlineConfig) -> LoRAConfig:
    """peft's LoraConfig as ours.

    Raises:
        ConfigError: it says something that adapters here have not.
    """
    rule = f"must be peft's LoraConfig; {type(config).__name__} is not built in"
    require(type(config).__name__ == "LoraConfig", "peft_config", type(config).__name__, rule)
    require(args.lora.rank == 0, "peft_config", "LoraConfig", "must be left out with train.lora: both say the adapters")
    modules = config.target_modules
    named = modules == "all-linear" or isinstance(modules, (set, list, tuple))
    rule = "must be 'all-linear' or a list of names: what peft takes for others depends on the model"
    require(named, "peft_config.target_modules", modules, rule)
    plain = type(config)(r=config.r, lora_alpha=config.lora_alpha, target_modules=modules, task_type="CAUSAL_LM")
    for item in fields(config):
        name, setting, usual = item.name, getattr(config, item.name), getattr(plain, item.name)
        fits = setting == usual or name in _DESCRIPTIVE or (name, setting) == ("task_type", None)
        require(fits, f"peft_config.{name}", setting, f"must be {usual!r}: nothing else is built in")
    names = [] if modules == "all-linear" else sorted(modules)
    return replace(args.lora, rank=config.r, alpha=config.lora_alpha, target_modules=names)


def formatted(rows: Rows, formatting_func: Callable[[Mapping[str, Any]], Any], field: str) -> Rows:
    """The rows, with what the function makes of each under ``field``."""
    return [{**row, field: formatting_func(row)} for row in rows]


def train(run: Run) -> OnlineTrainerState:
    """Train, once; see :meth:`OnlineTrainer.train`."""
    uploads = run.callbacks.uploads
    with (
        run.hold or nullcontext(),
        closing(uploads) if uploads else nullcontext(),  # the other ranks do not wait for them
        run.failure_detector.watching(),
        ending_on_signals() as stop_asked,
        ExitStack() as stack,
    ):
        threads = stack.enter_context(shared_cores(run.config, run.device, run.ranks.local_count))
        if run.hold is not None:
            stack.enter_context(run.hold.alone())
        trace = stack.enter_context(closing(Trace()))
        generator = stack.enter_context(closing(make_generator(run.config, run.engine, trace, threads)))
        if run.resumed is not None:
            generator.agreement.restore(run.resumed.values["agreement"])
        stack.enter_context(run.scorer.started(trace))
        stack.enter_context(run.learner.started(trace))
        generator.on_arrival = partial(_arrived, run)
        require_hold(run.hold)
        logs = {}
        if run.ranks.is_main:
            goes_on = run.folder.goes_on
            run.folder.clear(run.callbacks.kept, run.eval_prompts is not None)
            run.record.write(run.folder.path)
            inputs = {
                **run.fingerprints,
                "tokenizer": digest_of(text_of(run.tokenizer) + str(run.tokenizer.chat_template)),
            }
            note_start(run.folder.path, goes_on, run.ranks.count, run.device, run.chat.now, inputs, threads)
            if isinstance(generator, RemoteGenerator):
                generator.follow(run.folder.path)
            if run.config.trace:
                trace.write_to(run.folder.path / run.folder.trace)
        stack.enter_context(closing(run.callbacks))
        if run.ranks.is_main:
            names = log_names(run.config, run.eval_prompts is not None)
            logs = {name: stack.enter_context(closing(_log(run, name))) for name in names}
        saves = stack.enter_context(saving(run))
        rollouts = _rollouts(run, generator, trace)
        loop = TrainingLoop(run, trace, logs, stop_asked, saves, rollouts, Evaluations(run, rollouts))
        state = loop.train()
        stack.close()
        run.failure_detector.close()
    return state


def _arrived(run: Run, index: int, first: int, groups: Sequence[Group]) -> None:
    """Let what needs no weights of the policy begin with prompts that have been sampled."""
    held_out = run.eval_prompts.stream if run.eval_prompts is not None and index < 0 else None
    run.scorer.begin(index, first, groups, None if held_out is None else len(held_out))
    run.learner.begin(index, first, groups)


def _log(run: Run, name: str) -> JsonLines:
    """Open a log file. A run that resumes in its own folder keeps what was logged up to the checkpoint."""
    keep = run.resumed.logs.get(name, 0) if run.resumed is not None and run.folder.goes_on else 0
    return JsonLines(run.folder.path / name, keep)


def _rollouts(run: Run, generator: Generator, trace: Trace) -> RolloutSchedule:
    config, resumed = run.config, run.resumed
    return RolloutSchedule(
        generator,
        run.prompts,
        batch_size=config.batch_size,
        num_batches=config.num_batches,
        staleness=config.staleness,
        trace=trace,
        in_flight=config.generation.in_flight,
        start=resumed.batch if resumed else 0,
        ahead=resumed.ahead if resumed else (),
        is_main=run.ranks.is_main,
    )


class OnlineDPOTrainer(OnlineTrainer):
    """Online DPO or IPO on the best and the worst of K samples; see :class:`OnlineTrainer` and OnlineDPOConfig."""

    algorithm = ONLINE_DPO


class OnlineBoKTrainer(OnlineTrainer):
    """Supervised learning on the best of K samples; see :class:`OnlineTrainer` and OnlineBoKConfig."""

    algorithm = BEST_OF_K


class RLOOTrainer(OnlineTrainer):
    """REINFORCE leave-one-out; see :class:`OnlineTrainer` and RLOOConfig."""

    algorithm = RLOO


class GRPOTrainer(OnlineTrainer):
    """Group relative policy optimisation; see :class:`OnlineTrainer` and GRPOConfig."""

    algorithm = GRPO


class PPOTrainer(OnlineTrainer):
    """PPO with a learned value function; see :class:`OnlineTrainer` and PPOConfig."""

    algorithm = PPO
