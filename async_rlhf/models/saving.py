"""Writing models: whole ones in the standard format, with their adapters beside them, and value heads; at once, or from
copies that are taken at one moment and written later, in another thread.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, groupby
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.adapters import has_adapters, save_adapters
from async_rlhf.models.loading import quietly, that_stops
from async_rlhf.models.quantised import is_quantised, unquantised
from async_rlhf.models.values import VALUE_HEAD
from async_rlhf.models.weights import collected_weights, iterate_weights, layer_of, saved_buffers
from async_rlhf.system.files import naming

Write = Callable[[Path], None]
Named = Iterable[tuple[str, Tensor]]
WriteWith = Callable[[Path, Named], None]

FILE_BYTES = 1 << 31
"""Of the weights in one file, unless a layer has more; while it is written, memory holds it twice."""


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    parallel: Parallel = ALONE,
    dtype: torch.dtype | None = None,
) -> None:
    """Write model and tokenizer into a folder, adapters merged; a language model's adapters are also written beside it.

    A reward or value model's adapters are not: without its head, which is trained too, they would be no model. The
    generation config is the model's, and states the end-of-sequence token, so that generation from the saved model
    stops. Every rank of ``parallel`` must call it with the same folder; rank 0 writes. Weights are rounded to
    ``dtype``, but not buffers.
    """
    adapters = _adapters(model, parallel)
    rounded = dtype not in (None, model.dtype)
    others = has_adapters(model) or parallel.is_sharded or is_quantised(model) or rounded
    named = iterate_weights(model, parallel=parallel, dtype=dtype if rounded else None)
    tensors = named if others and parallel.takes_part else None
    if not parallel.ranks.is_main:
        deque(tensors or (), maxlen=0)  # gathers what rank 0 writes
        return
    if model.can_generate():
        model.generation_config = that_stops(model, tokenizer)
    if parallel.is_sharded or is_quantised(model) or rounded:  # it has another class, hooks, other weights
        model = plain_copy(model, tokenizer, parallel)
        model = model.to(dtype) if rounded else model
    write_copy(model, tokenizer, folder, tensors, adapters)


def _adapters(model: nn.Module, parallel: Parallel, copied: bool = False) -> dict[str, Tensor] | None:
    """A language model's adapters, if it has any."""
    if not has_adapters(model) or not isinstance(model, PreTrainedModel) or not model.can_generate():
        return None
    return collected_weights(model, True, parallel, copied=copied)


def write_copy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    tensors: Named | None,
    adapters: dict[str, Tensor] | None,
) -> None:
    """Write what :func:`write_model` does.

    Args:
        model: the model, or its :func:`plain_copy`.
        tokenizer: written beside it.
        folder: where to.
        tensors: its weights, without adapters, layer by layer, each of which is used at once; None for those that it
            has.
        adapters: a language model's adapters, if it has any.
    """
    generation = model.generation_config if model.can_generate() else None
    try:
        with naming(folder), quietly(sum(p.numel() * p.element_size() for p in model.parameters())):
            if adapters is not None:
                save_adapters(model, adapters, folder / "adapter")
            if generation is not None:  # of what base models come with, transformers refuses to write some
                model.generation_config = GenerationConfig()
            if tensors is None:
                model.save_pretrained(folder)
            else:
                _write_in_files(model, folder, tensors)
            if generation is not None:
                (folder / GENERATION_CONFIG_NAME).write_text(generation.to_json_string(), encoding="utf-8")
            tokenizer.save_pretrained(folder)
    finally:
        if generation is not None:
            model.generation_config = generation


