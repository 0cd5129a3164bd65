"""The engine on transformers' models: a decode loop with a KV cache.

A loop of our own, because ``generate`` draws from one stream of random numbers for the whole batch, keeps every
logit in order to return log-probabilities, and goes on computing rows that have finished.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from async_rlhf.generation.audit import probe_logprobs
from async_rlhf.generation.decode_cache import Past, go_on_from, join, only_grows
from async_rlhf.generation.decoding import Decoding
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import Completions, Occupancy, SamplingParams
from async_rlhf.models.routing import recorded_routes
from async_rlhf.models.weights import digests, named_weights
from async_rlhf.system.determinism import prepare_deterministic
from async_rlhf.types import Prompt, Sample, Turn

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Prompt tokens in one forward pass, padding included: few enough for the activations to fit a CPU's caches, enough to
keep a GPU busy. Small groups of prompts of similar length also need less padding."""


def make(spec: ModelSpec, params: SamplingParams) -> TransformersEngine:
    """The engine of a generator process; its weights must still be loaded."""
    if spec.deterministic and "cuda" in spec.device:
        prepare_deterministic()
    with torch.device(spec.device):
        model = spec.model_class._from_config(spec.config, dtype=spec.dtype)
    return TransformersEngine(model.eval(), params, version=-1, autocast=spec.autocast)


def _next(chunks: Iterator[Sequence[Prompt]], places: int) -> Sequence[Prompt]:
    """The next chunk, which fits its places; nothing after the last."""
    return next(chunks, ())


