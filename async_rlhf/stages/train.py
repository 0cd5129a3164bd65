"""Online training as a command: everything by name, loaded and handed to the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rlhf.config import RunConfig
from async_rlhf.data.loading import load_rows
from async_rlhf.models import load_tokenizer
from async_rlhf.scoring.functions import load_object, load_reward_functions
from async_rlhf.stage import Stage
from async_rlhf.stages.training import require_single_process
from async_rlhf.trainers import TRAINERS

MARKER = "train"


def run_train(config: RunConfig) -> dict[str, Any]:
    """Train a policy as the configuration says; skipped where that is done already.

    Returns:
        The metrics of the last batch that was logged.
    """
    stage = train_stage(config)
    if (results := stage.done()) is not None:
        return results
    require_single_process("train")
    data = config.data
    columns = [data.prompt_field]
    train_rows = load_rows(data.train, data.train_split, columns=columns, key="data.train")
    eval_rows = None if data.eval is None else load_rows(data.eval, data.eval_split, columns=columns, key="data.eval")
    reward_funcs = load_reward_functions(config.reward_funcs)
    trainer = TRAINERS[config.algorithm](
        config.model,
        config.train,
        train_rows,
        reward_model=config.reward_model,
        reward_funcs=reward_funcs,
        ref_model=config.ref_model,
        value_model=config.value_model,
        eval_dataset=eval_rows,
        processing_class=None if config.tokenizer is None else load_tokenizer(config.tokenizer, "tokenizer"),
        callbacks=[load_object(name, "callbacks") for name in config.callbacks],
        prompt_field=data.prompt_field,
    )
    stage.marker.unlink(missing_ok=True)  # from here on the folder holds an unfinished run
    state = trainer.train()
    results = state.log_history[-1] if state.log_history else {}
    stage.publish_files({}, results)
    return results


def train_stage(config: RunConfig) -> Stage:
    """The marker of a finished run."""
    inputs = {
        "model": config.model,
        "ref_model": config.ref_model,
        "value_model": config.value_model,
        "reward_model": config.reward_model,
        "reward_funcs": config.reward_funcs,
        "data.train": config.data.train,
        "data.eval": config.data.eval,
    }
    option = "--train.overwrite_output_dir"
    return Stage(Path(config.train.output_dir), MARKER, config, inputs, overwrite_option=option)
