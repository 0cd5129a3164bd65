"""Tiny real parts that all tests share: a byte-level tokenizer, a GPT-NeoX of 20,000 parameters, a reward, a run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from async_rlhf.algorithms.table import find
from async_rlhf.config import GenerationConfig, OnlineConfig
from async_rlhf.rewards.functions import call_reward_functions, function_name, numbers
from async_rlhf.types import Prompt, Sample

Model = TypeVar("Model", bound=hf.PreTrainedModel)
THREADS = int(os.environ.get("TEST_THREADS", "1"))
"""Of tests, their runs and the processes that they start: in the environment, so that all have the same number."""
LLAMA_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
"""A tiny model of the Llama family, as its configuration spells it."""
PROMPTS = [{"query": f"def f{i}(x{'y' * (i % 5)}):", "name": f"f{i}"} for i in range(20)]


def rare(*values: object) -> Any:
    """Values of a test's parameters that are for ``make test-rare``."""
    return pytest.param(*values, marks=pytest.mark.rare)


def rare_unless(kept: Callable[[int], bool], cases: Iterable[Sequence[object]]) -> list[Any]:
    """The values of a test's parameters. Those whose number is not kept are breadth, for ``make test-rare``."""
    return [pytest.param(*case) if kept(i) else rare(*case) for i, case in enumerate(cases)]


def is_installed(package: str) -> bool:
    """Whether it can be imported; a folder of tests that is called as the package is has no origin."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def json_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def alive(pid: int) -> bool:
    """Whether the process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def byte_tokenizer() -> hf.PreTrainedTokenizerFast:
    """Every byte is a token; <eos> is 256 and <pad> 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"<eos>": 256, "<pad>": 257}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")


def tiny_config(**changes: int) -> hf.GPTNeoXConfig:
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
    return hf.GPTNeoXConfig(**sizes | changes)


def new_policy(seed: int = 0, **changes: int) -> hf.GPTNeoXForCausalLM:
    """A policy; equal seeds give equal weights, wide enough that samples differ."""
    torch.manual_seed(seed)
    return widened(hf.GPTNeoXForCausalLM(tiny_config(**changes)))


def new_reward_model(seed: int = 1, **changes: int) -> hf.GPTNeoXForSequenceClassification:
    torch.manual_seed(seed)
    config = tiny_config(**{"num_labels": 1, **changes})
    return widened(hf.GPTNeoXForSequenceClassification(config)).eval()


def widened(model: Model) -> Model:
    """With weights so wide that samples differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def mixture(kind: str, seed: int = 0, layers: int = 2, experts: int = 4) -> hf.PreTrainedModel:
    """A tiny mixture of experts, two for each token: "mixtral", "qwen3_moe", or "qwen3_moe_plain", whose weights of a
    token's experts do not add up to 1.
    """
    torch.manual_seed(seed)
    sizes = {**LLAMA_SIZES, "num_hidden_layers": layers, "vocab_size": 258, "num_experts_per_tok": 2}
    sizes |= {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
    if kind == "mixtral":
        return widened(hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, num_local_experts=experts))).eval()
    sizes |= {"num_experts": experts, "moe_intermediate_size": 48, "head_dim": 8}
    config = hf.Qwen3MoeConfig(**sizes, norm_topk_prob=kind == "qwen3_moe")
    return widened(hf.Qwen3MoeForCausalLM(config)).eval()


class After(hf.TrainerCallback):
    """Does something once, after a batch."""

    def __init__(self, batch: int, action: Callable[[], object]) -> None:
        self.batch, self.action = batch, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.batch:
            self.action()


class StopAfter(hf.TrainerCallback):
    """SIGTERM in the middle of a batch, as a scheduler sends it."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.batch - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Drawn(NamedTuple):
    """What the policy drew of a sample, in plain numbers."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str


def drawn(sample: Sample) -> Drawn:
    arrays = (sample.tokens, sample.logprobs, sample.versions)
    return Drawn(*(tuple(array[sample.sampled].tolist()) for array in arrays), sample.finish_reason)


def all_drawn(completions: Sequence[Sequence[Sample]]) -> list[tuple[Drawn, ...]]:
    return [tuple(map(drawn, samples)) for samples in completions]


def answered(prompts: Sequence[Prompt], completions: Sequence[Sequence[Drawn]]) -> list[tuple[Sample, ...]]:
    """The other way round."""
    pairs = zip(prompts, completions, strict=True)
    return [tuple(Sample.answer(prompt.tokens, *one) for one in group) for prompt, group in pairs]


def count_letters(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """A reward with few ties: ASCII letters, and a little for length."""
    return [sum(c.isascii() and c.isalpha() for c in text) + 0.01 * len(text) for text in completions]


def new_args(
    folder: Path,
    name: str = "run",
    generation: dict[str, object] | None = None,
    algorithm: str = "online_dpo",
    **changes: object,
) -> OnlineConfig:
    """A configuration of a run of six small batches; keyword arguments change it."""
    values: dict[str, object] = {
        "output_dir": str(folder / name),
        "staleness": 0,
        "total_episodes": 48,
        "per_device_train_batch_size": 4,
        "num_mini_batches": 2,
        "learning_rate": 1e-3,
        "max_prompt_length": 32,
        "non_eos_penalty": False,
        "progress": False,
        "num_threads": THREADS,
        "save_steps": 0,
        "generation": GenerationConfig(**{"response_length": 12, "num_threads": THREADS, **(generation or {})}),
    }
    return find(algorithm).config(**values | changes)


def call_reward_function(function, prompts, completions, columns) -> list[float]:
    """The rewards of one function, one finite number for each completion."""
    name = function_name(function)
    rewards = call_reward_functions({name: function}, prompts, completions, columns)[0][name]
    return numbers(rewards, prompts, completions)
