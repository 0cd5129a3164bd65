"""top_p and top_k: what is cut off, its true log-probabilities, and that engines are held to it."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tables import each
from test_generate import config, evaluation  # noqa: F401
from tiny import drawn

from async_rlhf.commands.evaluate import run_evaluate
from async_rlhf.commands.evaluation.generations import read_generations
from async_rlhf.commands.evaluation.likelihood import EncodedRow, response_logprob_sums
from async_rlhf.commands.generate import run_generate
from async_rlhf.config import ConfigError, GenerationConfig, KLConfig, OffPolicyConfig
from async_rlhf.generation.audit import Agreement
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.generation.sampling import Distribution, truncated
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.forward import over_response_logits
from async_rlhf.models.loading import load_policy
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.types import Group, Prompt

PROMPTS = [Prompt(i, i, tuple(range(1, 3 + i))) for i in range(12)]
PARAMS = SamplingParams(4, 0.7, 10, (256,), seed=0, top_p=0.8, top_k=40)


def slow_kept(logits: list[float], d: Distribution) -> set[int]:
    """The tokens that can be drawn, by the definition, with sums that do not round."""
    top = max(logits)
    ordered = sorted(logits, reverse=True)
    least = ordered[min(d.top_k, len(logits)) - 1] if d.top_k else -math.inf
    weights = {v: math.exp((x - top) / d.temperature) for v, x in enumerate(logits) if x >= least}
    total = math.fsum(weights.values())

    def likelier(token: int) -> float:
        return math.fsum(w for v, w in weights.items() if logits[v] > logits[token]) / total

    return {v for v in weights if d.top_p == 1 or likelier(v) < d.top_p}


@pytest.mark.parametrize("top_k", [0, 1, 3, 50, 10**6])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_what_is_kept_is_what_the_definition_says(temperature, top_p, top_k):
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(40, 60, generator=generator)
    logits_NV[20:] = (2 * logits_NV[20:]).round() / 2  # with many ties, also at the border
    d = Distribution(temperature, top_p, top_k)
    found_NV = truncated(logits_NV, d)
    for row, found in zip(logits_NV.tolist(), found_NV.tolist(), strict=True):
        kept = {v for v, x in enumerate(found) if x > -math.inf}
        assert kept == slow_kept(row, d)
        assert kept  # something can always be drawn
        assert all(found[v] == row[v] for v in kept)
    assert (found_NV is logits_NV) == d.whole


def test_a_token_at_the_border_that_another_engine_has_kept_is_kept_with_all_that_are_as_likely():
    logits_NV = torch.tensor([[3.0, 2.0, 1.0, 1.0, 0.0]])
    d = Distribution(1.0, top_k=2)
    assert torch.isfinite(truncated(logits_NV, d)).tolist() == [[True, True, False, False, False]]
    assert torch.isfinite(truncated(logits_NV, d, torch.tensor([3]))).tolist() == [[True, True, True, True, False]]
    assert torch.isfinite(truncated(logits_NV, d, torch.tensor([0]))).tolist() == [[True, True, False, False, False]]


def response_logits(policy, tokens_BT, mask_BT):
    return over_response_logits(policy, tokens_BT, mask_BT, lambda logits_CV, part: logits_CV.T).T


def sampled(model, params=PARAMS) -> list[Group]:
    completions = TransformersEngine(copy.deepcopy(model).eval(), params).generate(PROMPTS)
    return [Group(prompt, samples) for prompt, samples in zip(PROMPTS, completions, strict=True)]


@torch.no_grad()
def test_every_token_comes_with_its_true_log_probability(make_policy):
    policy, cut = make_policy(), 0
    distribution = PARAMS.distribution
    for group in sampled(policy):
        for sample in group.samples:
            mask_BT = torch.from_numpy(sample.sampled)[None]
            logits = response_logits(policy, torch.from_numpy(sample.tokens)[None].long(), mask_BT).tolist()
            one = drawn(sample)
            for row, token, logprob in zip(logits, one.tokens, one.logprobs, strict=True):
                kept = slow_kept(row, distribution)
                assert token in kept
                total = math.fsum(math.exp(row[v] / 0.7) for v in kept)
                assert logprob == pytest.approx(row[token] / 0.7 - math.log(total), abs=1e-4)
                cut += len(row) - len(kept)
    assert cut > 10_000


def test_nothing_changes_if_nothing_is_cut_off(make_policy):
    whole = replace(PARAMS, top_p=1.0, top_k=0)
    same = SamplingParams(4, 0.7, 10, (256,), seed=0)
    assert whole == same
    texts = [
        [drawn(s) for group in sampled(make_policy(), params) for s in group.samples] for params in (whole, PARAMS)
    ]
    assert texts[0] != texts[1]


def agreement(engine: str, params: SamplingParams) -> Agreement:
    return Agreement(GenerationConfig(mismatch_samples=100, engine=engine), params, torch.float32, None)


def test_an_engine_that_cuts_off_as_it_should_agrees(make_policy):
    policy = make_policy()
    for engine in ("transformers", "vllm"):
        found = agreement(engine, PARAMS).measure(1, policy, lambda version: {}, sampled(policy))
        assert found["engine/logprob_difference_max"] < 1e-5
        assert found["engine/sampling_evidence"] < 1


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("faulty", [{"top_p": 1.0}, {"top_k": 0, "top_p": 1.0}, {"top_p": 0.75}, {"top_k": 20}])
def test_an_engine_that_cuts_off_otherwise_is_found(make_policy, engine, faulty):
    policy = make_policy()
    with pytest.raises(GeneratorError, match="other log-probabilities"):
        agreement(engine, PARAMS).measure(1, policy, lambda version: {}, sampled(policy, replace(PARAMS, **faulty)))


def test_an_engine_that_cuts_off_otherwise_and_tells_the_right_log_probabilities_is_found(make_policy):
    """Only what it has drawn is evidence then."""
    policy = make_policy()
    groups = sampled(policy, replace(PARAMS, top_p=0.5))

    def told(group: Group) -> Group:
        samples = []
        for s in group.samples:
            tokens_BT, mask_BT = torch.from_numpy(s.tokens)[None].long(), torch.from_numpy(s.sampled)[None]
            tokens_N = tokens_BT[mask_BT]
            with torch.no_grad():
                logits_NV = truncated(response_logits(policy, tokens_BT, mask_BT), PARAMS.distribution) / 0.7
            logprobs = s.logprobs.copy()
            logprobs[s.sampled] = logits_NV.log_softmax(-1).gather(-1, tokens_N[:, None]).squeeze(-1).numpy()
            samples.append(replace(s, logprobs=logprobs))
        return replace(group, samples=tuple(samples))

    groups = [told(group) for group in groups]
    compared = agreement("vllm", PARAMS)

    def measured() -> None:
        for batch in range(1, 4):
            compared.measure(batch, policy, lambda version: {}, groups)

    with pytest.raises(GeneratorError, match="not distributed as"):
        measured()


@pytest.mark.parametrize("algorithm", ["online_dpo", "rloo", "ppo"])
def test_runs_train_on_what_is_drawn_from_the_truncated_policy(
    make_policy, make_reward_model, make_args, tokenizer, prompts, algorithm
):
    args = make_args(algorithm=algorithm, staleness=1, generation={"top_p": 0.9}, **unweighted(algorithm))
    policy = make_policy()
    trainer = OnlineTrainer(policy, args, prompts, reward_model=make_reward_model(), processing_class=tokenizer)
    trainer.train()
    lines = map(json.loads, Path(args.output_dir, "metrics.jsonl").read_text().splitlines())
    batches = [line for line in lines if "engine/logprob_difference" in line]
    assert len(batches) >= 4
    for line in batches:
        assert line["engine/logprob_difference_max"] < 1e-4
        # The whole policy against the truncated one: E_mu[pi / mu] is the share that is kept, 0.9 or a little more.
        assert 0.85 < line["val/ratio"] < 0.96


def test_the_kl_of_a_model_to_itself_is_what_is_cut_off(config, evaluation):  # noqa: F811
    """KL(truncated | whole) is minus the logarithm of the probability that is kept."""
    run_generate(replace(config, checkpoints=["final"], top_p=0.5))
    found = run_evaluate(evaluation)["models"]["final"]["kl_to_reference"]["estimate"]
    distribution, models = read_generations(Path(config.output_dir))
    assert distribution == Distribution(0.7, 0.5, 0)
    source, lines = models["final"]
    rows = [EncodedRow(line.prompt_tokens + line.tokens, len(line.prompt_tokens)) for line in lines]
    sums = [
        response_logprob_sums(load_policy(source), rows, temperature=0.7, batch_size=4, **cut)
        for cut in ({"top_p": 0.5}, {})
    ]
    assert found == pytest.approx((sums[0] - sums[1]).mean().item(), rel=1e-3)
    assert found > 0.5
    run_generate(replace(config, checkpoints=["checkpoint-2"]))
    with pytest.raises(ConfigError, match=r"final and checkpoint-2 in .* have top_p 0.5 and 1"):
        run_evaluate(replace(evaluation, overwrite=True))


def unweighted(algorithm: str) -> dict[str, OffPolicyConfig]:
    """No weights, where the algorithm has any."""
    if algorithm in ("online_dpo", "best_of_k"):
        return {}
    return {"off_policy": OffPolicyConfig(importance="none", level="sequence" if algorithm == "rloo" else "token")}


WEIGHTS = [
    ("ppo", "off_policy.old_logprobs", {"off_policy": OffPolicyConfig("behaviour")}),
    *((name, "off_policy.importance", {}) for name in ("rloo", "grpo", "gspo", "cispo", "ppo", "reinforce_pp")),
    ("grpo", "off_policy.importance", {"off_policy": OffPolicyConfig(importance="masked", level="sequence")}),
    ("grpo", "kl.corrected", {"kl": KLConfig(where="loss", estimator="k3", corrected=True)}),
    ("online_dpo", "pair_weights", {"pair_weights": "wpo"}),
    ("online_dpo", "pair_weights", {"pair_weights": "importance"}),
]


@each(WEIGHTS)
def test_a_weight_of_the_whole_policy_and_the_truncated_one_is_refused(algorithm, key, given, make_args):
    """It is below 1 from the start, and shrinks with each token, so that the shortest answers alone would count."""
    make_args(algorithm=algorithm, **given)
    for cut in ({"top_k": 5}, {"top_p": 0.9}):
        cut_with = given if key.startswith("off") else {**unweighted(algorithm), **given}
        with pytest.raises(ConfigError, match=rf"{key}: got .*; must be .* with generation.top_p below 1 or generat"):
            make_args(algorithm=algorithm, generation=cut, **cut_with)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.5}, {"top_k": 5}])
@pytest.mark.parametrize("algorithm", ["rloo", "best_of_k"])
def test_the_kl_of_a_policy_that_is_its_reference_is_nothing_however_it_was_sampled(
    make_policy, make_reward_model, make_args, tokenizer, prompts, algorithm, cut
):
    """So an adapted coefficient falls by the most that one batch allows, and no reward is taken away."""
    kl = KLConfig(coef=0.05, target=1.0, horizon=1000)
    args = make_args(algorithm=algorithm, generation=cut, kl=kl, learning_rate=1e-12, **unweighted(algorithm))
    trainer = OnlineTrainer(make_policy(), args, prompts, reward_model=make_reward_model(), processing_class=tokenizer)
    trainer.train()
    lines = [json.loads(line) for line in Path(args.output_dir, "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "objective/kl" in line]
    completions, coefficient = args.batch_size * args.samples_per_prompt, 0.05
    for line in found:
        assert line["objective/kl"] == pytest.approx(0, abs=1e-5)
        assert line["objective/non_score_reward"] == pytest.approx(0, abs=1e-6)
        assert line["objective/rlhf_reward"] == pytest.approx(line["objective/scores"], abs=1e-5)
        assert line["objective/kl_coef"] == pytest.approx(coefficient, rel=1e-6)
        coefficient *= 1 - 0.2 * completions / 1000
    assert len(found) >= 4


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.0), ("top_p", 1.01), ("top_k", -1)])
def test_values_that_cut_off_everything_or_nothing_are_refused(key, value):
    with pytest.raises(ConfigError, match=f"{key}: got {value}; must be"):
        GenerationConfig(**{key: value})
