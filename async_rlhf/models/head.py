"""Numbers from logits without all the logits: the output head computes a chunk of tokens at a time.

With a vocabulary of 128,000 the logits of one micro-batch take more memory than many models. Where they fit into one
chunk, torch's own operations compute them. Else a few chunks are kept for the backward pass, and all others dropped
and computed again there (as cut cross-entropy does: Wijmans et al., arXiv 2411.09009).

The chunks are computed within the model's own forward pass, in place of the head's forward: there the head's weights
are whole if ranks share them, cast if something casts them, or those of a snapshot. What the model does to logits after
its head is recognised by a row of numbers that it gets in their place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

_ENTROPY_ROWS = 1024  # rows at a time: the intermediate results are as large as the logits


def selected_logprobs(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """log softmax(logits)[target] of each row.

    Args:
        logits_NV: temperature-scaled logits, float32.
        targets_N: token ids.

    Returns:
        (N,) float32.
    """
    return -F.cross_entropy(logits_NV, targets_N, reduction="none")


def entropies_of(logprobs_NV: Tensor) -> Tensor:
    """Entropy in nats of each row of log-probabilities, without gradient; tokens of probability 0 add nothing."""
    least = torch.finfo(logprobs_NV.dtype).min
    parts = logprobs_NV.detach().split(_ENTROPY_ROWS)
    return torch.cat([-part.exp().mul_(part.clamp(min=least)).sum(dim=-1) for part in parts])


logger = logging.getLogger(__name__)

CHUNK_BYTES = 30 << 20
"""Of the float32 logits of a chunk. From 32 MiB on, glibc asks the system for new pages each time."""
LEAST_ROWS, LEAST_ROWS_ON_GPU = 256, 2048
"""Of a chunk, however large the vocabulary: with fewer, reading the weights takes longer than computing with them, and
on a GPU so does adding up their gradient."""
KEPT_BYTES = 1 << 28
"""Of log-probabilities of whole chunks, which are kept for the backward pass; other chunks are computed again there."""

Reduction = Callable[[Tensor, slice], Tensor]
"""From logits (C, V) float32, and which of the N tokens they are for, to numbers (K, C) float32."""


class After(NamedTuple):
    """What a model does to logits after its head: multiplies them, then bounds them."""

    scale: float = 1.0
    cap: float | None = None
    """c * tanh(logits / c), as in Gemma 2 (arXiv 2408.00118)."""

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def times_slope_(self, gradient: Tensor, scaled: Tensor | None, temperature: float) -> None:
        """In place: the gradient with respect to the head's own output, from that with respect to the results.

        ``scaled`` are the results over the temperature; needed only where there is a bound.
        """
        if self.cap is not None and scaled is not None:
            gradient.mul_(1 - (scaled * (temperature / self.cap)).square_())
        if self.scale != 1:
            gradient.mul_(self.scale)


class LogprobsAndEntropies:
    """A reduction: the log-probability of a token, and the entropy of its distribution in nats, which has no gradient.

    Args:
        targets_N: the token ids.
        temperature: logits are divided by it.
        with_entropies: False gives zeros.
    """

    def __init__(self, targets_N: Tensor, temperature: float, with_entropies: bool) -> None:
        self.targets_N, self.temperature, self.with_entropies = targets_N, temperature, with_entropies

    def __call__(self, logits_CV: Tensor, part: slice) -> Tensor:
        return self.numbers(torch.log_softmax(logits_CV / self.temperature, dim=-1), part)

    def numbers(self, logprobs_CV: Tensor, part: slice) -> Tensor:
        """The result from the log-probabilities of every token."""
        logprobs_C = -F.nll_loss(logprobs_CV, self.targets_N[part], reduction="none")
        entropies_C = entropies_of(logprobs_CV.detach()) if self.with_entropies else torch.zeros_like(logprobs_C)
        return torch.stack([logprobs_C, entropies_C])


def over_logits(model: Any, reduce: Reduction, **inputs: Any) -> Tensor:
    """Reduce the logits of every hidden state that the model's head sees, without holding the logits of all of them.

    Args:
        model: a causal language model, whose head sees (N, H).
        reduce: must treat each token by itself.
        inputs: of the model's forward pass.

    Returns:
        (K, N) float32, with gradient.
    """
    head = model.get_output_embeddings()
    if head in _KNOWN:
        after = _KNOWN[head]
        return _whole(model, reduce, inputs) if after is None else _run(model, head, reduce, after, inputs)[0]
    candidates = _candidates(model.config)
    numbers_KN, probe, logits = _run(model, head, reduce, candidates[0], inputs)
    fits = (after for after in candidates if _is_after(after, probe, logits))
    _KNOWN[head] = after = next(fits, None)
    if after == candidates[0]:
        return numbers_KN
    if after is None:
        logger.warning(
            "%s changes logits after its head in a way that is not known: all of a micro-batch's logits are held at "
            "once; with little memory, set a smaller per_device_train_batch_size",
            type(model).__name__,
        )
    return over_logits(model, reduce, **inputs)


_KNOWN: WeakKeyDictionary[nn.Module, After | None] = WeakKeyDictionary()
"""What comes after each head that has been used; None if it is something unknown."""
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def _candidates(config: Any) -> list[After]:
    """What the model's configuration may mean. Some models multiply by their scale, some divide by it."""
    text = config.get_text_config()
    found_scales, found_caps = ([getattr(text, key, None) for key in keys] for keys in (_SCALES, _CAPS))
    scales = [way for scale in found_scales if scale for way in (float(scale), 1 / scale)]
    caps = [*(float(cap) for cap in found_caps if cap), None]
    return [After(scale, cap) for cap in caps for scale in dict.fromkeys([*scales, 1.0])]


