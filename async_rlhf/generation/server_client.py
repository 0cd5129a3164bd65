"""The HTTP client of a vLLM server: tokens in, tokens out, and the weights that draw them."""

from __future__ import annotations

import base64
import json
import os
import time
from asyncio import Semaphore, sleep
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.json import ParseOptions, ReadOptions, read_json
from transformers import PretrainedConfig

from async_rlhf.config import ConfigError, GenerationConfig
from async_rlhf.config.base import require
from async_rlhf.config.secrets import API_KEY_VARIABLE, apart, masked
from async_rlhf.generation.audit import LENGTH
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.generation.vllm_requests import OtherWeightsError, request_fields, to_sample
from async_rlhf.system.files import from_json
from async_rlhf.types import Prompt, RouteShape, Sample

_TIMEOUT = httpx.Timeout(None, connect=10.0)
"""No limit for sampling: the generator has its own."""
_ENDING_SECONDS, _LOOK_SECONDS = 3.0, 0.25
"""How long a server that has answered with an error is looked at, and how often."""
_ARCHITECTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "layer_norm_eps",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
)

_SPAN = pa.struct({"version": pa.string(), "start": pa.int64(), "end": pa.int64()})
_CHOICE = pa.struct(
    {
        "index": pa.int64(),
        "finish_reason": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.struct({"content": pa.list_(pa.struct({"logprob": pa.float64()}))}),
        "weight_versions": pa.list_(_SPAN),
        "routed_experts": pa.string(),
    }
)
_ANSWER = pa.schema({"choices": pa.list_(_CHOICE)})
"""What is read of an answer with completions."""


class ServerGoneError(RuntimeError):
    """The server does not answer, or has lost the weights: it was stopped or restarted. Retrying may help."""


class ServerClient:
    """One server.

    Args:
        url: such as "http://localhost:8000".
        key: the key that it was started with; None for none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = masked(url.rstrip("/"))
        """For messages."""
        # Further prompts wait, because each connection takes a file descriptor. New weights do not wait behind them.
        self._prompts = Semaphore(256)
        # vLLM's server closes connections that are idle for 5 s; one that is taken up just then would be lost.
        limits = httpx.Limits(keepalive_expiry=2.0)
        self._http = httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, **_access(url, key))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, seed: int | None, prefix: str
    ) -> tuple[Sample, ...]:
        """K completions of a prompt. The label of their weights must be ``prefix`` followed by the version.

        Raises:
            ServerGoneError: some tokens come from weights with another label.
        """
        tokens = prompt.tokens
        fields = {"token_ids": list(tokens), "sampling_params": request_fields(params, seed, prompt)}
        async with self._prompts:
            choices = await self._post("/inference/v1/generate", parse=_choices, json=fields)
        choices = sorted(choices, key=lambda choice: choice["index"])
        return tuple(_sample(tokens, choice, prefix, params.routes) for choice in choices)

    async def prompt_logprobs(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Log-probability of each token of the rows except each row's first."""
        all_logprobs = []
        for row in rows:
            fields = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            answer = await self._post(
                "/inference/v1/generate", json={"token_ids": list(row), "sampling_params": fields}
            )
            logprobs = answer["prompt_logprobs"]
            all_logprobs += [logprobs[i][str(token)]["logprob"] for i, token in enumerate(row) if i > 0]
        return all_logprobs

    async def weight_version(self) -> str:
        """The label of the weights that the server holds."""
        return (await self._request("GET", "/weight_info"))["weight_version"]

    async def is_there(self) -> bool:
        """Whether the server answers."""
        try:
            await self.weight_version()
        except ServerGoneError:
            return False
        return True

    async def load(self, file: Path) -> list[dict[str, str]]:
        """Have the server load a file that it sees under the same path. Returns the digests of each of its workers."""
        answer = await self._post("/collective_rpc", json={"method": "load_snapshot", "args": [str(file)]})
        return answer["results"]

    async def receive(self, invitation: dict[str, Any]) -> list[dict[str, str]]:
        """The same with weights that the learner sends at the same time."""
        args = [json.dumps(invitation)]
        answer = await self._post("/collective_rpc", json={"method": "receive_snapshot", "args": args})
        return answer["results"]

    async def forget_cached(self) -> None:
        """Drop what was computed with earlier weights; requests under way compute it again."""
        answer = await self._post("/reset_prefix_cache", params={"reset_running_requests": True})
        if not answer["success"]:
            raise GeneratorError(f"{self.url} did not drop what it has cached with the old weights")

    async def set_weight_version(self, label: str) -> None:
        """Label what is drawn from now on."""
        await self._post("/update_weight_version", json={"new_version": label})

    async def pause(self) -> None:
        """Pause all requests; returns once nothing is being computed."""
        await self._post("/pause", params={"mode": "keep"})

    async def resume(self) -> None:
        """Resume the paused requests."""
        await self._post("/resume")

    async def _ends(self) -> bool:
        """Whether the server is about to end: one whose engine has died answers with errors for a while before that,
        and says that it is well for a moment.
        """
        for _ in range(round(_ENDING_SECONDS / _LOOK_SECONDS)):
            if not (await self._http.get("/health")).is_success:
                return True
            await sleep(_LOOK_SECONDS)
        return False

    async def _post(self, path: str, **options: Any) -> Any:
        return await self._request("POST", path, **options)

    async def _request(self, method: str, path: str, parse: Callable[[bytes], Any] = from_json, **options: Any) -> Any:
        try:
            answer = await self._http.request(method, path, **options)
            if answer.is_success:
                return parse(answer.content)
            ends = answer.status_code >= 500 and await self._ends()
        except (httpx.TransportError, ValueError) as error:
            raise ServerGoneError(f"does not answer: {type(error).__name__} {error}".rstrip()) from error
        if ends:
            raise ServerGoneError(f"is ending: {_reason(answer)}")
        raise GeneratorError(f"{self.url}{path} answered {answer.status_code}: {_reason(answer)}")


