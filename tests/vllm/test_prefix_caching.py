"""The K completions of a prompt share its blocks of keys and values, and nobody takes those of older weights."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from conftest import BLOCK, PARAMS, SHORT, SHORT_BATCHES, new_policy, run, served_by

from async_rlhf.models.weights import named_weights
from async_rlhf.types import Prompt

pytestmark = pytest.mark.vllm


def test_completions_share_whole_blocks_of_their_prompt_with_one_version_alone(engine, monkeypatch):
    manager = engine._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    look_up, shared = manager.get_computed_blocks, []

    def look_up_and_note(request):
        result = look_up(request)
        shared.append(result[1])
        return result

    monkeypatch.setattr(manager, "get_computed_blocks", look_up_and_note)
    engine.params = replace(PARAMS, samples_per_prompt=4)
    prompts = [Prompt(draw, draw, tuple(range(40 + draw, 40 + draw + 2 * BLOCK + 6))) for draw in range(3)]
    for version in range(1, 4):
        engine.load(named_weights(new_policy(version)), version)
        shared.clear()
        engine.generate(prompts)
        assert sorted(shared) == [0] * 3 + [2 * BLOCK] * 9


def test_a_server_shares_them_too(server, make_args, tokenizer):
    """Each batch computes its prompts once, in every version: no prompt comes twice."""
    texts = [f"{i:03d} is where this prompt begins, and it is longer than a block" for i in range(8 * SHORT_BATCHES)]
    prompts = [{"query": text} for text in texts]
    before = counted(server)
    run(make_args(generation=served_by(server), max_prompt_length=80, **SHORT), tokenizer, prompts)
    queried, hit = (after - earlier for after, earlier in zip(counted(server), before, strict=True))
    lengths = {len(tokenizer(prompt)["input_ids"]) for prompt in texts}
    assert lengths == {length := min(lengths)}
    assert BLOCK < length < 2 * BLOCK
    assert queried == 2 * length * len(prompts)
    assert hit == BLOCK * len(prompts)


def counted(server) -> tuple[float, float]:
    """Tokens that were looked for in the cache, and those that were there."""
    told = server.request("GET", "/metrics").text
    names = ("queries", "hits")
    found = [re.findall(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", told, re.MULTILINE) for name in names]
    return sum(map(float, found[0])), sum(map(float, found[1]))
