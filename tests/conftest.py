"""Tiny real parts that all tests share: a byte-level tokenizer, a GPT-NeoX of 20,000 parameters, a reward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    PreTrainedTokenizerFast,
)

from async_rlhf.config import ALGORITHM_CONFIGS, GenerationConfig, OnlineConfig

LLAMA_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
"""A tiny model of the Llama family, as its configuration spells it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="store the losses of the golden runs anew")


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads may add in another order than one; bitwise comparisons need the same number everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; <eos> is 256 and <pad> 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"<eos>": 256, "<pad>": 257}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def tiny_config(**changes: int) -> GPTNeoXConfig:
    sizes = {
        "vocab_size": 258,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 96,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "pad_token_id": 257,
    }
    return GPTNeoXConfig(**sizes | changes)


@pytest.fixture
def make_policy() -> Callable[..., GPTNeoXForCausalLM]:
    """A new policy; equal seeds give equal weights, wide enough that samples differ."""

    def make(seed: int = 0) -> GPTNeoXForCausalLM:
        torch.manual_seed(seed)
        model = GPTNeoXForCausalLM(tiny_config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
        return model

    return make


@pytest.fixture
def make_reward_model() -> Callable[..., GPTNeoXForSequenceClassification]:
    def make(seed: int = 1, **changes: int) -> GPTNeoXForSequenceClassification:
        torch.manual_seed(seed)
        config = tiny_config(**changes)
        config.num_labels = 1
        model = GPTNeoXForSequenceClassification(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
        return model.eval()

    return make


def count_letters(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """A reward with few ties: ASCII letters, and a little for length."""
    return [sum(c.isascii() and c.isalpha() for c in text) + 0.01 * len(text) for text in completions]


@pytest.fixture
def prompts() -> list[dict[str, str]]:
    return [{"query": f"def f{i}(x{'y' * (i % 5)}):", "name": f"f{i}"} for i in range(20)]


@pytest.fixture
def make_args(tmp_path: Path) -> Callable[..., OnlineConfig]:
    """A configuration of a run of six small batches; keyword arguments change it."""

    def make(
        name: str = "run",
        generation: dict[str, object] | None = None,
        algorithm: str = "online_dpo",
        **changes: object,
    ) -> OnlineConfig:
        values: dict[str, object] = {
            "output_dir": str(tmp_path / name),
            "staleness": 0,
            "total_episodes": 48,
            "per_device_train_batch_size": 4,
            "num_mini_batches": 2,
            "learning_rate": 1e-3,
            "max_prompt_length": 32,
            "non_eos_penalty": False,
            "progress": False,
            "num_threads": 1,
            "generation": GenerationConfig(**{"response_length": 12, "num_threads": 1, **(generation or {})}),
        }
        return ALGORITHM_CONFIGS[algorithm](**values | changes)

    return make
