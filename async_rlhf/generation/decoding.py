"""The decode loop: completions under way have places, and as they end, further prompts may take these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from async_rlhf.generation.decode_cache import Past, add_rows, forget_left, keep_rows, past_of
from async_rlhf.generation.protocol import Occupancy, SamplingParams
from async_rlhf.generation.sampling import draw_tokens, row_uniforms
from async_rlhf.models.truncation import truncated
from async_rlhf.types import Answer, FinishReason, Prompt, Sample, Turn

_SPARE = 8
"""Columns of the cache that no row uses any more, from which they are worth a copy to drop them."""

_OF_ROWS = ("places_B", "steps_B", "lengths_B", "tokens_B")

Complete = tuple[int, tuple[Sample, ...]]
"""A prompt's number, and its completions."""


class Model(Protocol):
    """What the loop needs of an engine."""

    params: SamplingParams
    version: int
    """Of the weights, which may change between two steps."""
    refresh: Callable[[], None] | None
    occupancy: Occupancy
    """To which every step is added."""
    routes: list[Tensor]
    """Of the tokens of each row that were computed last, if ``params`` ask for it: (T, L, E)."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def prefill(
        self, rows: Sequence[Sequence[int]], samples: int, pasts: Sequence[Past | None] = ()
    ) -> tuple[Tensor, DynamicCache]:
        """Logits (B, V) after each row of tokens, repeated for its samples, and their cache, padded on the left;
        perhaps computed from what there is of the rows."""

    def step(self, tokens_B: Tensor, lengths_B: Tensor, columns: int, cache: DynamicCache) -> Tensor:
        """Logits (B, V) after one more token of each row, which then has ``lengths_B`` in the last columns."""


@dataclass
class _Asked:
    """A prompt, and those of its completions that have ended."""

    number: int
    prompt: Prompt
    ended: dict[int, Sample] = field(default_factory=dict)


@dataclass
class _Rows:
    """Rows of one cache, in its order. Tensors are (B,), on the device."""

    places: list[int]
    places_B: Tensor
    steps_B: Tensor
    """Tokens drawn so far."""
    lengths_B: Tensor
    """Tokens in the cache."""
    tokens_B: Tensor
    """Drawn last; not yet in the cache."""
    columns: int
    """Of the cache: tokens of its longest row, and padding on the left of the others."""
    cache: DynamicCache
    version: int | None
    """Of the weights that computed the cache; None if they were several."""

    def keep(self, stays: Sequence[bool], device: torch.device) -> None:
        """Drop the other rows."""
        kept = keep_rows(self.cache, stays, device)
        self.places = [self.places[row] for row in kept.tolist()]
        kept_B = kept.to(device, non_blocking=True)
        for name in _OF_ROWS:
            setattr(self, name, getattr(self, name)[kept_B])

    def add(self, other: _Rows) -> None:
        """Append rows. Only for caches that only grow."""
        add_rows(self.cache, other.cache)
        self.columns = max(self.columns, other.columns)
        self.version = self.version if self.version == other.version else None
        self.places += other.places
        for name in _OF_ROWS:
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))


def _repeats(rows: Sequence[tuple[int, ...]]) -> int:
    """n, if the rows are some different ones n times each, such as the first turns of a prompt's episodes; else 1."""
    lengths = {len(list(group)) for _, group in groupby(rows)}
    return lengths.pop() if len(lengths) == 1 else 1


