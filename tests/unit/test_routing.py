"""Router replay: the learner takes the experts that the sampler's routers chose; its own weigh them, and learn."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from families import in_float64
from tiny import PROMPTS, byte_tokenizer, count_letters, mixture, new_args
from torch.nn.functional import silu

from async_rlhf.algorithms.table import find
from async_rlhf.config import ConfigError, KLConfig
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation.audit import _jumps
from async_rlhf.generation.episodes.episode import joined
from async_rlhf.generation.protocol import GeneratorError, SamplingParams, check_completions
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.learner.learner import Learner
from async_rlhf.models import packing
from async_rlhf.models.forward import end_values, response_logprobs
from async_rlhf.models.routing import recorded_routes, replay_routes, require_routers, route_shape
from async_rlhf.models.rows import sampled_rows
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.run.checkpoint import _sample_of, _sample_row
from async_rlhf.types import Batch, Experience, Group, RouteShape, Sample

KINDS = ("mixtral", "qwen3_moe", "qwen3_moe_plain")


def params_of(model, **changes) -> SamplingParams:
    values = {"samples_per_prompt": 2, "temperature": 0.7, "response_length": 12, "stop_token_ids": (256, *range(40))}
    return SamplingParams(**{**values, "seed": 0, "routes": route_shape(model.config), **changes})


def drawn_by(model, count: int = 8, **changes) -> list[Sample]:
    prompts = [PromptStream(PROMPTS, byte_tokenizer()).prompt(n) for n in range(count)]
    params = params_of(model, **changes)
    completions = TransformersEngine(model, params).generate(prompts)
    check_completions("the engine answered", prompts, completions, params, 258)
    return [sample for group in completions for sample in group]


def logprobs(model, rows, routes_BTLE=None):
    given = rows["tokens_BT"], rows["sampled_BT"], 0.7
    return response_logprobs(model, *given, with_entropies=False, routes_BTLE=routes_BTLE).logprobs_BT


def gradients(model, logprobs_BT) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logprobs_BT * torch.arange(1, logprobs_BT.shape[1] + 1)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def own_routes(model, rows):
    """What the routers choose in one pass over the padded rows, as they take it from an experience."""
    with recorded_routes(model, route_shape(model.config)) as found:
        model(rows["tokens_BT"], use_cache=False)
    return found[0].unflatten(0, rows["tokens_BT"].shape)


def shuffled(routes_BTLE: torch.Tensor) -> torch.Tensor:
    """Other experts, of each token no two alike."""
    return (routes_BTLE + 1) % 4


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_learner_itself_would_choose_changes_nothing_bit_for_bit(kind, packed, checkpointing):
    model = mixture(kind).train()
    replay_routes(model)
    rows = sampled_rows(drawn_by(model))
    packing.choose(packed, True, {"policy": model}, False)
    assert packing.is_packed(model) == packed
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    without = logprobs(model, rows)
    right = gradients(model, without)
    routes_BTLE = own_routes(model, rows)
    for given in (routes_BTLE, rows["routes_BTLE"]):  # recorded in such a pass, and while sampling
        found = logprobs(model, rows, given)
        assert torch.equal(found, without)
        assert all(torch.equal(gradient, right[name]) for name, gradient in gradients(model, found).items())
    assert not torch.equal(logprobs(model, rows, shuffled(routes_BTLE)), without)


def test_layers_that_are_computed_again_see_the_routes_of_their_own_pass():
    """Though a later pass has had others before the backward pass."""
    model = mixture("mixtral").train()
    replay_routes(model)
    rows = sampled_rows(drawn_by(model))
    routes_BTLE = shuffled(own_routes(model, rows))
    right = gradients(model, logprobs(model, rows, routes_BTLE))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    first = logprobs(model, rows, routes_BTLE)
    logprobs(model, rows, shuffled(routes_BTLE))
    logprobs(model, rows)
    assert all(torch.equal(gradient, right[name]) for name, gradient in gradients(model, first).items())


def slow_block(block, hidden_BTH, routes_NE, adds_up: bool):
    """A layer's experts, one token and one expert after the other."""
    flat_NH, found = hidden_BTH.flatten(0, 1), []
    for state_H, routes in zip(flat_NH, routes_NE.tolist(), strict=True):
        probabilities = torch.exp(block.gate.weight @ state_H)
        probabilities = probabilities / probabilities.sum()
        total = sum(probabilities[expert] for expert in routes) if adds_up else 1.0
        out_H = torch.zeros_like(state_H)
        for expert in routes:
            gate, up = (block.experts.gate_up_proj[expert] @ state_H).chunk(2)
            out_H = out_H + probabilities[expert] / total * (block.experts.down_proj[expert] @ (silu(gate) * up))
        found.append(out_H)
    return torch.stack(found).view_as(hidden_BTH)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_weighed_by_the_learners_own_logits_and_its_router_learns(kind):
    """Against loops in float64: log-probabilities and every gradient, with experts that no router would choose."""
    model = mixture(kind)
    rows = sampled_rows(drawn_by(model, count=3))
    with in_float64(model):
        slow = copy.deepcopy(model)
        replay_routes(model)
        routes_BTLE = shuffled(own_routes(model, rows))
        for number, layer in enumerate(slow.model.layers):
            routes_NE = routes_BTLE[:, :, number].flatten(0, 1)
            layer.mlp.forward = partial(slow_block, layer.mlp, routes_NE=routes_NE, adds_up=kind != "qwen3_moe_plain")
        found, right = logprobs(model, rows, routes_BTLE), logprobs(slow, rows)
        ours, theirs = gradients(model, found), gradients(slow, right)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)
    assert min(ours[name].abs().max() for name in ours if name.endswith("gate.weight")) > 1e-3
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-10 * float(gradient.abs().max()))


