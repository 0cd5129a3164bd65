"""How rows reach a model: padded on the right, or packed one after the other, without padding.

Packed rows are one sequence (1, N) whose position ids begin anew at each row. Everything but attention treats a token
by itself, so it needs no change. Attention must not look into another row: transformers' masks for that would have
N x N elements, so the model's attention function is called for each row instead, or once with the bounds of the rows
where PyTorch has a kernel for it (on GPUs, in 16 bits). It gets to know the rows by an argument that transformers hands
through to it. Layers that are computed again for the backward pass get the same argument again.

Rows that several ranks share (distributed/context.py) take the same way, padded ones too: a model gets this rank's part
of each, and its attention the whole of it.

A row may have several texts, one after the other, none of which sees another: the conversations of an agent's episode.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from async_rlhf.config.base import require
from async_rlhf.distributed.context import WHOLE, ContextGroup
from async_rlhf.models.routing import ROUTES, no_route

logger = logging.getLogger(__name__)

Packing = Literal["auto", True, False]
_Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values: (B, H, T, D)."""
_MARK = "_rows_are_packed"
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
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


@dataclass
class PackedRows:
    """Which tokens of a packed sequence are a row, or a text of one.

    Compiled code looks at no attribute of such an object that it does not use. Of a tuple it would look at all, and the
    lengths are as many as there are rows: there would be a graph for each number of them.
    """

    lengths: list[int]
    longest: int
    starts: Tensor
    """Where each begins, and where the last one ends: int32, on the device."""
    context: ContextGroup = WHOLE
    """The ranks that share the sequence; its lengths are of all of it."""


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
    """Where each text begins in the flattened rows; None if the model gets the rows as they are."""
    shifts_S: Tensor | None = None
    """How much earlier it begins in what the model gets."""
    cut: Cut | None = None
    """This rank's part, if ranks share the rows."""

    def at(self, places_N: Tensor) -> Tensor:
        """Where places of the flattened rows (B, T) are in the model's flattened hidden states."""
        places_N = self._whole(places_N)
        return places_N if self.cut is None else self.cut.at(places_N)

    def has(self, places_N: Tensor) -> Tensor | slice:
        """Which of these places this rank has; all, if ranks do not share the rows, and else the host waits."""
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
) -> Layout:
    """The rows as this model is to get them; see :func:`choose`.

    Args:
        model: gets them.
        tokens_BT: padded on the right.
        lengths_B: real tokens of each row; None for those up to the last where the mask is nonzero, of which the rest
            depends on nothing that follows.
        mask_BT: may then not be None. Where it is on a GPU, the host waits for it.
        positions_BT: of each token in its text; None if each row is one text.
        context: the ranks that share the rows. All of them must call it, and then the model.
        routes_BTLE: experts that the model's routers are to take; see :mod:`async_rlhf.models.routing`.
    """
    if not is_packed(model) and positions_BT is None:
        rows = Layout({"input_ids": tokens_BT, "use_cache": False, **_routes(routes_BTLE, tokens_BT)})
    else:
        if lengths_B is None:
            assert mask_BT is not None
            lengths_B = ((mask_BT.cpu() != 0) * torch.arange(1, mask_BT.shape[1] + 1)).amax(dim=1)
        texts = _texts(tokens_BT.shape[1], lengths_B.cpu().clamp(min=1), positions_BT)
        rows = (_packed if is_packed(model) else _split)(tokens_BT, *texts, routes_BTLE)
    return rows if context.size == 1 else _cut(rows, context)


