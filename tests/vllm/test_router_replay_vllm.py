"""vLLM says where it sent each token of a mixture, and the learner sends it there, too."""

from __future__ import annotations

import copy
import multiprocessing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PARAMS, prompts_of, start_engine
from test_training import mixture

from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import check_completions
from async_rlhf.generation.vllm_engine import VLLMEngine
from async_rlhf.models.forward import response_logprobs
from async_rlhf.models.routing import recorded_routes, replay_routes, route_shape
from async_rlhf.models.rows import sampled_rows
from async_rlhf.models.weights import named_weights
from async_rlhf.types import Prompt

pytestmark = pytest.mark.vllm


def rows_of(engine, count: int):
    prompts = prompts_of(count)
    completions = engine.generate(prompts)
    check_completions("vLLM answered", prompts, completions, engine.params, 258)
    return sampled_rows([sample for group in completions for sample in group])


@torch.no_grad()
def differences(model, rows, routes_BTLE=None) -> torch.Tensor:
    given = rows["tokens_BT"], rows["sampled_BT"], PARAMS.temperature
    found_BT = response_logprobs(model, *given, routes_BTLE=routes_BTLE).logprobs_BT
    return (found_BT - rows["behaviour_logprobs_BT"])[rows["sampled_BT"] > 0].abs()


def test_log_probabilities_are_the_learners_with_the_same_experts():
    """Of prompts that are read once for several completions, of completions that end at different steps and take each
    other's places, and of weights that were loaded later.

    In a process of its own: vLLM starts no mixture where it has started another model.
    """
    process = multiprocessing.get_context("spawn").Process(target=take_the_same_experts)
    process.start()
    process.join(400)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0


def take_the_same_experts() -> None:
    for kind in ("mixtral", "qwen3_moe"):
        take_the_same_experts_as(kind)


def take_the_same_experts_as(kind: str) -> None:
    model = mixture(kind)
    replay_routes(model)
    shape = route_shape(model.config)
    engine = start_engine(model, replace(PARAMS, samples_per_prompt=3, batch_size=12, routes=shape))
    rows = rows_of(engine, 24)
    assert len(set(rows["lengths_B"].tolist())) > 10
    assert differences(model, rows, rows["routes_BTLE"]).max() < 1e-4
    with torch.no_grad(), recorded_routes(model, shape) as found:
        model(rows["tokens_BT"])
    own_BTLE, known_BT = found[0].unflatten(0, rows["tokens_BT"].shape), rows["routes_BTLE"][..., 0, 0] != 255
    assert torch.equal(known_BT.sum(dim=1), rows["lengths_B"] - 1)
    assert torch.equal(own_BTLE.sort()[0][known_BT], rows["routes_BTLE"].sort()[0][known_BT])

    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in moved.named_parameters():
            if name.endswith("gate.weight"):
                weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    engine.load(named_weights(moved), 1)
    rows = rows_of(engine, 24)
    assert differences(moved, rows, rows["routes_BTLE"]).max() < 1e-4
    before, after = differences(model, rows).mean(), differences(model, rows, rows["routes_BTLE"]).mean()
    print(f"{kind}: routers that have moved: {before:.4f} without replay, {after:.4f} with it")
    assert after < 0.5 * before

    engine.params = replace(engine.params, samples_per_prompt=1)  # as the turns of an episode are asked for
    rows = rows_of(engine, 12)
    assert differences(moved, rows, rows["routes_BTLE"]).max() < 1e-4

    engine.params = replace(engine.params, routes=None)  # an evaluation, of which no routes are kept
    assert all(sample.routes_TLE is None for group in engine.generate(prompts_of(3)) for sample in group)
    engine.probe()


def test_on_a_gpu_vllm_itself_returns_them(monkeypatch):
    """Which takes a model runner that the build for CPUs has not."""
    options, model = {}, mixture("mixtral")
    monkeypatch.setattr("vllm.LLM", lambda *_, **given: options.update(given))
    shape = route_shape(model.config)
    spec = ModelSpec(type(model), model.config, torch.float32, "cuda:0", max_length=96)
    engine = VLLMEngine(spec, replace(PARAMS, routes=shape))
    assert options["enable_return_routed_experts"] is options["enable_prefix_caching"] is True
    options.clear()
    VLLMEngine(spec, PARAMS)
    assert "enable_return_routed_experts" not in options
    read_TLE = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2) % 4
    span = SimpleNamespace(version="0", start=0, end=2)
    logprobs = SimpleNamespace(token_ids=[5, 6], logprobs=[-1.0, -2.0])
    answer = {
        "index": 0,
        "token_ids": [5, 6],
        "logprobs": logprobs,
        "weight_versions": [span],
        "finish_reason": "length",
    }
    output = SimpleNamespace(outputs=[SimpleNamespace(**answer, routed_experts=read_TLE)])
    (sample,) = engine._samples(Prompt(0, 0, (7, 8, 9)), output)
    assert np.array_equal(sample.routes_TLE, shape.whole(read_TLE, 5))
