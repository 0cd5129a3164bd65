"""What moved an update: against slow gradients in float64, and against updates written again without the learner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import count_letters, mixture

from async_rlhf.algorithms.table import BUILT_IN
from async_rlhf.config.online import LoRAConfig
from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.studies.explain.ablation import Removal, distance, reward_parts, without_part
from async_rlhf.studies.explain.contributions import contributions
from async_rlhf.studies.explain.explanation import explained, implied_shares
from async_rlhf.studies.explain.omission import Omissions
from async_rlhf.studies.explain.update import RepeatableUpdate, clones, difference, inner, norm
from async_rlhf.types import Batch, Group


def constant(prompts, completions, **columns):
    return [3.0] * len(completions)


def make_trainer(make_policy, tokenizer, prompts, args, **options):
    options = {"reward_funcs": count_letters} | options
    return OnlineTrainer(make_policy(), args, prompts, processing_class=tokenizer, **options)


def sampled(trainer, index=1):
    """A batch that the starting policy has sampled, scored."""
    run = trainer.run
    drawn = run.prompts.prompts(range(run.config.batch_size))
    groups = tuple(Group(p, c) for p, c in zip(drawn, run.engine.generate(drawn), strict=True))
    return run.scorer(Batch(index, 0, groups, 0.0))


def taken(trainer, scored, batch=1):
    """The update by a batch: how to repeat it, its experience, and the weights after it."""
    update = RepeatableUpdate(trainer.learner, batch)
    experience = update.annotate(scored)
    return update, experience, update.take(experience)


def logprobs_in_float64(policy, tokens_T, sampled_T, temperature):
    """Of the sampled tokens, by plain log-softmax."""
    logits_TV = policy(tokens_T[None]).logits[0] / temperature
    logps_T = torch.stack([logits_TV[t - 1].log_softmax(0)[tokens_T[t]] for t in range(1, len(tokens_T))])
    return logps_T[sampled_T[1:] > 0]


def dpo_losses(policy, experience, config):
    """The loss of each pair, DPO's formula again; and the log-probabilities of every row's sampled tokens."""
    logprobs, ratios = [], []
    for b, length in enumerate(experience.lengths_B.tolist()):
        tokens_T, sampled_T = experience.tokens_BT[b, :length], experience.sampled_BT[b, :length]
        logprobs.append(logprobs_in_float64(policy, tokens_T, sampled_T, config.generation.temperature))
        reference = experience.reference_logprobs_BT[b, :length][sampled_T > 0].double()
        ratios.append(logprobs[-1].sum() - reference.sum())
    margins = [config.beta * (ratios[i] - ratios[i + 1]) for i in range(0, len(ratios), 2)]
    return [-torch.log(torch.sigmoid(margin)) for margin in margins], logprobs


def test_contributions_are_those_of_slow_gradients_in_float64(make_policy, tokenizer, prompts, make_args):
    args = make_args(num_mini_batches=1, per_device_train_batch_size=8, learning_rate=1e-3)
    trainer = make_trainer(make_policy, tokenizer, prompts, args)
    update, experience, after = taken(trainer, sampled(trainer))
    delta = update.step_to(after)
    found = contributions(update, experience, delta)

    policy = make_policy().double()
    parameters = list(policy.parameters())
    losses, logprobs = dpo_losses(policy, experience, args)
    weight = float(experience.loss_weights_U.sum())
    assert weight > 4

    def along(value):
        """The derivative of a number along the step, by its gradient."""
        gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(gradients, delta, strict=True)
        return sum((g * d.double()).sum().item() for g, d in pairs if g is not None)

    gradients = torch.autograd.grad(
        sum(x * w for x, w in zip(losses, experience.loss_weights_U.tolist(), strict=True)) / weight,
        parameters,
        retain_graph=True,
    )
    length = torch.cat([g.flatten() for g in gradients]).norm().item()
    kept = min(1.0, args.max_grad_norm / length)
    assert kept < 1  # so that clipping is seen
    assert found.kept == pytest.approx([kept], rel=1e-5)
    expected = [-kept * along(x) * w / weight for x, w in zip(losses, experience.loss_weights_U.tolist(), strict=True)]
    size = max(map(abs, expected))
    assert found.units_U.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5 * size)
    assert found.total == pytest.approx(sum(expected), rel=1e-4)
    assert found.units_U.sum().item() == pytest.approx(found.total, rel=1e-5)

    for u in range(3):
        for b in (2 * u, 2 * u + 1):
            (slope,) = torch.autograd.grad(losses[u], [logprobs[b]], retain_graph=True, allow_unused=True)
            moves = list(map(along, logprobs[b]))
            place = experience.sampled_BT[b] > 0
            far = max(map(abs, moves))
            assert found.seen_U[u] == (experience.loss_weights_U[u] > 0)
            if found.seen_U[u]:
                assert found.moves_BT[b][place].tolist() == pytest.approx(moves, rel=2e-3, abs=2e-4 * far)
            tokens = [-kept * slope[t].item() * moves[t] / weight for t in range(len(slope))]
            tokens = [token * float(experience.loss_weights_U[u]) for token in tokens]
            ours = found.tokens_BT[b][place].tolist()
            assert ours == pytest.approx(tokens, rel=2e-3, abs=2e-4 * size), b


VARIANTS = [
    *(pytest.param(name, {}, id=name) for name in BUILT_IN),
    pytest.param("ppo", {"shared_trunk": True, "vf_coef": 10.0}, id="ppo-shared-trunk"),
    pytest.param("online_dpo", {"lora": LoRAConfig(rank=2)}, id="online_dpo-lora"),
    pytest.param("ppo", {"lora": LoRAConfig(rank=2)}, id="ppo-lora"),
    pytest.param("grpo", {"gradient_checkpointing": True}, id="grpo-checkpointing"),
]


@pytest.mark.parametrize(("algorithm", "changes"), VARIANTS)
def test_contributions_add_up_to_what_the_learners_own_gradients_say(
    make_policy, tokenizer, prompts, make_args, algorithm, changes
):
    """Two epochs of two mini-batches, so ratios leave 1 and some are clipped."""
    args = make_args(algorithm=algorithm, num_epochs=2, num_mini_batches=2, learning_rate=3e-3, **changes)
    trainer = make_trainer(make_policy, tokenizer, prompts, args)
    update, experience, after = taken(trainer, sampled(trainer))
    delta = update.step_to(after)
    assert norm(delta) > 0
    found = contributions(update, experience, delta)
    assert all(map(torch.equal, clones(update.policy), after))  # measuring changes nothing
    size = found.units_U.abs().sum().item()
    assert found.steps == len(found.kept) > 1
    assert found.units_U.sum().item() == pytest.approx(found.total, abs=1e-4 * size)
    first_U = found.log_ratios_BT.abs().amax(dim=1).view(-1, experience.rows_per_unit).amax(dim=1)
    assert first_U.min() < 1e-5  # of the first mini-batch: the second epoch sees it again, when the policy has moved
    tokens_U = found.tokens_BT.sum(dim=1).view(-1, experience.rows_per_unit).sum(dim=1)
    assert tokens_U.tolist() == pytest.approx(found.units_U.tolist(), abs=2e-3 * size)
    assert (found.tokens_BT * (1 - experience.sampled_BT)).abs().max() == 0
    names = {name for name, _ in trainer.learner.policy.named_parameters()}
    assert len(update.policy) <= len(names)
    if "lora" in changes:
        assert all(parameter.requires_grad for parameter in update.policy)
        assert len(update.policy) < len(names) / 2


def test_left_out_is_what_a_learner_does_that_never_saw_it(make_policy, tokenizer, prompts, make_args):
    """The second update of AdamW, written again: without the pair, and without any gradient."""
    args = make_args(num_mini_batches=1, per_device_train_batch_size=8, lr_scheduler_type="constant", adam_epsilon=1e-4)
    trainer = make_trainer(make_policy, tokenizer, prompts, args)
    scored, learner = sampled(trainer), trainer.learner
    learner.update(learner.annotate(scored)[0], 1)
    update, experience, after = taken(trainer, scored, batch=2)
    removal = Removal(update, experience, after, update.step_to(after))
    effect = removal.without_units([2])
    ours = clones(update.policy)

    def again(steps):
        policy = make_policy()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, eps=1e-4, weight_decay=0.0)
        before = clones(list(policy.parameters()))
        for weights in steps:
            before = clones(list(policy.parameters()))
            losses, _ = dpo_losses(policy, experience, args)
            loss = sum(x * w for x, w in zip(losses, weights, strict=True)) / max(sum(weights), 1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return before, list(policy.parameters())

    whole = experience.loss_weights_U.tolist()
    part = [0.0 if u == 2 else w for u, w in enumerate(whole)]
    assert part != whole
    start, full = again([whole, whole])
    _, less = again([whole, part])
    _, none = again([whole, [0.0] * len(whole)])
    flat = {
        name: torch.cat([(a - b).detach().flatten() for a, b in zip(one, start, strict=True)]).double()
        for name, one in {"full": full, "less": less, "none": none}.items()
    }
    for mine, theirs in zip(ours, less, strict=True):
        assert torch.allclose(mine, theirs, atol=2e-5)
    difference = ((flat["less"] - flat["full"]).norm() / flat["full"].norm()).item()
    assert difference > 0.01
    assert effect.change == pytest.approx(difference, rel=0.01)
    assert effect.cosine == pytest.approx(torch.cosine_similarity(flat["less"], flat["full"], dim=0).item(), abs=1e-3)
    history = torch.cat([d.flatten() for d in update.step_to(update.take_without_gradient(1))]).double()
    assert (history - flat["none"]).norm() < 0.01 * history.norm()
    assert history.norm() > 0
    # The part of this step that is the momentum of the first batch, by the formula, with this step's own denominator.
    optimizer, rate, (beta, second) = learner.optimizer, args.learning_rate, (0.9, 0.999)
    update.take(experience)
    moments = [(optimizer.state[p]["exp_avg"].clone(), optimizer.state[p]["exp_avg_sq"].clone()) for p in update.policy]
    update.rewind()
    earlier = [beta * optimizer.state[p]["exp_avg"] for p in update.policy]
    parts = [
        -rate * old / (1 - beta**2) / ((square / (1 - second**2)).sqrt() + 1e-4)
        for old, (_, square) in zip(earlier, moments, strict=True)
    ]
    step = update.step_to(after)
    share = inner(parts, step) / inner(step, step)
    found = 1 - inner(update.step_to(update.take_without_momentum(experience)), step) / inner(step, step)
    assert found == pytest.approx(share, abs=1e-4)
    assert abs(share - inner(update.step_to(update.take_without_gradient(1)), step) / inner(step, step)) > 0.02


def test_leaving_out_all_of_a_mini_batch_leaves_its_step_to_momentum(make_policy, tokenizer, prompts, make_args):
    """One pair in each mini-batch. A skipped step would leave out what earlier batches had in it as well."""
    args = make_args(num_mini_batches=8, per_device_train_batch_size=1, lr_scheduler_type="constant")
    trainer = make_trainer(make_policy, tokenizer, prompts, args)
    scored, learner = sampled(trainer), trainer.learner
    learner.update(learner.annotate(scored)[0], 1)
    update, experience, after = taken(trainer, scored, batch=2)
    taught = [weight > 0 for _, weight in learner.mini_batches(experience, 2)]
    order = [units.tolist() for units, _ in learner.mini_batches(experience, 2)]
    last = max(number for number, any_weight in enumerate(taught) if any_weight)
    effect = Removal(update, experience, after, update.step_to(after)).without_units(order[last])
    update.rewind()
    learner.update(replace(experience, loss_weights_U=_less(experience, order[last])), 2)
    skipped = clones(update.policy)
    learner.optimizer.zero_grad()
    for parameter in update.policy:
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer.step()
    by_momentum = Removal(update, experience, after, update.step_to(after)).effect(clones(update.policy))
    assert effect.change == pytest.approx(by_momentum.change, rel=1e-4)
    assert Removal(update, experience, after, update.step_to(after)).effect(skipped).change > 1.05 * effect.change


def slow_adamw(start, steps, absent, betas=(0.9, 0.999), eps=1e-8, decay=0.01):
    """AdamW's formula in float64, over (batch, rate, gradients); the gradients of batches in ``absent`` are zero."""
    weights = [w.double() for w in start]
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for t, (batch, rate, gradients) in enumerate(steps, start=1):
        for i, gradient in enumerate(gradients):
            g = gradient.double() * (batch not in absent)
            first[i] = betas[0] * first[i] + (1 - betas[0]) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g**2
            size = (second[i] / (1 - betas[1] ** t)).sqrt() + eps
            shrink = rate * decay * (weights[i].dim() > 1)
            weights[i] = weights[i] - shrink * weights[i] - rate * first[i] / (1 - betas[0] ** t) / size
    return weights


