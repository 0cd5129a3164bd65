"""Fixtures that all tests share, of the parts in tiny.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import PROMPTS, byte_tokenizer, new_args, new_policy, new_reward_model
from transformers import GPTNeoXForCausalLM, GPTNeoXForSequenceClassification, PreTrainedTokenizerFast

from async_rlhf.config import OnlineConfig


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="store the losses of the golden runs anew")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in QUICK:
            item.add_marker("quick")


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads may add in another order than one; bitwise comparisons need the same number everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
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
