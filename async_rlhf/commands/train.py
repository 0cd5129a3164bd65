"""Online training as a command: loads everything by name and passes it to the trainer."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from async_rlhf.algorithms.table import find
from async_rlhf.commands.stage import Stage
from async_rlhf.commands.table import function_of
from async_rlhf.config import ConfigError
from async_rlhf.config.episodes import KINDS
from async_rlhf.data.formats import load_prompts
from async_rlhf.data.held_out import hold_out
from async_rlhf.data.loading import Rows
from async_rlhf.generation.episodes.spec import world_named
from async_rlhf.generation.placement import threads_side_by_side
from async_rlhf.models.loading import load_tokenizer
from async_rlhf.rewards.functions import load_object, load_reward_functions
from async_rlhf.run.build import begin
from async_rlhf.run.config import RunConfig
from async_rlhf.run.folder import FINAL, METRICS, hold_folder
from async_rlhf.run.inputs import Start
from async_rlhf.run.record import of_command
from async_rlhf.run.summary import better_threads, read_rows, training_summary
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.run.warnings import nothing_learnt, unrewarded
from async_rlhf.system.names import check_source

logger = logging.getLogger(__name__)

MARKER = "train"


def run_train(config: RunConfig) -> dict[str, Any]:
    """Train a policy as the configuration says; skipped if that is done already.

    Returns:
        The metrics of the last batch that was logged. If no batch had a gradient, "nothing_learnt" says why, and the
        run does not count as done.
    """
    start, nothing = begin(config.train, config.model, find(config.algorithm), prefix="train."), ""
    with start.failure_detector.watching(), ExitStack() as stack:
        for name in ("model", "reward_model", "ref_model", "value_model", "tokenizer"):
            check_source(getattr(config, name), name)
        config = replace(config, train=start.config)
        stage = train_stage(config)
        results = start.ranks.broadcast("finished run", lambda: _done(stage, config))
        if results is None:
            if start.ranks.is_main:  # held until the run is marked as finished, which its trainer does not do
                stack.enter_context(hold_folder(Path(config.train.output_dir)))
            results, nothing = _train(config, stage, start)
    start.failure_detector.close()
    return results | ({"nothing_learnt": nothing} if nothing else {})


def _done(stage: Stage, config: RunConfig) -> dict[str, Any] | None:
    """The results of a finished run, if it is this one."""
    try:
        return stage.done()
    except ConfigError:
        if not config.train.resuming:  # a finished run may be made longer; the checkpoint says what else differs
            raise
        return None


def make_trainer(config: RunConfig, start: Start | None = None) -> OnlineTrainer:
    """The trainer, with all that the configuration names loaded."""
    transformers.logging.disable_progress_bar()  # for every model loaded or saved; the run has its own bar
    data = config.data
    train_rows: Rows = []
    eval_rows: Rows | None = None
    if start is None or start.ranks.is_main:  # it hands out the prompts
        field, words = data.prompt_field, data.prompt_words
        train_rows = load_prompts(data.train, data.train_split, field, words, "data.train")
        if data.eval_fraction is not None:
            train_rows, eval_rows = hold_out(train_rows, data.eval_fraction, "data.train", field)
        if data.eval is not None:
            eval_rows = load_prompts(data.eval, data.eval_split, field, words, "data.eval")
    world = world_named(config.environment, config.tools, config.agent)
    return OnlineTrainer(
        config.model,
        config.train,
        train_rows,
        reward_model=config.reward_model,
        reward_funcs=load_reward_functions(config.reward_funcs),
        environment=world.environment,
        tools=world.tools,
        agent=world.agent,
        ref_model=config.ref_model,
        value_model=config.value_model,
        eval_dataset=eval_rows,
        processing_class=_tokenizer(config),
        callbacks=[load_object(name, "callbacks") for name in config.callbacks],
        prompt_field=data.prompt_field,
        algorithm=find(config.algorithm),
        record=of_command(config),
        start=start,
    )


def _train(config: RunConfig, stage: Stage, start: Start) -> tuple[dict[str, Any], str]:
    """The results, and why nothing was learnt; "" if something was."""
    trainer, ranks = make_trainer(config, start), start.ranks
    if ranks.is_main:
        stage.marker.unlink(missing_ok=True)  # from here on the folder holds an unfinished run
    started = time.monotonic()
    threads = threads_side_by_side(config.train, trainer.learner.policy.device, ranks.count)
    state = trainer.train()
    results = state.log_history[-1] if state.log_history else {}
    if ranks.is_main:
        if state.optimizer_steps != 0:
            stage.publish_files({}, results)
        folder = Path(config.train.output_dir)
        logger.info("%s", training_summary(folder, FINAL, METRICS, time.monotonic() - started))
        if missing := unrewarded(state):
            logger.info("%s", missing)
        if config.train.report:
            logger.info("%s", function_of("report", "report_of_run")(folder))
        if threads is not None and (hint := better_threads(read_rows(folder / METRICS), *threads)):
            logger.info("%s", hint)
    return results, nothing_learnt(state) if state.optimizer_steps == 0 else ""


def _tokenizer(config: RunConfig) -> PreTrainedTokenizerBase | None:
    if config.tokenizer is None:
        return None
    return load_tokenizer(config.tokenizer, "tokenizer", trust=config.train.trust_remote_code)


def train_stage(config: RunConfig) -> Stage:
    """The marker of a finished run."""
    keys = ("model", "ref_model", "value_model", "reward_model", "reward_funcs", *KINDS)
    inputs = {key: getattr(config, key) for key in keys}
    inputs |= {"data.train": config.data.train, "data.eval": config.data.eval}
    option = "--train.overwrite_output_dir"
    folder = Path(config.train.output_dir)
    # The run locks its folder itself.
    return Stage(folder, MARKER, config, inputs, overwrite_option=option, locked=False)
