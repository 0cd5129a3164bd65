"""Best-of-K, RLOO, REINFORCE++, PPO, GRPO and its kin from the scores to the loss, against loops over floats.

Four policies: mu sampled, ref is the reference, old is the one before the update, pi is being trained.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache

import pytest
import torch
from tables import each, pairwise
from torch import Tensor

from async_rlhf import OnlineDPOConfig, PPOConfig, ReinforcePPConfig
from async_rlhf.algorithms.table import find
from async_rlhf.config import GenerationConfig, KLConfig, OffPolicyConfig, OnlineConfig
from async_rlhf.config.base import ConfigError
from async_rlhf.types import Experience, LossOutput, PolicyOutput

NO_KL, REWARD_K1 = KLConfig(coef=0.0), KLConfig(coef=0.3, where="reward", estimator="k1")
LOSS_K3, CORRECTED = (KLConfig(coef=0.3, where="loss", estimator="k3", corrected=x) for x in (False, True))
PENALTIES = [NO_KL, REWARD_K1, *(KLConfig(coef=0.3, where="reward", estimator=x) for x in ("k2", "k3"))]
PENALTIES += [KLConfig(coef=0.3, where="loss", estimator="k2"), LOSS_K3]
OFF_POLICY = [
    OffPolicyConfig(old_logprobs="behaviour", importance="truncated"),
    OffPolicyConfig(old_logprobs="proximal", importance="none"),
    *(
        OffPolicyConfig(importance=x, level=level, cap=1.2)
        for x in ("truncated", "masked")
        for level in ("token", "sequence")
    ),
]


def one(key: str, *values: object) -> list[dict[str, object]]:
    return [{key: value} for value in values]


CLIPS = [{}, {"cliprange": 0.1, "cliprange_high": 0.6}, {"cliprange": 0.3, "cliprange_high": 0.1}]
MASKS, NORMALIZATIONS = one("mask_truncated", False, True), one("normalization", "sequence", "token", "constant")
OBJECTIVES: dict[str, list[list[dict[str, object]]]] = {
    "best_of_k": [],
    "rloo": [CLIPS, MASKS],
    "ppo": [
        *(CLIPS, one("gamma", 1.0, 0.9), one("lam", 0.95, 0.6, 1.0), ({}, {"vf_coef": 0.7, "cliprange_value": 0.5})),
        *(one("whiten_advantages", True, False), one("whiten_rewards", False, True)),
        [{}, {"bootstrap_truncated": True, "non_eos_penalty": False}],
    ],
    "grpo": [CLIPS, MASKS, NORMALIZATIONS, one("scale_rewards", "group", "batch", "none")],
    "grpo of samples": [CLIPS, MASKS, one("ratio", "sequence")],
    "dr_grpo": [CLIPS],
    "gspo": [CLIPS, MASKS, [{}, *NORMALIZATIONS[1:]]],
    "cispo": [[{}, {"cliprange": 0.1, "cliprange_high": 0.2}, {"cliprange_high": None}], MASKS, NORMALIZATIONS],
    "reinforce_pp": [CLIPS, one("baseline", "none", "group"), one("gamma", 1.0, 0.9)],
}
"""By algorithm, the axes of its own: each has some changes of the configuration."""
WITH_RATIOS = [key for key in OBJECTIVES if key != "best_of_k"]
BY_GROUPS = [key for key in WITH_RATIOS if key not in ("ppo", "reinforce_pp")]
SHARED_METRICS = {"policy/approxkl_avg", "policy/clipfrac_avg"}
IMPORTANCE_METRICS = {"policy/importance_weight", "policy/importance_capped"}


@cache
def configure(
    key: str, K: int, kl: KLConfig = NO_KL, off_policy: OffPolicyConfig = OFF_POLICY[1], **changes: object
) -> OnlineConfig:
    """Where a sample is one action there are no weights for tokens; there the level is set right."""
    name = key.split()[0]
    if name == "best_of_k":
        return find(name).config(samples_per_prompt=K, kl=kl)
    if key == "grpo of samples":
        changes["ratio"] = "sequence"
    if key in ("rloo", "grpo of samples"):
        off_policy = replace(off_policy, level="sequence")
    generation = GenerationConfig(response_length=11)
    return find(name).config(samples_per_prompt=K, kl=kl, off_policy=off_policy, generation=generation, **changes)


# Batches


@dataclass(frozen=True)
class Case:
    """Rows before credit was given, and what the policy and the value model being trained say of them."""

    experience: Experience
    logprobs_BT: Tensor
    values_BT: Tensor


def flags_of_row(rng: random.Random, start: int, count: int, holes: bool) -> list[float]:
    """1.0 at each of ``count`` sampled tokens after ``start`` of the prompt, 0.0 at the prompt and at observations.

    Holes are observations of 1 to 4 tokens: before the first sampled token, between two, or after the last.
    """
    flags = [0.0] * start
    for _ in range(count):
        flags += [0.0] * (rng.randint(1, 4) if holes and rng.random() < 0.3 else 0) + [1.0]
    return flags + [0.0] * (rng.randint(1, 4) if holes and rng.random() < 0.5 else 0)


def padded(rows: list[list[float]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [0.0] * (longest - len(row)) for row in rows], dtype=torch.float64)


@cache
def make_case(
    seed: int, P: int, K: int, spread: float = 0.3, old: bool = True, garbage: float = 7.0, empty: bool = False
) -> Case:
    """P groups of K rows with 1 to 6 prompt tokens and 0 to 9 sampled tokens (none at all if ``empty``).

    Rows of odd seeds have holes and rewards of an environment at tokens of every kind; those of even seeds end with
    their last sampled token and have no such reward. The four policies differ by ``spread`` nats a token. Every fourth
    group has equal scores; the scores of even seeds are small integers with ties. Where no token was sampled, every
    float but the rewards is +-garbage: by default more than any log-probability, but not so much that exp overflows.
    The first token of a row is its number.
    """
    rng, holes_rng, holes = random.Random(seed), random.Random(f"holes {seed}"), seed % 2 == 1
    starts = [rng.randint(1, 6) for _ in range(P)]
    counts = [0 if empty or rng.random() < 0.2 else rng.randint(1, 9) for _ in range(P * K)]
    flags = [flags_of_row(holes_rng, starts[r // K], count, holes) for r, count in enumerate(counts)]
    mask_BT = padded(flags)
    rewards = [[holes_rng.gauss(0, 1) * (holes and holes_rng.random() < 0.4) for _ in row] for row in flags]
    B, T = mask_BT.shape
    torch.manual_seed(seed)

    def outside(values_BT: Tensor) -> Tensor:
        signs_BT = torch.randint(0, 2, (B, T)) * 2.0 - 1
        return torch.where(mask_BT > 0, values_BT, garbage * signs_BT)

    base_BT = -torch.rand(B, T, dtype=torch.float64) * 3
    logprobs_BT, mu_BT, ref_BT, old_BT = (
        outside(base_BT + torch.randn(B, T, dtype=torch.float64) * spread) for _ in range(4)
    )
    values_BT = torch.randn(B, T, dtype=torch.float64)
    old_values_BT = outside(values_BT + torch.randn(B, T, dtype=torch.float64) * 0.3)
    tokens_BT = torch.randint(0, 1000, (B, T))
    tokens_BT[:, 0] = torch.arange(B)
    scores = [float(rng.randint(-2, 2)) if seed % 2 == 0 else rng.gauss(0, 2) for _ in range(B)]
    for row in range(B):
        if row // K % 4 == 3:
            scores[row] = 0.5
    experience = Experience(
        tokens_BT=tokens_BT,
        lengths_B=torch.tensor([len(row) for row in flags]),
        sampled_BT=mask_BT,
        behaviour_logprobs_BT=mu_BT,
        rewards_BT=padded(rewards),
        scores_B=torch.tensor(scores, dtype=torch.float64),
        loss_weights_U=torch.ones(B, dtype=torch.float64),
        reference_logprobs_BT=ref_BT,
        old_logprobs_BT=old_BT if old else None,
        values_BT=old_values_BT,
        truncated_B=torch.tensor([rng.random() < 0.4 for _ in range(B)]),
        end_values_B=torch.randn(B, dtype=torch.float64),
    )
    return Case(experience, logprobs_BT, outside(values_BT))


def output_for(case: Case, rows: Experience) -> PolicyOutput:
    """What the models give for these rows, found by the number in their first token."""
    picked, T = rows.tokens_BT[:, 0], rows.tokens_BT.shape[1]
    logprobs_BT = case.logprobs_BT[picked, :T]
    return PolicyOutput(logprobs_BT, torch.ones_like(logprobs_BT).detach(), case.values_BT[picked, :T])


def compute_loss(key: str, case: Case, config: OnlineConfig) -> LossOutput:
    algorithm = find(key.split()[0])
    rows = algorithm.credit(case.experience, config)
    return algorithm.loss(output_for(case, rows), rows, config)


def loss_and_gradients(key: str, case: Case, config: OnlineConfig) -> tuple[LossOutput, Tensor, Tensor]:
    """Gradients of the summed loss by the log-probabilities and by the values (zeros but for PPO)."""
    leaves = [x.detach().clone().requires_grad_() for x in (case.logprobs_BT, case.values_BT)]
    output = compute_loss(key, Case(case.experience, *leaves), config)
    assert output.loss_sum.requires_grad
    assert not any(value.requires_grad for value in output.metrics.values())
    gradients = torch.autograd.grad(output.loss_sum, leaves, allow_unused=True)
    by_logprobs_BT, by_values_BT = (
        torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)
    )
    return output, by_logprobs_BT, by_values_BT


@dataclass(frozen=True)
class Setting:
    """A configuration, and what kind of a batch it is tried on."""

    key: str
    config: OnlineConfig
    seed: int
    spread: float
    old: bool
    told: str

    def case(self, P: int = 4, **changes: object) -> Case:
        return make_case(
            **{"seed": self.seed, "P": P, "K": self.config.samples_per_prompt, "old": self.old}
            | {"spread": self.spread}
            | changes
        )


def settings(key: str) -> list[Setting]:
    """Every two of the values that may be chosen meet in at least one of them."""
    penalties = PENALTIES if key == "best_of_k" else [*PENALTIES, CORRECTED]
    found = []
    shared = (penalties, OFF_POLICY, (0, 1, 2), (0, 1), (True, False), (0.05, 0.3, 2.0))
    for kl, off_policy, more, odd, old, spread, *own in pairwise(*shared, *OBJECTIVES[key]):
        changes = {name: value for group in own for name, value in group.items()}
        K = more + (1 if key in ("ppo", "reinforce_pp") and changes.get("baseline") != "group" else 2)
        config = configure(key, K, kl, off_policy, **changes)
        told = f"{key}, {K} samples, {kl}, {off_policy}, {changes}, spread {spread}, old {old}"
        found.append(Setting(key, config, 2 * len(found) + odd, spread, old, told))
    return found


SETTINGS = {key: settings(key) for key in OBJECTIVES}


# The oracle. Rows are lists of the numbers at their sampled tokens.


def responses(values_BT: Tensor, experience: Experience) -> list[list[float]]:
    return [
        [x for x, inside in zip(values, mask, strict=True) if inside]
        for values, mask in zip(values_BT.tolist(), experience.sampled_BT.tolist(), strict=True)
    ]


def slow_kl(
    kl: KLConfig, where: str, x: list[float], reference: list[float], mu: list[float] | None = None
) -> list[float]:
    """The penalty at each token if it belongs there ("reward" or "loss"), zeros otherwise."""
    estimator = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[kl.estimator]
    if kl.where != where:
        return [0.0] * len(x)
    weights = [math.exp(a - b) for a, b in zip(x, mu, strict=True)] if kl.corrected else [1.0] * len(x)
    return [kl.coef * w * estimator(a - b) for w, a, b in zip(weights, x, reference, strict=True)]


def slow_reward_kl(experience: Experience, config: OnlineConfig) -> list[list[float]]:
    x_BT = experience.behaviour_logprobs_BT if experience.old_logprobs_BT is None else experience.old_logprobs_BT
    pairs = zip(responses(x_BT, experience), responses(experience.reference_logprobs_BT, experience), strict=True)
    return [slow_kl(config.kl, "reward", x, reference) for x, reference in pairs]


def slow_rewards(experience: Experience, config: OnlineConfig) -> list[float]:
    penalties = slow_reward_kl(experience, config)
    return [score - math.fsum(kl) for score, kl in zip(experience.scores_B.tolist(), penalties, strict=True)]


def slow_best(experience: Experience, config: OnlineConfig) -> list[tuple[int, float]]:
    """For every prompt the row of the first best sample, and its weight."""
    rewards, K = slow_rewards(experience, config), config.samples_per_prompt
    result = []
    for start in range(0, len(rewards), K):
        best = max(range(start, start + K), key=rewards.__getitem__)
        result.append((best, float(min(rewards[start : start + K]) < rewards[best])))
    return result


def slow_std(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


@dataclass
class Credit:
    """Advantages of rows (RLOO, GRPO) or of tokens (PPO, REINFORCE++), and what every row adds to the normaliser."""

    weights: list[float]
    of_rows: list[float] | None = None
    of_tokens: list[list[float]] | None = None
    returns: list[list[float]] | None = None


def of_each_token(credit: Credit, experience: Experience) -> list[list[float]]:
    if credit.of_tokens is not None:
        return credit.of_tokens
    counts = [len(row) for row in responses(experience.sampled_BT, experience)]
    return [[advantage] * n for advantage, n in zip(credit.of_rows, counts, strict=True)]


def slow_credit(key: str, experience: Experience, config: OnlineConfig) -> Credit:
    name = key.split()[0]
    lengths = [len(row) for row in responses(experience.sampled_BT, experience)]
    rewards, K = slow_rewards(experience, config), config.samples_per_prompt
    if name == "best_of_k":
        return Credit([weight for _, weight in slow_best(experience, config)])
    if name == "ppo":
        advantages, returns = slow_ppo_advantages(experience, config)
        return Credit([float(n) for n in lengths], of_tokens=advantages, returns=returns)
    if name == "reinforce_pp":
        return Credit([float(n) for n in lengths], of_tokens=slow_returns(experience, config))
    advantages = []
    for row, reward in enumerate(rewards):
        group = rewards[row // K * K : row // K * K + K]
        if name == "rloo":
            advantages.append(reward - (math.fsum(group) - reward) / (K - 1))
        else:
            scale = {"group": lambda: slow_std(group) + 1e-4, "batch": lambda: slow_std(rewards) + 1e-4}  # noqa: B023
            divisor = 1.0 if config.scale_rewards == "none" else scale[config.scale_rewards]()
            advantages.append((reward - math.fsum(group) / K) / divisor)
    weigh = {"sequence": lambda n: 1.0, "token": float, "constant": lambda n: float(config.generation.response_length)}
    cut_off = experience.truncated_B.tolist() if config.mask_truncated else [False] * len(rewards)
    by = "sequence" if name == "rloo" else config.normalization
    weights = [0.0 if cut else weigh[by](n) for cut, n in zip(cut_off, lengths, strict=True)]
    return Credit(weights, of_rows=advantages)


def slow_earned(experience: Experience) -> list[list[float]]:
    """For each sampled token what the environment gave from it on, up to the next sampled token or the row's end."""
    result = []
    for flags, given in zip(experience.sampled_BT.tolist(), experience.rewards_BT.tolist(), strict=True):
        parts: list[list[float]] = []
        for sampled, reward in zip(flags, given, strict=True):
            if sampled:
                parts.append([reward])
            elif parts:
                parts[-1].append(reward)
        result.append([math.fsum(part) for part in parts])
    return result