class TransformersEngine:
    """Samples from any causal language model of transformers, in this process.

    Args:
        model: used in place, so training it changes what is sampled.
        params: how to sample.
        version: number of the weights that the model holds now.
        autocast: compute in this type if the weights are float32; None computes in the weights' type.
        device: where it computes, if that is not where the weights are kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        params: SamplingParams,
        version: int = 0,
        autocast: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.model = model
        self._device = device
        self.params = params
        self.version = version
        self.autocast = autocast
        self.refresh: Callable[[], None] | None = None
        """Called between two steps of decoding. It may load other weights; what was sampled so far is kept."""
        self.occupancy = Occupancy()
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self.adds_rows = only_grows(DynamicCache(config=model.config))
        """Whether rows can be added to a cache."""
        self.routes: list[Tensor] = []
        """Where the tokens that were computed last were sent, if ``params`` ask for it: of each row (T, L, E), padding
        left out."""
        self.keeps_pasts = self.adds_rows
        """Whether turns that are all decoded at once go on from what was computed for the last ones."""
        self._prefill_options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self.model.device if self._device is None else self._device

    def heartbeat_with(self, heartbeat: Callable[[], None]) -> None:
        """Call ``heartbeat`` before every layer of every forward pass: a sign of life, also within a long one."""
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList):
                for layer in module:
                    layer.register_forward_pre_hook(lambda *_: heartbeat())

    def load(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, str]:
        """Copy new weights into the model. The digests are of what the model holds afterwards, in the precision of
        ``tensors``: a parameter that the model keeps in a wider type holds the same numbers.
        """
        held = named_weights(self.model)
        if held.keys() != tensors.keys():
            differing = ", ".join(sorted(held.keys() ^ tensors.keys())[:5])
            raise ValueError(f"weights of version {version} do not fit the model; differing tensors: {differing}")
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(tensors[name])
        self.version = version
        return digests({name: tensor.to(tensors[name].dtype) for name, tensor in held.items()})

    def probe(self) -> list[float]:
        """See :func:`~async_rlhf.generation.audit.probe_logprobs`."""
        return probe_logprobs(self.model, self.autocast)

    def close(self) -> None:
        """Do nothing."""

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], progress: Callable[[int], None] | None = None) -> Completions:
        """K completions for each prompt, in the order of the prompts.

        Args:
            prompts: any number; decoded ``batch_size`` completions at a time, prompts of similar length together.
            progress: called with the number of prompts done so far.
        """
        samples = self.params.samples_per_prompt
        per_chunk = max(1, self.params.batch_size // samples)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
        # What goes on from a past does not compute it again, and so would not know its routes.
        keeps = self.keeps_pasts and len(order) <= per_chunk and self.params.routes is None
        keeps = keeps and all(isinstance(each, Turn) for each in prompts)
        completions: dict[int, tuple[Sample, ...]] = {}
        with self._evaluating():
            for start in range(0, len(order), per_chunk):
                chunk = order[start : start + per_chunk]
                once = iter([[prompts[i] for i in chunk]])
                decoding = Decoding(self, len(chunk) * samples, keeps_pasts=keeps)
                for number, found in decoding.run(partial(_next, once)):
                    completions[chunk[number]] = found
                if progress is not None:
                    progress(len(completions))
        return [completions[i] for i in range(len(prompts))]

    @torch.no_grad()
    def stream(self, more: Callable[[int], Sequence[Prompt]]) -> Iterator[tuple[int, tuple[Sample, ...]]]:
        """See :class:`~async_rlhf.generation.protocol.Engine`.

        A model whose cache has a sliding window or a state takes further prompts only when all completions have ended.
        """
        samples = self.params.samples_per_prompt
        decoding = Decoding(self, max(samples, self.params.batch_size // samples * samples), self.adds_rows)
        with self._evaluating():
            yield from decoding.run(more)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)

    def prefill(
        self, rows: Sequence[Sequence[int]], samples: int, pasts: Sequence[Past | None] = ()
    ) -> tuple[Tensor, DynamicCache]:
        """Run each row of tokens once, padded on the left, and repeat its state for its samples.

        All rows of a pass run as many tokens: the fewest of which every one has a past for the rest.

        Returns:
            Logits (B, V) for the next token, and the cache of these tokens.
        """
        device = self.device
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        tokens_PT = torch.zeros(len(rows), longest, dtype=torch.long)
        mask_PT = torch.ones(len(rows), longest, dtype=torch.long)
        for i, row in enumerate(rows):
            tokens_PT[i, longest - lengths[i] :] = torch.tensor(row)
            mask_PT[i, : longest - lengths[i]] = 0
        tokens_PT, mask_PT = tokens_PT.to(device), mask_PT.to(device)
        positions_PT = (mask_PT.cumsum(dim=1) - 1).clamp(min=0)

        known = [past or Past([], None) for past in pasts or [None] * len(rows)]
        new = [n - min(past.tokens(self.version), n - 1) for n, past in zip(lengths, known, strict=True)]
        at_once = len(rows)
        if self.adds_rows:
            at_once = max(1, PREFILL_TOKENS.get(device.type, at_once * longest) // max(new))
        caches, logits, routes = [], [], list[Tensor]()
        for first in range(0, len(rows), at_once):
            part = slice(first, first + at_once)
            columns, fed = max(lengths[part]), max(new[part])
            caches.append(DynamicCache(config=self.model.config))
            go_on_from(known[part], [n - fed for n in lengths[part]], columns - fed, caches[-1])
            inputs = tokens_PT[part, -fed:], mask_PT[part, -columns:], positions_PT[part, -fed:]
            logits.append(self._forward(*inputs, caches[-1], **self._prefill_options))
            routes += [row_TLE[-n:] for row_TLE, n in zip(self.routes, lengths[part], strict=False)]
        self.routes = routes
        for past in known:
            past.layers = []
        return torch.cat(logits).repeat_interleave(samples, dim=0), join(caches, len(rows), samples)

    def step(self, tokens_B: Tensor, lengths_B: Tensor, columns: int, cache: DynamicCache) -> Tensor:
        """Logits (B, V) after one more token of each row.

        Args:
            tokens_B: these tokens.
            lengths_B: tokens of each row with this one, in the last columns.
            columns: of the cache, with the one that it gets now.
            cache: of the tokens before.
        """
        from_end_T = torch.arange(columns, 0, -1, device=tokens_B.device)
        mask_BT = (from_end_T <= lengths_B[:, None]).long()
        return self._forward(tokens_B[:, None], mask_BT, lengths_B[:, None] - 1, cache)

    def _forward(
        self, tokens_BT: Tensor, mask_BT: Tensor, positions_BT: Tensor, cache: DynamicCache, **options: int
    ) -> Tensor:
        """Logits (B, V) after the last of the given tokens, which are added to the cache."""
        inputs = {"input_ids": tokens_BT, "attention_mask": mask_BT}
        if self._takes_positions:
            inputs["position_ids"] = positions_BT
        autocast = torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with autocast, recorded_routes(self.model, self.params.routes) as found:
            output = self.model(**inputs, past_key_values=cache, use_cache=True, **options)
        self.routes = [row_TLE for routes_NLE in found for row_TLE in routes_NLE.unflatten(0, tokens_BT.shape)]
        return output.logits[:, -1]
