"""How rows reach a model: padded on the right, or packed one after the other, without padding.

Packed rows are one sequence (1, N) whose position ids begin anew at each row. Everything but attention treats a token
by itself, so it needs no change. Attention must not look into another row: transformers' masks for that would have
N x N elements. So attention by PyTorch takes the place of transformers' "sdpa" here, and gets to know the rows by an
argument that transformers hands through to it. Layers that are computed again for the backward pass get the same
argument again. What rows have in common at their beginning stands in the sequence once (forest.py).

Rows that several ranks share (ContextGroup in distributed/collectives.py) take the same way, padded ones too: a model
gets this rank's part of each, and its attention the whole of it.

A row may have several texts, one after the other, none of which sees another: the conversations of an agent's episode.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from async_rlhf.config.base import require
from async_rlhf.distributed.collectives import WHOLE, ContextGroup
from async_rlhf.models.forest import Branch, Forest, grown, walk
from async_rlhf.models.routing import ROUTES, no_route
from async_rlhf.models.rows import moved

KIND = "sdpa"
"""What transformers calls the attention that is replaced."""
CAPPED = "soft_capped"
"""The same attention for models with a soft cap on its scores, to which newer versions of transformers refuse "sdpa":
see :func:`keep_soft_cap`."""
_Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values: (B, H, T, D)."""
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Prefixes(Protocol):
    """Keys and values that rows share: :class:`~async_rlhf.generation.decode_cache.Prefixes`."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, /
    ) -> Tensor:
        """Attention of a token of each row."""


def _attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    forest: Forest | None = None,
    prefixes: Prefixes | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention by PyTorch; the same for packed rows, for those that ranks share, and for a token of rows
    that go on from shared keys and values (generation/decode_cache.py).
    """
    heads = query_BHTD, key_BHTD, value_BHTD
    if prefixes is not None:
        if options.get("sliding_window") or options.get("softcap"):
            raise NotImplementedError("attention with a window or a cap does not read keys and values that rows share")
        layer: Any = module
        scale = options.get("scaling") or query_BHTD.shape[-1] ** -0.5
        return prefixes.attend(layer.layer_idx, *heads, attention_mask, scale), None
    if forest is None:
        return _in_one_call(module, *heads, attention_mask, **options), None
    window = options.pop("sliding_window", None) or None  # some models say 0 for none
    if torch.is_autocast_enabled(query_BHTD.device.type):  # casts for its own operations alone, the kernel is not one
        dtype = torch.get_autocast_dtype(query_BHTD.device.type)
        heads = query_BHTD.to(dtype), key_BHTD.to(dtype), value_BHTD.to(dtype)
    if forest.context.size > 1:
        return _exchanged(module, heads, forest, sliding_window=window, **options), None
    if len(query_BHTD) == 1 and _has_kernel(heads[0], heads[2]) and options.get("softcap") is None:
        query, key, value = (part.squeeze(0).transpose(0, 1) for part in heads)
        sees, grouped = (-1 if window is None else window - 1, 0), query.shape[1] != key.shape[1]
        attend = partial(_by_kernel, forest, scale=options.get("scaling"), window_size=sees, enable_gqa=grouped)
        return attend(query, key, value)[None], None
    return _in_calls(module, heads, forest, window, **options), None


