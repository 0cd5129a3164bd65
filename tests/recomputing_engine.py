"""An engine from outside the package: it keeps no cache, and computes all tokens of a completion anew for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor

from async_rlhf.config.engines import EngineSpec
from async_rlhf.generation.audit import probe_logprobs
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import Completions, Occupancy, SamplingParams
from async_rlhf.generation.sampling import draw_tokens, row_uniforms, truncated
from async_rlhf.models.weights import digests, named_weights
from async_rlhf.types import Prompt, Sample

VARIABLE = "RECOMPUTING_ENGINE_RUNS_ON"


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
        return [tuple(self._answer(prompt, k) for k in range(self.params.samples_per_prompt)) for prompt in prompts]

    def stream(self, more: Callable[[int], Sequence[Prompt]]) -> Iterator[tuple[int, tuple[Sample, ...]]]:
        numbers = count()
        while prompts := more(1):
            yield next(numbers), self.generate(prompts)[0]

    @torch.no_grad()
    def _answer(self, prompt: Prompt, sample: int) -> Sample:
        params = self.params
        tokens, logprobs, versions, stops = list[int](), list[float](), list[int](), params.stop_token_ids
        uniforms_T = torch.from_numpy(row_uniforms(params.seed, [prompt], sample + 1, params.response_length)[0, -1])
        while len(tokens) < params.response_length and not (tokens and tokens[-1] in stops):
            self._heartbeat()
            if self.refresh is not None:
                self.refresh()
            logits_1V = self.model(torch.tensor([[*prompt.tokens, *tokens]])).logits[:, -1]
            logits_1V = truncated(logits_1V, params.distribution)
            token_1, logprob_1 = draw_tokens(logits_1V, uniforms_T[len(tokens)][None], params.temperature)
            tokens.append(int(token_1))
            logprobs.append(float(logprob_1))
            versions.append(self.version)
        return Sample.answer(prompt.tokens, tokens, logprobs, versions, "stop" if tokens[-1] in stops else "length")


def environment(devices: Sequence[str]) -> dict[str, str]:
    """The variable that shows in which environment a worker was started."""
    return {VARIABLE: devices[0]}


ENGINE = EngineSpec("recomputing_engine:RecomputingEngine", frozenset({"redraw"}), coldest=0.1)
IN_A_FRESH_INTERPRETER = EngineSpec(ENGINE.make, ENGINE.supports, environment="recomputing_engine:environment")
MISSING = EngineSpec(ENGINE.make, check=lambda: "needs a part that nobody has")
