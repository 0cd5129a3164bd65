"""Tiny real parts for tests with the real vLLM: one engine in this process, one HTTP server, both for all tests."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import pytest
import tiny
import torch
from forked import PRELOADED
from serving import SESSIONS, Server
from tiny import PROMPTS, count_letters, tiny_config
from transformers import GPTNeoXForCausalLM

from async_rlhf import OnlineDPOTrainer
from async_rlhf.config import VLLMConfig
from async_rlhf.generation import vllm_engine
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.models.weights import named_weights
from async_rlhf.types import Prompt

SIZES = {"hidden_size": 64, "intermediate_size": 128}
"""vLLM's attention on a CPU needs heads of 32."""
STOPS = (256, *range(40))
"""Enough of the 258 tokens that many completions stop, and many do not."""
BLOCK = 32
LONGEST = 256
"""Positions of the policy that the server is started for; the others have 96."""
BATCHES, SHORT_BATCHES = 40, 5
LONG = {"staleness": 1, "total_episodes": 8 * BATCHES, "learning_rate": 5e-4, "lr_scheduler_type": "constant"}
SHORT = {**LONG, "total_episodes": 8 * SHORT_BATCHES}
STARTED: list[object] = []
"""Engines in this process. They stay: one that goes would take what all of them share along."""
ENVIRONMENT = vllm_engine.environment
PARAMS = SamplingParams(2, 0.7, 12, STOPS, 0, batch_size=64)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that ends a vLLM in this process comes before those that share one: its end would take theirs along."""
    items.sort(key=lambda item: item.get_closest_marker("ends_vllm") is None)


def widen(model: torch.nn.Module) -> torch.nn.Module:
    """Weights wide enough that samples differ."""
    return tiny.widened(model).eval()


def new_policy(seed: int = 0, **changes: int) -> GPTNeoXForCausalLM:
    torch.manual_seed(seed)
    return widen(GPTNeoXForCausalLM(tiny_config(**SIZES | changes)))


def prompts_of(count: int, first: int = 0) -> list[Prompt]:
    """Prompts of different lengths."""
    generator = torch.Generator().manual_seed(first)
    rows = [torch.randint(40, 256, (3 + (5 * i) % 23,), generator=generator).tolist() for i in range(count)]
    return [Prompt(first + i, i, tuple(row)) for i, row in enumerate(rows)]


def sampled(engine, prompts: list[Prompt]) -> list[tuple[tiny.Drawn, ...]]:
    """What it draws for each prompt, in plain numbers."""
    return tiny.all_drawn(engine.generate(prompts))


@torch.no_grad()
def by_transformers(model, prompt: Prompt, tokens, temperature: float) -> torch.Tensor:
    """Log-probability of each token of a completion: one forward pass of its row alone, nothing of this package."""
    logits_TV = model(torch.tensor([[*prompt.tokens, *tokens]])).logits[0, len(prompt.tokens) - 1 : -1]
    logprobs_TV = torch.log_softmax(logits_TV.float() / temperature, dim=-1)
    return logprobs_TV[torch.arange(len(tokens)), torch.tensor(tokens)]


def start_engine(model, params: SamplingParams = PARAMS, max_length: int = 96, **options: object):
    """vLLM in this process, with the model's weights as version 0."""
    from async_rlhf.generation.vllm_engine import VLLMEngine

    vllm = VLLMConfig(**{"kv_cache_gb": 0.05, "block_size": BLOCK, **options})
    spec = ModelSpec(type(model), model.config, torch.float32, "cpu", vllm=vllm, max_length=max_length)
    engine = VLLMEngine(spec, params)
    STARTED.append(engine)
    engine.load(named_weights(model), 0)
    return engine


@pytest.fixture(scope="session")
def only_engine():
    return start_engine(new_policy())


@pytest.fixture
def engine(only_engine):
    """The engine of all tests, as new: with the weights of ``new_policy()`` as version 0."""
    only_engine.params, only_engine.refresh = PARAMS, None
    only_engine.load(named_weights(new_policy()), 0)
    yield only_engine
    only_engine.params, only_engine.refresh = PARAMS, None


