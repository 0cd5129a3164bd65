"""A server in flight has requests of several batches at a time. The server itself is a fake; real ones are in vllm/."""

from __future__ import annotations

import queue
import time
from asyncio import sleep
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace

import pytest

from async_rlhf.generation import server_generator
from async_rlhf.generation.dispatch import Arrived
from async_rlhf.generation.protocol import GeneratorError, Ready, Reply, Request, SamplingParams
from async_rlhf.generation.server_client import ServerGoneError
from async_rlhf.generation.server_generator import ServerWorker
from async_rlhf.types import Prompt, Sample

PARAMS = SamplingParams(1, 1.0, 2, (9,), 0)
SECONDS = 30.0


class FakeServer:
    """A server, its clients and the snapshots that it loads: whatever a learner's thread deals with."""

    def __init__(self) -> None:
        self.label, self.paused, self.is_gone = "", False, False
        self.begun: list[int] = []
        self.loaded: list[int] = []
        self.held_back: set[int] = set()
        self.newest, self.published = 0, {0: {"w": "0"}}

    def publish(self, version: int) -> None:
        self.published[version] = {"w": str(version)}
        self.newest = version

    def close(self) -> None:
        """Nothing is connected."""

    async def load(self, client: object, version: int) -> list[dict[str, str]]:
        assert self.paused
        self.loaded.append(version)
        return [self.published[version]]


class FakeClient:
    """The client of the one server."""

    server: FakeServer

    def __init__(self, url: str, key: str | None) -> None:
        self._at = FakeClient.server

    async def aclose(self) -> None:
        """Nothing is connected."""

    async def generate(self, prompt, params, seed, prefix) -> tuple[Sample, ...]:
        (number,) = prompt.tokens
        self._at.begun.append(number)
        first = int(self._at.label.removeprefix(prefix))
        while number in self._at.held_back:
            await sleep(0.001)
            if self._at.is_gone:
                raise ServerGoneError("does not answer")
        last = int(self._at.label.removeprefix(prefix))
        return (Sample.answer(prompt.tokens, (1, 9), (-1.0, -1.0), (first, last), "stop"),)

    async def weight_version(self) -> str:
        return self._at.label

    async def is_there(self) -> bool:
        return not self._at.is_gone

    async def set_weight_version(self, label: str) -> None:
        self._at.label = label

    async def pause(self) -> None:
        self._at.paused = True

    async def resume(self) -> None:
        self._at.paused = False

    async def forget_cached(self) -> None:
        assert self._at.paused


class Keeper:
    """The learner's side: takes what comes from the server, and hands back what it has when it goes away."""

    def __init__(self) -> None:
        self.arrived: queue.SimpleQueue[Arrived | None] = queue.SimpleQueue()

    def next(self) -> Reply | None:
        worker, start, answer = self.arrived.get(timeout=SECONDS)
        assert start == worker.starts
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, Reply):
            worker.answered([(each.batch, each.number) for each in worker.open].index((answer.batch, answer.number)))
        return answer


@pytest.fixture
def fake(monkeypatch):
    """The fake server; every client is one of its own."""
    monkeypatch.setattr(server_generator, "ServerClient", FakeClient)
    monkeypatch.setattr(server_generator, "_RETRY_SECONDS", 0.01)
    FakeClient.server = FakeServer()
    return FakeClient.server


@pytest.fixture
def keeper():
    return Keeper()


@pytest.fixture
def worker(fake, keeper):
    config = SimpleNamespace(urls=["http://nowhere:1"], api_key="key")
    what = {"snapshots": fake, "transports": [fake], "vocabulary": 10, "arrived": keeper.arrived}
    with closing(ServerWorker(0, SimpleNamespace(config=config, run="run", params=PARAMS, **what))) as made:
        yield made


def request(batch: int, unit: int = 0, in_flight: bool = True, after: int = 0, **more: object) -> Request:
    number = 10 * batch + unit if batch > 0 else 1000 - batch
    return Request(batch, unit, None, (Prompt(number, number, (number,)),), in_flight=in_flight, after=after, **more)


