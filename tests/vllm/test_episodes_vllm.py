"""Episodes by vLLM, wherever it runs: what is said to be sampled was, by the weights that it names, turn after turn."""

from __future__ import annotations

import itertools
import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
from checked_episodes import check_episode, models_of, watch
from conftest import LONGEST, PARAMS, metrics_of, new_args, new_policy, same_metrics, served_by
from environments import SLOW, Echo, Patient
from tiny import PROMPTS, rare

from async_rlhf import OnlineDPOTrainer
from async_rlhf.config.episodes import World
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.episodes.spec import episodes_of
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.models.chats import ChatTemplate

pytestmark = pytest.mark.vllm

STOPS = list(range(60))
"""So many stop tokens that a tiny model ends most answers by itself."""
EPISODES = {"response_length": 8, "max_turns": 3, "episode_length": 40, "stop_token_ids": STOPS}
LONG_EPISODES = {"response_length": 60, "max_turns": 4, "episode_length": 200, "stop_token_ids": STOPS[:10]}
BATCHES = 3
EXACT = {"staleness": 1, "total_episodes": 8 * BATCHES, "learning_rate": 5e-3}


def train(args, tokenizer, environment=Echo, prompts=PROMPTS, **sizes: int) -> list[dict[str, float]]:
    """Train; the metrics of every batch."""
    policy = new_policy(**sizes)
    OnlineDPOTrainer(policy, args, prompts, environment=environment, processing_class=tokenizer).train()
    return metrics_of(args.output_dir)


@contextmanager
def slowly(*seconds: float):
    """Within, environments of this process take their time."""
    SLOW[:] = seconds
    try:
        yield
    finally:
        SLOW.clear()


@pytest.fixture
def player(engine, tokenizer, tmp_path):
    """vLLM in this process, with an environment."""
    spec = episodes_of(new_args(tmp_path, generation=EPISODES), World(Echo), ChatTemplate(tokenizer))
    engine.params = replace(PARAMS, response_length=8, stop_token_ids=(256, *STOPS), episodes=spec)
    return EpisodeSampler(engine)


def test_the_same_prompts_give_the_same_episodes_whatever_is_beside_them(player, tokenizer):
    """Bit for bit: together, in another order, alone, and in flight, where environments take what time they like."""
    prompts = PromptStream(PROMPTS, tokenizer).batch(1, 12)
    first = player.generate(prompts)
    for prompt, samples in zip(prompts, first, strict=True):
        for sample in samples:
            check_episode(prompt, sample, tokenizer, {0: new_policy()}, EPISODES)
    turns = [sample.metrics["turns"] for samples in first for sample in samples]
    assert set(turns) == {1, 2, 3}
    assert sum(one.tokens.tolist() != other.tokens.tolist() for one, other in first) >= 11
    assert player.generate(prompts) == first
    assert player.generate(prompts[::-1])[::-1] == first
    assert player.generate(prompts[5:6]) == first[5:6]
    waiting = list(prompts)
    with slowly(0.0, 0.01, 0.05):
        streamed = dict(player.stream(lambda places: [waiting.pop(0) for _ in range(min(places, len(waiting)))]))
    assert [streamed[number] for number in range(12)] == first


@pytest.fixture(scope="module")
def exact(tmp_path_factory, tokenizer):
    """A run with a generator process at staleness 1: its metrics, batches, and weights by version."""
    with pytest.MonkeyPatch.context() as patch:
        batches, weights = watch(patch)
        metrics = train(new_args(tmp_path_factory.mktemp("exact"), generation=EPISODES, **EXACT), tokenizer)
    return metrics, batches, weights


def test_a_process_plays_by_the_schedule(exact, tokenizer):
    metrics, batches, weights = exact
    assert [row["schedule/version"] for row in metrics] == [0, 0, 1]
    assert max(row["engine/logprob_difference"] for row in metrics) < 1e-4
    assert max(row["weights/probe_difference"] for row in metrics if "weights/probe_difference" in row) < 1e-4
    assert min(row["episode/turns"] for row in metrics) > 1
    assert min(row["grad_norm"] for row in metrics) > 0
    models = models_of(weights, new_policy)
    assert any((weights[0][name] != weights[1][name]).any() for name in weights[0])
    for batch, version in zip(batches, [0, 0, 1], strict=True):
        for group in batch.groups:
            for sample in group.samples:
                assert set(sample.versions[sample.sampled]) == {version}
                check_episode(group.prompt, sample, tokenizer, models, EPISODES)


