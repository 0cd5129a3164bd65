"""Which worker is given which unit, and when: each free one the next, in order, whatever comes in between."""

from __future__ import annotations

import queue
import random
import threading
import time
from types import SimpleNamespace

import pytest

from async_rlhf.config import GenerationConfig
from async_rlhf.generation import dispatch
from async_rlhf.generation.dispatch import Dispatcher, cut
from async_rlhf.generation.protocol import GeneratorError, Request
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.generation.supervisor import Supervisor
from async_rlhf.system.trace import Trace


class Worker(dispatch.Worker):
    """Notes what it is given."""

    has_begun = True

    def __init__(self, number: int) -> None:
        super().__init__(number, f"worker {number}", None)
        self.given: list[tuple[int, int]] = []

    def submit(self, request: Request) -> None:
        self.open.append(request)
        self.given.append((request.batch, request.number))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def batch(index: int, units: int) -> list[Request]:
    return [Request(index, unit, 0, ()) for unit in range(units)]


def make(count: int, clock: Clock | None = None, per_worker: int = 1) -> tuple[list[Worker], Dispatcher]:
    workers = [Worker(number) for number in range(count)]
    return workers, Dispatcher(workers, clock or Clock(), per_worker)


def test_free_workers_take_the_next_units_in_order_across_batches():
    (first, second), dispatcher = make(2)
    dispatcher.add(batch(1, 3))
    dispatcher.add(batch(2, 2))
    assert (first.given, second.given) == ([(1, 0)], [(1, 1)])
    assert dispatcher.answered(second).number == 1
    dispatcher.answered(second)
    dispatcher.answered(second)
    assert (first.given, second.given) == ([(1, 0)], [(1, 1), (1, 2), (2, 0), (2, 1)])
    dispatcher.answered(first)
    assert first.open == []


def test_workers_that_take_several_at_a_time_have_about_equally_many_and_answer_in_any_order():
    clock = Clock()
    (first, second), dispatcher = make(2, clock, per_worker=3)
    dispatcher.add(batch(1, 4))
    dispatcher.add(batch(2, 4))
    assert first.given == [(1, 0), (1, 2), (2, 0)]
    assert second.given == [(1, 1), (1, 3), (2, 1)]
    clock.now = 2.0
    answered = dispatcher.answered(first, 2, 0)
    assert (answered.batch, answered.number) == (2, 0)
    assert [(request.batch, request.number) for request in first.open] == [(1, 0), (1, 2), (2, 2)]
    lost = dispatcher.lost(second)
    assert [(request.batch, request.number) for request in lost] == [(1, 1), (1, 3), (2, 1)]
    for batch_and_unit in ((1, 0), (1, 2), (2, 2)):
        dispatcher.answered(first, *batch_and_unit)
    assert first.given[4:] == [(1, 1), (1, 3), (2, 1)], "what the other had comes before what nobody had"
    clock.now = 4.0
    dispatcher.answered(first, 1, 3)
    dispatcher.answered(first, 1, 1)
    assert dispatcher.idle_share(1) == 0, "as long as it has something, a worker is busy"


def test_what_a_lost_worker_had_comes_first():
    (first, second), dispatcher = make(2)
    dispatcher.add(batch(1, 4))
    assert [request.number for request in dispatcher.lost(first)] == [0]
    dispatcher.answered(second)
    assert second.given == [(1, 1), (1, 0)]
    assert not dispatcher.is_there(first)
    dispatcher.join(first)
    assert first.given == [(1, 0), (1, 2)]
    dispatcher.leave(second)
    dispatcher.answered(second)  # it may end what it has
    dispatcher.answered(first)
    assert (first.given, second.given) == ([(1, 0), (1, 2), (1, 3)], [(1, 1), (1, 0)])


def test_the_first_by_number_takes_one_and_what_it_had_goes_to_the_next_at_once():
    """In whatever order they have joined."""
    first, second = Worker(0), Worker(1)
    dispatcher = Dispatcher([second])
    assert not dispatcher.is_there(first)
    dispatcher.join(first)
    assert dispatcher.is_there(first)
    dispatcher.add(batch(1, 1))
    assert (first.given, second.given) == ([(1, 0)], [])
    dispatcher.lost(first)
    assert not dispatcher.is_there(first)
    assert second.given == [(1, 0)]
    dispatcher.add(batch(2, 1))
    assert second.given == [(1, 0)], "one unit at a time"


def test_nothing_is_lost_while_nobody_is_there():
    (only,), dispatcher = make(1)
    dispatcher.lost(only)
    dispatcher.add(batch(1, 2))
    assert only.given == []
    dispatcher.join(only)
    dispatcher.join(only)  # twice is once
    dispatcher.answered(only)
    assert only.given == [(1, 0), (1, 1)]


