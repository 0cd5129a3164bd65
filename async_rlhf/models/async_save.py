"""Copies of what is trained, in the standard format: taken at one moment, written later and in another thread."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.distributed.parallel import Parallel
from async_rlhf.models.adapters import has_adapters
from async_rlhf.models.saving import plain_copy, write_copy
from async_rlhf.models.values import VALUE_HEAD
from async_rlhf.models.weights import collected_weights, saved_buffers

Write = Callable[[Path], None]
Named = Iterable[tuple[str, Tensor]]
Tensors = dict[str, Tensor]
WriteWith = Callable[[Path, Named], None]


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
        adapters = None
        if has_adapters(model) and isinstance(model, PreTrainedModel) and model.can_generate():
            adapters = collected_weights(model, True, parallel, copied=True)
        whole = collected_weights(model, False, parallel, copied=True, on_device={} if changed else on_device)
        return partial(self._write, whole, adapters)

    def _write(self, whole: Tensors, adapters: Tensors | None, folder: Path, parameters: Named) -> None:
        tensors = chain(parameters, whole.items())
        if self._plain is None:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(dict(tensors), folder / VALUE_HEAD)
            return
        assert self._tokenizer is not None
        write_copy(self._plain, self._tokenizer, folder, tensors, adapters)
