"""The engine on transformers' models: a decode loop with a KV cache.

A loop of our own, because ``generate`` draws from one stream of random numbers for the whole batch, keeps every
logit in order to return log-probabilities, and goes on computing rows that have finished.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from async_rlhf.generation.decode_cache import join, keep_rows, only_grows
from async_rlhf.generation.probe import probe_logprobs
from async_rlhf.generation.protocol import Completions, SamplingParams
from async_rlhf.generation.sampling import draw_tokens, row_uniforms
from async_rlhf.models.snapshots import digests, named_weights
from async_rlhf.models.truncation import truncated
from async_rlhf.types import Prompt, Sample

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Prompt tokens in one forward pass, padding included: few enough for the activations to fit a CPU's caches, enough to
keep a GPU busy. Small groups of prompts of similar length also need less padding."""


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
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._cache_only_grows = only_grows(DynamicCache(config=model.config))
        self._prefill_options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

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
        """See :func:`~async_rlhf.generation.probe.probe_logprobs`."""
        return probe_logprobs(self.model, self.autocast)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], progress: Callable[[int], None] | None = None) -> Completions:
        """K completions for each prompt, in the order of the prompts.

        Args:
            prompts: any number; decoded ``batch_size`` completions at a time, prompts of similar length together.
            progress: called with the number of prompts done so far.
        """
        training = self.model.training
        self.model.eval()
        try:
            per_chunk = max(1, self.params.batch_size // self.params.samples_per_prompt)
            order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
            completions: dict[int, tuple[Sample, ...]] = {}
            for start in range(0, len(order), per_chunk):
                chunk = order[start : start + per_chunk]
                completions.update(zip(chunk, self._decode([prompts[i] for i in chunk]), strict=True))
                if progress is not None:
                    progress(len(completions))
        finally:
            self.model.train(training)
        return [completions[i] for i in range(len(prompts))]

    def _decode(self, prompts: Sequence[Prompt]) -> Completions:
        params, device = self.params, self.device
        rows = len(prompts) * params.samples_per_prompt
        uniforms = row_uniforms(params.seed, prompts, params.samples_per_prompt, params.response_length)
        uniforms_TR = torch.from_numpy(uniforms).reshape(rows, -1).T.contiguous().to(device)
        tokens_TR = torch.zeros(params.response_length, rows, dtype=torch.long, device=device)
        logprobs_TR = torch.zeros(params.response_length, rows, device=device)
        ends: dict[int, int] = {}  # the length of each row that has ended
        stops = torch.tensor(params.stop_token_ids, device=device)
        versions: list[int] = []

        room = params.response_length
        logits_BV, mask_BT, cache = self._prefill([p.tokens for p in prompts], params.samples_per_prompt, room)
        live, live_B = list(range(rows)), torch.arange(rows, device=device)  # the rows still in the batch
        for step in range(params.response_length):
            logits_BV = truncated(logits_BV, params.distribution)
            tokens_B, logprobs_B = draw_tokens(logits_BV, uniforms_TR[step, live_B], params.temperature)
            tokens_TR[step, live_B] = tokens_B
            logprobs_TR[step, live_B] = logprobs_B
            versions.append(self.version)
            ended = torch.isin(tokens_B, stops).tolist()  # all that the host waits for
            if any(ended):
                ends |= {row: step + 1 for row, now in zip(live, ended, strict=True) if now}
                kept = keep_rows(cache, [not now for now in ended], device)
                live = [live[place] for place in kept.tolist()]
                kept_B = kept.to(device, non_blocking=True)
                live_B, tokens_B, mask_BT = (x[kept_B] for x in (live_B, tokens_B, mask_BT))
            room = params.response_length - step - 1
            if not live or room == 0:
                break
            if self.refresh is not None:
                self.refresh()
            if self.version != versions[-1]:  # the cache was computed with other weights
                drawn_BT = tokens_TR[: step + 1, live_B].T.tolist()
                of = [prompts[row // params.samples_per_prompt].tokens for row in live]
                so_far = [(*prompt, *drawn) for prompt, drawn in zip(of, drawn_BT, strict=True)]
                logits_BV, mask_BT, cache = self._prefill(so_far, 1, room)
            else:
                seen_BT = mask_BT[:, : mask_BT.shape[1] - room]
                logits_BV = self._forward(tokens_B[:, None], seen_BT, seen_BT.sum(dim=1, keepdim=True) - 1, cache)
        return self._samples(prompts, tokens_TR.T, logprobs_TR.T, ends, versions)

    def _prefill(self, rows: Sequence[tuple[int, ...]], samples: int, room: int) -> tuple[Tensor, Tensor, DynamicCache]:
        """Run each row of tokens once, padded on the left, and repeat its state for its samples.

        Returns:
            Logits (B, V) for the next token, the mask (B, T) of these tokens and of ``room`` more, and their cache.
        """
        device = self.device
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        tokens_PT = torch.zeros(len(rows), longest, dtype=torch.long)
        mask_PT = torch.ones(len(rows), longest + room, dtype=torch.long)
        for i, row in enumerate(rows):
            tokens_PT[i, longest - lengths[i] :] = torch.tensor(row)
            mask_PT[i, : longest - lengths[i]] = 0
        tokens_PT, mask_PT = tokens_PT.to(device), mask_PT.to(device)
        positions_PT = (mask_PT.cumsum(dim=1) - 1).clamp(min=0)

        at_once = len(rows)
        if self._cache_only_grows:
            at_once = max(1, PREFILL_TOKENS.get(device.type, at_once * longest) // longest)
        caches, logits = [], []
        for first in range(0, len(rows), at_once):
            part = slice(first, first + at_once), slice(longest - max(lengths[first : first + at_once]), longest)
            caches.append(DynamicCache(config=self.model.config))
            logits.append(
                self._forward(tokens_PT[part], mask_PT[part], positions_PT[part], caches[-1], **self._prefill_options)
            )
        cache = join(caches, len(rows), samples)
        return torch.cat(logits).repeat_interleave(samples, dim=0), mask_PT.repeat_interleave(samples, dim=0), cache

    def _forward(
        self, tokens_BT: Tensor, mask_BT: Tensor, positions_BT: Tensor, cache: DynamicCache, **options: int
    ) -> Tensor:
        """Logits (B, V) after the last of the given tokens, which are added to the cache."""
        inputs = {"input_ids": tokens_BT, "attention_mask": mask_BT}
        if self._takes_positions:
            inputs["position_ids"] = positions_BT
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            output = self.model(**inputs, past_key_values=cache, use_cache=True, **options)
        return output.logits[:, -1]

    def _samples(
        self,
        prompts: Sequence[Prompt],
        tokens_RT: Tensor,
        logprobs_RT: Tensor,
        ends: Mapping[int, int],
        versions: Sequence[int],
    ) -> Completions:
        finite = torch.isfinite(logprobs_RT).all(dim=0).tolist()
        if not all(finite):
            raise FloatingPointError(f"the logits of weights version {versions[finite.index(False)]} are not finite")
        k, most = self.params.samples_per_prompt, self.params.response_length
        tokens, logprobs = tokens_RT.cpu().numpy(), logprobs_RT.cpu().numpy()
        samples = [
            Sample.answer(
                prompts[i // k].tokens,
                tokens[i, : ends.get(i, most)],
                logprobs[i, : ends.get(i, most)],
                versions[: ends.get(i, most)],
                finish_reason="stop" if i in ends else "length",
            )
            for i in range(len(tokens))
        ]
        return [tuple(samples[i : i + k]) for i in range(0, len(samples), k)]