def test_what_a_gradient_does_later_is_adamw_without_it(make_policy, tokenizer, prompts, make_args):
    """Three steps a batch, clipped, at a falling rate, with weight decay; two omissions at once, one of two batches."""
    args = make_args(num_mini_batches=3, learning_rate=1e-3, weight_decay=0.01, total_episodes=48)
    trainer = make_trainer(make_policy, tokenizer, prompts, args)
    learner, scored, taken_steps, depth = trainer.learner, sampled(trainer), [], []
    trained, start = learner.parallel.trained, clones(learner.parallel.trained)
    rates = {id(p): group for group in learner.optimizer.param_groups for p in group["params"]}

    def seen(*_):
        depth.append(None)
        if len(depth) == 1:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained]
            taken_steps.append((omissions.batch, rates[id(trained[0])]["lr"], gradients))

    learner.optimizer.register_step_pre_hook(seen)
    learner.optimizer.register_step_post_hook(lambda *_: depth.pop())
    omissions, followed = Omissions(learner), {}
    for batch in range(1, 7):
        omissions.batch = batch
        for absent in [range(2, 3), range(3, 5)]:
            if batch == absent.start:
                followed[absent] = omissions.follow(absent)
        learner.update(learner.annotate(scored)[0], batch)
    assert len(taken_steps) == 18
    assert len({rate for _, rate, _ in taken_steps}) > 10
    whole = slow_adamw(start, taken_steps, ())
    far = norm(difference(whole, start))
    assert norm(difference(trained, whole)) < 1e-4 * far
    for absent, omission in followed.items():
        expected = slow_adamw(start, taken_steps, absent)
        missing = norm(difference(whole, expected))
        assert missing > 0.05 * far
        ours = omission.weights(list(reversed(trained)))
        assert norm(difference(ours, list(reversed(expected)))) < 1e-3 * missing


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_a_followed_optimiser_is_not_changed_and_what_is_left_out_leaves_momentum(
    make_policy, tokenizer, prompts, make_args, optimizer
):
    after = []
    for follows in (False, True):
        trainer = make_trainer(make_policy, tokenizer, prompts, make_args(optimizer=optimizer))
        learner, scored = trainer.learner, sampled(trainer)
        omissions = Omissions(learner)
        for batch in (1, 2):
            omissions.batch = batch
            update = RepeatableUpdate(learner, batch)
            if follows:
                omissions.follow(range(batch, batch + 1))
            steps = learner.update(learner.annotate(scored)[0], batch)["optimizer_steps"]
        after.append(clones(learner.parallel.trained))
    assert all(map(torch.equal, *after))
    _, omission = omissions.followed
    omissions.followed = []
    assert all(map(torch.equal, omission.weights(update.policy), update.take_without_gradient(int(steps))))


