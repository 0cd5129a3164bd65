"""A real vLLM server, as ``async-rlhf serve`` starts it, that tests may kill and start again on the same port."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from types import MappingProxyType

import httpx
from forked import fork_the_fork_server, start_forked
from ports import free_port

from async_rlhf import cli

SECONDS = 240.0
"""Within which a server is up. Two slow cores, busy with something else, take one."""
CPU_OPTIONS = MappingProxyType({"dtype": "float32", "kv_cache_gb": 0.05, "num_threads": 1})
SESSIONS: set[int] = set()
"""Of all servers that were ever started."""


class Server:
    """One server.

    Args:
        model: folder with config.json.
        log: file for what it prints.
        options: of the command, in place of those for a CPU.
        environment: variables for it alone.
        key: that callers must have; by default one of its own.
    """

    forks = False
    """Whether it is a fork of this process's fork server, which has imported vLLM, and no interpreter of its own."""

    def __init__(
        self,
        model: Path,
        log: Path,
        options: Mapping[str, object] = CPU_OPTIONS,
        environment: Mapping[str, str] = MappingProxyType({}),
        key: str | None = None,
    ) -> None:
        self.model, self.log, self.port = model, log, free_port()
        self.options, self.environment = options, environment
        self.key = key or secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Returns at once."""
        options = {"model": self.model, "port": self.port, **self.options}
        words = [f"--{name}={value}" for name, value in options.items()]
        # An engine in this process sets variables of vLLM's, which are not for a server.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        environment |= {"ASYNC_RLHF_API_KEY": self.key, **self.environment}
        if self.forks:
            self.process = start_forked(be_server, words, environment, log=self.log)
        else:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "async_rlhf.cli", "serve", *words],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        SESSIONS.add(self.process.pid)

    def wait(self, seconds: float = SECONDS) -> None:
        """Until it answers."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).is_success:
                    return
            printed = self.log.read_text()[-3000:]
            assert self.process.poll() is None, printed
            assert time.monotonic() < deadline, printed
            time.sleep(0.3)

    def kill(self) -> None:
        """With all its processes, which have no time to say good-bye."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)

    def post(self, path: str, **options: object) -> object:
        answer = self.request("POST", path, **options)
        answer.raise_for_status()
        return answer.json()

    def request(self, method: str, path: str, key: str | None = "", **options: object) -> httpx.Response:
        """With the server's key, unless another is given, or None."""
        headers = {} if key is None else {"Authorization": f"Bearer {key or self.key}"}
        return httpx.request(method, f"{self.url}{path}", timeout=60.0, trust_env=False, headers=headers, **options)


def be_server(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """In the fork: the command, which puts vLLM's server in its own place."""
    sys.argv, os.execve = ["async-rlhf", "serve", *words], be_its_server
    set_environment(environment)
    sys.exit(cli.main())


def be_its_server(_: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
    """As an interpreter that runs the module; the process of the engine is a fork of this one, too."""
    set_environment(environment)
    fork_the_fork_server()
    forkserver.ensure_running()
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("forkserver" if method == "spawn" else method)
    _, option, name, *rest = words
    assert option == "-m"
    sys.argv = [name, *rest]
    runpy.run_module(name, run_name="__main__")
    sys.exit()


def set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
