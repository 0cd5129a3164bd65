"""Loads a snapshot into vLLM's own model, in the process that holds the model, and verifies that it was loaded.

vLLM keeps weights in a different form from a checkpoint: fused, padded, and on a CPU packed for its kernels, so they
cannot be read back and compared. Instead, the code verifies that every tensor arrived with the right bytes under the
right name (the digests are of what vLLM's loader was given), that every parameter was written (all hold NaN before),
and that every packed copy was made anew. The probe and the comparison of log-probabilities then show that vLLM computes
the same with them as the learner.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from async_rlhf.generation.broadcast import Receiver, gpu_of
from async_rlhf.generation.placement import available_cores
from async_rlhf.models.weights import as_in_checkpoints, digests, fold, fold_digests

_HASHING = min(8, available_cores())
"""Threads that compute checksums while weights are loaded; they hold no lock of Python's meanwhile."""


class SnapshotLoader:
    """Methods that ``async-rlhf serve`` adds to the workers of a vLLM server (``--worker-extension-cls``)."""

    def load_snapshot(self, path: str) -> dict[str, str]:
        """Load a file that the learner has published. Returns the digests of this process's share of the tensors."""
        return load_weights(self, load_file(Path(path)).items(), share=self._share())

    def _share(self) -> tuple[int, int]:
        """Which of the server's processes this is, and how many there are."""
        return self.rank, self.vllm_config.parallel_config.world_size  # type: ignore[attr-defined]  # of vLLM's worker

    def receive_snapshot(self, invitation: str) -> dict[str, str]:
        """Load what the learner sends. Returns the digests of this process's share of the tensors; none if the learner
        has to connect anew.

        Args:
            invitation: JSON of :meth:`~async_rlhf.generation.broadcast.Sender.invitation`, and whether checksums are
                ``folded``.
        """
        fields = json.loads(invitation)
        device = torch.device("cuda" if fields["backend"] == "nccl" else "cpu")
        rank = self.rank + 1  # type: ignore[attr-defined]  # of vLLM's worker
        receiver = self.__dict__.setdefault("async_rlhf_receiver", Receiver())
        tensors = receiver.receive(fields, rank, device)
        return {} if tensors is None else load_weights(self, tensors, fields["folded"], self._share())

    def describe_model(self) -> dict[str, Any]:
        """The architecture, and how it is computed."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]  # of vLLM's worker
        model = config.model_config
        # Only plain types: vLLM's reply would hang on others.
        description = {
            "config": model.hf_config.to_dict(),
            "max_model_len": model.max_model_len,
            "logprobs_mode": model.logprobs_mode,
            "device": self.device.type,  # type: ignore[attr-defined]
            "gpu": gpu_of(self.device),  # type: ignore[attr-defined]
            "dtype": str(model.dtype),
            "routes": config.aux_output_config.enable_return_routed_experts,
        }
        return json.loads(json.dumps(description, default=str))


def load_weights(
    worker: Any, tensors: Iterable[tuple[str, Tensor]], folded: bool = False, share: tuple[int, int] = (0, 1)
) -> dict[str, str]:
    """Load a snapshot in place of the model's weights.

    Args:
        worker: of vLLM.
        tensors: with their names in transformers' model; taken one after the other.
        folded: their checksums are computed where the model is. Of those that the learner sends by NCCL it keeps a copy
            on the host, and computes them there.
        share: compute the checksums of every nth tensor, from this number on: (number, n).

    Returns:
        The digest of each tensor of the share that vLLM took.

    Raises:
        RuntimeError: some weights are still the old ones.
    """
    model, config = worker.model_runner.get_model(), worker.vllm_config
    handed: dict[str, Callable[[], dict[str, str]]] = {}
    folds, like = dict[str, Tensor](), dict[str, Tensor]()

    def handing_over() -> Iterator[tuple[str, Tensor]]:
        for number, (name, tensor) in enumerate(tensors):
            # On a GPU in the stream that received it, which is this thread's.
            if number % share[1] != share[0]:
                pass
            elif folded:
                tensor = tensor.to(worker.device)
                folds[name], like[name] = fold(tensor), torch.empty_like(tensor, device="meta")
            elif tensor.is_cuda:
                handed[name] = partial(dict, digests({name: tensor}))
            else:
                handed[name] = pool.submit(digests, {name: tensor}).result
            yield name, tensor

    with torch.no_grad(), set_current_vllm_config(config), ThreadPoolExecutor(_HASHING) as pool:
        packed = _packed(model)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))
        with _new_memory_is_nan():
            initialize_layerwise_reload(model)
            model.load_weights(as_in_checkpoints(config.model_config.hf_text_config, handing_over()))
            finalize_layerwise_reload(model, config.model_config)
        _pack_tied(model, packed)
        _pack_experts(model)
        nan = [name for name in packed if _holds_nan(model.get_submodule(name), config.model_config.dtype)]
    stale = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    stale += [name for name, gemm in _packed(model).items() if gemm is packed.get(name) or name in nan]
    if stale:
        raise RuntimeError(
            f"vLLM kept old weights, or was given NaN: {', '.join(stale[:5])}{' and more' if len(stale) > 5 else ''}"
        )
    worker.model_runner.reset_lora_state()
    checksums = {name: digest for compute in handed.values() for name, digest in compute().items()}
    return checksums | fold_digests(folds, like)


@contextmanager
def _new_memory_is_nan() -> Iterator[None]:
    """vLLM loads into new memory, one layer at a time; fill it with NaN to reveal what was not written."""
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    options: Any = torch.utils.deterministic
    filled = options.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    options.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        options.fill_uninitialized_memory = filled


def _holds_nan(layer: Any, dtype: torch.dtype) -> bool:
    """Whether a packed weight holds NaN. It cannot be read, but its product with zeros shows NaN."""
    sizes = ("embedding_dim", "input_size_per_partition", "input_size")  # a replicated layer has only the last
    size = next(getattr(layer, name) for name in sizes if hasattr(layer, name))
    return bool(layer.cpu_linear(torch.zeros(1, size, dtype=dtype), layer.weight, None).isnan().any())


def _packed(model: nn.Module) -> dict[str, Any]:
    """On a CPU, the matrix product of each layer, which holds its own packed copy of the weight."""
    return {name: module.cpu_linear for name, module in model.named_modules() if hasattr(module, "cpu_linear")}


def _pack_tied(model: nn.Module, before: Mapping[str, Any]) -> None:
    """Pack tied weights again: loading reaches only the embedding, but the head has its own copy."""
    for name, module in model.named_modules():
        if name in before and module.cpu_linear is before[name] and module.weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)


def _pack_experts(model: nn.Module) -> None:
    """Pack the experts of mixtures again: on a CPU, vLLM 0.32 does so when it loads its first weights only."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if experts is not None and type(experts).__module__.endswith(".cpu_moe"):
            experts.process_weights_after_loading(module)