def test_of_a_mixture_it_takes_the_sampled_experts(tokenizer, prompts, make_args):
    """The routers have moved since: by their own choice gradients would be others, and not add up."""
    args = make_args(router_replay=True, num_mini_batches=1, per_device_train_batch_size=8, learning_rate=1e-3)
    trainer = make_trainer(lambda: mixture("mixtral"), tokenizer, prompts, args)
    scored = sampled(trainer)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainer.learner.policy.named_parameters():
            if "gate.weight" in name:
                parameter += torch.randn_like(parameter)
    update, experience, after = taken(trainer, scored)
    assert experience.routes_BTLE is not None
    found = contributions(update, experience, update.step_to(after))
    assert found.units_U.sum().item() == pytest.approx(found.total, rel=1e-3)


def _less(experience, units):
    weights = experience.loss_weights_U.clone()
    weights[units] = 0.0
    return weights


@pytest.mark.parametrize(("beta", "steps"), [(0.9, 1), (0.9, 4), (0.5, 3)])
def test_what_momentum_alone_makes_of_history(beta, steps):
    """Momentum, run for long: with gradients that have nothing in common, and with one gradient always."""
    torch.manual_seed(0)
    shares = []
    for gradients in (torch.randn(200 + steps, 20_000), torch.randn(1, 20_000).expand(200 + steps, -1)):
        moment, total, mine = torch.zeros(20_000), torch.zeros(20_000), torch.zeros(20_000)
        for number, gradient in enumerate(gradients):
            moment = beta * moment + (1 - beta) * gradient
            if number >= 200:
                total += moment
                mine += (1 - beta ** (200 + steps - number)) * gradient
        shares.append(1 - ((mine @ total) / (total @ total)).item())
    assert implied_shares(beta, steps) == pytest.approx(shares, abs=0.02)


