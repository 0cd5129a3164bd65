"""Best-of-K, RLOO, REINFORCE++, PPO, GRPO and its kin from the scores to the loss, against loops over floats.

Four policies: mu sampled, ref is the reference, old is the one before the update, pi is being trained.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, fields, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from async_rlhf import OnlineDPOConfig, PPOConfig, ReinforcePPConfig
from async_rlhf.algorithms.table import find
from async_rlhf.config import GenerationConfig, KLConfig, OffPolicyConfig, OnlineConfig
from async_rlhf.config.base import ConfigError
from async_rlhf.types import Experience, LossOutput, PolicyOutput

KLS = {
    "no-kl": KLConfig(coef=0.0),
    "reward-k1": KLConfig(coef=0.3, where="reward", estimator="k1"),
    "reward-k2": KLConfig(coef=0.3, where="reward", estimator="k2"),
    "reward-k3": KLConfig(coef=0.3, where="reward", estimator="k3"),
    "loss-k2": KLConfig(coef=0.3, where="loss", estimator="k2"),
    "loss-k3": KLConfig(coef=0.3, where="loss", estimator="k3"),
}
CORRECTED = KLConfig(coef=0.3, where="loss", estimator="k3", corrected=True)
OFF_POLICY = {
    "behaviour": OffPolicyConfig(old_logprobs="behaviour", importance="truncated"),
    "proximal": OffPolicyConfig(old_logprobs="proximal", importance="none"),
    "truncated-token": OffPolicyConfig(importance="truncated", level="token", cap=1.2),
    "masked-token": OffPolicyConfig(importance="masked", level="token", cap=1.2),
    "truncated-sequence": OffPolicyConfig(importance="truncated", level="sequence", cap=1.2),
    "masked-sequence": OffPolicyConfig(importance="masked", level="sequence", cap=1.2),
}
OBJECTIVES = {
    "best_of_k": ("best_of_k", {}),
    "rloo": ("rloo", {}),
    "rloo-asymmetric": ("rloo", {"cliprange": 0.1, "cliprange_high": 0.6}),
    "ppo": ("ppo", {}),
    "ppo-other": (
        "ppo",
        {"gamma": 0.9, "lam": 0.6, "whiten_advantages": False, "vf_coef": 0.7, "cliprange_value": 0.5},
    ),
    "ppo-whitened-rewards": ("ppo", {"whiten_rewards": True, "gamma": 0.9}),
    "ppo-only-rewards-whitened": ("ppo", {"whiten_rewards": True, "whiten_advantages": False, "lam": 0.8}),
    "ppo-bootstrap": ("ppo", {"gamma": 0.9, "bootstrap_truncated": True, "non_eos_penalty": False}),
    "rloo-masked": ("rloo", {"mask_truncated": True}),
    "grpo-masked": ("grpo", {"mask_truncated": True}),
    "grpo-masked-token": ("grpo", {"mask_truncated": True, "normalization": "token"}),
    "grpo-masked-constant": ("grpo", {"mask_truncated": True, "normalization": "constant", "scale_rewards": "none"}),
    "ppo-asymmetric": ("ppo", {"cliprange": 0.3, "cliprange_high": 0.1, "whiten_advantages": False, "lam": 1.0}),
    "grpo-asymmetric": ("grpo", {"cliprange": 0.1, "cliprange_high": 0.4}),
    "grpo-of-samples": ("grpo", {"ratio": "sequence", "cliprange": 0.2, "cliprange_high": 0.5}),
    "dr_grpo": ("dr_grpo", {}),
    "gspo": ("gspo", {}),
    "gspo-wide-token": ("gspo", {"cliprange": 0.1, "cliprange_high": 0.3, "normalization": "token"}),
    "gspo-masked-constant": ("gspo", {"cliprange": 0.05, "normalization": "constant", "mask_truncated": True}),
    "cispo": ("cispo", {}),
    "cispo-narrow-sequence": ("cispo", {"cliprange": 0.1, "cliprange_high": 0.2, "normalization": "sequence"}),
    "cispo-masked-constant": ("cispo", {"cliprange_high": None, "normalization": "constant", "mask_truncated": True}),
    "reinforce_pp": ("reinforce_pp", {}),
    "reinforce_pp-group": ("reinforce_pp", {"baseline": "group", "gamma": 0.9, "cliprange_high": 0.4}),
} | {
    f"grpo-{scale}-{normalization}": ("grpo", {"scale_rewards": scale, "normalization": normalization})
    for scale, normalization in itertools.product(("group", "batch", "none"), ("sequence", "token", "constant"))
}
WITH_RATIOS = [key for key, (name, _) in OBJECTIVES.items() if name != "best_of_k"]
FROM_ONE_SAMPLE = [key for key in WITH_RATIOS if key.startswith("ppo") or key == "reinforce_pp"]
BY_GROUPS = [key for key in WITH_RATIOS if not key.startswith(("ppo", "reinforce_pp"))]
SHARED_METRICS = {"policy/approxkl_avg", "policy/clipfrac_avg"}
IMPORTANCE_METRICS = {"policy/importance_weight", "policy/importance_capped"}


@cache
def configure(
    key: str, K: int, kl: KLConfig = KLS["no-kl"], off_policy: OffPolicyConfig = OFF_POLICY["proximal"]
) -> OnlineConfig:
    """Where a sample is one action there are no weights for tokens; there the level is set right."""
    name, changes = OBJECTIVES[key]
    if name == "best_of_k":
        return find(name).config(samples_per_prompt=K, kl=kl)
    if name == "rloo" or changes.get("ratio") == "sequence":
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
    algorithm = find(OBJECTIVES[key][0])
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
        best = start
        for row in range(start, start + K):
            if rewards[row] > rewards[best]:
                best = row
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
    name = OBJECTIVES[key][0]
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
    if name == "rloo" or config.normalization == "sequence":
        weights = [1.0] * len(rewards)
    elif config.normalization == "token":
        weights = [float(n) for n in lengths]
    else:
        weights = [float(config.generation.response_length)] * len(rewards)
    if config.mask_truncated:
        cut_off = experience.truncated_B.tolist()
        weights = [0.0 if cut else weight for cut, weight in zip(cut_off, weights, strict=True)]
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


def slow_ppo_advantages(experience: Experience, config: PPOConfig) -> tuple[list[list[float]], list[list[float]]]:
    penalties, values = slow_reward_kl(experience, config), responses(experience.values_BT, experience)
    earned, rests = slow_earned(experience), slow_rests(experience, config)
    rewards = [
        [earned[row][t] - one + (rest if t == len(penalties[row]) - 1 else 0.0) for t, one in enumerate(penalties[row])]
        for row, rest in enumerate(rests)
    ]
    if config.whiten_rewards:
        everything = [x for row in rewards for x in row]
        mean = math.fsum(everything) / len(everything)
        rewards = [[x + mean for x in row] for row in slow_whiten(rewards)]
    advantages, returns = [], []
    for row in range(len(rests)):
        n = len(penalties[row])
        deltas = []
        for t in range(n):
            value_after = values[row][t + 1] if t + 1 < n else 0.0
            deltas.append(rewards[row][t] + config.gamma * value_after - values[row][t])
        decay = config.gamma * config.lam
        advantages.append([math.fsum(decay**i * d for i, d in enumerate(deltas[t:])) for t in range(n)])
        returns.append([a + v for a, v in zip(advantages[row], values[row], strict=True)])
    return slow_whiten(advantages) if config.whiten_advantages else advantages, returns


def slow_whiten(rows: list[list[float]]) -> list[list[float]]:
    everything = [x for row in rows for x in row]
    if not everything:
        return rows
    mean = math.fsum(everything) / len(everything)
    variance = math.fsum((x - mean) ** 2 for x in everything) / len(everything)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def slow_returns(experience: Experience, config: ReinforcePPConfig) -> list[list[float]]:
    """REINFORCE++: what a row earns from each of its sampled tokens on, whitened over the tokens of all rows."""
    penalties, earned, scores = (
        slow_reward_kl(experience, config),
        slow_earned(experience),
        experience.scores_B.tolist(),
    )
    K, returns = config.samples_per_prompt, []
    for row, score in enumerate(scores):
        if config.baseline == "group":
            score -= math.fsum(scores[row // K * K : row // K * K + K]) / K
        rewards = differences(earned[row], penalties[row])
        if rewards:
            rewards[-1] += score - math.fsum(experience.rewards_BT[row].tolist())
        returns.append(
            [math.fsum(config.gamma**i * reward for i, reward in enumerate(rewards[t:])) for t in range(len(rewards))]
        )
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
    if weight <= off_policy.cap:
        return weight, False
    return (off_policy.cap if off_policy.importance == "truncated" else 0.0), True


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
        self.name, self.config, self.experience = OBJECTIVES[key][0], config, case.experience
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
        if self.config.ratio == "sequence":
            return self.of_samples()
        return self.of_tokens()

    def loss_kl(self, row: int) -> list[float]:
        return slow_kl(self.config.kl, "loss", self.pi[row], self.ref[row], self.mu[row])

    def best_of_k(self) -> tuple[float, dict[str, float]]:
        loss = logps = 0.0
        for row, weight in slow_best(self.experience, self.config):
            loss += weight * (math.fsum(self.loss_kl(row)) - math.fsum(self.pi[row]))
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


# Credit


@pytest.mark.parametrize("key", WITH_RATIOS)
def test_credit_is_its_formula(key):
    """With an old policy at hand the penalty in the reward is that of the old policy, otherwise that of mu."""
    for kl, seed, old in itertools.product(KLS, range(2), (True, False)):
        K = 1 + seed if key in FROM_ONE_SAMPLE else 2 + (seed + old) % 3
        case = make_case(seed, 5, K, old=old)
        config = configure(key, K, KLS[kl])
        ours = find(OBJECTIVES[key][0]).credit(case.experience, config)
        expected = slow_credit(key, case.experience, config)
        assert (len(ours), ours.units, ours.rows_per_unit) == (5 * K, 5 * K, 1)
        assert ours.loss_weights_U.tolist() == expected.weights
        pairs = [(ours.advantages_BT, of_each_token(expected, case.experience))]
        if expected.returns is not None:
            pairs.append((ours.returns_BT, expected.returns))
        else:
            assert ours.returns_BT is None
        if expected.of_rows is not None:
            assert all(len(set(row)) < 2 for row in responses(ours.advantages_BT, ours))  # one for all of a row
        for tensor_BT, rows in pairs:
            assert tensor_BT.dtype == torch.float64
            assert (tensor_BT * (1 - ours.sampled_BT)).abs().max() == 0
            for ours_T, expected_T in zip(responses(tensor_BT, ours), rows, strict=True):
                assert ours_T == pytest.approx(expected_T, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("key", WITH_RATIOS)
def test_credit_adds_to_the_experience_and_changes_nothing_else(key, seed):
    case = make_case(seed, 4, 3)
    before = case.experience.map(lambda name, tensor: tensor.clone())
    ours = find(OBJECTIVES[key][0]).credit(case.experience, configure(key, 3, KLS["reward-k3"]))
    added = {"advantages_BT", "returns_BT", "loss_weights_U", "has_gradient_U"}
    clean = {"sampled_BT", "rewards_BT"}
    for item in fields(Experience):
        old, new = getattr(before, item.name), getattr(ours, item.name)
        given = getattr(case.experience, item.name)
        assert torch.equal(given, old) if isinstance(old, Tensor) else given == old, f"{item.name} of the input"
        if item.name in added:
            assert not isinstance(new, Tensor) or not new.requires_grad
        elif isinstance(old, Tensor) and item.name[-3:] == "_BT" and old.is_floating_point() and item.name not in clean:
            assert responses(new, ours) == responses(old, before), item.name
        else:
            assert torch.equal(new, old) if isinstance(old, Tensor) else new == old, item.name


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("key", ["rloo", "grpo-group-sequence", "dr_grpo", "gspo", "cispo"])
def test_a_completion_teaches_where_its_loss_has_a_gradient(key, kl):
    """Ties of the score are none where a KL penalty is in the reward, and do not matter where it is in the loss."""
    for seed in range(4):
        case, config = make_case(seed, 6, 3), configure(key, 3, KLS[kl])
        rows = find(OBJECTIVES[key][0]).credit(case.experience, config)
        lengths = [len(row) for row in responses(case.logprobs_BT, rows)]
        advantages = slow_credit(key, case.experience, config).of_rows
        expected = [
            n > 0 and (kl.startswith("loss") or abs(a) > 1e-9) for n, a in zip(lengths, advantages, strict=True)
        ]
        assert rows.has_gradient_U.tolist() == expected
        assert seed % 2 == 1 or kl != "no-kl" or any(n > 0 and not e for n, e in zip(lengths, expected, strict=True))


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("K", [2, 3, 4])
def test_best_of_k_keeps_the_first_best_row_of_each_prompt(K, kl):
    for seed, old in itertools.product(range(3), (True, False)):
        experience = make_case(seed, 9, K, old=old).experience
        config = configure("best_of_k", K, KLS[kl])
        best = find("best_of_k").credit(experience, config)
        expected = slow_best(experience, config)
        assert (len(best), best.units, best.rows_per_unit) == (9, 9, 1)
        assert best.loss_weights_U.tolist() == [weight for _, weight in expected]
        for p, (row, weight) in enumerate(expected):
            ours = int(best.tokens_BT[p, 0])
            assert ours // K == p
            if weight:
                assert ours == row
            length = int(experience.lengths_B[ours])
            assert best.lengths_B[p] == length
            assert best.scores_B[p] == experience.scores_B[ours]
            for name in ("tokens_BT", "sampled_BT", "rewards_BT", "reference_logprobs_BT", "behaviour_logprobs_BT"):
                assert getattr(best, name)[p, :length].tolist() == getattr(experience, name)[ours, :length].tolist()
            assert best.sampled_BT[p, length:].sum() == 0


def test_best_of_k_breaks_ties_by_position_and_ignores_prompts_that_are_all_ties():
    experience = make_case(0, 4, 4).experience
    scores = [1.0, 3.0, 3.0, 3.0, 2.0, 2.0, 1.0, 2.0, 7.0, 7.0, 7.0, 7.0, 0.1, 0.1, math.nextafter(0.1, 1), 0.1]
    experience = replace(experience, scores_B=torch.tensor(scores, dtype=torch.float64))
    best = find("best_of_k").credit(experience, configure("best_of_k", 4))
    assert best.loss_weights_U.tolist() == [1, 1, 0, 1]
    numbers = best.tokens_BT[:, 0].tolist()
    assert numbers[:2] == [1, 4]
    assert numbers[3] == 14


def test_best_of_k_judges_by_the_reward_less_its_kl():
    """The penalty decides between equal scores, and overrules a small difference."""
    case = make_case(1, 1, 2, garbage=0.0)
    mask_BT = torch.zeros(2, 4, dtype=torch.float64)
    mask_BT[:, 2:] = 1
    zeros_BT, far_BT = torch.zeros_like(mask_BT), torch.tensor([[0, 0, 1, 1.0], [0, 0, 0, 0]], dtype=torch.float64)
    for scores, best_row in (([0.5, 0.5], 1), ([1.0, 0.5], 1), ([1.5, 0.5], 0)):
        experience = replace(
            case.experience,
            tokens_BT=torch.tensor([[0, 5, 5, 5], [1, 5, 5, 5]]),
            lengths_B=torch.tensor([4, 4]),
            sampled_BT=mask_BT,
            behaviour_logprobs_BT=far_BT,
            rewards_BT=zeros_BT,
            reference_logprobs_BT=zeros_BT,
            values_BT=None,
            old_logprobs_BT=None,
            scores_B=torch.tensor(scores, dtype=torch.float64),
        )
        best = find("best_of_k").credit(experience, configure("best_of_k", 2, KLS["reward-k1"]))
        assert best.tokens_BT[:, 0].tolist() == [best_row]  # the first row's penalty is 0.3 x (1 + 1)
        assert best.loss_weights_U.tolist() == [1]


@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_gives_the_score_to_the_last_response_token_only(seed):
    """With lambda 1 and no values every token's advantage is the discounted score; an empty response has none."""
    case = make_case(seed, 6, 2)
    zeros_BT = torch.zeros_like(case.values_BT)
    experience = replace(case.experience, values_BT=zeros_BT, rewards_BT=zeros_BT)
    config = PPOConfig(samples_per_prompt=2, gamma=0.5, lam=1.0, whiten_advantages=False, kl=KLS["no-kl"])
    ours = find("ppo").credit(experience, config)
    for advantages, score in zip(responses(ours.advantages_BT, ours), experience.scores_B.tolist(), strict=True):
        n = len(advantages)
        assert advantages == pytest.approx([score * 0.5 ** (n - 1 - t) for t in range(n)])
    assert torch.equal(ours.advantages_BT, ours.returns_BT)