def _is_after(after: After, probe: Tensor, logits: Tensor) -> bool:
    """Whether that is what the model has done to the probe. Asks the device only if it has done anything."""
    if logits is probe and probe._version == 0:
        return after == After()
    expected = after(_probe(probe.shape[-1], probe.device)).to(logits.dtype)
    return logits.shape == expected.shape and torch.allclose(logits.detach(), expected, rtol=1e-5, atol=1e-6)


def _probe(vocabulary: int, device: torch.device) -> Tensor:
    return torch.linspace(-50, 50, vocabulary, device=device).view(1, 1, -1)


class _Through(torch.autograd.Function):
    """The first tensor, as if computed from the second as well: the second gets a gradient of zeros.

    Sharding gathers weights for the backward pass when gradients arrive at the model's output. So the numbers that the
    head has put aside must depend on that output, and the output on them.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, second: Tensor) -> Tensor:
        ctx.zeros = second.shape, second.dtype, second.device
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.zeros
        return gradient, torch.zeros(shape, dtype=dtype, device=device)


def _run(
    model: Any, head: nn.Module, reduce: Reduction, after: After, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the model with a head that reduces. Returns the numbers, what the model got for logits, and what it returned
    for them.
    """
    with _reducing(head, reduce, after, model.config) as seen:
        logits = model(**inputs).logits
    numbers_KN, probe = seen
    return _Through.apply(numbers_KN, logits), probe, logits


@contextmanager
def _reducing(head: nn.Module, reduce: Reduction, after: After, config: Any) -> Iterator[list[Tensor]]:
    """Within, the head puts aside the numbers (K, N) and what it returns in place of logits, in a list."""
    vocabulary = getattr(head, "out_features", None) or config.get_text_config().vocab_size
    original, was_set = head.forward, "forward" in vars(head)
    seen: list[Tensor] = []

    def numbers(states_CH: Tensor, part: slice) -> Tensor:
        return reduce(after(original(states_CH).float()), part)

    def forward(states_NH: Tensor) -> Tensor:
        parts, linear = _parts(len(states_NH), vocabulary, states_NH.device), not was_set and _is_linear(head)
        if not linear and any(hasattr(parameter, "ds_id") for parameter in head.parameters()):
            parts = [slice(0, len(states_NH))]  # ZeRO-3 gathers at every call: each rank has to make as many
        if len(parts) == 1:
            return numbers(states_NH, parts[0])
        keep = KEPT_BYTES // 4 if torch.is_grad_enabled() else 0
        if linear and isinstance(reduce, LogprobsAndEntropies):
            return _Chunks.apply(states_NH, head.weight, head.bias, reduce, after, parts, keep)
        each = partial(checkpoint, numbers, use_reentrant=False) if torch.is_grad_enabled() else numbers
        return torch.cat([each(states_NH[part], part) for part in parts], dim=1)

    def put_aside(_module: nn.Module, _inputs: Any, numbers_KN: Tensor) -> Tensor:
        """After the hooks of sharding, which gather the weights for the numbers' gradient."""
        seen.extend((numbers_KN, _Through.apply(_probe(vocabulary, numbers_KN.device), numbers_KN)))
        return seen[1]

    handle = head.register_forward_hook(put_aside)
    head.forward = forward
    try:
        yield seen
    finally:
        handle.remove()
        if was_set:
            head.forward = original
        else:
            del head.forward


def _whole(model: Any, reduce: Reduction, inputs: dict[str, Any]) -> Tensor:
    logits_NV = model(**inputs).logits
    logits_NV = logits_NV.reshape(-1, logits_NV.shape[-1]).float()
    parts = _parts(len(logits_NV), logits_NV.shape[1], logits_NV.device)
    return torch.cat([reduce(logits_NV[part], part) for part in parts], dim=1)