def test_how_much_more_likely_chosen_and_rejected_become(make_policy, tokenizer, prompts, make_args):
    args = make_args(num_mini_batches=1, per_device_train_batch_size=8, learning_rate=1e-4)
    trainer = make_trainer(make_policy, tokenizer, prompts, args)
    scored = sampled(trainer)
    update, experience, after = taken(trainer, scored)
    account = explained(update, scored, experience, trainer.run.scorer, tokenizer, after, top=0)
    moved_B = distance(update, experience, after, update.before).logprobs_B
    counted_U = experience.loss_weights_U > 0
    wanted = {"chosen": moved_B[0::2][counted_U].mean(), "rejected": moved_B[1::2][counted_U].mean()}
    assert account["step"]["more_likely_by"] == pytest.approx({k: v.item() for k, v in wanted.items()}, rel=0.05)
    assert wanted["chosen"] > wanted["rejected"]


def test_the_distance_of_policies_is_their_divergence(make_policy, tokenizer, prompts, make_args):
    trainer = make_trainer(make_policy, tokenizer, prompts, make_args(learning_rate=1e-2))
    update, experience, after = taken(trainer, sampled(trainer))
    found = distance(update, experience, after, update.before)
    ours, theirs = make_policy().double(), make_policy().double()
    with torch.no_grad():
        for parameter, tensor in zip(ours.parameters(), after, strict=True):
            parameter.copy_(tensor)
        kls, more = [], []
        for b, length in enumerate(experience.lengths_B.tolist()):
            tokens_T, sampled_T = experience.tokens_BT[b, :length], experience.sampled_BT[b, :length]
            p, q = ((m(tokens_T[None]).logits[0] / 0.7).log_softmax(1) for m in (ours, theirs))
            places = [t for t in range(1, length) if sampled_T[t] > 0]
            kls += [(p[t - 1].exp() * (p[t - 1] - q[t - 1])).sum().item() for t in places]
            more.append(sum((p - q)[t - 1, tokens_T[t]].item() for t in places))
    assert trainer.args.generation.temperature == 0.7
    assert found.kl == pytest.approx(sum(kls) / len(kls), rel=1e-3)
    assert found.logprobs_B.tolist() == pytest.approx(more, rel=1e-3, abs=1e-4)


