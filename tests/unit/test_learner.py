"""The learner around the objectives: value models, the proximal pass, adaptive KL, prompts without reward."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import in_float64
from tiny import LLAMA_SIZES, count_letters, drawn, json_rows
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, Trainer

from async_rlhf import KLConfig, PPOTrainer
from async_rlhf.algorithms.estimators import ImportanceRatioStats
from async_rlhf.algorithms.table import BUILT_IN, find
from async_rlhf.config import ConfigError
from async_rlhf.learner.learner import Learner
from async_rlhf.models.forward import (
    PolicyAndValueWrapper,
    head_in_float32,
    response_logprobs,
    response_values,
    reward_scores,
)
from async_rlhf.models.values import new_value_model
from async_rlhf.run.checkpoint import learner_state, restore_learner
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.types import Batch, Experience, Group, PolicyOutput, Sample


def train(make_policy, tokenizer, prompts, args, algorithm, **options):
    options = {"reward_funcs": count_letters} | options
    trainer = OnlineTrainer(make_policy(), args, prompts, processing_class=tokenizer, **options)
    trainer.train()
    return trainer, metrics_of(args)


def metrics_of(args) -> list[dict[str, float]]:
    return json_rows(Path(args.output_dir) / "metrics.jsonl")


def scored_batch(trainer, scores_PK=None):
    """One batch as the loop would hand it to the learner."""
    run = trainer.run
    drawn = run.prompts.prompts(range(run.config.batch_size))
    groups = tuple(Group(p, c) for p, c in zip(drawn, run.engine.generate(drawn), strict=True))
    scored = run.scorer(Batch(1, 0, groups, 0.0))
    return scored if scores_PK is None else replace(scored, scores_PK=scores_PK)


# Values


def test_values_are_read_before_each_token(make_policy, make_reward_model):
    """What a reward model says of the text up to token t - 1 is the value at token t."""
    model = make_reward_model()
    tokens_BT = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.zeros(3, 9)
    mask_BT[0, 2:9] = mask_BT[1, 5:6] = mask_BT[2, 1:4] = 1
    values_BT = response_values(model, tokens_BT, mask_BT)
    for b, t in mask_BT.nonzero().tolist():
        expected = reward_scores(model, tokens_BT[b : b + 1, :t], torch.tensor([t]))
        assert values_BT[b, t].item() == pytest.approx(expected.item(), abs=1e-5)
    assert (values_BT * (1 - mask_BT)).abs().max() == 0


def test_a_value_head_reads_the_states_that_the_policys_head_sees(make_policy):
    policy, head = make_policy(), torch.nn.Linear(32, 1)
    tokens_BT = torch.randint(0, 256, (2, 7), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.zeros(2, 7)
    mask_BT[0, 3:7] = mask_BT[1, 1:3] = 1
    output = PolicyAndValueWrapper(policy, head)(tokens_BT, mask_BT, 0.7)
    states_BTH = policy.base_model(tokens_BT).last_hidden_state
    for b, t in mask_BT.nonzero().tolist():
        assert output.values_BT[b, t].item() == pytest.approx(head(states_BTH[b, t - 1]).item(), abs=1e-5)
    output.values_BT.sum().backward()
    assert policy.gpt_neox.embed_in.weight.grad.abs().max() > 0  # the trunk is shared


def test_a_new_value_model_has_the_policys_body_and_says_zero(make_policy):
    policy = make_policy()
    value = new_value_model(policy)
    tokens_BT = torch.arange(10)[None]
    assert torch.equal(value.base_model(tokens_BT).last_hidden_state, policy.base_model(tokens_BT).last_hidden_state)
    mask_BT = torch.ones(1, 10)
    mask_BT[0, 0] = 0
    assert response_values(value, tokens_BT, mask_BT).abs().max() == 0
    assert value.base_model.embed_in.weight is not policy.base_model.embed_in.weight


def test_the_value_model_starts_from_the_reward_model_and_learns(
    make_policy, make_reward_model, tokenizer, prompts, make_args
):
    reward_model = make_reward_model()
    before = {name: p.clone() for name, p in reward_model.named_parameters()}
    args = make_args(algorithm="ppo", total_episodes=80, num_epochs=4, value_learning_rate=3e-3, learning_rate=1e-9)
    trainer = PPOTrainer(
        make_policy(), args, prompts, reward_model=reward_model, reward_funcs=count_letters, processing_class=tokenizer
    )
    for name, parameter in trainer.learner.value.named_parameters():
        assert torch.equal(parameter, before[name]), name
    trainer.train()
    losses = [line["loss/value_avg"] for line in metrics_of(args)]
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(p, before[name]) for name, p in reward_model.named_parameters())

    # Saved in the standard format, and restored by name.
    folder = Path(args.output_dir) / "final" / "value_model"
    saved = AutoModelForSequenceClassification.from_pretrained(folder)
    again = PPOTrainer(
        make_policy(),
        make_args("again", algorithm="ppo"),
        prompts,
        reward_funcs=count_letters,
        value_model=str(folder),
        processing_class=tokenizer,
    )
    for name, parameter in trainer.learner.value.named_parameters():
        assert torch.equal(parameter, saved.get_parameter(name)), name
        assert torch.equal(parameter, again.learner.value.get_parameter(name)), name
        assert again.learner.value.get_parameter(name).requires_grad


def test_a_value_head_is_trained_saved_and_restored(make_policy, tokenizer, prompts, make_args):
    args = make_args(algorithm="ppo", shared_trunk=True, total_episodes=16)
    trainer, metrics = train(make_policy, tokenizer, prompts, args, "ppo")
    head = trainer.learner.value
    assert head.weight.abs().max() > 0
    assert metrics[-1]["value_grad_norm"] > 0
    folder = str(Path(args.output_dir) / "final" / "value_model")
    options = {"reward_funcs": count_letters, "processing_class": tokenizer}
    again_args = make_args("again", algorithm="ppo", shared_trunk=True)
    again = PPOTrainer(make_policy(), again_args, prompts, value_model=folder, **options)
    assert torch.equal(again.learner.value.weight, head.weight)
    assert torch.equal(again.learner.value.bias, head.bias)
    with pytest.raises(ConfigError, match=r"value_model: got .*value_head\.safetensors"):
        PPOTrainer(make_policy(), again_args, prompts, value_model=str(Path(args.output_dir)), **options)


def test_the_reward_model_itself_is_no_value_model(make_policy, make_reward_model, tokenizer, prompts, make_args):
    model = make_reward_model()
    with pytest.raises(ConfigError, match="value_model: got the reward model itself"):
        PPOTrainer(
            make_policy(),
            make_args(algorithm="ppo"),
            prompts,
            reward_model=model,
            value_model=model,
            processing_class=tokenizer,
        )


def test_only_ppo_takes_a_value_model(make_policy, make_reward_model, tokenizer, prompts, make_args):
    with pytest.raises(ConfigError, match=r"value_model: [\s\S]*rloo has no value model"):
        OnlineTrainer(
            make_policy(),
            make_args(algorithm="rloo"),
            prompts,
            reward_funcs=count_letters,
            value_model=make_reward_model(),
            processing_class=tokenizer,
        )


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_what_is_cut_off_is_worth_what_the_value_model_expects(
    make_policy, make_reward_model, tokenizer, prompts, make_args, shared_trunk
):
    """Returns against a loop in float64, with values of each whole text alone, unpadded."""
    changes = {"shared_trunk": shared_trunk, "gamma": 0.9, "lam": 1.0, "kl": KLConfig(coef=0.0)}
    args = make_args(algorithm="ppo", samples_per_prompt=2, bootstrap_truncated=True, **changes)
    options = {"reward_model": make_reward_model()} if not shared_trunk else {"reward_funcs": count_letters}
    trainer = PPOTrainer(make_policy(), args, prompts, processing_class=tokenizer, **options)
    if shared_trunk:
        torch.nn.init.normal_(trainer.learner.value.weight)
    scored = scored_batch(trainer)
    reasons = ["stop", "length", "stop", "length", "length"]
    prompts = [group.prompt.tokens for group in scored.batch.groups for _ in group.samples]
    marked = []
    for i, (prompt, sample) in enumerate(zip(prompts, scored.batch.samples, strict=True)):
        tokens, logprobs, versions, _ = drawn(sample)
        n = i + 1  # of every length
        marked.append(Sample.answer(prompt, tokens[:n], logprobs[:n], versions[:n], reasons[i % 5]))
    groups = tuple(
        replace(group, samples=tuple(marked[2 * i : 2 * i + 2])) for i, group in enumerate(scored.batch.groups)
    )
    policy, value = trainer.learner.policy, trainer.learner.value
    with in_float64(policy, value):
        experience, _ = trainer.learner.annotate(replace(scored, batch=replace(scored.batch, groups=groups)))
    for row, sample in enumerate(marked):
        tokens_BT = experience.tokens_BT[row : row + 1, : experience.lengths_B[row]]
        with torch.no_grad(), in_float64():
            if shared_trunk:
                at_the_end = value(policy.base_model(tokens_BT).last_hidden_state[0, -1])
            else:
                at_the_end = value(tokens_BT).logits
        reward = experience.scores_B[row].item()
        if sample.finish_reason == "length":
            reward = 0.9 * at_the_end.item()
        n = len(sample.drawn)
        expected = [0.9 ** (n - 1 - t) * reward for t in range(n)]
        found = experience.returns_BT[row][experience.sampled_BT[row] > 0].tolist()
        assert found == pytest.approx(expected, abs=1e-6)  # scores are float32
    with in_float64():
        assert trainer.learner.update(experience, 1)["optimizer_steps"] == 2


# What is cut off


@pytest.mark.parametrize("algorithm", ["rloo", "grpo"])
def test_completions_that_are_masked_are_in_baselines_and_nowhere_else(
    make_policy, tokenizer, prompts, make_args, algorithm
):
    """The gradient is that of the others alone, which know the rewards of what is masked."""
    options = {"reward_funcs": count_letters, "processing_class": tokenizer}
    norms = []
    for masked in (True, False):
        args = make_args(
            "masked" if masked else "plain",
            algorithm=algorithm,
            samples_per_prompt=4,
            mask_truncated=masked,
            num_mini_batches=1,
            max_grad_norm=0.0,
        )
        trainer = OnlineTrainer(make_policy(), args, prompts, **options)
        scored = scored_batch(trainer)
        groups = tuple(
            replace(
                group,
                samples=tuple(
                    replace(r, finish_reason="length" if k < 1 + p % 3 else "stop") for k, r in enumerate(group.samples)
                ),
            )
            for p, group in enumerate(scored.batch.groups)
        )
        experience, _ = trainer.learner.annotate(replace(scored, batch=replace(scored.batch, groups=groups)))
        kept_U = ~experience.truncated_B
        assert 0 < kept_U.sum() < len(kept_U)
        if not masked:  # what is left when the same is done by hand
            experience = experience.select(kept_U.nonzero().flatten())
        norms.append(trainer.learner.update(experience, 1)["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0


def test_a_batch_of_completions_that_are_all_masked_makes_no_step(make_policy, tokenizer, prompts, make_args):
    generation = {"response_length": 2}  # seldom enough to end by itself
    args = make_args(
        algorithm="grpo", samples_per_prompt=2, mask_truncated=True, total_episodes=16, generation=generation
    )
    _, metrics = train(make_policy, tokenizer, prompts, args, "grpo")
    assert [line["val/ended_share"] for line in metrics] == [0, 0]
    assert [line["optimizer_steps"] for line in metrics] == [0, 0]


# Off-policy corrections


@pytest.mark.parametrize("algorithm", ["rloo", "ppo", "grpo"])
def test_without_the_proximal_pass_the_only_step_is_the_same(make_policy, tokenizer, prompts, make_args, algorithm):
    """One step for a batch needs no pass before it; a penalty of almost nothing in the reward asks for one."""
    found = []
    for name, coef in (("without", 0.0), ("with", 1e-30)):
        args = make_args(
            name,
            algorithm=algorithm,
            staleness=1,
            samples_per_prompt=2,
            num_mini_batches=1,
            total_episodes=16,
            kl=KLConfig(coef=coef),
        )
        assert find(algorithm).needs(args).old_logprobs == (coef > 0)
        trainer, metrics = train(make_policy, tokenizer, prompts, args, algorithm)
        found.append((dict(trainer.model.named_parameters()), metrics))
    for name, parameter in found[0][0].items():
        torch.testing.assert_close(parameter, found[1][0][name], rtol=1e-3, atol=2e-4)
    weights = [[m["policy/importance_weight"] for m in metrics] for _, metrics in found]
    assert weights[0] == pytest.approx(weights[1], rel=1e-3)
    assert any(abs(weight - 1) > 1e-3 for weight in weights[0])  # there is something to correct


# KL


def test_an_adaptive_coefficient_follows_its_formula(make_policy, tokenizer, prompts, make_args):
    args = make_args(
        algorithm="rloo", total_episodes=32, learning_rate=3e-3, kl=KLConfig(coef=0.1, target=0.5, horizon=40)
    )
    _, metrics = train(make_policy, tokenizer, prompts, args, "rloo")
    expected = 0.1
    for line in metrics:
        assert line["objective/kl_coef"] == pytest.approx(expected)
        expected *= 1 + min(max(line["objective/kl"] / 0.5 - 1, -0.2), 0.2) * 16 / 40
    assert abs(metrics[-1]["objective/kl_coef"] - 0.1) > 1e-3


def test_an_adapted_coefficient_does_not_have_the_configuration_checked_again(
    make_policy, tokenizer, prompts, make_args, monkeypatch
):
    checked = []
    args = make_args(algorithm="rloo", total_episodes=32, kl=KLConfig(coef=0.1, target=0.5, horizon=40))
    trainer = OnlineTrainer(make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer)
    annotate = Learner.annotate
    monkeypatch.setattr(type(args), "check", lambda config: checked.extend([config] * (config.kl.target == 0.5)))
    monkeypatch.setattr(KLConfig, "check", lambda config: checked.extend([config] * (config.target == 0.5)))
    monkeypatch.setattr(Learner, "annotate", lambda *given: (checked.clear(), annotate(*given))[1])
    trainer.train()
    assert checked == []
    assert trainer.learner.batch_config.kl.coef == trainer.learner.batch_config.kl_penalty.coef != 0.1 == args.kl.coef


def test_the_coefficient_of_a_batch_is_the_one_that_is_logged(make_policy, tokenizer, prompts, make_args):
    """With the penalty in the loss too: it is adapted after the batch, not between its credit and its loss."""
    used = []

    def loss(output, rows, config):
        used.append(config.kl.coef)
        return rloo.loss(output, rows, config)

    rloo = find("rloo")
    args = make_args(
        algorithm="rloo",
        total_episodes=32,
        num_mini_batches=1,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        kl=KLConfig(coef=0.1, where="loss", estimator="k3", target=0.5, horizon=40),
    )
    trainer = OnlineTrainer(make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer)
    trainer.learner.algorithm = replace(rloo, loss=loss)
    trainer.train()
    logged = [line["objective/kl_coef"] for line in metrics_of(args)]
    assert sorted(set(used), key=used.index) == logged
    assert len(set(logged)) == 2


def test_every_schedule_of_the_learning_rate_ends_where_it_should(make_policy, tokenizer, prompts, make_args):
    args = make_args(lr_scheduler_type="polynomial", learning_rate=3e-6)  # not torch's default
    _, metrics = train(make_policy, tokenizer, prompts, args, "online_dpo")
    assert metrics[-1]["lr"] == pytest.approx(1e-7, rel=0.2)  # transformers' own end


def test_no_reference_is_held_without_a_penalty(make_policy, tokenizer, prompts, make_args):
    args = make_args(algorithm="grpo", samples_per_prompt=2, total_episodes=8, kl=KLConfig(coef=0.0))
    trainer, metrics = train(make_policy, tokenizer, prompts, args, "grpo")
    assert trainer.learner.reference.model is None
    assert "objective/kl" not in metrics[0]


# Prompts without reward


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_a_prompt_without_reward_is_left_out(make_policy, tokenizer, prompts, make_args, algorithm):
    """Training on a batch with a prompt that has no reward equals training on the batch without that prompt."""
    args = make_args(algorithm=algorithm, samples_per_prompt=2, num_mini_batches=1, per_device_train_batch_size=8)
    options = {"reward_funcs": count_letters, "processing_class": tokenizer}
    trainer = OnlineTrainer(make_policy(), args, prompts, **options)
    scored = scored_batch(trainer)
    holed_PK = scored.scores_PK.clone()
    holed_PK[2, 1] = holed_PK[5, 0] = math.nan
    kept = [0, 1, 3, 4, 6, 7]
    without = replace(
        scored,
        batch=replace(scored.batch, groups=tuple(scored.batch.groups[i] for i in kept)),
        scores_PK=scored.scores_PK[kept],
    )
    (ours, our_metrics), (expected, expected_metrics) = (
        trainer.learner.annotate(batch) for batch in (replace(scored, scores_PK=holed_PK), without)
    )
    assert our_metrics == expected_metrics
    for name in ("tokens_BT", "scores_B", "loss_weights_U", "advantages_BT"):
        if getattr(expected, name) is not None:
            assert torch.equal(getattr(ours, name), getattr(expected, name)), name


@pytest.mark.parametrize("algorithm", ["online_dpo", "rloo", "grpo"])
@pytest.mark.parametrize(
    ("most", "chosen"), [(3, [1, 3, 4]), (4, [1, 3, 4, 6]), (6, [0, 1, 2, 3, 4, 6]), (8, [0, 1, 2, 3, 4, 5, 6, 7])]
)
def test_prompts_whose_rewards_differ_are_trained_on_first(
    make_policy, tokenizer, prompts, make_args, algorithm, most, chosen
):
    """Training on the first of them, and if they are too few on the first others, in the order of the batch."""
    args = make_args(algorithm=algorithm, samples_per_prompt=2, num_mini_batches=1, per_device_train_batch_size=8)
    options = {"reward_funcs": count_letters, "processing_class": tokenizer}
    trainers = [
        OnlineTrainer(
            make_policy(),
            replace(args, output_dir=f"{args.output_dir}-{name}", trained_prompts=name),
            prompts,
            **options,
        )
        for name in (None, most)
    ]
    scores_PK = torch.tensor([[1.0, 1], [1, 2], [0, 0], [3, 1], [0, 2], [2, 2], [5, 4], [1, 1]])
    scored = scored_batch(trainers[0], scores_PK)
    alone = replace(
        scored,
        batch=replace(scored.batch, groups=tuple(scored.batch.groups[i] for i in chosen)),
        scores_PK=scores_PK[chosen],
    )
    expected, expected_metrics = trainers[0].learner.annotate(alone)
    ours, metrics = trainers[1].learner.annotate(scored)
    signal = {"signal/prompts": 0.5, "signal/trained": min(most, 4)}
    assert metrics == expected_metrics | signal
    for name in ("tokens_BT", "scores_B", "loss_weights_U", "advantages_BT"):
        if getattr(expected, name) is not None:
            assert torch.equal(getattr(ours, name), getattr(expected, name)), name


def test_what_cannot_be_chosen_among_is_refused(make_args):
    with pytest.raises(ConfigError, match=r"trained_prompts: got 9; must be at most 8, the prompts of a batch"):
        make_args(per_device_train_batch_size=8, num_mini_batches=1, trained_prompts=9)
    with pytest.raises(ConfigError, match=r"trained_prompts: got 3; must be a multiple of num_mini_batches 2"):
        make_args(per_device_train_batch_size=4, num_mini_batches=2, trained_prompts=3)
    with pytest.raises(ConfigError, match=r"trained_prompts: got 2; must be null with samples_per_prompt 1"):
        make_args(algorithm="ppo", samples_per_prompt=1, trained_prompts=2)


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_a_batch_without_any_reward_changes_nothing(make_policy, tokenizer, prompts, make_args, algorithm):
    calls = []

    def fails_once(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 2:
            raise ConnectionError("the judge is away")
        return count_letters(prompts, completions)

    args = make_args(algorithm=algorithm, samples_per_prompt=2, total_episodes=24, reward_errors="skip")
    _, metrics = train(make_policy, tokenizer, prompts, args, algorithm, reward_funcs=fails_once)
    assert [m["optimizer_steps"] for m in metrics] == [2, 0, 2]
    assert [m["reward/skipped"] for m in metrics] == [0, 16, 0]
    assert [m["lr"] for m in metrics] == pytest.approx([1e-3 * 2 / 3, 1e-3 / 3, 0])
    assert all(math.isfinite(value) for line in metrics for value in line.values())


# Ties


def test_ties_in_the_first_mini_batch_bring_no_warning_of_torch(make_policy, tokenizer, prompts, make_args, recwarn):
    calls = []

    def reward(prompts, completions, **columns):
        calls.append(len(completions))
        return count_letters(prompts, completions) if len(calls) > 1 else [0.1] * len(completions)

    args = make_args(algorithm="rloo", samples_per_prompt=2, total_episodes=16, kl=KLConfig(coef=0.0))
    trainer = OnlineTrainer(make_policy(), args, prompts, reward_funcs=reward, processing_class=tokenizer)
    trainer.train()
    assert [line["optimizer_steps"] for line in metrics_of(args)] == [0, 2]
    assert [str(one.message) for one in recwarn if "lr_scheduler" in str(one.message)] == []


@pytest.mark.parametrize("algorithm", ["rloo", "grpo"])
@pytest.mark.parametrize("where", ["none", "loss", "reward"])
def test_groups_of_equal_rewards_alone_make_no_step(make_policy, tokenizer, prompts, make_args, algorithm, where):
    """Neither by rounding nor by momentum; but a KL penalty in the loss or in the reward still acts."""
    calls, weights = [], {}

    def same_at_last(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        calls.append(len(completions))
        return count_letters(prompts, completions) if len(calls) < 2 else [0.1] * len(completions)

    kl = KLConfig(coef=0.0 if where == "none" else 0.1, where="loss" if where == "loss" else "reward", estimator="k3")
    args = make_args(algorithm=algorithm, samples_per_prompt=8, total_episodes=16, num_mini_batches=2, kl=kl)
    trainer = OnlineTrainer(make_policy(), args, prompts, reward_funcs=same_at_last, processing_class=tokenizer)
    update = trainer.learner.update

    def watched(experience, batch):
        weights[batch] = {name: p.clone() for name, p in trainer.model.named_parameters()}
        return update(experience, batch)

    trainer.learner.update = watched
    trainer.train()
    metrics = metrics_of(args)
    assert [line["optimizer_steps"] for line in metrics] == ([2, 0] if where == "none" else [2, 2])
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in weights[2].items()) == (where == "none")
    assert any(not torch.equal(weights[1][name], p) for name, p in weights[2].items())


def test_so_it_is_where_passes_round_in_sixteen_bits(tokenizer, prompts, make_args):
    """The reference is computed in passes of 64 rows, the policy in passes of two: 16 bits show it in every token."""
    torch.manual_seed(0)
    sizes = {**LLAMA_SIZES, "hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.08}
    policy = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=258))
    args = make_args(num_mini_batches=1, per_device_train_batch_size=1, completions_per_batch=24, bf16=True)
    args = replace(args, total_episodes=12, learning_rate=1e-12)
    _, metrics = train(lambda: policy, tokenizer, prompts, args, "online_dpo")
    assert [line["rewards/accuracies"] for line in metrics] == [0.5]


@pytest.mark.parametrize("normalization", ["sequence", "token", "constant"])
def test_tied_groups_count_in_the_normaliser_of_a_mini_batch(make_policy, tokenizer, prompts, make_args, normalization):
    """The gradient of half of the groups, among ties, is that of these alone times their part of the weight."""
    args = make_args(
        algorithm="grpo",
        samples_per_prompt=2,
        num_mini_batches=1,
        per_device_train_batch_size=8,
        kl=KLConfig(coef=0.0),
        normalization=normalization,
        max_grad_norm=0.0,
    )
    norms, weights = [], []
    for groups in (slice(0, 8), slice(0, 4)):
        trainer = OnlineTrainer(make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer)
        scored = scored_batch(trainer, torch.tensor([[1.0, 3.0]] * 4 + [[0.1, 0.1]] * 4))
        part = replace(scored.batch, groups=scored.batch.groups[groups])
        experience, _ = trainer.learner.annotate(replace(scored, batch=part, scores_PK=scored.scores_PK[groups]))
        norms.append(trainer.learner.update(experience, 1)["grad_norm"])
        weights.append(experience.weight_of(torch.arange(experience.units)))
    assert norms[0] == pytest.approx(norms[1] * weights[1] / weights[0], rel=1e-4)
    assert weights[1] < 0.8 * weights[0]


# Weight decay


def spares(model) -> set[str]:
    """What transformers' Trainer spares."""
    return {name for name, _ in model.named_parameters()} - set(Trainer.get_decay_parameter_names(None, model))


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_weight_decay_spares_biases_and_norms(make_policy, tokenizer, prompts, make_args, shared_trunk):
    """One step of AdamW (arXiv 1711.05101, algorithm 2) against a loop in float64, of policy and value model."""
    args = make_args(
        algorithm="ppo",
        shared_trunk=shared_trunk,
        weight_decay=0.5,
        value_learning_rate=3e-3,
        num_mini_batches=1,
        lr_scheduler_type="constant",
        max_grad_norm=0.01,
    )
    trainer = PPOTrainer(make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer)
    learner = trainer.learner
    before = {name: p.detach().double() for name, p in learner.model.named_parameters()}
    clipped = {}
    learner.optimizer.register_step_pre_hook(
        lambda *_: clipped.update({name: p.grad.double() for name, p in learner.model.named_parameters()})
    )
    experience, _ = learner.annotate(scored_batch(trainer))
    metrics = learner.update(experience, 1)
    assert metrics["grad_norm"] != metrics["value_grad_norm"]
    for part in ("policy.", "value."):  # clipped apart, decayed or not
        norm = math.sqrt(sum(g.square().sum().item() for name, g in clipped.items() if name.startswith(part)))
        assert norm == pytest.approx(0.01, rel=1e-3)
    spared = spares(learner.model)
    assert {name for name, p in before.items() if p.dim() == 1} == spared
    assert len({name.split(".")[0] for name in spared}) == 2  # of both
    for name, parameter in learner.model.named_parameters():
        rate, gradient = (3e-3 if name.startswith("value.") else 1e-3), clipped[name]
        kept = 1.0 if name in spared else 1 - rate * 0.5
        expected = before[name] * kept - rate * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("first", "second"), [(0.0, 0.1), (0.1, 0.0), (0.1, 0.1)])