@pytest.mark.parametrize("experts", [255, 256, 300])
def test_routes_fit_the_smallest_type_that_has_a_number_left_for_none(experts):
    shape = RouteShape(2, 2, experts)
    assert shape.dtype == (np.uint8 if experts == 255 else np.uint16)
    model = mixture("mixtral", experts=experts)
    replay_routes(model)
    samples = drawn_by(model, count=4)
    rows = sampled_rows(samples)
    assert rows["routes_BTLE"].dtype == (torch.uint8 if experts == 255 else torch.int16)
    for sample, row_TLE in zip(samples, rows["routes_BTLE"], strict=True):
        assert sample.routes_TLE.dtype == shape.dtype
        assert (row_TLE[: len(sample) - 1].numpy() == sample.routes_TLE[:-1]).all()
        assert (row_TLE[len(sample) - 1 :] == (255 if experts == 255 else -1)).all()
    assert rows["routes_BTLE"].max() > min(experts, 256) - 20
    assert torch.equal(logprobs(model, rows, rows["routes_BTLE"]), logprobs(model, rows))


def test_samples_keep_their_routes_in_checkpoints_episodes_and_parts():
    samples = drawn_by(mixture("mixtral"))
    for sample in samples:
        assert _sample_of(_sample_row(sample)) == sample
        assert sample != replace(sample, routes_TLE=None) != sample
    bare = [replace(sample, routes_TLE=None) for sample in samples]
    assert "routes_TLE" not in _sample_row(bare[0])
    assert "routes_BTLE" not in sampled_rows(bare)
    with pytest.raises(ValueError, match="1 of 2 samples have routes; must be all of a batch, or none"):
        sampled_rows([samples[0], bare[1]])
    both = joined([replace(sample, rewards=np.zeros(len(sample), np.float32)) for sample in samples[:2]])
    assert (both.routes_TLE == np.concatenate([sample.routes_TLE for sample in samples[:2]])).all()
    weights = torch.ones(len(samples))
    rows = Experience(**sampled_rows(samples), scores_B=weights, loss_weights_U=weights)
    part = rows.select([3, 1])
    longest = max(len(samples[3]), len(samples[1]))
    assert torch.equal(part.routes_BTLE, rows.routes_BTLE[[3, 1], :longest])


@pytest.mark.parametrize("packed", [False, True])
def test_conversations_of_a_row_have_routes_of_their_own(packed):
    """Two texts in one row come out as each does alone, with experts that no router would choose."""
    model, samples = mixture("mixtral"), drawn_by(mixture("mixtral"))[:4]
    replay_routes(model)
    samples = [replace(s, rewards=np.zeros(len(s), np.float32), routes_TLE=(s.routes_TLE + 1) % 4) for s in samples]
    packing.choose(packed, True, {"policy": model}, False)
    apart, together = sampled_rows(samples), sampled_rows([joined(samples[:2]), joined(samples[2:])])
    assert "positions_BT" in together

    def found(rows) -> torch.Tensor:
        how = {"positions_BT": rows.get("positions_BT"), "routes_BTLE": rows["routes_BTLE"]}
        return response_logprobs(model, rows["tokens_BT"], rows["sampled_BT"], 0.7, False, **how).logprobs_BT[
            rows["sampled_BT"] > 0
        ]

    with in_float64(model):
        torch.testing.assert_close(found(together), found(apart), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: None, r"the routes are wrong: there are none; they must be \(\d+, 2, 2\) uint8"),
        (lambda r: r[1:], r"the routes are wrong: they are \(\d+, 2, 2\) uint8; they must be \(\d+, 2, 2\) uint8"),
        (lambda r: r.astype(np.int64), r"they are \(\d+, 2, 2\) int64; they must be \(\d+, 2, 2\) uint8"),
        (lambda r: np.full_like(r, 4), "a route is to expert 4; it must be below 4"),
        (lambda r: np.roll(r, 1, axis=0), "a route is to expert 255; it must be below 4"),
    ],
)
def test_an_answer_with_other_routes_than_those_of_its_tokens_is_refused(change, named):
    model = mixture("mixtral")
    prompts = [PromptStream(PROMPTS, byte_tokenizer()).prompt(0)]
    ((first, second),) = TransformersEngine(model, params_of(model)).generate(prompts)
    wrong = [(first, replace(second, routes_TLE=change(second.routes_TLE)))]
    with pytest.raises(GeneratorError, match=named):
        check_completions("the engine answered", prompts, wrong, params_of(model), 258)


