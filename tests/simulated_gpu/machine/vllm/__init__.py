"""Stands in for vLLM where there are simulated GPUs, as its build for CPUs knows no CUDA.

The names are those that the package uses, with what they mean to it: the memory that vLLM takes, a scheduler's step for
a token of each request, labels of weights, processes that share a model. Tokens are computed by transformers' model,
whole rows each time.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import simulated_machine
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from async_rlhf.models.weights import as_in_checkpoints

__version__ = "0.32.0"


@dataclass
class SamplingParams:
    """What a request asks for."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    detokenize: bool = True
    flat_logprobs: bool = False
    output_kind: Any = None


@dataclass
class _Row:
    """One answer under way."""

    index: int
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def logprobs(self) -> Any:
        """As with flat_logprobs, which is asked for."""
        return SimpleNamespace(token_ids=self.token_ids, logprobs=self.scores)

    @property
    def weight_versions(self) -> list[Any]:
        starts = [i for i, label in enumerate(self.labels) if i == 0 or label != self.labels[i - 1]]
        ends = [*starts[1:], len(self.labels)]
        return [SimpleNamespace(version=self.labels[a], start=a, end=b) for a, b in zip(starts, ends, strict=True)]


@dataclass
class _Request:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    outputs: list[_Row]
    prompt_logprobs: list[Any] | None = None

    @property
    def finished(self) -> bool:
        return all(row.finish_reason for row in self.outputs)


class _Model(nn.Module):
    """vLLM's model: it takes tensors by their names in checkpoints."""

    def __init__(self, config: Any, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config).to(dtype).to(device).eval()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        held = dict(as_in_checkpoints(self.model.config, self.model.named_parameters()))
        for name, tensor in tensors:
            held[name].data.copy_(tensor)


class Worker:
    """vLLM's, on one GPU.

    Args:
        rank: among those that share the model.
        arguments: of :class:`LLM`.
    """

    def __init__(self, rank: int, world: int, arguments: dict[str, Any]) -> None:
        self.rank, self.device = rank, torch.device("cuda", rank)
        self._utilization = arguments.get("gpu_memory_utilization", 0.9)
        self._cache_bytes = arguments.get("kv_cache_memory_bytes")
        torch.cuda.set_device(self.device)
        self._take()
        config, dtype = AutoConfig.from_pretrained(arguments["model"]), getattr(torch, arguments["dtype"])
        length = arguments.get("max_model_len") or config.get_text_config().max_position_embeddings
        model_config = SimpleNamespace(
            hf_config=config, hf_text_config=config.get_text_config(), dtype=dtype, max_model_len=int(length),
            logprobs_mode=arguments.get("logprobs_mode", "raw_logprobs"),
        )  # fmt: skip
        self.vllm_config = SimpleNamespace(
            model_config=model_config,
            parallel_config=SimpleNamespace(world_size=world, tensor_parallel_size=world),
            aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
        )
        with simulated_machine.host.within_share():
            model = _Model(config, dtype, str(self.device))
        self.model_runner = SimpleNamespace(get_model=lambda: model, reset_lora_state=lambda: None)

    def _take(self) -> None:
        """Take the memory that vLLM does: its share of the GPU, of which nobody else may have any."""
        free, total = torch.cuda.mem_get_info(self.device)
        wanted = int(self._utilization * total)
        if self._cache_bytes is not None:
            wanted = min(free, self._cache_bytes)
        elif free < wanted:
            left = (
                f"({free / 2**30:.2f}/{total / 2**30:.2f} GiB) on startup is less than desired GPU memory utilization"
            )
            raise ValueError(
                f"Free memory on device {self.device} {left} ({self._utilization}). Decrease GPU memory use."
            )
        simulated_machine.host.take(self.device.index, wanted)
        self._wanted = wanted

    def sleep(self) -> None:
        simulated_machine.host.take(self.device.index, -self._wanted)

    def wake_up(self) -> None:
        self._take()

    @torch.no_grad()
    def logits(self, rows: list[list[int]]) -> list[Tensor]:
        """Of each row, (T, V) on the host, in float32."""
        longest = max(map(len, rows))
        with simulated_machine.host.within_share():
            tokens_BT = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)
            logits_BTV = self.model_runner.get_model().model(input_ids=tokens_BT, use_cache=False).logits.float().cpu()
        return [logits_TV[: len(row)] for logits_TV, row in zip(logits_BTV, rows, strict=True)]


class _Processes:
    """Workers in processes of their own: what the package reads of vLLM's executor."""

    def __init__(self, number: int, arguments: dict[str, Any]) -> None:
        context = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
        self.workers, self._pipes = [], []
        for rank in range(number):
            ours, theirs = context.Pipe()
            options = {"target": _serve, "args": (rank, number, arguments, theirs), "name": f"VLLM::Worker_TP{rank}"}
            process = context.Process(**options, daemon=True)
            process.start()
            theirs.close()
            self.workers.append(SimpleNamespace(proc=process))
            self._pipes.append(ours)
        for pipe in self._pipes:
            _require(pipe.recv())

    def call(self, method: Any, arguments: Sequence[Any], only: int | None = None) -> list[Any]:
        pipes = self._pipes if only is None else [self._pipes[only]]
        for pipe in pipes:
            pipe.send((method, arguments))
        return [_require(pipe.recv()) for pipe in pipes]

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.proc.kill()
            worker.proc.join()


