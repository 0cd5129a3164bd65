"""How weights get to a server, and that nothing which happens on the way can pass unnoticed or hang."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from conftest import PARAMS, SHORT, SHORT_BATCHES, new_policy, prompts_of, run, same_metrics, served_by
from tiny import PROMPTS, drawn

from async_rlhf import OnlineDPOConfig
from async_rlhf.config import GenerationConfig
from async_rlhf.generation import broadcast
from async_rlhf.generation.server_client import ServerClient, ServerGoneError
from async_rlhf.generation.server_generator import ServerGenerator
from async_rlhf.system.guarded_port import GuardedPort
from async_rlhf.system.trace import Trace

pytestmark = pytest.mark.vllm


def train(server, make_args, tokenizer, **generation):
    return run(make_args("run", {**served_by(server), **generation}, **SHORT), tokenizer, PROMPTS)


@pytest.fixture
def ports(monkeypatch):
    """The ports that the learner opens for servers."""
    opened = []

    class Noted(GuardedPort):
        def __init__(self, host: str) -> None:
            super().__init__(host)
            opened.append(self.port)

    monkeypatch.setattr(broadcast, "GuardedPort", Noted)
    return opened


def test_weights_over_the_network_are_those_of_a_process(server, make_args, tokenizer, undisturbed, tmp_path, ports):
    """Every version goes over one connection, and a second run makes its own."""
    metrics = train(server, make_args, tokenizer, weights_transport="network")
    assert same_metrics(metrics, undisturbed[:SHORT_BATCHES])
    assert not (tmp_path / "run" / "weights").exists()
    assert len(ports) == 1
    args = make_args("again", {**served_by(server), "weights_transport": "network"}, **SHORT)
    assert same_metrics(run(args, tokenizer, PROMPTS), undisturbed[:SHORT_BATCHES])
    assert len(ports) == 2


@pytest.mark.rare
def test_a_server_killed_in_the_middle_of_a_transfer_is_connected_again(
    server, make_args, tokenizer, undisturbed, monkeypatch, ports
):
    send_all, calls = broadcast._send_all, []

    def kill_at_the_third(channel, data):
        calls.append(1)
        if len(calls) == 3:
            channel.sendall(data[: len(data) // 2])
            server.kill()
            server.start()
        send_all(channel, data)

    monkeypatch.setattr(broadcast, "_send_all", kill_at_the_third)
    try:
        metrics = train(server, make_args, tokenizer, weights_transport="network")
    finally:
        server.wait()
    assert same_metrics(metrics, undisturbed[:SHORT_BATCHES])
    assert len(calls) > 3
    assert len(ports) == 2


def test_a_folder_of_ones_own_is_used_and_emptied(server, make_args, tokenizer, undisturbed, tmp_path):
    kept = tmp_path / "shared" / "of somebody else"
    kept.parent.mkdir()
    kept.write_text("")
    metrics = train(server, make_args, tokenizer, weights_dir=str(tmp_path / "shared"))
    assert same_metrics(metrics, undisturbed[:SHORT_BATCHES])
    assert list((tmp_path / "shared").iterdir()) == [kept]


def test_a_lost_answer_leaves_no_server_paused(server, make_args, tokenizer, undisturbed, monkeypatch):
    resume, calls = ServerClient.resume, []

    async def lose_the_third(client):
        calls.append(1)
        if len(calls) == 3:
            raise ServerGoneError("the connection was lost")
        await resume(client)

    monkeypatch.setattr(ServerClient, "resume", lose_the_third)
    metrics = train(server, make_args, tokenizer, timeout=60.0)
    assert len(calls) > 3
    assert same_metrics(metrics, undisturbed[:SHORT_BATCHES])


def test_two_runs_on_one_server_never_get_each_others_tokens(server, tmp_path):
    """They take the weights out of each other's hands, again and again; both get their own completions in the end."""
    params = replace(PARAMS, stop_token_ids=(), response_length=60)
    # Each samples the same draws twice, with the same random numbers: nothing for the test of sampling to look at.
    options = served_by(server) | {"timeout": 120.0, "mismatch_samples": 0}
    config = GenerationConfig(engine="vllm", **options, response_length=60)
    policies, prompts = [new_policy(1), new_policy(2)], prompts_of(8)
    generators = [
        ServerGenerator(
            OnlineDPOConfig(output_dir=str(tmp_path / str(i)), staleness=0, max_prompt_length=36, generation=config),
            policy,
            params,
            Trace(),
        )
        for i, policy in enumerate(policies)
    ]

    def sample(i: int) -> list[tuple[tuple[int, ...], ...]]:
        generators[i].submit(1, 0, prompts)
        groups = generators[i].collect(1).groups
        return [tuple(drawn(sample).tokens for sample in group.samples) for group in groups]

    try:
        for generator, policy in zip(generators, policies, strict=True):
            generator.publish(policy, 0)
        alone = [sample(0), sample(1)]
        assert alone[0] != alone[1]
        together: dict[int, object] = {}
        threads = [threading.Thread(target=lambda i=i: together.update({i: sample(i)})) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [together[0], together[1]] == alone
    finally:
        for generator in generators:
            generator.close()