def wait(for_what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not for_what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_prompts_of_the_next_batches_do_not_wait_for_the_end_of_one(worker, fake, keeper):
    fake.held_back = {10}
    for each in (request(1), request(1, 1), request(2), request(3)):
        worker.submit(each)
    assert {(reply.batch, reply.number) for reply in (keeper.next() for _ in range(3))} == {(1, 1), (2, 0), (3, 0)}
    assert fake.begun == [10, 11, 20, 30]
    assert [each.batch for each in worker.open] == [1]
    fake.held_back.clear()
    assert keeper.next().batch == 1


def test_what_is_not_in_flight_is_answered_alone_and_in_its_turn(worker, fake, keeper):
    fake.held_back = {10}
    evaluation = request(-1, in_flight=False, params=PARAMS)
    for each in (request(1), evaluation, request(2)):
        worker.submit(each)
    wait(lambda: fake.begun == [10])
    fake.publish(1)
    wait(lambda: fake.loaded == [0, 1])
    assert fake.begun == [10]
    fake.held_back.clear()
    assert [keeper.next().batch for _ in range(3)] == [1, -1, 2]


def test_prompts_of_one_request_wait_for_no_place(worker, fake, keeper):
    """A server has a queue of its own, and more places than a process may have."""
    numbers = range(PARAMS.batch_size + 3)
    fake.held_back = {*numbers}
    prompts = tuple(Prompt(number, number, (number,)) for number in numbers)
    worker.submit(Request(1, 0, None, prompts))
    wait(lambda: len(fake.begun) == len(prompts))
    fake.held_back.clear()
    assert [samples[0].tokens[0] for samples in keeper.next().completions] == [*numbers]


def test_all_go_on_with_newer_weights_and_each_proves_those_that_drew_it(worker, fake, keeper):
    """Each version is loaded once, and a request that needs it waits for it."""
    fake.held_back = {10, 20}
    worker.submit(request(1))
    worker.submit(request(2))
    worker.submit(request(3, after=1))
    wait(lambda: fake.begun == [10, 20])
    fake.publish(1)
    late = keeper.next()
    assert (late.batch, late.version, late.digests) == (3, 1, {1: {"w": "1"}})
    fake.held_back.clear()
    for _ in range(2):
        reply = keeper.next()
        assert reply.completions[0][0].versions.tolist()[1:] == [0, 1]
        assert (reply.version, reply.digests) == (0, {0: {"w": "0"}, 1: {"w": "1"}})
    assert fake.loaded == [0, 1]


def test_a_server_that_goes_away_hands_back_all_that_it_has(worker, fake, keeper, caplog):
    """Also what it had got and not begun, so that nothing is sampled twice."""
    fake.held_back = {10, 20}
    for each in (request(1), request(2), request(-1, in_flight=False, params=PARAMS), request(3)):
        worker.submit(each)
    wait(lambda: fake.begun == [10, 20])
    fake.is_gone = True
    assert keeper.next() is None
    assert sorted(each.batch for each in worker.open) == [-1, 1, 2, 3]
    worker.open = []
    worker.start()
    assert "the evaluation of version 1 and batch 3 are sampled again once it is back" in caplog.text
    fake.label, fake.is_gone = "", False  # started again, without weights
    assert isinstance(keeper.next(), Ready)
    assert fake.begun == [10, 20]
    fake.held_back.clear()
    worker.submit(request(2))
    assert keeper.next().batch == 2
    assert fake.begun == [10, 20, 20]
    assert fake.loaded == [0, 0]


def test_an_error_of_one_request_ends_the_run(worker, fake, keeper):
    async def load(client: object, version: int) -> list[dict[str, str]]:
        return [{"w": "other"}]

    fake.load = load
    worker.submit(request(1))
    with pytest.raises(GeneratorError, match="took weights that are not those of version 0: 1 of 1 tensors: w"):
        keeper.next()
