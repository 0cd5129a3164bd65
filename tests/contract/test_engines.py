"""Every engine keeps the same promises, wherever it runs; one of them lives outside the package."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import recomputing_engine
import torch
from tiny import count_letters

from async_rlhf import LoRAConfig
from async_rlhf.config import ConfigError, VLLMConfig
from async_rlhf.config.engines import ENGINES
from async_rlhf.config.evaluation import HeldOutConfig
from async_rlhf.config.parallel import SharedConfig
from async_rlhf.generation.engines import ModelSpec, make_engine
from async_rlhf.generation.placement import check_engine
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.models.weights import digests, named_weights
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.types import Prompt

OUTSIDE = "recomputing_engine:ENGINE"
EVERY = pytest.mark.parametrize("engine", [*(name for name in ENGINES if name != "vllm"), OUTSIDE])
"""vLLM's tests are in tests/vllm: it needs an environment of its own."""
PARAMS = SamplingParams(3, 0.7, 6, (256,), 5)
PROMPTS = [Prompt(draw, draw, tuple(range(65, 68 + draw))) for draw in range(5)]


@pytest.fixture
def trained(make_policy, tokenizer, prompts, make_args, tmp_path):
    """Train with an engine. Returns the weights and the metrics of each batch."""

    def train(engine: str, placement: str, staleness: int = 0, **changes):
        generation = {"engine": engine, "placement": placement, "probe_steps": 1, "mismatch_steps": 1}
        generation |= changes.pop("generation", {})
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        args = make_args(generation=generation, staleness=staleness, total_episodes=32, output_dir=str(out), **changes)
        policy = make_policy()
        OnlineTrainer(policy, args, prompts, reward_funcs=count_letters, processing_class=tokenizer).train()
        lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
        return policy.state_dict(), [json.loads(line) for line in lines]

    return train


def assert_same(ours, theirs) -> None:
    for name, tensor in ours[0].items():
        assert torch.equal(tensor, theirs[0][name]), name
    assert [row["objective/scores"] for row in ours[1]] == [row["objective/scores"] for row in theirs[1]]


@EVERY
@pytest.mark.parametrize("staleness", [0, 1, "in flight"])
def test_it_computes_and_draws_what_the_learner_would(trained, engine, staleness):
    """Version, checksum, probe, draws: all are compared in every batch, and the run ends if one is wrong."""
    options = {"staleness": staleness, "generation": {}}
    if staleness == "in flight":
        options = {"staleness": 2, "generation": {"in_flight": True}}
    _, rows = trained(engine, "process", **options)
    # In flight the clock decides which weights draw a token, so now and then a random number lies on a boundary.
    assert sum(row["engine/redraw_ties"] for row in rows) <= (staleness == "in flight")
    assert all(row["engine/logprob_difference"] < 1e-5 for row in rows)
    assert any("weights/probe_difference" in row for row in rows)


@EVERY
def test_inline_and_in_processes_the_run_is_the_same(trained, engine):
    inline = trained(engine, "inline")
    assert_same(trained(engine, "process"), inline)
    if engine == OUTSIDE:  # it decodes one by one, so nothing depends on what is decoded together
        assert_same(trained(engine, "process", generation={"workers": 2, "prompts_per_request": 4}), inline)


@EVERY
def test_a_killed_worker_is_replaced_and_nothing_changes(trained, engine, monkeypatch):
    undisturbed, killed, publish = trained(engine, "process", 1), [], ProcessGenerator.publish

    def kill_then_publish(generator, policy, version):
        if version == 2:
            killed.append(generator.workers[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)
        publish(generator, policy, version)

    monkeypatch.setattr(ProcessGenerator, "publish", kill_then_publish)
    assert_same(trained(engine, "process", 1), undisturbed)
    assert killed


@EVERY
def test_it_proves_what_it_holds_and_its_completions_depend_on_nothing_else(make_policy, engine):
    policy = make_policy()
    weights = named_weights(policy)
    made = make_engine(ModelSpec(type(policy), policy.config, torch.float32, "cpu", engine=engine), PARAMS)
    assert made.load(weights, 3) == digests(weights)
    together = made.generate(PROMPTS)
    alone = [made.generate([prompt])[0] for prompt in PROMPTS]
    left = iter([[prompt] for prompt in PROMPTS])
    streamed = dict(made.stream(lambda places: next(left, ())))
    for number, group in enumerate(together):
        for one, other, third in zip(group, alone[number], streamed[number], strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() == third.tokens.tolist()
            assert one.versions[one.sampled].tolist() == [3] * len(one.drawn)
    made.close()


def test_one_that_draws_otherwise_is_found(trained, monkeypatch):
    draw = recomputing_engine.draw_tokens
    monkeypatch.setattr(recomputing_engine, "draw_tokens", lambda logits, u, t: draw(logits, (u + 0.5) % 1, t))
    with pytest.raises(GeneratorError, match="other tokens than the random numbers of its completions give"):
        trained(OUTSIDE, "inline")


def test_its_environment_is_that_of_a_fresh_interpreter(make_policy, make_args):
    generation = {"engine": "recomputing_engine:IN_A_FRESH_INTERPRETER", "placement": "process"}
    policy = make_policy()
    generator = ProcessGenerator(make_args(generation=generation), policy, PARAMS, None)
    try:
        variables = Path(f"/proc/{generator.workers[0].process.pid}/environ").read_bytes().split(b"\0")
        assert f"{recomputing_engine.VARIABLE}=cpu".encode() in variables
    finally:
        generator.close()


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"engine": "vlm"}, """engine: got 'vlm'; must be "transformers" or "vllm", or an EngineSpec of your own"""),
        ({"engine": "no_such_module:ENGINE"}, "engine: got 'no_such_module:ENGINE': No module named"),
        ({"engine": "recomputing_engine:VARIABLE"}, "which is 'RECOMPUTING_ENGINE_RUNS_ON'; must be"),
        ({"temperature": 0.05}, 'temperature: got 0.05; must be at least 0.1 with engine "recomputing_engine:ENGINE"'),
        ({"seed_per_request": False}, 'must be true unless engine is "vllm"'),
        ({"vllm": VLLMConfig(tensor_parallel_size=2)}, 'must be left out unless engine is "vllm"'),
        ({"placement": "server", "urls": ["http://a"]}, 'must be "vllm" with placement "server"'),
    ],
)
def test_what_it_cannot_do_is_refused(make_args, generation, expected):
    with pytest.raises(ConfigError) as caught:
        make_args(generation={"engine": OUTSIDE, **generation})
    assert expected in str(caught.value)


def test_it_takes_turns_with_a_learner_of_one_rank_and_needs_what_it_says(make_args):
    with pytest.raises(
        ConfigError, match=r'must be 0 with generation.engine "recomputing_engine:ENGINE" and placement'
    ):
        make_args(generation={"engine": OUTSIDE, "placement": "inline"}, staleness=1)
    with pytest.raises(ConfigError, match=r'must be "merged" but with generation.engine "vllm"'):
        make_args(generation={"engine": OUTSIDE}, lora=LoRAConfig(rank=2, publish="adapter"))
    with pytest.raises(ConfigError, match=r'must be "transformers" with parallel.ranks above 1'):
        HeldOutConfig(models={"a": "b"}, data="c", output_dir="d", engine=OUTSIDE, parallel=SharedConfig(ranks=2))
    with pytest.raises(ConfigError, match=r"generation.engine: got .*MISSING'; needs a part that nobody has"):
        check_engine(make_args(generation={"engine": "recomputing_engine:MISSING"}).generation)
