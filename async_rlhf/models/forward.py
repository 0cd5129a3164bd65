"""Forward passes on rows: log-probabilities of responses, scores of a reward model, values.

Rows are padded on the right, so under causal attention no real token ever sees padding. No attention mask and no
position ids are needed, and any causal language model of transformers works. A model whose rows are to be packed
(:mod:`async_rlhf.models.packing`) computes no padding at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.distributed.collectives import WHOLE, ContextGroup
from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.head import LogprobsAndEntropies, Reduction, over_logits
from async_rlhf.models.packing import Layout, laid_out, seen_by_head, states_at
from async_rlhf.models.passes import Passes
from async_rlhf.models.rows import in_shares, moved, pad_rows
from async_rlhf.types import PolicyOutput

logger = logging.getLogger(__name__)

Row: TypeAlias = Sequence[int] | np.ndarray
"""Tokens of a prompt and its response."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within, a model computes without dropout."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class _OutOfAutocast:
    """Hooks that make a module compute in float32, even under autocast."""

    def __init__(self) -> None:
        self._contexts: list[torch.autocast] = []

    def before(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        self._contexts.append(torch.autocast(inputs[0].device.type, enabled=False))
        self._contexts[-1].__enter__()
        return (inputs[0].float(),)

    def after(self, *_: Any) -> None:
        if self._contexts:  # it is called even if something before it failed
            self._contexts.pop().__exit__(None, None, None)


def autocast_dtype(config: OnlineConfig) -> torch.dtype | None:
    """The type that the learner computes in; None for that of its weights."""
    return torch.bfloat16 if config.bf16 is True else torch.float16 if config.fp16 else None


def advise_sixteen_bits(config: OnlineConfig, device: torch.device) -> None:
    """Warn that a GPU is to compute in float32, which is the default."""
    if device.type == "cuda" and autocast_dtype(config) is None:
        logger.warning("bf16: got false; %s computes in float32, several times as slow as with bf16: true", device)


def in_sixteen_bits(config: OnlineConfig, model: PreTrainedModel) -> bool:
    """Whether a model computes in 16 bits."""
    return autocast_dtype(config) is not None or model.dtype in (torch.float16, torch.bfloat16)


def head_in_float32(model: PreTrainedModel) -> None:
    """From now on, make the model's head compute in float32 even if the rest is under autocast.

    This affects every use of the model alike: the loss, the reference, and the comparison with the engine.
    """
    head, hooks = model.get_output_embeddings(), _OutOfAutocast()
    head.register_forward_pre_hook(hooks.before)
    head.register_forward_hook(hooks.after, always_call=True)


def _places(mask_BT: Tensor) -> Tensor:
    """Where the mask is nonzero, as places in the flattened rows: (N,) on the CPU.

    The host waits for a GPU only if the mask is there.
    """
    return mask_BT.cpu().flatten().nonzero().squeeze(1)


def _tokens(tokens_BT: Tensor, places_N: Tensor, device: torch.device) -> Tensor:
    """Tokens at places, on a device."""
    return moved(tokens_BT.flatten()[moved(places_N, tokens_BT.device)], device)


def _in_rows(values_N: Tensor, places_N: Tensor, tokens_BT: Tensor) -> Tensor:
    """(B, T) float32: the values at their places, 0 elsewhere."""
    empty_BT = torch.zeros(tokens_BT.shape, dtype=torch.float32, device=values_N.device)
    places_N = moved(places_N, values_N.device)
    return empty_BT.flatten().index_copy(0, places_N, values_N).view_as(empty_BT)


def over_response_logits(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    sampled_BT: Tensor,
    reduce: Reduction,
    positions_BT: Tensor | None = None,
    routes_BTLE: Tensor | None = None,
) -> Tensor:
    """Reduce the logits that predict the response tokens, a chunk of tokens at a time.

    Args:
        model: any causal language model.
        tokens_BT: rows of prompt and response, padded on the right.
        sampled_BT: nonzero at response tokens. The first token of a row cannot be one. Where it is on a GPU, the host
            waits for the GPU to count them; on the CPU it waits for nothing.
        reduce: gets the logits (C, V) float32 of some of the N response tokens, and which of ``tokens_BT[sampled_BT]``
            they predict; returns (K, C) float32.
        positions_BT: of each token in what the model sees of its row; see :class:`~async_rlhf.types.Experience`.
        routes_BTLE: experts that the model's routers are to take; None for their own choice.

    Returns:
        (K, N) float32 for the N response tokens.
    """
    places_N = _places(sampled_BT)
    rows = laid_out(model, tokens_BT, None, sampled_BT, positions_BT, routes_BTLE=routes_BTLE)
    return _over_logits(model, rows, places_N, reduce)[0]


def _over_logits(model: PreTrainedModel, rows: Layout, places_N: Tensor, reduce: Reduction) -> tuple[Tensor, Tensor]:
    """The numbers (K, N), and the states (N, H) that the head has seen."""
    with seen_by_head(model, rows.at(places_N - 1)) as seen:  # the state at t - 1 predicts token t
        numbers_KN = over_logits(model, reduce, **rows.inputs)
    return numbers_KN, seen[-1]


def response_logprobs(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    sampled_BT: Tensor,
    temperature: float,
    with_entropies: bool = True,
    value_head: nn.Linear | None = None,
    positions_BT: Tensor | None = None,
    context: ContextGroup = WHOLE,
    routes_BTLE: Tensor | None = None,
    device: torch.device | None = None,
) -> PolicyOutput:
    """Log-probability of each response token, and the entropy of the distribution it was drawn from.

    Args:
        model: any causal language model.
        tokens_BT: rows of prompt and response, padded on the right.
        sampled_BT: nonzero at response tokens. The first token of a row cannot be one. Where it is on a GPU, the host
            waits for the GPU to count them; on the CPU it waits for nothing.
        temperature: logits are divided by it.
        with_entropies: False skips them and returns zeros.
        value_head: computes values from the states that the model's own head sees.
        positions_BT: of each token in what the model sees of its row; see :class:`~async_rlhf.types.Experience`.
        context: the ranks that share the rows; all of them get all numbers. The host then waits for the GPU.
        routes_BTLE: experts that the model's routers are to take; None for their own choice.
        device: where the model computes; None for where the tokens are.

    Returns:
        (B, T) float32 tensors, 0 outside the response. The entropy, in nats, carries no gradient.
    """
    rows = laid_out(model, tokens_BT, None, sampled_BT, positions_BT, context, routes_BTLE, device)
    places_N = _own(rows, _places(sampled_BT))
    first_U, number_N = _unequal(rows.at(places_N - 1, move=False), tokens_BT.flatten()[places_N.to(tokens_BT.device)])
    unequal_U = places_N[first_U]
    reduce = LogprobsAndEntropies(_tokens(tokens_BT, unequal_U, rows.device), temperature, with_entropies)
    (logprobs_U, entropies_U), states_UH = _over_logits(model, rows, unequal_U, reduce)

    def in_rows(values_U: Tensor) -> Tensor:
        values_N = values_U if number_N is None else values_U[moved(number_N, values_U.device)]
        return context.joined(_in_rows(values_N, places_N, tokens_BT))

    values_BT = None if value_head is None else in_rows(_scalars(value_head, states_UH))
    return PolicyOutput(in_rows(logprobs_U), in_rows(entropies_U.detach()), values_BT)


def _unequal(places_N: Tensor, tokens_N: Tensor) -> tuple[Tensor | slice, Tensor | None]:
    """Of tokens that follow states at these places, those that differ in either; and for each token which it is.

    Returns:
        Indices (U,) of the first of each, and the number (N,) of each token among them; all and None, if all differ.
    """
    pairs_N = places_N * (1 << 32) + tokens_N.cpu()
    unequal_U, number_N = pairs_N.unique(return_inverse=True)
    if len(unequal_U) == len(pairs_N):
        return slice(None), None
    first_U = torch.full_like(unequal_U, len(pairs_N)).scatter_reduce(0, number_N, torch.arange(len(pairs_N)), "amin")
    return first_U, number_N


def _own(rows: Layout, places_N: Tensor) -> Tensor:
    """Those places whose tokens this rank predicts: it has the state at t - 1, whoever has token t."""
    return places_N[rows.has(places_N - 1)]


def response_values(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    sampled_BT: Tensor,
    positions_BT: Tensor | None = None,
    context: ContextGroup = WHOLE,
    device: torch.device | None = None,
) -> Tensor:
    """Value of the text before each response token.

    Args:
        model: a sequence-classification model, as for :func:`reward_scores`.
        tokens_BT: rows of prompt and response, padded on the right.
        sampled_BT: nonzero at response tokens. The first token of a row cannot be one. Where it is on a GPU, the host
            waits for the GPU to count them; on the CPU it waits for nothing.
        positions_BT: of each token in what the model sees of its row; see :class:`~async_rlhf.types.Experience`.
        context: the ranks that share the rows; see :func:`response_logprobs`.
        device: where the model computes; None for where the tokens are.

    Returns:
        (B, T) float32, 0 outside the response.
    """
    rows = laid_out(model, tokens_BT, None, sampled_BT, positions_BT, context, device=device)
    places_N = _own(rows, _places(sampled_BT))
    values_N = _scalars(model.score, states_at(model, rows.inputs, rows.at(places_N - 1)))
    return context.joined(_in_rows(values_N, places_N, tokens_BT))


def end_values(
    policy: PreTrainedModel,
    value: PreTrainedModel | nn.Linear,
    tokens_BT: Tensor,
    lengths_B: Tensor,
    positions_BT: Tensor | None = None,
    context: ContextGroup = WHOLE,
    routes_BTLE: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Value of each whole text, (B,) float32, by a value model or by a head on the policy's states.

    Args:
        policy: gives the states that a head reads.
        value: a separate value model, or a head.
        tokens_BT: rows of prompt and response, padded on the right.
        lengths_B: real tokens of each row.
        positions_BT: of each token in what the model sees of its row; see :class:`~async_rlhf.types.Experience`.
        context: the ranks that share the rows; see :func:`response_logprobs`.
        routes_BTLE: experts that the policy's routers are to take; None for their own choice.
        device: where the model computes; None for where the tokens are.
    """
    if not isinstance(value, nn.Linear):
        return reward_scores(value, tokens_BT, lengths_B, positions_BT, context, device)
    more = {"positions_BT": positions_BT, "routes_BTLE": routes_BTLE, "device": device}
    return _at_ends(policy, value, tokens_BT, lengths_B, context, **more)


def _at_ends(
    model: PreTrainedModel, head: nn.Linear, tokens_BT: Tensor, lengths_B: Tensor, context: ContextGroup, **more: Any
) -> Tensor:
    """(B,): the head's output at the last real token of each row; ``more`` as :func:`laid_out` takes it."""
    rows = laid_out(model, tokens_BT, lengths_B, None, context=context, **more)
    ends_B = torch.arange(len(tokens_BT)) * tokens_BT.shape[1] + lengths_B.cpu() - 1
    local_B = rows.has(ends_B)
    found_N = _scalars(head, states_at(model, rows.inputs, rows.at(ends_B[local_B])))
    if isinstance(local_B, slice):
        return found_N
    # The rank that has the end of a row has computed its number.
    places_N = moved(local_B.nonzero().squeeze(1), found_N.device)
    return context.joined(found_N.new_zeros(local_B.shape).index_copy(0, places_N, found_N))


def _scalars(head: nn.Linear, hidden_NH: Tensor) -> Tensor:
    """The head's only output, (N,) float32.

    In bfloat16 the spacing of scores near 4 is 0.03, so real preferences would become ties.
    """
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return head(hidden_NH.to(head.weight.dtype)).squeeze(-1).float()


class PolicyAndValueWrapper(nn.Module):
    """Everything that is trained, in one module with one forward pass: the policy, and PPO's values if there are any.

    Args:
        policy: any causal language model.
        value: a separate value model, or a head on the policy's states, or None.
        context: the ranks that share the rows.
    """

    def __init__(
        self, policy: PreTrainedModel, value: PreTrainedModel | nn.Linear | None = None, context: ContextGroup = WHOLE
    ) -> None:
        super().__init__()
        self.policy = policy
        self.value = value
        self.context = context

    @property
    def head(self) -> nn.Linear | None:
        """The value head, if values share the policy's trunk."""
        return self.value if isinstance(self.value, nn.Linear) else None

    def forward(
        self,
        tokens_BT: Tensor,
        sampled_BT: Tensor,
        temperature: float,
        with_entropies: bool = True,
        positions_BT: Tensor | None = None,
        routes_BTLE: Tensor | None = None,
        device: torch.device | None = None,
    ) -> PolicyOutput:
        """See :func:`response_logprobs` and :func:`response_values`."""
        output = response_logprobs(
            self.policy,
            tokens_BT,
            sampled_BT,
            temperature,
            with_entropies=with_entropies,
            value_head=self.head,
            positions_BT=positions_BT,
            context=self.context,
            routes_BTLE=routes_BTLE,
            device=device,
        )
        if isinstance(self.value, PreTrainedModel):
            values_BT = response_values(self.value, tokens_BT, sampled_BT, positions_BT, self.context, device)
            return output._replace(values_BT=values_BT)
        return output


class RewardWrapper(PolicyAndValueWrapper):
    """A reward model that is trained, in the policy's place; its rows are all sampled, up to their ends."""

    def forward(  # type: ignore[override]
        self,
        tokens_BT: Tensor,
        sampled_BT: Tensor,
        temperature: float,
        with_entropies: bool = False,
        positions_BT: None = None,
        routes_BTLE: None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """See :func:`reward_scores`."""
        lengths_B = last_sampled(sampled_BT) + 1
        return reward_scores(self.policy, tokens_BT, lengths_B, context=self.context, device=device)


def last_sampled(sampled_BT: Tensor) -> Tensor:
    """(B,): the place of the last response token of each row; 0 if there is none."""
    return ((sampled_BT != 0) * torch.arange(sampled_BT.shape[1])).amax(dim=1)


def reward_scores(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    lengths_B: Tensor,
    positions_BT: Tensor | None = None,
    context: ContextGroup = WHOLE,
    device: torch.device | None = None,
) -> Tensor:
    """Score of each row, read at its last real token.

    Args:
        model: a sequence-classification model with a linear head named ``score`` (as all of transformers' decoder
            models have) and one output.
        tokens_BT: rows of prompt and response, padded on the right.
        lengths_B: real tokens of each row.
        positions_BT: of each token in what the model sees of its row; see :class:`~async_rlhf.types.Experience`.
        context: the ranks that share the rows; see :func:`response_logprobs`.
        device: where the model computes; None for where the tokens are.

    Returns:
        (B,) float32.
    """
    return _at_ends(model, model.score, tokens_BT, lengths_B, context, positions_BT=positions_BT, device=device)


def score_rows(model: PreTrainedModel, rows: Sequence[Row], batch_size: int, parallel: Parallel = ALONE) -> Tensor:
    """Scores of rows of any lengths, in batches of similar length that the ranks share; see :func:`score_in_batches`.
    Every rank of ``parallel`` must call it, and gets all of them.
    """
    score = partial(score_batch, model, device=parallel.device_of(model))

    def shared(batches: list[list[Row]]) -> list[Tensor]:
        return in_shares("scores", batches, score, parallel)

    return score_in_batches(shared, rows, Passes(batch_size))


def score_in_batches(
    score: Callable[[list[list[Row]]], Sequence[Tensor]], rows: Sequence[Row], passes: Passes, ranks: int = 1
) -> Tensor:
    """Scores of rows of any lengths, in batches of similar length.

    Equal rows are scored once: rounding depends on a row's padding, but equal completions must tie.

    Args:
        score: computes the scores of each batch, in any process; the batches do not depend on where it runs.
        rows: tokens of prompt and response.
        passes: the limits of a batch.
        ranks: who share the batches.

    Returns:
        (len(rows),) float32 on the CPU.
    """
    names = [xxhash.xxh3_128_digest(np.ascontiguousarray(row, np.int32).data) for row in rows]
    first: dict[bytes, Row] = {}
    for name, row in zip(names, rows, strict=True):
        first.setdefault(name, row)
    number, unique = {name: i for i, name in enumerate(first)}, list(first.values())
    scores_B = torch.zeros(len(unique))
    texts = [[np.asarray(row, dtype=">i4")] for row in unique] if passes.shared else None
    indices = passes.split(torch.tensor([len(row) for row in unique], dtype=torch.long), ranks=ranks, texts=texts)
    scores_of_passes = score([[unique[i] for i in index.tolist()] for index in indices])
    for index, scores in zip(indices, scores_of_passes, strict=True):
        scores_B[index] = scores
    return scores_B[torch.tensor([number[name] for name in names], dtype=torch.long)]


@torch.no_grad()
def score_batch(
    model: PreTrainedModel,
    rows: Sequence[Row],
    autocast: torch.dtype | None = None,
    device: torch.device | None = None,
    context: ContextGroup = WHOLE,
) -> Tensor:
    """Scores (B,) of rows, float32 on the CPU; computed on ``device``, or else where the weights are, and in
    ``autocast``, or else the weights' type. ``context`` has the ranks that share the rows.
    """
    tokens_BT, lengths_B = pad_rows(rows, torch.long), torch.tensor([len(row) for row in rows], dtype=torch.long)
    device = model.device if device is None else device
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        return reward_scores(model, tokens_BT, lengths_B, context=context, device=device).float().cpu()