def account(trainer, scored, top=2, batch=1):
    update, experience, after = taken(trainer, scored, batch)
    run = trainer.run
    return explained(update, scored, experience, run.scorer, run.tokenizer, after, top)


def test_a_planted_completion_is_named_first(make_policy, tokenizer, prompts, make_args):
    args = make_args(algorithm="rloo", samples_per_prompt=2, num_mini_batches=1, per_device_train_batch_size=8)
    trainer = make_trainer(make_policy, tokenizer, prompts, args)
    scored = sampled(trainer)
    scored.scores_PK[:] = torch.tensor([0.0, 0.01])
    scored.scores_PK[3] = torch.tensor([0.0, 50.0])
    found = account(trainer, scored)
    first, second = found["completions"][:2]
    planted = scored.batch.groups[3]
    assert first["draw"] == second["draw"] == planted.prompt.draw
    assert {unit["rows"][0]["score"] for unit in (first, second)} == {0.0, 50.0}
    for unit in (first, second):
        row = unit["rows"][0]
        sample = planted.samples[row["sample"]]
        assert [row["completion"]] == decode_samples(tokenizer, [sample])
        assert abs(unit["percent"]) > 20
        assert unit["without"]["change"] > 0.1
        assert sum(token["contribution"] for token in row["tokens"]) == pytest.approx(row["contribution"])
    assert {token["completion"] for token in found["tokens"][:5]} <= {1, 2}
    letters = sum(entry["contribution"] for entry in found["vocabulary"])
    assert sum(entry["places"] for entry in found["vocabulary"]) <= sum(len(s.drawn) for s in scored.batch.samples)
    assert abs(letters) > 0.5 * abs(found["step"]["contributions"]["sum_of_units"])