def key_of(config: GenerationConfig) -> str | None:
    """The key of the servers: as configured, else from the environment."""
    return config.api_key or os.environ.get(API_KEY_VARIABLE) or None


def _access(url: str, key: str | None) -> dict[str, Any]:
    """Arguments of an httpx client."""
    plain, login = apart(url.rstrip("/"))
    options: dict[str, Any] = {"base_url": plain, "trust_env": False}
    if login is not None:
        return options | {"auth": login}
    return options | ({} if key is None else {"headers": {"Authorization": f"Bearer {key}"}})


def check_server(
    url: str, policy: PretrainedConfig, config: GenerationConfig, max_length: int, routes: bool = False
) -> list[dict[str, Any]]:
    """Require that a server can be used and has the policy's architecture.

    Args:
        url: the server's.
        policy: its configuration.
        config: of generation; ``heartbeat_timeout`` is how many seconds to wait for a server that is still starting.
        max_length: most tokens of prompt and response together.
        routes: whether it has to say to which experts it sent each token.

    Returns:
        The description that each of its processes gives of itself.

    Raises:
        ConfigError: says what is wrong with it.
    """
    rule = "start it with: async-rlhf serve --model MODEL --port PORT (vLLM 0.32 or newer)"
    with httpx.Client(timeout=30.0, **_access(url, key_of(config))) as http:
        _wait_until_up(http, url, config.heartbeat_timeout)
        response = http.get("/weight_info")
        if response.status_code in (401, 403):
            said = "another key than its own" if "authorization" in http.headers else "no key"
            must = f"must be the key that it was started with (or set the environment variable {API_KEY_VARIABLE})"
            raise ConfigError(f"generation.api_key: the server at {url!r} was given {said}; {must}")
        answer = response.is_success and http.post("/collective_rpc", json={"method": "describe_model"})
        if not answer or not answer.is_success:
            response = http.get("/version")
            version = response.json().get("version") if response.is_success else None
            what = "is no vLLM server" if version is None else f"runs vLLM {version} without what the weights need"
            raise ConfigError(f"generation.urls: the server at {url!r} {what}; {rule}")
        workers = answer.json()["results"]
        described = workers[0]
    served, ours = described["config"], policy.to_dict()
    differing = [
        f"{name} {served.get(name)!r} instead of {ours.get(name)!r}"
        for name in _ARCHITECTURE
        if name in ours and served.get(name) != ours[name]
    ]
    rule = "must be a server of the policy's architecture"
    require(not differing, "generation.urls", url, f"it serves a model with {', '.join(differing)}; {rule}")
    mode, length = described["logprobs_mode"], described["max_model_len"]
    rule = 'must run with --logprobs-mode processed_logprobs, as "async-rlhf serve" does'
    require(mode == "processed_logprobs", "generation.urls", url, f"its log-probabilities are {mode!r}; {rule}")
    rule = f"must take max_prompt_length + response_length = {max_length} (--max-model-len), and {LENGTH + 1} at least"
    require(length >= max(max_length, LENGTH + 1), "generation.urls", url, f"it takes at most {length} tokens; {rule}")
    rule = f"must be false: the server at {url!r} returns no routes; on a GPU it does with the option "
    rule += "enable_return_routed_experts of vLLM (--options of async-rlhf serve)"
    require(described.get("routes", False) or not routes, "router_replay", True, rule)
    dtype, mine = described["dtype"].removeprefix("torch."), config.weights_dtype
    rule = f"must be {dtype!r}, in which the server at {url!r} computes, or start that with --dtype {mine}"
    require(dtype == mine, "generation.dtype", mine, rule)
    return workers