def _texts(longest: int, lengths_B: Tensor, positions_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where each text begins in the flattened rows, and its length: (S,), on the CPU."""
    places_T = torch.arange(longest)
    begins_BT = (places_T if positions_BT is None else positions_BT.cpu()) == 0
    starts_S = (begins_BT & (places_T < lengths_B[:, None])).flatten().nonzero().squeeze(1)
    ends_B = torch.arange(len(lengths_B)) * longest + lengths_B
    next_S = torch.cat([starts_S[1:], ends_B[-1:]])
    return starts_S, torch.minimum(next_S, ends_B[starts_S // longest]) - starts_S


def _routes(routes_BTLE: Tensor | None, tokens_BT: Tensor, cells: Tensor | None = None) -> dict[str, Tensor]:
    """The routes where the tokens are, in the order in which the model gets these: by places in the flattened rows."""
    if routes_BTLE is None:
        return {}
    routes_BTLE = routes_BTLE.to(tokens_BT.device, non_blocking=True)
    return {ROUTES: routes_BTLE if cells is None else routes_BTLE.flatten(0, 1)[cells]}


def _split(tokens_BT: Tensor, starts_S: Tensor, lengths_S: Tensor, routes_BTLE: Tensor | None = None) -> Layout:
    """A row for each text. What stands behind it, in place of padding, is as good: no token sees a later one."""
    device, longest = tokens_BT.device, int(lengths_S.max())
    cells_ST = (starts_S[:, None] + torch.arange(longest)).clamp(max=tokens_BT.numel() - 1).to(device)
    inputs = {"input_ids": tokens_BT.flatten()[cells_ST], "use_cache": False}
    inputs |= _routes(routes_BTLE, tokens_BT, cells_ST)
    return Layout(inputs, starts_S.to(device), (starts_S - torch.arange(len(starts_S)) * longest).to(device))


def _packed(tokens_BT: Tensor, starts_S: Tensor, lengths_S: Tensor, routes_BTLE: Tensor | None = None) -> Layout:
    """All on the device of the tokens, which the host does not wait for."""
    device = tokens_BT.device
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths_S.cumsum(0)])
    shifts_S, packed_N = starts_S - bounds[:-1], torch.arange(int(bounds[-1]))
    places_N = (packed_N + shifts_S.repeat_interleave(lengths_S)).to(device, non_blocking=True)
    lengths = lengths_S.tolist()
    packed = PackedRows(lengths, max(lengths), bounds.int().to(device, non_blocking=True))
    inputs = {
        "input_ids": tokens_BT.flatten()[places_N][None],
        "position_ids": (packed_N - bounds[:-1].repeat_interleave(lengths_S))[None].to(device, non_blocking=True),
        "attention_mask": torch.empty(1, 1, 0, 0, device=device),  # replaces a mask of N x N, and fits no attention
        "packed_rows": packed,
        "use_cache": False,
        **_routes(routes_BTLE, tokens_BT, places_N[None]),
    }
    return Layout(inputs, starts_S.to(device, non_blocking=True), shifts_S.to(device, non_blocking=True))


def _cut(rows: Layout, context: ContextGroup) -> Layout:
    """This rank's part of each sequence, all of which are as long: what is added at the end is a text of its own, or
    padding.
    """
    tokens_BT = rows.inputs["input_ids"]
    longest, device = tokens_BT.shape[1], tokens_BT.device
    length = -(-longest // context.size)
    first, added = context.rank * length, length * context.size - longest
    positions_BT = rows.inputs.get("position_ids", torch.arange(longest, device=device)[None])
    packed = rows.inputs.get("packed_rows")
    if packed is None:
        whole = longest + added
        packed = PackedRows([whole], whole, torch.arange(0, whole + 1, whole, dtype=torch.int32, device=device))
    elif added:
        starts = F.pad(packed.starts, (0, 1), value=longest + added)
        packed = PackedRows([*packed.lengths, added], max(packed.longest, added), starts)

    def mine(numbers_BT: Tensor) -> Tensor:
        return F.pad(numbers_BT, (0, added))[:, first : first + length]

    inputs = {
        **rows.inputs,
        "input_ids": mine(tokens_BT),
        "position_ids": mine(positions_BT),
        "attention_mask": torch.empty(1, 1, 0, 0, device=device),
        "packed_rows": replace(packed, context=context),
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


def choose(
    packing: Packing,
    budget: bool,
    models: dict[str, PreTrainedModel],
    sixteen_bits: bool,
    device: torch.device | None = None,
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

    Raises:
        ConfigError: True, and one of them cannot be.
    """
    for key, model in models.items():
        place = model.device if device is None else device
        wanted = packing is True or (packing == "auto" and budget and (place.type == "cpu" or sixteen_bits))
        why = obstacle(model, place, torch.is_autocast_enabled(place.type)) if wanted else None
        right = f'must be false or "auto": the {key} is a {type(model).__name__}, {why}'
        require(packing is not True or why is None, "packing", packing, right)
        if why is not None:
            logger.info("packing: the rows of the %s are padded: it is a %s, %s", key, type(model).__name__, why)
        setattr(model, _MARK, wanted and why is None)


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
        place = model.device if device is None else device
        why = obstacle(model, place, torch.is_autocast_enabled(place.type))
        right = f"must be 1: the {name} is a {type(model).__name__}, {why}"
        require(why is None, "parallel.context_parallel", size, right)


def require_heads(name: str, config: PretrainedConfig | None, size: int) -> None:
    """Require that so many ranks can divide a model's query heads; key and value heads are repeated where needed.
    Nothing is known of a model without them, or without a configuration.
    """
    heads = size if config is None else getattr(config.get_text_config(), "num_attention_heads", size)
    right = f"must divide the {heads} attention heads of the {name}"
    require(heads % size == 0, "parallel.context_parallel", size, right)


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
    if config._attn_implementation != "sdpa":
        return f'whose attention is "{config._attn_implementation}", not "sdpa"'
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
def _difference(model: PreTrainedModel, device: torch.device, autocast: bool) -> str | None:
    """The last check: whether two short rows come out packed as each does alone."""
    lengths_B = torch.tensor([5, 3])
    tokens_BT = torch.arange(1, 11, device=device).view(2, 5) % model.get_input_embeddings().num_embeddings
    alone = [tokens_BT[i : i + 1, :length] for i, length in enumerate(lengths_B.tolist())]
    right_NH = torch.cat([states_at(model, {"input_ids": row, "use_cache": False}, slice(None)) for row in alone])
    try:
        found_NH = states_at(model, _packed(tokens_BT, *_texts(5, lengths_B)).inputs, slice(None))
    except Exception as error:  # of any kind: the code is not ours, and the rows can still be padded
        return f"which refuses packed rows ({type(error).__name__}: {error})"
    limit = 1e-4 if right_NH.dtype == torch.float32 and not autocast else 0.1
    same = bool((found_NH - right_NH).abs().max() <= limit * right_NH.abs().max())
    return None if same else "which computes something else for packed rows"


def _attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    packed_rows: PackedRows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention by PyTorch, and the same for packed rows and for those that ranks share."""
    heads = query_BHTD, key_BHTD, value_BHTD
    if packed_rows is None:
        return sdpa_attention_forward(module, *heads, attention_mask, **options)
    window = options.pop("sliding_window", None) or None  # some models say 0 for none
    if torch.is_autocast_enabled(query_BHTD.device.type):  # casts for its own operations alone, the kernel is not one
        dtype = torch.get_autocast_dtype(query_BHTD.device.type)
        heads = query_BHTD.to(dtype), key_BHTD.to(dtype), value_BHTD.to(dtype)
    if packed_rows.context.size > 1:
        return _shared(module, heads, packed_rows, sliding_window=window, **options), None
    if len(query_BHTD) == 1 and _has_kernel(heads[0], heads[2]):
        query, key, value = (part.squeeze(0).transpose(0, 1) for part in heads)
        bounds = (packed_rows.starts, packed_rows.starts, packed_rows.longest, packed_rows.longest)
        sees, grouped = (-1 if window is None else window - 1, 0), query.shape[1] != key.shape[1]
        scale = options.get("scaling")
        out_NHD = varlen_attn(query, key, value, *bounds, scale=scale, window_size=sees, enable_gqa=grouped)
        assert isinstance(out_NHD, Tensor)  # more only if asked for
        return out_NHD[None], None
    return _row_by_row(module, heads, packed_rows, window, **options), None


@torch.compiler.disable  # nothing is gained: what surrounds the exchange is attention's own kernel
def _shared(module: nn.Module, heads: _Heads, packed_rows: PackedRows, **options: Any) -> Tensor:
    """Attention (B, T / C, H, D) of this rank's part of the sequence: that of its part of the heads, exchanged."""
    context, (query, key, value) = packed_rows.context, heads
    query, key, value = map(context.exchanged, (query, context.repeated(key), context.repeated(value)))
    packed_rows = replace(packed_rows, context=WHOLE)
    return context.exchanged(_attention(module, query, key, value, None, packed_rows, **options)[0])


@torch.compiler.disable  # it would be unrolled
def _row_by_row(module: Any, heads: _Heads, packed_rows: PackedRows, window: int | None, **options: Any) -> Tensor:
    groups = heads[0].shape[1] // heads[1].shape[1]
    if getattr(module, "num_key_value_groups", groups) != groups:  # key heads that ranks repeat have fewer queries
        module = SimpleNamespace(num_key_value_groups=groups, is_causal=getattr(module, "is_causal", True))
    found = []
    for row in zip(*(part.split(packed_rows.lengths, dim=2) for part in heads), strict=True):
        mask = _window(row[0].shape[2], window, row[0].device)
        found.append(sdpa_attention_forward(module, *row, mask, **options)[0])
    return torch.cat(found, dim=1) if len(found) > 1 else found[0]


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch can compute attention of all packed rows at once."""
    size = query.shape[-1]
    fits = size == value.shape[-1] and size % 8 == 0 and size <= 256
    return fits and query.dtype in _SIXTEEN_BITS and runs_kernel(query.device)


def runs_kernel(device: torch.device) -> bool:
    """Whether PyTorch has its kernel for packed rows there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which of the last ``window`` tokens each token sees; None if each sees all tokens before it."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    behind = places[:, None] - places
    return ((behind >= 0) & (behind < window))[None, None]


AttentionInterface.register("sdpa", _attention)
