"""New weights between two tokens: each token has its version, none too old, each proven by its own weights."""

from __future__ import annotations

import re
import time
from contextlib import closing

import httpx
import pytest
from conftest import LONGEST, new_policy, run, served_by
from tiny import PROMPTS, drawn, rare

from async_rlhf.data.stream import PromptStream
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.generation import server_client
from async_rlhf.generation.inline import PolicyEngine
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.generation.server_generator import ServerEngine
from async_rlhf.run.factory import make_generator
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch

pytestmark = pytest.mark.vllm

STALENESS, BATCHES = 2, 8


@pytest.fixture
def batches(monkeypatch):
    """Every batch of rollouts that a generator gives."""
    seen, collect = [], RemoteGenerator.collect

    def collect_and_keep(generator, index):
        seen.append(collect(generator, index))
        return seen[-1]

    monkeypatch.setattr(RemoteGenerator, "collect", collect_and_keep)
    return seen


@pytest.fixture
def at_once(monkeypatch) -> list[set[int]]:
    """The batches of which a generator has prompts at a time, each time that it is given some."""
    seen, submit = [], RemoteGenerator.submit

    def submit_and_look(generator, *arguments):
        submit(generator, *arguments)
        seen.append({request.batch for request in list(generator.workers[0].open)})

    monkeypatch.setattr(RemoteGenerator, "submit", submit_and_look)
    return seen


@pytest.fixture(params=["process", "server"])
def where(request) -> dict[str, object]:
    """Options of generation."""
    return {} if request.param == "process" else served_by(request.getfixturevalue("server"))


@pytest.fixture
def flying_args(make_args, where):
    return make_args(
        generation={"in_flight": True, "response_length": 200, **where},
        staleness=STALENESS,
        total_episodes=8 * BATCHES,
        learning_rate=5e-3,
    )


def sampling_has_begun(generator) -> bool:
    if isinstance(generator, ProcessGenerator):
        return generator.workers[0].heartbeat.value > 0  # a step of vLLM's is done
    key = server_client.key_of(generator.config)
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{generator.workers[0].url}/metrics"
    told = httpx.get(url, timeout=30.0, trust_env=False, headers=headers).text
    return any(float(count) > 0 for count in re.findall(r"^vllm:num_requests_running{.*} (\S+)$", told, re.MULTILINE))


@pytest.fixture
def loaded(monkeypatch):
    """The versions that a server has been given, as soon as it has them."""
    versions, load = [], ServerEngine._load

    async def load_and_tell(engine, version):
        digests = await load(engine, version)
        versions.append(version)
        return digests

    monkeypatch.setattr(ServerEngine, "_load", load_and_tell)
    return versions


def flown_through(flying_args, tokenizer, loaded) -> Batch:
    """A large batch, while the sampling of which two more versions were published."""
    loaded.clear()
    policy = new_policy(max_position_embeddings=LONGEST)
    params = SamplingParams(2, 0.7, 200, (256,), 0, batch_size=64)
    engine = PolicyEngine(flying_args, policy, params, Parallel())  # for inline alone
    with closing(make_generator(flying_args, engine, Trace(), 1)) as generator:
        generator.publish(policy, 0)
        generator.publisher.thread.finish()  # one that waits for weights gives signs of life, too
        # So large that a server which is too busy to answer for some seconds is still sampling it afterwards.
        generator.submit(1, None, PromptStream(PROMPTS, tokenizer).batch(1, 600))
        deadline = time.monotonic() + 120
        while not sampling_has_begun(generator):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for version in (1, 2):
            while flying_args.placement == "server" and version - 1 not in loaded:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.4)  # some tokens by those weights
            generator.publish(new_policy(version, max_position_embeddings=LONGEST), version)
        return generator.collect(1)


def crossed(batch: Batch) -> int:
    """How many answers have tokens of two versions or more."""
    return sum(len(set(drawn(sample).versions)) > 1 for sample in batch.samples)


@pytest.mark.parametrize("where", ["process", rare("server")], indirect=True)
def test_weights_change_between_two_tokens(flying_args, tokenizer, loaded):
    """Two versions are published while one large batch is being sampled by the first.

    A server that is too busy drops connections, and what these had asked for is sampled again by the newest weights.
    Then no answer has two versions, though the batch may: another is tried.
    """
    batch = flown_through(flying_args, tokenizer, loaded)
    for _ in range(2):
        batch = batch if crossed(batch) and batch.version == 0 else flown_through(flying_args, tokenizer, loaded)
    rollouts = list(map(drawn, batch.samples))
    assert len(rollouts) == 1200
    assert all(list(rollout.versions) == sorted(rollout.versions) for rollout in rollouts)
    assert batch.version == min(version for rollout in rollouts for version in rollout.versions) == 0
    assert {version for rollout in rollouts for version in rollout.versions} == {0, 1, 2}
    assert crossed(batch) > 10
    assert batch.metrics["engine/logprob_difference"] < 1e-4


def test_training_keeps_the_bound(flying_args, tokenizer, batches, at_once):
    """Whatever is new when a batch starts, or comes while it is sampled, together with those after it."""
    metrics = run(flying_args, tokenizer, PROMPTS, new_policy(max_position_embeddings=LONGEST))
    assert [batch.index for batch in batches] == list(range(1, BATCHES + 1))
    for batch, row in zip(batches, metrics, strict=True):
        rollouts = list(map(drawn, batch.samples))
        assert len(rollouts) == 16
        for rollout in rollouts:
            assert list(rollout.versions) == sorted(rollout.versions)
            assert max(0, batch.index - 1 - STALENESS) <= rollout.versions[0]
            assert rollout.versions[-1] <= batch.index - 1
        versions = [version for rollout in rollouts for version in rollout.versions]
        assert row["schedule/version"] == batch.version == min(versions)
        assert row["schedule/lag_mean"] == pytest.approx(batch.index - 1 - sum(versions) / len(versions))
        assert row["engine/logprob_difference"] < 1e-4
    assert batches[-1].version > 0
    assert {1, 2, 3} in at_once
