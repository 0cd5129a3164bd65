"""How and where completions are sampled."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from async_rlhf.config.base import Checked, require
from async_rlhf.config.secrets import API_KEY_VARIABLE, HIDDEN, is_masked

_SERVER_DECIDED = (
    "api_key",
    "grpc",
    "grpc_port",
    "host",
    "middleware",
    "model",
    "port",
    "root_path",
    "trust_remote_code",
    "uds",
    "worker_extension_cls",
)
"""Arguments of ``vllm serve`` that say who is served, or have a key of their own."""

DECIDED = (
    "model",
    "load_format",
    "trust_remote_code",
    "dtype",
    "logprobs_mode",
    "seed",
    "skip_tokenizer_init",
    "max_model_len",
    "max_num_seqs",
    "enable_lora",
    "max_lora_rank",
    "disable_log_stats",
    "enable_sleep_mode",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "distributed_executor_backend",
    "worker_extension_cls",
    "speculative_config",
)
"""Arguments of vLLM that follow from the rest of the configuration."""

Dtype = Literal["float32", "bfloat16", "float16"]


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Colder, log-probabilities overflow; hotter, every token is as likely as any other to float32's last digits."""
MAX_WORKERS = 1024


def check_temperature(value: float) -> None:
    """It can be sampled at. Raises :class:`ConfigError`."""
    require(value > 0, "temperature", value, "must be above 0")
    right = f"must be {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}: beyond, logits / temperature are no use to float32"
    require(MIN_TEMPERATURE <= value <= MAX_TEMPERATURE, "temperature", value, right)


@dataclass(frozen=True)
class VLLMConfig(Checked):
    """Options of vLLM, for ``engine: vllm`` in the placements "inline" and "process"; a server has its own.

    Args:
        gpu_memory_utilization: share of the GPU's memory that vLLM may take in all.
        kv_cache_gb: GiB for keys and values; null takes what gpu_memory_utilization leaves, and 1 on a CPU.
        block_size: tokens of a block of keys and values, the unit of prefix caching; null for vLLM's choice.
        enable_prefix_caching: compute a prompt once for its K completions.
        enforce_eager: do not capture CUDA graphs nor compile; null for false on a GPU and true on a CPU, where
            compiling costs minutes.
        sleep: give the GPU's memory to the learner while it trains ("inline" only).
        options: more arguments of ``vllm.LLM``, by name.
    """

    gpu_memory_utilization: float = 0.9
    kv_cache_gb: float | None = None
    block_size: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool | None = None
    sleep: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        self.above(0, "gpu_memory_utilization", "kv_cache_gb")
        self.at_least(1, "block_size")
        share = self.gpu_memory_utilization
        require(share <= 1, "gpu_memory_utilization", share, "must be at most 1")
        for name in DECIDED:
            right = "is decided by the run itself" if "parallel" not in name else "is for servers: async-rlhf serve"
            require(name not in self.options, f"options.{name}", self.options.get(name), right)


