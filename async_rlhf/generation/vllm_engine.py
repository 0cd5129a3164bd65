"""The engine on vLLM, in this process: its steps are ours to interrupt, and weights are handed over as tensors."""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from async_rlhf.config import ConfigError
from async_rlhf.generation.messages import ModelSpec
from async_rlhf.generation.probe import probe_tokens
from async_rlhf.generation.protocol import Completions, SamplingParams
from async_rlhf.generation.sampling import request_seeds
from async_rlhf.generation.server_client import request_fields
from async_rlhf.types import FinishReason, Prompt, Rollout

CPU_KV_CACHE_GB = 1.0


class VLLMEngine:
    """Samples with vLLM.

    The random numbers of a completion depend on (seed, draw, sample) alone, as vLLM draws them.

    Args:
        spec: the model and vLLM's options.
        params: how to sample.
    """

    def __init__(self, spec: ModelSpec, params: SamplingParams) -> None:
        self.params = params
        self.version = -1
        self.refresh: Callable[[], None] | None = None
        self._vocabulary = spec.config.get_text_config().vocab_size
        self._beat: Callable[[], None] = lambda: None
        self._llm = _start(spec, params)

    def beat_with(self, beat: Callable[[], None]) -> None:
        """Call ``beat`` after every step of vLLM's scheduler."""
        self._beat = beat

    def load(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, str]:
        """See :func:`~async_rlhf.generation.vllm_weights.load_weights`.

        What was cached with the old weights is dropped; requests under way compute it again with the new ones.
        """
        from async_rlhf.generation.vllm_weights import load_weights

        (found,) = self._llm.collective_rpc(load_weights, args=(tensors,))
        if not self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop what it has cached with the old weights")
        self._llm.llm_engine.set_weight_version(str(version))
        self.version = version
        return found

    def generate(self, prompts: Sequence[Prompt], progress: Callable[[int], None] | None = None) -> Completions:
        """K completions for each prompt, in the order of the prompts."""
        from vllm import SamplingParams as VLLMParams

        seeds = request_seeds(self.params.seed, prompts)
        params = [VLLMParams(**request_fields(self.params, seed), detokenize=False) for seed in seeds]
        outputs = self._run([prompt.tokens for prompt in prompts], params, progress)
        return [
            tuple(_rollout(sample) for sample in sorted(output.outputs, key=lambda sample: sample.index))
            for output in outputs
        ]

    def probe(self) -> list[float]:
        """See :func:`~async_rlhf.generation.probe.probe_logprobs`."""
        from vllm import SamplingParams as VLLMParams

        rows = probe_tokens(self._vocabulary).tolist()
        params = VLLMParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        outputs = self._run(rows, [params] * len(rows))
        return [
            output.prompt_logprobs[i][token].logprob
            for output, row in zip(outputs, rows, strict=True)
            for i, token in enumerate(row)
            if i > 0
        ]

    def sleep(self) -> None:
        """Give the GPU's memory back, weights and all: the next thing must be :meth:`load`."""
        self._llm.sleep(level=2)

    def wake(self) -> None:
        """Take the GPU's memory again."""
        self._llm.wake_up()

    def _run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[Any], progress: Callable[[int], None] | None = None
    ) -> list[Any]:
        """vLLM's outputs, in the order of the prompts."""
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        for i, (tokens, given) in enumerate(zip(prompts, params, strict=True)):
            given.output_kind = RequestOutputKind.FINAL_ONLY
            engine.add_request(str(i), {"prompt_token_ids": list(tokens)}, given)
        finished: dict[int, Any] = {}
        while engine.has_unfinished_requests():
            if self.refresh is not None:
                self.refresh()
            for output in engine.step():
                if output.finished:
                    finished[int(output.request_id)] = output
                    if progress is not None:
                        progress(len(finished))
            self._beat()
        return [finished[i] for i in range(len(prompts))]


def _rollout(sample: Any) -> Rollout:
    tokens = tuple(sample.token_ids)
    logprobs = tuple(entry[token].logprob for token, entry in zip(tokens, sample.logprobs, strict=True))
    versions = [0] * len(tokens)
    for span in sample.weight_versions:
        versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
    reason: FinishReason = "stop" if sample.finish_reason == "stop" else "length"
    if not all(map(math.isfinite, logprobs)):
        raise FloatingPointError(f"the logits of weights version {versions[0]} are not finite")
    return Rollout(tokens, logprobs, tuple(versions), reason)


def _start(spec: ModelSpec, params: SamplingParams) -> Any:
    """vLLM in this process, with weights still to be loaded."""
    assert spec.vllm is not None
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    on_cpu = not spec.device.startswith("cuda")
    if not on_cpu and ":" in spec.device and not torch.cuda.is_initialized():
        _show_only(int(spec.device.split(":")[1]))
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(f"generation.engine: vLLM cannot be imported: {error}") from error
    options, kv_cache_gb = spec.vllm, spec.vllm.kv_cache_gb
    if on_cpu and kv_cache_gb is None:
        kv_cache_gb = CPU_KV_CACHE_GB
    config = copy.deepcopy(spec.config)
    config.architectures = [spec.model_class.__name__]
    with tempfile.TemporaryDirectory() as folder, _threads_left_alone():
        config.save_pretrained(folder)
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=str(spec.dtype).removeprefix("torch."),
            seed=0,
            logprobs_mode="processed_logprobs",  # of the temperature-scaled distribution
            max_model_len=spec.max_length,
            max_num_seqs=params.batch_size,
            gpu_memory_utilization=options.gpu_memory_utilization,
            kv_cache_memory_bytes=None if kv_cache_gb is None else int(kv_cache_gb * 2**30),
            block_size=options.block_size,
            enable_prefix_caching=options.enable_prefix_caching,
            enforce_eager=on_cpu if options.enforce_eager is None else options.enforce_eager,
            disable_log_stats=True,
            **options.options,
        )
    return llm


def _show_only(gpu: int) -> None:
    """vLLM takes the first GPU that it sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)


@contextmanager
def _threads_left_alone() -> Iterator[None]:
    """vLLM on a CPU replaces torch.set_num_threads by a warning; the learner may be in the same process."""
    before = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = before


def keep_callable(model: nn.Module) -> None:
    """Let a model of transformers be called where vLLM runs models of the same class in the same process.

    vLLM's backend for transformers' models replaces the class's ``__call__`` by one that asks for an attribute which
    only its own instances have.
    """
    for kind in {type(module) for module in model.modules()}:
        if "__call__" in vars(kind) and not hasattr(kind, "do_not_compile"):
            kind.do_not_compile = True  # type: ignore[attr-defined]
