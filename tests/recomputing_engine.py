"""An engine from outside the package: it keeps no cache, and computes all tokens of a completion anew for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from async_rlhf.config.engines import EngineSpec
from async_rlhf.generation.audit import probe_logprobs
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import Completions, Occupancy, SamplingParams
from async_rlhf.generation.sampling import draw_tokens, row_uniforms
from async_rlhf.models.truncation import truncated
from async_rlhf.models.weights import digests, named_weights
from async_rlhf.types import Prompt, Sample

VARIABLE = "RECOMPUTING_ENGINE_RUNS_ON"


class Row(NamedTuple):
    """A completion under way."""

    prompt: Prompt
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


class RecomputingEngine:
    """See :class:`~async_rlhf.generation.protocol.Engine`."""

    def __init__(self, spec: ModelSpec, params: SamplingParams) -> None:
        self.model = spec.model_class._from_config(spec.config, dtype=spec.dtype).eval()
        self.params, self.version, self.refresh = params, -1, None
        self.occupancy = Occupancy()
        self._heartbeat: Callable[[], None] = lambda: None

    def heartbeat_with(self, heartbeat: Callable[[], None]) -> None:
        self._heartbeat = heartbeat

    def load(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, str]:
        held = named_weights(self.model)
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(tensors[name])
        self.version = version
        return digests(held)

    def probe(self) -> list[float]:
        return probe_logprobs(self.model)

    def close(self) -> None:
        """There is nothing to end."""

    def generate(self, prompts: Sequence[Prompt], progress: Callable[[int], None] | None = None) -> Completions:
        left = iter([prompts])
        found = dict(self.stream(lambda places: next(left, ())))
        return [found[number] for number in range(len(prompts))]

    @torch.no_grad()
    def stream(self, more: Callable[[int], Sequence[Prompt]]) -> Iterator[tuple[int, tuple[Sample, ...]]]:
        numbers, open_rows = count(), dict[int, list[Row]]()
        while True:
            room = self.params.batch_size // self.params.samples_per_prompt - len(open_rows)
            for prompt in more(room) if room > 0 else ():
                open_rows[next(numbers)] = [Row(prompt, [], [], []) for _ in range(self.params.samples_per_prompt)]
            if not open_rows:
                return
            if self.refresh is not None:
                self.refresh()
            for number in list(open_rows):
                for sample, row in enumerate(open_rows[number]):
                    if not self._has_ended(row):
                        self._draw(row, sample)
                if all(map(self._has_ended, open_rows[number])):
                    yield number, tuple(map(self._sample, open_rows.pop(number)))

    def _draw(self, row: Row, sample: int) -> None:
        self._heartbeat()
        logits_1V = self.model(torch.tensor([[*row.prompt.tokens, *row.tokens]])).logits[:, -1]
        params, position = self.params, len(row.tokens)
        uniforms_1 = torch.from_numpy(row_uniforms(params.seed, [row.prompt], sample + 1, position + 1)[0, -1:, -1])
        token_1, logprob_1 = draw_tokens(truncated(logits_1V, params.distribution), uniforms_1, params.temperature)
        row.tokens.append(int(token_1))
        row.logprobs.append(float(logprob_1))
        row.versions.append(self.version)

    def _has_ended(self, row: Row) -> bool:
        return len(row.tokens) == self.params.response_length or row.tokens[-1:] == list(self.params.stop_token_ids)

    def _sample(self, row: Row) -> Sample:
        reason = "stop" if row.tokens[-1] in self.params.stop_token_ids else "length"
        return Sample.answer(row.prompt.tokens, row.tokens, row.logprobs, row.versions, reason)


def environment(devices: Sequence[str]) -> dict[str, str]:
    """The variable that shows in which environment a worker was started."""
    return {VARIABLE: devices[0]}


ENGINE = EngineSpec("recomputing_engine:RecomputingEngine", frozenset({"redraw"}), coldest=0.1)
IN_A_FRESH_INTERPRETER = EngineSpec(ENGINE.make, ENGINE.supports, environment="recomputing_engine:environment")
MISSING = EngineSpec(ENGINE.make, check=lambda: "needs a part that nobody has")