@dataclass(frozen=True)
class GenerationConfig(Checked):
    """How completions are sampled, and where.

    Args:
        engine: "transformers" decodes with the models of that library, bit for bit repeatable; "vllm" with vLLM, whose
            log-probabilities differ by the rounding of its kernels (``pip install 'async-rlhf[vllm]'``).
        placement: "inline" samples in the learner's process, in turn with training (staleness 0 only); "process"
            samples in processes of their own; "server" in vLLM servers reached by URL; "auto" is inline for staleness
            0, else process.
        workers: generator processes; they share the prompts of each batch.
        urls: of the servers, started by ``async-rlhf serve``; they share the prompts of each batch.
        api_key: the key that the servers were started with; null takes the environment variable ASYNC_RLHF_API_KEY. It
            is written nowhere. A URL with a user and a password of its own (``https://user:password@host``) gets these
            instead.
        weights_road: how weights reach servers: "folder" as files in weights_dir, "network" straight from the learner's
            memory to theirs, by Gloo between CPUs and NCCL between GPUs.
        weights_dir: folder in which servers find the weights: the learner writes it, every server reads it under the
            same name; null for ``weights`` in output_dir.
        in_flight: load new weights between two tokens of the completions under way, instead of before a batch; needs
            staleness_mode "bounded". Each token is recorded with the version that drew it.
        temperature: of the sampling distribution. Every log-probability is of the scaled distribution.
        response_length: most new tokens of a completion, the stop token included.
        stop_tokens: texts of single tokens that end a completion, beside the model's end-of-sequence tokens.
        batch_size: most completions decoded together.
        device: where generator processes run, e.g. "cuda:1"; null takes the GPUs that the learner does not use, the
            last first, or shares its only one; the workers of a learner on the CPU run there too.
        dtype: of the generator's weights, and so of the published snapshots. Inline, the learner's own are used.
        num_threads: CPU threads of each generator process; null shares the cores evenly with the learner.
        max_restarts: how often dead generator processes are started again before the run stops.
        timeout: seconds without an answer from a generator process after which the run stops with an error.
        heartbeat_timeout: seconds without a sign of life (a layer of the model computed) after which a generator
            process that has begun to sample is held to hang, and is killed and started again.
        start_timeout: the same for one that has not begun: within so many seconds of its first request it has to
            import its libraries, build the model (and, with vLLM, compile it) and load the weights.
        probe_steps: batches between two probes, which compare log-probabilities of fixed sequences by generator and
            learner; 0 for none. The checksum of every tensor is compared always.
        mismatch_samples: completions of each batch whose log-probabilities the learner computes too, with the weights
            that sampled them: what differs is the engine's doing, not the policy's lag; 0 for none.
        vllm: options of vLLM.
    """

    engine: Literal["transformers", "vllm"] = "transformers"
    placement: Literal["auto", "inline", "process", "server"] = "auto"
    workers: int = 1
    urls: list[str] = field(default_factory=list)
    api_key: str | None = None
    weights_road: Literal["folder", "network"] = "folder"
    weights_dir: str | None = None
    in_flight: bool = False
    temperature: float = 0.7
    response_length: int = 53
    stop_tokens: list[str] = field(default_factory=list)
    batch_size: int = 512
    device: str | None = None
    dtype: Dtype = "float32"
    num_threads: int | None = None
    max_restarts: int = 3
    timeout: float = 1800.0
    heartbeat_timeout: float = 120.0
    start_timeout: float = 900.0
    probe_steps: int = 10
    mismatch_samples: int = 8
    vllm: VLLMConfig = field(default_factory=VLLMConfig)

    def check(self) -> None:
        self.at_least(1, "workers", "response_length", "batch_size", "num_threads")
        self.at_least(0, "max_restarts", "probe_steps", "mismatch_samples")
        check_temperature(self.temperature)
        self.above(0, "timeout", "heartbeat_timeout", "start_timeout")
        self.is_device("device")
        served = self.placement == "server"
        right = 'must be "vllm" with placement "server"'
        require(not served or self.engine == "vllm", "engine", self.engine, right)
        right = 'must name at least one server with placement "server", such as "http://localhost:8000"'
        require(not served or bool(self.urls), "urls", self.urls, right)
        require(served or not self.urls, "urls", self.urls, 'must be empty unless placement is "server"')
        for url in self.urls:
            right = f"must have its user and password again in the place of {HIDDEN}: they are not written to run.yml"
            require(not is_masked(url), "urls", url, right)
            require(_is_url(url), "urls", url, "must begin with http:// or https:// and name a host, and a port if any")
        require(len(set(self.urls)) == len(self.urls), "urls", self.urls, "must name each server once")
        self._check_roads(served)
        self.at_most(MAX_WORKERS, "each is a process", "workers")
        self.at_most(10**7, "no model reads more tokens", "response_length")
        right = 'must be at least 0.01 with engine "vllm", which samples no colder'
        require(self.engine != "vllm" or self.temperature >= 0.01, "temperature", self.temperature, right)

    def _check_roads(self, served: bool) -> None:
        """Nothing that would be ignored may be set."""
        require(served or self.api_key is None, "api_key", None, 'must be null unless placement is "server"')
        check_key(self.api_key)
        right = 'must be null unless placement is "server" and weights_road "folder"'
        files = served and self.weights_road == "folder"
        require(files or self.weights_dir is None, "weights_dir", self.weights_dir, right)
        right = 'must be "folder" unless placement is "server"'
        require(served or self.weights_road == "folder", "weights_road", self.weights_road, right)
        right = 'must be left out with placement "server": such options are for async-rlhf serve'
        require(not served or self.vllm == VLLMConfig(), "vllm", self.vllm, right)

    @property
    def shares(self) -> int:
        """How many processes or servers share the prompts of a batch."""
        return len(self.urls) or self.workers