def test_units_are_ranked_by_effect_and_ties_keep_the_order_of_the_batch(make_policy, tokenizer, prompts, make_args):
    args = make_args(num_mini_batches=2, per_device_train_batch_size=4, learning_rate=1e-3)
    trainer = make_trainer(make_policy, tokenizer, prompts, args)
    scored = sampled(trainer)
    scored.scores_PK[5:] = 3.0  # pairs of equal scores: leaving one out changes nothing
    trainer.learner.update(trainer.learner.annotate(scored)[0], 1)
    update, experience, after = taken(trainer, scored, batch=2)
    run = trainer.run
    found = explained(update, scored, experience, run.scorer, run.tokenizer, after, top=7)["completions"]
    assert [unit["without"] is None for unit in found] == [False] * 7 + [True]
    assert [unit["rank"] for unit in found] == list(range(1, 9))
    changes = [unit["without"]["change"] for unit in found[:7]]
    assert changes == sorted(changes, reverse=True)
    shares = [abs(unit["percent"]) for unit in found[:7]]
    assert shares != sorted(shares, reverse=True)  # the order by contributions is another
    assert changes[-3:] == [0.0] * 3 < changes[:3]
    assert [unit["tied"] for unit in found] == [change == 0.0 for change in changes] + [False]
    numbers = [min(row["number"] for row in unit["rows"]) for unit in found if unit["tied"]]
    assert numbers == sorted(numbers)
    for unit in found:
        for row in unit["rows"]:
            group, place = divmod(row["number"] - 1, 2)
            assert scored.batch.groups[group].prompt.draw == unit["draw"]
            assert place == row["sample"]


def test_a_constant_part_of_the_reward_moves_nothing_and_the_only_one_all(make_policy, tokenizer, prompts, make_args):
    args = make_args(algorithm="rloo", num_mini_batches=1, per_device_train_batch_size=8, length_penalty=0.25)
    trainer = make_trainer(make_policy, tokenizer, prompts, args, reward_funcs=[constant, count_letters])
    scored = sampled(trainer)
    parts = {part["part"]: part["without"] for part in account(trainer, scored)["reward_parts"]}
    assert list(parts) == ["constant", "count_letters", "length_penalty"]
    assert parts["constant"]["change"] < 1e-3
    assert parts["constant"]["cosine"] > 0.999999
    assert parts["count_letters"]["change"] > 0.1
    scorer = trainer.run.scorer
    assert reward_parts(scorer, scored) == list(parts)
    unpenalised = without_part(scorer, scored, "length_penalty").scores_PK.flatten()
    texts = decode_samples(tokenizer, scored.batch.samples)
    assert unpenalised.tolist() == pytest.approx([3.0 + x for x in count_letters([], texts)])
    lettered = without_part(scorer, scored, "count_letters").scores_PK.flatten().tolist()
    assert lettered == pytest.approx([3.0 - 0.25 * len(s.drawn) for s in scored.batch.samples])


def test_scores_that_are_missing_stay_missing(make_policy, tokenizer, prompts, make_args):
    def sometimes(prompts, completions, **columns):
        return [float("nan") if i == 1 else None if i == 2 else 1.0 for i in range(len(completions))]

    args = make_args(reward_errors="skip", non_eos_penalty="add")
    trainer = make_trainer(make_policy, tokenizer, prompts, args, reward_funcs=[sometimes, count_letters])
    scored = sampled(trainer)
    for part in ("sometimes", "count_letters", "non_eos_penalty"):
        scores = without_part(trainer.run.scorer, scored, part).scores_PK
        assert scores.isnan().flatten().nonzero().flatten().tolist() == [1]
    found = account(trainer, scored)
    assert found["not_trained_on"] == 2


def test_the_lag_comes_with_what_importance_weights_do(make_policy, tokenizer, prompts, make_args):
    """The policy that samples gave every token a probability e times as small."""
    args = make_args(
        algorithm="grpo", samples_per_prompt=2, num_mini_batches=1, per_device_train_batch_size=8, staleness=2
    )
    trainer = make_trainer(make_policy, tokenizer, prompts, args)
    scored = sampled(trainer, index=3)
    groups = []
    for group in scored.batch.groups:
        colder = [replace(s, logprobs=np.where(s.sampled, s.logprobs - 1, 0).astype(np.float32)) for s in group.samples]
        groups.append(replace(group, samples=tuple(colder)))
    scored = replace(scored, batch=replace(scored.batch, groups=tuple(groups)))
    found = account(trainer, scored, batch=3)["lag"]
    assert found["batches"] == 2
    assert found["mean_abs_log_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert found["objective"]["policy/importance_weight"] == pytest.approx(2.0)  # e, capped
    assert found["objective"]["policy/importance_capped"] == 1


def test_a_batch_of_ties_has_no_step(make_policy, tokenizer, prompts, make_args):
    trainer = make_trainer(make_policy, tokenizer, prompts, make_args(), reward_funcs=constant)
    found = account(trainer, sampled(trainer))
    assert found["step"]["norm"] == found["step"]["optimizer_steps"] == 0
    assert {unit["contribution"] for unit in found["completions"]} == {0.0}
    assert found["completions"][0]["without"] == {"change": None, "cosine": None, "kl_per_token": 0.0}
