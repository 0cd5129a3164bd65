"""A real vLLM server, and somebody who does not know its key."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
from conftest import descendants, new_policy, run, served_by
from tiny import PROMPTS

from async_rlhf.config import ConfigError
from async_rlhf.generation import server_client
from async_rlhf.generation.server_client import ServerClient

pytestmark = pytest.mark.vllm

OURS = {
    "/collective_rpc",
    "/inference/v1/generate",
    "/pause",
    "/reset_prefix_cache",
    "/resume",
    "/update_weight_version",
    "/weight_info",
}
"""What the package uses."""
UNLISTED = ["/", "/docs", "/openapi.json", "/metrics", "/no/such/path", "/health/", "//health", "/health/../pause"]


def routes(server) -> dict[str, list[str]]:
    """Methods of every path that the server says it has."""
    paths = server.request("GET", "/openapi.json").json()["paths"]
    return {path.replace("{", "").replace("}", ""): [method.upper() for method in paths[path]] for path in paths}


def test_a_stranger_is_told_nothing_but_that_the_server_is_up(server):
    found = routes(server)
    assert found.keys() >= OURS
    assert len(found) > 20
    wrong = server.key[:-1] + ("0" if server.key[-1] != "0" else "1")
    asked = [(method, path) for path, methods in found.items() for method in methods]
    asked += [(method, path) for path in UNLISTED for method in ("GET", "POST", "OPTIONS")]
    answered = {
        f"{method} {path}": answer
        for method, path in asked
        for key in (None, wrong)
        if (answer := server.request(method, path, key).status_code) != 401
    }
    assert answered == {"GET /health": 200}
    for headers in ({"Authorization": server.key}, {"Authorization": f"Basic {server.key}"}, {"X-API-Key": server.key}):
        assert httpx.get(f"{server.url}/weight_info", headers=headers, trust_env=False).status_code == 401
    assert server.request("GET", "/weight_info").status_code == 200


@pytest.mark.rare
def test_the_key_is_neither_in_the_list_of_processes_nor_in_what_the_server_prints(server, fresh_interpreters):
    server.kill()
    server.start()
    server.wait()
    processes = descendants(server.process.pid) | {server.process.pid}
    words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes]
    assert any(b"api_server" in one for one in words)
    assert not any(server.key.encode() in one for one in words)
    assert server.key not in server.log.read_text()
    assert server.key not in Path(f"/proc/{os.getpid()}/cmdline").read_text()


def test_a_run_without_the_key_is_refused_before_it_begins(server, make_args, tokenizer, monkeypatch):
    monkeypatch.delenv("ASYNC_RLHF_API_KEY", raising=False)
    for key, said in ((None, "no key"), ("x" * 32, "another key than its own")):
        args = make_args(generation={**served_by(server), "api_key": key})
        with pytest.raises(ConfigError, match=f"generation.api_key: the server at .* was given {said}") as caught:
            run(args, tokenizer, PROMPTS)
        assert "x" * 32 not in str(caught.value)
    monkeypatch.setenv("ASYNC_RLHF_API_KEY", server.key)
    config = make_args(generation={**served_by(server), "api_key": None}).generation
    assert server_client.check_server(server.url, new_policy().config, config, 44)
    with pytest.raises(
        ConfigError, match=r"router_replay: got True; must be false: the server at .* returns no routes"
    ):
        server_client.check_server(server.url, new_policy().config, config, 44, routes=True)
    assert ServerClient(server.url).url == server.url
