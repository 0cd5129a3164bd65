"""What cannot work is refused before anything is trained, with the key, the value, and what would be right."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from conftest import new_policy, prompts_of, run, served_by, start_engine, worker_pids
from ports import free_port
from tiny import PROMPTS

from async_rlhf.config import ConfigError, VLLMConfig

pytestmark = pytest.mark.vllm


@pytest.fixture
def refused(make_args, tokenizer):
    """The message with which a run is refused, which must come quickly; nothing was trained."""

    def message(generation, policy=None, **options) -> str:
        args = make_args(generation=generation, **options)
        started = time.monotonic()
        with pytest.raises(ConfigError) as caught:
            run(args, tokenizer, PROMPTS, policy)
        assert time.monotonic() - started < 10
        return str(caught.value)

    return message


def at(url: str) -> dict[str, object]:
    return {"placement": "server", "urls": [url], "heartbeat_timeout": 1.0}


def test_nothing_listens(refused):
    url = f"http://127.0.0.1:{free_port()}"
    message = refused(at(url))
    assert f"generation.urls: no server answers at {url!r} after 1 s (generation.heartbeat_timeout)" in message


def test_a_server_of_something_else(refused, tmp_path):
    port = free_port()
    words = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    other = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        message = refused({**at(f"http://127.0.0.1:{port}"), "heartbeat_timeout": 20.0})
    finally:
        other.kill()
        other.wait(timeout=10)
    assert f"generation.urls: the server at 'http://127.0.0.1:{port}' is no vLLM server; start it with" in message
    assert "async-rlhf serve --model MODEL" in message


class OldVLLM(BaseHTTPRequestHandler):
    """No vLLM, but what one says that is too old, or runs without VLLM_SERVER_DEV_MODE: it knows no other path."""

    def do_GET(self) -> None:
        known = {"/health": b"", "/version": b'{"version": "0.8.5"}'}
        body = known.get(self.path, b'{"detail":"Not Found"}')
        self.send_response(200 if self.path in known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def old_vllm():
    with HTTPServer(("127.0.0.1", 0), OldVLLM) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=10)


def test_a_vllm_that_cannot_be_given_weights(refused):
    with old_vllm() as url:
        message = refused(at(url))
    assert f"the server at {url!r} runs vLLM 0.8.5 without what the weights need; start it with" in message


def test_another_model_is_served(server, refused):
    message = refused(served_by(server), new_policy(hidden_size=32, intermediate_size=96))
    assert f"generation.urls: got {server.url!r}; it serves a model with" in message
    assert "hidden_size 64 instead of 32, intermediate_size 128 instead of 96" in message
    assert "must be a server of the policy's architecture" in message


def test_the_served_context_is_too_short(server, refused):
    policy = new_policy(max_position_embeddings=512)
    message = refused({**served_by(server), "response_length": 300}, policy)
    assert "it takes at most 256 tokens" in message
    assert "must take max_prompt_length + response_length = 332 (--max-model-len)" in message


def test_no_room_for_keys_and_values(make_args, tokenizer):
    """The number that the message names is enough."""
    args = make_args(generation={"vllm": VLLMConfig(kv_cache_gb=1e-5)})
    with pytest.raises(ConfigError, match=r"^generation.vllm.kv_cache_gb: got 1e-05; must be at least") as caught:
        run(args, tokenizer, PROMPTS)
    assert worker_pids() == set()
    least = float(re.search(r"must be at least ([\d.e-]+), for one sequence of 44 tokens", str(caught.value))[1])
    start_engine(new_policy(), max_length=44, kv_cache_gb=least, block_size=None).generate(prompts_of(2))


@pytest.mark.parametrize("name", ["max_model_len", "skip_tokenizer_init", "dtype", "enable_lora"])
def test_an_option_that_the_run_decides(name):
    with pytest.raises(ConfigError, match=f"options.{name}: got 1; is decided by the run itself"):
        VLLMConfig(options={name: 1})


def test_an_option_that_vllm_does_not_know(make_args, tokenizer):
    generation = {"vllm": VLLMConfig(kv_cache_gb=0.05, options={"no_such_option": 1})}
    with pytest.raises(ConfigError, match=r"generation.vllm.options: got {'no_such_option': 1}; .*no_such_option"):
        run(make_args(generation=generation), tokenizer, PROMPTS)
    assert worker_pids() == set()