def test_a_model_without_experts_is_refused_and_other_experts_by_name(make_policy, tmp_path):
    make_policy().save_pretrained(tmp_path)
    for model in (make_policy(), str(tmp_path)):  # of the second the configuration alone is read
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        with pytest.raises(ConfigError, match="router_replay: got True; must be false: the model is of type 'gpt_neo"):
            require_routers(model)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"generation": {"in_flight": True}, "staleness": 1}, "with generation.in_flight"),
        ({"torch_compile": True}, "with torch_compile"),
    ],
)
def test_what_brings_no_routes_is_refused(tmp_path, changes, named):
    with pytest.raises(ConfigError, match=f"router_replay: got True; must be false .*{named}"):
        new_args(tmp_path, router_replay=True, **{"generation": None, **changes})


def learner_of(policy, tmp_path, **changes) -> Learner:
    args = new_args(tmp_path, router_replay=True, max_grad_norm=0.0, num_mini_batches=1, **changes)
    return Learner(policy, None, find(changes.get("algorithm", "online_dpo")), args)


def scored_of(policy, learner: Learner, count: int = 8):
    prompts = [PromptStream(PROMPTS, byte_tokenizer()).prompt(n) for n in range(count)]
    samples = drawn_by(policy, count, stop_token_ids=(256,))
    groups = tuple(Group(p, tuple(samples[2 * i : 2 * i + 2])) for i, p in enumerate(prompts))
    return Scorer(byte_tokenizer(), learner.config, None, [count_letters])(Batch(1, 0, groups, 0.0))


TOKENS = {"max_tokens_per_pass": 150, "annotate_max_tokens": 300, "completions_per_batch": 16}


@pytest.mark.parametrize("options", [{}, {**TOKENS, "per_device_train_batch_size": None}])
def test_annotating_and_training_take_the_sampled_experts_and_the_reference_its_own(tmp_path, options):
    """Routes that no router would choose decide log-probabilities before and in the update, and no reference's."""
    policy = mixture("mixtral")
    changes = {"algorithm": "grpo", "kl": KLConfig(coef=0.1), "samples_per_prompt": 2, "total_episodes": 16}
    learner = learner_of(policy, tmp_path, **changes, **options)
    scored = scored_of(copy.deepcopy(policy), learner)

    def other(sample: Sample) -> Sample:
        routes_TLE = sample.routes_TLE
        return replace(sample, routes_TLE=np.where(routes_TLE == 255, routes_TLE, (routes_TLE + 1) % 4))

    changed = tuple(Group(group.prompt, tuple(map(other, group.samples))) for group in scored.batch.groups)
    scored = replace(scored, batch=replace(scored.batch, groups=changed))
    experience, _ = learner.annotate(scored)
    rows = sampled_rows(scored.batch.samples)
    with torch.no_grad():
        right, own = logprobs(policy, rows, rows["routes_BTLE"]), logprobs(policy, rows)
    torch.testing.assert_close(experience.old_logprobs_BT, right, rtol=0, atol=1e-5)
    torch.testing.assert_close(experience.reference_logprobs_BT, own, rtol=0, atol=1e-5)
    assert (right - own).abs().max() > 0.1
    seen, forward = [], learner.parallel.forward

    def seeing(*args):
        seen.append(forward(*args))
        return seen[-1]

    learner.parallel.forward = seeing
    assert learner.update(experience, 1)["grad_norm"] > 0
    found_B = torch.cat([output.logprobs_BT.detach().sum(dim=1) for output in seen])
    torch.testing.assert_close(found_B.sort()[0], right.sum(dim=1).sort()[0], rtol=0, atol=1e-4)


def test_rounding_can_move_no_log_probability_by_a_jump_any_more():
    model = mixture("mixtral")
    assert _jumps(model, params_of(model, routes=None))
    assert not _jumps(model, params_of(model))
    assert _jumps(model, params_of(model, top_p=0.9))


def test_a_value_head_reads_states_by_the_sampled_experts():
    model, head = mixture("mixtral"), torch.nn.Linear(32, 1)
    replay_routes(model)
    rows = sampled_rows(drawn_by(model))
    routes_BTLE, given = shuffled(own_routes(model, rows)), (rows["tokens_BT"], rows["lengths_B"], None)
    own, other = (end_values(model, head, *given, routes_BTLE=routes) for routes in (None, routes_BTLE))
    assert not torch.allclose(own, other, atol=1e-3)
    found = end_values(model, head, *given, routes_BTLE=own_routes(model, rows))
    torch.testing.assert_close(found, own, rtol=0, atol=0)
