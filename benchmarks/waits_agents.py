"""What the endpoint costs: agents that ask the policy by HTTP, and agents that ask it in the process.

    python benchmarks/waits_agents.py [--json] [--tokens 96]

64 agents at once ask four times each; an answer has so many tokens, and the model waits for each step of decoding as on
a device of its own (waiting.py). Clients and endpoint share the engine's thread, as they do in a generator process. The
two take turns; medians over rounds:

    seconds   until all are done
    ratio     of that to the seconds in the process
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import waits
from waiting import counting_policy
from workload import tokenizer

from async_rlhf import GenerationConfig
from async_rlhf.generation.episodes.endpoint import Client
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.episodes.spec import EpisodeSpec, Sent
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.types import Prompt

AGENTS, TURNS, STEP_SECONDS = 64, 4, 0.02
SMALLEST = {"tokens": 6, "rounds": 1}


def agents(tokens: int, sessions: list[aiohttp.ClientSession]) -> dict[str, Callable[..., Any]]:
    """Both ways to ask; the ones that ask by HTTP share a client."""

    async def in_process(client: Client, row: Mapping[str, Any]) -> float:
        return await talk(client.chat)

    async def by_http(client: Client, row: Mapping[str, Any]) -> float:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

        async def chat(messages: list[dict[str, Any]]) -> dict[str, Any]:
            key = {"Authorization": f"Bearer {client.api_key}"}
            url, body = f"{client.base_url}/chat/completions", {"messages": messages}
            async with sessions[0].post(url, json=body, headers=key) as answer:
                return (await answer.json())["choices"][0]["message"]

        return await talk(chat)

    async def talk(chat: Callable[..., Any]) -> float:
        messages = [{"role": "user", "content": f"w{tokens + 3} w{tokens}"}]
        for _ in range(TURNS):
            messages += [await chat(messages), {"role": "user", "content": f" w{tokens}"}]
        return 1.0

    return {"in process": in_process, "by HTTP": by_http}


def seconds_of(agent: Callable[..., Any], tokens: int, sessions: list[aiohttp.ClientSession]) -> float:
    """Seconds until all agents are done."""
    vocabulary, length = tokens + 30, TURNS * (tokens + 4)
    model = counting_policy(vocabulary, 8 + length, STEP_SECONDS, 1e-6).eval()
    limits = GenerationConfig(response_length=tokens + 1, max_turns=TURNS, episode_length=length)
    episodes = EpisodeSpec(Sent.of(agent), ChatTemplate(tokenizer(vocabulary)), limits, skip=False, is_agent=True)
    params = SamplingParams(1, 0.7, tokens + 1, (vocabulary - 1,), 0, batch_size=AGENTS, episodes=episodes)
    began = time.monotonic()
    found = EpisodeSampler(TransformersEngine(model, params)).generate([Prompt(i, i, (1,)) for i in range(AGENTS)])
    seconds = time.monotonic() - began
    for session in sessions:  # its loop has ended
        asyncio.run(session.close())
    sessions.clear()
    assert all(sample.metrics["turns"] == TURNS for (sample,) in found)
    return seconds


def measure(tokens: int = 96, rounds: int = 3) -> dict[str, dict[str, float]]:
    """Both ways."""
    sessions: list[aiohttp.ClientSession] = []
    ways = agents(tokens, sessions)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, agent in ways.items():
            found[name].append(seconds_of(agent, tokens, sessions))
    ratios = [http / own for http, own in zip(found["by HTTP"], found["in process"], strict=True)]
    medians = {name: {"seconds": statistics.median(each), "ratio": 1.0} for name, each in found.items()}
    medians["by HTTP"]["ratio"] = statistics.median(ratios)
    return medians


if __name__ == "__main__":
    waits.main(__doc__, measure, SMALLEST)
