"""The engine on transformers' models: a decode loop with a KV cache.

A loop of our own, because ``generate`` draws from one stream of random numbers for the whole batch, keeps every
logit in order to return log-probabilities, and goes on computing rows that have finished.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from async_rlhf.config.base import require
from async_rlhf.generation import decode_cache
from async_rlhf.generation.audit import probe_logprobs
from async_rlhf.generation.decode_cache import Past
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import Completions, Occupancy, SamplingParams
from async_rlhf.generation.sampling import draw_tokens, row_uniforms, truncated
from async_rlhf.models.forward import evaluating
from async_rlhf.models.frozen_models import rounded_linear
from async_rlhf.models.publish import are_folded
from async_rlhf.models.routing import recorded_routes
from async_rlhf.models.weights import digests, named_weights
from async_rlhf.system.determinism import prepare_deterministic
from async_rlhf.types import FinishReason, Prompt, Sample, SampleWithPast, Turn

logger = logging.getLogger(__name__)

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Prompt tokens in one forward pass, padding included: few enough for the activations to fit a CPU's caches, enough to
keep a GPU busy. Small groups of prompts of similar length also need less padding."""
_SPARE = 8
"""Columns of the cache that no row uses any more, from which they are worth a copy to drop them."""

_CACHES = "past_key_values", "cache"
"""What models call the argument with keys and values: those of transformers before 5.24, and from then on."""

_OF_ROWS = ("places_B", "steps_B", "lengths_B", "tokens_B")

Complete = tuple[int, tuple[Sample, ...]]
"""A prompt's number, and its completions."""


def make(spec: ModelSpec, params: SamplingParams) -> TransformersEngine:
    """The engine of a generator process; its weights must still be loaded."""
    if spec.deterministic and "cuda" in spec.device:
        prepare_deterministic()
    device = torch.device(spec.device)
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # else whatever asks for no GPU by name would open a context on the first, too
    with device:
        model = spec.model_class._from_config(spec.config, dtype=spec.dtype)
    return TransformersEngine(model.eval(), params, version=-1, autocast=spec.autocast)