class _Alone:
    """A worker in this process."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._worker = _extended(arguments)(0, 1, arguments)

    def call(self, method: Any, arguments: Sequence[Any], only: int | None = None) -> list[Any]:
        return [_called(self._worker, method, arguments)]

    def shutdown(self) -> None:
        self._worker.sleep()


def _extended(arguments: dict[str, Any]) -> type[Worker]:
    name = arguments.get("worker_extension_cls")
    if name is None:
        return Worker
    module, _, kind = name.rpartition(".")
    extension = getattr(__import__(module, fromlist=[kind]), kind)
    return type("Worker", (Worker, extension), {})


def _called(worker: Worker, method: Any, arguments: Sequence[Any]) -> Any:
    return getattr(worker, method)(*arguments) if isinstance(method, str) else method(worker, *arguments)


def _serve(rank: int, world: int, arguments: dict[str, Any], pipe: Connection) -> None:
    try:
        worker = _extended(arguments)(rank, world, arguments)
        pipe.send((True, None))
    except Exception as error:
        pipe.send((False, error))
        return
    while True:
        try:
            method, given = pipe.recv()
        except (EOFError, ConnectionResetError):  # the engine's process is gone, which a rank may notice late
            time.sleep(60)
            return
        try:
            pipe.send((True, _called(worker, method, given)))
        except Exception as error:
            pipe.send((False, error))


def _require(answer: tuple[bool, Any]) -> Any:
    right, value = answer
    if not right:
        raise value
    return value


class LLM:
    """vLLM in this process, or in several that share a model."""

    def __init__(self, model: str, **arguments: Any) -> None:
        arguments["model"] = model
        number = arguments.get("tensor_parallel_size", 1)
        self._executor: Any = _Alone(arguments) if number == 1 else _Processes(number, arguments)
        self._requests: dict[str, _Request] = {}
        self._label, self._draws = "default", arguments.get("seed", 0)
        core = SimpleNamespace(model_executor=self._executor)
        self.llm_engine: Any = SimpleNamespace(
            add_request=self._add, step=self._step, set_weight_version=self._set_label, add_lora=lambda request: True,
            reset_prefix_cache=lambda reset_running_requests: True,
            engine_core=SimpleNamespace(shutdown=self._executor.shutdown, engine_core=core),
        )  # fmt: skip

    def collective_rpc(self, method: str | Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
        return self._executor.call(method, args)

    def sleep(self, level: int) -> None:
        self._executor.call("sleep", ())

    def wake_up(self) -> None:
        self._executor.call("wake_up", ())

    def _set_label(self, label: str) -> None:
        self._label = label

    def _add(self, name: str, prompt: dict[str, Any], params: SamplingParams, lora_request: Any = None) -> str:
        if (params.top_p, params.top_k, params.min_p) != (1.0, 0, 0.0) and params.top_k != -1:
            raise NotImplementedError("the simulated vLLM samples from the whole distribution")
        rows = []
        for index in range(params.n):
            self._draws += 1
            seed = self._draws if params.seed is None else params.seed + index
            rows.append(_Row(index, torch.Generator().manual_seed(seed)))
        self._requests[name] = _Request(name, prompt["prompt_token_ids"], params, rows)
        return name

    def _step(self) -> list[_Request]:
        """One more token for each answer."""
        time.sleep(float(os.environ.get("SIMULATED_SECONDS_A_STEP", "0")))
        going = [(each, row) for each in self._requests.values() for row in each.outputs if row.finish_reason is None]
        if going:
            texts = [[*each.prompt, *row.token_ids] for each, row in going]
            (found,) = self._executor.call("logits", (texts,), only=0)
            for (each, row), logits_TV in zip(going, found, strict=True):
                self._draw(each, row, logits_TV)
        done = [each for each in self._requests.values() if each.finished]
        for each in done:
            del self._requests[each.request_id]
        return done

    def _draw(self, each: _Request, row: _Row, logits_TV: Tensor) -> None:
        logprobs_TV = torch.log_softmax(logits_TV / each.params.temperature, dim=-1)
        if each.params.prompt_logprobs is not None and each.prompt_logprobs is None:
            pairs = enumerate(each.prompt[1:])
            scores = [{token: SimpleNamespace(logprob=float(logprobs_TV[i, token]))} for i, token in pairs]
            each.prompt_logprobs = [None, *scores]
        token = int(torch.multinomial(logprobs_TV[-1].exp(), 1, generator=row.generator))
        row.token_ids.append(token)
        row.scores.append(float(logprobs_TV[-1, token]))
        row.labels.append(self._label)
        if token in each.params.stop_token_ids:
            row.finish_reason = "stop"
        elif len(row.token_ids) == each.params.max_tokens:
            row.finish_reason = "length"