def test_moments_find_their_weights_whatever_the_groups(
    make_policy, make_reward_model, tokenizer, prompts, make_args, first, second
):
    """A checkpoint names a moment by the number of its weight, which weight decay must not change."""
    options = {"reward_model": make_reward_model(), "processing_class": tokenizer}
    learners = [
        PPOTrainer(make_policy(), make_args(f"{i}", algorithm="ppo", weight_decay=decay), prompts, **options)
        for i, decay in enumerate((first, second))
    ]
    learners[0].train()
    ours, theirs = (trainer.learner for trainer in learners)
    restore_learner(theirs, *learner_state(ours))
    for (name, a), (_, b) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(ours.optimizer.state[a][key], theirs.optimizer.state[b][key]), (name, key)
        assert ours.optimizer.state[a]["exp_avg"].abs().max() > 0 or "rotary" in name
    assert [group["weight_decay"] for group in theirs.optimizer.param_groups] == (
        [0.0] * 2 if second == 0 else [0.1, 0] * 2
    )


# Precision


def make_llama() -> LlamaForCausalLM:
    """Its states before the head are float32 under autocast too, on a CPU as on a GPU."""
    torch.manual_seed(0)
    ends = {"eos_token_id": 256, "bos_token_id": 256, "pad_token_id": 257}
    return LlamaForCausalLM(LlamaConfig(vocab_size=258, **ends, **LLAMA_SIZES))