def test_ppo_gives_what_the_environment_gave_to_the_sampled_token_before():
    """At known numbers: without discount, values and penalty an advantage is what was given from its token on."""
    sampled = [[0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]]
    rewards = [[0, 0, 1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 32, 0], [0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0, 0]]
    case, zeros_BT = make_case(1, 1, 4), torch.zeros(4, 7, dtype=torch.float64)
    experience = replace(
        case.experience,
        tokens_BT=torch.zeros(4, 7, dtype=torch.long),
        lengths_B=torch.tensor([7, 7, 4, 3]),
        sampled_BT=torch.tensor(sampled, dtype=torch.float64),
        rewards_BT=torch.tensor(rewards, dtype=torch.float64),
        scores_B=torch.tensor([31 + 100.0, 63 - 100.0, 5.0, 3.0], dtype=torch.float64),
        values_BT=zeros_BT,
        behaviour_logprobs_BT=zeros_BT,
        reference_logprobs_BT=zeros_BT,
        old_logprobs_BT=None,
        truncated_B=torch.tensor([True, False, True, True]),
        end_values_B=torch.full((4,), 1000.0, dtype=torch.float64),
    )
    config = PPOConfig(samples_per_prompt=4, gamma=1.0, lam=1.0, whiten_advantages=False, kl=KLS["no-kl"])
    for bootstrap, expected in (
        (False, [[131.0, 128.0], [-44.0, -52.0], [5.0, 5.0], []]),
        (True, [[1031.0, 1028.0], [-44.0, -52.0], [1000.0, 1000.0], []]),
    ):
        config = replace(config, bootstrap_truncated=bootstrap, non_eos_penalty=not bootstrap)
        ours = find("ppo").credit(experience, config)
        assert responses(ours.advantages_BT, ours) == responses(ours.returns_BT, ours) == expected