def slow_rests(experience: Experience, config: PPOConfig) -> list[float]:
    """What the last sampled token of each row gets beside that: the rest of the score, or what is expected later."""
    rests = []
    for row, score in enumerate(experience.scores_B.tolist()):
        rest = score - math.fsum(experience.rewards_BT[row].tolist())
        if config.bootstrap_truncated and experience.truncated_B[row]:
            rest = config.gamma * experience.end_values_B[row].item()
        rests.append(rest)
    return rests


def discounted(numbers: list[float], factor: float) -> float:
    return math.fsum(factor**i * number for i, number in enumerate(numbers))


def slow_ppo_advantages(experience: Experience, config: PPOConfig) -> tuple[list[list[float]], list[list[float]]]:
    penalties, values = slow_reward_kl(experience, config), responses(experience.values_BT, experience)
    earned, rests = slow_earned(experience), slow_rests(experience, config)
    rewards = [
        [earned[row][t] - one + (rest if t == len(penalties[row]) - 1 else 0.0) for t, one in enumerate(penalties[row])]
        for row, rest in enumerate(rests)
    ]
    if config.whiten_rewards:
        rewards = slow_whiten(rewards, keep_mean=True)
    advantages, returns = [], []
    for row in range(len(rests)):
        n = len(penalties[row])
        after = [*values[row][1:], 0.0]
        deltas = [rewards[row][t] + config.gamma * after[t] - values[row][t] for t in range(n)]
        advantages.append([discounted(deltas[t:], config.gamma * config.lam) for t in range(n)])
        returns.append([a + v for a, v in zip(advantages[row], values[row], strict=True)])
    return slow_whiten(advantages) if config.whiten_advantages else advantages, returns