def _parts(rows: int, vocabulary: int, device: torch.device) -> list[slice]:
    """Chunks of equal size, but for the last; a single one, perhaps empty, if they fit."""
    size = max(LEAST_ROWS_ON_GPU if device.type == "cuda" else LEAST_ROWS, CHUNK_BYTES // (4 * vocabulary))
    count = max(1, -(-rows // size))
    size = -(-rows // count)
    return [slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), max(size, 1))]


def _is_linear(head: nn.Module) -> bool:
    """Whether the head is a matrix and nothing else: no adapters, no weights in few bits."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and head.weight.is_floating_point()


class _Chunks(torch.autograd.Function):
    """:class:`LogprobsAndEntropies` of a linear head, in chunks that are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        states_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        reduce: LogprobsAndEntropies,
        after: After,
        parts: list[slice],
        keep: int,
    ) -> Tensor:
        device = states_NH.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        ctx.save_for_backward(states_NH, weight_VH, bias_V, reduce.targets_N)
        ctx.rest, ctx.kept = (reduce.temperature, after, parts, autocast), []
        numbers_2N = torch.zeros(2, len(states_NH), dtype=torch.float32, device=states_NH.device)
        with torch.autocast(device, enabled=False):
            weight_VH, bias_V = _cast(weight_VH, autocast), _cast(bias_V, autocast)
            for part in parts:
                logits_CV = _logits(_cast(states_NH[part], autocast), weight_VH, bias_V, after)
                logprobs_CV = torch.log_softmax(logits_CV.div_(reduce.temperature), dim=-1)
                del logits_CV
                numbers_2N[:, part] = reduce.numbers(logprobs_CV, part)
                keep -= logprobs_CV.numel()
                ctx.kept.append(logprobs_CV if keep >= 0 and after.cap is None else None)
        return numbers_2N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_2N: Tensor) -> tuple[Tensor | None, ...]:
        states_NH, weight, bias, targets_N = ctx.saved_tensors
        temperature, after, parts, autocast = ctx.rest
        states_sum_NH = torch.empty_like(states_NH) if ctx.needs_input_grad[0] else None
        # Sums over chunks are float32 at least.
        weight_sum_VH, bias_sum_V = (
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if needed else None
            for x, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        with torch.autocast(states_NH.device.type, enabled=False):
            weight_VH, bias_V = _cast(weight, autocast), _cast(bias, autocast)
            for part, logprobs_CV in zip(parts, ctx.kept, strict=True):
                states_CH, scaled_CV = _cast(states_NH[part], autocast), None
                if logprobs_CV is None:
                    scaled_CV = _logits(states_CH, weight_VH, bias_V, after).div_(temperature)
                    slope_CV = torch.softmax(scaled_CV, dim=-1)
                else:
                    slope_CV = logprobs_CV.exp()
                _slope_from_probabilities_(slope_CV, targets_N[part], gradient_2N[0, part] / temperature)
                after.times_slope_(slope_CV, scaled_CV, temperature)
                if bias_sum_V is not None:
                    bias_sum_V += slope_CV.sum(dim=0)
                slope_CV = slope_CV.to(weight_VH.dtype)
                if states_sum_NH is not None:
                    states_sum_NH[part] = slope_CV @ weight_VH
                if weight_sum_VH is not None:
                    _add_product(weight_sum_VH, slope_CV.t(), states_CH)
                del slope_CV, scaled_CV, logprobs_CV
        weight_sum_VH, bias_sum_V = _like(weight_sum_VH, weight), _like(bias_sum_V, bias)
        return states_sum_NH, weight_sum_VH, bias_sum_V, None, None, None, None


def _like(total: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if total is None else total.to(parameter.dtype)


def _cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    return tensor if tensor is None or dtype is None else tensor.to(dtype)


def _logits(states_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, after: After) -> Tensor:
    """The model's logits (C, V) float32, of which nobody else holds a reference."""
    return after(F.linear(states_CH, weight_VH, bias_V).float())


def _slope_from_probabilities_(slope_CV: Tensor, targets_C: Tensor, gradient_C: Tensor) -> None:
    """In place: the gradient with respect to logits over the temperature, from what softmax makes of these."""
    rows_C = torch.arange(len(targets_C), device=targets_C.device)
    own_C = slope_CV[rows_C, targets_C]
    slope_CV.mul_(-gradient_C[:, None])
    slope_CV[rows_C, targets_C] = gradient_C * (1 - own_C)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the total's type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