@pytest.mark.parametrize("where", [rare("two processes"), "server"])
def test_elsewhere_it_is_the_same_run(exact, where, request, make_args, tokenizer):
    options = {"workers": 2} if where == "two processes" else served_by(request.getfixturevalue("server"))
    assert same_metrics(train(make_args(generation={**EPISODES, **options}, **EXACT), tokenizer), exact[0])


URLS: set[str] = set()
"""Of endpoints in this process."""
SAID: list[tuple[str, str]] = []
"""The answers to the same question, asked twice in one episode."""


async def asks_twice(client, row):
    """An agent, by the policy's endpoint."""
    URLS.add(client.base_url)
    async with httpx.AsyncClient(base_url=client.base_url, timeout=60.0) as http:
        chat = [{"role": "user", "content": row["name"]}]
        for asked in (chat, chat, chat[:1]):  # the third does not go on from anything
            key = {"Authorization": f"Bearer {client.api_key}"}
            answer = await http.post("/chat/completions", json={"messages": asked}, headers=key)
            if answer.is_success:
                chat += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    SAID.append((chat[1]["content"], chat[-2]["content"]))
    return len(chat[1]["content"]) / 10


def test_an_agent_plays_the_same_by_a_process_and_a_server(server, make_args, tokenizer):
    """With a server the endpoint is in this process; it is closed when the run ends."""
    found = []
    for name, options in (("process", {}), ("server", served_by(server))):
        args = make_args(name, {**EPISODES, **options}, **EXACT)
        OnlineDPOTrainer(new_policy(), args, PROMPTS, agent=asks_twice, processing_class=tokenizer).train()
        found.append(metrics_of(args.output_dir))
    assert same_metrics(*found)
    assert max(row["engine/logprob_difference"] for row in found[1]) < 1e-4
    assert min(row["episode/turns"] for row in found[1]) > 2
    assert {row["episode/conversations"] for row in found[1]} == {2}
    assert sum(one != other for one, other in SAID) > len(SAID) / 2
    (url,) = URLS
    with pytest.raises(httpx.ConnectError):
        httpx.post(f"{url}/chat/completions", json={}, timeout=5.0)


@pytest.mark.parametrize("where", ["process", "server"])
def test_in_flight_every_token_is_of_the_weights_that_it_names(
    where, request, make_args, tokenizer, monkeypatch, tmp_path
):
    """New weights come between two turns and between two tokens, none beyond the bound."""
    options = {} if where == "process" else served_by(request.getfixturevalue("server"))
    staleness, count, sizes = 2, 6, {"max_position_embeddings": LONGEST}
    args = make_args(
        generation={**LONG_EPISODES, "in_flight": True, **options},
        staleness=staleness,
        total_episodes=8 * count,
        learning_rate=5e-3,
    )
    batches, weights = watch(monkeypatch)
    publish, published = RemoteGenerator.publish, tmp_path / "published"

    def publish_and_tell(generator, policy, version):
        publish(generator, policy, version)
        (published / str(version)).touch()

    published.mkdir()
    monkeypatch.setattr(RemoteGenerator, "publish", publish_and_tell)
    monkeypatch.setattr(Patient, "begun", itertools.count())
    prompts = [{**row, "published": str(published), "batch_size": 16} for row in PROMPTS]
    metrics = train(args, tokenizer, Patient, prompts, **sizes)
    models, several = models_of(weights, partial(new_policy, **sizes)), 0
    assert [batch.index for batch in batches] == list(range(1, count + 1))
    for batch, row in zip(batches, metrics, strict=True):
        for group in batch.groups:
            for sample in group.samples:
                check_episode(group.prompt, sample, tokenizer, models, LONG_EPISODES)
                versions = sample.versions[sample.sampled]
                assert max(0, batch.index - 1 - staleness) <= versions[0]
                assert versions[-1] <= batch.index - 1
                several += len(set(versions)) > 1
        assert row["engine/logprob_difference"] < 1e-4
        assert row["episode/turns"] > 1
    assert several > 0
    lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
    slept = [json.loads(line)["time/environment"] for line in lines]  # 25 ms for each step on average, added up
    assert sum(slept) > 16 * count * 0.01
