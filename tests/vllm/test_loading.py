"""vLLM samples with the weights it was given last, all of them; whatever else it holds is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from conftest import BLOCK, PARAMS, by_transformers, new_policy, prompts_of, sampled
from torch import Tensor

from async_rlhf.config import GenerationConfig
from async_rlhf.generation.audit import Agreement
from async_rlhf.generation.inline import InlineGenerator, PolicyWeights
from async_rlhf.generation.protocol import GeneratorError
from async_rlhf.models.weights import digests, named_weights
from async_rlhf.system.trace import Trace
from async_rlhf.types import Prompt

pytestmark = pytest.mark.vllm

Load = Callable[[Iterator[tuple[str, Tensor]]], object]


def long_prompts() -> list[Prompt]:
    """Prompts of more than two blocks of the cache."""
    return [replace(prompt, tokens=(prompt.tokens * 30)[: 2 * BLOCK + 6]) for prompt in prompts_of(6)]


def largest_difference(prompts, groups, model) -> float:
    """Of log-probabilities, between the engine and a model."""
    found = [
        (torch.tensor(rollout.logprobs) - by_transformers(model, prompt, rollout.tokens, PARAMS.temperature)).abs()
        for prompt, group in zip(prompts, groups, strict=True)
        for rollout in group
    ]
    return torch.cat(found).max().item()


def held_by(engine) -> torch.nn.Module:
    """vLLM's own model."""
    (model,) = engine._llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    return model


# New weights


def test_new_weights_are_in_use_from_the_first_token_on(engine):
    prompts = long_prompts()
    for version, seed in enumerate((0, 1, 2, 1), start=1):
        model = new_policy(seed)
        assert engine.load(named_weights(model), version) == digests(named_weights(model))
        groups = sampled(engine, prompts)
        assert {v for group in groups for rollout in group for v in rollout.versions} == {version}
        assert largest_difference(prompts, groups, model) < 1e-4
        assert largest_difference(prompts, groups, new_policy(seed + 1)) > 0.1