def test_a_head_in_float32_halves_the_error_of_bf16(tokenizer, prompts, make_args):
    """Of log-probabilities by policy, reference and comparison with the engine, against the model in float64."""
    found, norms = {}, {}
    for kind in ("float32", "bf16", "head_float32"):
        bf16 = {"bf16": kind != "float32", "head_float32": kind == "head_float32"}
        args = make_args(kind, samples_per_prompt=4, num_mini_batches=1, **bf16)
        policy = make_llama()
        exact = copy.deepcopy(policy).double()
        trainer = OnlineTrainer(policy, args, prompts, reward_funcs=count_letters, processing_class=tokenizer)
        learner, errors, by_policy = trainer.learner, {}, []
        experience, _ = learner.annotate(scored_batch(trainer))
        loss = learner.algorithm.loss

        def watched(output, rows, config, loss=loss, by_policy=by_policy):
            by_policy.append((output.logprobs_BT.detach(), rows))
            return loss(output, rows, config)

        learner.algorithm = replace(learner.algorithm, loss=watched)
        norms[kind] = learner.update(experience, 1)["grad_norm"]
        by_policy = [*by_policy, (experience.reference_logprobs_BT, experience)]
        for who, pairs in (("policy", by_policy[:-1]), ("reference", by_policy[-1:])):
            differences = []
            for logprobs_BT, rows in pairs:
                mask_BT = rows.sampled_BT
                right = response_logprobs(exact, rows.tokens_BT, mask_BT, 0.7, with_entropies=False)
                differences.append((logprobs_BT - right.logprobs_BT)[mask_BT > 0])
            errors[who] = torch.cat(differences).square().mean().sqrt().item()
        found[kind] = errors
    for who in ("policy", "reference"):
        assert found["float32"][who] < 1e-5
        assert found["bf16"][who] > 1e-4
        assert found["head_float32"][who] < found["bf16"][who] / 2
    assert norms["head_float32"] == pytest.approx(norms["float32"], rel=0.05)


