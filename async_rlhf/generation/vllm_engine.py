"""The engine on vLLM, in this process: we can interrupt between its steps and pass weights as tensors.

Several processes may share its model (tensor parallel). vLLM's scheduler stays in this process even then. Weights are
not sent to its processes: they map the memory where a snapshot lies, and each takes its share.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache
from itertools import count
from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from xxhash import xxh3_128

from async_rlhf.config import ConfigError, VLLMConfig
from async_rlhf.config.base import require
from async_rlhf.generation.audit import LENGTH, probe_tokens
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import Completions, EngineLostError, Occupancy, SamplingParams
from async_rlhf.generation.vllm_requests import own_seed, request_fields, seeds_of, to_sample
from async_rlhf.models.adapters import write_adapter
from async_rlhf.models.publish import (
    Region,
    SharedTensors,
    are_folded,
    layout,
    mapped_at,
    nameless_file,
    pinned,
    tensors_in,
)
from async_rlhf.models.weights import digests
from async_rlhf.system.files import cache_folder
from async_rlhf.system.subprocesses import started_within
from async_rlhf.types import Prompt, RouteShape, Sample

_LOOK_SECONDS = 0.5
_DEATH_SECONDS = 5.0
"""Within which a process that has died is known to be dead, after the others have complained."""
CPU_KV_CACHE_GB = 1.0
CPU_OPTIONS = {
    # A prompt split over two steps would rewind the request's random numbers, which CPU generators cannot do.
    "enable_chunked_prefill": False,
    "block_size": 32,  # vLLM's default, 128, samples a tenth slower, and short prompts would share no block
}


def gpu_environment(devices: Sequence[str], key: str = "generation.device") -> dict[str, str]:
    """Environment of a process in which vLLM runs on these GPUs: vLLM takes the first that it sees. ``key`` names them.

    Raises:
        ConfigError: this process does not see one of them.
    """
    visible, seen = os.environ.get("CUDA_VISIBLE_DEVICES"), []
    for device in devices:
        index = int(device.partition(":")[2] or 0)
        gpus = visible.split(",") if visible else [str(i) for i in range(index + 1)]
        require(index < len(gpus), key, device, f"must be one of the GPUs in CUDA_VISIBLE_DEVICES={visible}")
        seen.append(gpus[index])
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen)}


def cpu_environment() -> dict[str, str]:
    """Environment of a process in which vLLM runs on a CPU: Intel's OpenMP, if vLLM installed it, is faster."""
    try:
        files = importlib.metadata.files("intel-openmp") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    library = next((str(Path(str(file.locate())).resolve()) for file in files if file.name == "libiomp5.so"), None)
    if library is None:
        return {}
    preloaded = os.environ.get("LD_PRELOAD", "")
    if re.search(r"lib(i|g|)omp", preloaded):
        return {}  # one such library is enough, and the user chose it
    # Waiting threads must sleep at once: the learner may need their core.
    return {"LD_PRELOAD": f"{library}:{preloaded}" if preloaded else library, "KMP_BLOCKTIME": "1"}


def environment(devices: Sequence[str]) -> dict[str, str]:
    """Environment of a generator process on these devices."""
    return gpu_environment(devices) if "cuda" in devices[0] else cpu_environment()