def _by_kernel(forest: Forest, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attention (N, H, D) in one call. The last query of a branch is at its last key: so a window counts positions."""
    bounds = forest.starts, forest.key_starts, forest.longest, forest.longest_keys
    if forest.keys is not None:
        return _by_copies(forest.keys, query, key, value, *bounds, **options)
    out_NHD = varlen_attn(query, key, value, *bounds, **options)
    assert isinstance(out_NHD, Tensor)  # more only if asked for
    return out_NHD


@torch.compiler.disable  # it sees no hooks
def _by_copies(keys: Tensor, query: Tensor, key: Tensor, value: Tensor, *bounds: Any, **options: Any) -> Tensor:
    """The same with a copy of the keys and values of each branch, which are larger than what they are copied from: for
    the backward pass they are copied again rather than kept, and attention's output is kept.
    """
    copies = _Copies(keys, (key, value))
    with torch.autograd.graph.saved_tensors_hooks(copies.pack, copies.unpack):
        key, value = copies.make()
        out_NHD = varlen_attn(query, key, value, *bounds, **options)
    assert isinstance(out_NHD, Tensor)
    return _Kept.apply(out_NHD, copies)


class _Copies:
    """Rows of tensors, by their places, and what attention to them needs for its backward pass."""

    def __init__(self, places: Tensor, sources: tuple[Tensor, ...]) -> None:
        self._places, self._sources = places, sources
        self._made: list[Tensor] = []
        self.kept: dict[int, Tensor] = {}
        """By number, in place of each copy what it was copied from."""

    def make(self) -> list[Tensor]:
        """The copies."""
        self._made = [source[self._places] for source in self._sources]
        return self._made

    def pack(self, tensor: Tensor) -> Tensor | tuple[int, bool]:
        """Number of a tensor in what is kept, and whether it was copied; the places, which the rows have anyway."""
        if tensor is self._places:
            return tensor
        sources = [source for source, copy in zip(self._sources, self._made, strict=False) if tensor is copy]
        number = len(self.kept)
        self.kept[number] = sources[0] if sources else tensor
        return number, bool(sources)

    def unpack(self, packed: Tensor | tuple[int, bool]) -> Tensor:
        """That tensor, once: the graph is there longer than what its nodes keep."""
        if isinstance(packed, Tensor):
            return packed
        number, copied = packed
        tensor = self.kept.pop(number)
        return tensor[self._places] if copied else tensor

    def taken(self) -> list[Tensor]:
        """All that is kept, which is then here no more."""
        kept, self.kept, self._made, self._sources = [*self.kept.values()], {}, [], ()
        return kept


class _Kept(torch.autograd.Function):
    """Attention's output as it is. What its backward pass needs is saved here, outside the hooks that leave out copies:
    so gradient checkpointing finds it, and decides what of it is kept and what is computed again.
    """

    @staticmethod
    def forward(ctx: Any, out_NHD: Tensor, copies: _Copies) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(*copies.taken())
        return out_NHD.view_as(out_NHD)

    @staticmethod
    def backward(ctx: Any, gradient_NHD: Tensor) -> tuple[Tensor, None]:
        ctx.copies.kept = dict(enumerate(ctx.saved_tensors))  # attention's own backward pass comes next
        return gradient_NHD, None


@torch.compiler.disable  # nothing is gained: what surrounds the exchange is attention's own kernel
def _exchanged(module: nn.Module, heads: _Heads, forest: Forest, **options: Any) -> Tensor:
    """Attention (B, T / C, H, D) of this rank's part of the sequence: that of its part of the heads, exchanged."""
    context, (query, key, value) = forest.context, heads
    query, key, value = map(context.exchanged, (query, context.repeated(key), context.repeated(value)))
    out = _attention(module, query, key, value, None, forest.whole, **options)[0]
    return context.exchanged(out)


@torch.compiler.disable  # it would be unrolled
def _in_calls(module: Any, heads: _Heads, forest: Forest, window: int | None, **options: Any) -> Tensor:
    """Attention (B, N, H, D), a few branches at a time."""
    groups = heads[0].shape[1] // heads[1].shape[1]
    if getattr(module, "num_key_value_groups", groups) != groups:  # key heads that ranks repeat have fewer queries
        module = SimpleNamespace(num_key_value_groups=groups, is_causal=getattr(module, "is_causal", True))
    lengths, cuts, outputs = [call.length for call in forest.calls], forest.cuts, []
    # Split once: the gradient of each slice would be as large as the whole.
    sizes = [stop - start for start, stop in pairwise(cuts)]
    outside = [part.split(sizes, dim=2) if len(cuts) > 2 else () for part in heads[1:]]
    for number, (query, *keys_and_values) in enumerate(
        zip(*(part.split(lengths, dim=2) for part in heads), strict=True)
    ):
        if pieces := forest.pieces(forest.calls[number]):
            keys_and_values = [
                torch.cat([*(part[n] for n in pieces), last], 2)
                for part, last in zip(outside, keys_and_values, strict=True)
            ]
        mask = forest.mask(number, window, query.dtype)
        outputs.append(_in_one_call(module, query, keys_and_values[0], keys_and_values[1], mask, **options))
    return torch.cat(outputs, dim=1)  # of one, too: compiled code distinguishes views


def _in_one_call(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softcap: float | None = None,
    **options: Any,
) -> Tensor:
    """Attention (B, T, H, D). transformers' function leaves out, or refuses, a soft cap on the scores, which Gemma 2
    has; and where a mask is needed, it copies keys and values for each of the query heads that share them. A single
    token's queries of such heads are rows of one product instead.
    """
    heads, (length, keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    if softcap is None:
        alike = mask is not None and mask.shape[1] == 1 and options.get("position_bias") is None
        if length > 1 or heads == 1 or not alike or torch.is_grad_enabled():
            return sdpa_attention_forward(module, query, key, value, mask, **options)[0]
        rows = query.reshape(len(query), -1, heads, query.shape[3])
        out = nn.functional.scaled_dot_product_attention(rows, key, value, mask, scale=options.get("scaling"))
        return out.reshape(len(query), 1, -1, out.shape[3])
    key, value = (part.repeat_interleave(heads, dim=1) for part in (key, value))
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    scores_BHTS = softcap * torch.tanh(query @ key.mT * (scale / softcap))
    if mask is None and length > 1 and getattr(module, "is_causal", True):
        mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
    if mask is not None:
        hidden = torch.finfo(scores_BHTS.dtype).min
        scores_BHTS = scores_BHTS.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores_BHTS + mask
    exact = torch.promote_types(scores_BHTS.dtype, torch.float32)
    return (scores_BHTS.softmax(dim=-1, dtype=exact).to(value.dtype) @ value).transpose(1, 2)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch can compute attention of all packed rows at once."""
    size = query.shape[-1]
    fits = size == value.shape[-1] and size % 8 == 0 and size <= 256
    return fits and query.dtype in _SIXTEEN_BITS and runs_kernel(query.device)


def runs_kernel(device: torch.device) -> bool:
    """Whether PyTorch has its kernel for packed rows there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


AttentionInterface.register(KIND, _attention)
AttentionInterface.register(CAPPED, _attention)
AttentionMaskInterface.register(CAPPED, AttentionMaskInterface()[KIND])


def has_soft_cap(model: PreTrainedModel) -> bool:
    """Whether a model has a soft cap on the scores of its attention, as Gemma 2 and VaultGemma do."""
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


def holds_scores(model: PreTrainedModel) -> bool:
    """Whether attention computes all scores of a row at once, and keeps them for the backward pass."""
    return model.config.get_text_config()._attn_implementation in ("eager", CAPPED) or has_soft_cap(model)


def keep_soft_cap(model: PreTrainedModel, wanted: str | None = None) -> str | None:
    """Give a model with a soft cap the attention that keeps it in every version of transformers, and packed rows apart,
    in place of "sdpa" and of the "eager" that newer versions choose by themselves.

    Args:
        model: any; one without a soft cap stays as it is.
        wanted: the attention that the configuration names, if it names one.

    Returns:
        What is still to be set.
    """
    replaced = wanted == KIND or (wanted is None and model.config._attn_implementation in ("eager", KIND))
    if not replaced or not has_soft_cap(model) or not getattr(model, "_supports_attention_backend", False):
        return wanted
    model.set_attn_implementation(CAPPED)
    return None


logger = logging.getLogger(__name__)

Packing = Literal["auto", True, False]
_MARK, _SHARES = "_rows_are_packed", "_rows_are_a_forest"
_LAYERS = {"full_attention", "sliding_attention"}
"""The kinds of layers, as configurations name them, that look at other tokens by the attention function alone."""
WINDOWED = {
    "cohere2",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
}
"""Kinds of models that tell the attention function the window that is in their masks, too. Others do not: in
transformers 5 qwen2_moe and phimoe have it only in the mask, olmoe only there."""


class Cut(NamedTuple):
    """Which part of each sequence this rank has."""

    longest: int
    """Of the sequences before they were cut."""
    first: int
    length: int

    def has(self, places_N: Tensor) -> Tensor:
        """Which of these places of the flattened sequences are in it."""
        column_N = places_N % self.longest
        return (self.first <= column_N) & (column_N < self.first + self.length)

    def at(self, places_N: Tensor) -> Tensor:
        """Where those that are in it are in the flattened parts."""
        return places_N // self.longest * self.length + places_N % self.longest - self.first


class Layout(NamedTuple):
    """Rows as a model gets them."""

    inputs: dict[str, Any]
    """Arguments of the model's forward pass."""
    starts_S: Tensor | None = None
    """Where each part of a text begins in the flattened rows; None if the model gets the rows as they are."""
    shifts_S: Tensor | None = None
    """How much earlier it begins in what the model gets."""
    cut: Cut | None = None
    """This rank's part, if ranks share the rows."""

    @property
    def device(self) -> torch.device:
        """On which the model gets them."""
        return self.inputs["input_ids"].device

    def at(self, places_N: Tensor, move: bool = True) -> Tensor:
        """Where places of the flattened rows (B, T), on the CPU, are in the model's flattened hidden states, on its
        device; or there, too, if they are not to be moved.
        """
        places_N = self._whole(places_N)
        places_N = places_N if self.cut is None else self.cut.at(places_N)
        return moved(places_N, self.device) if move else places_N

    def has(self, places_N: Tensor) -> Tensor | slice:
        """Which of these places this rank has; all, if ranks do not share the rows."""
        return slice(None) if self.cut is None else self.cut.has(self._whole(places_N))

    def _whole(self, places_N: Tensor) -> Tensor:
        if self.starts_S is None or self.shifts_S is None:
            return places_N
        return places_N - self.shifts_S[torch.searchsorted(self.starts_S, places_N, right=True) - 1]


def laid_out(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    lengths_B: Tensor | None,
    mask_BT: Tensor | None,
    positions_BT: Tensor | None = None,
    context: ContextGroup = WHOLE,
    routes_BTLE: Tensor | None = None,
    device: torch.device | None = None,
) -> Layout:
    """The rows as this model is to get them; see :func:`choose`.

    Args:
        model: gets them.
        tokens_BT: padded on the right. If they are to be packed, and where any tensor of the rows is on a GPU, the host
            waits for it.
        lengths_B: real tokens of each row; None for those up to the last where the mask is nonzero, of which the rest
            depends on nothing that follows.
        mask_BT: may then not be None.
        positions_BT: of each token in its text; None if each row is one text.
        context: the ranks that share the rows. All of them must call it, and then the model.
        routes_BTLE: experts that the model's routers are to take; see :mod:`async_rlhf.models.routing`.
        device: where the model computes; None for where the tokens are.
    """
    device = tokens_BT.device if device is None else device
    if not is_packed(model) and positions_BT is None:
        tokens_BT = moved(tokens_BT, device)
        rows = Layout({"input_ids": tokens_BT, "use_cache": False, **_routes(routes_BTLE, device)})
    else:
        if lengths_B is None:
            assert mask_BT is not None
            lengths_B = ((mask_BT.cpu() != 0) * torch.arange(1, mask_BT.shape[1] + 1)).amax(dim=1)
        starts_S, lengths_S = _texts(tokens_BT.shape[1], lengths_B.cpu().clamp(min=1), positions_BT)
        if is_packed(model):
            rows = _packed(tokens_BT, starts_S, lengths_S, routes_BTLE, device, shares(model))
        else:
            rows = _split(tokens_BT, starts_S, lengths_S, routes_BTLE, device)
    return rows if context.size == 1 else _cut(rows, context)


def _texts(longest: int, lengths_B: Tensor, positions_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where each text begins in the flattened rows, and its length: (S,), on the CPU."""
    places_T = torch.arange(longest)
    begins_BT = (places_T if positions_BT is None else positions_BT.cpu()) == 0
    starts_S = (begins_BT & (places_T < lengths_B[:, None])).flatten().nonzero().squeeze(1)
    ends_B = torch.arange(len(lengths_B)) * longest + lengths_B
    next_S = torch.cat([starts_S[1:], ends_B[-1:]])
    return starts_S, torch.minimum(next_S, ends_B[starts_S // longest]) - starts_S


def _routes(routes_BTLE: Tensor | None, device: torch.device, cells: Tensor | None = None) -> dict[str, Tensor]:
    """The routes where the model computes, for the tokens as it gets them: by places in the flattened rows."""
    if routes_BTLE is None:
        return {}
    if cells is not None:
        routes_BTLE = routes_BTLE.flatten(0, 1)[cells.to(routes_BTLE.device)]
    return {ROUTES: moved(routes_BTLE, device)}


def _split(
    tokens_BT: Tensor, starts_S: Tensor, lengths_S: Tensor, routes_BTLE: Tensor | None, device: torch.device
) -> Layout:
    """A row for each text. What stands behind it, in place of padding, is as good: no token sees a later one."""
    longest = int(lengths_S.max())
    cells_ST = (starts_S[:, None] + torch.arange(longest)).clamp(max=tokens_BT.numel() - 1)
    tokens_ST = moved(tokens_BT.flatten()[cells_ST.to(tokens_BT.device)], device)
    inputs = {"input_ids": tokens_ST, "use_cache": False, **_routes(routes_BTLE, device, cells_ST)}
    return Layout(inputs, starts_S, starts_S - torch.arange(len(starts_S)) * longest)


def texts_of(tokens_BT: Tensor, starts_S: Tensor, lengths_S: Tensor, routes_BTLE: Tensor | None) -> list[np.ndarray]:
    """What texts have to be compared by: their tokens, and where there are such their routes; (T,) each."""
    tokens_N = tokens_BT.cpu().flatten().numpy().astype(">i4")
    if routes_BTLE is not None:
        routes_NX = routes_BTLE.cpu().flatten(0, 1).flatten(1).contiguous().view(torch.uint8).numpy()
        cells_NX = np.ascontiguousarray(np.concatenate([tokens_N[:, None].view(np.uint8), routes_NX], axis=1))
        tokens_N = cells_NX.view(np.dtype((np.void, cells_NX.shape[1])))[:, 0]
    return [
        tokens_N[start : start + length] for start, length in zip(starts_S.tolist(), lengths_S.tolist(), strict=True)
    ]


def texts_of_rows(
    tokens_BT: Tensor, lengths_B: Tensor, positions_BT: Tensor | None = None, routes_BTLE: Tensor | None = None
) -> list[list[np.ndarray]]:
    """The texts of each row, as they are compared; all on the CPU."""
    starts_S, lengths_S = _texts(tokens_BT.shape[1], lengths_B, positions_BT)
    texts: list[list[np.ndarray]] = [[] for _ in range(len(tokens_BT))]
    rows = (starts_S // tokens_BT.shape[1]).tolist()
    for row, text in zip(rows, texts_of(tokens_BT, starts_S, lengths_S, routes_BTLE), strict=True):
        texts[row].append(text)
    return texts


def _packed(
    tokens_BT: Tensor,
    starts_S: Tensor,
    lengths_S: Tensor,
    routes_BTLE: Tensor | None,
    device: torch.device,
    sharing: bool,
) -> Layout:
    """All texts in one sequence; with ``sharing`` what they have in common at their beginning stands there once."""
    order, alike = list(range(len(lengths_S))), [0] * len(lengths_S)
    if sharing:
        order, alike = walk(texts_of(tokens_BT, starts_S, lengths_S, routes_BTLE))
    branches, paths = grown(lengths_S[order].tolist(), alike)
    parts = [
        (start, stop, int(origin) + position, position)
        for origin, path in zip(starts_S[order], paths, strict=True)
        for (start, stop), position in zip(path, accumulate((b - a for a, b in path), initial=0), strict=False)
    ]
    places_N = torch.empty(branches[-1].start + branches[-1].length, dtype=torch.long)
    positions_N = torch.empty_like(places_N)
    for start, stop, place, position in parts:
        places_N[start:stop] = torch.arange(place, place + stop - start)
        positions_N[start:stop] = torch.arange(position, position + stop - start)
    tokens_N = tokens_BT.flatten()[places_N.to(tokens_BT.device)]
    inputs = {
        "input_ids": moved(tokens_N[None], device),
        "position_ids": moved(positions_N[None], device),
        "attention_mask": torch.empty(1, 1, 0, 0, device=device),  # replaces a mask of N x N, and fits no attention
        "forest": Forest(branches, device),
        "use_cache": False,
        **_routes(routes_BTLE, device, places_N[None]),
    }
    starts_S, shifts_S = torch.tensor(sorted((place, place - start) for start, _, place, _ in parts)).unbind(1)
    return Layout(inputs, starts_S.contiguous(), shifts_S.contiguous())


def _cut(rows: Layout, context: ContextGroup) -> Layout:
    """This rank's part of each sequence, all of which are as long: what is added at the end is a text of its own, or
    padding.
    """
    tokens_BT = rows.inputs["input_ids"]
    longest, device = tokens_BT.shape[1], tokens_BT.device
    length = -(-longest // context.size)
    first, added = context.rank * length, length * context.size - longest
    positions_BT = rows.inputs.get("position_ids", torch.arange(longest, device=device)[None])
    forest = rows.inputs.get("forest")
    forest = Forest([Branch(0, longest + added, ())], device) if forest is None else forest.with_text(added)

    def mine(numbers_BT: Tensor) -> Tensor:
        return F.pad(numbers_BT, (0, added))[:, first : first + length]

    inputs = {
        **rows.inputs,
        "input_ids": mine(tokens_BT),
        "position_ids": mine(positions_BT),
        "attention_mask": torch.empty(1, 1, 0, 0, device=device),
        "forest": forest.shared_by(context),
    }
    if ROUTES in rows.inputs:  # what is added at the end has none: its routers choose for themselves
        routes_BTLE = rows.inputs[ROUTES]
        batch, _, layers, experts = routes_BTLE.shape
        none_BALE = routes_BTLE.new_full((batch, added, layers, experts), no_route(routes_BTLE.dtype))
        inputs[ROUTES] = torch.cat([routes_BTLE, none_BALE], dim=1)[:, first : first + length]
    return rows._replace(inputs=inputs, cut=Cut(longest, first, length))


def is_packed(model: PreTrainedModel) -> bool:
    """Whether the model gets its rows packed."""
    return getattr(model, _MARK, False)


def shares(model: PreTrainedModel) -> bool:
    """Whether what packed rows have in common at their beginning is computed once."""
    return getattr(model, _SHARES, False)


def choose(
    packing: Packing,
    budget: bool,
    models: dict[str, PreTrainedModel],
    sixteen_bits: bool,
    device: torch.device | None = None,
    sharing: bool = True,
) -> None:
    """Decide which of the models get their rows packed from now on.

    Args:
        packing: True for all; False for none; "auto" for those that can be, where tokens limit a pass and it is
            faster: on a CPU, and on a GPU with PyTorch's kernel for packed rows.
        budget: whether tokens, not rows, limit a pass.
        models: by what messages call them. Where weights are sharded, every rank must call it, under autocast if
            there is any: it computes with them.
        sixteen_bits: whether they compute in float16 or bfloat16.
        device: where they compute; None for where their weights are.
        sharing: whether what packed rows have in common at their beginning is computed once, if the model can.

    Raises:
        ConfigError: True, and one of them cannot be.
    """
    for key, model in models.items():
        compute_device = model.device if device is None else device
        wanted = packing is True or (packing == "auto" and budget and (compute_device.type == "cpu" or sixteen_bits))
        why = obstacle(model, compute_device, torch.is_autocast_enabled(compute_device.type)) if wanted else None
        rule = f'must be false or "auto": the {key} is a {type(model).__name__}, {why}'
        require(packing is not True or why is None, "packing", packing, rule)
        if why is not None:
            logger.info("packing: the rows of the %s are padded: it is a %s, %s", key, type(model).__name__, why)
        setattr(model, _MARK, wanted and why is None)
        why = None
        if is_packed(model) and sharing:
            why = _difference(model, compute_device, torch.is_autocast_enabled(compute_device.type), sharing=True)
        if why is not None:
            what = "packing: what rows of the %s share is computed for each: it is a %s, %s"
            logger.info(what, key, type(model).__name__, why)
        setattr(model, _SHARES, is_packed(model) and sharing and why is None)


def require_shared(models: dict[str, PreTrainedModel], size: int, device: torch.device | None = None) -> None:
    """Require that so many ranks can share the rows of each model. With sharded weights every rank must call it, under
    autocast if there is any.

    Args:
        models: by what messages call them.
        size: C, ranks of a group.
        device: where they compute; None for where their weights are.

    Raises:
        ConfigError: their heads cannot be divided, or their attention cannot be replaced; see :func:`obstacle`.
    """
    for name, model in models.items() if size > 1 else ():
        require_heads(name, model.config, size)
        compute_device = model.device if device is None else device
        why = obstacle(model, compute_device, torch.is_autocast_enabled(compute_device.type))
        rule = f"must be 1: the {name} is a {type(model).__name__}, {why}"
        require(why is None, "parallel.context_parallel", size, rule)


def require_heads(name: str, config: PretrainedConfig | None, size: int) -> None:
    """Require that so many ranks can divide a model's query heads; key and value heads are repeated where needed.
    Nothing is known of a model without them, or without a configuration.
    """
    heads = size if config is None else getattr(config.get_text_config(), "num_attention_heads", size)
    rule = f"must divide the {heads} attention heads of the {name}"
    require(heads % size == 0, "parallel.context_parallel", size, rule)


def obstacle(model: PreTrainedModel, device: torch.device | None = None, autocast: bool = False) -> str | None:
    """Why a model's rows cannot be packed; None if they can. With sharded weights every rank must call it.

    Args:
        model: any.
        device: where it computes; None for where its weights are.
        autocast: whether it rounds to 16 bits while it does.
    """
    why = obstacle_in_code(model)
    return _difference(model, model.device if device is None else device, autocast) if why is None else why


def obstacle_in_code(model: PreTrainedModel) -> str | None:
    """The same as far as it shows without computing: the model may have no weights."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if getattr(model, "_is_stateful", False):
        return "whose state would run from one row into the next"
    if kinds:
        return f"whose layers ({', '.join(sorted(kinds))}) would run from one row into the next"
    if not getattr(model, "_supports_attention_backend", False):
        return "whose attention cannot be replaced"
    if "position_ids" not in inspect.signature(type(model.base_model).forward).parameters:
        return "which takes no position ids"
    if config._attn_implementation not in (KIND, CAPPED):
        return f'whose attention is "{config._attn_implementation}", not "{KIND}"'
    if getattr(config, "output_router_logits", False):
        return "whose router reads the attention mask (output_router_logits)"
    if getattr(config, "sliding_window", None) and config.model_type not in WINDOWED:
        return "whose sliding window attention does not get to know"
    return None


@contextmanager
def seen_by_head(model: PreTrainedModel, places_N: Tensor | slice) -> Iterator[list[Tensor]]:
    """Within, the model's head sees only the hidden states at ``places_N``: logits come out as (N, V).

    The head is the largest matrix of many models and its output the largest tensor; prompts and padding need none.

    Yields:
        A list to which each forward pass appends those hidden states, (N, H).
    """
    seen: list[Tensor] = []

    def keep_and_pass_on(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        seen.append(inputs[0].flatten(0, 1)[places_N])
        return (seen[-1],)

    handle = model.get_output_embeddings().register_forward_pre_hook(keep_and_pass_on, prepend=True)
    try:
        yield seen
    finally:
        handle.remove()


def states_at(model: PreTrainedModel, inputs: dict[str, Any], places_N: Tensor | slice) -> Tensor:
    """The hidden states (N, H) at places of what the model gets. A language model is called as a whole: so it gathers
    its weights.
    """
    if not model.can_generate():
        return model.base_model(**inputs).last_hidden_state.flatten(0, 1)[places_N]
    with seen_by_head(model, places_N) as seen:
        model(**inputs)
    return seen[-1]


@torch.no_grad()
def _difference(model: PreTrainedModel, device: torch.device, autocast: bool, sharing: bool = False) -> str | None:
    """The last check: whether short rows, some of which begin alike, come out packed as each does alone."""
    lengths_B = torch.tensor([12, 5, 9, 12])
    tokens_BT = torch.arange(1, 49).view(4, 12)
    tokens_BT[2:, :7] = tokens_BT[0, :7]
    tokens_BT[3, :9] = tokens_BT[2, :9]
    tokens_BT = tokens_BT % model.get_input_embeddings().num_embeddings
    rows = [tokens_BT[i : i + 1, :length].to(device) for i, length in enumerate(lengths_B.tolist())]
    right_NH = torch.cat([states_at(model, {"input_ids": row, "use_cache": False}, slice(None)) for row in rows])
    (places_N,) = (torch.arange(12) < lengths_B[:, None]).flatten().nonzero(as_tuple=True)
    try:
        layout = _packed(tokens_BT, *_texts(12, lengths_B), None, device, sharing)
        found_NH = states_at(model, layout.inputs, layout.at(places_N))
    except Exception as error:  # of any kind: the code is not ours, and the rows can still be padded
        return f"which refuses packed rows ({type(error).__name__}: {error})"
    limit = 1e-4 if right_NH.dtype == torch.float32 and not autocast else 0.1
    same = bool((found_NH - right_NH).abs().max() <= limit * right_NH.abs().max())
    return None if same else "which computes something else for packed rows"