def new_args(folder: Path, name: str = "run", generation: dict[str, object] | None = None, **changes: object):
    """As tiny.new_args, for a run with vLLM at staleness 1."""
    generation = {"engine": "vllm", "mismatch_steps": 1, **(generation or {})}  # every batch is compared
    if generation.get("placement") != "server":  # servers have their own
        generation.setdefault("vllm", VLLMConfig(kv_cache_gb=0.05))
    return tiny.new_args(Path(folder), name, generation, **{"staleness": 1, **changes})


@pytest.fixture
def make_args(tmp_path: Path):
    return partial(new_args, tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, tokenizer):
    """The metrics of a long run with one generator process, to compare others with."""
    return run(new_args(tmp_path_factory.mktemp("undisturbed"), **LONG), tokenizer, PROMPTS)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A server for all tests."""
    folder = tmp_path_factory.mktemp("served")
    config = new_policy(max_position_embeddings=LONGEST).config
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(folder)
    server = Server(folder, folder / "log")
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(served):
    """The same, up, whatever an earlier test did to it."""
    served.wait()
    return served


def served_by(server) -> dict[str, object]:
    """Options of generation for a run with the server."""
    return {"placement": "server", "urls": [server.url], "api_key": server.key, "timeout": 300.0}


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_behind():
    """Neither a generator nor a process of vLLM's lives on at the end of all tests."""
    yield
    deadline = time.monotonic() + 10
    while (left := left_behind()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.fixture(scope="session", autouse=True)
def forked():
    """Without a GPU, generator processes and servers are forks of this process's fork server, which has imported vLLM.

    An interpreter takes ten seconds to do so.
    """
    if torch.cuda.is_available():
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_engine.cpu_environment().items():
            patch.setenv(name, value)
        multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, "preloaded"])
        forkserver.ensure_running()
    Server.forks = True
    vllm_engine.environment = lambda _: None  # any process will do


@pytest.fixture
def fresh_interpreters(monkeypatch):
    """Not for this test, though: all as its user has it."""
    monkeypatch.setattr(Server, "forks", False)
    monkeypatch.setattr(vllm_engine, "environment", ENVIRONMENT)


@pytest.fixture(scope="session", autouse=True)
def server_started_early(request, forked, nothing_stays_behind):
    """It is up, after half a minute, by the time that the first test needs it."""
    if any(
        "server" in {*item.fixturenames, *item.keywords} or "[server]" in item.name for item in request.session.items
    ):
        request.getfixturevalue("served")


def left_behind() -> dict[int, str]:
    """What is left of generators and servers that these tests have started; their fork server stays."""
    ours = descendants(os.getpid())
    return {
        pid: words
        for pid, (parent, session, words) in processes().items()
        if session in SESSIONS
        or pid in worker_pids()
        or (pid in ours and ("VLLM" in words or ("api_server" in words and parent != os.getpid())))
    }


def processes() -> dict[int, tuple[int, int, str]]:
    """Parent, session and command line of every living process, by its number."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z":
                found[int(entry.name)] = (int(fields[1]), int(fields[3]), words)
    return found


def descendants(pid: int) -> set[int]:
    """Living processes below a process."""
    parents = {number: parent for number, (parent, _, _) in processes().items()}
    found: set[int] = set()
    while more := {number for number, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


def worker_pids() -> set[int]:
    """Generator processes of this one: started as interpreters of their own, or by its fork server, as servers are."""
    living, own = processes(), descendants(os.getpid())
    return {
        pid
        for pid in own & living.keys()
        if living[pid][1] not in SESSIONS
        and ("spawn_main" in living[pid][2] or "forkserver" in living.get(living[pid][0], (0, 0, ""))[2])
    }


def run(args, tokenizer, prompts, policy=None, reward=count_letters, **options) -> list[dict[str, float]]:
    """Train; the metrics of every batch."""
    policy = policy or new_policy()
    OnlineDPOTrainer(policy, args, prompts, reward_funcs=reward, processing_class=tokenizer, **options).train()
    return metrics_of(args.output_dir)


def metrics_of(folder) -> list[dict[str, float]]:
    """Of each batch, but for times."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/") and k != "eps"} for line in lines]


def same_metrics(ours, theirs) -> bool:
    """Bitwise."""
    for left, right in zip(ours, theirs, strict=True):
        differing = {k: (left.get(k), right.get(k)) for k in {**left, **right} if left.get(k) != right.get(k)}
        assert not differing
    return True
