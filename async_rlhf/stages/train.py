"""Online training as a command: everything by name, loaded and handed to the trainer."""

from __future__ import annotations

from async_rlhf.config import RunConfig
from async_rlhf.data.loading import load_rows
from async_rlhf.scoring import load_reward_functions
from async_rlhf.trainers import TRAINERS


def run_train(config: RunConfig) -> dict[str, float]:
    """Train a policy as the configuration says.

    Returns:
        The metrics of the last batch that was logged.
    """
    data = config.data
    columns = [data.prompt_field]
    train_rows = load_rows(data.train, data.train_split, columns=columns, key="data.train")
    eval_rows = None if data.eval is None else load_rows(data.eval, data.eval_split, columns=columns, key="data.eval")
    trainer = TRAINERS[config.algorithm](
        config.model,
        config.train,
        train_rows,
        reward_model=config.reward_model,
        reward_funcs=load_reward_functions(config.reward_funcs),
        ref_model=config.ref_model,
        eval_dataset=eval_rows,
        prompt_field=data.prompt_field,
    )
    state = trainer.train()
    return state.log_history[-1] if state.log_history else {}