def test_the_comparison_with_the_engine_sees_the_head_in_float32(tokenizer, prompts, make_args):
    """The inline engine samples in float32, the learner compares itself as it trains."""
    found = []
    for head_float32 in (False, True):
        args = make_args(
            str(head_float32),
            bf16=True,
            head_float32=head_float32,
            total_episodes=128,  # of eight the sampling noise may be larger than either
            completions_per_batch=128,
            generation={"mismatch_samples": 100},
        )
        _, metrics = train(make_llama, tokenizer, prompts, args, "online_dpo")
        found.append(metrics[0]["engine/logprob_difference"])
    assert found[1] < 0.65 * found[0]


def test_a_head_in_float32_leaves_autocast_as_it_was(make_policy):
    """Also when the head fails, and for a copy of the model."""
    policy = make_policy()
    head_in_float32(policy)
    tokens_BT = torch.arange(12).view(2, 6)
    for model in (policy, copy.deepcopy(policy)):
        with torch.autocast("cpu", torch.bfloat16):
            assert model(tokens_BT).logits.dtype == torch.float32
            assert torch.is_autocast_enabled("cpu")
            model.get_output_embeddings().forward = None
            with pytest.raises(TypeError):
                model(tokens_BT)
            assert torch.is_autocast_enabled("cpu")
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


