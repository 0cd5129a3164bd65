"""How and where completions are sampled."""

from __future__ import annotations

import ipaddress
from typing import Literal
from urllib.parse import urlsplit

from async_rlhf.config.base import DEVICE, EACH_ONCE, REQUIRED, SUMS, Rule, configuration, key, require
from async_rlhf.config.common import AnyVLLMConfig, CompletionsConfig, EpisodesConfig, ModelCodeConfig
from async_rlhf.config.engines import able, find
from async_rlhf.config.secrets import API_KEY_VARIABLE, HIDDEN, is_masked

_SERVER_DECIDED = (
    *("api_key", "grpc", "grpc_port", "host", "middleware", "model", "port", "root_path", "trust_remote_code", "uds"),
    "worker_extension_cls",
)
"""Arguments of ``vllm serve`` that decide who is served, or have a key of their own."""

DECIDED = (
    *("model", "load_format", "trust_remote_code", "dtype", "logprobs_mode", "seed", "skip_tokenizer_init"),
    *("max_model_len", "max_num_seqs", "enable_lora", "max_lora_rank", "disable_log_stats", "enable_sleep_mode"),
    *("enable_return_routed_experts", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("distributed_executor_backend", "worker_extension_cls", "speculative_config"),
)
"""Arguments of vLLM that follow from the rest of the configuration."""

Dtype = Literal["float32", "bfloat16", "float16"]

_IDS = Rule(lambda ids: min(ids, default=0) >= 0, "must be ids of tokens, at least 0")
_ONE_EACH = Rule(EACH_ONCE.holds, "must name each server once")
_SENDABLE = Rule(
    lambda text: text != HIDDEN and text.isascii() and text.isprintable() and "" != text == text.strip(),
    "must be printable ASCII without spaces around it: openssl rand -hex 32 prints a good one",
)


@configuration
class VLLMConfig(AnyVLLMConfig):
    """Options of vLLM, for ``engine: vllm`` in the placements "inline" and "process"; servers have their own."""

    tensor_parallel_size = key(1, must_stay=SUMS)
    block_size: int | None = key(None, ge=1)
    """Tokens per block of keys and values, the unit of prefix caching; null for vLLM's choice."""
    enable_prefix_caching: bool = True
    """Compute a prompt once for its K completions."""
    sleep: bool = key(True, role="speed")
    """Give the GPU's memory to the learner while it trains ("inline" only)."""

    def check(self) -> None:
        for name in DECIDED:
            rule = "is decided by the run itself"
            if "parallel" in name:
                rule = "is a key of its own" if name.startswith("tensor") else "is for servers: async-rlhf serve"
            require(name not in self.options, f"options.{name}", self.options.get(name), rule)


EPISODE_CAP = 4096
"""Tokens of an episode after its prompt, unless a run says otherwise or the model has no room for them."""


@configuration
class GenerationConfig(CompletionsConfig, EpisodesConfig):
    """How completions are sampled, and where."""

    engine: str = "transformers"
    """ "transformers" decodes with that library's models and is repeatable bit for bit; "vllm" decodes with vLLM, whose
    log-probabilities differ by the rounding of its kernels (``pip install 'async-rlhf[vllm]'``). "module:NAME" is an
    engine of your own."""
    placement: Literal["auto", "inline", "process", "server"] = "auto"
    """ "inline" samples in the learner's process, in turn with training: with staleness above 0 the run computes the
    same as "process", but nothing overlaps, which suits many small runs at a time; "process" samples in separate
    processes; "server" in vLLM servers reached by URL; "auto" is inline for staleness 0, else process."""
    workers: int = key(1, ge=1, le=1024, why="each is a process")
    """Generator processes; each samples the next prompts of a batch when it is free."""
    prompts_per_request: int | None = key(None, ge=1)
    """How many prompts a worker or server is asked for at a time; a free one takes the next. null makes as many
    requests of each batch as there are workers or servers. Fewer prompts keep workers busy that differ in speed; more
    share one pass. With the engine "transformers" rounding depends on what is decoded together, so this is part of the
    result, and how many workers take the requests is not."""
    urls: list[str] = key([], _ONE_EACH, role="place")
    """URLs of the servers, which ``async-rlhf serve`` starts; each samples the next prompts when it is free."""
    api_key: str | None = key(None, _SENDABLE, role="place")
    """The key that the servers were started with; null takes the environment variable ASYNC_RLHF_API_KEY. It is written
    nowhere. A URL with a user and a password of its own (``https://user:password@host``) gets these instead."""
    weights_transport: Literal["folder", "network"] = key("folder", role="speed")
    """How weights reach servers: "folder" as files in weights_dir, "network" straight from the learner's memory to
    theirs: by NCCL from one GPU to another, else by TCP."""
    weights_dir: str | None = key(None, role="place")
    """Folder for the weights: the learner writes it and every server reads it under the same path; null for ``weights``
    in output_dir."""
    step_timeout = key(60.0, may_change="the machine may be slower")
    in_flight: bool = False
    """Load new weights between two tokens of unfinished completions instead of before a batch, so that no token is
    staler than S. Each is recorded with the version that drew it, which depends on timing: no two runs are alike."""
    seed_per_request: bool = True
    """Give vLLM a seed for each prompt, so that what is sampled depends on nothing else. With false all requests draw
    from one generator of vLLM's: faster on a CPU, where rows with seeds draw one by one, and where vLLM uses its older
    model runner, but no two runs are alike, and what is sampled again comes out differently. Staleness stays exact."""
    replies_from: str | None = key(None, role="place", names="file")
    """Do not ask environments: have them say once more what they said in another run, whose file episodes.jsonl this
    is. ``explain`` does so."""
    stop_tokens: list[str] = key([])
    """Texts of single tokens that end a completion, besides the model's end-of-sequence tokens."""
    stop_token_ids: list[int] = key([], _IDS)
    """The same by their ids."""
    device: str | None = key(None, DEVICE, role="place", must_stay=SUMS)
    """Where generator processes run, e.g. "cuda:1"; null takes the GPUs that the learner does not use, the last first,
    or shares the only GPU with a learner on one rank; if the learner is on the CPU, so are its workers."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", without_gpu="float32")
    """Type of the generator's weights, and so of the published snapshots. Inline generation uses the learner's own.
    "auto" is bfloat16 where the learner computes in it on a GPU, else float32."""
    num_threads: int | None = key(None, ge=1, role="speed", must_stay=SUMS)
    """CPU threads of each generator process; null shares the cores evenly with the learner, or with staleness 0, where
    the learner waits while they sample, among the processes alone."""
    max_restarts: int = key(3, ge=0, role="speed")
    """How often dead generator processes are restarted before the run stops."""
    timeout: float = key(1800.0, gt=0, role="speed")
    """The run stops with an error after this many seconds without an answer from a generator process."""
    heartbeat_timeout: float = key(120.0, gt=0, role="speed")
    """Seconds without a sign of life (a layer of the model computed) after which a generator process that has begun to
    sample is taken to hang: it is killed and restarted."""
    start_timeout: float = key(900.0, gt=0, role="speed")
    """The same for one that has not begun: within this many seconds of its first request it must import its libraries,
    build the model (and, with vLLM, compile it) and load the weights."""
    probe_steps: int = key(10, ge=0, role="log")
    """Batches between two probes, which compare log-probabilities of fixed sequences by generator and learner; 0 for
    none. The checksum of every tensor is always compared."""
    mismatch_samples: int = key(8, ge=0, role="log")
    """Completions of a batch whose log-probabilities the learner also computes, with the weights that sampled them:
    differences then come from the engine, not from the policy's staleness; 0 for none."""
    mismatch_steps: int = key(5, ge=1, role="log")
    """Batches between two such comparisons, after the first few, which are always compared."""
    vllm: VLLMConfig = key(VLLMConfig)
    """Options of vLLM."""

    @property
    def weights_dtype(self) -> Dtype:
        """``dtype``; "float32" while it is "auto", which a run decides when it begins."""
        return "float32" if self.dtype == "auto" else self.dtype

    def check(self) -> None:
        served, engine = self.placement == "server", find(self.engine)
        rule = f'must be {able("server")} with placement "server"'
        self.require(not served or "server" in engine.supports, "engine", rule)
        rule = 'must name at least one server with placement "server", such as "http://localhost:8000"'
        self.require(not served or bool(self.urls), "urls", rule)
        self.require(served or not self.urls, "urls", 'must be empty unless placement is "server"')
        for url in self.urls:
            rule = f"must have its user and password again in the place of {HIDDEN}: they are not written to run.yml"
            require(not is_masked(url), "urls", url, rule)
            require(_is_url(url), "urls", url, "must begin with http:// or https:// and name a host, and a port if any")
        self._check_transports(served)
        super().check()
        if self.max_turns is None:
            self.leaves_out(["step_timeout"], "without max_turns, which says that there are episodes")
        rule = f"must be true unless engine is {able('unseeded')}"
        self.require("unseeded" in engine.supports or self.seed_per_request, "seed_per_request", rule)
        gpus = self.vllm.tensor_parallel_size
        rule = f"must be left out unless engine is {able('vllm_options')}"
        self.require("vllm_options" in engine.supports or gpus == 1, "vllm.tensor_parallel_size", rule)
        rule = f'must be null, "cpu" or "cuda" with vllm.tensor_parallel_size {gpus}, which takes as many GPUs'
        self.require(gpus == 1 or self.device in (None, "cpu", "cuda"), "device", rule)
        rule = f'must be at least {engine.coldest:g} with engine "{self.engine}", which samples no colder'
        self.require(self.temperature >= engine.coldest, "temperature", rule)

    def _check_transports(self, served: bool) -> None:
        """Nothing that would be ignored may be set."""
        self.require(served or self.api_key is None, "api_key", 'must be null unless placement is "server"')
        rule = 'must be null unless placement is "server" and weights_transport "folder"'
        files = served and self.weights_transport == "folder"
        self.require(files or self.weights_dir is None, "weights_dir", rule)
        rule = 'must be "folder" unless placement is "server"'
        self.require(served or self.weights_transport == "folder", "weights_transport", rule)
        rule = 'must be left out with placement "server": such options are for async-rlhf serve'
        self.require(not served or self.vllm == VLLMConfig(), "vllm", rule)

    @property
    def longest_episode(self) -> int:
        """Most tokens after the prompt; a run makes that less if the model has fewer positions."""
        least = 0 if self.max_turns is None else EPISODE_CAP
        return self.episode_length or max(least, (self.max_turns or 1) * self.response_length)

    @property
    def longest_written(self) -> int:
        """Most of these tokens that the policy writes."""
        return min(self.longest_episode, (self.max_turns or 1) * self.response_length)

    @property
    def shares(self) -> int:
        """How many processes or servers share the prompts of a batch."""
        return len(self.urls) or self.workers


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        return False


@configuration
class ServeConfig(AnyVLLMConfig, ModelCodeConfig):
    """A vLLM server for runs with ``generation.placement: server``.

    Only the architecture of the model is read; its weights come from the run, unless ``weights`` says otherwise. If a
    key is set, every request except GET /health needs it, including vLLM's own endpoints for loading weights.
    """

    model: str = key(REQUIRED, names="source")
    """A folder with the policy's config.json, or a hub name (owner/model or owner/model@revision)."""
    host: str = key("127.0.0.1", role="place")
    """Address to listen on; "0.0.0.0" for all. Without a key it must be an address that only this host can reach."""
    port: int = key(8000, ge=1, lt=65536, role="place")
    """Port to listen on; of several servers the first one's, and each of the others has the next."""
    replicas: int = key(1, ge=1, le=1024, why="each is a process", role="place")
    """Servers side by side on this host, each with the whole model and tensor_parallel_size GPUs of its own. A run gets
    all their URLs (``generation.urls``)."""
    api_key: str | None = key(None, _SENDABLE, role="place")
    """The key that requests must send (``Authorization: Bearer KEY``); better given by the environment variable
    ASYNC_RLHF_API_KEY than on the command line, which every user of the host can read."""
    open: bool = key(False, role="place")
    """Listen on other addresses without a key; anyone who reaches the port can then load weights and call methods."""
    weights: Literal["run", "model"] = "run"
    """ "run" waits for a run's weights; "model" serves those of the model, by vLLM's endpoints for chats, texts and
    log-probabilities, to programs that evaluate models. No run can use it then."""
    dtype: Dtype = "bfloat16"
    """Type of the weights; must match ``generation.dtype`` of the run."""
    max_model_len: int | None = key(None, ge=1)
    """Most tokens of prompt and response together; null for the model's own limit."""
    num_threads: int | None = key(None, ge=1, role="speed")
    """CPU threads of each server; null for vLLM's own choice, or with several processes an equal share of the cores."""
    enforce_eager = key(None, role="speed")

    def check(self) -> None:
        rule = "must be an address of this host alone, such as 127.0.0.1, without api_key (the environment variable "
        rule += f"{API_KEY_VARIABLE}); or set open true, and whoever reaches the port can load weights"
        self.require(self.open or self.api_key is not None or _is_loopback(self.host), "host", rule)
        rule = f"must be at most {65536 - self.replicas}, so that all of the {self.replicas} replicas have a port"
        self.require(self.port + self.replicas <= 65536, "port", rule)
        rule = "must be false with api_key, which closes the server"
        self.require(not self.open or self.api_key is None, "open", rule)
        for name in self.options:
            rule = "must be left out: it is a key of its own, or a way past the one that is needed"
            require(name.replace("-", "_").lower() not in _SERVER_DECIDED, f"options.{name}", self.options[name], rule)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may resolve to any interface
        return False