def test_a_cache_that_is_not_dropped_is_an_error(engine, monkeypatch):
    monkeypatch.setattr(engine._llm.llm_engine, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(RuntimeError, match="did not drop what it has cached with the old weights"):
        engine.load(named_weights(new_policy(1)), 1)


def test_every_token_is_of_the_newest_weights_between_two_steps(engine):
    """Two loads in the middle: versions never decrease, and each token has the log-probability by its own version.

    vLLM computes again what was cached with older weights, so that is exact too.
    """
    models, prompts = [new_policy(seed) for seed in range(3)], long_prompts()
    steps = 0

    def refresh() -> None:
        nonlocal steps
        steps += 1
        if steps in (5, 9):
            engine.load(named_weights(models[engine.version + 1]), engine.version + 1)

    engine.params, engine.refresh = replace(PARAMS, stop_token_ids=(256,)), refresh
    groups = sampled(engine, prompts)
    rollouts = [(prompt, rollout) for prompt, group in zip(prompts, groups, strict=True) for rollout in group]
    assert all(list(rollout.versions) == sorted(rollout.versions) for _, rollout in rollouts)
    assert sum(set(rollout.versions) == {0, 1, 2} for _, rollout in rollouts) > 6
    for prompt, rollout in rollouts:
        versions, logprobs = torch.tensor(rollout.versions), torch.tensor(rollout.logprobs)
        for version, model in enumerate(models):
            own = versions == version
            expected = by_transformers(model, prompt, rollout.tokens, PARAMS.temperature)
            torch.testing.assert_close(logprobs[own], expected[own], rtol=0, atol=1e-4)


# Planted faults


SQUARE = "gpt_neox.layers.1.attention.dense.weight"
"""A square matrix, whose twin in layer 0 has the same shape."""
TWIN = SQUARE.replace("layers.1", "layers.0")


def ignores_the_update(load: Load, tensors: dict[str, Tensor]) -> None:
    pass


def loads_half(load: Load, tensors: dict[str, Tensor]) -> None:
    load(iter(list(tensors.items())[: len(tensors) // 2]))


def leaves_one_out(load: Load, tensors: dict[str, Tensor]) -> None:
    load((name, tensor) for name, tensor in tensors.items() if name != SQUARE)


def swaps_two(load: Load, tensors: dict[str, Tensor]) -> None:
    load(iter({**tensors, SQUARE: tensors[TWIN], TWIN: tensors[SQUARE]}.items()))


def transposes_one(load: Load, tensors: dict[str, Tensor]) -> None:
    load(iter({**tensors, SQUARE: tensors[SQUARE].T.contiguous()}.items()))


@pytest.fixture
def generator(engine):
    """An inline generator on the engine of all tests, which must sample batch 2 with version 1."""
    agreement = Agreement(GenerationConfig(engine="vllm"), engine.params, torch.float32, None)
    generator = InlineGenerator(engine, PolicyWeights(torch.float32), Trace(), agreement)
    publish_and_sample(generator, 0)
    return generator


def publish_and_sample(generator: InlineGenerator, version: int):
    generator.publish(new_policy(version), version)
    generator.submit(version + 1, version, prompts_of(4))
    return generator.collect(version + 1)


def test_weights_are_rounded_before_anything_reads_them(engine, monkeypatch):
    """Loading and both checksums then read 2 bytes a parameter, as with an engine in a process of its own."""
    given: dict[str, Tensor] = {}
    load = engine.load

    def recording(tensors, version):
        given.update(tensors)
        return load(tensors, version)

    monkeypatch.setattr(engine, "load", recording)
    monkeypatch.setattr(engine, "version", -1)
    agreement = Agreement(GenerationConfig(engine="vllm"), engine.params, torch.bfloat16, None)
    publish_and_sample(InlineGenerator(engine, PolicyWeights(torch.bfloat16), Trace(), agreement), 0)
    parameters = dict(new_policy(0).named_parameters())
    assert parameters.keys() <= given.keys()
    assert {given[name].dtype for name in parameters} == {torch.bfloat16}
    assert all(torch.equal(given[name], weight.bfloat16()) for name, weight in parameters.items())


KEPT = r"vLLM kept old weights, or was given NaN: .*"
OTHERWISE = (
    r"the engine has the weights of version 1, but computes other log-probabilities with them: they differ by \d"
)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (ignores_the_update, r"version 1: 28 of 28 tensors: gpt_neox.embed_in.weight"),
        (loads_half, KEPT + r"layers\.1\.input_layernorm"),
        (leaves_one_out, KEPT + r"layers\.1\.attention\.dense$"),
        (swaps_two, rf"version 1: 2 of 28 tensors: {TWIN}, {SQUARE}"),
        (transposes_one, r"version 1: 1 of 28 tensors: " + SQUARE),
    ],
)
def test_a_fault_on_the_way_to_vllm_names_the_tensors(generator, monkeypatch, fault, named):
    """Planted in front of the load: vLLM takes other tensors than were published."""
    load = generator.engine.load

    def load_badly(tensors: dict[str, Tensor], version: int) -> dict[str, str]:
        found: dict[str, str] = {}
        fault(lambda given: found.update(load(dict(given), version)), tensors)
        generator.engine.version = version
        return found

    monkeypatch.setattr(generator.engine, "load", load_badly)
    with pytest.raises((GeneratorError, RuntimeError), match=named):
        publish_and_sample(generator, 1)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (ignores_the_update, KEPT + "model.embed_in.weight"),
        (loads_half, KEPT + r"layers\.1\.input_layernorm"),
        (leaves_one_out, KEPT + r"layers\.1\.attention\.dense$"),
        (swaps_two, OTHERWISE),
        (transposes_one, OTHERWISE),
    ],
)
def test_a_fault_within_vllm_is_caught_in_the_first_batch(generator, monkeypatch, fault, found):
    """Planted behind the digests: vLLM takes the right tensors, and does something else with them."""
    model = held_by(generator.engine)
    load = model.load_weights
    monkeypatch.setattr(model, "load_weights", lambda tensors: fault(load, dict(tensors)))
    with pytest.raises(RuntimeError, match=found):  # GeneratorError is one
        publish_and_sample(generator, 1)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("gpt_neox.layers.1.input_layernorm.weight", r"layers\.1\.input_layernorm\.weight"),
        (SQUARE, r"layers\.1\.attention\.dense"),  # packed for vLLM's kernels, it cannot be looked at
    ],
)
def test_weights_that_are_not_numbers_are_an_error(engine, name, named):
    weights = {key: tensor.clone() for key, tensor in named_weights(new_policy(1)).items()}
    weights[name].view(-1)[0] = float("nan")
    with pytest.raises(RuntimeError, match=KEPT + named):
        engine.load(weights, 1)