def test_reinforce_pp_at_known_numbers():
    """Three tokens discounted by half; then one token a row, with the mean of each prompt taken off or not."""
    case = make_case(0, 1, 4)

    def advantages(sampled: list[list[int]], scores: list[float], **changes: object) -> list[list[float]]:
        zeros_BT = torch.zeros(len(sampled), len(sampled[0]), dtype=torch.float64)
        experience = replace(
            case.experience,
            tokens_BT=zeros_BT.long(),
            lengths_B=torch.full((len(sampled),), zeros_BT.shape[1]),
            sampled_BT=torch.tensor(sampled, dtype=torch.float64),
            scores_B=torch.tensor(scores, dtype=torch.float64),
            loss_weights_U=torch.ones(len(sampled), dtype=torch.float64),
            **dict.fromkeys(("behaviour_logprobs_BT", "reference_logprobs_BT", "rewards_BT"), zeros_BT),
            old_logprobs_BT=None,
            values_BT=None,
            truncated_B=None,
            end_values_B=None,
        )
        config = ReinforcePPConfig(samples_per_prompt=len(sampled) // 2 or 1, kl=KLS["no-kl"], **changes)
        rows = find("reinforce_pp").credit(experience, config)
        assert rows.loss_weights_U.tolist() == [sum(row) for row in sampled]
        return responses(rows.advantages_BT, rows)

    mean, deviation = 7 / 3, math.sqrt(14) / 3  # of 1, 2 and 4
    (found,) = advantages([[0, 1, 1, 1]], [4.0], gamma=0.5)
    assert found == pytest.approx([(x - mean) / deviation for x in (1, 2, 4)], rel=1e-7)
    one, scores = [[0, 1]] * 4, [3.0, 1.0, 10.0, 10.0]
    found = [row[0] for row in advantages(one, scores)]
    assert found == pytest.approx([x / math.sqrt(16.5) for x in (-3, -5, 4, 4)], rel=1e-7)
    found = [row[0] for row in advantages(one, scores, baseline="group")]
    assert found == pytest.approx([math.sqrt(2), -math.sqrt(2), 0, 0], rel=1e-7)


# The loss and the metrics


@pytest.mark.parametrize("off_policy", OFF_POLICY)
@pytest.mark.parametrize("key", WITH_RATIOS)
def test_loss_and_metrics_are_their_formulas(key, off_policy):
    """Every penalty, with and without a pass for the old policy, policies near and far from each other."""
    for seed, (kl, old) in enumerate(itertools.product(KLS, (True, False))):
        K = 1 + seed % 3 if key in FROM_ONE_SAMPLE else 2 + seed % 3
        spread = (0.05, 0.3, 2.0)[(seed + seed // 6) % 3]
        case = make_case(seed, 4, K, spread=spread, old=old)
        config = configure(key, K, KLS[kl], OFF_POLICY[off_policy])
        assert_equal(compute_loss(key, case, config), SlowLoss(key, case, config)(), f"{kl}, old {old}, {spread}")


@pytest.mark.parametrize("kl", KLS)
def test_best_of_k_loss_and_metrics_are_their_formulas(kl):
    for seed, K in itertools.product(range(3), (2, 3, 4)):
        case = make_case(seed, 8, K, old=seed == 1)
        config = configure("best_of_k", K, KLS[kl])
        assert_equal(compute_loss("best_of_k", case, config), SlowLoss("best_of_k", case, config)(), kl)


def assert_equal(ours: LossOutput, expected: tuple[float, dict[str, float]], message: str) -> None:
    loss, metrics = expected
    assert ours.loss_sum.shape == ()
    assert ours.loss_sum.dtype == torch.float64
    assert ours.loss_sum.item() == pytest.approx(loss, rel=1e-9, abs=1e-9), message
    assert set(metrics) <= set(ours.metrics), message
    assert set(ours.metrics) & IMPORTANCE_METRICS == set(metrics) & IMPORTANCE_METRICS, message
    for name, value in metrics.items():
        assert ours.metrics[name].item() == pytest.approx(value, rel=1e-9, abs=1e-9), f"{name}, {message}"


@pytest.mark.parametrize("off_policy", OFF_POLICY)
@pytest.mark.parametrize("key", [key for key in OBJECTIVES if "batch" not in key and "none" not in key])
def test_gradient_is_the_difference_quotient_of_the_slow_loss(key, off_policy):
    """By the log-probabilities and, for PPO, by the values; exactly 0 outside the response."""
    P, K = (2, 2) if OBJECTIVES[key][0] == "ppo" else (1, 4)
    for seed, (kl, old) in enumerate((("loss-k3", True), ("reward-k1", False), ("loss-k2", False), ("no-kl", True))):
        case = make_case(seed, P, K, spread=0.2, old=old)
        config = configure(key, K, KLS[kl], OFF_POLICY[off_policy])
        _, by_logprobs_BT, by_values_BT = loss_and_gradients(key, case, config)
        slow = SlowLoss(key, case, config)
        for gradient_BT, numbers in ((by_logprobs_BT, slow.pi), (by_values_BT, slow.values)):
            assert (gradient_BT * (1 - case.experience.sampled_BT)).abs().max() == 0
            if numbers is slow.values and slow.name != "ppo":
                assert gradient_BT.abs().max() == 0
                continue
            for row, gradient in enumerate(responses(gradient_BT, case.experience)):
                assert gradient == pytest.approx(difference_quotients(slow, numbers[row]), rel=1e-5, abs=1e-6), kl


@pytest.mark.parametrize("key", WITH_RATIOS)
def test_a_corrected_penalty_is_its_formula(key):
    """The loss, its metrics and its gradient."""
    for seed, old in ((0, True), (1, False)):
        case, config = make_case(seed, 2, 3, spread=0.4, old=old), configure(key, 3, CORRECTED)
        ours, by_logprobs_BT, _ = loss_and_gradients(key, case, config)
        slow = SlowLoss(key, case, config)
        assert_equal(ours, slow(), key)
        for row, gradient in enumerate(responses(by_logprobs_BT, case.experience)):
            assert gradient == pytest.approx(difference_quotients(slow, slow.pi[row]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("old", ["pi", "mu", "neither"])
@pytest.mark.parametrize("key", ["grpo-group-sequence", "grpo-of-samples", "gspo", "rloo"])
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
            mask_BT = torch.tensor([[0.0, 1.0, 1.0]] * 2, dtype=torch.float64)
            rows = Experience(
                tokens_BT=torch.zeros(2, 3, dtype=torch.long),
                lengths_B=torch.tensor([3, 3]),
                sampled_BT=mask_BT,
                behaviour_logprobs_BT=at_responses(mu_R2)[part],
                rewards_BT=torch.zeros_like(mask_BT),
                scores_B=torch.zeros(2, dtype=torch.float64),
                loss_weights_U=torch.ones(2, dtype=torch.float64),
                reference_logprobs_BT=at_responses(logprobs(ref_logits))[part],
            )
            algorithm = find(OBJECTIVES[key][0])
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


def test_the_kl_of_whole_texts_has_another_gradient_than_that_of_each_token_given_its_prefix():
    """By how much docs/algorithms/README.md says. The prefix of the second of two tokens is the first."""
    apart = []
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        pi_logits, ref_logits = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
        pi_NV = pi_logits.requires_grad_().log_softmax(dim=1)
        kl_N = (pi_NV.exp() * (pi_NV - ref_logits.log_softmax(dim=1))).sum(dim=1)
        gradients = []
        for first_V in (pi_NV[0].exp(), pi_NV[0].exp().detach()):
            total = kl_N[0] + first_V @ kl_N[1:]
            gradients.append(torch.autograd.grad(total, pi_logits, retain_graph=True)[0])
        apart.append(((gradients[0] - gradients[1]).norm() / gradients[0].norm()).item())
    assert 0.2 < sorted(apart)[25] < 0.3


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("key", ["rloo", "grpo-of-samples", "gspo-wide-token"])
def test_a_ratio_of_the_sample_takes_the_mean_of_its_advantages(key, level):
    """Which differ from token to token where credit is someone's own."""
    for seed in range(3):
        case = make_case(seed, 2, 3)
        config = configure(key, 3, KLS["loss-k2"], OFF_POLICY[f"truncated-{level}"])
        rows = find(OBJECTIVES[key][0]).credit(case.experience, config)
        rows = replace(rows, advantages_BT=torch.randn_like(rows.advantages_BT) * rows.sampled_BT)
        slow = SlowLoss(key, case, config)
        slow.credit = Credit(slow.credit.weights, of_tokens=responses(rows.advantages_BT, rows))
        assert_equal(find(OBJECTIVES[key][0]).loss(output_for(case, rows), rows, config), slow(), f"{key} {seed}")


SAME_AS_GRPO = {
    "dr_grpo": {"scale_rewards": "none", "normalization": "constant"},
    "gspo": {"ratio": "sequence_mean", "cliprange": 3e-4, "cliprange_high": 4e-4},
    "cispo": {"surrogate": "cispo", "normalization": "token", "cliprange": 0.9999999999, "cliprange_high": 4.0},
}
"""With which keys GRPO is another algorithm; its cliprange has to be below 1."""


@pytest.mark.parametrize("name", SAME_AS_GRPO)
def test_an_algorithm_of_other_defaults_is_grpo_with_these_keys(name):
    """All but the penalty, of which only GRPO has one by default."""
    assert (find(name).config().kl.coef, find("grpo").config().kl.coef) == (0.0, 0.04)
    for seed, off_policy in enumerate(OFF_POLICY.values()):
        case = make_case(seed, 3, 3)
        shared = {"samples_per_prompt": 3, "kl": KLS["loss-k3"], "off_policy": off_policy}
        shared["generation"] = GenerationConfig(response_length=11)
        losses = []
        for algorithm, config in (
            (find(name), find(name).config(**shared)),
            (find("grpo"), find("grpo").config(**shared, **SAME_AS_GRPO[name])),
        ):
            rows = algorithm.credit(case.experience, config)
            losses.append(algorithm.loss(output_for(case, rows), rows, config))
        assert_same(losses[0], losses[1].loss_sum.item(), losses[1].metrics)
        assert losses[0].loss_sum.item() != 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
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
    ],
)
def test_a_configuration_that_is_no_algorithm_is_refused(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        find(name).config(**changes)


def difference_quotients(slow: SlowLoss, numbers: list[float], step: float = 1e-6) -> list[float]:
    quotients = []
    for t, number in enumerate(numbers):
        losses = []
        for moved in (number + step, number - step):
            numbers[t] = moved
            losses.append(slow()[0])
        numbers[t] = number
        quotients.append((losses[0] - losses[1]) / (2 * step))
    return quotients


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("key", WITH_RATIOS)
def test_without_a_pass_for_the_old_policy_the_ratio_is_one_but_pi_is_trained(key, seed):
    """Nothing is clipped however far pi is from mu, and the gradient is that of -A log pi."""
    case = make_case(seed, 4, 3, spread=2.0, old=False)
    config = configure(key, 3)
    output, by_logprobs_BT, _ = loss_and_gradients(key, case, config)
    assert output.metrics["policy/clipfrac_avg"].item() == 0
    assert output.metrics["policy/approxkl_avg"].item() == 0
    credit = slow_credit(key, case.experience, config)
    advantages = of_each_token(credit, case.experience)
    for row, gradient in enumerate(responses(by_logprobs_BT, case.experience)):
        n = len(gradient)
        expected = [-a for a in advantages[row]]
        if config.normalization == "sequence" and config.ratio != "sequence":
            expected = [g / n for g in expected]
        expected = [g * (credit.weights[row] > 0) for g in expected]  # completions that are masked teach nothing
        assert gradient == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("key", BY_GROUPS)
def test_groups_of_equal_scores_train_nothing(key, seed):
    case = make_case(seed, 4, 3)
    equal = replace(case.experience, scores_B=torch.full((12,), 0.5, dtype=torch.float64))
    case = replace(case, experience=equal)
    output, by_logprobs_BT, _ = loss_and_gradients(key, case, configure(key, 3))
    assert output.loss_sum.item() == 0
    assert by_logprobs_BT.abs().max() == 0


@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("key", OBJECTIVES)
def test_without_a_penalty_no_reference_is_needed(key, seed):
    case = make_case(seed, 4, 2)
    for kl in (KLConfig(coef=0.0), KLConfig(coef=0.0, where="loss", estimator="k2")):
        config = configure(key, 2, kl)
        with_reference = compute_loss(key, case, config)
        without = Case(replace(case.experience, reference_logprobs_BT=None), case.logprobs_BT, case.values_BT)
        assert compute_loss(key, without, config).loss_sum.item() == with_reference.loss_sum.item() != 0


@pytest.mark.parametrize("seed", [6, 7])
@pytest.mark.parametrize("key", OBJECTIVES)
def test_float32_gives_the_same_to_its_precision(key, seed):
    case = make_case(seed, 4, 3)
    config = configure(key, 3, KLS["loss-k3"], OFF_POLICY["truncated-token"])
    single = Case(
        case.experience.map(lambda name, x: x.float() if x.is_floating_point() else x),
        case.logprobs_BT.float(),
        case.values_BT.float(),
    )
    expected, ours = compute_loss(key, case, config), compute_loss(key, single, config)
    assert ours.loss_sum.dtype == torch.float32
    assert ours.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=1e-4, abs=1e-4)
    for name, value in expected.metrics.items():
        assert ours.metrics[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-4), name


# Properties


def some_configs(key: str, K: int) -> list[OnlineConfig]:
    """Every penalty and every correction at least once, not every pair of them."""
    pairs = itertools.zip_longest(KLS.values(), OFF_POLICY.values())
    return [configure(key, K, kl, off_policy) for kl, off_policy in pairs]


@pytest.mark.parametrize("seed", [6, 7])
@pytest.mark.parametrize("key", OBJECTIVES)
def test_the_order_of_the_samples_does_not_matter(key, seed):
    """Advantages move with their samples. Best-of-K needs scores without ties: of equals it takes the first."""
    case, rng = make_case(seed, 4, 3), random.Random(0)
    rows = [p * 3 + k for p in range(4) for k in rng.sample(range(3), 3)]
    assert rows != sorted(rows)
    scores_B = torch.tensor([rng.gauss(0, 2) for _ in range(12)], dtype=torch.float64)
    case = replace(case, experience=replace(case.experience, scores_B=scores_B))
    moved = replace(case, experience=case.experience.select(rows))
    for config in some_configs(key, 3):
        credit = find(OBJECTIVES[key][0]).credit
        ours, theirs = credit(moved.experience, config), credit(case.experience, config)
        for name in ("advantages_BT", "returns_BT"):
            if getattr(theirs, name) is not None:
                torch.testing.assert_close(getattr(ours, name), getattr(theirs, name)[rows])
        expected = compute_loss(key, case, config)
        assert_same(compute_loss(key, moved, config), expected.loss_sum.item(), expected.metrics)


def assert_same(ours: LossOutput, loss: float, metrics: dict[str, Tensor]) -> None:
    assert ours.loss_sum.item() == pytest.approx(loss, rel=1e-9, abs=1e-9)
    assert set(ours.metrics) == set(metrics)
    for name, value in metrics.items():
        assert ours.metrics[name].item() == pytest.approx(float(value), rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("seed", [8, 9])
@pytest.mark.parametrize("key", OBJECTIVES)
def test_the_loss_and_every_metric_of_a_batch_are_the_sums_over_its_parts(key, seed):
    """Rows of a group may fall apart; parts are trimmed to their longest row; one part has empty responses only."""
    case = make_case(seed, 4, 3)
    algorithm = find(OBJECTIVES[key][0])
    for config in some_configs(key, 3):
        rows = algorithm.credit(case.experience, config)
        whole = algorithm.loss(output_for(case, rows), rows, config)
        empty = [u for u in range(len(rows)) if rows.sampled_BT[u].sum() == 0]
        units = [u for u in range(len(rows)) if u not in empty]
        random.Random(1).shuffle(units)
        parts = [rows.select(part) for part in (units[:1], units[1:4], units[4:], empty) if part]
        outputs = [algorithm.loss(output_for(case, part), part, config) for part in parts]
        metrics = {name: sum(o.metrics[name] for o in outputs) for name in outputs[0].metrics}
        assert_same(whole, sum(o.loss_sum.item() for o in outputs), metrics)
        assert float(sum(part.loss_weights_U.sum() for part in parts)) == float(rows.loss_weights_U.sum())


def offset_objectives() -> list[str]:
    """All but PPO. What is of the whole batch, a deviation or a mean, allows only one offset for all prompts."""
    return [key for key in OBJECTIVES if not key.startswith("ppo")]


@pytest.mark.parametrize("key", offset_objectives())
def test_an_offset_of_the_scores_of_a_prompt_does_not_matter(key):
    for seed, kl in enumerate(KLS):
        case = make_case(seed, 4, 3)
        config = configure(key, 3, KLS[kl])
        expected = compute_loss(key, case, config)
        one_for_all = torch.full((12,), 64.0, dtype=torch.float64)
        own = torch.tensor([64.0, -128.0, 0.0, 32.0], dtype=torch.float64).repeat_interleave(3)
        for offsets_B in [one_for_all] if "batch" in key or key == "reinforce_pp" else [one_for_all, own]:
            shifted = replace(case.experience, scores_B=case.experience.scores_B + offsets_B)
            ours = compute_loss(key, Case(shifted, case.logprobs_BT, case.values_BT), config)
            assert ours.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_an_offset_of_the_scores_of_a_prompt_does_not_matter_to_online_dpo(loss_type):
    algorithm, config = find("online_dpo"), OnlineDPOConfig(samples_per_prompt=3, loss_type=loss_type)
    case = make_case(0, 5, 3)
    offsets_B = torch.tensor([64.0, -128.0, 0.0, 32.0, 1.0], dtype=torch.float64).repeat_interleave(3)
    losses = []
    for scores_B in (case.experience.scores_B, case.experience.scores_B + offsets_B):
        rows = algorithm.credit(replace(case.experience, scores_B=scores_B), config)
        losses.append(algorithm.loss(output_for(case, rows), rows, config).loss_sum.item())
    assert losses[0] == losses[1] != 0


@pytest.mark.parametrize("factor", [0.5, 3.0, 1000.0])
def test_a_positive_factor_of_the_scores_hardly_changes_advantages_scaled_by_their_group(factor):
    """The 1e-4 in the denominator is all that remains of the scale; groups of equal scores stay at zero."""
    case = make_case(1, 4, 3)
    config = configure("grpo-group-sequence", 3)
    scaled = replace(case.experience, scores_B=case.experience.scores_B * factor)
    ours_BT, theirs_BT = (find("grpo").credit(x, config).advantages_BT for x in (scaled, case.experience))
    assert theirs_BT.abs().max() > 0.5
    torch.testing.assert_close(ours_BT, theirs_BT, rtol=2e-3, atol=1e-9)


@pytest.mark.parametrize("seed", [9, 10])
@pytest.mark.parametrize("key", OBJECTIVES)
def test_nothing_outside_the_response_matters(key, seed):
    """Neither to the loss, nor to a metric, nor to a gradient, where 0 x infinity would be NaN."""
    clean = make_case(seed, 4, 3, garbage=0.0)
    for garbage, config in itertools.product((1.0, 1e3, 1e30), some_configs(key, 3)):
        dirty = make_case(seed, 4, 3, garbage=garbage)
        assert not torch.equal(clean.experience.behaviour_logprobs_BT, dirty.experience.behaviour_logprobs_BT)
        ours, *our_gradients = loss_and_gradients(key, dirty, config)
        theirs, *their_gradients = loss_and_gradients(key, clean, config)
        assert ours.loss_sum.item() == theirs.loss_sum.item() != 0, f"{garbage}, {config.kl}"
        assert {k: v.item() for k, v in ours.metrics.items()} == {k: v.item() for k, v in theirs.metrics.items()}
        for our_gradient_BT, their_gradient_BT in zip(our_gradients, their_gradients, strict=True):
            assert torch.equal(our_gradient_BT, their_gradient_BT)


@pytest.mark.parametrize("seed", [10, 11])
@pytest.mark.parametrize("key", OBJECTIVES)
def test_more_padding_changes_nothing(key, seed):
    case = make_case(seed, 4, 3)

    def widen(name: str, x: Tensor) -> Tensor:
        """Three more columns of garbage; nothing of them is a response."""
        if not name.endswith("_BT"):
            return x
        filling = 0.0 if name in ("sampled_BT", "rewards_BT") else 1e3
        return torch.cat([x, torch.full((len(x), 3), filling).to(x.dtype)], dim=1)

    wide = Case(case.experience.map(widen), widen("_BT", case.logprobs_BT), widen("_BT", case.values_BT))
    for config in some_configs(key, 3):
        expected = compute_loss(key, case, config)
        assert_same(compute_loss(key, wide, config), expected.loss_sum.item(), expected.metrics)


def with_observations(case: Case, rng: random.Random) -> tuple[Case, int]:
    """The same rows with 8 more tokens at random places after the first: observations where they fall within the row.

    Returns the rows and how many observations are followed by a sampled token.
    """
    B, T = case.logprobs_BT.shape
    places = [[0, *sorted(rng.sample(range(1, T + 8), T - 1))] for _ in range(B)]
    places_BT = torch.tensor(places)

    def insert(name: str, x: Tensor) -> Tensor:
        if name == "lengths_B":  # up to where its padding begins now
            return torch.tensor([[*row, T + 8][length] for row, length in zip(places, x.tolist(), strict=True)])
        if not name.endswith("_BT"):
            return x
        filling = 0.0 if name in ("sampled_BT", "rewards_BT") else 1e3 * rng.choice((1, -1))
        return torch.full((B, T + 8), filling).to(x.dtype).scatter(1, places_BT, x)

    experience = case.experience.map(insert)
    before_a_sampled_one = 0
    for row, inserted in zip(experience.sampled_BT.tolist(), places, strict=True):
        last = max((t for t, sampled in enumerate(row) if sampled), default=0)
        before_a_sampled_one += len(set(range(last)) - set(inserted))
    moved = Case(experience, insert("_BT", case.logprobs_BT), insert("_BT", case.values_BT))
    return moved, before_a_sampled_one


@pytest.mark.parametrize("seed", [12, 13])
@pytest.mark.parametrize("key", OBJECTIVES)
def test_an_observation_changes_nothing_wherever_it_is_put(key, seed):
    """Neither the loss, nor a metric, nor a gradient at a sampled token, if nothing was given for it."""
    case, rng = make_case(seed, 4, 3), random.Random(seed)
    for config in some_configs(key, 3):
        moved, count = with_observations(case, rng)
        assert count > 12
        ours, *our_gradients = loss_and_gradients(key, moved, config)
        theirs, *their_gradients = loss_and_gradients(key, case, config)
        assert_same(ours, theirs.loss_sum.item(), theirs.metrics)
        for our_gradient_BT, their_gradient_BT in zip(our_gradients, their_gradients, strict=True):
            assert (our_gradient_BT * (1 - moved.experience.sampled_BT)).abs().max() == 0
            ours_BT, theirs_BT = moved.experience.sampled_BT > 0, case.experience.sampled_BT > 0
            torch.testing.assert_close(our_gradient_BT[ours_BT], their_gradient_BT[theirs_BT], rtol=1e-9, atol=1e-12)


# Empty responses


@pytest.mark.parametrize("seed", [10, 11])
@pytest.mark.parametrize("key", OBJECTIVES)
def test_a_batch_of_empty_responses_gives_finite_zeros(key, seed):
    """No response token at all: no loss, no gradient, and nothing that is not a number."""
    case = make_case(seed, 4, 3, empty=True)
    assert case.experience.sampled_BT.sum() == 0
    for config in some_configs(key, 3):
        output, *gradients = loss_and_gradients(key, case, config)
        assert output.loss_sum.item() == 0
        for value in output.metrics.values():
            assert math.isfinite(value.item())
        for gradient_BT in gradients:
            assert gradient_BT.abs().max() == 0  # false for NaN, too


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize("key", WITH_RATIOS)
def test_an_empty_response_counts_as_a_sample_but_trains_nothing(key, seed):
    """Its score is in the others' baseline; the rest of its group is trained as always.

    With an odd seed the row goes on with observations and what they gave; with an even one it ends with its prompt.
    """
    case = make_case(seed, 1, 3)
    mask_BT = case.experience.sampled_BT.clone()
    mask_BT[1] = 0
    lengths_B = case.experience.lengths_B.clone()
    if seed % 2 == 0:
        lengths_B[1] = int(case.experience.sampled_BT[0].nonzero()[0, 0])
    else:
        assert case.experience.rewards_BT[1].abs().sum() > 0
    for score in (-3.0, 5.0):
        scores_B = torch.tensor([1.0, score, 2.0], dtype=torch.float64)
        experience = replace(case.experience, sampled_BT=mask_BT, lengths_B=lengths_B, scores_B=scores_B)
        config = configure(key, 3, KLS["loss-k3"], OFF_POLICY["masked-token"])
        changed = Case(experience, case.logprobs_BT, case.values_BT)
        output, by_logprobs_BT, by_values_BT = loss_and_gradients(key, changed, config)
        assert_equal(output, SlowLoss(key, changed, config)(), "")
        assert by_logprobs_BT[1].abs().max() == 0
        assert by_values_BT[1].abs().max() == 0
        assert by_logprobs_BT.isfinite().all()
        assert by_logprobs_BT.abs().max() > 0


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
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


def test_what_an_environment_gave_leaves_no_remainder_of_rounding():
    """A score that is the environment's alone, rounded once from float64, leaves nothing for the last token."""
    generator = torch.Generator().manual_seed(0)
    rewards_BT = torch.randn(500, 30, generator=generator)
    scores_B = rewards_BT.double().sum(dim=1).float()
    zeros_BT, ones_B = torch.zeros(500, 30), torch.ones(500)
    rows = Experience(
        tokens_BT=zeros_BT.long(),
        lengths_B=torch.full((500,), 30),
        sampled_BT=torch.ones(500, 30),
        behaviour_logprobs_BT=zeros_BT,
        rewards_BT=rewards_BT,
        scores_B=scores_B,
        loss_weights_U=ones_B,
        values_BT=zeros_BT,
    )
    config = configure("ppo-other", 1, KLS["no-kl"])
    config = replace(config, lam=0.0, gamma=0.0)
    assert torch.equal(find("ppo").credit(rows, config).advantages_BT, rewards_BT)