class Decoding:
    """Decodes prompts in a fixed number of places.

    Args:
        model: computes; its weights may change between two steps.
        places: most completions under way; at least K.
        refilled: whether further prompts take the places of completions that have ended, as long as others are under
            way; else only when all have ended. Only for caches to which rows can be added.
        keeps_pasts: whether answers to turns come with what the cache has of them; only for such caches, too.
    """

    def __init__(self, model: Model, places: int, refilled: bool = False, keeps_pasts: bool = False) -> None:
        self.model, self.params, self.refilled = model, model.params, refilled
        most, device = self.params.response_length, model.device
        self._free = list(range(places))
        self._taken = 0
        self._of: dict[int, tuple[_Asked, int]] = {}
        """By place: the prompt, and the completion's number."""
        self._uniforms_RT = torch.zeros(places, most, dtype=torch.float64, device=device)
        self._tokens_RT = torch.zeros(places, most, dtype=torch.long, device=device)
        self._logprobs_RT = torch.zeros(places, most, device=device)
        self._versions_RT = np.zeros((places, most), np.int32)
        self._steps_R = np.zeros(places, np.int64)
        self._limits_R = np.full(places, most)
        self._stops = torch.tensor(self.params.stop_token_ids, device=device)
        sizes = () if self.params.routes is None else (most, self.params.routes.layers, self.params.routes.per_token)
        self._routes_RTLE = torch.zeros(places, *sizes, dtype=torch.int16, device=device)
        """Of drawn tokens that have been read; those of prompts are in the next."""
        self._prompt_routes: dict[int, Tensor] = {}
        """By place."""
        self._ended: list[tuple[int, bool]] = []
        """Places of completions that have ended, and whether by a stop token."""
        self._rows: _Rows | None = None
        self._keeps_pasts, self._pasts = keeps_pasts, dict[int, Past]()
        """By place."""

    def run(self, more: Callable[[int], Sequence[Prompt]]) -> Iterator[Complete]:
        """Decode until there is nothing left.

        Args:
            more: given for how many prompts there are places, returns at most as many; none if there are none now. It
                may load other weights.

        Yields:
            The number of each prompt, in the order in which they were taken, and its K completions, as soon as all of
            them have ended.
        """
        while True:
            yield from self._admit(more)
            if self._rows is None:
                return
            logits_BV = self._next_logits(self._rows)
            self.model.occupancy.taken += len(self._rows.places)
            self.model.occupancy.places += len(self._steps_R)
            self._draw(self._rows, logits_BV)
            if not self._rows.places:
                self._rows = None
            if self.refilled or self._rows is None:
                yield from self._deliver()

    def _admit(self, more: Callable[[int], Sequence[Prompt]]) -> Iterator[Complete]:
        """Begin prompts for which there are places, and draw their first tokens."""
        while self._rows is None or self.refilled:
            room = len(self._free) // self.params.samples_per_prompt
            prompts = more(room) if room else ()
            if not prompts:
                return
            begun = self._begin(prompts)
            if begun.places and self._rows is None:
                self._rows = begun
            elif begun.places:
                assert self._rows is not None
                self._rows.add(begun)
            if self.refilled or self._rows is None:
                yield from self._deliver()

    def _begin(self, prompts: Sequence[Prompt]) -> _Rows:
        samples, device = self.params.samples_per_prompt, self.model.device
        count = len(prompts) * samples
        places, self._free = self._free[:count], self._free[count:]
        for first, prompt in zip(range(0, count, samples), prompts, strict=True):
            asked = _Asked(self._taken, prompt)
            self._taken += 1
            self._of |= {place: (asked, number) for number, place in enumerate(places[first : first + samples])}
        uniforms = row_uniforms(self.params.seed, prompts, samples, self.params.response_length)
        places_B = torch.tensor(places).to(device)
        self._uniforms_RT[places_B] = torch.from_numpy(uniforms).reshape(count, -1).to(device)
        self._steps_R[places] = 0
        limits = [prompt.limit if isinstance(prompt, Turn) else self.params.response_length for prompt in prompts]
        self._limits_R[places] = np.repeat(limits, samples)
        lengths = [len(prompt.tokens) for prompt in prompts]
        lengths_B = torch.tensor(lengths).repeat_interleave(samples).to(device)
        rows = [prompt.tokens for prompt in prompts]
        alike = _repeats(rows) if isinstance(prompts[0], Turn) else 1
        pasts = [prompt.past for prompt in prompts if isinstance(prompt, Turn)]
        logits_BV, cache = self.model.prefill(rows[::alike], samples * alike, pasts[::alike])
        if self.params.routes is not None:
            repeated = [routes_TLE for routes_TLE in self.model.routes for _ in range(samples * alike)]
            self._prompt_routes |= dict(zip(places, repeated, strict=True))
        none_B = torch.zeros_like(places_B)
        begun = _Rows(places, places_B, none_B, lengths_B, none_B, max(lengths), cache, self.model.version)
        self._draw(begun, logits_BV)
        return begun

    def _draw(self, rows: _Rows, logits_BV: Tensor) -> None:
        """Draw a token for each row, and drop the rows that have ended."""
        params, at = self.params, (rows.places_B, rows.steps_B)
        logits_BV = truncated(logits_BV, params.distribution)
        tokens_B, logprobs_B = draw_tokens(logits_BV, self._uniforms_RT[at], params.temperature)
        self._tokens_RT[at], self._logprobs_RT[at] = tokens_B, logprobs_B
        self._versions_RT[rows.places, self._steps_R[rows.places]] = self.model.version
        self._steps_R[rows.places] += 1
        rows.tokens_B, rows.steps_B = tokens_B, rows.steps_B + 1
        stopped = torch.isin(tokens_B, self._stops).tolist()  # all that the host waits for
        full = (self._steps_R[rows.places] == self._limits_R[rows.places]).tolist()
        ended = [stop or last for stop, last in zip(stopped, full, strict=True)]
        if any(ended):
            for row in np.flatnonzero(ended).tolist() if self._keeps_pasts else ():
                place = rows.places[row]
                self._pasts[place] = past_of(rows.cache, row, self._length(place) - 1, rows.version)
            self._ended += [(rows.places[row], stopped[row]) for row, now in enumerate(ended) if now]
            rows.keep([not now for now in ended], self.model.device)

    def _next_logits(self, rows: _Rows) -> Tensor:
        """Logits (B, V) after the tokens that were drawn last, by the newest weights that :attr:`refresh` finds."""
        model = self.model
        if model.refresh is not None:
            model.refresh()
        rows.lengths_B = rows.lengths_B + 1
        if model.version != rows.version:
            so_far = self._so_far(rows)
            rows.columns, rows.version = max(map(len, so_far)), model.version
            logits_BV, rows.cache = model.prefill(so_far, 1)
            return logits_BV
        if self.refilled:
            longest = max(self._length(place) for place in rows.places) - 1  # the last one is not in the cache
            if rows.columns - longest >= _SPARE:
                forget_left(rows.cache, longest)
                rows.columns = longest
        rows.columns += 1
        logits_BV = model.step(rows.tokens_B, rows.lengths_B, rows.columns, rows.cache)
        if self.params.routes is not None:
            self._routes_RTLE[rows.places_B, rows.steps_B - 1] = torch.cat(model.routes).short()
        return logits_BV

    def _so_far(self, rows: _Rows) -> list[tuple[int, ...]]:
        """Prompt and drawn tokens of each row."""
        drawn = self._tokens_RT[rows.places_B].tolist()
        return [
            (*self._of[place][0].prompt.tokens, *tokens[: self._steps_R[place]])
            for place, tokens in zip(rows.places, drawn, strict=True)
        ]

    def _length(self, place: int) -> int:
        """Tokens of prompt and completion so far."""
        return len(self._of[place][0].prompt.tokens) + int(self._steps_R[place])

    def _deliver(self) -> Iterator[Complete]:
        """Free the places of completions that have ended; yield the prompts that have all of theirs."""
        if not self._ended:
            return
        places = [place for place, _ in self._ended]
        places_B = torch.tensor(places).to(self.model.device)
        longest = int(self._steps_R[places].max())
        tokens_RT = self._tokens_RT[places_B, :longest].cpu().numpy()
        logprobs_RT = self._logprobs_RT[places_B, :longest].cpu().numpy()
        complete = []
        for (place, stopped), tokens, logprobs in zip(self._ended, tokens_RT, logprobs_RT, strict=True):
            asked, number = self._of.pop(place)
            asked.ended[number] = self._sample(asked.prompt, place, tokens, logprobs, stopped)
            if len(asked.ended) == self.params.samples_per_prompt:
                complete.append((asked.number, tuple(asked.ended[i] for i in range(len(asked.ended)))))
        self._free += places
        self._ended = []
        yield from complete

    def _sample(self, prompt: Prompt, place: int, tokens: np.ndarray, logprobs: np.ndarray, stopped: bool) -> Sample:
        end = self._steps_R[place]
        finite = np.isfinite(logprobs[:end])
        versions = self._versions_RT[place, :end].copy()
        if not finite.all():
            version = versions[finite.argmin()]
            raise FloatingPointError(f"the logits of weights version {version} are not finite")
        finish: FinishReason = "stop" if stopped else "length"
        routes_TLE = self._routes(place, len(prompt.tokens) + int(end))
        drawn = prompt.tokens, tokens[:end], logprobs[:end], versions, finish, routes_TLE
        if place in self._pasts:
            return replace(Answer.answer(*drawn), past=self._pasts.pop(place))
        return Sample.answer(*drawn)

    def _routes(self, place: int, length: int) -> np.ndarray | None:
        """(T, L, E), of a prompt and its completion that has ended; see :attr:`Sample.routes_TLE`."""
        shape, read = self.params.routes, int(self._steps_R[place]) - 1  # the last one has only been drawn
        if shape is None:
            return None
        routes_TLE = torch.cat([self._prompt_routes.pop(place), self._routes_RTLE[place, :read]])
        return shape.whole(routes_TLE.cpu().numpy().astype(shape.dtype), length)
