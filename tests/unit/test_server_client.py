"""The client of a server, against a real one that answers as slowly as it is told: nothing waits that need not."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest

from async_rlhf.generation import server_client
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.generation.server_client import ServerClient, ServerGoneError
from async_rlhf.types import Prompt, RouteShape

PROMPTS = 300
"""More than are asked for at the same time."""
ANSWER = {
    "choices": [
        {
            "index": 0,
            "token_ids": [5],
            "logprobs": {"content": [{"logprob": -1.0}]},
            "weight_versions": [{"version": "run:0", "start": 0, "end": 1}],
            "finish_reason": "length",
        }
    ]
}


class SlowServer:
    """Answers for its weights at once, and for completions when ``done`` is set."""

    def __init__(self) -> None:
        self.answer = json.dumps(ANSWER)
        self.done, self.under_way, self.most, self.connections = asyncio.Event(), 0, 0, 0
        self.well: int | None = None
        """How often it still says that it is well, while it answers with errors."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while head := (await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""):
            lines = head.decode().split("\r\n")
            sizes = [int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:")]
            await reader.readexactly(sum(sizes))
            answer: object = {"weight_version": "run:0"}
            if "generate" in lines[0]:
                self.under_way += 1
                self.most = max(self.most, self.under_way)
                await self.done.wait()
                self.under_way -= 1
            body = (self.answer if "generate" in lines[0] else json.dumps(answer)).encode()
            status = "200 OK"
            if self.well is not None:
                status = "200 OK" if "health" in lines[0] and self.well > 0 else "500 Error"
                self.well -= "health" in lines[0]
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def serving():
    slow = SlowServer()

    async def serve(reader, writer):
        try:
            await slow.serve(reader, writer)
        except asyncio.IncompleteReadError:  # the client has closed the connection
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=PROMPTS)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with aclosing(ServerClient(url)) as client:
        yield slow, client
    listener.close()


def test_new_weights_do_not_wait_for_prompts_that_are_under_way():
    """Else a server with a large share would get them when its first prompts were done, and not in flight."""

    async def run() -> None:
        async with serving() as (slow, client):
            params = SamplingParams(1, 1.0, 1, (), 0)
            prompts = [
                asyncio.create_task(client.generate(Prompt(i, 0, (7,)), params, i, "run:")) for i in range(PROMPTS)
            ]
            async with asyncio.timeout(60):
                while slow.under_way < 256:
                    await asyncio.sleep(0.01)
                assert await client.weight_version() == "run:0"
                assert not any(task.done() for task in prompts)
                slow.done.set()
                completions = await asyncio.gather(*prompts)
            assert slow.most == 256  # each takes a file descriptor
            assert {samples[0].tokens.tolist()[-1] for samples in completions} == {5}

    asyncio.run(run())


def test_a_connection_that_the_server_may_be_closing_is_not_used_again():
    """vLLM's closes those that were idle for 5 s."""

    async def run() -> None:
        async with serving() as (slow, client):
            for pause, connections in ((0.0, 1), (0.1, 1), (2.5, 2)):
                await asyncio.sleep(pause)
                await client.weight_version()
                assert slow.connections == connections

    asyncio.run(run())


def test_a_server_whose_engine_has_died_may_say_for_a_moment_that_it_is_well(monkeypatch):
    """Then its requests are given to others. One that stays well has an error of its own, which ends the run."""
    monkeypatch.setattr(server_client, "_LOOK_SECONDS", 0.03)
    monkeypatch.setattr(server_client, "_ENDING_SECONDS", 0.3)

    async def run(well: int) -> None:
        async with serving() as (slow, client):
            slow.well = well
            await client.weight_version()

    for well, error in ((0, ServerGoneError), (3, ServerGoneError), (1000, GeneratorError)):
        with pytest.raises(error):
            asyncio.run(run(well))


