"""One queue over batches: prompts of the next requests take the places that ended completions leave.

For weights that are loaded in flight only: the engine holds one version at a time, and all that is under way goes on
with the newest one.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from async_rlhf.generation.messages import Reply, Request
from async_rlhf.types import Prompt, Sample

if TYPE_CHECKING:
    from async_rlhf.generation.worker import RequestHandler


@dataclass
class _Open:
    """A request that has begun."""

    request: Request
    started: float
    version: int
    found: dict[int, tuple[Sample, ...]] = field(default_factory=dict)
    """Completions, by the prompt's number in the request."""


def serve(
    handler: RequestHandler, requests: queue.SimpleQueue[Request | None], answer: Callable[[Reply], None]
) -> None:
    """Answer requests until None comes: in flight with others, or one after the other."""
    request = requests.get()
    while request is not None:
        if request.in_flight:
            request = Stream(handler, requests, answer).run(request)
        else:
            answer(handler.answer(request))
            request = requests.get()


class Stream:
    """Answers requests whose completions are under way together.

    Args:
        handler: has the engine and the weights.
        requests: more requests, or None for the end.
        answer: called with each reply as soon as it is complete.
    """

    def __init__(
        self, handler: RequestHandler, requests: queue.SimpleQueue[Request | None], answer: Callable[[Reply], None]
    ) -> None:
        self.handler, self.requests, self.answer = handler, requests, answer
        self._waiting: deque[tuple[_Open, int]] = deque()
        """Prompts that have no place yet: the request, and the prompt's number in it."""
        self._taken: dict[int, tuple[_Open, int]] = {}
        """The same for prompts that are under way, by the engine's number."""
        self._numbers = count()
        self._next: Request | None = None
        self._ended = False

    def run(self, request: Request) -> Request | None:
        """Answer this request, and those that come meanwhile and are in flight too.

        Returns:
            The next request, which may have to wait for another one; None for the end.
        """
        self._put(request)
        handler = self.handler
        while self._waiting:  # the engine ends when nothing is under way, even if more has come since it asked
            handler.engine.refresh = lambda: handler.load(handler.weights.newest)
            self._numbers = count()
            for number, samples in handler.engine.stream(self._more):
                self._note(*self._taken.pop(number), samples)
        return self._next if self._ended else self.requests.get()

    def _put(self, request: Request) -> None:
        opened = _Open(request, 0.0, -1)
        self._waiting.extend((opened, number) for number in range(len(request.prompts)))

    def _more(self, places: int) -> Sequence[Prompt]:
        """The next prompts, for as many places."""
        while not self._ended and not self.requests.empty():
            request = self.requests.get()
            if request is None or not request.in_flight:
                self._next, self._ended = request, True
            else:
                self._put(request)
        # A request may be younger than the weights at the last step, and must not be drawn by older ones than its own.
        if self._waiting and not self._taken:
            self.handler.expect(self._waiting[0][0].request)
        self.handler.load(self.handler.weights.newest)
        prompts = []
        for _ in range(min(places, len(self._waiting))):
            if self._waiting[0][0].request.after > self.handler.engine.version:
                break  # its weights are on their way
            opened, number = self._waiting.popleft()
            if number == 0:
                opened.started, opened.version = time.monotonic(), self.handler.engine.version
            self._taken[next(self._numbers)] = opened, number
            prompts.append(opened.request.prompts[number])
        return prompts

    def _note(self, opened: _Open, number: int, samples: tuple[Sample, ...]) -> None:
        """Keep a prompt's completions; answer if they are the last of their request."""
        opened.found[number] = samples
        request = opened.request
        if len(opened.found) == len(request.prompts):
            completions = [opened.found[i] for i in range(len(request.prompts))]
            under_way = [each.version for each, _ in self._taken.values()]
            # Its other prompts may wait, and have no version yet.
            begun = [each.version for each, _ in self._waiting if each.version >= 0]
            self.answer(self.handler.reply(request, completions, opened.version, opened.started, opened.started))
            self.handler.forget_before(min([*under_way, *begun, self.handler.engine.version]))