class VLLMEngine:
    """Samples with vLLM.

    vLLM draws the random numbers; with a seed per request those of a completion depend only on (seed, draw, sample).

    Args:
        spec: the model and vLLM's options.
        params: how to sample.
    """

    def __init__(self, spec: ModelSpec, params: SamplingParams) -> None:
        self.params = params
        self.version = -1
        self.occupancy = Occupancy()
        self._names = count()
        self._finished: dict[str, Any] = {}
        """Outputs that nobody has taken yet, by the request's name."""
        self.refresh: Callable[[], None] | None = None
        self._spec = spec
        self._heartbeat: Callable[[], None] = lambda: None
        self._adapter: Any = None
        self._llm = _start(spec, params)
        self._routes: Any = None
        """Routes, if they are asked for, and kept beside vLLM's cache instead of returned by vLLM."""
        if params.routes is not None and not spec.device.startswith("cuda"):
            from async_rlhf.generation.vllm_routes import KeptRoutes

            self._routes = KeptRoutes(self._llm, params.routes)
        self._processes = None if spec.gpus == 1 else SeveralProcesses(self._llm)

    def heartbeat_with(self, heartbeat: Callable[[], None]) -> None:
        """Call ``heartbeat`` after every step of vLLM's scheduler."""
        self._heartbeat = heartbeat

    @property
    def unheld(self) -> int:
        """Bytes of a GPU that a step takes at most, as vLLM has measured when it started, and then given back."""
        return max(self._llm.collective_rpc(lambda worker: getattr(worker, "peak_activation_memory", 0)))

    def load(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, str]:
        """See :func:`~async_rlhf.generation.vllm_weights.load_weights`.

        The cache from the old weights is dropped; requests under way compute it again with the new ones.
        """
        with self._watched():
            checksums = self._load_weights(tensors) if self._spec.adapter is None else self._load_adapter(tensors)
        if not self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop what it has cached with the old weights")
        self._llm.llm_engine.set_weight_version(str(version))
        self.version = version
        return checksums

    def _watched(self) -> AbstractContextManager[None]:
        """Within, the death of a process of vLLM's is raised as such."""
        return nullcontext() if self._processes is None else self._processes.watched()

    def _load_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        from async_rlhf.generation.vllm_weights import load_weights

        if self._processes is not None:
            return self._processes.load(tensors)
        (checksums,) = self._llm.collective_rpc(load_weights, args=(tensors.items(), are_folded(tensors)))
        return checksums

    def _load_adapter(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Replace the adapter, also for requests under way."""
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory() as folder:
            write_adapter(self._spec.adapter, tensors, Path(folder))
            self._adapter = LoRARequest("policy", 1, folder, load_inplace=True)
            if not self._llm.llm_engine.add_lora(self._adapter):
                raise RuntimeError("vLLM did not take the adapter")
        # vLLM asks for the adapter by number with every request, and would read the folder each time.
        self._adapter = LoRARequest("policy", 1, folder)
        return digests(tensors, folded=are_folded(tensors))

    def generate(self, prompts: Sequence[Prompt], progress: Callable[[int], None] | None = None) -> Completions:
        """K completions for each prompt, in the order of the prompts. All wait for places at vLLM's scheduler."""
        all_of_them, completions = iter([prompts]), dict[int, tuple[Sample, ...]]()
        for number, samples in self.stream(lambda places: next(all_of_them, ())):
            completions[number] = samples
            if progress is not None:
                progress(len(completions))
        return [completions[number] for number in range(len(prompts))]

    def stream(self, more: Callable[[int], Sequence[Prompt]]) -> Iterator[tuple[int, tuple[Sample, ...]]]:
        """See :class:`~async_rlhf.generation.protocol.Engine`. vLLM's scheduler fills the places."""
        from vllm import SamplingParams as VLLMParams

        under_way: dict[str, tuple[int, Prompt]] = {}
        places, numbers = max(1, self.params.batch_size // self.params.samples_per_prompt), count()
        while True:
            prompts = more(places - len(under_way)) if len(under_way) < places else ()
            for prompt in prompts:
                (seed,) = seeds_of(self.params, [prompt])
                fields = request_fields(self.params, seed, prompt)
                params = VLLMParams(**fields, detokenize=False, flat_logprobs=True)
                under_way[self._add(prompt.tokens, params, self.params.routes)] = next(numbers), prompt
            if not under_way:
                return
            if self.refresh is not None:
                self.refresh()
            self._step()
            for request in under_way.keys() & self._finished.keys():
                number, prompt = under_way.pop(request)
                yield number, self._samples(prompt, self._finished.pop(request))

    def probe(self) -> list[float]:
        """See :func:`~async_rlhf.generation.audit.probe_logprobs`."""
        from vllm import SamplingParams as VLLMParams

        rows = probe_tokens(self._spec.config.get_text_config().vocab_size).tolist()
        options = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        requests = [self._add(row, VLLMParams(**options)) for row in rows]
        while not self._finished.keys() >= set(requests):  # others that are under way go on
            self._step()
        outputs = [self._finished.pop(request) for request in requests]
        return [
            output.prompt_logprobs[i][token].logprob
            for output, row in zip(outputs, rows, strict=True)
            for i, token in enumerate(row)
            if i > 0
        ]

    def sleep(self) -> None:
        """Free the GPU's memory, including the weights: the next call must be :meth:`load`."""
        self._llm.sleep(level=2)

    def wake(self) -> None:
        """Allocate the GPU's memory again."""
        self._llm.wake_up()

    def close(self) -> None:
        """End vLLM and free its memory. Otherwise it would end whenever it is garbage-collected, and destroy what a
        later vLLM in this process shares with it.
        """
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def _add(self, tokens: Sequence[int], params: Any, routes: RouteShape | None = None) -> str:
        """Begin a request; its routes are needed if there is a shape of them. Returns its name."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
        request, prompt = str(next(self._names)), {"prompt_token_ids": list(tokens)}
        internal = self._llm.llm_engine.add_request(request, prompt, params, lora_request=self._adapter)
        if self._routes is not None and routes is not None:
            self._routes.follow(request, internal, params.n)
        return request

    def _step(self) -> None:
        """One step of vLLM's scheduler, for all that is under way."""
        with self._watched():
            outputs = self._llm.llm_engine.step()
            if self._routes is not None:
                self._routes.look()
        self._finished |= {output.request_id: output for output in outputs if output.finished}
        self._heartbeat()

    def _samples(self, prompt: Prompt, output: Any) -> tuple[Sample, ...]:
        """The K completions of a prompt."""
        answers, shape = sorted(output.outputs, key=lambda answer: answer.index), self.params.routes
        if shape is None:
            return tuple(_sample(prompt.tokens, answer) for answer in answers)
        if self._routes is None:
            routes = [answer.routed_experts for answer in answers]
        else:
            routes = [self._routes.take(output.request_id, answer.index) for answer in answers]
        whole = [shape.whole(r, len(prompt.tokens) + len(a.token_ids)) for r, a in zip(routes, answers, strict=True)]
        return tuple(_sample(prompt.tokens, answer, r) for answer, r in zip(answers, whole, strict=True))


def _sample(prompt: Sequence[int], answer: Any, routes_TLE: np.ndarray | None = None) -> Sample:
    logprobs = answer.logprobs  # flat: of one token at each place, in lists, not an object for each
    if logprobs.token_ids != list(answer.token_ids):
        raise RuntimeError("vLLM gave log-probabilities of other tokens than those that it drew")
    spans = [(span.version, span.start, span.end) for span in answer.weight_versions]
    return to_sample(prompt, answer.token_ids, logprobs.logprobs, spans, answer.finish_reason, routes_TLE=routes_TLE)


def _start(spec: ModelSpec, params: SamplingParams) -> Any:
    """Start vLLM in this process; its weights must still be loaded."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are for people who start it by hand
    on_cpu = not spec.device.startswith("cuda")
    size = _head_size(spec.config)
    rule = 'must be a multiple of 32 for vLLM on a CPU; use engine "transformers"'
    require(not on_cpu or size % 32 == 0, "model", f"heads of size {size}", rule)
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(f"generation.engine: vLLM cannot be imported: {error}") from error
    heads, gpus = spec.config.get_text_config().num_attention_heads, spec.gpus
    rule = f"must divide the {heads} heads of the model's attention"
    require(heads % gpus == 0, "generation.vllm.tensor_parallel_size", gpus, rule)
    with ExitStack() as stack:
        stack.enter_context(_process_left_alone())
        stack.enter_context(_class_left_alone(spec.model_class))
        threads = (spec.num_threads or torch.get_num_threads()) if on_cpu else None
        parallel = {} if gpus == 1 else stack.enter_context(several_processes(gpus, threads))
        try:
            return LLM(
                spec.base or str(folder_of(spec)),
                load_format="dummy" if spec.base is None else "auto",
                trust_remote_code=spec.brings_code,
                skip_tokenizer_init=True,
                dtype=str(spec.dtype).removeprefix("torch."),
                seed=0 if params.seed_per_request else own_seed(),
                logprobs_mode="processed_logprobs",  # of the temperature-scaled distribution
                max_model_len=None if spec.max_length is None else max(spec.max_length, LENGTH + 1),  # for the probe
                max_num_seqs=params.batch_size,
                enable_lora=spec.adapter is not None,
                enable_sleep_mode=spec.sleeps,
                disable_log_stats=True,
                **parallel,
                **({} if on_cpu or params.routes is None else {"enable_return_routed_experts": True}),
                **_options(spec.vllm, on_cpu),
                **({} if spec.adapter is None else {"max_lora_rank": _max_rank(spec.adapter.r)}),
            )
        except TypeError as error:
            if "EngineArgs" not in str(error):
                raise
            raise ConfigError(f"generation.vllm.options: got {spec.vllm.options}; {error}") from error
        except ValueError as error:
            kv_cache_gb = _kv_cache_gb(spec.vllm, on_cpu)
            if "cache" not in str(error) or kv_cache_gb is None:
                share = spec.vllm.gpu_memory_utilization
                raise ConfigError(
                    f"generation.vllm: vLLM cannot start (gpu_memory_utilization {share:g}): {error}"
                ) from error
            gb = 1.06 * _least_kv_cache_gb(spec, on_cpu)  # still enough after rounding down to two digits
            rule = f"must be at least {gb:.2g}, for one sequence of {spec.max_length} tokens; vLLM: {error}"
            raise ConfigError(f"generation.vllm.kv_cache_gb: got {kv_cache_gb}; {rule}") from error


def folder_of(spec: ModelSpec) -> Path:
    """The folder of a model without weights, in the cache, named by what is in it: vLLM finds what it has compiled
    before by the model's name.
    """
    config, cache = copy.deepcopy(spec.config), cache_folder() / "vllm"
    config.architectures = [spec.model_class.__name__]
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=cache))
    try:
        config.save_pretrained(made)
        digest = xxh3_128()
        for file in sorted(path for path in made.rglob("*") if path.is_file()):
            digest.update(f"{file.relative_to(made)} ".encode() + file.read_bytes())
        folder = cache / digest.hexdigest()
        with suppress(OSError):  # another process has made it
            made.rename(folder)
        return folder
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _least_kv_cache_gb(spec: ModelSpec, on_cpu: bool) -> float:
    """GiB for keys and values of the longest sequence, in whole blocks, plus the one block that vLLM leaves empty."""
    config = spec.config.get_text_config()
    block = spec.vllm.block_size or (CPU_OPTIONS["block_size"] if on_cpu else 16)
    tokens = (math.ceil((spec.max_length or config.max_position_embeddings) / block) + 1) * block
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * _head_size(config) * spec.dtype.itemsize * tokens / 2**30


def _head_size(config: PretrainedConfig) -> int:
    text = config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _max_rank(rank: int) -> int:
    """The smallest sufficient rank that vLLM has kernels for."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def _kv_cache_gb(config: VLLMConfig, on_cpu: bool) -> float | None:
    return CPU_KV_CACHE_GB if on_cpu and config.kv_cache_gb is None else config.kv_cache_gb


def _options(config: VLLMConfig, on_cpu: bool) -> dict[str, Any]:
    kv_cache_gb = _kv_cache_gb(config, on_cpu)
    return {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if kv_cache_gb is None else int(kv_cache_gb * 2**30),
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        **(CPU_OPTIONS if on_cpu else {}),
        **({} if config.block_size is None else {"block_size": config.block_size}),
        **config.options,
    }


@contextmanager
def _process_left_alone() -> Iterator[None]:
    """Undo side effects: on a CPU, vLLM replaces torch.set_num_threads by a warning and makes every later child preload
    its OpenMP; on a GPU it leaves torch one thread. But the learner may be in the same process.
    """
    before, threads, preloaded = torch.set_num_threads, torch.get_num_threads(), os.environ.get("LD_PRELOAD")
    try:
        yield
    finally:
        torch.set_num_threads = before
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        os.environ.pop("LD_PRELOAD", None)
        if preloaded is not None:
            os.environ["LD_PRELOAD"] = preloaded


@contextmanager
def _class_left_alone(model_class: type[nn.Module]) -> Iterator[None]:
    """Keep transformers models usable as usual while vLLM runs one of the same class.

    vLLM's backend rewrites construction and call of the class itself for its own instances, but the learner, a
    reference model or an evaluation in the same process may have other instances.
    """
    defined = vars(sys.modules[model_class.__module__]).values()
    classes = [kind for kind in defined if isinstance(kind, type) and issubclass(kind, nn.Module)]
    before = {kind: (kind.__init__, kind.__call__) for kind in classes}
    try:
        yield
    finally:
        for kind, (build, call) in before.items():
            if kind.__init__ is not build:
                _divide(kind, build, call)


def _divide(kind: type[nn.Module], build: Callable[..., None], call: Callable[..., Any]) -> None:
    """Restore a class's own methods, except for vLLM's instances."""
    from vllm.config import get_current_vllm_config_or_none

    vllm_build, vllm_call = kind.__init__, kind.__call__

    @functools.wraps(build)
    def __init__(self: nn.Module, *args: Any, **options: Any) -> None:  # noqa: N807
        (build if get_current_vllm_config_or_none() is None else vllm_build)(self, *args, **options)

    @functools.wraps(call)
    def __call__(self: nn.Module, *args: Any, **options: Any) -> Any:  # noqa: N807
        return (vllm_call if "vllm_config" in vars(self) else call)(self, *args, **options)

    kind.__init__, kind.__call__ = __init__, __call__  # type: ignore[method-assign]


@contextmanager
def several_processes(number: int, threads: int | None) -> Iterator[dict[str, Any]]:
    """Within, vLLM may start its processes. Yields arguments of ``vllm.LLM``.

    Args:
        number: of processes, each with a GPU or a share of the CPU's threads.
        threads: on a CPU, of all of them together; None on GPUs.
    """
    from vllm import envs

    environment: dict[str, str | None] = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if threads is not None:
        environment |= threads_of_each(number, threads)
    envs.disable_envs_cache()  # an engine before this one has read them
    with started_within(environment):
        yield {"tensor_parallel_size": number, "distributed_executor_backend": "mp"}


def threads_of_each(number: int, threads: int) -> dict[str, str]:
    """Environment by which so many processes share a CPU. Left to itself, vLLM wants a memory node for each."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, threads // number))}


class SeveralProcesses:
    """vLLM's processes, of one model.

    Args:
        llm: of vLLM, just started.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._executor = llm.llm_engine.engine_core.engine_core.model_executor
        self._copy: tuple[int, Region] | None = None
        llm.collective_rpc(end_with, args=(os.getpid(),))
        # Before multiprocessing's own: they ignore SIGTERM, so it would wait for them forever.
        util.Finalize(None, self._executor.shutdown, exitpriority=100)

    def load(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Have all processes load their shares. Returns the digest of each tensor that all of them were given."""
        arguments = self._region(tensors), are_folded(tensors)
        return together(self._llm.collective_rpc(load_region, args=arguments))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, an error that comes of a process's death is raised as such.

        Raises:
            EngineLostError: a process has died.
        """
        try:
            yield
        except Exception as error:
            deadline = time.monotonic() + _DEATH_SECONDS
            while time.monotonic() < deadline:
                if not all(worker.proc.is_alive() for worker in self._executor.workers):
                    raise EngineLostError(f"lost a process of vLLM's: {error}") from error
                time.sleep(_LOOK_SECONDS / 10)
            raise

    def _region(self, tensors: Mapping[str, Tensor]) -> Region:
        """Where other processes find them: where they are, if that is possible, else in a copy."""
        if isinstance(tensors, SharedTensors):
            return tensors.region
        if self._copy is None:
            specs, size = layout(tensors)
            fd = nameless_file(size)
            self._copy = fd, Region(f"/proc/{os.getpid()}/fd/{fd}", 0, size, specs)
        region = self._copy[1]
        for name, target in tensors_of(region).items():
            target.copy_(tensors[name])
        return region


def together(shares: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The digests of all processes' shares, by name."""
    return {name: digest for each in shares for name, digest in each.items()}


def load_region(worker: Any, region: Region, folded: bool) -> dict[str, str]:
    """In vLLM's process: :func:`~async_rlhf.generation.vllm_weights.load_weights` from memory of another process, which
    all processes read: each computes the checksums of its share of the tensors.
    """
    from async_rlhf.generation.vllm_weights import load_weights

    share = worker.rank, worker.vllm_config.parallel_config.tensor_parallel_size
    return load_weights(worker, tensors_of(region).items(), folded, share)


def tensors_of(region: Region) -> dict[str, Tensor]:
    """The tensors in a region of any process of this user on this host, without a copy."""
    return tensors_in(_memory(region.path)[region.start : region.start + region.size], region.specs)


_pins = ExitStack()


@lru_cache(maxsize=2)
def _memory(path: str) -> Tensor:
    memory = mapped_at(path)
    if torch.cuda.is_initialized():  # in a process that has weights on a GPU; until it ends
        _pins.enter_context(pinned(memory))
    return memory


def end_with(worker: Any, parent: int, end: Callable[[int], None] = os._exit) -> None:
    """In vLLM's process: end when the one that has started it is gone, however busy or stuck this one is."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        end(1)

    threading.Thread(target=watch, daemon=True).start()