class TransformersEngine:
    """Samples from any causal language model of transformers, in this process.

    Args:
        model: used in place, so training it changes what is sampled.
        params: how to sample.
        version: number of the weights that the model holds now.
        autocast: compute in this type if the weights are in another; None computes in the weights' type.
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
        self.model, self.params, self.version = model, params, version
        self.autocast, self._device = None if autocast == model.dtype else autocast, device
        self.rounds, self.head_float32 = True, False
        """Whether weights are rounded once, instead of by autocast for every token, and whether not the head's."""
        self._samples, self._rounding = False, ExitStack()
        self._rounded = False
        self.refresh: Callable[[], None] | None = None
        """Called between two steps of decoding. It may load other weights; what was sampled so far is kept."""
        self.occupancy = Occupancy()
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._cache_name = next((name for name in _CACHES if name in accepted), None)
        takes_cache = self._cache_name is not None
        self.adds_rows = takes_cache and decode_cache.only_grows(DynamicCache(config=model.config))
        """Whether rows can be added to a cache."""
        self._computes_anew: bool | None = not takes_cache or (False if self.adds_rows else None)
        """Whether no cache can be used; None if that has not been tried yet."""
        self._warned, self._why_anew = False, ""
        self._can_share: bool | None = None
        """Whether the model can read keys and values that rows share; None if that has not been tried yet."""
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
        self._unround()
        held = named_weights(self.model)
        if held.keys() != tensors.keys():
            differing = ", ".join(sorted(held.keys() ^ tensors.keys())[:5])
            raise ValueError(f"weights of version {version} do not fit the model; differing tensors: {differing}")
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(tensors[name])
        self.version = version
        rounded = {name: tensor.to(tensors[name].dtype) for name, tensor in held.items()}
        return digests(rounded, folded=are_folded(tensors))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Within, the policy samples; weights change by :meth:`load` alone, and are rounded once until then. It can be
        entered again within.
        """
        if self._samples:
            yield
            return
        self._samples = True
        with evaluating(self.model):
            try:
                yield
            finally:
                self._samples = False
                self._unround()

    def _computing(self) -> torch.autocast:
        """What a forward pass of sampling needs around it."""
        if self._samples and self.rounds and self.autocast is not None and not self._rounded:
            self._rounding.enter_context(rounded_linear(self.model, self.autocast, self.head_float32))
            self._rounded = True
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    def _unround(self) -> None:
        self._rounding.close()
        self._rounded = False

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
        completions, waiting = dict[int, tuple[Sample, ...]](), list[Sequence[Prompt]]()
        with self.sampling():
            for start in range(0, len(order), per_chunk):
                chunk = order[start : start + per_chunk]
                waiting.append([prompts[i] for i in chunk])
                decoding = Decoding(self, len(chunk) * samples, keeps_pasts=keeps)
                for number, drawn in decoding.run(lambda places: waiting.pop() if waiting else ()):
                    completions[chunk[number]] = drawn
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
        with self.sampling():
            yield from decoding.run(more)

    def prefill(
        self, rows: Sequence[Sequence[int]], samples: int, pasts: Sequence[Past | None] = (), shared: bool = False
    ) -> tuple[Tensor, DynamicCache]:
        """Run each row of tokens once, padded on the left, and repeat its state for its samples; if it is shared, they
        go on from the same keys and values.

        All rows of a pass run as many tokens: the fewest of which every one has a past for the rest.

        Returns:
            Logits (B, V) for the next token, and the cache of these tokens.
        """
        if self._computes_anew is None:
            self._computes_anew = not self._cache_is_right()
        if self._computes_anew and not self._warned:
            self._warned = True
            logger.warning("WARNING: no cache can be used%s; each token computes its row anew, slowly", self._why_anew)
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
        size = len(rows)
        if self.adds_rows:
            size = max(1, PREFILL_TOKENS.get(device.type, size * longest) // max(new))
        caches, logits, routes = [], [], list[Tensor]()
        for first in range(0, len(rows), size):
            part = slice(first, first + size)
            columns, fed = max(lengths[part]), max(new[part])
            caches.append(decode_cache.TokenCache() if self._computes_anew else DynamicCache(config=self.model.config))
            decode_cache.go_on_from(known[part], [n - fed for n in lengths[part]], columns - fed, caches[-1])
            tokens, mask, positions = tokens_PT[part, -fed:], mask_PT[part, -columns:], positions_PT[part, -fed:]
            logits.append(self._forward(tokens, mask, positions, caches[-1], **self._prefill_options))
            routes += [row_TLE[-n:] for row_TLE, n in zip(self.routes, lengths[part], strict=False)]
        self.routes = routes
        for past in known:
            past.layers = []
        cache = decode_cache.join(caches, len(rows), samples, lengths if shared else None)
        return torch.cat(logits).repeat_interleave(samples, dim=0), cache

    def shares(self, lengths: Sequence[int], samples: int) -> bool:
        """Whether the samples of prompts of these lengths share a prompt's keys and values: where that is faster."""
        long = samples > 1 and sum(lengths) >= decode_cache.SHARED * len(lengths)
        if not long or not self.adds_rows or self.device.type != "cpu":
            return False
        if self._can_share is None:
            self._can_share = self._sharing_is_right()
        return self._can_share

    def _sharing_is_right(self) -> bool:
        """Whether a token after a prompt, which rows share or not, has the same logits."""
        params, self.params = self.params, replace(self.params, routes=None)
        tokens_B, lengths_B, logits = torch.tensor([3, 4, 5, 6], device=self.device), torch.tensor([4, 4, 3, 3]), []
        lengths_B = lengths_B.to(self.device)
        try:
            for shared in (False, True):
                _, cache = self.prefill([(1, 2, 3), (4, 5)], 2, shared=shared)
                logits.append(self.step(tokens_B, lengths_B, 1 if shared else 4, cache).float())
        except Exception as error:  # of any kind: the code is not ours, and prompts can be repeated
            logger.info("samples do not share their prompt's keys and values: %s", error)
            return False
        finally:
            self.params = params
        agrees = self._agree(logits[1], logits[0])
        if not agrees:
            logger.info("samples do not share their prompt's keys and values: their logits would differ")
        return agrees

    def _agree(self, logits: Tensor, expected: Tensor) -> bool:
        """Whether logits are equal up to rounding."""
        exact = self.autocast is None and self.model.dtype == torch.float32
        return bool((logits - expected).abs().max() <= (1e-4 if exact else 0.05) * expected.abs().max())

    def _cache_is_right(self) -> bool:
        """Whether two rows, one of them padded, have the logits with transformers' cache that they have without."""
        params, self.params = self.params, replace(self.params, routes=None)
        tokens_BT = torch.tensor([[1, 2, 3], [0, 4, 5]], device=self.device)
        mask_BT = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]], device=self.device)
        positions_BT = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)
        logits = []
        try:
            for cache in (decode_cache.TokenCache(), DynamicCache(config=self.model.config)):
                self._forward(tokens_BT, mask_BT[:, :3], positions_BT[:, :3], cache)
                logits.append(self._forward(tokens_BT[:, 1:2], mask_BT, positions_BT[:, 3:], cache).float())
        except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:  # models have their own ways
            self._why_anew = f" ({type(error).__name__}: {error})"
            return False
        finally:
            self.params = params
        return self._agree(logits[1], logits[0])

    def step(self, tokens_B: Tensor, lengths_B: Tensor, columns: int, cache: DynamicCache) -> Tensor:
        """Logits (B, V) after one more token of each row.

        Args:
            tokens_B: these tokens.
            lengths_B: tokens of each row with this one, in the last columns.
            columns: of the cache, with the one that it gets now, without what rows share.
            cache: of the tokens before.
        """
        from_end_T, own_B = torch.arange(columns, 0, -1, device=tokens_B.device), lengths_B
        options: dict[str, Any] = {}
        if (shared := decode_cache.prefixes_of(cache)) is not None:
            own_B, options = lengths_B - shared.lengths_B, {"prefixes": shared}
        mask_BT = (from_end_T <= own_B[:, None]).long()
        return self._forward(tokens_B[:, None], mask_BT, lengths_B[:, None] - 1, cache, **options)

    def _forward(
        self, tokens_BT: Tensor, mask_BT: Tensor, positions_BT: Tensor, cache: DynamicCache, **options: Any
    ) -> Tensor:
        """Logits (B, V) after the last of the given tokens, which are added to the cache."""
        if isinstance(cache, decode_cache.TokenCache):
            return self._anew(cache.extended(tokens_BT, mask_BT.sum(dim=1)), mask_BT.sum(dim=1))
        inputs = {"input_ids": tokens_BT, "attention_mask": mask_BT}
        if self._takes_positions:
            inputs["position_ids"] = positions_BT
        with self._computing(), recorded_routes(self.model, self.params.routes) as routes:
            output = self.model(**inputs, **{str(self._cache_name): cache}, use_cache=True, **options)
        self.routes = [row_TLE for routes_NLE in routes for row_TLE in routes_NLE.unflatten(0, tokens_BT.shape)]
        return output.logits[:, -1]

    def _anew(self, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
        """Logits (B, V) after whole rows, padded on the right."""
        require(self.params.routes is None, "router_replay", True, "must be false: this model's cache cannot be used")
        with self._computing():
            logits_BTV = self.model(input_ids=tokens_BT, use_cache=False).logits
        return logits_BTV[torch.arange(len(tokens_BT), device=tokens_BT.device), lengths_B - 1]


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
    """Of the cache: tokens of its longest row, and padding on the left of the others; without what rows share."""
    cache: DynamicCache
    version: int | None
    """Of the weights that computed the cache; None if they were several."""

    def keep(self, stays: Sequence[bool], device: torch.device) -> None:
        """Drop the other rows."""
        kept = decode_cache.keep_rows(self.cache, stays, device)
        self.places = [self.places[row] for row in kept.tolist()]
        kept_B = kept.to(device, non_blocking=True)
        for name in _OF_ROWS:
            setattr(self, name, getattr(self, name)[kept_B])

    def add(self, other: _Rows) -> None:
        """Append rows. Only for caches that only grow."""
        decode_cache.add_rows(self.cache, other.cache)
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
        engine: computes; its weights may change between two steps.
        places: most completions under way; at least K.
        refilled: whether further prompts take the places of completions that have ended, as long as others are under
            way; else only when all have ended. Only for caches to which rows can be added.
        keeps_pasts: whether answers to turns come with what the cache has of them; only for such caches, too.
    """

    def __init__(
        self, engine: TransformersEngine, places: int, refilled: bool = False, keeps_pasts: bool = False
    ) -> None:
        self.engine, self.params, self.refilled = engine, engine.params, refilled
        most, device = self.params.response_length, engine.device
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
            self.engine.occupancy.taken += len(self._rows.places)
            self.engine.occupancy.places += len(self._steps_R)
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
        samples, device = self.params.samples_per_prompt, self.engine.device
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
        shared = self.engine.shares(lengths[::alike], samples * alike)
        if self._rows is not None:  # those that are under way decide
            shared = decode_cache.prefixes_of(self._rows.cache) is not None
        logits_BV, cache = self.engine.prefill(rows[::alike], samples * alike, pasts[::alike], shared)
        if self.params.routes is not None:
            repeated = [routes_TLE for routes_TLE in self.engine.routes for _ in range(samples * alike)]
            self._prompt_routes |= dict(zip(places, repeated, strict=True))
        none_B = torch.zeros_like(places_B)
        columns = 0 if shared else max(lengths)
        begun = _Rows(places, places_B, none_B, lengths_B, none_B, columns, cache, self.engine.version)
        self._draw(begun, logits_BV)
        return begun

    def _draw(self, rows: _Rows, logits_BV: Tensor) -> None:
        """Draw a token for each row, and drop the rows that have ended."""
        params, at = self.params, (rows.places_B, rows.steps_B)
        logits_BV = truncated(logits_BV, params.distribution)
        tokens_B, logprobs_B = draw_tokens(logits_BV, self._uniforms_RT[at], params.temperature)
        self._tokens_RT[at], self._logprobs_RT[at] = tokens_B, logprobs_B
        self._versions_RT[rows.places, self._steps_R[rows.places]] = self.engine.version
        self._steps_R[rows.places] += 1
        rows.tokens_B, rows.steps_B = tokens_B, rows.steps_B + 1
        stopped = torch.isin(tokens_B, self._stops).tolist()  # all that the host waits for
        full = (self._steps_R[rows.places] == self._limits_R[rows.places]).tolist()
        ended = [stop or last for stop, last in zip(stopped, full, strict=True)]
        if any(ended):
            for row in np.flatnonzero(ended).tolist() if self._keeps_pasts else ():
                place = rows.places[row]
                self._pasts[place] = decode_cache.past_of(rows.cache, row, self._length(place) - 1, rows.version)
            self._ended += [(rows.places[row], stopped[row]) for row, now in enumerate(ended) if now]
            rows.keep([not now for now in ended], self.engine.device)

    def _next_logits(self, rows: _Rows) -> Tensor:
        """Logits (B, V) after the tokens that were drawn last, by the newest weights that :attr:`refresh` finds."""
        engine = self.engine
        if engine.refresh is not None:
            engine.refresh()
        rows.lengths_B = rows.lengths_B + 1
        if engine.version != rows.version:
            so_far = self._so_far(rows)
            rows.columns, rows.version = max(map(len, so_far)), engine.version
            logits_BV, rows.cache = engine.prefill(so_far, 1)
            return logits_BV
        if self.refilled:
            shared = decode_cache.prefixes_of(rows.cache) is not None
            tokens = (self._steps_R[place] if shared else self._length(place) for place in rows.places)
            longest = int(max(tokens)) - 1  # the last one is not in the cache
            if rows.columns - longest >= _SPARE:
                decode_cache.forget_left(rows.cache, longest)
                rows.columns = longest
        rows.columns += 1
        logits_BV = engine.step(rows.tokens_B, rows.lengths_B, rows.columns, rows.cache)
        if self.params.routes is not None:
            self._routes_RTLE[rows.places_B, rows.steps_B - 1] = torch.cat(engine.routes).short()
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
        places_B = torch.tensor(places).to(self.engine.device)
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
        kind = SampleWithPast if place in self._pasts else Sample
        sample = kind.answer(prompt.tokens, tokens[:end], logprobs[:end], versions, finish, routes_TLE)
        return replace(sample, past=self._pasts.pop(place)) if isinstance(sample, SampleWithPast) else sample

    def _routes(self, place: int, length: int) -> np.ndarray | None:
        """(T, L, E), of a prompt and its completion that has ended; see :attr:`Sample.routes_TLE`."""
        shape, read = self.params.routes, int(self._steps_R[place]) - 1  # the last one has only been drawn
        if shape is None:
            return None
        routes_TLE = torch.cat([self._prompt_routes.pop(place), self._routes_RTLE[place, :read]])
        return shape.whole(routes_TLE.cpu().numpy().astype(shape.dtype), length)
