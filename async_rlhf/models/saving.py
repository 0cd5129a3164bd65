"""Writing models: whole ones in the standard format, with their adapters beside them, and value heads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.adapters import has_adapters, save_adapters
from async_rlhf.models.loading import quietly, stop_token_ids
from async_rlhf.models.quantised import is_quantised, unquantised
from async_rlhf.models.values import VALUE_HEAD
from async_rlhf.models.weights import collected_weights


def write_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, parallel: Parallel = ALONE
) -> None:
    """Write model and tokenizer into a folder, adapters merged; a language model's adapters are also written beside it.

    A reward or value model's adapters are not: without its head, which is trained too, they would be no model. The
    generation config states the end-of-sequence token, so that generation from the saved model stops. Every rank of
    ``parallel`` must call it with the same folder; rank 0 writes.
    """
    adapters = whole = None
    if has_adapters(model) and model.can_generate():
        adapters = collected_weights(model, True, parallel)
    if has_adapters(model) or parallel.is_sharded or is_quantised(model):
        whole = collected_weights(model, False, parallel)
    if not parallel.ranks.is_main:
        return
    if model.can_generate():
        model.generation_config = _that_stops(model, tokenizer)
    if parallel.is_sharded or is_quantised(model):  # it has another class then, and hooks, or no such weights
        model = plain_copy(model, tokenizer, parallel)
    write_copy(model, tokenizer, folder, whole, adapters)


def _that_stops(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    return GenerationConfig(
        eos_token_id=list(stop_token_ids(model, tokenizer)),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )


def write_copy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    whole: dict[str, Tensor] | None,
    adapters: dict[str, Tensor] | None,
) -> None:
    """Write what :func:`write_model` does, of tensors that are in the memory of this host.

    Args:
        model: the model, or its :func:`plain_copy`.
        tokenizer: written beside it.
        folder: where to.
        whole: its weights, without adapters; None for those that it has.
        adapters: a language model's adapters, if it has any.
    """
    if adapters is not None:
        save_adapters(model, adapters, folder / "adapter")
    try:
        with quietly(sum(p.numel() * p.element_size() for p in model.parameters())):
            model.save_pretrained(folder, state_dict=whole)
    except SafetensorError as error:  # a full disk comes as this, not as an OSError
        raise OSError(f"the model could not be written to {str(folder)!r}: {error}") from error
    tokenizer.save_pretrained(folder)


def plain_copy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, parallel: Parallel) -> PreTrainedModel:
    """A copy of the model without weights, adapters and hooks, and not quantised, to write tensors of it with."""
    with torch.device("meta"):
        plain = parallel.architecture_of(model)(unquantised(model))
    if hasattr(model, "_weight_conversions"):  # how transformers renames loaded weights
        plain._weight_conversions = model._weight_conversions
    if model.can_generate():
        plain.generation_config = _that_stops(model, tokenizer)
    if has_adapters(model):
        plain.peft_config = model.peft_config  # how its adapters are described in files
    return plain


def write_value_head(head: nn.Linear, folder: Path, parallel: Parallel = ALONE) -> None:
    """Write a value head into a folder; see :func:`write_model`."""
    whole = collected_weights(head, parallel=parallel)
    if parallel.ranks.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(whole, folder / VALUE_HEAD)
