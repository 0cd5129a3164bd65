"""What a script may do with a trainer, as with transformers' own: optimisers, callbacks, saving, evaluating, epochs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import count_letters
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from async_rlhf.config import ConfigError, LoRAConfig
from async_rlhf.rewards.reward_models import RewardModels
from async_rlhf.run.checkpoint import learner_state, restore_learner
from async_rlhf.run.schedule import version_for
from async_rlhf.run.trainer import OnlineTrainer


def new_trainer(make_policy, tokenizer, prompts, args, model=None, **options) -> OnlineTrainer:
    given = {"reward_funcs": count_letters, "processing_class": tokenizer, **options}
    return OnlineTrainer(model or make_policy(), args, prompts, **given)


def metrics(args) -> list[dict]:
    lines = map(json.loads, Path(args.output_dir, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "optimizer_steps" in line]


def own(model, rate: float = 1e-3, momentum: float = 0.9):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def test_an_optimiser_and_a_schedule_of_ones_own_are_what_trains(make_policy, tokenizer, prompts, make_args):
    model = make_policy()
    args = make_args("whole", save_steps=3)
    optimizers = own(model)
    trainer = new_trainer(make_policy, tokenizer, prompts, args, model, optimizers=optimizers)
    assert (trainer.learner.optimizer, trainer.learner.scheduler) == optimizers
    trainer.train()
    assert [line["lr"] for line in metrics(args)] == pytest.approx([1e-3 / (1 + 2 * b) for b in range(1, 7)])
    assert {name for state in optimizers[0].state.values() for name in state} == {"momentum_buffer"}
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), make_policy().parameters(), strict=True))
    tensors, values = learner_state(trainer.learner)
    assert tensors
    with pytest.raises(ValueError, match="shorter"):
        restore_learner(trainer.learner, tensors, {**values, "groups": []})
    # A resumed run goes on bit for bit, with the momentum and the rate that it had.
    again, other = make_policy(), make_args("again", resume_from=f"{args.output_dir}/checkpoint-3")
    new_trainer(make_policy, tokenizer, prompts, other, again, optimizers=own(again)).train()
    for mine, whole in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, whole)
    with pytest.raises(ConfigError, match=r"optimizers: was 'SGD, LambdaLR', is None"):
        new_trainer(make_policy, tokenizer, prompts, make_args("none", resume_from=other.resume_from))


def test_optimisers_that_cannot_be_are_refused(make_policy, tokenizer, prompts, make_args):
    model = make_policy()
    optimizer, schedule = own(model)
    for options, error in (
        ({"optimizers": (None, schedule)}, "optimizers: got 'LambdaLR'; must have an optimiser with the schedule"),
        ({"optimizers": own(make_policy(1))}, r"optimizers: got 'SGD of 28 parameters'; must have exactly the 28"),
        ({"optimizers": (optimizer, None), "changes": {"lora": LoRAConfig(rank=2)}}, "must have exactly the 16 that"),
    ):
        args = make_args(**options.pop("changes", {}))
        with pytest.raises(ConfigError, match=error):
            new_trainer(make_policy, tokenizer, prompts, args, model, **options)


class Counter(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


def test_callbacks_come_and_go(make_policy, tokenizer, prompts, make_args):
    trainer = new_trainer(make_policy, tokenizer, prompts, make_args())
    first, second, third = Counter(), Counter(), Counter()
    for callback in (first, second, third):
        trainer.add_callback(callback)
    assert trainer.pop_callback(second) is second
    trainer.remove_callback(third)
    assert trainer.pop_callback(third) is None
    trainer.train()
    assert (first.steps, second.steps, third.steps) == (6, 0, 0)


def test_a_model_can_be_saved_and_evaluated_at_any_time(make_policy, tokenizer, prompts, make_args, tmp_path):
    args = make_args(reward_timeout=60.0)
    trainer = new_trainer(make_policy, tokenizer, prompts, args, eval_dataset=prompts[:6])
    before = trainer.evaluate()
    assert trainer.save_model(str(tmp_path / "before")) == tmp_path / "before"
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_objective/scores"] != before["eval_objective/scores"]
    lines = map(json.loads, Path(args.output_dir, "metrics.jsonl").read_text().splitlines())
    at_the_end = next(line for line in lines if "eval_objective/scores" in line)
    assert after["eval_objective/scores"] == at_the_end["eval_objective/scores"]
    trainer.save_model(str(tmp_path / "after"))
    loaded = {name: AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("before", "after")}
    for name, tensor in make_policy().state_dict().items():
        assert torch.equal(loaded["before"].state_dict()[name], tensor)
        assert torch.equal(loaded["after"].state_dict()[name], trainer.model.state_dict()[name])
    assert AutoTokenizer.from_pretrained(tmp_path / "after").get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="eval_dataset: got None; must be given"):
        new_trainer(make_policy, tokenizer, prompts, make_args("other")).evaluate()


def test_a_function_makes_the_prompts(make_policy, tokenizer, make_args):
    rows = [{"question": f"q{i}", "name": f"f{i}"} for i in range(20)]
    seen = []

    def reward(prompts, completions, question, **columns):
        seen.extend(zip(prompts, question, strict=True))
        return count_letters(prompts, completions)

    args = make_args()
    options = {"formatting_func": lambda row: f"Q: {row['question']} A:", "reward_funcs": reward}
    new_trainer(make_policy, tokenizer, rows, args, eval_dataset=rows[:2], **options).train()
    assert seen
    assert all(prompt == f"Q: {question} A:" for prompt, question in seen)


@pytest.mark.parametrize(("epochs", "batches"), [(1, 3), (2.0, 5), (0.1, 1), (0.8, 2), (None, 8)])
def test_passes_over_the_prompts_decide_the_length(make_policy, tokenizer, prompts, make_args, epochs, batches):
    """Of 20 rows, 8 in a batch; three passes where nothing is said."""
    # Earlier versions wrote 131,072 into run.yml, whatever said the length.
    args = make_args(total_episodes=None if epochs is None else 131_072, num_train_epochs=epochs)
    with pytest.raises(ConfigError, match=r"num_train_epochs: got .*; says how long the run is only together with"):
        _ = args.num_batches
    trainer = new_trainer(make_policy, tokenizer, prompts, args)
    assert (trainer.args.num_batches, trainer.args.total_episodes) == (batches, 8 * batches)
    assert trainer.train().global_step == batches


def test_the_length_is_said_once(make_args):
    with pytest.raises(ConfigError, match=r"num_train_epochs: got 1\.0; must be null with total_episodes 48"):
        make_args(num_train_epochs=1)
    assert make_args().with_rows(20) == make_args()


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize(("minis", "epochs"), [(1, 1), (2, 1), (2, 3)])
def test_the_lag_in_optimiser_steps_is_that_of_the_schedule(make_args, staleness, minis, epochs):
    """Counted step by step: how many steps the weights in a step are ahead of those that sampled its completions."""
    for batches in (1, 2, 6):
        args = make_args(
            staleness=staleness,
            num_mini_batches=minis,
            num_epochs=epochs,
            per_device_train_batch_size=4,
            total_episodes=4 * minis * batches,
        )
        per_batch, lags = minis * epochs, []
        for batch in range(1, batches + 1):
            sampled_after = version_for(batch, staleness) * per_batch
            lags += [(batch - 1) * per_batch + step - sampled_after for step in range(per_batch)]
        assert len(lags) == args.num_optimizer_steps
        assert args.summary()["lag in optimiser steps"] == f"0 at the first step, at most {max(lags)}"
        if batches > staleness:
            assert max(lags) == (staleness + 1) * per_batch - 1


def test_reward_models_among_the_functions(make_policy, make_reward_model, tokenizer, prompts, make_args, tmp_path):
    """As in TRL: a name is a function that reads the model, with its own tokenizer; a loaded one has another place."""
    folder = str(tmp_path / "judge")
    make_reward_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for functions in (folder, [count_letters, folder, RewardModels([folder])]):
        args = make_args(total_episodes=8, reward_weights=[0.5] if functions == folder else [1.0, 0.5, 0.0])
        args = replace(args, output_dir=str(tmp_path / str(len(functions))))
        new_trainer(make_policy, tokenizer, prompts, args, reward_funcs=functions).train()
    (row,) = metrics(args)
    assert row["reward/reward_models"] == row["reward/reward_models_2"] != 0
    assert row["objective/scores"] == pytest.approx(row["reward/count_letters"] + 0.5 * row["reward/reward_models"])
    for given, right in (
        (make_reward_model(), "got 'a GPTNeoXForSequenceClassification'; must be a function, or the name of a reward"),
        (3, "got 'a int'; must be a function, or the name of a reward model; give a loaded one as reward_model"),
        (str(tmp_path / "other"), "got '.*other'; there is no such folder"),
    ):
        with pytest.raises(ConfigError, match=f"reward_funcs: {right}"):
            new_trainer(make_policy, tokenizer, prompts, make_args(), reward_funcs=[count_letters, given])


def test_adapters_as_peft_says_them(make_policy, tokenizer, prompts, make_args):
    """The same run as with our own keys; what adapters here have not is refused by name."""
    peft = pytest.importorskip("peft")
    weights = []
    for name, lora, given in (
        ("ours", LoRAConfig(rank=2, alpha=4, target_modules=["dense", "query_key_value"]), None),
        ("peft", LoRAConfig(), peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query_key_value", "dense"])),
    ):
        args = make_args(name, total_episodes=8, learning_rate=0.02, lora=lora)
        trainer = new_trainer(make_policy, tokenizer, prompts, args, peft_config=given)
        trainer.train()
        weights.append({name: p for name, p in trainer.model.named_parameters() if p.requires_grad})
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    every = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    trainer = new_trainer(make_policy, tokenizer, prompts, make_args("all"), peft_config=peft.LoraConfig(**every))
    assert (trainer.args.lora.rank, trainer.args.lora.alpha, trainer.args.lora.target_modules) == (8, 8.0, [])
    for config, error in (
        (peft.LoraConfig(**every, lora_dropout=0.1), r"peft_config.lora_dropout: got 0.1; must be 0.0: nothing else"),
        (
            peft.LoraConfig(**every | {"task_type": "SEQ_CLS"}),
            "peft_config.task_type: got 'SEQ_CLS'; must be 'CAUSAL_LM'",
        ),
        (peft.LoraConfig(**every, use_rslora=True), r"peft_config.use_rslora: got True; must be False: nothing else"),
        (peft.LoraConfig(), "peft_config.target_modules: got None; must be 'all-linear' or a list of names"),
        (peft.IA3Config(), "peft_config: got 'IA3Config'; must be peft's LoraConfig; IA3Config is not built in"),
    ):
        with pytest.raises(ConfigError, match=error):
            new_trainer(make_policy, tokenizer, prompts, make_args(), peft_config=config)
    config, args = peft.LoraConfig(**every), make_args(lora=LoRAConfig(rank=1))
    with pytest.raises(ConfigError, match=r"peft_config: got 'LoraConfig'; must be left out with train\.lora"):
        new_trainer(make_policy, tokenizer, prompts, args, peft_config=config)