# Metrics


@pytest.mark.parametrize("size", [1, 3, 7])
def test_metrics_of_tokens_are_means_over_tokens(size):
    """However rows of unequal length are spread over micro-batches; the oracle is a loop over Python's floats.

    Short rows have ratios above 1 and long ones below, so that a mean of the rows' means is far from the mean.
    """
    lengths, logs, entropies = [1, 2, 9, 0, 5, 1, 9], [], []
    watches = [ImportanceRatioStats(), ImportanceRatioStats()]
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.zeros(7, 10, dtype=torch.long)
    mask_BT = torch.tensor([[float(0 < t <= length) for t in range(10)] for length in lengths])
    pi_BT, mu_BT, entropies_BT = (torch.randn(7, 10, generator=generator) for _ in range(3))
    pi_BT += 1 / torch.tensor(lengths).clamp(min=1)[:, None]
    for number, rows_B in enumerate(torch.arange(7).split(size)):
        nothing_B = torch.zeros(len(rows_B))
        nothing_BT = torch.zeros(len(rows_B), 10)
        rows = Experience(
            tokens_BT[rows_B], nothing_B, mask_BT[rows_B], mu_BT[rows_B], nothing_BT, nothing_B, nothing_B
        )
        watches[number % 2].add(PolicyOutput(pi_BT[rows_B], entropies_BT[rows_B]), rows, mask_BT[rows_B])
    for row, length in enumerate(lengths):
        for t in range(1, length + 1):
            logs.append(pi_BT[row, t].item() - mu_BT[row, t].item())
            entropies.append(entropies_BT[row, t].item())
    expected = {
        "val/ratio": math.fsum(map(math.exp, logs)) / len(logs),
        "policy/behaviour_kl": -math.fsum(logs) / len(logs),
        "policy/logprob_difference": math.fsum(map(abs, logs)) / len(logs),
        "policy/entropy_avg": math.fsum(entropies) / len(logs),
    }
    found = ImportanceRatioStats.of(watches).metrics()
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_nothing_is_said_of_rows_without_tokens():
    nothing_BT = torch.zeros(2, 3)
    ones_B = torch.ones(2)
    rows = Experience(nothing_BT.long(), ones_B, nothing_BT, nothing_BT, nothing_BT, ones_B, ones_B)
    watch = ImportanceRatioStats()
    watch.add(PolicyOutput(nothing_BT, nothing_BT), rows, nothing_BT)
    assert watch.metrics() == ImportanceRatioStats().metrics() == {}