def check_key(key: str | None) -> None:
    """A key can be sent in a header. Raises :class:`ConfigError`, which does not show it."""
    sendable = key is None or (key != HIDDEN and key.isascii() and key.isprintable() and "" != key == key.strip())
    require(
        sendable, "api_key", HIDDEN, "must be printable ASCII without spaces around it, such as: openssl rand -hex 32"
    )


def _is_url(text: str) -> bool:
    try:
        place = urlsplit(text)
        return place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
    except ValueError:  # a port that is none
        return False


@dataclass(frozen=True)
class ServeConfig(Checked):
    """A vLLM server for runs with ``generation.placement: server``.

    Only the architecture of the model is read; its weights come from the run. With a key, every request but GET /health
    needs it, vLLM's own endpoints for loading weights included.

    Args:
        model: a folder with the policy's config.json, or a hub name.
        host: address to listen on; "0.0.0.0" for every one. Without a key it must be one of this host alone.
        port: to listen on.
        api_key: what requests have to send (``Authorization: Bearer KEY``); better given by the environment variable
            ASYNC_RLHF_API_KEY than on the command line, which every user of the host can read.
        open: listen on other addresses without a key; whoever reaches the port can load weights and call methods.
        trust_remote_code: run Python code that comes with the model; false makes it an error that a model needs that.
        dtype: of the weights; as ``generation.dtype`` of the run.
        max_model_len: most tokens of prompt and response together; null for what the model can take.
        tensor_parallel_size: GPUs that share the model.
        gpu_memory_utilization: share of each GPU's memory that vLLM may take in all.
        kv_cache_gb: GiB for keys and values; null takes what gpu_memory_utilization leaves, and 1 on a CPU.
        num_threads: CPU threads; null for vLLM's own choice.
        enforce_eager: do not capture CUDA graphs nor compile; null for false on a GPU and true on a CPU.
        options: more arguments of ``vllm serve``, by name.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    open: bool = False
    trust_remote_code: bool = False
    dtype: Dtype = "bfloat16"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gb: float | None = None
    num_threads: int | None = None
    enforce_eager: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        self.at_least(1, "port", "max_model_len", "tensor_parallel_size", "num_threads")
        self.above(0, "gpu_memory_utilization", "kv_cache_gb")
        require(self.port < 65536, "port", self.port, "must be below 65536")
        check_key(self.api_key)
        right = "must be an address of this host alone, such as 127.0.0.1, without api_key (the environment variable "
        right += f"{API_KEY_VARIABLE}); or set open true, and whoever reaches the port can load weights"
        require(self.open or self.api_key is not None or _is_loopback(self.host), "host", self.host, right)
        right = "must be false with api_key, which closes the server"
        require(not self.open or self.api_key is None, "open", self.open, right)
        for name in self.options:
            right = "must be left out: it is a key of its own, or a way past the one that is needed"
            require(name.replace("-", "_").lower() not in _SERVER_DECIDED, f"options.{name}", self.options[name], right)
        require(
            self.gpu_memory_utilization <= 1, "gpu_memory_utilization", self.gpu_memory_utilization, "must be at most 1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may be that of any interface
        return False