def _write_in_files(model: PreTrainedModel, folder: Path, tensors: Named) -> None:
    """Write weights as ``save_pretrained`` does, but without more of them in memory than a file has: one layer, or as
    many as fit into :data:`FILE_BYTES`.
    """
    parts: list[Path] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def write() -> None:
        model.save_pretrained(folder, state_dict=dict(held))
        parts.append((folder / SAFE_WEIGHTS_NAME).rename(folder / f"part-{len(parts):05d}.safetensors"))
        held.clear()

    for _, layer in groupby(tensors, key=lambda named: layer_of(named[0])):
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in layer}
        added = sum(tensor.nbytes for tensor in copies.values())
        if held and size + added > FILE_BYTES:
            write()
            size = 0
        held |= copies
        total, size = total + added, size + added
        del copies
    write()
    if len(parts) == 1:
        parts[0].rename(folder / SAFE_WEIGHTS_NAME)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = part.rename(folder / f"model-{number:05d}-of-{len(parts):05d}.safetensors")
        with safe_open(file, "pt") as written:
            places |= dict.fromkeys(written.keys(), file.name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def plain_copy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, parallel: Parallel) -> PreTrainedModel:
    """A copy of the model without weights, adapters and hooks, and not quantised, to write tensors of it with."""
    with torch.device("meta"):
        plain = parallel.architecture_of(model)(unquantised(model))
    if hasattr(model, "_weight_conversions"):  # how transformers renames loaded weights
        plain._weight_conversions = model._weight_conversions
    if model.can_generate():
        plain.generation_config = that_stops(model, tokenizer)
    if has_adapters(model):
        plain.peft_config = model.peft_config  # how its adapters are described in files
    return plain


def write_value_head(head: nn.Linear, folder: Path, parallel: Parallel = ALONE) -> None:
    """Write a value head into a folder; see :func:`write_model`."""
    whole = collected_weights(head, parallel=parallel)
    if parallel.ranks.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        with naming(folder / VALUE_HEAD):
            save_file(whole, folder / VALUE_HEAD)


class ModelCopies:
    """Takes copies of a model that is trained.

    What a thread writes them with is its own: a copy of the model without weights, and one of the tokenizer. Both are
    made here, for making a model in another thread could meet what the training thread does with transformers.

    Args:
        model: a policy, a value model, or a value head.
        tokenizer: written beside a model.
        parallel: how the weights are spread over ranks.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, parallel: Parallel) -> None:
        self._model, self._parallel = model, parallel
        is_main = parallel.ranks.is_main
        self._plain = plain_copy(model, tokenizer, parallel) if is_main and isinstance(model, PreTrainedModel) else None
        self._tokenizer = copy.deepcopy(tokenizer) if is_main else None
        self.names = [name for name, _ in model.named_parameters()]
        """Of the parameters, layer by layer: asked for here, as a sharded model changes while it computes."""

    @property
    def in_shards(self) -> bool:
        """Whether the shards that the ranks write hold all parameters, so that none has to be gathered for this."""
        return self._parallel.is_sharded and all(parameter.requires_grad for parameter in self._model.parameters())

    def take(self, on_device: Mapping[str, Tensor]) -> WriteWith:
        """Copy the weights as they are now into the memory of rank 0's host. Every rank must call it.

        Args:
            on_device: copies that are there already, under the model's names of parameters.

        Returns:
            A function that writes them into a folder, on rank 0; it may be called in any thread. It also gets the
            parameters, if they are :attr:`in_shards`.
        """
        model, parallel = self._model, self._parallel
        if self.in_shards:
            buffers = {name: buffer.to("cpu", copy=True) for name, buffer in saved_buffers(model)}
            return partial(self._write, buffers, None)
        changed = has_adapters(model) or parallel.is_sharded  # the files then hold other tensors than this rank
        adapters = _adapters(model, parallel, copied=True)
        whole = collected_weights(model, False, parallel, copied=True, on_device={} if changed else on_device)
        return partial(self._write, whole, adapters)

    def _write(
        self, whole: dict[str, Tensor], adapters: dict[str, Tensor] | None, folder: Path, parameters: Named
    ) -> None:
        tensors = chain(parameters, whole.items())
        if self._plain is None:
            folder.mkdir(parents=True, exist_ok=True)
            with naming(folder / VALUE_HEAD):
                save_file(dict(tensors), folder / VALUE_HEAD)
            return
        assert self._tokenizer is not None
        write_copy(self._plain, self._tokenizer, folder, tensors, adapters)