def test_idle_is_who_has_nothing_while_a_batch_is_sampled():
    clock = Clock()
    (first, second), dispatcher = make(2, clock)
    clock.now = 10.0  # before a batch has begun, nothing counts
    dispatcher.add(batch(1, 2))
    clock.now = 12.0
    dispatcher.answered(first)
    clock.now = 16.0
    dispatcher.answered(second)
    assert dispatcher.idle_share(1) == pytest.approx(4 / 12)
    # Work on another batch is work, also if it is not done when the batch is.
    dispatcher.add(batch(2, 1))
    clock.now = 18.0
    dispatcher.add(batch(3, 1))
    clock.now = 20.0
    dispatcher.answered(first)
    assert dispatcher.idle_share(2) == pytest.approx(2 / 8)
    # Who is away is not idle.
    dispatcher.lost(first)
    clock.now = 22.0
    dispatcher.join(first)
    clock.now = 24.0
    dispatcher.answered(second)
    assert dispatcher.idle_share(3) == pytest.approx(2 / (4 + 6))


def test_of_each_batch_every_unit_is_answered_once_whatever_happens_in_any_thread():
    """Four threads answer, lose and join their workers at random while batches come."""
    workers, dispatcher = make(4)
    answered: list[tuple[int, int]] = []
    ended = threading.Event()

    def live(worker: Worker) -> None:
        draw = random.Random(worker.number)
        while not ended.is_set():
            if not worker.open:
                dispatcher.join(worker)
            elif draw.random() < 0.2:
                dispatcher.lost(worker)
            else:
                request = dispatcher.answered(worker)
                answered.append((request.batch, request.number))

    threads = [threading.Thread(target=live, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    expected = {(index, unit) for index in range(1, 101) for unit in range(7)}
    try:
        for index in range(1, 101):
            dispatcher.add(batch(index, 7))
        deadline = threading.Event()
        for _ in range(600):
            if len(answered) >= len(expected):
                break
            deadline.wait(0.1)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert len(answered) == len(expected)
    assert set(answered) == expected
    assert all(0 <= dispatcher.idle_share(index) < 1 for index in range(1, 101))


def test_batches_are_cut_into_consecutive_parts():
    assert cut("abcdefg", 3, None) == ["ab", "cd", "efg"]
    assert cut("abcdefg", 3, 2) == ["ab", "cd", "ef", "g"]
    assert cut("", 3, 2) == cut("", 3, None) == []


class Unstartable(Worker):
    """The second one finds no place."""

    def silent_for(self) -> float:
        if self.number == 1:
            raise ConnectionError("no host has room")
        return 0.0

    def close(self) -> None:
        """Nothing is held."""


class Stopped(queue.Queue):
    """Whose reader is stopped for a while, with nothing in it."""

    after = staticmethod(lambda: None)

    def get(self, block=True, timeout=None):
        time.sleep(0.7)
        self.after()
        raise queue.Empty


def supervised(arrived, make=Unstartable) -> Supervisor:
    failed: list[BaseException] = []
    return Supervisor("worker", GenerationConfig(), make, 2, 1, arrived, Trace(), print, failed.append, ConnectionError)


def test_what_a_worker_had_that_is_given_up_goes_to_others(caplog):
    supervisor = supervised(queue.Queue())
    first, second = supervisor.workers
    supervisor.dispatcher.add(batch(1, 3))
    assert [request.number for request in second.open] == [1]
    supervisor._replace_the_silent()
    assert "no host has room; the run goes on with 1: worker 0" in caplog.text
    assert (supervisor.workers, second.open, supervisor.dispatcher.is_there(second)) == ([first], [], False)
    for _ in range(3):
        supervisor.dispatcher.answered(first)
    assert first.given == [(1, 0), (1, 1), (1, 2)]


def test_time_in_which_this_process_was_stopped_is_not_the_workers():
    """As when a laptop sleeps: nobody is killed for his silence, and no answer is missed."""
    arrived = Stopped()
    supervisor = supervised(arrived, Worker)
    supervisor.look_seconds = 0.01
    arrived.after = lambda: setattr(supervisor, "_closing", True)
    for worker in supervisor.workers:
        worker.since = 0.0
    now = time.monotonic()
    supervisor._run()
    assert all(worker.since > now for worker in supervisor.workers)
    asks = SimpleNamespace(_answers=Stopped(), supervisor=supervisor, _no_answer=lambda: GeneratorError("too late"))
    assert RemoteGenerator._receive(asks, 0.01)
    asks._answers = queue.Queue()
    with pytest.raises(GeneratorError, match="too late"):
        RemoteGenerator._receive(asks, 0.01)