def of_two(**changes) -> dict:
    """An answer with two completions, the second first, and numbers of every length."""
    rng = np.random.default_rng(0)
    logprobs = [*(-rng.exponential(size=60)).tolist(), -1e-30, -0.0, 0, -1]
    choice = ANSWER["choices"][0] | {
        "token_ids": rng.integers(0, 2**31 - 1, len(logprobs)).tolist(),
        "logprobs": {"content": [{"token": "a", "logprob": x, "top_logprobs": [{"logprob": x}]} for x in logprobs]},
        "weight_versions": [{"version": f"run:{i}", "start": 32 * i, "end": 32 * i + 32} for i in range(2)],
        "stop_reason": None,
    }
    return {
        "request_id": "x",
        "choices": [choice | changes | {"index": 1}, ANSWER["choices"][0]],
        "prompt_logprobs": None,
    }


def read(text: str, **params: object) -> object:
    """Both completions, or the error."""

    async def run() -> object:
        async with serving() as (slow, client):
            slow.answer = text
            slow.done.set()
            try:
                how = SamplingParams(2, 1.0, 64, (), 0, **params)
                return await client.generate(Prompt(0, 0, (7, 8)), how, 0, "run:")
            except Exception as error:
                return type(error), str(error)

    return asyncio.run(run())


def plainly(monkeypatch, text: str, **params: object) -> object:
    """The same without arrays."""

    def refuse(*_: object) -> None:
        raise ValueError

    with monkeypatch.context() as patch:
        patch.setattr(server_client, "read_json", refuse)
        return read(text, **params)


def test_an_answer_is_read_into_arrays_that_are_what_it_says_bit_for_bit(monkeypatch):
    text = json.dumps(of_two())
    expected = plainly(monkeypatch, text)
    assert [len(sample.drawn) for sample in expected] == [1, 64]
    assert {sample.versions[-1] for sample in expected} == {0, 1}
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: 1 / 0 if b"choices" in text else loads(text))
    for written in (text, json.dumps(of_two(), indent=1), text + "\n"):
        assert read(written) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5, None]},
        {"token_ids": [2**31] * 64},
        {"token_ids": ["a"] * 64},
        {"token_ids": [5]},
        {"token_ids": None},
        {"logprobs": None},
        {"logprobs": {"content": [{"logprob": float("nan")}] * 64}},
        {"logprobs": {"content": [{"logprob": None}] * 64}},
        {"logprobs": {"content": [{}] * 64}},
        {"weight_versions": None},
        {"weight_versions": [{"version": "other:1", "start": 0, "end": 64}]},
        {"weight_versions": [{"version": "run:1", "start": 0}]},
        {"finish_reason": None},
        {"index": None},
        {"finish_reason": "abort", "logprobs": None},
    ],
    ids=repr,
)
def test_an_answer_that_is_wrong_is_refused_as_if_read_plainly(monkeypatch, changes):
    text = json.dumps(of_two(**changes))
    assert read(text) == plainly(monkeypatch, text)


def test_routes_come_as_vllm_sends_them_and_must_come_if_asked_for(monkeypatch):
    answer, shape, right = copy.deepcopy(of_two()), RouteShape(3, 2, 8), []
    for choice in answer["choices"]:
        tokens = 2 + len(choice["token_ids"])
        routes_TLE = np.random.default_rng(tokens).integers(0, 8, (tokens - 1, 3, 2)).astype(np.uint8)
        right.append(shape.whole(routes_TLE, tokens))
        file = io.BytesIO()
        np.save(file, routes_TLE)
        choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    text = json.dumps(answer)
    found = read(text, routes=shape)
    assert [np.array_equal(sample.routes_TLE, each) for sample, each in zip(found, right[::-1], strict=True)] == [
        True
    ] * 2
    assert plainly(monkeypatch, text, routes=shape) == found
    assert read(text) == read(json.dumps(of_two()))  # nobody asked
    kind, message = read(json.dumps(of_two()), routes=shape)
    assert kind is GeneratorError
    assert "without routes, which router_replay needs" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps(of_two())[:-1], json.dumps(of_two()) * 2])
def test_no_answer_is_refused_as_if_read_plainly(monkeypatch, text):
    found = read(text)
    assert found == plainly(monkeypatch, text)
    assert isinstance(found[0], type)