def slow_whiten(rows: list[list[float]], keep_mean: bool = False) -> list[list[float]]:
    everything = [x for row in rows for x in row]
    if not everything:
        return rows
    mean = math.fsum(everything) / len(everything)
    variance = math.fsum((x - mean) ** 2 for x in everything) / len(everything)
    return [[(x - mean) / math.sqrt(variance + 1e-8) + mean * keep_mean for x in row] for row in rows]


def slow_returns(experience: Experience, config: ReinforcePPConfig) -> list[list[float]]:
    """REINFORCE++: what a row earns from each of its sampled tokens on, whitened over the tokens of all rows."""
    penalties, earned = slow_reward_kl(experience, config), slow_earned(experience)
    scores, K, returns = experience.scores_B.tolist(), config.samples_per_prompt, []
    for row, score in enumerate(scores):
        if config.baseline == "group":
            score -= math.fsum(scores[row // K * K : row // K * K + K]) / K
        rewards = differences(earned[row], penalties[row])
        if rewards:
            rewards[-1] += score - math.fsum(experience.rewards_BT[row].tolist())
        returns.append([discounted(rewards[t:], config.gamma) for t in range(len(rewards))])
    return slow_whiten(returns)


def slow_clip(log_ratio: float, config: OnlineConfig) -> tuple[float, float]:
    """The ratio and what it is clipped to."""
    ratio = math.exp(log_ratio)
    high = config.cliprange if config.cliprange_high is None else config.cliprange_high
    return ratio, min(max(ratio, 1 - config.cliprange), 1 + high)


def slow_surrogate(log_ratio: float, advantage: float, config: OnlineConfig) -> tuple[float, bool]:
    ratio, clipped = slow_clip(log_ratio, config)
    return -min(ratio * advantage, clipped * advantage), clipped * advantage < ratio * advantage


def slow_likelihood(log_ratio: float, advantage: float, logprob: float, config: OnlineConfig) -> tuple[float, bool]:
    """CISPO: the log-probability times a clipped ratio, which the caller holds fixed while it moves the former."""
    ratio, clipped = slow_clip(log_ratio, config)
    return -clipped * advantage * logprob, clipped != ratio


def slow_weight(log_ratio: float, off_policy: OffPolicyConfig) -> tuple[float, bool]:
    weight = math.exp(log_ratio)
    bound = off_policy.cap if off_policy.importance == "truncated" else 0.0
    return (weight, False) if weight <= off_policy.cap else (bound, True)


def uses_weights(config: OnlineConfig) -> bool:
    return config.off_policy.old_logprobs == "proximal" and config.off_policy.importance != "none"


def slow_old(experience: Experience, config: OnlineConfig, pi: list[list[float]]) -> list[list[float]]:
    """Of the policy in the ratio's denominator. Kept apart from the loss: it stays when pi is moved."""
    if config.off_policy.old_logprobs == "behaviour":
        return responses(experience.behaviour_logprobs_BT, experience)
    return pi if experience.old_logprobs_BT is None else responses(experience.old_logprobs_BT, experience)


def differences(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


class SlowLoss:
    """The loss and the metrics as a function of pi and of the values alone."""

    def __init__(self, key: str, case: Case, config: OnlineConfig):
        self.name, self.config, self.experience = key.split()[0], config, case.experience
        self.pi, self.values = responses(case.logprobs_BT, case.experience), responses(case.values_BT, case.experience)
        self.credit = slow_credit(key, case.experience, config)
        self.ref = responses(case.experience.reference_logprobs_BT, case.experience)
        self.mu = responses(case.experience.behaviour_logprobs_BT, case.experience)
        self.old_values = responses(case.experience.values_BT, case.experience)
        self.given_pi = [list(row) for row in self.pi]
        """Of CISPO's weights, which stay when pi is moved."""
        if self.name != "best_of_k":
            self.old = slow_old(case.experience, config, self.given_pi)

    def __call__(self) -> tuple[float, dict[str, float]]:
        if self.name == "best_of_k":
            return self.best_of_k()
        return self.of_samples() if self.config.ratio == "sequence" else self.of_tokens()

    def loss_kl(self, row: int) -> list[float]:
        return slow_kl(self.config.kl, "loss", self.pi[row], self.ref[row], self.mu[row])

    def best_of_k(self) -> tuple[float, dict[str, float]]:
        loss = logps = 0.0
        for row, weight in slow_best(self.experience, self.config):
            loss += weight * math.fsum(differences(self.loss_kl(row), self.pi[row]))
            logps += weight * math.fsum(self.pi[row])
        return loss, {"loss/policy_avg": loss, "logps/chosen": logps}

    def surrogate(self, row: int, t: int, advantage: float) -> tuple[float, bool]:
        """Of one token, the importance weight left out. With a ratio of the mean it is the same for all of the row."""
        log_ratio = self.log_ratio(row, t)
        if self.config.ratio == "sequence_mean":
            advantages = of_each_token(self.credit, self.experience)[row]
            return slow_surrogate(log_ratio, math.fsum(advantages) / len(advantages), self.config)
        if self.config.surrogate == "cispo":
            fixed = self.given_pi[row][t] - self.old[row][t]
            return slow_likelihood(fixed, advantage, self.pi[row][t], self.config)
        return slow_surrogate(log_ratio, advantage, self.config)

    def log_ratio(self, row: int, t: int) -> float:
        between = differences(self.pi[row], self.old[row])
        return math.fsum(between) / len(between) if self.config.ratio == "sequence_mean" else between[t]

    def of_samples(self) -> tuple[float, dict[str, float]]:
        """RLOO, and GRPO with a ratio of the sample: each is one action."""
        metrics = dict.fromkeys(SHARED_METRICS | (IMPORTANCE_METRICS if uses_weights(self.config) else set()), 0.0)
        loss = 0.0
        for row, advantages in enumerate(of_each_token(self.credit, self.experience)):
            if self.credit.weights[row] == 0:
                continue
            # A row without tokens has no loss, but its ratio is 1.
            advantage = math.fsum(advantages) / len(advantages) if advantages else 0.0
            log_ratio = math.fsum(differences(self.pi[row], self.old[row]))
            weight = 1.0
            if uses_weights(self.config):
                between = math.fsum(differences(self.old[row], self.mu[row]))
                weight, capped = slow_weight(between, self.config.off_policy)
                metrics["policy/importance_weight"] += weight
                metrics["policy/importance_capped"] += capped
            surrogate, clipped = slow_surrogate(log_ratio, advantage, self.config)
            loss += weight * surrogate + math.fsum(self.loss_kl(row))
            metrics["policy/approxkl_avg"] += log_ratio**2 / 2
            metrics["policy/clipfrac_avg"] += clipped
        return loss, metrics | {"loss/policy_avg": loss}

    def of_tokens(self) -> tuple[float, dict[str, float]]:
        """All others. ``collected`` holds the numbers of a row's tokens, whose means become the metrics."""
        config, ppo = self.config, self.name == "ppo"
        policy_loss = value_loss = 0.0
        names = SHARED_METRICS | (IMPORTANCE_METRICS if uses_weights(config) else set())
        metrics = dict.fromkeys(names | ({"val/clipfrac_avg", "val/value_avg"} if ppo else set()), 0.0)
        for row, pi in enumerate(self.pi):
            if self.credit.weights[row] == 0:
                continue
            if not pi:  # it has no loss, but where ratio and weight are of the row they are 1, products of nothing
                if uses_weights(config) and config.ratio == "sequence_mean" and config.off_policy.level == "sequence":
                    metrics["policy/importance_weight"] += self.credit.weights[row]
                continue
            collected = {name: [] for name in metrics}
            losses = []
            penalties = self.loss_kl(row)
            between = differences(self.old[row], self.mu[row])
            for t, advantage in enumerate(of_each_token(self.credit, self.experience)[row]):
                weight = 1.0
                if uses_weights(config):
                    distance = between[t] if config.off_policy.level == "token" else math.fsum(between)
                    weight, capped = slow_weight(distance, config.off_policy)
                    collected["policy/importance_weight"].append(weight)
                    collected["policy/importance_capped"].append(float(capped))
                surrogate, clipped = self.surrogate(row, t, advantage)
                losses.append(weight * surrogate + penalties[t])
                collected["policy/approxkl_avg"].append(self.log_ratio(row, t) ** 2 / 2)
                collected["policy/clipfrac_avg"].append(float(clipped))
                if ppo:
                    value, old, target = self.values[row][t], self.old_values[row][t], self.credit.returns[row][t]
                    near = min(max(value, old - config.cliprange_value), old + config.cliprange_value)
                    value_loss += 0.5 * max((value - target) ** 2, (near - target) ** 2)
                    collected["val/clipfrac_avg"].append(float((near - target) ** 2 > (value - target) ** 2))
                    collected["val/value_avg"].append(value)
            policy_loss += math.fsum(losses) / (len(losses) if config.normalization == "sequence" else 1)
            for name, numbers in collected.items():
                metrics[name] += math.fsum(numbers) / len(numbers) * self.credit.weights[row]
        metrics["loss/policy_avg"] = policy_loss
        if ppo:
            return policy_loss + config.vf_coef * value_loss, metrics | {"loss/value_avg": value_loss}
        return policy_loss, metrics

    def quotients(self, numbers: list[float], step: float = 1e-6) -> list[float]:
        """The loss's derivative by each of these numbers, which are a row of pi or of the values."""
        quotients = []
        for t, number in enumerate(numbers):
            losses = []
            for numbers[t] in (number + step, number - step):
                losses.append(self()[0])
            numbers[t] = number
            quotients.append((losses[0] - losses[1]) / (2 * step))
        return quotients


# Credit


def at_every_setting(key: str, P: int = 4, **changes: object) -> Iterator[tuple[Setting, Case, OnlineConfig, str]]:
    for setting in SETTINGS[key]:
        yield setting, setting.case(P, **changes), setting.config, setting.told


@pytest.mark.parametrize("key", WITH_RATIOS)
def test_credit_is_its_formula(key):
    """With an old policy at hand the penalty in the reward is that of the old policy, otherwise that of mu."""
    teaching = set()
    for _, case, config, told in at_every_setting(key, 5):
        before = case.experience.map(lambda name, tensor: tensor.clone())
        ours = find(key.split()[0]).credit(case.experience, config)
        expected = slow_credit(key, case.experience, config)
        units = 5 * config.samples_per_prompt
        assert (len(ours), ours.units, ours.rows_per_unit) == (units, units, 1)
        assert ours.loss_weights_U.tolist() == expected.weights, told
        pairs = [(ours.advantages_BT, of_each_token(expected, case.experience))]
        pairs += [(ours.returns_BT, expected.returns)] if expected.returns is not None else []
        assert (ours.returns_BT is None) == (expected.returns is None)
        for tensor_BT, rows in pairs:
            assert tensor_BT.dtype == torch.float64
            assert (tensor_BT * (1 - ours.sampled_BT)).abs().max() == 0
            for ours_T, expected_T in zip(responses(tensor_BT, ours), rows, strict=True):
                assert ours_T == pytest.approx(expected_T, rel=1e-9, abs=1e-9), told
        if expected.of_rows is not None:
            advantages = responses(ours.advantages_BT, ours)
            assert all(len(set(row)) < 2 for row in advantages)  # one for all of a row
            # Ties are none where a penalty is in the reward, and do not matter where it is in the loss.
            in_loss = config.kl.coef > 0 and config.kl.where == "loss"
            some = zip(advantages, expected.of_rows, strict=True)
            has_gradient = [len(row) > 0 and (in_loss or abs(a) > 1e-9) for row, a in some]
            assert ours.has_gradient_U.tolist() == has_gradient, told
            teaching |= {(teaches, len(row) > 0) for teaches, row in zip(has_gradient, advantages, strict=True)}
        only_adds(before, case.experience, ours)
    assert key not in BY_GROUPS or teaching == {(True, True), (False, True), (False, False)}


def only_adds(before: Experience, given: Experience, ours: Experience) -> None:
    """Credit changes nothing of what it was given, and nothing of its own that was there, but at padding."""
    for item in fields(Experience):
        old, new, same = (getattr(x, item.name) for x in (before, ours, given))
        assert torch.equal(same, old) if isinstance(old, Tensor) else same == old, f"{item.name} of the input"
        if item.name in ("advantages_BT", "returns_BT", "loss_weights_U", "has_gradient_U"):
            assert not isinstance(new, Tensor) or not new.requires_grad
        elif (
            item.name in ("reference_logprobs_BT", "behaviour_logprobs_BT", "old_logprobs_BT", "values_BT")
            and old is not None
        ):
            assert responses(new, ours) == responses(old, before), item.name
        else:
            assert torch.equal(new, old) if isinstance(old, Tensor) else new == old, item.name


def test_best_of_k_keeps_the_first_best_row_of_each_prompt():
    for _, case, config, told in at_every_setting("best_of_k", 9):
        experience, K = case.experience, config.samples_per_prompt
        best, expected = find("best_of_k").credit(experience, config), slow_best(experience, config)
        assert (len(best), best.units, best.rows_per_unit) == (9, 9, 1)
        assert best.loss_weights_U.tolist() == [weight for _, weight in expected], told
        for p, (row, weight) in enumerate(expected):
            ours = int(best.tokens_BT[p, 0])
            assert ours == row if weight else ours // K == p
            length = int(experience.lengths_B[ours])
            assert (best.lengths_B[p], best.scores_B[p]) == (length, experience.scores_B[ours])
            for name in ("tokens_BT", "sampled_BT", "rewards_BT", "reference_logprobs_BT", "behaviour_logprobs_BT"):
                assert getattr(best, name)[p, :length].tolist() == getattr(experience, name)[ours, :length].tolist()
            assert best.sampled_BT[p, length:].sum() == 0


def experience_of(sampled: list[list[int]], scores: list[float], **more: object) -> Experience:
    """Of these flags, with zeros for everything that is not given."""
    mask_BT = torch.tensor(sampled, dtype=torch.float64)
    names = ("behaviour_logprobs_BT", "reference_logprobs_BT", "rewards_BT", "values_BT")
    values = {name: torch.zeros_like(mask_BT) for name in names} | {"loss_weights_U": torch.ones(len(mask_BT)).double()}
    values |= {"tokens_BT": torch.arange(len(mask_BT))[:, None].repeat(1, mask_BT.shape[1])}
    values |= {"lengths_B": torch.full((len(mask_BT),), mask_BT.shape[1]), "sampled_BT": mask_BT}
    return Experience(**values | {"scores_B": torch.tensor(scores, dtype=torch.float64)} | more)


def test_best_of_k_breaks_ties_by_position_and_ignores_prompts_that_are_all_ties():
    scores = [1.0, 3.0, 3.0, 3.0, 2.0, 2.0, 1.0, 2.0, 7.0, 7.0, 7.0, 7.0, 0.1, 0.1, math.nextafter(0.1, 1), 0.1]
    best = find("best_of_k").credit(experience_of([[0, 1]] * 16, scores), configure("best_of_k", 4))
    assert best.loss_weights_U.tolist() == [1, 1, 0, 1]
    numbers = best.tokens_BT[:, 0].tolist()
    assert (numbers[:2], numbers[3]) == ([1, 4], 14)


def test_what_an_environment_gave_leaves_no_remainder_of_rounding():
    """A score that is the environment's alone, rounded once from float64, leaves nothing for the last token."""
    rewards_BT = torch.randn(500, 30, generator=torch.Generator().manual_seed(0))
    rows = experience_of([[1] * 30] * 500, [0.0] * 500).map(lambda name, x: x.float() if x.is_floating_point() else x)
    rows = replace(rows, rewards_BT=rewards_BT, scores_B=rewards_BT.double().sum(dim=1).float())
    config = configure("ppo", 1, whiten_advantages=False, lam=0.0, gamma=0.0)
    assert torch.equal(find("ppo").credit(rows, config).advantages_BT, rewards_BT)


# The loss and the metrics


def assert_same(ours: LossOutput, loss: float, metrics: dict[str, float | Tensor], told: str) -> None:
    assert ours.loss_sum.item() == pytest.approx(loss, rel=1e-9, abs=1e-9), told
    for name, value in metrics.items():
        assert ours.metrics[name].item() == pytest.approx(float(value), rel=1e-9, abs=1e-9), f"{name}, {told}"


def assert_equal(ours: LossOutput, expected: tuple[float, dict[str, float]], told: str) -> None:
    assert (ours.loss_sum.shape, ours.loss_sum.dtype) == ((), torch.float64)
    assert set(expected[1]) <= set(ours.metrics), told
    assert set(ours.metrics) & IMPORTANCE_METRICS == set(expected[1]) & IMPORTANCE_METRICS, told
    assert_same(ours, *expected, told)


@pytest.mark.parametrize("key", OBJECTIVES)
def test_loss_and_metrics_are_their_formulas(key):
    """With and without a pass for the old policy, policies near and far from each other."""
    for _, case, config, told in at_every_setting(key):
        assert_equal(compute_loss(key, case, config), SlowLoss(key, case, config)(), told)


@pytest.mark.parametrize("key", OBJECTIVES)
def test_gradient_is_the_difference_quotient_of_the_slow_loss(key):
    """By the log-probabilities and, for PPO, by the values; exactly 0 outside the response."""
    for _, case, config, told in at_every_setting(key, 2, spread=0.2):
        _, by_logprobs_BT, by_values_BT = loss_and_gradients(key, case, config)
        slow = SlowLoss(key, case, config)
        for gradient_BT, numbers in ((by_logprobs_BT, slow.pi), (by_values_BT, slow.values)):
            assert (gradient_BT * (1 - case.experience.sampled_BT)).abs().max() == 0
            if numbers is slow.values and slow.name != "ppo":
                assert gradient_BT.abs().max() == 0
                continue
            for row, gradient in enumerate(responses(gradient_BT, case.experience)):
                assert gradient == pytest.approx(slow.quotients(numbers[row]), rel=1e-5, abs=1e-6), told


@each(itertools.product(["grpo", "grpo of samples", "gspo", "rloo"], ["pi", "mu", "neither"]))
def test_the_expected_gradient_of_a_corrected_penalty_is_that_of_the_kl(key, old):
    """Over all texts of two words of a vocabulary of four, in float64; nothing is sampled.

    The expectation is by mu; the KL at the second word is that after each first word, as mu draws it.
    """
    generator = torch.Generator().manual_seed(1)
    V = 4
    pi_logits, mu_logits, ref_logits = (
        torch.randn(1 + V, V, generator=generator, dtype=torch.float64) for _ in range(3)
    )  # row 0 of the first word, row 1 + v of the second after v
    pi_logits.requires_grad_()
    pairs = list(itertools.product(range(V), range(V)))

    def logprobs(logits: Tensor) -> Tensor:
        """(texts, 2)"""
        log = logits.log_softmax(dim=1)
        return torch.stack([torch.stack([log[0, a], log[1 + a, b]]) for a, b in pairs])

    def at_responses(values_R2: Tensor) -> Tensor:
        return torch.cat([torch.zeros(len(pairs), 1, dtype=torch.float64), values_R2], dim=1)

    def expected_gradient(mu: Tensor, corrected: bool) -> Tensor:
        pi_R2, mu_R2 = logprobs(pi_logits), logprobs(mu).detach()
        total = torch.zeros((), dtype=torch.float64)
        config = configure(key, 2, replace(CORRECTED, corrected=corrected))
        for text, chance in enumerate(mu_R2.sum(dim=1).exp().tolist()):
            part = [text, text]  # of two equal samples no advantage remains
            rows = experience_of(
                [[0, 1, 1]] * 2,
                [0.0, 0.0],
                behaviour_logprobs_BT=at_responses(mu_R2)[part],
                reference_logprobs_BT=at_responses(logprobs(ref_logits))[part],
            )
            algorithm = find(key.split()[0])
            output = PolicyOutput(at_responses(pi_R2)[part], torch.zeros(2, 3, dtype=torch.float64))
            total = total + chance * algorithm.loss(output, algorithm.credit(rows, config), config).loss_sum
        return torch.autograd.grad(total, pi_logits)[0]

    def kl_gradient(mu: Tensor) -> Tensor:
        config = configure(key, 2, CORRECTED)
        pi_log, ref_log = pi_logits.log_softmax(dim=1), ref_logits.log_softmax(dim=1)
        kl_N = (pi_log.exp() * (pi_log - ref_log)).sum(dim=1)
        total = kl_N[0] + (mu[0].softmax(dim=0) * kl_N[1:]).sum()
        tokens = 1 if config.ratio == "sequence" else 2  # whose loss is a mean over them
        return torch.autograd.grad(total, pi_logits)[0] * 2 * CORRECTED.coef / tokens

    mu = {"pi": pi_logits.detach(), "mu": mu_logits, "neither": mu_logits * 3}[old]
    torch.testing.assert_close(expected_gradient(mu, True), kl_gradient(mu), rtol=1e-9, atol=1e-12)
    biased = expected_gradient(mu, False)
    assert (biased - kl_gradient(mu)).norm() > 0.2 * kl_gradient(mu).norm()


@each(["rloo", "grpo of samples", "gspo"])
def test_a_ratio_of_the_sample_takes_the_mean_of_its_advantages(key):
    """Which differ from token to token where credit is someone's own."""
    for setting, case, config, told in at_every_setting(key):
        rows = find(key.split()[0]).credit(case.experience, config)
        torch.manual_seed(setting.seed)
        rows = replace(rows, advantages_BT=torch.randn_like(rows.advantages_BT) * rows.sampled_BT)
        slow = SlowLoss(key, case, config)
        slow.credit = Credit(slow.credit.weights, of_tokens=responses(rows.advantages_BT, rows))
        assert_equal(find(key.split()[0]).loss(output_for(case, rows), rows, config), slow(), told)


@each(
    [
        ("grpo", {"ratio": "sequence"}, 'off_policy.level: got .token.; must be "sequence"'),
        ("grpo", {"ratio": "sequence", "normalization": "token"}, 'normalization: got .token.; must be "sequence"'),
        ("grpo", {"ratio": "sequence", "normalization": "constant"}, "normalization: got .constant."),
        ("cispo", {"ratio": "sequence_mean"}, 'ratio: got .sequence_mean.; must be "token"'),
        ("gspo", {"surrogate": "cispo"}, 'ratio: got .sequence_mean.; must be "token"'),
        ("gspo", {"ratio": "geometric"}, "ratio: got .*geometric"),
        ("grpo", {"cliprange": 1.0}, "cliprange: got 1.0; must be "),
        ("cispo", {"cliprange": 1.1}, "cliprange: got 1.1; must be "),
        ("reinforce_pp", {"baseline": "group"}, "samples_per_prompt: got 1; must be "),
        ("reinforce_pp", {"gamma": 1.1}, "gamma: got 1.1; must be "),
    ]
)
def test_a_configuration_that_is_no_algorithm_is_refused(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        find(name).config(**changes)


@each(OBJECTIVES)
def test_without_a_penalty_no_reference_is_needed(key):
    losses = []
    for _, case, config, told in at_every_setting(key):
        config = replace(config, kl=replace(config.kl, coef=0.0, corrected=False))
        without = replace(case, experience=replace(case.experience, reference_logprobs_BT=None))
        losses.append(compute_loss(key, case, config).loss_sum.item())
        assert compute_loss(key, without, config).loss_sum.item() == losses[-1], told
    assert sum(loss != 0 for loss in losses) > len(losses) / 2


@each(OBJECTIVES)
def test_float32_gives_the_same_to_its_precision(key):
    def single(name: str, x: Tensor) -> Tensor:
        return x.float() if x.is_floating_point() else x

    for _, case, config, told in at_every_setting(key, spread=0.3):
        in_single = Case(case.experience.map(single), single("", case.logprobs_BT), single("", case.values_BT))
        expected, ours = compute_loss(key, case, config), compute_loss(key, in_single, config)
        assert ours.loss_sum.dtype == torch.float32
        for name, value in {"loss_sum": expected.loss_sum, **expected.metrics}.items():
            found = ours.loss_sum if name == "loss_sum" else ours.metrics[name]
            assert found.item() == pytest.approx(value.item(), rel=1e-4, abs=1e-4), f"{name}, {told}"


# Properties


@each(OBJECTIVES)
def test_the_loss_and_every_metric_of_a_batch_are_the_sums_over_its_parts(key):
    """Rows of a group may fall apart; parts are trimmed to their longest row; one part has empty responses only."""
    algorithm = find(key.split()[0])
    for _, case, config, told in at_every_setting(key):
        rows = algorithm.credit(case.experience, config)
        whole = algorithm.loss(output_for(case, rows), rows, config)
        empty = [u for u in range(len(rows)) if rows.sampled_BT[u].sum() == 0]
        units = [u for u in range(len(rows)) if u not in empty]
        if empty and max(rows.lengths_B[empty]) < 2:  # wide as a metric of rows; no pass of a run is
            units, empty = [*units, *empty], []
        random.Random(1).shuffle(units)
        parts = [rows.select(part) for part in (units[:1], units[1:4], units[4:], empty) if part]
        outputs = [algorithm.loss(output_for(case, part), part, config) for part in parts]
        assert all(whole.metrics.keys() == output.metrics.keys() for output in outputs)
        metrics = {name: sum(output.metrics[name] for output in outputs) for name in whole.metrics}
        assert_same(whole, sum(output.loss_sum.item() for output in outputs), metrics, told)
        assert float(sum(part.loss_weights_U.sum() for part in parts)) == float(rows.loss_weights_U.sum())


@each(OBJECTIVES)
def test_nothing_outside_the_response_matters(key):
    """Neither to the loss, nor to a metric, nor to a gradient, where 0 x infinity would be NaN."""
    losses = []
    for setting, clean, config, told in at_every_setting(key, garbage=0.0):
        theirs, *their_gradients = loss_and_gradients(key, clean, config)
        losses.append(theirs.loss_sum.item())
        for garbage in (1.0, 1e3, 1e30):
            dirty = setting.case(garbage=garbage)
            assert not torch.equal(clean.experience.behaviour_logprobs_BT, dirty.experience.behaviour_logprobs_BT)
            ours, *our_gradients = loss_and_gradients(key, dirty, config)
            assert ours.loss_sum.item() == theirs.loss_sum.item(), told
            assert all(ours.metrics[name].item() == value.item() for name, value in theirs.metrics.items()), told
            assert all(itertools.starmap(torch.equal, zip(our_gradients, their_gradients, strict=True))), told
    assert sum(loss != 0 for loss in losses) > len(losses) / 2


def with_more_columns(case: Case, places: list[list[int]], width: int, end: int, rng: random.Random) -> Case:
    """Each row's tokens go to these places of a wider one, whose length is ``end`` if it was full; garbage between."""

    def insert(name: str, x: Tensor) -> Tensor:
        if name == "lengths_B":  # up to where its padding begins now
            return torch.tensor([[*row, end][length] for row, length in zip(places, x.tolist(), strict=True)])
        if not name.endswith("_BT"):
            return x
        filling = 0.0 if name in ("sampled_BT", "rewards_BT") else 1e3 * rng.choice((1, -1))
        return torch.full((len(x), width), filling).to(x.dtype).scatter(1, torch.tensor(places), x)

    return Case(case.experience.map(insert), insert("_BT", case.logprobs_BT), insert("_BT", case.values_BT))


@each(itertools.product(OBJECTIVES, ["padding", "observations"]))
def test_more_padding_and_observations_change_nothing_wherever_they_are_put(key, what):
    """Neither the loss, nor a metric, nor a gradient at a sampled token, if nothing was given for them."""
    for setting, case, config, told in at_every_setting(key):
        rng, (B, T) = random.Random(setting.seed), case.logprobs_BT.shape
        if what == "padding":
            moved = with_more_columns(case, [list(range(T))] * B, T + 3, T, rng)
        else:
            places = [[0, *sorted(rng.sample(range(1, T + 8), T - 1))] for _ in range(B)]
            moved = with_more_columns(case, places, T + 8, T + 8, rng)
            flags = zip(moved.experience.sampled_BT, places, strict=True)
            before_a_sampled_one = [
                set(range(int((row > 0).nonzero().max()))) - set(into) for row, into in flags if row.any()
            ]
            assert sum(map(len, before_a_sampled_one)) > B / 2
        ours, *our_gradients = loss_and_gradients(key, moved, config)
        theirs, *their_gradients = loss_and_gradients(key, case, config)
        assert_same(ours, theirs.loss_sum.item(), theirs.metrics, told)
        ours_BT, theirs_BT = moved.experience.sampled_BT > 0, case.experience.sampled_BT > 0
        for our_gradient_BT, their_gradient_BT in zip(our_gradients, their_gradients, strict=True):
            assert (our_gradient_BT * ~ours_BT).abs().max() == 0
            torch.testing.assert_close(our_gradient_BT[ours_BT], their_gradient_BT[theirs_BT], rtol=1e-9, atol=1e-12)


# Empty responses


@each(OBJECTIVES)
def test_a_batch_of_empty_responses_gives_finite_zeros(key):
    """No response token at all: no loss, no gradient, and nothing that is not a number."""
    for _, case, config, told in at_every_setting(key, empty=True):
        assert case.experience.sampled_BT.sum() == 0
        output, *gradients = loss_and_gradients(key, case, config)
        assert output.loss_sum.item() == 0, told
        assert all(math.isfinite(value.item()) for value in output.metrics.values()), told
        assert all(gradient_BT.abs().max() == 0 for gradient_BT in gradients), told  # false for NaN, too


@each(["sigmoid", "ipo"])
def test_online_dpo_takes_empty_responses(loss_type):
    """An empty response has implicit reward 0; a pair of two has the loss of a margin of 0, and no gradient."""
    algorithm = find("online_dpo")
    config = OnlineDPOConfig(samples_per_prompt=2, loss_type=loss_type, beta=0.25)
    for empty, seed in itertools.product((True, False), (12, 13)):
        case = make_case(seed, 6, 2, empty=empty)
        logprobs_BT = case.logprobs_BT.clone().requires_grad_()
        rows = algorithm.credit(case.experience, config)
        output = algorithm.loss(output_for(Case(case.experience, logprobs_BT, case.values_BT), rows), rows, config)
        (gradient_BT,) = torch.autograd.grad(output.loss_sum, logprobs_BT)
        assert gradient_BT.isfinite().all()
        assert (gradient_BT * (1 - case.experience.sampled_BT)).abs().max() == 0
        loss, scores = 0.0, case.experience.scores_B.tolist()
        pi, ref = (responses(x, case.experience) for x in (logprobs_BT, case.experience.reference_logprobs_BT))
        implicit = [math.fsum(differences(a, b)) for a, b in zip(pi, ref, strict=True)]
        for p in range(6):
            if scores[2 * p] == scores[2 * p + 1]:
                continue
            chosen = 2 * p + (scores[2 * p + 1] > scores[2 * p])
            h = implicit[chosen] - implicit[4 * p + 1 - chosen]
            loss += math.log1p(math.exp(-0.25 * h)) if loss_type == "sigmoid" else (h - 2) ** 2
        assert output.loss_sum.item() == pytest.approx(loss, rel=1e-6)