def _wait_until_up(http: httpx.Client, url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            http.get("/health")
            return
        except httpx.TransportError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"generation.urls: no server answers at {url!r} after {seconds:g} s "
                    f"(generation.heartbeat_timeout): {type(error).__name__} {error}"
                ) from error
        time.sleep(min(1.0, seconds))


def _choices(body: bytes) -> list[dict[str, Any]]:
    """The completions of an answer. What has the usual form becomes arrays, without an object for each token."""
    reading = ReadOptions(use_threads=False, block_size=len(body) + 1)
    parsing = ParseOptions(explicit_schema=_ANSWER, unexpected_field_behavior="ignore")
    try:
        (each,) = read_json(pa.BufferReader(body), reading, parsing)["choices"]
        choices, contents = each.values, pc.struct_field(each.values, ["logprobs", "content"])
        names = ("weight_versions", "token_ids", "routed_experts")
        spans, tokens, routes = (pc.struct_field(choices, name) for name in names)
        plain = zip(*(pc.struct_field(choices, name).to_pylist() for name in ("index", "finish_reason")), strict=True)
        completions = [
            {
                "index": index,
                "finish_reason": reason,
                "weight_versions": spans[i].as_py(),
                "token_ids": tokens[i].values.to_numpy(),  # refuses what is missing
                "logprobs": pc.struct_field(contents[i].values, "logprob").to_numpy(),
                "routed_experts": routes[i].as_py(),
            }
            for i, (index, reason) in enumerate(plain)
        ]
        said = [{"index": c["index"], "reason": c["finish_reason"]} for c in completions]
        said += [span for choice in completions for span in choice["weight_versions"] or []]
        if not any(None in entry.values() for entry in said):
            return completions
    except (pa.ArrowException, ValueError, AttributeError, TypeError):
        pass  # whoever reads it as it is finds what is wrong
    return from_json(body)["choices"]


def _routes(choice: dict[str, Any], shape: RouteShape, tokens: int) -> np.ndarray:
    """(T, L, E), of a sample with so many tokens."""
    text = choice.get("routed_experts")
    if not text:
        raise GeneratorError("a server answered without routes, which router_replay needs; was it started anew?")
    return shape.whole(np.load(BytesIO(base64.b64decode(text)), allow_pickle=False), tokens)


def _sample(prompt: Sequence[int], choice: dict[str, Any], prefix: str, shape: RouteShape | None = None) -> Sample:
    if choice["finish_reason"] == "abort":
        raise ServerGoneError("dropped a request")
    logprobs = choice["logprobs"]
    if not isinstance(logprobs, np.ndarray):
        logprobs = [entry["logprob"] for entry in logprobs["content"]]
    spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []]
    tokens = choice["token_ids"]
    routes_TLE = None if shape is None else _routes(choice, shape, len(prompt) + len(tokens))
    try:
        return to_sample(prompt, tokens, logprobs, spans, choice["finish_reason"], prefix, routes_TLE)
    except OtherWeightsError as error:
        raise ServerGoneError(f"{error}: it was restarted, or somebody else uses it") from error


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300]
